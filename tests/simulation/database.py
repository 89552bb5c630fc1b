"""SQLite in the loop's own thread and in memory: the same statements on the same engine, one transaction at a time.

What the real one adds (a writer thread, group commit, a file) has an order of its own, which a simulation must not
have; other tests are about that.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db import engine
from micronova.db.engine import Database

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _engine() -> sa.Engine:
    """One for all worlds, because it keeps the statements that it has compiled; each connection is a database."""
    made = sa.create_engine("sqlite://", poolclass=sa.NullPool, **engine._JSON)
    sa.event.listen(made, "connect", engine._sqlite_connect)
    sa.event.listen(made, "begin", engine._sqlite_begin)
    return made


class InlineDatabase(Database):
    """It outlives the processes that use it: closing it is for the world's end."""

    dialect = "sqlite"

    def __init__(self) -> None:
        super().__init__()
        self._conn = _engine().connect()

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        await asyncio.sleep(0)
        return self.look(fn, *args, **kwargs)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        await asyncio.sleep(0)
        with self._conn.begin():
            result = fn(self._conn, *args, **kwargs)
        # Durable now, and others may come before whoever wrote it hears of it.
        await asyncio.sleep(0)
        return result

    def look(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Read without a pause: for those who watch."""
        with self._conn.begin():
            return fn(self._conn, *args, **kwargs)

    async def close(self) -> None:
        """A process lets go of it."""

    def dispose(self) -> None:
        """The world ends."""
        self._conn.close()
