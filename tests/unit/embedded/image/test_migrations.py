"""The migrations create the tables that the code declares."""

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from micronova.db.engine import open_database
from micronova.db.schema import current, head, upgrade
from micronova.embedded.image.service import MIGRATIONS
from micronova.embedded.image.tables import metadata, reservations
from tests.unit.embedded.schema import both_kinds, both_ways, check_tables


@both_ways
@both_kinds
async def test_both_ways_lead_to_the_same_tables(
    way: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await check_tables(metadata, MIGRATIONS, way, kind, tmp_path, request)


async def test_an_upgrade_from_the_first_revision_adds_what_is_missing(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/image.db")
    try:
        await upgrade(database, metadata, MIGRATIONS, to="0001")
        await database.write(reservations.drop)
        await upgrade(database, metadata, MIGRATIONS)
        assert (
            await database.read(lambda conn: list(compare_metadata(MigrationContext.configure(conn), metadata))) == []
        )
        assert await database.read(current) == head(MIGRATIONS)
    finally:
        await database.close()
