"""The device owners of ports that belong to the network service itself; servers' ports have `compute:ZONE`."""

DHCP = "network:dhcp"
FLOATING_IP = "network:floatingip"
ROUTER_GATEWAY = "network:router_gateway"
ROUTER_INTERFACE = "network:router_interface"
SUBPORT = "trunk:subport"  # of ports that guests have in VLANs; it is a guest's port

SERVICE = "network:"  # the prefix of all of them


def is_service(owner: str) -> bool:
    """Return whether a port with this owner belongs to the network service itself, not to a guest."""
    return owner.startswith(SERVICE)
