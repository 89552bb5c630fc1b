"""The queries about operations: requests write them, and `operations/engine.py` works on them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.volume.model import Operation
from micronova.embedded.volume.store.resource_queries import read_one
from micronova.embedded.volume.tables import operations

_earlier = operations.alias("earlier")
_waiting = (
    sa.select(
        operations,
        # The place among the operations of the project, counted from 1; operations that run count.
        sa.func.row_number()
        .over(partition_by=operations.c.project_id, order_by=(operations.c.created_at, operations.c.id))
        .label("turn"),
    )
    .where(
        operations.c.host == sa.bindparam("here"),
        operations.c.not_before <= sa.bindparam("now"),
        ~sa.exists().where(
            sa.or_(
                _earlier.c.created_at < operations.c.created_at,
                sa.and_(_earlier.c.created_at == operations.c.created_at, _earlier.c.id < operations.c.id),
            ),
            sa.or_(
                _earlier.c.resource_id.in_((operations.c.resource_id, operations.c.source_id)),
                _earlier.c.source_id == operations.c.resource_id,
            ),
        ),
    )
    .subquery()
)
_READY = (
    sa.select(_waiting.c.id, _waiting.c.kind, _waiting.c.project_id)
    .where(_waiting.c.turn <= sa.bindparam("most"))
    .order_by(_waiting.c.turn, _waiting.c.created_at, _waiting.c.id)
    .limit(sa.bindparam("most"))
)


class Ready(NamedTuple):
    """An operation that waits for no earlier one."""

    id: str
    kind: str
    project_id: str


def ready(conn: sa.Connection, host: str, now: int, most: int) -> list[Ready]:
    """Return the next operations of a host, those of projects in turn."""
    return [Ready(*row) for row in conn.execute(_READY, {"here": host, "now": now, "most": most})]


def projects_since(conn: sa.Connection, host: str, since: int) -> set[str]:
    """Return the projects of which operations of a host were recorded since a time."""
    recorded = sa.select(operations.c.project_id).where(operations.c.host == host, operations.c.created_at >= since)
    return set(conn.execute(recorded.distinct()).scalars())


def insert(
    conn: sa.Connection,
    kind: str,
    host: str,
    now: int,
    *,
    id: str,
    resource_id: str,
    project_id: str,
    request_id: str,
    source_id: str | None,
    payload: dict[str, Any],
    deferred_until: int,
) -> bool:
    """Write an operation; return False if it is there already.

    The operation gets a time after those that it waits for, even if the clock was set back.
    """
    ids = (resource_id, source_id or resource_id)
    before = sa.or_(operations.c.resource_id.in_(ids), operations.c.source_id == resource_id)
    latest = conn.execute(sa.select(sa.func.max(operations.c.created_at)).where(before)).scalar_one()
    row = Operation(
        id=id,
        kind=kind,
        host=host,
        resource_id=resource_id,
        source_id=source_id,
        project_id=project_id,
        request_id=request_id,
        payload=payload,
        cancelled=False,
        progress=0,
        attempts=0,
        not_before=deferred_until,
        created_at=max(now, (latest or 0) + 1),
    )
    return insert_if_absent(conn, operations, msgspec.structs.asdict(row))


def get(conn: sa.Connection, id: str) -> Operation | None:
    """Return an operation; None if it has ended."""
    return read_one(conn, operations.select().where(operations.c.id == id), Operation)


def start_deferred(conn: sa.Connection, id: str) -> None:
    """Let an operation that was recorded for a later time begin now."""
    conn.execute(operations.update().where(operations.c.id == id).values(not_before=0))


def remove(conn: sa.Connection, id: str) -> bool:
    """Remove an operation; return whether there was one."""
    return conn.execute(operations.delete().where(operations.c.id == id)).rowcount == 1


def uses(conn: sa.Connection, id: str) -> bool:
    """Return whether an operation changes or reads a resource."""
    named = sa.or_(operations.c.resource_id == id, operations.c.source_id == id)
    return bool(conn.execute(sa.select(sa.exists().where(named))).scalar_one())


def cancel(conn: sa.Connection, resource_id: str, *, but: str) -> None:
    """Cancel the operations of a resource, except for one: their results are not wanted any more."""
    of_resource = operations.c.resource_id == resource_id
    conn.execute(operations.update().where(of_resource, operations.c.id != but).values(cancelled=True))


def ids(conn: sa.Connection) -> set[str]:
    """Return the ids of all operations."""
    return set(conn.execute(sa.select(operations.c.id)).scalars())


def cancelled(conn: sa.Connection, ids: Sequence[str]) -> list[str]:
    """Return those of operations that were cancelled."""
    chosen = sa.select(operations.c.id).where(operations.c.id.in_(ids), operations.c.cancelled)
    return list(conn.execute(chosen).scalars())


def lock(conn: sa.Connection, id: str) -> bool | None:
    """Lock an operation, and return whether it was cancelled; None if it has ended."""
    chosen = sa.select(operations.c.cancelled).where(operations.c.id == id)
    return conn.execute(chosen.with_for_update()).scalar_one_or_none()


def postpone(conn: sa.Connection, operation: Operation, until: int) -> None:
    """Let an operation that lacked something be repeated from this time on."""
    values = {"attempts": operation.attempts + 1, "not_before": until, "progress": 0}
    conn.execute(operations.update().where(operations.c.id == operation.id).values(values))


def note_progress(conn: sa.Connection, progress: dict[str, int]) -> None:
    """Record how far operations are, in percent."""
    for id, percent in sorted(progress.items()):
        conn.execute(operations.update().where(operations.c.id == id).values(progress=percent))
