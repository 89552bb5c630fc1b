"""The device owners of ports that belong to the network service itself; servers' ports have `compute:ZONE`."""

DHCP = "network:dhcp"
FLOATING_IP = "network:floatingip"
ROUTER_GATEWAY = "network:router_gateway"
ROUTER_INTERFACE = "network:router_interface"
