"""What belongs to a compute host, for operators who look at it or remove it."""

from typing import Any, NamedTuple

import sqlalchemy as sa

from micronova.db import operations as operation_rows
from micronova.db import server_migrations
from micronova.db.tables import compute_nodes, departures, hosts, instances, operations


class HostContents(NamedTuple):
    """What belongs to a host."""

    has_user: bool  # a broker user of its own, which has not been taken away
    console_address: str
    nodes: list[str]
    servers: list[dict[str, Any]]  # uuid, name, project and states
    operations: int  # open, that the host works on
    migrating: bool  # it is the source or the destination of an open migration
    departures: int  # guests that it still has to remove


def of_host(conn: sa.Connection, host: str) -> HostContents:
    """Return what belongs to a host."""
    user = conn.execute(sa.select(hosts.c.console_address, hosts.c.removed_at).where(hosts.c.name == host)).first()
    columns = (
        instances.c.uuid,
        instances.c.display_name.label("name"),
        instances.c.project_id,
        instances.c.vm_state,
        instances.c.task_state,
    )
    servers = conn.execute(sa.select(*columns).where(instances.c.host == host).order_by(instances.c.created_at))
    nodes = sa.select(compute_nodes.c.hypervisor_hostname).where(compute_nodes.c.host == host)
    works = sa.select(sa.func.count()).select_from(operations)
    works = works.where(operations.c.owner == operation_rows.host_owner(host), operations.c.finished_at.is_(None))
    leaving = sa.select(sa.func.count()).select_from(departures).where(departures.c.host == host)
    return HostContents(
        has_user=user is not None and user.removed_at is None,
        console_address="" if user is None else user.console_address or "",
        nodes=sorted(conn.execute(nodes).scalars()),
        servers=[dict(row) for row in servers.mappings()],
        operations=conn.execute(works).scalar_one(),
        migrating=server_migrations.any_on_host(conn, host),
        departures=conn.execute(leaving).scalar_one(),
    )
