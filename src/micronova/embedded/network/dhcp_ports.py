"""The ports of DHCP servers: the service creates one per host and network with guests on the host.

An agent only reports that a port is missing. Which ports a host gets follows from the guests that compute has bound to
it, so that a host cannot get a port on another network.
"""

import logging
from dataclasses import dataclass

import sqlalchemy as sa

from micronova.embedded.common.compute_events import Event
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import (
    MAX_PER_PORT,
    AddressRequest,
    address_requests,
    addresses_of,
    allocation_subnets,
)
from micronova.embedded.network.binding import binding_columns
from micronova.embedded.network.core import Core
from micronova.embedded.network.port_changes import create_ports, delete_port, update_port
from micronova.embedded.network.port_rows import (
    CreatedPort,
    PortPlan,
    remember_addresses,
    service_port,
    with_hints,
)
from micronova.embedded.network.row_types import port_with
from micronova.embedded.network.tables import agents, ports, subnets
from micronova.objects.errors import Conflict, Invalid

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Due:
    """A network on which a host's port is missing, has wrong addresses, or (without requests) is not needed."""

    network_id: str
    port_id: str | None
    address_requests: list[AddressRequest]


async def bring_up_to_date(core: Core, host: str) -> None:
    """Create, change and delete ports until each network with guests on the host and DHCP has one, and no other."""
    for due in await core.database.read(_due, host):
        try:
            await _apply(core, host, due)
        except (Changed, Conflict, Invalid, sa.exc.IntegrityError) as error:
            # The network is full, or a concurrent request did it. Go on with the other networks.
            log.warning("cannot update the DHCP port of host %s on network %s: %s", host, due.network_id, error)


async def _apply(core: Core, host: str, due: Due) -> None:
    if due.port_id is None:
        remember_addresses(core, await core.write_with_events(_insert, core, host, _plan(core, host, due)))
    elif due.address_requests:
        await core.write_with_events(
            update_port,
            core,
            due.port_id,
            {},
            agent_hosts={host},
            address_requests=with_hints(core, due.address_requests),
        )
    else:
        await core.write_with_events(delete_port, core, due.port_id)


def _plan(core: Core, host: str, due: Due) -> PortPlan:
    plan = service_port(
        core, "", due.network_id, f"dhcp-{host}"[:255], device_owners.DHCP, due.address_requests, status="DOWN"
    )
    binding = binding_columns(due.network_id, host, plan.row["vnic_type"], port_security=False)
    plan.row = port_with(plan.row, binding)
    return plan


def _insert(conn: sa.Connection, core: Core, host: str, plan: PortPlan) -> tuple[list[CreatedPort], list[Event]]:
    conn.execute(sa.select(agents.c.id).where(agents.c.host == host).with_for_update())  # serialises reports
    if plan.row["network_id"] in _dhcp_ports(conn, host):
        return [], []
    return create_ports(conn, core, [plan])


def _due(conn: sa.Connection, host: str) -> list[Due]:
    p = ports.c
    here = sa.select(p.network_id).where(p.host == host, p.vif_type != "binding_failed")
    guests = set(conn.execute(here.where(p.device_owner.not_like(f"{device_owners.SERVICE}%")).distinct()).scalars())
    servers = _dhcp_ports(conn, host)
    held = addresses_of(conn, list(servers.values()))
    s = subnets.c
    served: dict[str, list[dict[str, str]]] = {}
    chosen = sa.select(s.id, s.network_id).where(s.network_id.in_(sorted(guests)), s.enable_dhcp)
    for row in conn.execute(chosen.order_by(s.created_at, s.id)):
        served.setdefault(row.network_id, []).append({"subnet_id": row.id})
    candidates = allocation_subnets(conn, served)
    found = []
    for network in sorted({*served, *servers}):
        asked = served.get(network, [])[:MAX_PER_PORT]
        wanted = address_requests(network, candidates[network], asked, device_owners.DHCP) if asked else []
        server = servers.get(network)
        has = {each["subnet_id"] for each in held.get(server or "", ())}
        if server is None or not wanted or has != {request.choices[0].id for request in wanted}:
            found.append(Due(network, server, wanted))
    return found


def _dhcp_ports(conn: sa.Connection, host: str) -> dict[str, str]:
    """Return the ports of a host's DHCP servers, by network."""
    p = ports.c
    mine = sa.select(p.network_id, p.id).where(p.host == host, p.device_owner == device_owners.DHCP)
    return {row.network_id: row.id for row in conn.execute(mine)}
