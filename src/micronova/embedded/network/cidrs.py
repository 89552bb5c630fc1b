"""Arithmetic of subnets: pools, gateways, and addresses as sortable text."""

import ipaddress
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.request_bodies import ip_address
from micronova.privileged.checks import is_reserved

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
AddressRange = tuple[int, int]  # first and last address, both included

_LINK_LOCAL = ipaddress.IPv6Network("fe80::/10")  # every device has such addresses without a subnet


def number_of(address: Address) -> str:
    """Return an address as hexadecimal digits that sort like the number."""
    return f"{int(address):0{8 if address.version == 4 else 32}x}"


def address_of(number: int, version: int) -> Address:
    """Return the address with this number."""
    return ipaddress.IPv4Address(number) if version == 4 else ipaddress.IPv6Address(number)


def usable(cidr: Network) -> AddressRange:
    """Return the first and last usable address."""
    first, last = int(cidr.network_address), int(cidr.broadcast_address)
    if cidr.version == 4:
        return (first, last) if cidr.prefixlen >= 31 else (first + 1, last - 1)
    return (first, last) if cidr.prefixlen >= 127 else (first + 1, last)


def default_gateway(cidr: Network) -> str:
    """Return the first usable address, which is the default gateway."""
    return str(address_of(usable(cidr)[0], cidr.version))


def default_pools(cidr: Network, gateway: str | None) -> list[dict[str, str]]:
    """Return all usable addresses except the gateway, in one or two pools."""
    first, last = usable(cidr)
    found = [(first, last)]
    if gateway is not None:
        at = int(ipaddress.ip_address(gateway))
        if first <= at <= last:
            found = [(first, at - 1), (at + 1, last)]
    return [
        {"start": str(address_of(a, cidr.version)), "end": str(address_of(b, cidr.version))} for a, b in found if a <= b
    ]


def parse_pools(pools: Iterable[dict[str, str]]) -> list[AddressRange]:
    """Return stored pools as numbers."""
    return [(int(ipaddress.ip_address(p["start"])), int(ipaddress.ip_address(p["end"]))) for p in pools]


def check_range(cidr: Network) -> None:
    """Raise Invalid if a subnet cannot have these addresses, or if hosts could not configure some of them."""
    if cidr.prefixlen == 0 or is_reserved(cidr) or (cidr.version == 6 and cidr.overlaps(_LINK_LOCAL)):
        raise invalid(f"'{cidr}' is not a range that a subnet can have: it overlaps reserved addresses.")


def check_pools(cidr: Network, pools: Sequence[dict[str, Any]], gateway: str | None) -> list[dict[str, str]]:
    """Return the given pools in canonical form and order; raise Invalid if they are wrong."""
    first, last = usable(cidr)
    found: list[AddressRange] = []
    for pool in pools:
        start = ip_address(pool["start"], "allocation_pools")
        end = ip_address(pool["end"], "allocation_pools")
        shown = f"{start}-{end}"
        if start.version != cidr.version or end.version != cidr.version or int(start) > int(end):
            raise invalid(f"The allocation pool {shown} is not valid.", "InvalidAllocationPool")
        if int(start) < first or int(end) > last:
            raise invalid(
                f"The allocation pool {shown} spans beyond the subnet cidr {cidr}.", "OutOfBoundsAllocationPool"
            )
        found.append((int(start), int(end)))
    found.sort()
    for one, two in itertools.pairwise(found):
        if one[1] >= two[0]:
            raise conflict("Found overlapping allocation pools.", "OverlappingAllocationPools")
    if gateway is not None:
        at = int(ipaddress.ip_address(gateway))
        for a, b in found:
            if a <= at <= b:
                raise conflict(
                    f"Gateway ip {gateway} conflicts with allocation pool "
                    f"{address_of(a, cidr.version)}-{address_of(b, cidr.version)}.",
                    "GatewayConflictWithAllocationPools",
                )
    return [{"start": str(address_of(a, cidr.version)), "end": str(address_of(b, cidr.version))} for a, b in found]


def check_gateway(cidr: Network, gateway: str) -> str:
    """Return the gateway address in canonical form; raise Invalid if it cannot be one."""
    address = ip_address(gateway, "gateway_ip")
    if address.version != cidr.version:
        raise invalid(f"gateway_ip '{address}' does not match the ip_version '{cidr.version}'.")
    if is_reserved(ipaddress.ip_network(address)):
        raise invalid(f"Gateway {address} is a reserved address.")
    edges = (int(cidr.network_address), int(cidr.broadcast_address))
    if cidr.version == 4 and cidr.prefixlen < 31 and int(address) in edges:
        raise invalid(f"Gateway {address} is the network or broadcast address of {cidr}.")
    return str(address)


def from_hint(pools: Sequence[AddressRange], hint: int | None) -> Iterator[AddressRange]:
    """Yield ranges that cover the pools once, starting at the hint."""
    if hint is None:
        yield from pools
        return
    for a, b in pools:
        if b >= hint:
            yield max(a, hint), b
    for a, b in pools:
        if a < hint:
            yield a, min(b, hint - 1)


def free_prefix(prefixes: Sequence[str], taken: Sequence[Network], length: int) -> Network | None:
    """Return the first prefix of this length within the prefixes that does not overlap an allocated one."""
    for text in prefixes:
        whole = ipaddress.ip_network(text)
        if length < whole.prefixlen:
            continue
        size = 1 << (whole.max_prefixlen - length)
        at = int(whole.network_address)
        end = int(whole.broadcast_address)
        busy = sorted(
            (int(each.network_address), int(each.broadcast_address)) for each in taken if each.version == whole.version
        )
        for first, last in busy:
            if last < at:
                continue
            if first >= at + size:
                break
            at = -(-(last + 1) // size) * size  # the next possible start of a prefix of this length
        if at + size - 1 <= end:
            return ipaddress.ip_network((address_of(at, whole.version), length))
    return None
