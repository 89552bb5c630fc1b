"""How everything that a cloud makes in the kernel is named: by the cloud's id, then by the id of what it is for.

Each cloud has a namespace of its own (`mn-1a2b3c4d`) in which its bridges and the taps of its guests live, one per
network (`…-n-…`, where DHCP and metadata are served) and one per router (`…-r-…`). So two clouds with the same
addresses run side by side, and what a cloud has made is found by its prefix.
"""

import uuid

METADATA_ADDRESS = "169.254.169.254"


def prefix_of(cloud_id: str) -> str:
    """Return the prefix of a cloud's names, which is also the name of the namespace of its bridges."""
    return f"mn-{uuid.UUID(cloud_id).hex[:8]}"


def network_namespace(prefix: str, network_id: str) -> str:
    """Return the namespace that serves a network."""
    return f"{prefix}-n-{network_id[:11]}"


def router_namespace(prefix: str, router_id: str) -> str:
    """Return the namespace that is a router."""
    return f"{prefix}-r-{router_id[:11]}"


def bridge_name(network_id: str) -> str:
    """Return the name of a network's bridge."""
    return f"brq{network_id[:11]}"


def tap_name(port_id: str) -> str:
    """Return the name of the host's end of a guest's interface."""
    return f"tap{port_id[:11]}"


def outer_name(port_id: str) -> str:
    """Return the name of the end on the bridge of a port that a namespace has."""
    return f"vth{port_id[:11]}"


def inner_name(port_id: str) -> str:
    """Return the name of a port's end within its namespace."""
    return f"dev{port_id[:11]}"
