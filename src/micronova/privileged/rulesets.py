"""Rule sets for nftables, generated from checked structures.

The bridge family does not track connections, and the inet family does not see the tap of a bridged packet. So a packet
is marked where it enters and leaves a bridge, and filtered where connections are tracked:

    bridge prerouting   check the source addresses; mark = zone of the network
    inet   prerouting   connection tracking in that zone, so that equal addresses of two networks are two connections
    bridge forward      mark = number of the source tap | number of the destination tap << 16
    inet   forward      the rules of both ports; mark = passed
    bridge forward      IP packets without that mark are dropped

So nothing passes if the kernel does not send bridged packets through the inet family.

Only replies pass because of their connection. Packets in the direction that opened the connection pass by the rules,
so removing a rule ends the connections that it allowed. At a stateless port the rules decide about every packet,
replies too. Its packets are tracked nevertheless, because the other port may be stateful.
"""

from collections.abc import Iterable, Sequence

from micronova.privileged import verbs as v
from micronova.privileged.checks import ICMP, Network, network
from micronova.privileged.names import numbers_of

TABLE = "micronova"
LIMITS = "micronova_limits"
DHCP_RATE, DNS_RATE = 20, 200  # packets per second that a guest may send to the server of its network
_FILTERED = "ether type != { arp, ip, ip6 } drop;"
_PASSED = 0xFFFFFFFF  # the mark of packets that the rules of both ports allow


def firewall(verb: v.LoadFirewall) -> str:
    """Return the rule set of the namespace with the bridges."""
    groups = {group.id: number for number, group in enumerate(verb.groups, 1)}
    ports = list(enumerate(verb.filtered, 1))
    zones = {port.tap: port.zone for port in verb.filtered} | {each.device: each.zone for each in verb.unfiltered}
    taps = [device for device in zones if device.startswith("tap")]
    marks = numbers_of(taps, v.MAX_TAPS)  # of 16 bits
    filtered = {port.tap: marks[port.tap] for port in verb.filtered}
    marked = {port.tap: port.dscp for port in verb.filtered} | {each.device: each.dscp for each in verb.unfiltered}
    bridge = [
        *(line for number, port in ports for line in _sources(number, port)),
        *(line for number, port in ports for line in _antispoof(number, port)),
        *(
            f"chain from{mark} {{ {_dscp(marked.get(tap))}meta mark set meta mark or {mark:#x}; }}"
            for tap, mark in marks.items()
        ),
        # br_netfilter does not show frames with a VLAN tag to the inet family, and a guest accepts those with tag 0.
        *(
            f"chain to{mark} {{ {_FILTERED if tap in filtered else ''} meta mark set meta mark or {mark << 16:#x}; }}"
            for tap, mark in marks.items()
        ),
        "chain pre {",
        "type filter hook prerouting priority -300; policy accept;",
        _drop_unknown_taps("iifname", taps),
        _dispatch("iifname", {f'"{p.tap}"': f"jump antispoof{n}" for n, p in ports}),
        _map("meta mark set iifname", {f'"{device}"': str(zone) for device, zone in zones.items()}),
        "}",
        "chain forward_marks {",
        "type filter hook forward priority -200; policy accept;",
        _drop_unknown_taps("oifname", taps),
        "meta mark set 0;",
        _dispatch("iifname", {f'"{tap}"': f"jump from{mark}" for tap, mark in marks.items()}),
        _dispatch("oifname", {f'"{tap}"': f"jump to{mark}" for tap, mark in marks.items()}),
        "}",
        "chain last {",
        "type filter hook forward priority 100; policy accept;",
        f"ether type {{ ip, ip6 }} meta mark != {_PASSED:#x} drop;",
        "}",
    ]
    inet = [
        *(line for group in verb.groups for line in _members(groups[group.id], group)),
        *(line for number, port in ports for line in _port(number, port, groups)),
        "chain zones {",
        "type filter hook prerouting priority -300; policy accept;",
        _map("ct zone set meta mark", {str(zone): str(zone) for zone in sorted(set(zones.values()))}),
        "}",
        # Packets that the namespace itself sends on a bridge belong to the same zone as their replies.
        "chain own_zones {",
        "type filter hook output priority -300; policy accept;",
        _map(
            "ct zone set oifname",
            {f'"{each.device}"': str(each.zone) for each in verb.unfiltered if each.device.startswith("brq")},
        ),
        "}",
        "chain rules {",
        "type filter hook forward priority 0; policy accept;",
        _dispatch("meta mark and 0xffff", {f"{filtered[p.tap]:#x}": f"jump out{n}" for n, p in ports}),
        _dispatch("meta mark and 0xffff0000", {f"{filtered[p.tap] << 16:#x}": f"jump in{n}" for n, p in ports}),
        "}",
        "chain passed {",
        "type filter hook forward priority 20; policy accept;",
        f"meta mark set {_PASSED:#x};",
        "}",
        # Guests may not connect to the namespace of their bridges: only replies to its own connections pass.
        "chain own {",
        "type filter hook input priority 0; policy drop;",
        'iifname "lo" accept;',
        "ct state established,related accept;",
        "icmp type echo-request accept;",
        "icmpv6 type { echo-request, nd-neighbor-solicit, nd-neighbor-advert } accept;",
        "}",
    ]
    return _replace("bridge", bridge) + _replace("inet", inet) + _limits(verb.connections)


def _dscp(value: int | None) -> str:
    """Return the statements that write the DSCP field of IP packets."""
    return "" if value is None else f"ip dscp set {value}; ip6 dscp set {value}; "


def _limits(connections: int) -> str:
    """Return the table that limits the tracked connections of each port, so that no guest fills the kernel's table.

    The table above is replaced at each change; this one keeps its counts. A port is known by its number in the mark.
    Connections that the rules refuse are not counted.
    """
    ends = (("sent", 0xFFFF), ("received", 0xFFFF0000)) if connections else ()
    sets = [f"set {name}{connections} {{ type mark; size 65535; flags dynamic; }}" for name, _ in ends]
    rules = [
        f"meta mark and {mask:#x} != 0 ct status and confirmed == 0 "  # the first packet of a connection
        f"add @{name}{connections} {{ meta mark and {mask:#x} ct count over {connections} }} drop;"
        for name, mask in ends
    ]
    lines = [
        f"table inet {LIMITS} {{",
        *sets,
        "chain forward { type filter hook forward priority 10; policy accept; }",
        "}",
        f"flush chain inet {LIMITS} forward",
        f"table inet {LIMITS} {{",
        "chain forward {",
        *rules,
        "}",
        "}",
    ]
    return "\n".join([*lines, ""])


def router(verb: v.LoadRouter) -> str:
    """Return the rule set of a router: floating IPs, and source NAT for other addresses."""
    lines = _scopes({each.device: each.four for each in verb.scopes}, verb.gateway if verb.source else None)
    if verb.gateway is not None:
        gate = f'"{verb.gateway}"'
        beside = _in_scope_of_gateway(verb)
        lines += [
            "chain inside {",
            "type filter hook prerouting priority -150; policy accept;",
            f"iifname != {gate} meta mark set 1;",  # it comes from inside; the last chain needs to know
            *([f"iifname {beside} meta mark set 2;"] if beside else []),  # and is not translated at the gateway
            "}",
            "chain to_fixed {",
            "type nat hook prerouting priority -100; policy accept;",
            _map("dnat to ip daddr", {p.floating: p.fixed for p in verb.floating}),
            "}",
            "chain to_floating {",
            "type nat hook postrouting priority 100; policy accept;",
            # A guest may connect to a floating IP of the same router: the reply must pass the router, too.
            f"oifname != {gate} meta mark {{ 1, 2 }} ct status dnat masquerade;",
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
                *([f"iifname {gate} oifname {beside} accept;"] if beside else []),
                f"iifname {gate} ct state new drop;",
                "}",
            ]
    # A router's advertiser is a dnsmasq, which would answer DHCP requests.
    no_dhcpv6 = ["chain no_dhcpv6 {", "type filter hook input priority 0; policy accept;", "udp dport 547 drop;", "}"]
    six = _scopes({each.device: each.six for each in verb.scopes})
    return _replace("ip", lines) + _replace("ip6", [*no_dhcpv6, *six])


def _in_scope_of_gateway(verb: v.LoadRouter) -> str:
    """Return the set of the devices that are in the IPv4 scope of the gateway, if it has one."""
    four = {each.device: each.four for each in verb.scopes}
    scope = four.get(verb.gateway or "", 0)
    found = [device for device, number in four.items() if scope and number == scope and device != verb.gateway]
    return f"{{ {', '.join(map(_quoted, found))} }}" if found else ""


def _scopes(numbers: dict[str, int], translated: str | None = None) -> list[str]:
    """Return the chains that drop what would pass between scopes; what leaves by the device `translated` is not."""
    devices: dict[int, list[str]] = {}
    for device, number in numbers.items():
        devices.setdefault(number, []).append(_quoted(device))
    if len(devices) < 2:
        return []
    lines = []
    for number, held in devices.items():
        lines += [f"chain scope{number} {{", f"oifname {{ {', '.join(held)} }} accept;", "drop;", "}"]
    return [
        *lines,
        "chain scopes {",
        "type filter hook forward priority 5; policy accept;",
        "ct direction reply accept;",  # of a connection that may be
        "ct status dnat accept;",
        *([f"oifname {_quoted(translated)} accept;"] if translated else []),
        _dispatch("iifname", {_quoted(device): f"jump scope{number}" for device, number in numbers.items()}),
        "}",
    ]


def _quoted(device: str) -> str:
    return f'"{device}"'


def server() -> str:
    """Return the rule set of a network's DHCP and DNS server: no guest, known by its MAC address, keeps it busy."""
    sets = [
        f"set {name} {{ type ether_addr; size 65535; flags dynamic, timeout; timeout 1m; }}" for name in ("dhcp", "dns")
    ]
    rules = [
        "chain floods {",
        "type filter hook input priority 0; policy accept;",
        f"udp dport {{ 67, 547 }} update @dhcp {{ ether saddr limit rate over {DHCP_RATE}/second "
        f"burst {5 * DHCP_RATE} packets }} drop;",
        f"meta l4proto {{ tcp, udp }} th dport 53 update @dns {{ ether saddr limit rate over {DNS_RATE}/second "
        f"burst {5 * DNS_RATE} packets }} drop;",
        "}",
    ]
    return _replace("inet", [*sets, *rules])


def _replace(family: str, lines: Sequence[str]) -> str:
    """Return the text that replaces a table; the empty declaration makes the deletion succeed."""
    body = "\n".join(line for line in lines if line)
    return f"table {family} {TABLE}\ndelete table {family} {TABLE}\ntable {family} {TABLE} {{\n{body}\n}}\n"


def _drop_unknown_taps(which: str, taps: Sequence[str]) -> str:
    """Drop everything at taps whose port is not in the rule set."""
    known = ", ".join(f'"{tap}"' for tap in taps)
    return f'{which} "tap*" {which} != {{ {known} }} drop;' if taps else f'{which} "tap*" drop;'


def _dispatch(what: str, targets: dict[str, str]) -> str:
    return _map(what + " vmap", targets, keyword="") if targets else ""


def _map(what: str, targets: dict[str, str], keyword: str = " map") -> str:
    if not targets:
        return ""
    return f"{what}{keyword} {{ {', '.join(f'{key} : {value}' for key, value in targets.items())} }};"


def _set(name: str, kind: str, elements: Iterable[str]) -> str:
    return f"set {name} {{ type {kind}; flags interval; elements = {{ {', '.join(elements)} }}; }}"


def _merged(ranges: Iterable[Network]) -> list[str]:
    """Return ranges of one address family without those that others contain: nft refuses sets that overlap."""
    found: list[str] = []
    end = 0  # the first address after the ranges so far
    for start, length, each in sorted((int(each.network_address), each.prefixlen, each) for each in ranges):
        if start >= end:  # of two ranges that overlap the first contains the second
            end = start + (1 << (each.max_prefixlen - length))
            found.append(str(each))
    return found


# --- source addresses (anti-spoofing) ---


def _split(pairs: Sequence[v.Pair]) -> tuple[list[v.Pair], list[v.Pair]]:
    return (
        [pair for pair in pairs if network(pair.prefix).version == 4],
        [pair for pair in pairs if network(pair.prefix).version == 6],
    )


def _sources(number: int, port: v.FilteredPort) -> list[str]:
    lines = []
    for name, kind, pairs in zip(("four", "six"), ("ipv4_addr", "ipv6_addr"), _split(port.pairs), strict=True):
        ranges: dict[str, list[str]] = {}
        for pair in pairs:
            ranges.setdefault(pair.mac, []).append(pair.prefix)
        merged = {mac: _merged(map(network, prefixes)) for mac, prefixes in sorted(ranges.items())}
        elements = [f"{mac} . {prefix}" for mac, prefixes in merged.items() for prefix in prefixes]
        if elements:
            lines.append(_set(f"{name}{number}", f"ether_addr . {kind}", elements))
    return lines


def _antispoof(number: int, port: v.FilteredPort) -> list[str]:
    v4, v6 = _split(port.pairs)
    macs = f"{{ {', '.join(sorted({pair.mac for pair in port.pairs}))} }}"
    lines = [f"chain antispoof{number} {{"]
    if port.pairs:
        lines += [
            f"ether saddr != {macs} drop;",
            # A guest probes for an address before it uses it (RFC 5227), and has none while it asks by DHCP.
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


# --- security group rules ---


def _members(number: int, group: v.Group) -> list[str]:
    lines = []
    members = [network(member) for member in group.addresses]
    for version, kind in ((4, "ipv4_addr"), (6, "ipv6_addr")):
        found = [member for member in members if member.version == version]
        if found:
            lines.append(_set(f"group{number}v{version}", kind, _merged(found)))
        else:
            lines.append(f"set group{number}v{version} {{ type {kind}; flags interval; }}")
    return lines


def _port(number: int, port: v.FilteredPort, groups: dict[str, int]) -> list[str]:
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
    # The bridge family sees fragments, of which the first need not hold type or ports; here they are reassembled.
    "icmpv6 type { nd-router-advert, nd-redirect } drop;",
    "meta nfproto ipv4 udp sport 67 udp dport 68 drop;",
    "meta nfproto ipv6 udp sport 547 udp dport 546 drop;",
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
    if rule.protocol in ICMP:
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
