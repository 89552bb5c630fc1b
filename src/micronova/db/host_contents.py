"""What belongs to a compute host, for operators who look at it or remove it."""

from typing import Final, NamedTuple, TypedDict

import sqlalchemy as sa

from micronova.db import nodes as node_rows
from micronova.db import operations as operation_rows
from micronova.db import server_migrations
from micronova.db.tables import compute_nodes, departures, hosts, instances, operations

MOVING: Final = ("live_migrate", "migrate", "snapshot")
"""The capabilities of a driver by which its servers get to other hosts."""


class ServerOnHost(TypedDict):
    """A server, as lists of those on a host show it."""

    uuid: str
    name: str
    project_id: str
    vm_state: str
    task_state: str | None


_SERVERS = (
    sa.select(
        instances.c.uuid,
        instances.c.display_name,
        instances.c.project_id,
        instances.c.vm_state,
        instances.c.task_state,
        instances.c.node_uuid,
    )
    .where(instances.c.host == sa.bindparam("host"))
    .order_by(instances.c.created_at)
)


class HostContents(NamedTuple):
    """What belongs to a host."""

    has_user: bool  # a broker user of its own, which has not been taken away
    console_address: str
    nodes: list[str]
    servers: list[ServerOnHost]
    operations: int  # open, that the host works on
    migrating: bool  # it is the source or the destination of an open migration
    departures: int  # guests that it still has to remove


def of_host(conn: sa.Connection, host: str) -> HostContents:
    """Return what belongs to a host."""
    user = conn.execute(sa.select(hosts.c.console_address, hosts.c.removed_at).where(hosts.c.name == host)).first()
    nodes = sa.select(compute_nodes.c.hypervisor_hostname).where(compute_nodes.c.host == host)
    works = sa.select(sa.func.count()).select_from(operations)
    works = works.where(operations.c.owner == operation_rows.host_owner(host), operations.c.finished_at.is_(None))
    leaving = sa.select(sa.func.count()).select_from(departures).where(departures.c.host == host)
    return HostContents(
        has_user=user is not None and user.removed_at is None,
        console_address="" if user is None else user.console_address or "",
        nodes=sorted(conn.execute(nodes).scalars()),
        servers=[server for server, _ in _servers_on(conn, host)],
        operations=conn.execute(works).scalar_one(),
        migrating=server_migrations.any_on_host(conn, host),
        departures=conn.execute(leaving).scalar_one(),
    )


def movable_servers(conn: sa.Connection, host: str) -> list[tuple[ServerOnHost, frozenset[str]]]:
    """Return the servers of a host, each with those of `MOVING` that its node has."""
    found = _servers_on(conn, host)
    able = {
        node: frozenset(each for each in MOVING if not node_rows.lacks(conn, node, each))
        for node in {n for _, n in found}
    }
    return [(server, able[node]) for server, node in found]


def _servers_on(conn: sa.Connection, host: str) -> list[tuple[ServerOnHost, str | None]]:
    """Return the servers of a host, the oldest first, with their nodes."""
    return [
        (
            ServerOnHost(
                uuid=row.uuid,
                name=row.display_name,
                project_id=row.project_id,
                vm_state=row.vm_state,
                task_state=row.task_state,
            ),
            row.node_uuid,
        )
        for row in conn.execute(_SERVERS, {"host": host})
    ]
