"""Moves of servers: the rows of `migrations`, and what a server holds on its two hosts while one is open.

While a move is under way, the server belongs to its source: the migration holds the resources of the source, with the
old flavor, and the server's own claim is on the destination, with the new flavor. The quota is charged with the larger
of both flavors until the move is confirmed or reverted. A server that is reverted belongs to its source; it holds
resources on both hosts, and counts as before, until its destination has given them back. Every function that changes
something runs in the transaction of a caller that has locked the instance.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast
from uuid import UUID, uuid5

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import allocations, departures, keyset, quotas, services
from micronova.db import operations as operation_rows
from micronova.db.listed import DIALECTS, as_triples, one_of, triples
from micronova.db.prepared import Prepared
from micronova.db.tables import compute_nodes, instances, migrations
from micronova.objects import migration_states, states
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import Conflict, HostNotHeard
from micronova.objects.instance import FlavorData, InstanceRow
from micronova.objects.migration import MigrationChanges, MigrationRow
from micronova.objects.operations import UNDO_MOVE, OperationRow, ResizedPayload, UndoPayload

_NAMESPACE: Final = UUID("7d1f0a52-7c0e-4b8e-9a3d-0b6c2f4e8d17")
"""Of the ids of operations that undo a move, which follow from the migration."""
_CHANGES_SIZE: Final = (migration_states.POST_MIGRATING, migration_states.REVERTING)
"""Statuses in which the guest may have got its new size, if it stays on its host."""
_CHANGES_GUEST: Final = (
    migration_states.QUEUED, migration_states.RUNNING, migration_states.MIGRATING, *_CHANGES_SIZE
)  # fmt: skip
"""Statuses in which the host that a server belongs to may have switched its guest off, paused or changed it."""

_m = migrations.c
_GET = sa.select(migrations).where(_m.uuid == bindparam("uuid"))
_OF_INSTANCE = sa.select(migrations).where(_m.instance_uuid == bindparam("instance"))
_OPEN_OF = Prepared(
    _OF_INSTANCE.where(_m.status.in_([sa.literal(each) for each in migration_states.OPEN])).order_by(_m.id.desc())
)
_OPEN = sa.select(migrations).where(_m.status.in_(migration_states.OPEN))
_UNCONFIRMED = (
    sa.select(_m.uuid, _m.instance_uuid)
    .join(instances, instances.c.uuid == _m.instance_uuid)
    .where(_m.status == migration_states.FINISHED, _m.updated_at < bindparam("before"))
    # Others, such as of servers in ERROR, cannot be confirmed now: they must not use up the limit.
    .where(instances.c.vm_state == states.RESIZED, instances.c.task_state.is_(None))
    .where(_m.uuid > bindparam("after"))
    .order_by(_m.uuid)
    .limit(bindparam("most"))
)
_PURGE = migrations.delete().where(one_of(_m.instance_uuid, "instances"))
_ON_HOST = (
    sa.select(_m.uuid)
    .where(_m.status.in_(migration_states.OPEN))
    .where(sa.or_(_m.source_compute == bindparam("host"), _m.dest_compute == bindparam("host")))
    .limit(1)
)
# In one statement however many there are; the number of a triple is not used.
_COMPLETE = {
    dialect: migrations.update()
    .where(_m.status == migration_states.DONE)
    .where(sa.tuple_(_m.source_compute, _m.instance_uuid, sa.literal(0)).in_(triples("removed", dialect)))
    .values(status=migration_states.COMPLETED, updated_at=bindparam("now"))
    for dialect in DIALECTS
}
_SORT = (keyset.SortKey(_m.created_at, descending=True), keyset.SortKey(_m.id, descending=True))


def new_row(
    context: Context,
    row: InstanceRow,
    flavor: FlavorData,
    *,
    uuid: str,
    migration_type: str,
    status: str,
    destination: str | None,
    now: int,
) -> MigrationRow:
    """Return the row of a migration of a server, which is on its source, to a flavor."""
    assert row["host"] is not None
    return {
        "id": 0,
        "uuid": uuid,
        "instance_uuid": row["uuid"],
        "migration_type": migration_type,
        "status": status,
        "source_compute": row["host"],
        "source_node": row["node"],
        "source_node_uuid": row["node_uuid"],
        "source_zone": row["availability_zone"],
        "dest_compute": destination,
        "dest_node": None,
        "dest_host": None,
        "old_flavor": row["flavor"],
        "new_flavor": flavor,
        "old_vm_state": row["vm_state"],
        "user_id": context.user_id,
        "project_id": context.project_id,
        "request_id": context.request_id,
        "created_at": now,
        "updated_at": None,
    }


def insert(conn: sa.Connection, row: MigrationRow) -> None:
    """Insert a migration; the database chooses its `id`."""
    conn.execute(migrations.insert(), {key: value for key, value in row.items() if key != "id"})


def get(conn: sa.Connection, uuid: str) -> MigrationRow | None:
    """Return a migration."""
    return cast(MigrationRow | None, conn.execute(_GET, {"uuid": uuid}).mappings().first())


def open_of(conn: sa.Connection, instance_uuid: str) -> MigrationRow | None:
    """Return the migration because of which an instance has two hosts, or None."""
    return cast(MigrationRow | None, _OPEN_OF.first(conn, {"instance": instance_uuid}))


def context_of(migration: MigrationRow) -> Context:
    """Return the context of the request that asked for a migration."""
    return Context(request_id=migration["request_id"], user_id=migration["user_id"], project_id=migration["project_id"])


def of_instance(conn: sa.Connection, instance_uuid: str) -> list[MigrationRow]:
    """Return the migrations of an instance, the newest first."""
    found = conn.execute(_OF_INSTANCE.order_by(_m.id.desc()), {"instance": instance_uuid}).mappings()
    return cast(list[MigrationRow], list(found))


def list_open(conn: sa.Connection) -> list[MigrationRow]:
    """Return all migrations that are open."""
    return cast(list[MigrationRow], list(conn.execute(_OPEN).mappings()))


def any_on_host(conn: sa.Connection, host: str) -> bool:
    """Return whether a host is the source or the destination of an open migration."""
    return conn.execute(_ON_HOST, {"host": host}).first() is not None


def unconfirmed(conn: sa.Connection, before: int, most: int, *, after: str = "") -> list[tuple[str, str]]:
    """Return (migration, instance) of resizes that finished before this time and can be confirmed.

    They are ordered by id, after the id `after`.
    """
    found = conn.execute(_UNCONFIRMED, {"before": before, "most": most, "after": after})
    return [(uuid, instance) for uuid, instance in found]


def update(conn: sa.Connection, uuid: str, now: int, changes: MigrationChanges) -> None:
    """Change a migration."""
    conn.execute(migrations.update().where(_m.uuid == uuid).values(**changes, updated_at=now))


def complete_evacuations(conn: sa.Connection, removed: Sequence[tuple[str, str]], now: int) -> None:
    """Complete the evacuations of instances from hosts (host, instance) that are back and have removed the guests."""
    if removed:
        departed = as_triples([(host, uuid, 0) for host, uuid in removed])
        conn.execute(_COMPLETE[conn.dialect.name], {"removed": departed, "now": now})


def address_of(conn: sa.Connection, node_uuid: str) -> str | None:
    """Return the address that a node reports."""
    return conn.execute(sa.select(compute_nodes.c.host_ip).where(compute_nodes.c.uuid == node_uuid)).scalar()


def purge(conn: sa.Connection, instance_uuids: Sequence[str]) -> None:
    """Delete the migrations of instances whose records are deleted."""
    conn.execute(_PURGE, {"instances": list(instance_uuids)})


def list_page(
    conn: sa.Connection,
    conditions: Mapping[str, str],
    *,
    host: str | None = None,
    node: str | None = None,
    changes_since: int | None = None,
    changes_before: int | None = None,
    marker: str | None = None,
    after: Sequence[int] | None = None,
    limit: int | None = None,
) -> tuple[list[MigrationRow], bool] | None:
    """Return migrations whose columns have these values, the newest first, and whether there are more.

    `host` is the host of the source or the destination, `node` its node. The page begins after the migration with the
    marker's uuid, or after a time of creation and number. Return None if there is no migration with that uuid.
    """
    if marker is not None and (after := keyset.position(conn, _SORT, _m.uuid == marker)) is None:
        return None
    equal: list[sa.ColumnElement[bool]] = [_m[name] == value for name, value in conditions.items()]
    if node is not None:
        equal.append(sa.or_(_m.source_node == node, _m.dest_node == node))
    hosts = [()] if host is None else [(_m.source_compute == host,), (_m.dest_compute == host,)]
    parts = [[*equal, *of_host, *changed] for of_host in hosts for changed in _changed(changes_since, changes_before)]
    if len(parts) == 1:
        return _fetched(conn, sa.select(migrations).where(*parts[0]), after, limit)
    # Each part gives its first rows by an index, and some may be in two of them: an OR would walk all migrations.
    most = None if limit is None else limit + 1
    pages = [keyset.page(sa.select(_m.id, _m.created_at).where(*part), _SORT, after, most) for part in parts]
    ids = sa.union_all(*(sa.select(page.subquery().c.id) for page in pages))
    return _fetched(conn, sa.select(migrations).where(_m.id.in_(ids)), None, limit)


def _fetched(
    conn: sa.Connection, statement: sa.Select[Any], after: Sequence[Any] | None, limit: int | None
) -> tuple[list[MigrationRow], bool]:
    rows, more = keyset.fetch(conn, statement, _SORT, after, limit)
    return [cast(MigrationRow, row._mapping) for row in rows], more


def _changed(since: int | None, before: int | None) -> Sequence[Sequence[sa.ColumnElement[bool]]]:
    """Return the alternatives of a change in a span of time: the last update, or the creation if there was none."""
    if since is None and before is None:
        return [()]
    never = _m.updated_at.is_(None)
    return [[*_within(_m.updated_at, since, before)], [never, *_within(_m.created_at, since, before)]]


def _within(time: sa.Column[int], since: int | None, before: int | None) -> Iterator[sa.ColumnElement[bool]]:
    if since is not None:
        yield time >= since
    if before is not None:
        yield time <= before


# --- what a server holds ---------------------------------------------------------------------------------------------


def other_host(row: InstanceRow, migration: MigrationRow) -> str | None:
    """Return the host of an open migration that the server does not belong to; None if there is only one host."""
    hosts = {migration["source_compute"], migration["dest_compute"]} - {row["host"], None}
    return next(iter(hosts), None)


def other_copy(conn: sa.Connection, row: InstanceRow, migration: MigrationRow) -> str | None:
    """Return the host that a server does not belong to if it has a copy of the server's disks, or None.

    This rule decides for all that removes that copy while the server stays: a confirmation, a revert, an undone move, a
    reset of the state, a soft delete, an evacuation. A guest that is on its way has arrived when its source has sent
    all of it; a destination that has removed its guest for a revert has nothing any more.
    """
    other, status = other_host(row, migration), migration["status"]
    if status == migration_states.REVERTING and not _holds_destination(conn, row, migration):
        return None
    return None if status in migration_states.UNDER_WAY and status != migration_states.POST_MIGRATING else other


def quota_held(current: Mapping[str, Any], migration: MigrationRow) -> dict[str, int]:
    """Return what an open migration is charged with, beyond the flavor that the server has now."""
    old, new = migration["old_flavor"], migration["new_flavor"]
    return {
        "cores": max(old["vcpus"], new["vcpus"]) - current["vcpus"],
        "ram": max(old["ram"], new["ram"]) - current["ram"],
    }


def stay_on_source(conn: sa.Connection, row: InstanceRow, migration: MigrationRow, status: str, now: int) -> None:
    """Give back what the server holds on the destination; its claim on the source is its own again."""
    update(conn, migration["uuid"], now, {"status": status})
    node, group = migration["source_node_uuid"], row["server_group_id"]
    allocations.take_back(conn, row["uuid"], holder=migration["uuid"], node_uuid=node, now=now, group_uuid=group)
    quotas.release(conn, row["project_id"], quota_held(migration["old_flavor"], migration), row["user_id"])


def leave_destination(conn: sa.Connection, row: InstanceRow, migration: MigrationRow, status: str, now: int) -> None:
    """Give back what a server that is reverted holds on the destination, unless that was done before."""
    if _holds_destination(conn, row, migration):
        stay_on_source(conn, row, migration, status, now)
    else:
        update(conn, migration["uuid"], now, {"status": status})


def _holds_destination(conn: sa.Connection, row: InstanceRow, migration: MigrationRow) -> bool:
    """Return whether a server that is reverted has not left its destination yet."""
    node = migration["source_node_uuid"]
    return allocations.is_handed_over(conn, row["uuid"], holder=migration["uuid"], node_uuid=node)


def stay_on_destination(conn: sa.Connection, row: InstanceRow, migration: MigrationRow, status: str, now: int) -> None:
    """Give back what the migration holds on the source."""
    update(conn, migration["uuid"], now, {"status": status})
    allocations.release(conn, migration["uuid"], now=now, group_uuid=row["server_group_id"])
    quotas.release(conn, row["project_id"], quota_held(migration["new_flavor"], migration), row["user_id"])


class HostAsked(NamedTuple):
    """A host that was asked, for a request, whether it is there."""

    host: str
    answered: bool


def check_last_copy(
    conn: sa.Connection, row: InstanceRow, now: int, down_time: float, asked: HostAsked | None = None
) -> None:
    """Raise Conflict if the end of a server's open migration would remove the only copy of its disks that can be used.

    A copy on a host that an administrator has forced down counts as lost, and so does one whose removal has begun.
    Raise HostNotHeard, with the host in its details, if the server's own host seems up and has not been `asked`: it may
    have died a moment ago.
    """
    migration = open_of(conn, row["uuid"])
    other = None if migration is None else other_copy(conn, row, migration)
    if migration is None or other is None or row["host"] is None:
        return
    if services.host_is_forced_down(conn, other):
        return
    if any(_removes_copy(each) for each in operation_rows.open_of(conn, row["uuid"])):
        return
    if services.host_is_up(conn, row["host"], now, down_time):
        if asked is None or asked.host != row["host"]:
            raise HostNotHeard("The host of the server has not been asked whether it is there.", host=row["host"])
        if asked.answered:
            return
    forced = "let an administrator force down the compute service of that other host, if the copy is lost or of no use"
    if not services.host_is_up(conn, other, now, down_time):
        instead = f"that one does not answer either: wait until one of them is back, or {forced}"
    else:
        instead = f"{_WAYS_OUT.get(migration['status'], 'the move goes on by itself')}, or {forced}"
    raise Conflict(
        f"The host of server {row['uuid']} does not answer, and only another one has its disks, which would be "
        f"removed: {instead}. forceDelete deletes both copies.",
        details=f"The server is on host {row['host']}, and its disks on host {other}.",
    )


_WAYS_OUT = {
    migration_states.FINISHED: "revert the resize",
    migration_states.CONFIRMING: "the confirmation ends by itself, and the resize can then be reverted",
    migration_states.REVERTING: "the revert ends by itself, and the server then stays where its disks are",
}
"""What leads on, besides the return of the host, by the status of the migration."""


def _removes_copy(operation: OperationRow) -> bool:
    """Return whether a host may have begun to remove its copy, because it confirms or reverts a resize."""
    if operation["kind"] not in ("confirm_resize", "revert_resize"):
        return False
    return ResizedPayload.decode(operation["payload"]).begun


def abandon(
    conn: sa.Connection,
    row: InstanceRow,
    now: int,
    *,
    epoch: int,
    down_time: float | None,
    context: Context | None,
    switched_off: bool = False,
    status: str = migration_states.ERROR,
    asked: HostAsked | None = None,
) -> tuple[str, ...] | None:
    """End the open migration of a server, if it has one: the server has only its own host then.

    A later request (a delete, a reset of the state) has overtaken it at this epoch. The other host removes its guest
    up to that epoch. Raise what `check_last_copy` raises, unless `down_time` is None: the server is deleted, or the
    caller has checked it. A move that was under way gets the status.

    If the guest may have been changed on the server's own host, record the operation `undo_move`, with the context of
    the request, unless that is None: the server is deleted. With `switched_off` the request switches the guest off.
    Return the recorded operations; None if there was no migration.
    """
    if down_time is not None:
        check_last_copy(conn, row, now, down_time, asked)
    migration = open_of(conn, row["uuid"])
    if migration is None:
        return None
    other = other_host(row, migration)
    removes = bool(departures.elsewhere(conn, row["uuid"], row["host"] or ""))  # the move was about to be undone
    if other is not None:
        departures.record(conn, other, row["uuid"], epoch, now)
    if migration["status"] in migration_states.UNDER_WAY:
        stay_on_source(conn, row, migration, status, now)
    elif migration["status"] == migration_states.REVERTING:
        leave_destination(conn, row, migration, migration_states.REVERTED, now)
    else:
        stay_on_destination(conn, row, migration, migration_states.CONFIRMED, now)
    undo = None if context is None else _undo_of(row, migration, switched_off=switched_off, removes=removes)
    if context is None or undo is None:
        return ()
    id = str(uuid5(_NAMESPACE, migration["uuid"]))
    operation_rows.follow_up(conn, row["uuid"], UNDO_MOVE, id=id, epoch=epoch, now=now, context=context, payload=undo)
    return (id,)


def _undo_of(row: InstanceRow, migration: MigrationRow, *, switched_off: bool, removes: bool) -> UndoPayload | None:
    """Return what has to be undone of a move that has ended early; None if the guest is as it should be.

    With `removes` another host had to remove its guest already.
    """
    status, live = migration["status"], migration["migration_type"] == migration_states.LIVE_MIGRATION
    if status not in _CHANGES_GUEST or (live and switched_off) or row["host"] is None:
        return None
    sent = status in _CHANGES_SIZE
    awaits = sent or removes
    return UndoPayload(migration=migration["uuid"], host=row["host"], sent=sent, undo_awaits_removal=awaits)


def end_undo(conn: sa.Connection, row: InstanceRow, now: int, down_time: float) -> None:
    """End what undoes the last move of a server, if that has taken longer than `down_time` on a host that is up.

    It hangs then, on that host or because of the other one. The guest stays as it is.
    """
    for each in operation_rows.open_of(conn, row["uuid"]):
        if each["kind"] != UNDO_MOVE or each["created_at"] > now - micros(down_time):
            continue
        host = UndoPayload.decode(each["payload"]).host
        if services.host_is_up(conn, host, now, down_time):
            operation_rows.end_by_request(conn, each["id"], now)


def idle_task_state(conn: sa.Connection, instance_uuid: str) -> str | None:
    """Return the task state of a server that no request works on: its last move may still have to be undone."""
    undone = any(each["kind"] == UNDO_MOVE for each in operation_rows.open_of(conn, instance_uuid))
    return states.RESIZE_REVERTING if undone else None
