"""From security groups to the firewall of a host: a pure function of the desired state."""

import ipaddress
from collections.abc import Iterator, Mapping

from micronova.neighbours.network.agent.state import HostState, Port, Rule
from micronova.privileged import verbs as v
from micronova.privileged.names import bridge_name, outer_name, tap_name


def firewall(state: HostState, zones: Mapping[str, int]) -> v.LoadFirewall:
    """Describe the firewall between all ports of a host."""
    guarded, plain = [], []
    for port in state.ports:
        zone = zones[port.network_id]
        if not port.is_guest:
            plain.append(v.Plain(device=outer_name(port.id), zone=zone))
        elif not port.admin_state_up:
            guarded.append(v.Guarded(tap=tap_name(port.id), zone=zone))  # nothing passes
        elif port.port_security_enabled:
            rules = tuple(_rules(port, state))
            pairs = tuple(_pairs(port))
            guarded.append(
                v.Guarded(tap=tap_name(port.id), zone=zone, stateful=port.stateful, pairs=pairs, rules=rules)
            )
        else:
            plain.append(v.Plain(device=tap_name(port.id), zone=zone))
    plain += [v.Plain(device=bridge_name(n.id), zone=zones[n.id]) for n in state.networks if n.external]
    named = sorted({r.remote_group for each in guarded for r in each.rules if r.remote_group})
    groups = tuple(
        v.Group(id=id, addresses=tuple(sorted({_prefix(each) for each in state.members.get(id, ())}))) for id in named
    )
    return v.LoadFirewall(guarded=tuple(guarded), plain=tuple(plain), groups=groups)


def link_local(mac: str) -> str:
    """Return the link-local address of IPv6 that follows from a MAC address."""
    octets = [int(part, 16) for part in mac.split(":")]
    octets[0] ^= 2
    identifier = bytes([*octets[:3], 0xFF, 0xFE, *octets[3:]])
    return str(ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + identifier))


def _prefix(text: str) -> str:
    return str(ipaddress.ip_network(text, strict=False))


def _pairs(port: Port) -> Iterator[v.Pair]:
    given = [(port.mac_address, each.ip_address) for each in port.fixed_ips]
    given += [(pair.mac_address or port.mac_address, pair.ip_address) for pair in port.allowed_address_pairs]
    given += [(mac, link_local(mac)) for mac in {port.mac_address, *(mac for mac, _ in given)}]
    for mac, prefix in sorted({(mac, _prefix(address)) for mac, address in given}):
        yield v.Pair(mac=mac, prefix=prefix)


def _rules(port: Port, state: HostState) -> Iterator[v.FilterRule]:
    for group in port.security_groups:
        for rule in state.rules.get(group, ()):
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
