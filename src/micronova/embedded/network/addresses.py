"""Allocation of addresses to ports. The primary key (subnet, number) decides who gets an address."""

import ipaddress
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.chunks import chunks
from micronova.embedded.network import device_owners
from micronova.embedded.network.cidrs import (
    Address,
    AddressRange,
    Network,
    address_of,
    from_hint,
    number_of,
    parse_pools,
)
from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.ipv6 import eui64, uses_slaac
from micronova.embedded.network.request_bodies import ip_address
from micronova.embedded.network.row_types import SubnetRow
from micronova.embedded.network.tables import addresses, subnets

MAX_PER_PORT = 5
_SCAN = 512  # allocated addresses that are read at once in the search for a free one
_SPREAD = 16  # free addresses among which one is chosen


@dataclass(frozen=True, slots=True)
class AllocationSubnet:
    """The attributes of a subnet that allocation needs."""

    id: str
    network_id: str
    cidr: Network
    pools: tuple[AddressRange, ...]
    gateway: str | None
    slaac: bool  # guests derive their addresses (`derived_address`)
    service_types: tuple[str, ...]

    @property
    def version(self) -> int:
        """4 or 6."""
        return self.cidr.version

    def derived_address(self, mac: str) -> Address:
        """Return the address that a guest with this MAC address derives; for subnets with SLAAC."""
        assert isinstance(self.cidr, ipaddress.IPv6Network)
        return eui64(self.cidr, mac)


@dataclass(frozen=True, slots=True)
class AddressRequest:
    """One address that a port needs: a given one, or any of one of the subnets."""

    choices: tuple[AllocationSubnet, ...]
    address: Address | None = None
    hints: Mapping[str, int | None] | None = None


def allocation_subnet(row: SubnetRow) -> AllocationSubnet:
    """Return what allocation needs of a subnet's row; parsed once per revision."""
    return _allocation_subnet(
        row.id,
        row.network_id,
        row.cidr,
        tuple((pool["start"], pool["end"]) for pool in row.allocation_pools),
        row.gateway_ip,
        uses_slaac(row.ipv6_ra_mode, row.ipv6_address_mode),
        tuple(row.service_types),
    )


@lru_cache(maxsize=2048)
def _allocation_subnet(
    id: str,
    network_id: str,
    cidr: str,
    pools: tuple[tuple[str, str], ...],
    gateway: str | None,
    slaac: bool,
    service_types: tuple[str, ...],
) -> AllocationSubnet:
    parsed = parse_pools({"start": start, "end": end} for start, end in pools)
    return AllocationSubnet(id, network_id, ipaddress.ip_network(cidr), tuple(parsed), gateway, slaac, service_types)


def allocation_subnets(conn: sa.Connection, network_ids: Iterable[str]) -> dict[str, list[AllocationSubnet]]:
    """Return the subnets of networks, oldest first."""
    found: dict[str, list[AllocationSubnet]] = {}
    for row in conn.execute(_OF_NETWORKS, {"ids": list(network_ids)}):
        found.setdefault(row.network_id, []).append(allocation_subnet(row))
    return found


_OF_NETWORKS = (
    sa.select(
        *(subnets.c[name] for name in ("id", "network_id", "cidr", "allocation_pools", "gateway_ip")),
        *(subnets.c[name] for name in ("ipv6_address_mode", "ipv6_ra_mode", "service_types")),
    )
    .where(subnets.c.network_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(subnets.c.created_at, subnets.c.id)
)


def address_requests(
    network_id: str,
    candidates: Sequence[AllocationSubnet],
    requested: Sequence[Mapping[str, str]] | None,
    device_owner: str,
    held: Container[str] = (),
) -> list[AddressRequest]:
    """Return the addresses that a port needs; if the request names none, one of each IP version.

    On a subnet with SLAAC every port also gets the address that its guest derives, except a router's port, which has
    the gateway address. `held` are the addresses that the port has.
    """
    fitting = [subnet for subnet in candidates if serves(subnet, device_owner)]
    is_router = device_owner == device_owners.ROUTER_INTERFACE
    derived = [] if is_router else [AddressRequest((subnet,)) for subnet in fitting if subnet.slaac]
    if requested is None:
        found = []
        for version in (4, 6):
            choices = tuple(subnet for subnet in fitting if subnet.version == version and not subnet.slaac)
            if choices:
                found.append(AddressRequest(choices))
        return found + derived
    if len(requested) > MAX_PER_PORT:
        raise invalid(f"Exceeded maximum amount of fixed ips per port: {MAX_PER_PORT}.")
    found = [_address_request(network_id, candidates, entry) for entry in requested]
    named = [(request.choices[0].id, request.address) for request in found if request.address is not None]
    if len(set(named)) != len(named):
        raise invalid("Duplicate IP addresses in fixed_ips.", "HTTPBadRequest")
    if is_router:
        return found
    for request in found:
        if request.choices[0].slaac and request.address is not None and str(request.address) not in held:
            raise invalid(
                f"IPv6 address {request.address} cannot be given to a port: guests on subnet {request.choices[0].id} "
                "make their addresses themselves, from their MAC addresses.",
                "AllocationOnAutoAddressSubnet",
            )
    return [request for request in found if not request.choices[0].slaac] + derived


def _address_request(
    network_id: str, candidates: Sequence[AllocationSubnet], entry: Mapping[str, str]
) -> AddressRequest:
    subnet_id, text = entry.get("subnet_id"), entry.get("ip_address")
    address = ip_address(text, "fixed_ips") if text else None
    if not subnet_id and address is None:
        raise invalid("IP allocation requires subnet_id or ip_address.")
    if subnet_id:
        chosen = next((subnet for subnet in candidates if subnet.id == subnet_id), None)
        if chosen is None:
            raise invalid(
                f"Failed to create port on network {network_id}, because fixed_ips included invalid subnet "
                f"{subnet_id[:64]}."
            )
    else:
        chosen = next((subnet for subnet in candidates if address in subnet.cidr), None)
        if chosen is None:
            raise invalid(
                f"IP address {address} is not a valid IP for any of the subnets on the specified network.",
                "InvalidIpForNetwork",
            )
    if address is not None:
        _check_usable(chosen, address)
    return AddressRequest((chosen,), address)


def _check_usable(chosen: AllocationSubnet, address: Address) -> None:
    edges: tuple[Address, ...] = ()
    if chosen.version == 4 and chosen.cidr.prefixlen < 31:
        edges = (chosen.cidr.network_address, chosen.cidr.broadcast_address)
    if address not in chosen.cidr or address in edges:
        raise invalid(f"IP address {address} is not a valid IP for the specified subnet.", "InvalidIpForSubnet")


def serves(candidate: AllocationSubnet, device_owner: str) -> bool:
    """Return whether a device of this kind gets addresses of the subnet by default."""
    kinds = candidate.service_types
    return not kinds or any(device_owner.startswith(kind) for kind in kinds)


def allocate(
    conn: sa.Connection, request: AddressRequest, port_id: str, position: int, mac: str
) -> tuple[AllocationSubnet, Address]:
    """Allocate an address to a port; raise Conflict if there is none."""
    chosen = request.choices[0]
    if request.address is not None:
        if _insert(conn, chosen, request.address, port_id, position):
            return chosen, request.address
        raise conflict(
            f"Unable to complete operation for network {chosen.network_id}. "
            f"The IP address {request.address} is in use.",
            "IpAddressInUse",
        )
    if chosen.slaac:
        return chosen, allocate_derived(conn, chosen, port_id, position, mac)
    for candidate in request.choices:
        found = _allocate_any(conn, candidate, port_id, position, (request.hints or {}).get(candidate.id))
        if found is not None:
            return candidate, found
    raise conflict(f"No more IP addresses available on network {chosen.network_id}.", "IpAddressGenerationFailure")


def allocate_derived(conn: sa.Connection, subnet: AllocationSubnet, port_id: str, position: int, mac: str) -> Address:
    """Allocate the address that a port's guest derives by SLAAC; raise Conflict if another port has it."""
    address = subnet.derived_address(mac)
    if not _insert(conn, subnet, address, port_id, position):
        raise conflict(f"The IP address {address} is in use.", "IpAddressInUse")
    return address


def _allocate_any(
    conn: sa.Connection, subnet: AllocationSubnet, port_id: str, position: int, hint: int | None
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
            # A concurrent request got it. The next query sees that, so the loop ends. The id of the port chooses
            # among several free addresses, so that concurrent requests try different ones.
            count = _SPREAD
    return None


def _free(conn: sa.Connection, subnet: AllocationSubnet, first: int, last: int, count: int) -> list[int]:
    """Return the lowest `count` numbers from `first` to `last` that no port has."""
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


def _insert(conn: sa.Connection, subnet: AllocationSubnet, address: Address, port_id: str, position: int) -> bool:
    return insert_if_absent(
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
    """Return the fixed IPs of ports as the API shows them."""
    found: dict[str, list[dict[str, str]]] = {}
    for part in chunks(port_ids):
        for row in conn.execute(_OF_PORTS, {"ids": part}):
            found.setdefault(row.port_id, []).append({"subnet_id": row.subnet_id, "ip_address": row.address})
    return found


_OF_PORTS = (
    sa.select(addresses.c.port_id, addresses.c.subnet_id, addresses.c.address)
    .where(addresses.c.port_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(addresses.c.port_id, addresses.c.position)
)
