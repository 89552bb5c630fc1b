"""The network interfaces of servers: requested, planned, and bound."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from micronova.objects.port_resources import PortResources


def tap_name(port_id: str) -> str:
    """Return the name of the tap device of an interface; the network agent derives it from the port in the same way."""
    return f"tap{port_id[:11]}"


class NetworkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An interface as the user requests it."""

    network_id: str | None = None
    port_id: str | None = None
    fixed_ip: str | None = None
    tag: str | None = None


RequestedNetworks = list[NetworkRequest] | Literal["auto", "none"] | None
"""What a user requests: interfaces, "auto", "none", or None if the request does not say."""


class PlannedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port that the server will have: the user's own, or one that compute creates."""

    network_id: str
    port_id: str | None = None  # the user's own port
    fixed_ip: str | None = None
    tag: str | None = None
    security_groups: tuple[str, ...] | None = None  # ids; None: the project's default security group
    resources: PortResources | None = None  # what the user's own port asks for besides


PlannedPorts = list[PlannedPort] | Literal["auto", "none"]
"""The ports of a server, stored with its request spec. "auto": a network is created when the ports are allocated."""


class NetworkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the network client made of a request after it checked the request with the user's token."""

    ports: PlannedPorts
    security_groups: tuple[str, ...] = ()  # names, as the API shows them
    max_servers: int | None = None  # how many such servers the port quota allows; None: no limit


class FixedIP(msgspec.Struct, frozen=True, kw_only=True):
    """An address of an interface."""

    address: str
    version: int = 4
    subnet_id: str | None = None
    floating: tuple[str, ...] = ()


class VIF(msgspec.Struct, frozen=True, kw_only=True):
    """One interface of a server; stored with the instance for the addresses that users see."""

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
    preserve_on_delete: bool = False  # the user's own port: it is unbound, not deleted, with the server
    details: dict[str, Any] = {}
    subnets: tuple[dict[str, Any], ...] = ()


class NetworkAgent(NamedTuple):
    """A network agent of Micronova, as the network service knows it."""

    host: str
    alive: bool
    faults: tuple[str, ...] = ()  # what it cannot do, in its own words


def unplugged(vifs: Iterable[VIF]) -> list[str]:
    """Return the ports of interfaces that the network service has not plugged yet."""
    return [vif.port_id for vif in vifs if vif.status != "ACTIVE"]
