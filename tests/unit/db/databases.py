"""A database for a test: on SQLite, or a schema of its own in the run's PostgreSQL."""

import contextlib
import uuid
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

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
