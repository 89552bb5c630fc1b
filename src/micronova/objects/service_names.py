"""The names of the services that send heartbeats, as Nova names its processes."""

from typing import Final

COMPUTE: Final = "nova-compute"
CONDUCTOR: Final = "nova-conductor"
SCHEDULER: Final = "nova-scheduler"

SERVICE_VERSION: Final = 2
"""The number of this release in the rows of services, by which processes of other releases are told apart. Each release
that differs raises it; 0.1 has 1."""
