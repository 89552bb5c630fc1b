"""The desired state of a host: networks, ports, security groups and routers, and the topics that it depends on."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network.addresses import addresses_of
from micronova.embedded.network.host_changes import (
    ROUTERS,
    host_topic,
    members_topic,
    network_topic,
    policy_topic,
    rules_topic,
)
from micronova.embedded.network.port_changes import groups_of
from micronova.embedded.network.qos_use import limits_of, policies_of
from micronova.embedded.network.router_placement import router_host
from micronova.embedded.network.security_group_rules import PROTOCOLS
from micronova.embedded.network.tables import (
    addresses,
    floatingips,
    networks,
    port_security_groups,
    ports,
    router_interfaces,
    routers,
    security_group_rules,
    security_groups,
    subnets,
)

MAX_MEMBERS = 5_000  # addresses of a security group that rules name as remote
MAX_HOST_MEMBERS = 40_000  # addresses of all these security groups, in the desired state of one host


class HostDocument(NamedTuple):
    """The desired state of a host, as its agent gets it."""

    content: dict[str, Any]
    topics: frozenset[str]  # of `host_changes`: the topics that the content depends on


def host_document(conn: sa.Connection, host: str) -> HostDocument:
    """Return the desired state of a host."""
    p = ports.c
    local = list(conn.execute(sa.select(ports).where(p.host == host, p.vif_type != "binding_failed")))
    has_routers = router_host(conn) == host
    routed = _routers(conn) if has_routers else []
    of_routers = [id for router in routed for id in (*router["ports"], *filter(None, [router["gateway_port"]]))]
    held = {row.id for row in local}
    for part in chunks([id for id in of_routers if id not in held]):
        local += conn.execute(sa.select(ports).where(p.id.in_(part)))
    local.sort(key=lambda row: row.id)
    groups = groups_of(conn, [row.id for row in local])
    fixed = addresses_of(conn, [row.id for row in local])
    chosen = sorted({group for each in groups.values() for group in each})
    rules = _rules(conn, chosen)
    members, oversized, of_prefixes = _members(conn, rules)
    stateless = _stateless(conn, chosen)
    policies = policies_of(conn, local)
    limits = limits_of(conn, policies)
    network_ids = sorted({row.network_id for row in local})
    content = {
        "networks": _networks(conn, network_ids),
        "ports": [
            {
                **_port(row, fixed.get(row.id, []), groups.get(row.id, [])),
                "stateful": not groups.get(row.id) or not stateless.issuperset(groups[row.id]),
                **limits.get(row.id, {}),
            }
            for row in local
        ],
        "rules": rules,
        "members": members,
        "oversized": oversized,
        "routers": routed,
    }
    topics = {
        host_topic(host),
        *(network_topic(id) for id in {*network_ids, *of_prefixes}),
        *(rules_topic(group) for group in chosen),
        *(members_topic(group) for group in (*members, *oversized)),
        *(policy_topic(policy) for policy in policies.values()),
        *([ROUTERS] if has_routers else ()),
    }
    return HostDocument(content, frozenset(topics))


def _port(row: Any, fixed: Sequence[dict[str, str]], groups: Sequence[str]) -> dict[str, Any]:
    return {
        "id": row.id,
        "network_id": row.network_id,
        "project_id": row.project_id,
        "mac_address": row.mac_address,
        "status": row.status,
        "admin_state_up": row.admin_state_up,
        "device_id": row.device_id,
        "device_owner": row.device_owner,
        "host": row.host,
        "port_security_enabled": row.port_security_enabled,
        "fixed_ips": sorted(fixed, key=lambda each: (each["subnet_id"], each["ip_address"])),
        "security_groups": sorted(groups),
        "allowed_address_pairs": row.allowed_address_pairs,
        "extra_dhcp_opts": row.extra_dhcp_opts,
        "dns_name": row.dns_name,
    }


def _networks(conn: sa.Connection, ids: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for part in chunks(list(ids)):
        n, s = networks.c, subnets.c
        below: dict[str, list[dict[str, Any]]] = {}
        routed = sa.exists().where(router_interfaces.c.subnet_id == s.id).label("routed")
        for row in conn.execute(sa.select(subnets, routed).where(s.network_id.in_(part)).order_by(s.id)):
            shown = {name: getattr(row, name) for name in _SUBNET}
            below.setdefault(row.network_id, []).append(shown)
        found += [
            {**{name: getattr(row, name) for name in _NETWORK}, "subnets": below.get(row.id, [])}
            for row in conn.execute(sa.select(networks).where(n.id.in_(part)).order_by(n.id))
        ]
    return found


_NETWORK = ("id", "mtu", "external", "dns_domain", "admin_state_up")
_SUBNET = (
    "id", "ip_version", "cidr", "gateway_ip", "enable_dhcp", "ipv6_ra_mode", "ipv6_address_mode", "dns_nameservers",
    "host_routes", "routed",
)  # fmt: skip


def _stateless(conn: sa.Connection, ids: Sequence[str]) -> set[str]:
    """Return the stateless ones of these security groups."""
    g = security_groups.c
    found: set[str] = set()
    for part in chunks(list(ids)):
        found |= set(conn.execute(sa.select(g.id).where(g.id.in_(part), sa.not_(g.stateful))).scalars())
    return found


def _rules(conn: sa.Connection, ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of security groups."""
    rules: dict[str, list[dict[str, Any]]] = {id: [] for id in ids}
    r = security_group_rules.c
    for part in chunks(list(ids)):
        chosen = sa.select(security_group_rules).where(r.security_group_id.in_(part)).order_by(r.id)
        for row in conn.execute(chosen):
            rules[row.security_group_id].append(
                {
                    "direction": row.direction,
                    "ethertype": row.ethertype,
                    "protocol": _number(row.protocol, row.ethertype),
                    "port_range_min": row.port_range_min,
                    "port_range_max": row.port_range_max,
                    "remote_ip_prefix": row.remote_ip_prefix,
                    "remote_group_id": row.remote_group_id,
                }
            )
    return rules


def _members(
    conn: sa.Connection, rules: dict[str, list[dict[str, Any]]]
) -> tuple[dict[str, list[str]], dict[str, int], set[str]]:
    """Return the addresses of the groups that rules name as remote, the number of those of groups left out, and the
    networks whose subnets decide about address pairs.

    Members of a project choose address pairs freely, and the host's firewall is one for all projects. So a group with
    more than `MAX_MEMBERS` addresses is left out, and then the largest ones until `MAX_HOST_MEMBERS` are left.
    """
    named = sorted({each["remote_group_id"] for group in rules.values() for each in group if each["remote_group_id"]})
    found: dict[str, set[str]] = {id: set() for id in named}
    g, p = port_security_groups.c, ports.c
    paired: dict[str, Any] = {}
    for part in chunks(named):
        inside = sa.select(g.port_id).where(g.security_group_id.in_(part))
        chosen = sa.select(p.id, p.network_id, p.allowed_address_pairs).where(p.id.in_(inside))
        paired |= {row.id: row for row in conn.execute(chosen) if row.allowed_address_pairs}
    of_prefixes = {row.network_id for row in paired.values() if any("/" in text for text in _texts(row))}
    widest = _widest_subnets(conn, sorted(of_prefixes))
    pairs = {
        id: [text for text in _texts(row) if _is_narrow(text, widest.get(row.network_id, {}))]
        for id, row in paired.items()
    }
    for part in chunks(named):
        membership = (
            sa.select(g.security_group_id, g.port_id, addresses.c.address)
            .join(addresses, addresses.c.port_id == g.port_id)
            .where(g.security_group_id.in_(part))
        )
        for row in conn.execute(membership):
            found[row.security_group_id].update((row.address, *pairs.get(row.port_id, ())))
    oversized: dict[str, int] = {}
    total = sum(len(each) for each in found.values())
    for id in sorted(named, key=lambda id: (-len(found[id]), id)):
        count = len(found[id])
        if count > MAX_MEMBERS or total > MAX_HOST_MEMBERS:
            oversized[id] = count
            total -= count
    return {id: sorted(found[id]) for id in named if id not in oversized}, oversized, of_prefixes


def _texts(row: Any) -> list[str]:
    return [pair["ip_address"] for pair in row.allowed_address_pairs]


def _widest_subnets(conn: sa.Connection, network_ids: Sequence[str]) -> dict[str, dict[int, int]]:
    """Return the length of the shortest prefix of each network's subnets, by IP version."""
    widest: dict[str, dict[int, int]] = {}
    s = subnets.c
    for part in chunks(network_ids):
        for row in conn.execute(sa.select(s.network_id, s.ip_version, s.cidr).where(s.network_id.in_(part))):
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


def _number(protocol: str | None, ethertype: str) -> int | None:
    if protocol is None:
        return None
    number = int(protocol) if protocol.isdecimal() else PROTOCOLS.get(protocol)
    return 58 if number == 1 and ethertype == "IPv6" else number  # icmp in an IPv6 rule means ICMPv6


def _routers(conn: sa.Connection) -> list[dict[str, Any]]:
    joined: dict[str, set[str]] = {}
    for row in conn.execute(sa.select(router_interfaces)):
        joined.setdefault(row.router_id, set()).add(row.port_id)
    f = floatingips.c
    floating: dict[str, list[dict[str, str]]] = {}
    chosen = sa.select(f.router_id, f.floating_ip_address, f.fixed_ip_address)
    for row in conn.execute(chosen.where(f.router_id.is_not(None), f.port_id.is_not(None)).order_by(f.id)):
        pair = {"floating": row.floating_ip_address, "fixed": row.fixed_ip_address}
        floating.setdefault(row.router_id, []).append(pair)
    return [
        {
            "id": row.id,
            "admin_state_up": row.admin_state_up,
            "gateway_port": row.gateway_port_id,
            "enable_snat": row.enable_snat,
            "routes": row.routes,
            "ports": sorted(joined.get(row.id, ())),
            "floating": floating.get(row.id, []),
        }
        for row in conn.execute(sa.select(routers).order_by(routers.c.id))
    ]
