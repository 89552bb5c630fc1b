"""Addresses that guests derive by SLAAC: they follow the subnets of the network and the MAC address of the port."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.compute_events import Event
from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import AllocationSubnet, allocate_derived, allocation_subnet, serves
from micronova.embedded.network.binding import belongs_to_server, event
from micronova.embedded.network.core import Core
from micronova.embedded.network.host_changes import note, topics_of_groups, topics_of_ports
from micronova.embedded.network.port_events import CHANGED
from micronova.embedded.network.tables import addresses, ports, subnets


def give_to_ports(conn: sa.Connection, core: Core, subnet: AllocationSubnet) -> list[Event]:
    """Give every port of a network the address that its guest derives on a new subnet."""
    if not subnet.slaac:
        return []
    p, a = ports.c, addresses.c
    there = conn.execute(
        sa.select(ports).where(p.network_id == subnet.network_id, p.device_owner != device_owners.ROUTER_INTERFACE)
    )
    chosen = [row for row in there.mappings() if serves(subnet, row["device_owner"])]
    last: dict[str, int] = {}
    for part in chunks([row["id"] for row in chosen]):
        counted = sa.select(a.port_id, sa.func.max(a.position).label("last")).where(a.port_id.in_(part))
        last |= {row.port_id: row.last for row in conn.execute(counted.group_by(a.port_id))}
    for row in chosen:
        allocate_derived(conn, subnet, row["id"], last.get(row["id"], -1) + 1, row["mac_address"])
    return _changed(conn, core, chosen)


def take_from_ports(conn: sa.Connection, core: Core, subnet_id: str) -> list[Event]:
    """Remove the addresses of a subnet that is deleted from all ports."""
    on_it = sa.select(addresses.c.port_id).where(addresses.c.subnet_id == subnet_id)
    rows = conn.execute(sa.select(ports).where(ports.c.id.in_(on_it))).mappings().all()
    conn.execute(addresses.delete().where(addresses.c.subnet_id == subnet_id))
    return _changed(conn, core, rows)


def follow_mac(conn: sa.Connection, port_id: str, old: str, new: str) -> bool:
    """Replace the addresses that were derived from a port's old MAC address; return whether there were any."""
    a = addresses.c
    held = conn.execute(
        sa.select(a.address, a.position, subnets).join(subnets, subnets.c.id == a.subnet_id).where(a.port_id == port_id)
    ).all()
    found = False
    for row in held:
        subnet = allocation_subnet(row)
        if subnet.slaac and row.address == str(subnet.derived_address(old)):
            conn.execute(addresses.delete().where(a.subnet_id == subnet.id, a.address == row.address))
            allocate_derived(conn, subnet, port_id, row.position, new)
            found = True
    return found


def _changed(conn: sa.Connection, core: Core, rows: Sequence[Any]) -> list[Event]:
    """Increase the revision of each port; return the events for compute."""
    for part in chunks([row["id"] for row in rows]):
        revisions.touch(conn, ports.c.revision, ports.c.id.in_(part), now=core.now())
    note(conn, core.now(), topics_of_ports(*rows) | topics_of_groups(conn, [row["id"] for row in rows]))
    return [event(core, CHANGED, row) for row in rows if belongs_to_server(row)]
