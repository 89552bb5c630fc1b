"""The desired states of hosts, in parts that hosts share.

A part is named by the topic that notes its changes (`topics.py`). The state of a host is the part `host:NAME` with all
parts that it refers to, directly or by others: its networks, the rules of its security groups, the members of the
groups that these rules name as remote, QoS policies, and routers. So a change is read once for all hosts that it
concerns. `agent/desired_state.py` puts the parts together again.
"""

import ipaddress
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from micronova.db.listed import one_of
from micronova.embedded.common.chunks import chunks
from micronova.embedded.network.addresses import addresses_of
from micronova.embedded.network.port_rows import groups_of
from micronova.embedded.network.router_placement import router_host
from micronova.embedded.network.security_group_rules import PROTOCOLS
from micronova.embedded.network.tables import (
    addresses,
    bandwidth_limit_rules,
    dscp_marking_rules,
    floatingips,
    networks,
    port_security_groups,
    ports,
    router_interfaces,
    routers,
    security_group_rules,
    security_groups,
    subnetpools,
    subnets,
    subports,
    trunks,
)
from micronova.embedded.network.topics import (
    ROUTERS_TOPIC,
    PartKind,
    kind_and_id,
    members_topic,
    network_topic,
    qos_policy_topic,
    router_topic,
    rules_topic,
    topic,
)

MAX_MEMBERS = 5_000  # addresses of a security group that rules name as remote
MAX_HOST_MEMBERS = 40_000  # addresses of all these security groups, in the desired state of one host


class Part(NamedTuple):
    """A part of the desired states of hosts."""

    content: Any  # None if there is nothing of that name, or a group has too many members
    refers_to: tuple[str, ...] = ()  # parts that the states with this part have, too
    depends_on: tuple[str, ...] = ()  # further topics that the content depends on
    size: int = 0  # addresses of a security group; one more than there may be if it has too many


def read_parts(conn: sa.Connection, names: Iterable[str]) -> dict[str, Part]:
    """Return the parts with these names."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        kind, id = kind_and_id(name)
        by_kind.setdefault(kind, []).append(id)
    found: dict[str, Part] = {}
    for kind, ids in by_kind.items():
        for part in chunks(ids) if kind != PartKind.ROUTERS else [ids]:
            read = _READERS[kind](conn, part)
            found |= {topic(kind, id): read.get(id, Part(None)) for id in part}
    return found


def too_large(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the security groups that the state of a host leaves out, and their numbers of addresses.

    Members of a project choose address pairs freely, and the host's firewall is one for all projects. So a group with
    more than `MAX_MEMBERS` addresses is left out, and then the largest ones until `MAX_HOST_MEMBERS` are left.
    """
    found: dict[str, int] = {}
    total = sum(sizes.values())
    for id, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        if size <= MAX_MEMBERS and total <= MAX_HOST_MEMBERS:
            break
        found[id] = size
        total -= size
    return found


# --- ports ---

_PORT_COLUMNS = (
    "id", "network_id", "project_id", "mac_address", "status", "admin_state_up", "device_id", "device_owner", "host",
    "port_security_enabled", "allowed_address_pairs", "extra_dhcp_opts", "dns_name", "qos_policy_id",
)  # fmt: skip
_PORTS = sa.select(*(ports.c[name] for name in _PORT_COLUMNS)).order_by(ports.c.id)
_PORTS_OF_HOSTS = _PORTS.where(one_of(ports.c.host, "hosts"), ports.c.vif_type != "binding_failed")
_PORTS_BY_ID = _PORTS.where(one_of(ports.c.id, "ids"))


def _hosts(conn: sa.Connection, names: Sequence[str]) -> dict[str, Part]:
    """Return the ports that are bound to hosts."""
    of_host: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for port in _shown(conn, conn.execute(_PORTS_OF_HOSTS, {"hosts": names}).all()):
        of_host[port["host"]].append(port)
    routing = router_host(conn)
    return {
        name: Part(
            {"ports": held},
            _distinct(
                *(network_topic(port["network_id"]) for port in held),
                *(rules_topic(group) for port in held for group in port["security_groups"]),
                *(qos_policy_topic(port["qos_policy_id"]) for port in held if port["qos_policy_id"]),
                *([ROUTERS_TOPIC] if name == routing else ()),
            ),
        )
        for name, held in of_host.items()
    }


def _shown(conn: sa.Connection, rows: Sequence[Any]) -> list[dict[str, Any]]:
    ids = [row.id for row in rows]
    fixed, groups, vlans = addresses_of(conn, ids), groups_of(conn, ids), _vlans(conn, ids)
    return [
        {
            **{name: getattr(row, name) for name in _PORT_COLUMNS},
            "fixed_ips": sorted(fixed.get(row.id, ()), key=lambda each: (each["subnet_id"], each["ip_address"])),
            "security_groups": sorted(groups.get(row.id, ())),
            "parent": vlans[row.id].parent if row.id in vlans else None,
            "vlan": vlans[row.id].segmentation_id if row.id in vlans else None,
        }
        for row in rows
    ]


_VLANS = (
    sa.select(subports.c.port_id, subports.c.segmentation_id, trunks.c.port_id.label("parent"))
    .join(trunks, trunks.c.id == subports.c.trunk_id)
    .where(one_of(subports.c.port_id, "ids"))
)


def _vlans(conn: sa.Connection, ids: Sequence[str]) -> dict[str, Any]:
    """Return the VLANs of subports, and the ports at which guests have them."""
    return {row.port_id: row for part in chunks(ids) for row in conn.execute(_VLANS, {"ids": part})}


def _distinct(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


# --- networks and QoS policies ---

_NETWORK = ("id", "mtu", "external", "dns_domain", "admin_state_up", "qos_policy_id")
_SUBNET = (
    "id", "ip_version", "cidr", "gateway_ip", "enable_dhcp", "ipv6_ra_mode", "ipv6_address_mode", "dns_nameservers",
    "host_routes",
)  # fmt: skip
_NETWORKS = sa.select(*(networks.c[name] for name in _NETWORK)).where(one_of(networks.c.id, "ids"))
_SUBNETS = (
    sa.select(subnets.c.network_id, subnets.c.subnetpool_id, *(subnets.c[name] for name in _SUBNET))
    .where(one_of(subnets.c.network_id, "ids"))
    .order_by(subnets.c.id)
)
_SCOPES = sa.select(subnetpools.c.id, subnetpools.c.address_scope_id).where(one_of(subnetpools.c.id, "ids"))
_ROUTED = sa.select(router_interfaces.c.subnet_id).where(one_of(router_interfaces.c.subnet_id, "ids"))
_LIMITS = sa.select(bandwidth_limit_rules).where(one_of(bandwidth_limit_rules.c.policy_id, "ids"))
_MARKS = sa.select(dscp_marking_rules).where(one_of(dscp_marking_rules.c.policy_id, "ids"))


def _networks(conn: sa.Connection, ids: Sequence[str]) -> dict[str, Part]:
    """Return networks with their subnets."""
    below: dict[str, list[dict[str, Any]]] = {}
    rows = conn.execute(_SUBNETS, {"ids": ids}).all()
    routed = set(conn.execute(_ROUTED, {"ids": [row.id for row in rows]}).scalars()) if rows else set()
    pools = sorted({row.subnetpool_id for row in rows if row.subnetpool_id})
    scopes = {row.id: row.address_scope_id for row in conn.execute(_SCOPES, {"ids": pools})} if pools else {}
    for row in rows:
        shown = {name: getattr(row, name) for name in _SUBNET}
        shown |= {"routed": row.id in routed, "address_scope": scopes.get(row.subnetpool_id)}
        below.setdefault(row.network_id, []).append(shown)
    return {
        row.id: Part(
            {**row._mapping, "subnets": below.get(row.id, [])},
            (qos_policy_topic(row.qos_policy_id),) if row.qos_policy_id else (),
        )
        for row in conn.execute(_NETWORKS, {"ids": ids})
    }


def _qos_policies(conn: sa.Connection, ids: Sequence[str]) -> dict[str, Part]:
    """Return the bandwidth limits of QoS policies, by direction, and their DSCP marks."""
    limits: dict[str, dict[str, Any]] = {id: {} for id in ids}
    for row in conn.execute(_LIMITS, {"ids": ids}):
        limits[row.policy_id][row.direction] = {"max_kbps": row.max_kbps, "max_burst_kbps": row.max_burst_kbps}
    for row in conn.execute(_MARKS, {"ids": ids}):
        limits[row.policy_id]["dscp_mark"] = row.dscp_mark
    return {id: Part(each) for id, each in limits.items()}


# --- security groups ---

_RULE = (
    "direction", "ethertype", "port_range_min", "port_range_max", "remote_ip_prefix", "remote_group_id",
)  # fmt: skip
_GROUPS = sa.select(security_groups.c.id, security_groups.c.stateful).where(one_of(security_groups.c.id, "ids"))
_RULES = (
    sa.select(security_group_rules)
    .where(one_of(security_group_rules.c.security_group_id, "ids"))
    .order_by(security_group_rules.c.id)
)


def _rules(conn: sa.Connection, ids: Sequence[str]) -> dict[str, Part]:
    """Return the rules of security groups."""
    rules: dict[str, list[dict[str, Any]]] = {id: [] for id in ids}
    for row in conn.execute(_RULES, {"ids": ids}):
        shown = {name: getattr(row, name) for name in _RULE}
        rules[row.security_group_id].append({**shown, "protocol": _number(row.protocol, row.ethertype)})
    return {
        row.id: Part(
            {"stateful": row.stateful, "rules": rules[row.id]},
            _distinct(*(members_topic(each["remote_group_id"]) for each in rules[row.id] if each["remote_group_id"])),
        )
        for row in conn.execute(_GROUPS, {"ids": ids})
    }


def _number(protocol: str | None, ethertype: str) -> int | None:
    if protocol is None:
        return None
    number = int(protocol) if protocol.isdecimal() else PROTOCOLS.get(protocol)
    return 58 if number == 1 and ethertype == "IPv6" else number  # icmp in an IPv6 rule means ICMPv6


# Each of these finds its rows by ids, and by few of them: of more, and of a join with the ports of some groups,
# PostgreSQL expects so many rows that it would read whole tables.
_AT_ONCE = 100
_MEMBERSHIP = sa.select(port_security_groups).where(one_of(port_security_groups.c.security_group_id, "ids"))
_ADDRESSES = sa.select(addresses.c.port_id, addresses.c.address).where(one_of(addresses.c.port_id, "ids"))
_PAIRS = sa.select(ports.c.id, ports.c.network_id, ports.c.allowed_address_pairs).where(
    one_of(ports.c.id, "ids"), ports.c.allowed_address_pairs != sa.literal([], ports.c.allowed_address_pairs.type)
)
_CIDRS = sa.select(subnets.c.network_id, subnets.c.ip_version, subnets.c.cidr).where(
    one_of(subnets.c.network_id, "ids")
)


def _members(conn: sa.Connection, ids: Sequence[str]) -> dict[str, Part]:
    """Return the addresses of security groups; those of networks whose subnets decide about pairs depend on these.

    The ports of a group are read until it has too many addresses: such a group has no content, however many follow.
    """
    groups_of_port: dict[str, list[str]] = {}
    ports_of: dict[str, list[str]] = {id: [] for id in ids}
    for row in conn.execute(_MEMBERSHIP, {"ids": ids}):
        ports_of[row.security_group_id].append(row.port_id)
        groups_of_port.setdefault(row.port_id, []).append(row.security_group_id)
    found: dict[str, set[str]] = {id: set() for id in ids}
    deciding: dict[str, set[str]] = {id: set() for id in ids}
    widest: dict[str, dict[int, int]] = {}
    unread = _unread(ports_of, found)
    while part := list(itertools.islice(unread, _AT_ONCE)):
        held: dict[str, list[str]] = {}
        for row in conn.execute(_ADDRESSES, {"ids": part}):
            held.setdefault(row.port_id, []).append(row.address)
        for row in (paired := conn.execute(_PAIRS, {"ids": part}).all()):
            if any("/" in text for text in _texts(row)):
                for group in groups_of_port[row.id]:
                    deciding[group].add(row.network_id)
        new = sorted(set().union(*deciding.values()) - widest.keys())
        widest |= {**{id: {} for id in new}, **_widest_subnets(conn, new)}
        for row in paired:
            if row.id in held:
                held[row.id] += [text for text in _texts(row) if _is_narrow(text, widest.get(row.network_id, {}))]
        for port, texts in held.items():
            for group in groups_of_port[port]:
                found[group].update(texts)
    return {
        id: Part(
            sorted(texts) if len(texts) <= MAX_MEMBERS else None,
            depends_on=tuple(network_topic(each) for each in sorted(deciding[id])),
            size=min(len(texts), MAX_MEMBERS + 1),
        )
        for id, texts in found.items()
    }


def _unread(ports_of: Mapping[str, Sequence[str]], found: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield each port once, until the groups that it is in have too many addresses."""
    seen: set[str] = set()
    for group, members in ports_of.items():
        for port in members:
            if len(found[group]) > MAX_MEMBERS:
                break
            if port not in seen:
                seen.add(port)
                yield port


def _texts(row: Any) -> list[str]:
    return [pair["ip_address"] for pair in row.allowed_address_pairs]


def _widest_subnets(conn: sa.Connection, network_ids: Sequence[str]) -> dict[str, dict[int, int]]:
    """Return the length of the shortest prefix of each network's subnets, by IP version."""
    widest: dict[str, dict[int, int]] = {}
    for part in chunks(network_ids):
        for row in conn.execute(_CIDRS, {"ids": part}):
            of_network = widest.setdefault(row.network_id, {})
            length = int(row.cidr.rpartition("/")[2])
            of_network[row.ip_version] = min(length, of_network.get(row.ip_version, length))
    return widest


def _is_narrow(text: str, widest: Mapping[int, int]) -> bool:
    """Return whether an address pair counts as an address of the port's security groups.

    A single address counts, and so does a range that is not wider than the subnets of the port's network. A wider one,
    such as 0.0.0.0/0 of a guest that routes, would open each rule that names the group to strangers.
    """
    if "/" not in text:
        return True
    range_ = ipaddress.ip_network(text)
    return range_.num_addresses == 1 or range_.prefixlen >= widest.get(range_.version, range_.max_prefixlen)


# --- routers ---

_ROUTER_IDS = sa.select(routers.c.id).order_by(routers.c.id)
_ROUTERS = sa.select(
    routers.c.id, routers.c.admin_state_up, routers.c.gateway_port_id, routers.c.enable_snat, routers.c.routes
).where(one_of(routers.c.id, "ids"))
_INTERFACES = (
    sa.select(router_interfaces.c.router_id, router_interfaces.c.port_id)
    .where(one_of(router_interfaces.c.router_id, "ids"))
    .distinct()
)
_FLOATING = (
    sa.select(floatingips.c.router_id, floatingips.c.floating_ip_address, floatingips.c.fixed_ip_address)
    # Whatever the row says: an address that its port does not have may be another project's.
    .join(
        addresses,
        sa.and_(addresses.c.port_id == floatingips.c.port_id, addresses.c.address == floatingips.c.fixed_ip_address),
    )
    .where(one_of(floatingips.c.router_id, "ids"))
    .order_by(floatingips.c.id)
)


def _all_routers(conn: sa.Connection, _: Sequence[str]) -> dict[str, Part]:
    """Return the references to all routers."""
    return {"": Part(None, tuple(router_topic(id) for id in conn.execute(_ROUTER_IDS).scalars()))}


def _routers(conn: sa.Connection, ids: Sequence[str]) -> dict[str, Part]:
    """Return routers with their ports and floating IPs."""
    rows = conn.execute(_ROUTERS, {"ids": ids}).all()
    joined: dict[str, list[str]] = {row.id: [] for row in rows}
    for router_id, port_id in conn.execute(_INTERFACES, {"ids": ids}):
        joined.setdefault(router_id, []).append(port_id)
    floating: dict[str, list[dict[str, str]]] = {}
    for router_id, outside, inside in conn.execute(_FLOATING, {"ids": ids}):
        floating.setdefault(router_id, []).append({"floating": outside, "fixed": inside})
    held: dict[str, dict[str, Any]] = {}
    for part in chunks(id for row in rows for id in (*joined[row.id], row.gateway_port_id)):
        held |= {port["id"]: port for port in _shown(conn, conn.execute(_PORTS_BY_ID, {"ids": part}).all())}
    found = {}
    for row in rows:
        own = [held[id] for id in sorted({*joined[row.id], row.gateway_port_id} & held.keys())]
        router = {
            "id": row.id,
            "admin_state_up": row.admin_state_up,
            "gateway_port": row.gateway_port_id,
            "enable_snat": row.enable_snat,
            "routes": row.routes,
            "ports": sorted(joined[row.id]),
            "floating": floating.get(row.id, []),
        }
        references = _distinct(*(network_topic(port["network_id"]) for port in own))
        found[row.id] = Part({"router": router, "ports": own}, references)
    return found


_READERS: Mapping[str, Callable[[sa.Connection, Sequence[str]], dict[str, Part]]] = {
    PartKind.HOST: _hosts,
    PartKind.NETWORK: _networks,
    PartKind.QOS_POLICY: _qos_policies,
    PartKind.RULES: _rules,
    PartKind.MEMBERS: _members,
    PartKind.ROUTERS: _all_routers,
    PartKind.ROUTER: _routers,
}
