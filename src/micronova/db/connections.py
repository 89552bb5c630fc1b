"""The connections to PostgreSQL that transactions take turns on.

SQLAlchemy's pool makes a `sa.Connection` for each transaction, which costs more than a statement. Here a connection
keeps its own for as long as it lives. The one that was used last is taken first: few connections do the work of a quiet
time, and their statements are prepared.
"""

import asyncio
from collections.abc import Callable

import asyncpg
import sqlalchemy as sa
from sqlalchemy.util.concurrency import greenlet_spawn

from micronova.objects.errors import Unavailable


class Connections:
    """At most `size` connections; who waits longer than `patience` seconds for one is refused."""

    def __init__(self, engine: sa.Engine, size: int, patience: float) -> None:
        self.size = size
        self.in_use = 0
        self._engine = engine
        self._patience = patience
        self._turns = asyncio.Semaphore(size)
        self._idle: list[sa.Connection] = []
        self._generation = 0  # connections of an earlier one are not used again

    async def run(self, fn: Callable[["Connections"], None]) -> None:
        """Run a function that takes one connection, in a greenlet of SQLAlchemy; raise Unavailable if none is free."""
        if self._turns.locked():
            await self._wait()
        else:
            await self._turns.acquire()
        self.in_use += 1
        try:
            await greenlet_spawn(fn, self)
        finally:
            self.in_use -= 1
            self._turns.release()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._turns.acquire()
        except TimeoutError:
            raise Unavailable("The database is busy: all connections are in use. Try again later.") from None

    async def close(self) -> None:
        """Close the connections that nobody uses now, and the others when they are given back."""
        self._generation += 1
        idle, self._idle = self._idle, []
        for conn in idle:
            await greenlet_spawn(conn.close)

    # What functions in a greenlet call.

    def take(self) -> tuple[sa.Connection, int]:
        """Return a connection and its generation."""
        return self._idle.pop() if self._idle else self._engine.connect(), self._generation

    def give_back(self, conn: sa.Connection, generation: int) -> None:
        """Keep a connection for later, if it may be used again."""
        if generation != self._generation or conn.invalidated:
            _end(conn)
        else:
            if conn.in_transaction():  # for SQLAlchemy, which has begun none in the database
                conn.rollback()
            self._idle.append(conn)

    def replace(self) -> None:
        """Use none of the present connections again: they are as old as one that was found to be lost or unfit."""
        self._generation += 1
        while self._idle:
            _end(self._idle.pop())


def _end(conn: sa.Connection) -> None:
    """Close a connection without a farewell, for which a silent one would keep us waiting."""
    if not conn.invalidated:
        raw = conn.connection.driver_connection
        assert isinstance(raw, asyncpg.Connection)
        raw.terminate()
        conn.invalidate()
    conn.close()
