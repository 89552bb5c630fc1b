"""Allocations: what consumers (instances, and migrations of them) hold of resource providers.

`db/claims.py` takes them; here they are read, given back, and handed from an instance to its migration and back.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import EllipsisType
from typing import Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import group_members, topologies, used_amounts
from micronova.db.listed import one_of
from micronova.db.prepared import Prepared
from micronova.db.tables import allocations, compute_nodes, deleted_instances, instances
from micronova.placement.model import ResourceRequest

Resources = dict[str, int]
NOTHING_OF_NODE: Resources = {"VCPU": 0}
"""The amount of a consumer that takes nothing of its compute node: its row says which node that is."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer holds of one provider."""

    node_uuid: str  # of the provider, which need not be a compute node
    host: str | None  # None: the provider is no compute node
    resources: Resources


class LockedInstance(Protocol):
    """What a claim compares of an instance that it has locked."""

    uuid: str
    epoch: int
    server_group_id: str | None


_a = allocations.c
_LOCK_INSTANCES = Prepared(
    sa.select(instances.c.uuid, instances.c.epoch, instances.c.server_group_id)
    .where(one_of(instances.c.uuid, "uuids"))
    .order_by(instances.c.uuid)
    .with_for_update()
)
_ALLOCATIONS = Prepared(
    sa.select(_a.consumer_uuid, _a.node_uuid, _a.resource_class, _a.used, compute_nodes.c.host)
    .outerjoin(compute_nodes, compute_nodes.c.uuid == _a.node_uuid)
    .where(one_of(_a.consumer_uuid, "uuids"))
)
_RENAME = allocations.update().where(_a.consumer_uuid == bindparam("b_old")).values(consumer_uuid=bindparam("b_new"))
_DELETE = Prepared(
    allocations.delete()
    .where(_a.consumer_uuid == bindparam("uuid"))
    .returning(_a.node_uuid, _a.resource_class, _a.used)
)
_GROUP_OF_DELETED = sa.select(deleted_instances.c.server_group_id).where(deleted_instances.c.uuid == bindparam("uuid"))
_HOSTS_OF = sa.select(compute_nodes.c.host).distinct().where(
    one_of(compute_nodes.c.uuid, "uuids")
)  # fmt: skip


def lock_instances(conn: sa.Connection, uuids: Collection[str]) -> dict[str, LockedInstance]:
    """Lock instances in the order of their uuids; return those that exist."""
    return {row.uuid: row for row in _LOCK_INSTANCES.records(conn, {"uuids": sorted(uuids)})}


def get_many(conn: sa.Connection, consumer_uuids: Collection[str]) -> dict[str, list[Allocation]]:
    """Return what consumers hold; those that hold nothing are left out."""
    found: dict[str, dict[str, Allocation]] = {}
    for row in _ALLOCATIONS.records(conn, {"uuids": consumer_uuids}):
        providers = found.setdefault(row.consumer_uuid, {})
        if row.node_uuid not in providers:
            providers[row.node_uuid] = Allocation(node_uuid=row.node_uuid, host=row.host, resources={})
        providers[row.node_uuid].resources[row.resource_class] = row.used
    return {consumer: list(providers.values()) for consumer, providers in found.items()}


def hosts_of(conn: sa.Connection, consumer_uuids: Collection[str]) -> Counter[str]:
    """Return on which hosts consumers hold resources, and how many of them."""
    held = get_many(conn, consumer_uuids).values()
    return Counter(each.host for allocated in held for each in allocated if each.host is not None)


def node_allocation(
    held: Sequence[Allocation], resources: Mapping[str, int], resource_request: ResourceRequest | None
) -> Allocation | None:
    """Return what a consumer holds of its compute node, if it holds just these amounts in all; else None."""
    total: Counter[str] = Counter()
    for each in held:
        total.update(each.resources)
    wanted = Counter(resources)
    for group in resource_request.groups if resource_request is not None else ():
        wanted.update(group.resources)
    on_nodes = [each for each in held if each.host is not None]
    return on_nodes[0] if len(on_nodes) == 1 and total == wanted else None


def release(conn: sa.Connection, consumer_uuid: str, *, now: int, group_uuid: str | EllipsisType | None = ...) -> None:
    """Give back all that a consumer holds; holding nothing is not an error.

    A caller that has locked the instance passes its server group (or None), which saves reading it here.
    """
    group: str | None = None
    known = not isinstance(group_uuid, EllipsisType)
    if not isinstance(group_uuid, EllipsisType):
        group = group_uuid
    elif (locked := lock_instances(conn, [consumer_uuid]).get(consumer_uuid)) is not None:
        known, group = True, locked.server_group_id
    amounts: Counter[tuple[str, str]] = Counter()
    for row in _DELETE.records(conn, {"uuid": consumer_uuid}):
        amounts[row.node_uuid, row.resource_class] -= row.used
    if not amounts:
        # Its amounts may have been given back through the Placement API, which knows no topologies.
        topologies.release(conn, consumer_uuid, now)
        return
    if not known:  # a deleted server is moved to `deleted_instances` before its claim is released
        group = conn.execute(_GROUP_OF_DELETED, {"uuid": consumer_uuid}).scalar()
    if group is not None:
        group_members.lock(conn, [group])
        hosts = conn.execute(_HOSTS_OF, {"uuids": sorted({provider for provider, _ in amounts})}).scalars().all()
        group_members.count(conn, group, Counter(dict.fromkeys(hosts, -1)))
    topologies.release(conn, consumer_uuid, now)
    used_amounts.change(conn, amounts, now)


def hand_over(conn: sa.Connection, consumer_uuid: str, *, holder: str) -> None:
    """Let a migration hold what an instance holds, so that the instance can claim another host."""
    conn.execute(_RENAME, {"b_old": consumer_uuid, "b_new": holder})
    topologies.rename(conn, consumer_uuid, holder)


def take_back(
    conn: sa.Connection, consumer_uuid: str, *, holder: str, node_uuid: str | None, now: int, group_uuid: str | None
) -> None:
    """Give an instance back what a migration holds of its source node, in place of what the instance has claimed since.

    Nothing changes if it was given back before.
    """
    if not is_handed_over(conn, consumer_uuid, holder=holder, node_uuid=node_uuid):
        return
    release(conn, consumer_uuid, now=now, group_uuid=group_uuid)
    conn.execute(_RENAME, {"b_old": holder, "b_new": consumer_uuid})
    topologies.rename(conn, holder, consumer_uuid)


def is_handed_over(conn: sa.Connection, consumer_uuid: str, *, holder: str, node_uuid: str | None) -> bool:
    """Return whether a migration has what an instance held on a node, and the instance may have claimed another one.

    The migration holds something, or the instance holds something elsewhere: amounts may be missing, because a
    client of the Placement API may have deleted them; that API knows no topologies.
    """
    if _ALLOCATIONS.all(conn, {"uuids": [holder]}) or topologies.assignments_of(conn, [holder]):
        return True
    return any(
        row.node_uuid != node_uuid and row.host for row in _ALLOCATIONS.records(conn, {"uuids": [consumer_uuid]})
    )
