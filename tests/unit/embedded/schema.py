"""What the tests of the migrations of embedded services share."""

import uuid
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from micronova.db.engine import open_database
from micronova.db.schema import current, head, upgrade

both_ways = pytest.mark.parametrize("way", ["alembic", "metadata"])
"""How the tables are made: by the migrations, or from the declaration, as for a new database."""
both_kinds = pytest.mark.parametrize("kind", ["sqlite", "postgresql"])


async def check_tables(
    metadata: sa.MetaData, migrations: str, way: str, kind: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    """Assert that an upgrade leads to the tables that the code declares, and that it can be repeated."""
    schema = f"s{uuid.uuid4().hex}" if kind == "postgresql" else None
    url = request.getfixturevalue("module_database_url") if schema else f"sqlite:///{directory}/tables.db"
    database = open_database(url, schema=schema)
    try:
        # With a revision named, Alembic runs the migrations.
        await upgrade(database, metadata, migrations, to=head(migrations) if way == "alembic" else None, schema=schema)

        def differences(conn: sa.Connection) -> list[object]:
            context = MigrationContext.configure(conn, opts={"compare_type": True})
            return list(compare_metadata(context, metadata))

        assert await database.read(differences) == []
        assert await database.read(current) == head(migrations)
        await upgrade(database, metadata, migrations, schema=schema)
    finally:
        await database.close()
