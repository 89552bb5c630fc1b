"""A database for a test: on SQLite, or a schema of its own in the run's PostgreSQL."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.util.concurrency import await_

from micronova.db.engine import Database, open_database
from micronova.db.tables import metadata

KINDS = ("sqlite", "postgresql")


@contextlib.asynccontextmanager
async def compute_database(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """Open an empty compute database with its tables."""
    if kind == "sqlite":
        database = open_database(f"sqlite:///{request.getfixturevalue('tmp_path')}/compute.db")
        await database.write(metadata.create_all)
        try:
            yield database
        finally:
            await database.close()
        return
    async with own_schema(request, metadata) as database:
        yield database


@contextlib.asynccontextmanager
async def own_schema(request: pytest.FixtureRequest, metadata: sa.MetaData) -> AsyncIterator[Database]:
    """Open a schema of its own in the run's PostgreSQL, with these tables."""
    schema = f"t{uuid.uuid4().hex}"  # made in a blink, unlike a database
    database = open_database(request.getfixturevalue("postgres").url, schema=schema)
    await database.write(lambda conn: conn.execute(sa.schema.CreateSchema(schema)))
    try:
        await database.write(metadata.create_all)
        yield database
    finally:
        await database.write(lambda conn: conn.execute(sa.schema.DropSchema(schema, cascade=True)))
        await database.close()


class OpenTransaction:
    """A write transaction of PostgreSQL that a test keeps open; made by `open_transaction`."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[tuple[Callable[[sa.Connection], Any], asyncio.Future[Any]] | None] = asyncio.Queue()

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return what `fn(conn, *args)` returns."""
        answer = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((lambda conn: fn(conn, *args), answer))
        return await answer

    async def execute(self, statement: sa.Executable, parameters: dict[str, Any] | None = None) -> sa.CursorResult[Any]:
        """Execute a statement."""
        result: sa.CursorResult[Any] = await self.run(lambda conn: conn.execute(statement, parameters))
        return result

    def serve(self, conn: sa.Connection) -> None:
        """Run functions until `end`: the function of the transaction."""
        while (call := await_(self._calls.get())) is not None:
            fn, answer = call
            try:
                answer.set_result(fn(conn))
            except Exception as error:
                answer.set_exception(error)
                raise
        self.end()  # also for a second attempt

    def end(self) -> None:
        """Let the transaction be committed."""
        self._calls.put_nowait(None)


@contextlib.asynccontextmanager
async def open_transaction(database: Database) -> AsyncIterator[OpenTransaction]:
    """Keep a write transaction open; it is committed at the end."""
    transaction = OpenTransaction()
    task = asyncio.create_task(database.write(transaction.serve))
    await transaction.run(lambda conn: None)  # it has begun
    try:
        yield transaction
    finally:
        transaction.end()
        await task
