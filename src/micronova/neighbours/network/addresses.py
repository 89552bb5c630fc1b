"""Addresses: which a port asks for, and taking them. A row of (subnet, number) decides who has an address."""

import ipaddress
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.network.cidrs import (
    SLAAC_MODES,
    Address,
    Network,
    Pool,
    address_of,
    eui64,
    from_hint,
    number_of,
    parse_pools,
)
from micronova.neighbours.network.core import insert_unless_there
from micronova.neighbours.network.errors import conflict, invalid
from micronova.neighbours.network.tables import addresses, subnets
from micronova.neighbours.network.wire import ip_address

MOST_PER_PORT = 5
ROUTER_INTERFACE = "network:router_interface"
_SCAN = 512  # taken addresses that are read at once in the search for a free one
_SPREAD = 16  # free addresses among which one is chosen


@dataclass(frozen=True, slots=True)
class Range:
    """A subnet as far as giving out its addresses goes."""

    id: str
    network_id: str
    cidr: Network
    pools: tuple[Pool, ...]
    gateway: str | None
    slaac: bool  # guests make their own address from prefix and MAC
    service_types: tuple[str, ...]

    @property
    def version(self) -> int:
        """4 or 6."""
        return self.cidr.version


@dataclass(frozen=True, slots=True)
class Wish:
    """One address that a port is to have: of one of these subnets, a certain one if given."""

    choices: tuple[Range, ...]
    address: Address | None = None
    hints: Mapping[str, int | None] | None = None


def range_of(row: Any) -> Range:
    """Return a subnet's row as a range; parsed once per revision."""
    return _range(
        row.id,
        row.network_id,
        row.cidr,
        tuple((pool["start"], pool["end"]) for pool in row.allocation_pools),
        row.gateway_ip,
        row.ipv6_address_mode in SLAAC_MODES or row.ipv6_ra_mode in SLAAC_MODES,
        tuple(row.service_types),
    )


@lru_cache(maxsize=2048)
def _range(
    id: str,
    network_id: str,
    cidr: str,
    pools: tuple[tuple[str, str], ...],
    gateway: str | None,
    slaac: bool,
    service_types: tuple[str, ...],
) -> Range:
    parsed = parse_pools({"start": start, "end": end} for start, end in pools)
    return Range(id, network_id, ipaddress.ip_network(cidr), tuple(parsed), gateway, slaac, service_types)


def ranges_of(conn: sa.Connection, network_ids: Iterable[str]) -> dict[str, list[Range]]:
    """Return the ranges of networks, oldest first."""
    found: dict[str, list[Range]] = {}
    for row in conn.execute(_RANGES, {"ids": list(network_ids)}):
        found.setdefault(row.network_id, []).append(range_of(row))
    return found


_RANGES = (
    sa.select(
        *(subnets.c[name] for name in ("id", "network_id", "cidr", "allocation_pools", "gateway_ip")),
        *(subnets.c[name] for name in ("ipv6_address_mode", "ipv6_ra_mode", "service_types")),
    )
    .where(subnets.c.network_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(subnets.c.created_at, subnets.c.id)
)


def wishes(
    network_id: str,
    ranges: Sequence[Range],
    asked: Sequence[Mapping[str, str]] | None,
    device_owner: str,
    held: Container[str] = (),
) -> list[Wish]:
    """Return the addresses that a port is to have; without any asked for, one of each IP version.

    Where guests make their own address every port has that one besides, whatever is asked for, except a router's,
    which is at the gateway's. `held` are the addresses that the port has already.
    """
    fitting = [r for r in ranges if serves(r, device_owner)]
    routers = device_owner == ROUTER_INTERFACE
    own = [] if routers else [Wish((r,)) for r in fitting if r.slaac]
    if asked is None:
        found = []
        for version in (4, 6):
            choices = tuple(r for r in fitting if r.version == version and not r.slaac)
            if choices:
                found.append(Wish(choices))
        return found + own
    if len(asked) > MOST_PER_PORT:
        raise invalid(f"Exceeded maximum amount of fixed ips per port: {MOST_PER_PORT}.")
    found = [_wish(network_id, ranges, entry) for entry in asked]
    named = [(wish.choices[0].id, wish.address) for wish in found if wish.address is not None]
    if len(set(named)) != len(named):
        raise invalid("Duplicate IP addresses in fixed_ips.", "HTTPBadRequest")
    if routers:
        return found
    for wish in found:
        if wish.choices[0].slaac and wish.address is not None and str(wish.address) not in held:
            raise invalid(
                f"IPv6 address {wish.address} cannot be given to a port: guests on subnet {wish.choices[0].id} make "
                f"their addresses themselves, from their MAC addresses.",
                "AllocationOnAutoAddressSubnet",
            )
    return [wish for wish in found if not wish.choices[0].slaac] + own


def _wish(network_id: str, ranges: Sequence[Range], entry: Mapping[str, str]) -> Wish:
    subnet_id, text = entry.get("subnet_id"), entry.get("ip_address")
    address = ip_address(text, "fixed_ips") if text else None
    if not subnet_id and address is None:
        raise invalid("IP allocation requires subnet_id or ip_address.")
    if subnet_id:
        chosen = next((r for r in ranges if r.id == subnet_id), None)
        if chosen is None:
            raise invalid(
                f"Failed to create port on network {network_id}, because fixed_ips included invalid subnet "
                f"{subnet_id[:64]}."
            )
    else:
        chosen = next((r for r in ranges if address in r.cidr), None)
        if chosen is None:
            raise invalid(
                f"IP address {address} is not a valid IP for any of the subnets on the specified network.",
                "InvalidIpForNetwork",
            )
    if address is not None:
        _check_usable(chosen, address)
    return Wish((chosen,), address)


def _check_usable(chosen: Range, address: Address) -> None:
    edges: tuple[Address, ...] = ()
    if chosen.version == 4 and chosen.cidr.prefixlen < 31:
        edges = (chosen.cidr.network_address, chosen.cidr.broadcast_address)
    if address not in chosen.cidr or address in edges:
        raise invalid(
            f"IP address {address} is not a valid IP for the specified subnet.", "InvalidIpForSubnet"
        )


def serves(candidate: Range, device_owner: str) -> bool:
    """Say whether a device of this kind gets addresses of the subnet unless it asks for others."""
    kinds = candidate.service_types
    return not kinds or any(device_owner.startswith(kind) for kind in kinds)


def take(conn: sa.Connection, wish: Wish, port_id: str, position: int, mac: str) -> tuple[Range, Address]:
    """Take an address for a port, or say why there is none."""
    chosen = wish.choices[0]
    if wish.address is not None:
        if _insert(conn, chosen, wish.address, port_id, position):
            return chosen, wish.address
        raise conflict(
            f"Unable to complete operation for network {chosen.network_id}. The IP address {wish.address} is in use.",
            "IpAddressInUse",
        )
    if chosen.slaac:
        own = eui64(chosen.cidr, mac)
        if _insert(conn, chosen, own, port_id, position):
            return chosen, own
        raise conflict(f"The IP address {own} is in use.", "IpAddressInUse")
    for candidate in wish.choices:
        found = _take_any(conn, candidate, port_id, position, (wish.hints or {}).get(candidate.id))
        if found is not None:
            return candidate, found
    raise conflict(
        f"No more IP addresses available on network {chosen.network_id}.", "IpAddressGenerationFailure"
    )


def _take_any(
    conn: sa.Connection, subnet: Range, port_id: str, position: int, hint: int | None
) -> Address | None:
    if hint is not None and any(first <= hint <= last for first, last in subnet.pools):
        address = address_of(hint, subnet.version)
        if str(address) != subnet.gateway and _insert(conn, subnet, address, port_id, position):
            return address
    count = 1
    for first, last in from_hint(subnet.pools, hint):
        while free := _free(conn, subnet, first, last, count):
            address = address_of(free[int(port_id[:8], 16) % len(free)], subnet.version)
            if _insert(conn, subnet, address, port_id, position):
                return address
            # Somebody else took it, and the next look sees that, so this ends. But others are looking too at this
            # moment: the port's id says which of several free addresses is tried next.
            count = _SPREAD
    return None


def _free(conn: sa.Connection, subnet: Range, first: int, last: int, count: int) -> list[int]:
    """Return the lowest numbers from `first` to `last` that no port has; at most so many."""
    found: list[int] = []
    at = first
    while at <= last and len(found) < count:
        span = {
            "subnet": subnet.id,
            "first": number_of(address_of(at, subnet.version)),
            "last": number_of(address_of(last, subnet.version)),
            "scan": _SCAN,
        }
        taken = [int(number, 16) for number in conn.execute(_TAKEN, span).scalars()]
        beyond = taken[-1] if len(taken) == _SCAN else last + 1
        held = set(taken)
        while at < beyond and len(found) < count:
            if at not in held and str(address_of(at, subnet.version)) != subnet.gateway:
                found.append(at)
            at += 1
        at = beyond + 1
    return found


_TAKEN = (
    sa.select(addresses.c.number)
    .where(
        addresses.c.subnet_id == sa.bindparam("subnet"),
        addresses.c.number >= sa.bindparam("first"),
        addresses.c.number <= sa.bindparam("last"),
    )
    .order_by(addresses.c.number)
    .limit(sa.bindparam("scan", type_=sa.Integer))
)


def _insert(conn: sa.Connection, subnet: Range, address: Address, port_id: str, position: int) -> bool:
    return insert_unless_there(
        conn,
        addresses,
        {
            "subnet_id": subnet.id,
            "number": number_of(address),
            "address": str(address),
            "port_id": port_id,
            "position": position,
        },
    )


def addresses_of(conn: sa.Connection, port_ids: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """Return the fixed IPs of ports, as clients see them."""
    found: dict[str, list[dict[str, str]]] = {}
    for start in range(0, len(port_ids), 500):
        for row in conn.execute(_OF_PORTS, {"ids": port_ids[start : start + 500]}):
            found.setdefault(row.port_id, []).append({"subnet_id": row.subnet_id, "ip_address": row.address})
    return found


_OF_PORTS = (
    sa.select(addresses.c.port_id, addresses.c.subnet_id, addresses.c.address)
    .where(addresses.c.port_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(addresses.c.port_id, addresses.c.position)
)
