"""What servers were used in a span of time, those that are gone included."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import sqlalchemy as sa

from micronova.db.tables import deleted_instances, instances
from micronova.objects.errors import NotFound
from micronova.objects.instance import FlavorData

_COLUMNS = ("uuid", "project_id", "display_name", "vm_state", "flavor", "created_at", "launched_at")
MOST_SORTED = 50_000
"""Deleted servers of a span that are sorted for each page. If there are more, pages are read in the order of creation,
which soon meets one of the span."""
_HOUR = 3600 * 1_000_000

Mark = tuple[int, str]  # when a server was created, and its uuid


class UsedServer(Protocol):
    """A server that ran in a span of time. Times are microseconds since 1970 (UTC)."""

    uuid: str
    project_id: str
    display_name: str
    vm_state: str
    flavor: FlavorData
    created_at: int
    launched_at: int
    ended_at: int | None  # when it was deleted


class ProjectTotals(NamedTuple):
    """What a project used in a span of time: hours, and hours times amounts."""

    project_id: str
    hours: float
    memory_mb: float
    vcpus: float
    local_gb: float


def find_mark(conn: sa.Connection, uuid: str, project_id: str | None) -> Mark:
    """Return where a page begins that follows a server, of this project if one is named; raise NotFound."""
    for table in (instances, deleted_instances):
        found = conn.execute(sa.select(table.c.created_at, table.c.project_id).where(table.c.uuid == uuid)).first()
        if found is not None and project_id in (None, found.project_id):
            return found.created_at, uuid
    raise NotFound(f"marker [{uuid[:64]}] not found")


def used(
    conn: sa.Connection,
    begin: int,
    end: int,
    *,
    project_id: str | None = None,
    after: Mark | None = None,
    limit: int,
) -> Sequence[UsedServer]:
    """List servers that ran at some moment of the span, oldest first."""
    sorts = _few_deleted_since(conn, begin, project_id)
    parts = []
    for table, ended in _tables():
        order = (table.c.created_at, table.c.uuid)
        conditions = [_in_span(table, begin, end)]
        if project_id is not None:
            conditions.append(table.c.project_id == project_id)
        if after is not None:
            conditions += [table.c.created_at >= after[0], sa.tuple_(*order) > sa.tuple_(*after)]
        query = sa.select(*(table.c[name] for name in _COLUMNS), ended.label("ended_at"))
        if table is deleted_instances and sorts:
            # The order of creation would lead through all servers that were deleted before the span.
            keys = sa.select(*order).where(*conditions).cte("keys").prefix_with("MATERIALIZED", dialect="postgresql")
            first = sa.select(keys).order_by(keys.c.created_at, keys.c.uuid).limit(limit).subquery()
            query = query.join(first, first.c.uuid == table.c.uuid)
        else:
            query = query.where(*conditions)
        # Each table gives its first rows by an index; those of both are few.
        parts.append(sa.select(query.order_by(*order).limit(limit).subquery()))
    both = sa.union_all(*parts).subquery()
    found = conn.execute(sa.select(both).order_by(both.c.created_at, both.c.uuid).limit(limit))
    return cast(Sequence[UsedServer], found.all())


def _few_deleted_since(conn: sa.Connection, begin: int, project_id: str | None) -> bool:
    """Return whether so few servers, of a project or of all, were deleted since a time that each page may sort them."""
    deleted_at = deleted_instances.c.deleted_at
    since = sa.select(deleted_at).where(deleted_at > begin).order_by(deleted_at.desc()).limit(MOST_SORTED + 1)
    if project_id is not None:
        since = since.where(deleted_instances.c.project_id == project_id)
    return int(conn.execute(sa.select(sa.func.count()).select_from(since.subquery())).scalar_one()) <= MOST_SORTED


def totals(conn: sa.Connection, begin: int, end: int, now: int) -> list[ProjectTotals]:
    """Add up what each project used; the oldest project first."""
    parts = []
    for table, ended in _tables():
        until = sa.func.coalesce(ended, now)
        last, first = _lesser(until, end), _greater(table.c.launched_at, begin)
        hours = sa.cast(_greater(last - first, 0), sa.Float) / _HOUR
        flavor = table.c.flavor
        disk = flavor["disk"].as_integer() + sa.func.coalesce(flavor["ephemeral"].as_integer(), 0)
        parts.append(
            sa.select(
                table.c.project_id,
                sa.func.min(table.c.created_at).label("oldest"),
                sa.func.sum(hours).label("hours"),
                sa.func.sum(hours * flavor["ram"].as_integer()).label("memory_mb"),
                sa.func.sum(hours * flavor["vcpus"].as_integer()).label("vcpus"),
                sa.func.sum(hours * disk).label("local_gb"),
            )
            .where(_in_span(table, begin, end))
            .group_by(table.c.project_id)
        )
    both = sa.union_all(*parts).subquery()
    sums = (sa.func.sum(both.c[name]).label(name) for name in ("hours", "memory_mb", "vcpus", "local_gb"))
    query = sa.select(both.c.project_id, *sums).group_by(both.c.project_id).order_by(sa.func.min(both.c.oldest))
    return [ProjectTotals(*row) for row in conn.execute(query)]


def _tables() -> tuple[tuple[sa.Table, sa.ColumnElement[Any]], ...]:
    return (instances, sa.cast(sa.null(), sa.BigInteger)), (deleted_instances, deleted_instances.c.deleted_at)


def _in_span(table: sa.Table, begin: int, end: int) -> sa.ColumnElement[bool]:
    launched = sa.and_(table.c.launched_at.is_not(None), table.c.launched_at < end)
    return launched if table is instances else sa.and_(launched, deleted_instances.c.deleted_at > begin)


def _lesser(one: Any, other: int) -> sa.ColumnElement[int]:
    return sa.case((one < other, one), else_=sa.literal(other, sa.BigInteger))


def _greater(one: Any, other: int) -> sa.ColumnElement[int]:
    return sa.case((one > other, one), else_=sa.literal(other, sa.BigInteger))
