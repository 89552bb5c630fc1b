"""Rule sets for nftables, generated whole from checked structures.

The bridge family knows no connections here, and the inet family does not see which tap a bridged packet belongs to. So
a packet is marked where it enters and leaves a bridge, and judged where connections are known:

    bridge prerouting   is the sender who it says?  mark = zone of the network
    inet   prerouting   connection tracking in that zone, so that equal addresses of two networks are two connections
    bridge forward      mark = number of the port it comes from | number of the port it goes to << 16
    inet   forward      the rules of both ports

Only answers pass as part of a connection. What goes in the direction that opened it is judged packet by packet, so a
rule that is taken away ends the connections that it let in. At a port that is not stateful every packet is judged by
the rules alone, answers too; it is tracked all the same, because the port at the other end may be stateful.
"""

from collections.abc import Iterable, Sequence

from micronova.privileged import verbs as v
from micronova.privileged.checks import network

TABLE = "micronova"
_ICMP = (1, 58)


def firewall(verb: v.LoadFirewall) -> str:
    """Return the rule set between guests."""
    groups = {group.id: number for number, group in enumerate(verb.groups, 1)}
    ports = list(enumerate(verb.guarded, 1))
    zones = {port.tap: port.zone for port in verb.guarded} | {each.device: each.zone for each in verb.plain}
    taps = [device for device in zones if device.startswith("tap")]
    bridge = [
        *(line for number, port in ports for line in _sources(number, port)),
        *(line for number, port in ports for line in _honest(number, port)),
        *(f"chain from{n} {{ meta mark set meta mark or {n:#x}; }}" for n, _ in ports),
        *(f"chain to{n} {{ meta mark set meta mark or {n << 16:#x}; }}" for n, _ in ports),
        "chain pre {",
        "type filter hook prerouting priority -300; policy accept;",
        _strangers("iifname", taps),
        _dispatch("iifname", {f'"{p.tap}"': f"jump honest{n}" for n, p in ports}),
        _map("meta mark set iifname", {f'"{device}"': str(zone) for device, zone in zones.items()}),
        "}",
        "chain across {",
        "type filter hook forward priority -200; policy accept;",
        _strangers("oifname", taps),
        "meta mark set 0;",
        _dispatch("iifname", {f'"{p.tap}"': f"jump from{n}" for n, p in ports}),
        _dispatch("oifname", {f'"{p.tap}"': f"jump to{n}" for n, p in ports}),
        "}",
    ]
    inet = [
        *(line for group in verb.groups for line in _members(groups[group.id], group)),
        *(line for number, port in ports for line in _port(number, port, groups)),
        "chain zones {",
        "type filter hook prerouting priority -300; policy accept;",
        _map("ct zone set meta mark", {str(zone): str(zone) for zone in sorted(set(zones.values()))}),
        "}",
        # What the namespace itself sends on a bridge belongs to the same zone as the answers.
        "chain own_zones {",
        "type filter hook output priority -300; policy accept;",
        _map(
            "ct zone set oifname",
            {f'"{each.device}"': str(each.zone) for each in verb.plain if each.device.startswith("brq")},
        ),
        "}",
        "chain rules {",
        "type filter hook forward priority 0; policy accept;",
        _dispatch("meta mark and 0xffff", {f"{n:#x}": f"jump out{n}" for n, _ in ports}),
        _dispatch("meta mark and 0xffff0000", {f"{n << 16:#x}": f"jump in{n}" for n, _ in ports}),
        "}",
        # Guests have no business with the namespace that their bridges are in: only its own connections are answered.
        "chain own {",
        "type filter hook input priority 0; policy drop;",
        'iifname "lo" accept;',
        "ct state established,related accept;",
        "icmp type echo-request accept;",
        "icmpv6 type { echo-request, nd-neighbor-solicit, nd-neighbor-advert } accept;",
        "}",
    ]
    return _replace("bridge", bridge) + _replace("inet", inet)


def router(verb: v.LoadRouter) -> str:
    """Return the rule set of a router: floating IPs, and one source for the rest."""
    lines = []
    if verb.gateway is not None:
        gate = f'"{verb.gateway}"'
        lines += [
            "chain inside {",
            "type filter hook prerouting priority -150; policy accept;",
            f"iifname != {gate} meta mark set 1;",  # where it came from, for the last chain
            "}",
            "chain to_fixed {",
            "type nat hook prerouting priority -100; policy accept;",
            _map("dnat to ip daddr", {p.floating: p.fixed for p in verb.floating}),
            "}",
            "chain to_floating {",
            "type nat hook postrouting priority 100; policy accept;",
            # A guest that calls a floating IP of a neighbour: the answer must come back through here.
            f"oifname != {gate} meta mark 1 ct status dnat masquerade;",
            *([f"oifname {gate} " + _map("snat to ip saddr", {p.fixed: p.floating for p in verb.floating})]
              if verb.floating else []),
            *([f"oifname {gate} meta mark 1 snat to {verb.source};"] if verb.source else []),
            "}",
        ]  # fmt: skip
        if verb.source:
            lines += [
                "chain guard {",
                "type filter hook forward priority 0; policy accept;",
                f"iifname {gate} ct state new ct status dnat accept;",
                f"iifname {gate} ct state new drop;",
                "}",
            ]
    # A router's advertiser is no DHCP server, though the program that it is would answer like one.
    quiet = ["chain quiet {", "type filter hook input priority 0; policy accept;", "udp dport 547 drop;", "}"]
    return _replace("ip", lines) + _replace("ip6", quiet)


def _replace(family: str, lines: Sequence[str]) -> str:
    """Replace a table as a whole: the empty declaration makes sure that there is one to delete."""
    body = "\n".join(line for line in lines if line)
    return f"table {family} {TABLE}\ndelete table {family} {TABLE}\ntable {family} {TABLE} {{\n{body}\n}}\n"


def _strangers(which: str, taps: Sequence[str]) -> str:
    """Let nothing pass at a tap whose port is not known yet, or not any more: nobody knows what it may send."""
    known = ", ".join(f'"{tap}"' for tap in taps)
    return f'{which} "tap*" {which} != {{ {known} }} drop;' if taps else f'{which} "tap*" drop;'


def _dispatch(what: str, targets: dict[str, str]) -> str:
    return _map(what + " vmap", targets, keyword="") if targets else ""


def _map(what: str, targets: dict[str, str], keyword: str = " map") -> str:
    if not targets:
        return ""
    return f"{what}{keyword} {{ {', '.join(f'{key} : {value}' for key, value in targets.items())} }};"


def _set(name: str, kind: str, elements: Iterable[str]) -> list[str]:
    listed = sorted(set(elements))
    return [f"set {name} {{ type {kind}; flags interval; auto-merge; elements = {{ {', '.join(listed)} }}; }}"]


def _pairs(name: str, kind: str, elements: Iterable[str]) -> list[str]:
    listed = sorted(set(elements))
    return [f"set {name} {{ type ether_addr . {kind}; flags interval; elements = {{ {', '.join(listed)} }}; }}"]


# --- who a guest may say it is ---


def _split(pairs: Sequence[v.Pair]) -> tuple[list[v.Pair], list[v.Pair]]:
    return (
        [pair for pair in pairs if network(pair.prefix).version == 4],
        [pair for pair in pairs if network(pair.prefix).version == 6],
    )


def _sources(number: int, port: v.Guarded) -> list[str]:
    v4, v6 = _split(port.pairs)
    lines = []
    if v4:
        lines += _pairs(f"four{number}", "ipv4_addr", (f"{p.mac} . {p.prefix}" for p in v4))
    if v6:
        lines += _pairs(f"six{number}", "ipv6_addr", (f"{p.mac} . {p.prefix}" for p in v6))
    return lines


def _honest(number: int, port: v.Guarded) -> list[str]:
    v4, v6 = _split(port.pairs)
    macs = f"{{ {', '.join(sorted({pair.mac for pair in port.pairs}))} }}"
    lines = [f"chain honest{number} {{"]
    if port.pairs:
        lines += [
            f"ether saddr != {macs} drop;",
            # An address is probed for before it is taken (RFC 5227), and asked for by DHCP.
            f"ether type arp arp saddr ip 0.0.0.0 arp saddr ether {macs} return;",
            "ether type ip udp sport 67 udp dport 68 drop;",
            "ether type ip ip saddr 0.0.0.0 udp sport 68 udp dport 67 return;",
        ]
    if v4:
        lines += [
            f"ether type arp arp saddr ether . arp saddr ip @four{number} return;",
            f"ether type ip ether saddr . ip saddr @four{number} return;",
        ]
    if v6:
        lines += [
            "ether type ip6 icmpv6 type { nd-router-advert, nd-redirect } drop;",
            "ether type ip6 udp sport 547 udp dport 546 drop;",
        ]
        hosts = [network(pair.prefix) for pair in v6]
        if all(each.prefixlen == 128 for each in hosts):
            targets = ", ".join(sorted({f"{int(each.network_address):#x}" for each in hosts}))
            lines.append(f"icmpv6 type nd-neighbor-advert @th,64,128 != {{ {targets} }} drop;")
        lines += [
            f"ether type ip6 ether saddr . ip6 saddr @six{number} return;",
            "ether type ip6 ip6 saddr :: icmpv6 type "
            "{ nd-neighbor-solicit, nd-router-solicit, mld-listener-report, mld2-listener-report } return;",
        ]
    return [*lines, "drop;", "}"]


# --- what may pass ---


def _members(number: int, group: v.Group) -> list[str]:
    lines = []
    for version, kind in ((4, "ipv4_addr"), (6, "ipv6_addr")):
        found = [member for member in group.addresses if network(member).version == version]
        if found:
            lines += _set(f"group{number}v{version}", kind, found)
        else:
            lines.append(f"set group{number}v{version} {{ type {kind}; flags interval; }}")
    return lines


def _port(number: int, port: v.Guarded, groups: dict[str, int]) -> list[str]:
    lines = []
    for ingress in (False, True):
        lines += [
            f"chain {'in' if ingress else 'out'}{number} {{",
            *(_SERVICES_IN if ingress else _SERVICES_OUT),
            *(_CONNECTIONS if port.stateful else ()),
            *(f"{_match(rule, groups)} return;" for rule in port.rules if rule.ingress == ingress),
            "drop;",
            "}",
        ]
    return lines


_CONNECTIONS = (
    "ct state established ct direction reply return;",
    "ct state related return;",
    "ct state invalid drop;",
)
_SERVICES_IN = (
    "meta nfproto ipv4 udp sport 67 udp dport 68 return;",
    "meta nfproto ipv6 udp sport 547 udp dport 546 return;",
    "icmpv6 type { mld-listener-query, nd-router-advert, nd-neighbor-solicit, nd-neighbor-advert } return;",
)
_SERVICES_OUT = (
    "meta nfproto ipv4 udp sport 68 udp dport 67 return;",
    "meta nfproto ipv6 udp sport 546 udp dport 547 return;",
    "icmpv6 type { mld-listener-report, mld2-listener-report, nd-router-solicit, nd-neighbor-solicit, "
    "nd-neighbor-advert } return;",
)


def _match(rule: v.FilterRule, groups: dict[str, int]) -> str:
    family = "ip" if rule.version == 4 else "ip6"
    words = [f"meta nfproto ipv{rule.version}"]
    side = "saddr" if rule.ingress else "daddr"
    if rule.remote is not None:
        words.append(f"{family} {side} {rule.remote}")
    if rule.remote_group is not None:
        words.append(f"{family} {side} @group{groups[rule.remote_group]}v{rule.version}")
    if rule.protocol is not None:
        words.append(_protocol(rule))
    return " ".join(words)


def _protocol(rule: v.FilterRule) -> str:
    if rule.protocol in _ICMP:
        name = "icmp" if rule.protocol == 1 else "icmpv6"
        words = [f"meta l4proto {rule.protocol}"]
        if rule.low is not None:
            words.append(f"{name} type {rule.low}")
        if rule.high is not None:
            words.append(f"{name} code {rule.high}")
        return " ".join(words)
    words = [f"meta l4proto {rule.protocol}"]
    if rule.low is not None or rule.high is not None:
        low, high = rule.low or 0, 65535 if rule.high is None else rule.high
        words.append(f"th dport {low}" if low == high else f"th dport {low}-{high}")
    return " ".join(words)
