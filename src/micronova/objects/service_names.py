"""The names of the services that send heartbeats, as Nova names its processes."""

from typing import Final

COMPUTE: Final = "nova-compute"
CONDUCTOR: Final = "nova-conductor"
SCHEDULER: Final = "nova-scheduler"
