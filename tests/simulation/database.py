"""SQLite in memory and in the thread of the event loop: the same statements, one transaction at a time.

The real database has a writer thread, group commit and a file. Their order of events is not repeatable, so a simulation
goes without; other tests cover them.
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
    """Return the engine of all simulations, shared for its compiled statements; each connection is a database."""
    made = sa.create_engine("sqlite://", poolclass=sa.NullPool, **engine.JSON)
    sa.event.listen(made, "connect", engine._sqlite_connect)
    sa.event.listen(made, "begin", engine._sqlite_begin)
    return made


class InlineDatabase(Database):
    """Outlives the processes that use it: `close` keeps it, `dispose` removes it."""

    dialect = "sqlite"

    def __init__(self) -> None:
        super().__init__()
        self._conn = _engine().connect()

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        await asyncio.sleep(0)
        return self.read_now(fn, *args, **kwargs)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        await asyncio.sleep(0)
        with self._conn.begin():
            result = fn(self._conn, *args, **kwargs)
        # Committed. Other tasks may run before the caller gets the result.
        await asyncio.sleep(0)
        return result

    def read_now(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Read without giving other tasks a turn, for assertions."""
        with self._conn.begin():
            return fn(self._conn, *args, **kwargs)

    async def close(self) -> None:
        """Do nothing: the next process uses the same database."""

    def dispose(self) -> None:
        """Remove the database."""
        self._conn.close()
