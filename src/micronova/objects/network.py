"""What a server knows of its network interfaces."""

from typing import Any

import msgspec


def tap_name(port_id: str) -> str:
    """Name the host's end of an interface; the network's agent knows it by the same rule."""
    return f"tap{port_id[:11]}"


class NetworkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One interface that the user asked for at create."""

    network_id: str | None = None
    port_id: str | None = None
    fixed_ip: str | None = None
    tag: str | None = None


class FixedIP(msgspec.Struct, frozen=True, kw_only=True):
    """An address of an interface."""

    address: str
    version: int = 4
    subnet_id: str | None = None
    floating: tuple[str, ...] = ()


class VIF(msgspec.Struct, frozen=True, kw_only=True):
    """One interface of a server, ready to be plugged; cached with the instance for the addresses shown to users."""

    port_id: str
    network_id: str
    network_label: str
    mac_address: str
    fixed_ips: tuple[FixedIP, ...] = ()
    vif_type: str = "unbound"
    vnic_type: str = "normal"
    status: str = "DOWN"
    mtu: int | None = None
    tag: str | None = None
    preserve_on_delete: bool = False  # the user's own port: unbound, not deleted, when the server goes
    details: dict[str, Any] = {}
    subnets: tuple[dict[str, Any], ...] = ()
