"""The changes of instances that transactions make, for somebody who is told of them after the commit.

`WatchedDatabase` wraps a database: while one of its transactions runs, the functions of `db.instances` note what they
change. A transaction that fails or is run again leaves nothing behind. Without a watcher nothing is read or noted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.db.listed import one_of
from micronova.db.tables import instance_actions, instances
from micronova.objects.context import Context
from micronova.objects.instance import InstanceRow

P = ParamSpec("P")
R = TypeVar("R")

_KEY = "micronova.instance_changes"
_i, _a = instances.c, instance_actions.c
# User data may have 64 KiB, and no notification has it.
_ROWS = sa.select(*(sa.null().label(column.name) if column is _i.user_data else column for column in _i)).where(
    one_of(_i.uuid, "uuids")
)
_BEFORE = sa.select(_i.uuid, _i.vm_state, _i.task_state, _i.display_name).where(one_of(_i.uuid, "uuids"))
_later = instance_actions.alias()
_NEWEST_ACTIONS = sa.select(_a.instance_uuid, _a.request_id, _a.user_id, _a.project_id).where(
    one_of(_a.instance_uuid, "uuids"),
    _a.start_time
    == sa.select(sa.func.max(_later.c.start_time)).where(_later.c.instance_uuid == _a.instance_uuid).scalar_subquery(),
)


class StatesBefore(NamedTuple):
    """What is known of an instance before a change; nothing of a new one."""

    vm_state: str | None = None
    task_state: str | None = None
    display_name: str | None = None


class InstanceChange(NamedTuple):
    """A change of an instance that is committed."""

    before: StatesBefore
    row: InstanceRow  # without user data
    context: Context  # of the newest action on the instance


class _Noted:
    """What the transaction of one connection has changed so far."""

    def __init__(self) -> None:
        self.changes: list[tuple[StatesBefore, InstanceRow]] = []


def before(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, StatesBefore] | None:
    """Return the states of instances that are about to be changed; None if nobody watches."""
    if _KEY not in conn.info:
        return None
    found = conn.execute(_BEFORE, {"uuids": list(uuids)})
    return {row.uuid: StatesBefore(row.vm_state, row.task_state, row.display_name) for row in found}


def note(conn: sa.Connection, known: dict[str, StatesBefore]) -> None:
    """Note that instances have changed, which were so before."""
    noted: _Noted = conn.info[_KEY]
    for row in conn.execute(_ROWS, {"uuids": list(known)}).mappings():
        noted.changes.append((known[row["uuid"]], cast(InstanceRow, dict(row))))


def note_rows(conn: sa.Connection, rows: Iterable[InstanceRow], known: StatesBefore | None = None) -> None:
    """Note new instances, or with `known` an instance in its last form."""
    if (noted := conn.info.get(_KEY)) is not None:
        noted.changes += [(known or StatesBefore(), row) for row in rows]


class WatchedDatabase(Database):
    """A database whose watcher is told of changes of instances when they are committed."""

    def __init__(self, database: Database, watcher: Callable[[InstanceChange], None]) -> None:
        self._database = database
        self._watcher = watcher
        self.dialect = database.dialect
        self.statistics = database.statistics

    def pool(self) -> tuple[int, int] | None:
        """Return the use of the pool of connections."""
        return self._database.pool()

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in a transaction that only reads."""
        return await self._database.read(fn, *args, **kwargs)

    async def snapshot(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in a transaction that only reads, and whose statements all see the same moment."""
        return await self._database.snapshot(fn, *args, **kwargs)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in one transaction, then tell the watcher."""
        changes: list[InstanceChange] = []

        def watched(conn: sa.Connection, /, *args: P.args, **kwargs: P.kwargs) -> R:
            changes.clear()  # the transaction may be run again
            info = conn.info  # it stays, even if the connection is lost
            info[_KEY] = noted = _Noted()
            try:
                result = fn(conn, *args, **kwargs)
            finally:
                del info[_KEY]
            changes.extend(_with_contexts(conn, noted.changes))
            return result

        watched.__qualname__ = fn.__qualname__  # statistics count by name
        result = await self._database.write(watched, *args, **kwargs)
        for change in changes:
            self._watcher(change)
        return result

    async def migrate(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in one transaction that changes the schema."""
        return await self._database.migrate(fn, *args, **kwargs)

    async def close(self) -> None:
        """Close the database."""
        await self._database.close()


def _with_contexts(conn: sa.Connection, noted: Sequence[tuple[StatesBefore, InstanceRow]]) -> Iterator[InstanceChange]:
    """Add the requests that changed the instances last, those of their newest actions, in one statement."""
    if not noted:
        return
    uuids = sorted({row["uuid"] for _, row in noted})
    newest = {
        row.instance_uuid: Context(
            request_id=row.request_id, user_id=row.user_id or "", project_id=row.project_id or ""
        )
        for row in conn.execute(_NEWEST_ACTIONS, {"uuids": uuids})
    }
    for before, row in noted:
        yield InstanceChange(before, row, newest.get(row["uuid"]) or Context())
