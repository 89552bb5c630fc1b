"""The migrations create the tables that the metadata declares, on both databases."""

import uuid
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

from micronova.db import schema
from micronova.db.engine import Database, open_database
from micronova.embedded.identity.service import MIGRATIONS
from micronova.embedded.identity.tables import metadata


def described(conn: sa.Connection, name: str | None) -> dict[str, Any]:
    """Return the tables as the database describes them."""
    inspector = sa.inspect(conn)
    return {
        table: {
            "columns": [
                (column["name"], str(column["type"]), column["nullable"])
                for column in inspector.get_columns(table, schema=name)
            ],
            "key": inspector.get_pk_constraint(table, schema=name)["constrained_columns"],
            "unique": sorted(each["column_names"] for each in inspector.get_unique_constraints(table, schema=name)),
            "indexes": sorted(str(each["name"]) for each in inspector.get_indexes(table, schema=name)),
            "foreign": sorted(each["constrained_columns"] for each in inspector.get_foreign_keys(table, schema=name)),
        }
        for table in inspector.get_table_names(schema=name)
        if table != "alembic_version"
    }


async def both_ways(make: Any) -> None:
    """Compare a new schema with one that went through every migration."""
    fresh: Database
    fresh, fresh_schema = make()
    migrated, migrated_schema = make()
    await schema.upgrade(fresh, metadata, MIGRATIONS, schema=fresh_schema)
    await schema.upgrade(migrated, metadata, MIGRATIONS, to=schema.head(MIGRATIONS), schema=migrated_schema)
    one = await fresh.read(described, fresh_schema)
    two = await migrated.read(described, migrated_schema)
    assert one == two
    assert set(one) == set(metadata.tables)
    await schema.upgrade(fresh, metadata, MIGRATIONS, schema=fresh_schema)
    await fresh.close()
    await migrated.close()


async def test_sqlite(tmp_path: Path) -> None:
    await both_ways(lambda: (open_database(f"sqlite:///{tmp_path}/{uuid.uuid4().hex}.db"), None))


async def test_postgresql(database_url: str) -> None:
    def make() -> tuple[Database, str]:
        name = f"t{uuid.uuid4().hex}"
        return open_database(database_url, schema=name), name

    await both_ways(make)


async def test_trusts_of_an_older_database_get_the_columns_of_redelegation(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/identity.db")
    await schema.upgrade(database, metadata, MIGRATIONS, to="0005")

    def older(conn: sa.Connection) -> None:
        conn.execute(sa.text("DROP INDEX trusts_by_origin"))
        for name in ("redelegation_count", "redelegated_trust_id"):
            conn.execute(sa.text(f"ALTER TABLE trusts DROP COLUMN {name}"))

    current = await database.read(described, None)
    await database.write(older)
    assert await database.read(described, None) != current
    await schema.upgrade(database, metadata, MIGRATIONS)
    assert await database.read(described, None) == current
    await database.close()


async def test_trusts_of_an_older_database_need_no_project_any_more(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/identity.db")
    await schema.upgrade(database, metadata, MIGRATIONS, to="0006")

    def older(conn: sa.Connection) -> None:
        with Operations(MigrationContext.configure(conn)).batch_alter_table("trusts") as batch:
            batch.alter_column("project_id", existing_type=sa.String(64), nullable=False)

    current = await database.read(described, None)
    await database.write(older)
    assert await database.read(described, None) != current
    await schema.upgrade(database, metadata, MIGRATIONS)
    assert await database.read(described, None) == current
    await database.close()


@pytest.mark.parametrize("table", metadata.sorted_tables, ids=lambda table: table.name)
def test_every_table_has_a_key(table: sa.Table) -> None:
    assert table.primary_key.columns
