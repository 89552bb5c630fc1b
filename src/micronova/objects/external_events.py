"""Names of the events that a network service sends to compute about a server's ports (os-server-external-events)."""

from typing import Final, Literal

PortEvent = Literal["network-changed", "network-vif-plugged", "network-vif-unplugged", "network-vif-deleted"]

CHANGED: Final = "network-changed"
PLUGGED: Final = "network-vif-plugged"
UNPLUGGED: Final = "network-vif-unplugged"
DELETED: Final = "network-vif-deleted"
