"""The desired state of one host, as the network service describes it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from micronova.embedded.network import device_owners
from micronova.embedded.network.ipv6 import uses_slaac
from micronova.embedded.network.topics import PartKind, kind_and_id


class FixedIP(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a port."""

    subnet_id: str
    ip_address: str


class AddressPair(msgspec.Struct, frozen=True, kw_only=True):
    """A further address, or range, that a port may send from."""

    ip_address: str
    mac_address: str = ""


class ExtraOption(msgspec.Struct, frozen=True, kw_only=True):
    """A DHCP option of a port."""

    opt_name: str
    opt_value: str | None = None
    ip_version: int = 4


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth limit of a port in one direction, in kilobits per second, and its burst in kilobits."""

    max_kbps: int
    max_burst_kbps: int = 0


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port that is bound to the host, or belongs to a router on the host."""

    id: str
    network_id: str
    mac_address: str
    project_id: str = ""
    status: str = "DOWN"
    admin_state_up: bool = True
    device_id: str = ""
    device_owner: str = ""
    host: str = ""
    port_security_enabled: bool = True
    fixed_ips: tuple[FixedIP, ...] = ()
    security_groups: tuple[str, ...] = ()
    stateful: bool = True  # one of its security groups is stateful
    ingress: Limit | None = None  # limit of what it receives
    egress: Limit | None = None  # limit of what it sends
    dscp_mark: int | None = None  # of what it sends
    allowed_address_pairs: tuple[AddressPair, ...] = ()
    extra_dhcp_opts: tuple[ExtraOption, ...] = ()
    dns_name: str = ""
    parent: str | None = None  # of a subport: the parent port of its trunk, at whose interface the guest has it
    vlan: int | None = None  # of a subport: its VLAN at that interface

    @property
    def is_guest(self) -> bool:
        """Whether it belongs to a guest, which has a tap."""
        return not device_owners.is_service(self.device_owner)


class HostRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route of a subnet or of a router."""

    destination: str
    nexthop: str


class Subnet(msgspec.Struct, frozen=True, kw_only=True):
    """A range of addresses of a network."""

    id: str
    cidr: str
    ip_version: int = 4
    gateway_ip: str | None = None
    enable_dhcp: bool = True
    ipv6_ra_mode: str | None = None
    ipv6_address_mode: str | None = None
    dns_nameservers: tuple[str, ...] = ()
    host_routes: tuple[HostRoute, ...] = ()
    routed: bool = False  # a router has an interface on it
    address_scope: str | None = None

    @property
    def uses_slaac(self) -> bool:
        """Whether guests derive their addresses from the prefix themselves."""
        return uses_slaac(self.ipv6_ra_mode, self.ipv6_address_mode)


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A network that has ports on the host."""

    id: str
    mtu: int = 1500
    external: bool = False
    dns_domain: str = ""
    admin_state_up: bool = True
    subnets: tuple[Subnet, ...] = ()


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of a security group; protocols are numbers."""

    direction: str
    ethertype: str
    protocol: int | None = None
    port_range_min: int | None = None
    port_range_max: int | None = None
    remote_ip_prefix: str | None = None
    remote_group_id: str | None = None


class FloatingIP(msgspec.Struct, frozen=True, kw_only=True):
    """A floating IP of a router."""

    floating: str
    fixed: str


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """A router on the host."""

    id: str
    admin_state_up: bool = True
    gateway_port: str | None = None
    enable_snat: bool = True
    routes: tuple[HostRoute, ...] = ()
    ports: tuple[str, ...] = ()
    floating: tuple[FloatingIP, ...] = ()


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of one host."""

    networks: tuple[Network, ...] = ()
    ports: tuple[Port, ...] = ()
    rules: dict[str, tuple[Rule, ...]] = {}  # by security group
    members: dict[str, tuple[str, ...]] = {}  # addresses, by security group that a rule names as remote
    oversized: dict[str, int] = {}  # such groups with too many addresses for a host's firewall, and their number
    routers: tuple[Router, ...] = ()


def state_of_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a desired state, as JSON has it, from its parts by topic (`state_parts.py` says what is in them)."""
    by_kind: dict[str, dict[str, Any]] = {}
    for name in sorted(parts):
        kind, id = kind_and_id(name)
        if parts[name] is not None:
            by_kind.setdefault(kind, {})[id] = parts[name]
    hosts, networks, groups, members, policies, routers = (
        by_kind.get(kind, {})
        for kind in (
            PartKind.HOST,
            PartKind.NETWORK,
            PartKind.RULES,
            PartKind.MEMBERS,
            PartKind.QOS_POLICY,
            PartKind.ROUTER,
        )
    )
    oversized = by_kind.get(PartKind.OVERSIZED, {}).get("", {})
    held = {port["id"]: port for each in (*routers.values(), *hosts.values()) for port in each["ports"]}
    return {
        "networks": list(networks.values()),
        # A port whose network is gone is being deleted, too.
        "ports": [
            {**port, **_limits(port, networks[port["network_id"]], policies), "stateful": _is_stateful(port, groups)}
            for _, port in sorted(held.items())
            if port["network_id"] in networks
        ],
        "rules": {id: group["rules"] for id, group in groups.items()},
        "members": {
            id: members.get(id, [])
            for id in sorted({rule["remote_group_id"] for group in groups.values() for rule in group["rules"]} - {None})
            if id not in oversized
        },
        "oversized": oversized,
        "routers": [each["router"] for each in routers.values()],
    }


def _limits(port: Mapping[str, Any], network: Mapping[str, Any], policies: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return bandwidth limits and DSCP mark of a guest's port: those of its own policy, or else of its network's."""
    if device_owners.is_service(port["device_owner"]):
        return {}
    found: Mapping[str, Any] = policies.get(port["qos_policy_id"] or network["qos_policy_id"], {})
    return found


def _is_stateful(port: Mapping[str, Any], groups: Mapping[str, Any]) -> bool:
    own = port["security_groups"]
    return not own or any(id not in groups or groups[id]["stateful"] for id in own)
