"""Keyset paging against sorting in Python: pages of any length contain each row once, in order."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import keyset
from micronova.db.keyset import SortKey

ROWS = [
    (f"{index:02}", name, size)
    for index, (name, size) in enumerate(itertools.product((None, "", "a", "b"), (None, 0, 1, 1)))
]
NULLS_FIRST: Any = {"name": lambda value: (value is not None, value or ""), "size": lambda v: (v is not None, v or 0)}

things = sa.Table(
    "things",
    sa.MetaData(),
    sa.Column("id", sa.String(2), primary_key=True),
    sa.Column("name", sa.String(10)),
    sa.Column("size", sa.Integer),
)


@pytest.fixture(scope="module")
def conn() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as conn:
        things.metadata.create_all(conn)
        conn.execute(things.insert(), [{"id": id, "name": name, "size": size} for id, name, size in ROWS])
        yield conn
    engine.dispose()


@pytest.mark.parametrize("limit", [1, 3, 5, 16, 17])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_pages_contain_each_row_once(
    conn: sa.Connection, limit: int, by_name: bool, by_size: bool, by_id: bool
) -> None:
    expected = sorted(ROWS, key=lambda row: row[0], reverse=by_id)
    expected.sort(key=lambda row: NULLS_FIRST["size"](row[2]), reverse=by_size)
    expected.sort(key=lambda row: NULLS_FIRST["name"](row[1]), reverse=by_name)
    keys = [SortKey(things.c.name, by_name), SortKey(things.c.size, by_size), SortKey(things.c.id, by_id)]
    found: list[str] = []
    more, after = True, None
    while more:
        rows, more = keyset.fetch(conn, sa.select(things), keys, after, limit)
        assert len(rows) == limit if more else len(rows) <= limit
        found += [row.id for row in rows]
        after = keyset.position(conn, keys, things.c.id == found[-1])
        assert after is not None
    assert found == [row[0] for row in expected]


def test_without_a_limit_all_rows_come_at_once(conn: sa.Connection) -> None:
    rows, more = keyset.fetch(conn, sa.select(things), [SortKey(things.c.id)])
    assert [row.id for row in rows] == [row[0] for row in ROWS]
    assert not more


def test_a_page_of_nothing_knows_that_there_is_more(conn: sa.Connection) -> None:
    assert keyset.fetch(conn, sa.select(things), [SortKey(things.c.id)], limit=0) == ([], True)


def test_a_marker_that_does_not_exist_has_no_position(conn: sa.Connection) -> None:
    assert keyset.position(conn, [SortKey(things.c.id)], things.c.id == "xx") is None
