"""The device owners that the network service sets: of its own ports, and of subports. Servers' have `compute:ZONE`."""

DHCP = "network:dhcp"
FLOATING_IP = "network:floatingip"
ROUTER_GATEWAY = "network:router_gateway"
ROUTER_INTERFACE = "network:router_interface"

SERVICE = "network:"  # the prefix of the owners of the service's own ports

SUBPORT = "trunk:subport"  # of ports that guests have in VLANs; it is a guest's port


def is_service(owner: str) -> bool:
    """Return whether a port with this owner belongs to the network service itself, not to a guest."""
    return owner.startswith(SERVICE)
