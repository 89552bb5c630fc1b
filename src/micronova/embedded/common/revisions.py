"""Changes of rows that count their revisions: one request never overwrites what another has changed meanwhile.

A handler reads a row, decides, and writes only if the row still has the revision that it read. If not, the write
raises Changed and `retry` runs the handler again.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.prepared import Prepared
from micronova.objects.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")

ATTEMPTS = 30


class Changed(Exception):
    """Another request has changed or deleted what this one read: read again."""


class Contended(Unavailable):
    """Other requests changed the same object at each attempt."""


async def retry(fn: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a handler that reads, decides and writes until no other request comes between; raise Contended."""
    for _ in range(ATTEMPTS):
        try:
            return await fn(*args, **kwargs)
        except (Changed, sa.exc.IntegrityError) as error:
            reason = error
    raise Contended("Too many requests change the same thing at once: try again.") from reason


def update(
    conn: sa.Connection, revision: sa.Column[int], id: str, read: int, values: Mapping[str, Any], now: int
) -> None:
    """Write values to the row with this id and count its revision up; raise Changed if it is not `read` any more."""
    counted = {**values, revision.key: read + 1, "updated_at": now}
    parameters = {**counted, "row_id": id, "row_revision": read}
    _require_one(_prepared_update(revision, frozenset(counted)).run(conn, parameters))


@functools.cache
def _prepared_update(revision: sa.Column[int], names: frozenset[str]) -> Prepared:
    """Return the statement that sets columns; handlers set few combinations of them."""
    row_id: sa.BindParameter[Any] = sa.bindparam("row_id")
    row_revision: sa.BindParameter[Any] = sa.bindparam("row_revision")
    changed = revision.table.update().where(revision.table.c.id == row_id, revision == row_revision)
    return Prepared(changed.values({name: sa.bindparam(name) for name in sorted(names)}))


def touch(
    conn: sa.Connection, revision: sa.Column[int], *where: sa.ColumnElement[bool], now: int, **values: Any
) -> int:
    """Count the revision of rows up, whatever it is, and set values; return how many rows there are."""
    counted = {**values, revision.key: revision + 1, "updated_at": now}
    return conn.execute(revision.table.update().where(*where).values(counted)).rowcount


def delete(conn: sa.Connection, revision: sa.Column[int], id: str, read: int) -> None:
    """Delete the row with this id; raise Changed if its revision is not `read` any more."""
    _require_one(conn.execute(revision.table.delete().where(revision.table.c.id == id, revision == read)).rowcount)


def _require_one(changed: int) -> None:
    if changed != 1:
        raise Changed
