"""The ports of DHCP servers: one for each host and network that has guests there, made by the service itself.

An agent only says that something is missing. What it may have follows from the guests that compute has bound to its
host, so that a host can make no port on a network that it has nothing to do with.
"""

import logging
from dataclasses import dataclass

import sqlalchemy as sa

from micronova.neighbours.network.addresses import MOST_PER_PORT, Wish, addresses_of, ranges_of, wishes
from micronova.neighbours.network.binding import bound, status_of
from micronova.neighbours.network.core import Changed, Core
from micronova.neighbours.network.notifier import Event
from micronova.neighbours.network.port_changes import change, delete, insert_all
from micronova.neighbours.network.port_rows import Made, Plan, blank, learn, random_macs, with_hints
from micronova.neighbours.network.tables import agents, ports, subnets
from micronova.objects.errors import Conflict, Invalid

log = logging.getLogger(__name__)

OWNER = "network:dhcp"


@dataclass(frozen=True)
class Due:
    """A network on which a host's port is missing, has the wrong addresses, or is needed no more (no wishes)."""

    network_id: str
    port_id: str | None
    wishes: list[Wish]


async def settle(core: Core, host: str) -> None:
    """Have a port on each network that has guests on the host and subnets with DHCP, and none elsewhere."""
    for due in await core.database.read(_due, host):
        try:
            await _settle(core, host, due)
        except (Changed, Conflict, Invalid, sa.exc.IntegrityError) as error:
            # The network is full, or somebody was quicker: guests of other networks need not suffer for it.
            log.warning("no DHCP server of host %s on network %s: %s", host, due.network_id, error)


async def _settle(core: Core, host: str, due: Due) -> None:
    if due.port_id is None:
        learn(core, await core.change(_insert, core, host, _plan(core, host, due)))
    elif due.wishes:
        await core.change(change, core, due.port_id, None, {}, None, with_hints(core, due.wishes), None, {host})
    else:
        await core.change(delete, core, due.port_id)


def _plan(core: Core, host: str, due: Due) -> Plan:
    row = blank(core, "", due.network_id)  # nobody's: no quota counts it
    row.update(device_id=f"dhcp-{host}"[:255], device_owner=OWNER, port_security_enabled=False)
    row.update(bound(due.network_id, host, row["vnic_type"], port_security=False))
    row["status"] = status_of(row, agent_on_host=True)
    return Plan(row=row, macs=random_macs(core), wishes=with_hints(core, due.wishes))


def _insert(conn: sa.Connection, core: Core, host: str, plan: Plan) -> tuple[list[Made], list[Event]]:
    conn.execute(sa.select(agents.c.id).where(agents.c.host == host).with_for_update())  # one at a time
    if plan.row["network_id"] in _servers(conn, host):
        return [], []
    return insert_all(conn, core, [plan])


def _due(conn: sa.Connection, host: str) -> list[Due]:
    p = ports.c
    here = sa.select(p.network_id).where(p.host == host, p.vif_type != "binding_failed")
    guests = set(conn.execute(here.where(p.device_owner.not_like("network:%")).distinct()).scalars())
    servers = _servers(conn, host)
    held = addresses_of(conn, list(servers.values()))
    s = subnets.c
    served: dict[str, list[dict[str, str]]] = {}
    chosen = sa.select(s.id, s.network_id).where(s.network_id.in_(sorted(guests)), s.enable_dhcp)
    for row in conn.execute(chosen.order_by(s.created_at, s.id)):
        served.setdefault(row.network_id, []).append({"subnet_id": row.id})
    ranges = ranges_of(conn, served)
    found = []
    for network in sorted({*served, *servers}):
        asked = served.get(network, [])[:MOST_PER_PORT]
        wanted = wishes(network, ranges[network], asked, OWNER) if asked else []
        server = servers.get(network)
        has = {each["subnet_id"] for each in held.get(server or "", ())}
        if server is None or not wanted or has != {wish.choices[0].id for wish in wanted}:
            found.append(Due(network, server, wanted))
    return found


def _servers(conn: sa.Connection, host: str) -> dict[str, str]:
    """Return the ports of a host's DHCP servers, by network."""
    p = ports.c
    mine = sa.select(p.network_id, p.id).where(p.host == host, p.device_owner == OWNER)
    return {row.network_id: row.id for row in conn.execute(mine)}
