"""The compute schema: a first start and the migrations lead to the same tables; what is newer is refused."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from micronova.db import schema
from micronova.db.engine import open_database
from micronova.db.tables import metadata, operations
from micronova.objects.errors import MicronovaError
from tests.unit.embedded.identity.test_schema import described

MIGRATIONS = "micronova.db.migrations"


@pytest.fixture(params=["sqlite", "postgresql"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Two empty databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    postgres = request.getfixturevalue("postgres")
    return postgres.create_database(f"s{tmp_path.name[-12:]}a".lower().replace("-", "_")), postgres.create_database(
        f"s{tmp_path.name[-12:]}b".lower().replace("-", "_")
    )


async def test_both_ways_lead_to_the_same_tables(urls: tuple[str, str]) -> None:
    fresh, migrated = open_database(urls[0]), open_database(urls[1])
    await schema.upgrade(fresh, metadata, MIGRATIONS)
    await schema.upgrade(migrated, metadata, MIGRATIONS, to=schema.head(MIGRATIONS))
    one, two = await fresh.read(described, None), await migrated.read(described, None)
    assert one == two
    assert set(one) == set(metadata.tables)
    assert await fresh.read(schema.current) == await migrated.read(schema.current) == schema.head(MIGRATIONS)
    await fresh.close()
    await migrated.close()


async def test_an_upgrade_renames_columns_of_operations_and_drops_cells(urls: tuple[str, str]) -> None:
    """Earlier releases called columns `attempts` and `group_id`, and had a cell for each host and node."""
    database = open_database(urls[0])
    await schema.upgrade(database, metadata, MIGRATIONS, to="0008")
    now = await database.read(described, None)
    values: dict[str, str | int | bytes] = dict.fromkeys(("id", "kind", "instance_uuid", "group_id", "step"), "x")
    values |= {"payload": b"x", "context": b"x"}
    values |= dict.fromkeys(("version", "epoch", "lease_until", "deadline", "created_at"), 0)

    def of_0_1(conn: sa.Connection) -> None:
        conn.execute(sa.text("ALTER TABLE operations RENAME COLUMN leases TO attempts"))
        conn.execute(sa.text("ALTER TABLE operations RENAME COLUMN batch_id TO group_id"))
        for table in ("hosts", "compute_nodes"):
            conn.execute(sa.text(f"ALTER TABLE {table} ADD COLUMN cell VARCHAR(64) NOT NULL DEFAULT ''"))
        names = ", ".join([*values, "attempts"])
        conn.execute(
            sa.text(f"INSERT INTO operations ({names}) VALUES (:{names.replace(', ', ', :')})"),
            values | {"attempts": 3},
        )

    await database.write(of_0_1)
    await schema.upgrade(database, metadata, MIGRATIONS)
    assert await database.read(
        lambda conn: conn.execute(sa.select(operations.c.leases, operations.c.batch_id)).all()
    ) == [(3, "x")]
    assert await database.read(described, None) == now
    await database.close()


async def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a.db")
    await schema.upgrade(database, metadata, MIGRATIONS)
    await database.write(lambda conn: conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")) and None)
    with pytest.raises(MicronovaError, match="use a newer micronova"):
        await schema.upgrade(database, metadata, MIGRATIONS)
    await database.close()
