"""The tables come from the metadata on an empty database and from migrations otherwise: both lead to the same."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.engine import open_database
from micronova.db.schema import upgrade
from micronova.neighbours.network.service import MIGRATIONS
from micronova.neighbours.network.tables import metadata


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
