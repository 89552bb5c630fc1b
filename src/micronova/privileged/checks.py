"""Checks of verbs that the types of their fields cannot express."""

import ipaddress
from collections.abc import Container, Iterable

from micronova.privileged import verbs as v
from micronova.privileged.names import METADATA_ADDRESS

ICMP = (1, 58)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
RESERVED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(each)
    for each in (
        *("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32"),
        *("::/128", "::1/128", "::ffff:0:0/96", "ff00::/8"),
    )
)
"""Addresses that no device of a network can have; the network service refuses subnets that overlap them."""


class Refused(Exception):
    """The helper does not carry out this verb."""


def check(verb: v.Verb, prefix: str) -> None:
    """Raise Refused unless a verb is well-formed and concerns this cloud."""
    namespace = getattr(verb, "namespace", None)
    if namespace is not None and namespace != prefix and not namespace.startswith(f"{prefix}-"):
        raise Refused(f"{namespace} is not a namespace of this cloud.")
    match verb:
        case (
            v.EnsureVeth()
            | v.LoadRouter()
            | v.StartDnsmasq()
            | v.StartAdvertiser()
            | v.StopDnsmasq()
            | v.ListenMetadata()
        ):
            if verb.namespace == prefix:
                raise Refused(f"{verb.namespace} is the namespace of bridges: it serves no network.")
    match verb:
        case v.EnsureVeth() | v.AdoptTap():
            _unicast(verb.mac)
        case v.EnsureTrunk():
            _distinct([verb.tap, *(each.tap for each in verb.subports)])
            _distinct(str(each.vlan) for each in verb.subports)
        case v.SetAddresses():
            for each in verb.addresses:
                _usable(interface(each).ip)
        case v.SetRoutes():
            for route in verb.routes:
                destination = network(route.destination)
                if route.via is None and route.device is None:
                    raise Refused("A route needs a next hop or a device.")
                if route.via is not None and _usable(address(route.via)).version != destination.version:
                    raise Refused(f"The route to {destination} has a next hop of another address family.")
        case v.LoadFirewall():
            _firewall(verb)
        case v.LoadRouter():
            given = [each for pair in verb.floating for each in (pair.floating, pair.fixed)]
            for each in (*given, *filter(None, [verb.source])):
                if _usable(address(each)).version != 4:
                    raise Refused("Only IPv4 addresses are translated.")
            _distinct(each.device for each in verb.scopes)
            if verb.gateway is None and (verb.floating or verb.source):
                raise Refused("A router without a gateway translates nothing.")
        case v.StartDnsmasq():
            _dhcp(verb)
        case v.StartAdvertiser():
            _distinct(link.device for link in verb.links)
            for subnet in (subnet for link in verb.links for subnet in link.subnets):
                _served(subnet)
                if network(subnet.cidr).version != 6:
                    raise Refused("Routers are advertised in IPv6 only.")
        case v.Connect():
            _usable(address(verb.address))
        case _:
            pass


def address(text: str) -> Address:
    """Parse an address."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise Refused(f"{text!r} is not an address.") from None


def network(text: str) -> Network:
    """Parse a range of addresses."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise Refused(f"{text!r} is not a range of addresses.") from None


def interface(text: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    """Parse an address with a prefix length."""
    try:
        return ipaddress.ip_interface(text)
    except ValueError:
        raise Refused(f"{text!r} is not an address with a prefix length.") from None


def is_reserved(given: Network) -> bool:
    """Return whether a range has addresses that no device of a network can have."""
    return any(given.version == each.version and given.overlaps(each) for each in RESERVED)


def _usable(given: Address) -> Address:
    if is_reserved(ipaddress.ip_network(given)) and str(given) != METADATA_ADDRESS:
        raise Refused(f"{given} is not an address of one device.")
    return given


def _unicast(mac: str) -> None:
    if int(mac[:2], 16) & 1:
        raise Refused(f"{mac} is not the MAC address of one device.")


def _distinct(names: Iterable[str]) -> None:
    listed = list(names)
    if len(set(listed)) != len(listed):
        raise Refused("Something is named twice.")


def _firewall(verb: v.LoadFirewall) -> None:
    _distinct([*(port.tap for port in verb.filtered), *(each.device for each in verb.unfiltered)])
    if len(verb.filtered) + len(verb.unfiltered) > v.MAX_TAPS:
        raise Refused(f"A firewall has at most {v.MAX_TAPS} ports.")
    _distinct(group.id for group in verb.groups)
    known = {group.id for group in verb.groups}
    for group in verb.groups:
        for member in group.addresses:
            network(member)
    for port in verb.filtered:
        check_port(port, known)


def check_port(port: v.FilteredPort, groups: Container[str]) -> None:
    """Raise Refused unless the addresses and rules of a port are well-formed; `groups` are the known remote ones."""
    for pair in port.pairs:
        _unicast(pair.mac)
        network(pair.prefix)
    for rule in port.rules:
        if rule.version == 5 or (rule.remote is not None and network(rule.remote).version != rule.version):
            raise Refused("The remote of a rule is of another address family.")
        if rule.remote_group is not None and rule.remote_group not in groups:
            raise Refused(f"A rule names the security group {rule.remote_group}, which is missing.")
        if rule.protocol is None and (rule.low is not None or rule.high is not None):
            raise Refused("A rule for ports needs a protocol.")
        if rule.protocol in ICMP:
            if max(rule.low or 0, rule.high or 0) > 255:
                raise Refused("The type and the code of ICMP are at most 255.")
            if rule.low is None and rule.high is not None:
                raise Refused("A rule for a code of ICMP needs a type.")
        elif rule.high is not None and (rule.low or 0) > rule.high:
            raise Refused(f"The range of ports {rule.low}-{rule.high} is empty.")


def _dhcp(verb: v.StartDnsmasq) -> None:
    for subnet in verb.subnets:
        _served(subnet)
    _distinct(host.mac for host in verb.hosts)
    for host in verb.hosts:
        for each in (*host.addresses, *host.own):
            _usable(address(each))


def _served(subnet: v.DhcpSubnet) -> None:
    served = network(subnet.cidr)
    for each in (*filter(None, [subnet.gateway]), *subnet.dns):
        address(each)
    for route in subnet.routes:
        if network(route.destination).version != address(route.via).version:
            raise Refused("A route has a next hop of another address family.")
    if served.version == 4 and (subnet.advertise or subnet.mode != "stateful"):
        raise Refused("Routers are advertised in IPv6 only.")
    if subnet.mode != "stateful" and served.prefixlen != 64:
        raise Refused("Guests derive addresses only from prefixes of 64 bits.")
