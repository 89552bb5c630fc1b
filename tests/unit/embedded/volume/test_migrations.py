"""The migrations create the tables that the code declares."""

import uuid
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from micronova.db.engine import open_database
from micronova.db.schema import current, head, upgrade
from micronova.embedded.volume.service import MIGRATIONS
from micronova.embedded.volume.tables import metadata


@pytest.mark.parametrize("way", ["alembic", "metadata"])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_both_ways_lead_to_the_same_tables(
    way: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    schema = f"s{uuid.uuid4().hex}" if kind == "postgresql" else None
    url = request.getfixturevalue("module_database_url") if schema else f"sqlite:///{tmp_path}/volume.db"
    database = open_database(url, schema=schema)
    try:
        # With a revision named, Alembic runs the migrations.
        await upgrade(database, metadata, MIGRATIONS, to=head(MIGRATIONS) if way == "alembic" else None, schema=schema)

        def differences(conn: sa.Connection) -> list[object]:
            context = MigrationContext.configure(conn, opts={"compare_type": True})
            return list(compare_metadata(context, metadata))

        assert await database.read(differences) == []
        assert await database.read(current) == head(MIGRATIONS)
        await upgrade(database, metadata, MIGRATIONS, schema=schema)
    finally:
        await database.close()
