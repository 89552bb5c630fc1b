"""Names of namespaces and devices, derived from the ids of the cloud and of the network, router or port; numbers, too.

Each cloud has a namespace (`mn-1a2b3c4d`) with its bridges and the taps of its guests, one namespace per network
(`…-n-…`, where DHCP and metadata are served) and one per router (`…-r-…`). So two clouds with the same addresses run
side by side, and everything of a cloud is found by its prefix.
"""

import uuid
import zlib
from collections.abc import Iterable

METADATA_ADDRESS = "169.254.169.254"

MADE_BY_HELPER = ("brq", "vth", "ifb", "vlp")
"""The prefixes of devices in a cloud's namespace that the privileged helper makes and deletes."""

IN_CLOUD_NAMESPACE = (*MADE_BY_HELPER, "tap")
"""The prefixes of all devices of a cloud in its namespace; taps belong to QEMU."""


def prefix_of(cloud_id: str) -> str:
    """Return the prefix of a cloud's names, which is also the name of the namespace with its bridges."""
    return f"mn-{uuid.UUID(cloud_id).hex[:8]}"


def network_namespace(prefix: str, network_id: str) -> str:
    """Return the namespace in which a network's DHCP and metadata are served."""
    return f"{prefix}-n-{network_id[:11]}"


def router_namespace(prefix: str, router_id: str) -> str:
    """Return the namespace of a router."""
    return f"{prefix}-r-{router_id[:11]}"


def bridge_name(network_id: str) -> str:
    """Return the name of a network's bridge."""
    return f"brq{network_id[:11]}"


def tap_name(port_id: str) -> str:
    """Return the name of a guest's tap device."""
    return f"tap{port_id[:11]}"


def outer_name(port_id: str) -> str:
    """Return the name of a veth pair's end on the bridge, for a port in a namespace."""
    return f"vth{port_id[:11]}"


def inner_name(port_id: str) -> str:
    """Return the name of a veth pair's end inside the namespace."""
    return f"dev{port_id[:11]}"


def ifb_name(tap: str) -> str:
    """Return the name of the device at which what a tap's guest sends is limited."""
    return f"ifb{tap[3:]}"


def trunk_end_name(tap: str) -> str:
    """Return the name of the end at the trunk of the veth pair that stands for a subport's tap."""
    return f"vlp{tap[3:]}"


def numbers_of(names: Iterable[str], most: int) -> dict[str, int]:
    """Return a number from 1 to `most` per name.

    It is derived from the name, so that neither a restart nor other names change it, unless two names have the same.
    """
    taken: dict[int, str] = {}
    for name in sorted(names):
        number = zlib.crc32(name.encode()) % most + 1
        while number in taken:
            number = number % most + 1
        taken[number] = name
    return {name: number for number, name in taken.items()}
