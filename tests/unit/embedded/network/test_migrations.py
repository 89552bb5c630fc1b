"""Tables from the metadata and tables from migrations are the same."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.engine import open_database
from micronova.db.schema import upgrade
from micronova.embedded.network.service import MIGRATIONS
from micronova.embedded.network.tables import metadata, ports, rbac_policies, usages

LATER = (
    "qos_policies", "bandwidth_limit_rules", "dscp_marking_rules", "rbac_policies", "default_security_group_rules",
    "trunks", "subports", "address_scopes", "minimum_bandwidth_rules",
)  # fmt: skip
ADDED = ("qos_policy_id", "address_scope_id")


def shape(conn: sa.Connection) -> dict[str, Any]:
    inspector = sa.inspect(conn)
    return {
        table: {
            "columns": [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)],
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "unique": sorted(tuple(u["column_names"]) for u in inspector.get_unique_constraints(table)),
            "indexes": sorted((i["name"], tuple(i["column_names"])) for i in inspector.get_indexes(table)),
            "foreign": sorted(
                (tuple(f["constrained_columns"]), f["referred_table"], str(f["options"]))
                for f in inspector.get_foreign_keys(table)
            ),
        }
        for table in sorted(inspector.get_table_names())
    }


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_migrations_and_metadata_agree(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shapes = []
    for number, to in enumerate((None, "0001")):
        if kind == "sqlite":
            database = open_database(f"sqlite:///{tmp_path}/{number}.db")
        else:
            url = request.getfixturevalue("module_database_url")
            database = open_database(url, schema=f"m{number}")
        schema = None if kind == "sqlite" else f"m{number}"
        await upgrade(database, metadata, MIGRATIONS, to=to, schema=schema)
        await upgrade(database, metadata, MIGRATIONS, schema=schema)
        shapes.append(await database.read(shape))
        await database.close()
    assert shapes[0] == shapes[1]
    assert set(metadata.tables) <= shapes[0].keys()


def before_policies() -> sa.MetaData:
    """Return the tables of the first revision: without QoS and RBAC policies, and with the index that 0012 removes."""
    old = sa.MetaData()
    for table in metadata.sorted_tables:
        if table.name in LATER:
            continue
        columns = [column._copy() for column in table.columns if column.name not in ADDED]
        unique = [
            sa.UniqueConstraint(*(column.name for column in each.columns), name=each.name)
            for each in table.constraints
            if isinstance(each, sa.UniqueConstraint) and each.name is not None
        ]
        foreign = [
            sa.ForeignKeyConstraint(each.column_keys, [key.target_fullname for key in each.elements], each.name,
                                    ondelete=each.ondelete)
            for each in table.foreign_key_constraints
            if not set(each.column_keys) & set(ADDED)
        ]  # fmt: skip
        sa.Table(table.name, old, *columns, *unique, *foreign)
    sa.Index("ix_ports_project_id", old.tables["ports"].c.project_id)
    return old


def pool(shared: bool) -> dict[str, Any]:
    numbers = ("created_at", "updated_at", "revision", "ip_version", "min_prefixlen", "default_prefixlen")
    return {
        **dict.fromkeys((*numbers, "max_prefixlen"), 4),
        "id": str(shared),
        "project_id": "p1",
        "name": "",
        "description": "",
        "prefixes": [],
        "default_quota": None,
        "shared": shared,
        "is_default": False,
    }


def add_pools(conn: sa.Connection, table: sa.Table) -> None:
    conn.execute(table.insert(), [pool(True), pool(False)])


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_an_old_database_is_brought_up_to_date(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shapes = []
    for schema, tables in (("now", metadata), ("old", before_policies())):
        if kind == "sqlite":
            database = open_database(f"sqlite:///{tmp_path}/{schema}.db")
        else:
            database = open_database(request.getfixturevalue("module_database_url"), schema=schema)
        named = None if kind == "sqlite" else schema
        await upgrade(database, tables, MIGRATIONS, schema=named)
        if schema == "old":
            assert "qos_policy_id" not in [c[0] for c in (await database.read(shape))["ports"]["columns"]]
            await database.write(lambda conn: conn.execute(sa.text("UPDATE alembic_version SET version_num = '0001'")))
            await database.write(add_pools, tables.tables["subnetpools"])
        await upgrade(database, metadata, MIGRATIONS, schema=named)
        shapes.append(await database.read(shape))
        await database.read(lambda conn: conn.execute(sa.select(ports)).all())
        if schema == "old":  # what was shared with all has an entry, which its project's quota counts
            [entry] = await database.read(lambda conn: conn.execute(sa.select(rbac_policies)).all())
            assert entry[1:] == ("p1", "subnetpool", "True", "access_as_shared", "*")
            [used] = await database.read(lambda conn: conn.execute(sa.select(usages)).all())
            assert used == ("p1", "rbac_policy", 1)
        await database.close()
    assert shapes[0] == shapes[1]
