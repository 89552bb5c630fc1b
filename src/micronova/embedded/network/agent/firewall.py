"""The firewall of a host from its ports and security groups: pure functions of the desired state."""

import contextlib
import ipaddress
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from micronova.embedded.network.agent.desired_state import DesiredState, Port, Rule
from micronova.embedded.network.ipv6 import link_local
from micronova.privileged import verbs as v
from micronova.privileged.checks import Refused, check_port
from micronova.privileged.names import bridge_name, numbers_of, outer_name, tap_name


@dataclass
class Firewall:
    """The verb that loads the firewall, and what it leaves out."""

    verb: v.LoadFirewall
    closed: dict[str, str]  # taps whose rules are not valid, and the reason
    oversized: dict[str, int]  # remote security groups with too many addresses; the rules that name them are left out


def firewall_of(state: DesiredState, connections: int = 0) -> Firewall:
    """Return the firewall between all ports of a host; `connections` limits those of each port."""
    zones = numbers_of((network.id for network in state.networks), v.MAX_ZONE)
    filtered, unfiltered = [], []
    closed: dict[str, str] = {}
    groups = {id: tuple(sorted(_valid(members))) for id, members in state.members.items()}
    for port in state.ports:
        zone, tap = zones[port.network_id], tap_name(port.id)
        if not port.is_guest:
            unfiltered.append(v.UnfilteredDevice(device=outer_name(port.id), zone=zone))
        elif not port.admin_state_up:
            filtered.append(v.FilteredPort(tap=tap, zone=zone))  # without rules nothing passes
        elif port.port_security_enabled:
            try:
                filtered.append(_filtered_port(port, zone, state, groups))
            except (ValueError, msgspec.ValidationError, Refused) as error:  # the other ports keep their rules
                filtered.append(v.FilteredPort(tap=tap, zone=zone))
                closed[tap] = str(error)
        else:
            unfiltered.append(v.UnfilteredDevice(device=tap, zone=zone, dscp=port.dscp_mark))
    unfiltered += [v.UnfilteredDevice(device=bridge_name(n.id), zone=zones[n.id]) for n in state.networks if n.external]
    named = sorted({r.remote_group for each in filtered for r in each.rules if r.remote_group})
    remotes = tuple(v.Group(id=id, addresses=groups[id]) for id in named)
    verb = v.LoadFirewall(
        filtered=tuple(filtered), unfiltered=tuple(unfiltered), groups=remotes, connections=connections
    )
    return Firewall(verb, closed, state.oversized)


def _filtered_port(port: Port, zone: int, state: DesiredState, groups: Container[str]) -> v.FilteredPort:
    """Return a port with its rules; raise ValueError, ValidationError or Refused if the helper would refuse them."""
    pairs, rules = tuple(_pairs(port)), tuple(_rules(port, state))
    made = v.FilteredPort(
        tap=tap_name(port.id), zone=zone, stateful=port.stateful, dscp=port.dscp_mark, pairs=pairs, rules=rules
    )
    check_port(msgspec.convert(msgspec.to_builtins(made), v.FilteredPort), groups)
    return made


def _valid(members: Iterable[str]) -> set[str]:
    """Return the addresses of a security group as ranges, without those that are none."""
    found = set()
    for each in members:
        with contextlib.suppress(ValueError):
            found.add(_prefix(each))
    return found


def _prefix(text: str) -> str:
    return str(ipaddress.ip_network(text, strict=False))


def _pairs(port: Port) -> Iterator[v.Pair]:
    given = [(port.mac_address, each.ip_address) for each in port.fixed_ips]
    given += [(pair.mac_address or port.mac_address, pair.ip_address) for pair in port.allowed_address_pairs]
    given += [(mac, str(link_local(mac))) for mac in {port.mac_address, *(mac for mac, _ in given)}]
    for mac, prefix in sorted({(mac, _prefix(address)) for mac, address in given}):
        yield v.Pair(mac=mac, prefix=prefix)


def _rules(port: Port, state: DesiredState) -> Iterator[v.FilterRule]:
    for group in port.security_groups:
        for rule in state.rules.get(group, ()):
            if rule.remote_group_id not in state.oversized:  # what only such a rule allows does not pass
                yield _rule(rule)


def _rule(rule: Rule) -> v.FilterRule:
    return v.FilterRule(
        ingress=rule.direction == "ingress",
        version=6 if rule.ethertype == "IPv6" else 4,
        protocol=rule.protocol,
        low=rule.port_range_min,
        high=rule.port_range_max,
        remote=_prefix(rule.remote_ip_prefix) if rule.remote_ip_prefix else None,
        remote_group=rule.remote_group_id,
    )
