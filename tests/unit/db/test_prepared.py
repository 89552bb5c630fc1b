"""A prepared statement does what SQLAlchemy does with it, on both databases."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.engine import Database, open_database
from micronova.db.prepared import Prepared
from micronova.db.upsert import insert_if_absent
from tests.unit.db.databases import KINDS, own_schema

metadata = sa.MetaData()
things = sa.Table(
    "things",
    metadata,
    sa.Column("id", sa.String(8), primary_key=True),
    sa.Column("kind", sa.String(8), nullable=False, default="plain"),
    sa.Column("facts", sa.JSON),
    sa.Column("secret", sa.LargeBinary),
    sa.Column("hidden", sa.Boolean, nullable=False, default=False),
    sa.Column("amount", sa.Integer, nullable=False, default=0),
    sa.Column("share", sa.Float),
)
ONE = {
    "id": "a",
    "kind": "odd",
    "facts": {"x": [1, None]},
    "secret": b"\x00\xff",
    "hidden": True,
    "amount": 7,
    "share": 0.5,
}

INSERT = Prepared(things.insert())
ADD = Prepared(
    things.update()
    .where(things.c.id == sa.bindparam("b_id"), things.c.kind.in_([sa.literal("odd"), sa.literal("plain")]))
    .values(amount=things.c.amount + sa.bindparam("more"), kind="changed")
)
TAKE = Prepared(things.delete().where(things.c.amount > sa.bindparam("most")).returning(things.c.id, things.c.facts))
ALL = Prepared(sa.select(things).order_by(things.c.id))


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    if request.param == "postgresql":
        async with own_schema(request, metadata) as opened:
            yield opened
        return
    opened = open_database(f"sqlite:///{request.getfixturevalue('tmp_path')}/things.db")
    await opened.write(metadata.create_all)
    yield opened
    await opened.close()


async def test_rows_are_as_they_were_inserted(database: Database) -> None:
    other = {**ONE, "id": "b", "facts": None, "secret": None, "hidden": False}
    third = {**ONE, "id": "c", "facts": "text", "share": None}
    await database.write(INSERT.run_each, [ONE, other, third])
    await database.write(INSERT.run_each, [])
    assert await database.read(ALL.all, {}) == [ONE, other, third]
    assert await database.read(ALL.first, {}) == ONE


async def test_an_update_says_how_many_rows_it_has_changed(database: Database) -> None:
    await database.write(INSERT.run, ONE)
    assert await database.write(ADD.run, {"b_id": "a", "more": 3}) == 1
    assert await database.write(ADD.run, {"b_id": "a", "more": 3}) == 0  # its kind is another now
    assert await database.read(ALL.first, {}) == {**ONE, "amount": 10, "kind": "changed"}


async def test_returned_columns_have_their_types(database: Database) -> None:
    await database.write(INSERT.run, ONE)
    assert await database.write(TAKE.all, {"most": 7}) == []
    assert await database.write(TAKE.all, {"most": 6}) == [{"id": "a", "facts": ONE["facts"]}]


async def test_a_broken_constraint_is_the_error_of_sqlalchemy(database: Database) -> None:
    await database.write(INSERT.run, ONE)
    with pytest.raises(sa.exc.IntegrityError):
        await database.write(INSERT.run, ONE)
    assert await database.read(ALL.all, {}) == [ONE]


async def test_insert_if_absent_adds_defaults_and_leaves_what_is_there(database: Database) -> None:
    def insert(conn: sa.Connection, values: Sequence[dict[str, Any]]) -> list[bool]:
        return [insert_if_absent(conn, things, each) for each in values]

    wanted: list[dict[str, Any]] = [
        {"id": "a", "facts": {}},
        {"id": "a", "facts": {"y": 1}},
        {"id": "b", "facts": {}, "amount": 2},
    ]
    assert await database.write(insert, wanted) == [True, False, True]
    default = {"kind": "plain", "secret": None, "hidden": False, "amount": 0, "share": None}
    assert await database.read(ALL.all, {}) == [
        {**default, "id": "a", "facts": {}},
        {**default, "id": "b", "facts": {}, "amount": 2},
    ]


async def test_what_cannot_be_prepared_is_refused(tmp_path: Any) -> None:
    several = Prepared(sa.select(things).where(things.c.kind.in_(["odd", "plain"])))
    database = open_database(f"sqlite:///{tmp_path}/things.db")
    await database.write(metadata.create_all)
    with pytest.raises(ValueError, match="Not a constant statement"):
        await database.read(several.all, {})
    with pytest.raises(KeyError, match="more"):
        await database.write(ADD.run, {"b_id": "a"})
    await database.close()
