"""Checks the counters of claims: `used` against the allocations, server groups against their members."""

from typing import Literal, NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.db import group_members
from micronova.db.tables import (
    allocations,
    compute_nodes,
    consumers,
    instances,
    inventories,
    migrations,
    resource_providers,
    server_group_hosts,
    topology_claims,
)
from micronova.objects import migration_states

_a, _i, _g, _n, _m = allocations.c, inventories.c, server_group_hosts.c, compute_nodes.c, migrations.c


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A counter that differs from what it counts."""

    kind: Literal["used", "group", "orphan"]
    where: str  # node uuid, group uuid, or consumer uuid
    what: str  # resource class, host, or node uuid
    recorded: int
    actual: int


def audit(conn: sa.Connection) -> list[Drift]:
    """List every counter that is wrong, and every allocation of no server, open migration or other consumer."""
    return [*_usage(conn), *_groups(conn), *_orphans(conn)]


class Oversold(NamedTuple):
    """A resource class of which more is used than may be."""

    provider: str
    host: str | None  # if the provider is a compute node
    resource_class: str
    used: int
    capacity: int
    total: int
    reserved: int
    ratio: float


def oversold(conn: sa.Connection) -> list[Oversold]:
    """List inventories of which more is used than may be: no claim does it, a smaller host or a lower ratio can."""
    name = sa.func.coalesce(_n.hypervisor_hostname, resource_providers.c.name, _i.node_uuid)
    query = (
        sa.select(name, _n.host, _i.resource_class, _i.used, _i.capacity, _i.total, _i.reserved, _i.allocation_ratio)
        .select_from(inventories)
        .outerjoin(compute_nodes, _n.uuid == _i.node_uuid)
        .outerjoin(resource_providers, resource_providers.c.uuid == _i.node_uuid)
        .where(_i.used > _i.capacity)
        .order_by(_i.node_uuid, _i.resource_class)
    )
    return [Oversold(*row) for row in conn.execute(query)]


def repair_used(conn: sa.Connection, node_uuid: str, now: int) -> list[Drift]:
    """Set `used` of a node to what its allocations add up to; return what was wrong."""
    # Locked first: a claim under way has changed the row, but its allocations are not to be seen yet.
    rows = sa.select(_i.resource_class).where(_i.node_uuid == node_uuid).order_by(_i.resource_class)
    known = set(conn.execute(rows.with_for_update()).scalars())
    wrong = [drift for drift in _usage(conn, node_uuid) if drift.what in known]
    for drift in wrong:
        conn.execute(
            inventories.update()
            .where(_i.node_uuid == node_uuid, _i.resource_class == drift.what)
            .values(used=drift.actual, changed_at=now)
        )
    return wrong


def repair_group(conn: sa.Connection, group_uuid: str) -> list[Drift]:
    """Set the members of a server group on each host to those that hold resources there; return what was wrong."""
    group_members.lock(conn, {group_uuid})
    wrong = _groups(conn, group_uuid)
    for drift in wrong:
        group_members.count(conn, group_uuid, {drift.what: drift.actual - drift.recorded})
    return wrong


def _usage(conn: sa.Connection, node_uuid: str | None = None) -> list[Drift]:
    """Return where `used` differs from the allocations, of one node or of all."""
    recorded = sa.select(_i.node_uuid.label("where"), _i.resource_class.label("what"), _i.used.label("number"))
    held = sa.select(
        _a.node_uuid.label("where"), _a.resource_class.label("what"), sa.func.sum(_a.used).label("number")
    ).group_by(_a.node_uuid, _a.resource_class)
    if node_uuid is not None:
        recorded, held = recorded.where(_i.node_uuid == node_uuid), held.where(_a.node_uuid == node_uuid)
    return _differences(conn, "used", recorded.subquery(), held.subquery())


def _groups(conn: sa.Connection, group_uuid: str | None = None) -> list[Drift]:
    """Return where the members of a group on a host are counted wrong, of one group or of all."""
    group = instances.c.server_group_id
    wanted = group.is_not(None) if group_uuid is None else group == group_uuid
    # A server that moves is a member on both hosts.
    consumers = sa.union_all(
        sa.select(group, instances.c.uuid.label("consumer")).where(wanted),
        sa.select(group, _m.uuid.label("consumer"))
        .join(migrations, _m.instance_uuid == instances.c.uuid)
        .where(_m.status.in_(migration_states.OPEN), wanted),
    ).subquery()
    recorded = sa.select(_g.group_uuid.label("where"), _g.host.label("what"), _g.members.label("number"))
    recorded = recorded.where(_g.members != 0)
    # A group that was deleted while it had members counts no more.
    counted = sa.select(_g.group_uuid).where(_g.members != 0)
    if group_uuid is not None:
        recorded, counted = recorded.where(_g.group_uuid == group_uuid), counted.where(_g.group_uuid == group_uuid)
    members = (
        sa.select(
            consumers.c.server_group_id.label("where"),
            _n.host.label("what"),
            sa.func.count(sa.distinct(_a.consumer_uuid)).label("number"),
        )
        .join(allocations, _a.consumer_uuid == consumers.c.consumer)
        .join(compute_nodes, _n.uuid == _a.node_uuid)
        .where(consumers.c.server_group_id.in_(counted))
        .group_by(consumers.c.server_group_id, _n.host)
    )
    return _differences(conn, "group", recorded.subquery(), members.subquery())


def _differences(
    conn: sa.Connection, kind: Literal["used", "group"], recorded: sa.Subquery, actual: sa.Subquery
) -> list[Drift]:
    """Return where two numbers differ, in the order of their keys; one that is missing is 0.

    The database compares them: there are some of each host, and few of them differ.
    """
    r, x = recorded.c, actual.c
    same = sa.and_(r.where == x.where, r.what == x.what)
    number = sa.func.coalesce(x.number, 0)
    wrong = sa.select(r.where, r.what, r.number, number).outerjoin(actual, same).where(r.number != number)
    missing = sa.select(x.where, x.what, sa.literal(0), x.number).outerjoin(recorded, same)
    missing = missing.where(r.where.is_(None), x.number != 0)
    return [
        Drift(kind=kind, where=where, what=what, recorded=before, actual=int(now))
        for where, what, before, now in sorted([*conn.execute(wrong), *conn.execute(missing)])
    ]


def _orphans(conn: sa.Connection) -> list[Drift]:
    holding = sa.union_all(
        sa.select(_a.consumer_uuid, _a.node_uuid),
        sa.select(topology_claims.c.consumer_uuid, topology_claims.c.node_uuid),
    ).subquery()
    holder = holding.c.consumer_uuid
    query = (
        sa.select(holder, holding.c.node_uuid, sa.func.count())
        .outerjoin(instances, instances.c.uuid == holder)
        .outerjoin(migrations, sa.and_(_m.uuid == holder, _m.status.in_(migration_states.OPEN)))
        .outerjoin(consumers, consumers.c.uuid == holder)
        .where(instances.c.uuid.is_(None), _m.uuid.is_(None), consumers.c.uuid.is_(None))
        .group_by(holder, holding.c.node_uuid)
    )
    return [
        Drift(kind="orphan", where=consumer, what=node, recorded=rows, actual=0)
        for consumer, node, rows in conn.execute(query)
    ]
