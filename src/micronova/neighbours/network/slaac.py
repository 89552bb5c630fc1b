"""Addresses that guests make from their MAC addresses: ports get and lose them with subnets and MAC addresses."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.network.addresses import ROUTER_INTERFACE, Range, range_of, serves
from micronova.neighbours.network.binding import CHANGED, concerns_server, event
from micronova.neighbours.network.cidrs import eui64, number_of
from micronova.neighbours.network.collection import chunks
from micronova.neighbours.network.core import Core, insert_unless_there
from micronova.neighbours.network.errors import conflict
from micronova.neighbours.network.notifier import Event
from micronova.neighbours.network.tables import addresses, ports, subnets


def give_to_ports(conn: sa.Connection, core: Core, subnet: Range) -> list[Event]:
    """Give every port of a network its address on a new subnet, as the guests behind them will."""
    if not subnet.slaac:
        return []
    p, a = ports.c, addresses.c
    there = conn.execute(sa.select(ports).where(p.network_id == subnet.network_id, p.device_owner != ROUTER_INTERFACE))
    chosen = [row for row in there.mappings() if serves(subnet, row["device_owner"])]
    last: dict[str, int] = {}
    for part in chunks([row["id"] for row in chosen]):
        counted = sa.select(a.port_id, sa.func.max(a.position).label("last")).where(a.port_id.in_(part))
        last |= {row.port_id: row.last for row in conn.execute(counted.group_by(a.port_id))}
    for row in chosen:
        _take(conn, subnet, row["mac_address"], row["id"], last.get(row["id"], -1) + 1)
    return _changed(conn, core, chosen)


def take_from_ports(conn: sa.Connection, core: Core, subnet_id: str) -> list[Event]:
    """Take away every port's address on a subnet that goes."""
    on_it = sa.select(addresses.c.port_id).where(addresses.c.subnet_id == subnet_id)
    rows = conn.execute(sa.select(ports).where(ports.c.id.in_(on_it))).mappings().all()
    conn.execute(addresses.delete().where(addresses.c.subnet_id == subnet_id))
    return _changed(conn, core, rows)


def follow_mac(conn: sa.Connection, port_id: str, old: str, new: str) -> bool:
    """Exchange the addresses that followed from a port's old MAC address; say whether there were any."""
    a = addresses.c
    held = conn.execute(
        sa.select(a.address, a.position, subnets)
        .join(subnets, subnets.c.id == a.subnet_id)
        .where(a.port_id == port_id)
    ).all()
    found = False
    for row in held:
        subnet = range_of(row)
        if subnet.slaac and row.address == str(eui64(subnet.cidr, old)):
            conn.execute(addresses.delete().where(a.subnet_id == subnet.id, a.address == row.address))
            _take(conn, subnet, new, port_id, row.position)
            found = True
    return found


def _take(conn: sa.Connection, subnet: Range, mac: str, port_id: str, position: int) -> None:
    own = eui64(subnet.cidr, mac)
    row = {
        "subnet_id": subnet.id, "number": number_of(own), "address": str(own), "port_id": port_id,
        "position": position,
    }  # fmt: skip
    if not insert_unless_there(conn, addresses, row):
        raise conflict(f"The IP address {own} is in use.", "IpAddressInUse")


def _changed(conn: sa.Connection, core: Core, rows: Sequence[Any]) -> list[Event]:
    """Count a change of each port; compute hears of those that it has bound."""
    for part in chunks([row["id"] for row in rows]):
        counted = {"revision": ports.c.revision + 1, "updated_at": core.now()}
        conn.execute(ports.update().where(ports.c.id.in_(part)).values(**counted))
    return [event(core, CHANGED, row) for row in rows if concerns_server(row)]
