"""The compute schema: a first start and the migrations lead to the same tables; what is newer is refused."""

import contextlib
from pathlib import Path

import pytest
import sqlalchemy as sa

from micronova.cli.maintain import SCHEMAS
from micronova.db import schema
from micronova.db.engine import open_database
from micronova.db.tables import (
    aggregate_hosts,
    aggregates,
    compute_nodes,
    inventories,
    metadata,
    operations,
    provider_aggregates,
    provider_traits,
    resource_providers,
    services,
)
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


@pytest.mark.parametrize("works", [True, False])
async def test_a_database_of_a_later_release(urls: tuple[str, str], works: bool) -> None:
    """It is used if that release says that it has only added to what this one knows: an upgrade can be backed out."""
    database = open_database(urls[0])
    await schema.upgrade(database, metadata, MIGRATIONS)
    assert await database.read(schema.usable, MIGRATIONS)
    values = {"works_with": schema.head(MIGRATIONS) if works else "9998"}
    later = sa.text("UPDATE alembic_version SET version_num = '9999', works_with = :works_with")
    await database.write(lambda conn: conn.execute(later, values) and None)
    assert await database.read(schema.usable, MIGRATIONS) == works
    with contextlib.nullcontext() if works else pytest.raises(MicronovaError, match="use a newer micronova"):
        await schema.upgrade(database, metadata, MIGRATIONS)
    with contextlib.nullcontext() if works else pytest.raises(MicronovaError, match="use a newer micronova"):
        await database.read(schema.check_current, MIGRATIONS)
    assert await database.read(schema.current) == "9999"
    await database.close()


async def test_a_database_of_a_release_that_did_not_say_it(urls: tuple[str, str]) -> None:
    """What 0.2.0 has made gets the statement with the first upgrade; a later release that says nothing is refused."""
    database = open_database(urls[0])

    async def do(statement: str) -> None:
        await database.write(lambda conn: conn.execute(sa.text(statement)) and None)

    async def says() -> str | None:
        found = sa.text("SELECT works_with FROM alembic_version")
        return await database.read(lambda conn: conn.execute(found).scalar())

    await schema.upgrade(database, metadata, MIGRATIONS, to="0029")
    assert not await database.read(schema.usable, MIGRATIONS)
    await schema.upgrade(database, metadata, MIGRATIONS)
    assert await says() == schema.works_with(MIGRATIONS)
    await do("ALTER TABLE alembic_version DROP COLUMN works_with")
    await schema.upgrade(database, metadata, MIGRATIONS)
    assert await says() == schema.works_with(MIGRATIONS)
    await do("ALTER TABLE alembic_version DROP COLUMN works_with")
    await do("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(MicronovaError, match="use a newer micronova"):
        await schema.upgrade(database, metadata, MIGRATIONS)
    await database.close()


@pytest.mark.parametrize("migrations", [migrations for _, migrations in SCHEMAS.values()])
def test_the_oldest_revision_that_works_is_one(migrations: str) -> None:
    assert schema.works_with(migrations) in schema.revisions(migrations)


async def test_an_upgrade_makes_providers_of_the_nodes_that_are_there(urls: tuple[str, str]) -> None:
    """Their names are unique, although two hosts may name a node alike; they are in the aggregates of their hosts."""
    database = open_database(urls[0])
    await schema.upgrade(database, metadata, MIGRATIONS, to="0019")

    def of_0_2(conn: sa.Connection) -> None:
        for table in ("resource_providers", "provider_aggregates", "provider_traits", "consumers"):
            conn.execute(sa.text(f"DROP TABLE {table}"))
        for number, (uuid, host, name) in enumerate((("a", "h1", "n"), ("b", "h2", "n"), ("c", "h3", "m"))):
            row = {"uuid": uuid, "id": number, "host": host, "hypervisor_hostname": name, "hypervisor_type": "fake"}
            row |= {"hypervisor_version": 1, "host_ip": "", "created_at": 5, "changed_at": 5}
            conn.execute(compute_nodes.insert(), row)
        conn.execute(aggregates.insert(), {"id": 1, "uuid": "rack", "name": "rack", "created_at": 5})
        conn.execute(aggregate_hosts.insert(), {"aggregate_id": 1, "host": "h2"})

    await database.write(of_0_2)
    await schema.upgrade(database, metadata, MIGRATIONS)
    made = await database.read(lambda conn: conn.execute(sa.select(resource_providers).order_by("uuid")).all())
    assert [(row.uuid, row.name, row.root_uuid) for row in made] == [
        ("a", "n", "a"), ("b", "n (b)", "b"), ("c", "m", "c"),
    ]  # fmt: skip
    members = await database.read(lambda conn: conn.execute(sa.select(provider_aggregates)).all())
    assert [tuple(row) for row in members] == [("b", "rack")]
    await database.close()


async def test_an_upgrade_limits_servers_to_whole_nodes_and_tells_nodes_by_traits(urls: tuple[str, str]) -> None:
    """What somebody else has set, or another provider has, stays as it is."""
    database = open_database(urls[0])
    await schema.upgrade(database, metadata, MIGRATIONS, to="0025")

    def of_0_2(conn: sa.Connection) -> None:
        for number, uuid in enumerate(("a", "b")):
            node = {"uuid": uuid, "id": number, "host": uuid, "hypervisor_hostname": uuid, "hypervisor_type": "fake"}
            node |= {"hypervisor_version": 1, "host_ip": "", "created_at": 5, "changed_at": 5}
            conn.execute(compute_nodes.insert(), node)
            service = {"uuid": uuid, "id": number, "host": uuid, "binary": "nova-compute", "disabled": uuid == "b"}
            conn.execute(services.insert(), service | {"last_seen_at": 5, "created_at": 5})
        stock = {"total": 4, "capacity": 16, "changed_at": 5}
        for uuid, name, more in (
            ("a", "VCPU", {}), ("a", "DISK_GB", {"total": 0}), ("a", "MEMORY_MB", {"max_unit": 3}),
            ("a", "CUSTOM_GOLD", {}), ("c", "VCPU", {}),
        ):  # fmt: skip
            conn.execute(inventories.insert(), {"node_uuid": uuid, "resource_class": name, **stock, **more})
        conn.execute(provider_traits.insert(), {"provider_uuid": "a", "trait": "COMPUTE_NODE"})

    await database.write(of_0_2)
    await schema.upgrade(database, metadata, MIGRATIONS)
    units = await database.read(lambda conn: conn.execute(sa.select(inventories)).all())
    assert {(row.node_uuid, row.resource_class): row.max_unit for row in units} == {
        ("a", "VCPU"): 4, ("a", "DISK_GB"): 1, ("a", "MEMORY_MB"): 3,
        ("a", "CUSTOM_GOLD"): 2147483647, ("c", "VCPU"): 2147483647,
    }  # fmt: skip
    traits = await database.read(lambda conn: conn.execute(sa.select(provider_traits)).all())
    assert sorted(tuple(row) for row in traits) == [
        ("a", "COMPUTE_NODE"), ("b", "COMPUTE_NODE"), ("b", "COMPUTE_STATUS_DISABLED"),
    ]  # fmt: skip
    await database.close()
