"""INSERT … ON CONFLICT, which SQLAlchemy builds per database although both of ours write it alike."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from micronova.db.prepared import Prepared

Build = Callable[[Callable[[sa.Table], Any]], sa.Executable]


class PerDialect:
    """A statement built once for each database; `statement.on(conn)` is the one for this connection."""

    __slots__ = ("_built",)

    def __init__(self, build: Build) -> None:
        self._built = {"sqlite": build(sqlite.insert), "postgresql": build(postgresql.insert)}

    def on(self, conn: sa.Connection) -> sa.Executable:
        """Return the statement for the connection's database."""
        return self._built[conn.dialect.name]


def insert_if_absent(conn: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless it would break a unique constraint; return whether it was inserted.

    It does not let the database raise an error: on PostgreSQL that would end the whole transaction.
    """
    return _insert_if_absent(table, tuple(values)).run(conn, values) == 1


def insert_or_update(conn: sa.Connection, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Insert a row with this key, or set the values of the one that there is."""
    if not insert_if_absent(conn, table, {**key, **values}):
        same = (table.c[name] == value for name, value in key.items())
        conn.execute(table.update().where(*same).values(values))


@cache
def _insert_if_absent(table: sa.Table, columns: tuple[str, ...]) -> Prepared:
    values = {name: sa.bindparam(name, type_=table.c[name].type) for name in columns}
    return Prepared(PerDialect(lambda insert: insert(table).values(values).on_conflict_do_nothing()).on)
