"""INSERT … ON CONFLICT, which SQLAlchemy builds per database although both of ours write it alike."""

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

Build = Callable[[Callable[[sa.Table], Any]], sa.Executable]


class PerDialect:
    """A statement built once for each database; `statement.on(conn)` is the one for this connection."""

    __slots__ = ("_built",)

    def __init__(self, build: Build) -> None:
        self._built = {"sqlite": build(sqlite.insert), "postgresql": build(postgresql.insert)}

    def on(self, conn: sa.Connection) -> sa.Executable:
        """Return the statement in the words of the connection's database."""
        return self._built[conn.dialect.name]
