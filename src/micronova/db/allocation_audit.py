"""Checks the counters of claims: `used` against the allocations, server groups against their members."""

from typing import Any, Literal, NamedTuple

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
    held_query = sa.select(_a.node_uuid, _a.resource_class, sa.func.sum(_a.used)).group_by(
        _a.node_uuid, _a.resource_class
    )
    used_query = sa.select(_i.node_uuid, _i.resource_class, _i.used).order_by(_i.node_uuid, _i.resource_class)
    if node_uuid is not None:
        held_query = held_query.where(_a.node_uuid == node_uuid)
        used_query = used_query.where(_i.node_uuid == node_uuid)
    held = {(node, name): int(used) for node, name, used in conn.execute(held_query)}
    found = []
    for node, name, used in conn.execute(used_query):
        actual = held.pop((node, name), 0)
        if actual != used:
            found.append(Drift(kind="used", where=node, what=name, recorded=used, actual=actual))
    found += [
        Drift(kind="used", where=node, what=name, recorded=0, actual=used)
        for (node, name), used in held.items()
        if used  # else the row only says where a consumer is
    ]
    return found


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
    members = (
        sa.select(
            consumers.c.server_group_id,
            _n.host,
            sa.func.count(sa.distinct(_a.consumer_uuid)).label("members"),
        )
        .join(allocations, _a.consumer_uuid == consumers.c.consumer)
        .join(compute_nodes, _n.uuid == _a.node_uuid)
        .group_by(consumers.c.server_group_id, _n.host)
    )
    actual: dict[tuple[Any, Any], int] = {(group, host): count for group, host, count in conn.execute(members)}
    counted = sa.select(server_group_hosts).where(_g.members != 0)
    if group_uuid is not None:
        counted = counted.where(_g.group_uuid == group_uuid)
    recorded = {(row.group_uuid, row.host): row.members for row in conn.execute(counted)}
    # A group that was deleted while it had members counts no more.
    groups = {group for group, _ in recorded}
    return [
        Drift(kind="group", where=key[0], what=key[1], recorded=recorded.get(key, 0), actual=actual.get(key, 0))
        for key in sorted(recorded.keys() | {key for key in actual if key[0] in groups})
        if recorded.get(key, 0) != actual.get(key, 0)
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
