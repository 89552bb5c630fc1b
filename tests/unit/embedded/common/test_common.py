"""What the embedded services share: values of query strings, revisions of rows, lists of ids."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import SIZE, chunks
from micronova.embedded.common.query import QueryRules, last
from micronova.embedded.common.revisions import ATTEMPTS, Changed, Contended, retry
from micronova.objects.errors import Invalid

RULES = QueryRules(
    true=frozenset({"true", "1"}),
    false=frozenset({"false", "0"}),
    not_boolean="{name}: {value!r} is no boolean",
    not_integer="{name}: {value!r} is no integer",
    not_time="{name}: {value!r} is no time",
    not_limit="{name}: {value!r} is no limit",
)

volumes = sa.Table(
    "volumes",
    sa.MetaData(),
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("name", sa.String(255)),
    sa.Column("size", sa.Integer),
    sa.Column("bytes", sa.BigInteger),
    sa.Column("bootable", sa.Boolean, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
)


@pytest.fixture
def conn() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as conn:
        volumes.metadata.create_all(conn)
        for id, name, size in (("v1", "one", 1), ("v2", None, 2), ("v3", "", None)):
            row = {"id": id, "name": name, "size": size, "bytes": 2**40, "bootable": id == "v1"}
            assert insert_if_absent(conn, volumes, {**row, "revision": 1, "updated_at": 0})
        yield conn
    engine.dispose()


def test_booleans_have_the_words_that_the_rules_name() -> None:
    assert RULES.boolean("x", "True") and RULES.boolean("x", "1")
    assert not RULES.boolean("x", "FALSE") and not RULES.boolean("x", "0")
    with pytest.raises(Invalid, match="x: 'yes' is no boolean"):
        RULES.boolean("x", "yes")


def test_integers_and_their_bounds() -> None:
    assert RULES.integer("x", "-3") == -3
    assert RULES.integer("x", "3", least=3, most=3) == 3
    for text in ("", "a", "1.5", "2", "4", " 3", "\u0663"):
        with pytest.raises(Invalid, match="no integer"):
            RULES.integer("x", text, least=3, most=3)


def test_times_without_a_zone_are_utc() -> None:
    assert RULES.time("x", "1970-01-01T00:00:01.5") == 1_500_000
    assert RULES.time("x", "1970-01-01T01:00:01+01:00") == 1_000_000
    for text in ("", "yesterday", "1970-13-01"):
        with pytest.raises(Invalid, match="no time"):
            RULES.time("x", text)


def test_the_limit_of_a_page() -> None:
    assert RULES.limit({}, most=10) is None
    assert RULES.limit({"limit": ["3", "99"]}, most=10) == 10
    assert RULES.limit({"limit": ["0"]}, most=10) == 0
    for text in ("0", "-1", "x", ""):
        with pytest.raises(Invalid, match="is no limit"):
            RULES.limit({"limit": [text]}, most=10, least=1)


def test_a_message_repeats_a_part_of_a_long_value() -> None:
    with pytest.raises(Invalid) as raised:
        RULES.boolean("x", "y" * 1000)
    assert len(str(raised.value)) < 100


def test_the_last_value_counts() -> None:
    assert last({"x": ["1", "2"]}, "x") == "2"
    assert last({}, "x") is None


def test_filters_follow_the_type_of_the_column(conn: sa.Connection) -> None:
    def ids(name: str, *values: str, empty_is_null: bool = False) -> list[str]:
        condition = RULES.matches(volumes.c[name], name, values, empty_is_null=empty_is_null)
        return list(conn.execute(sa.select(volumes.c.id).where(condition).order_by(volumes.c.id)).scalars())

    assert ids("bootable", "true") == ["v1"]
    assert ids("bootable", "true", "false") == ["v1", "v2", "v3"]
    assert ids("size", "1", "2", str(2**31)) == ["v1", "v2"]
    assert ids("bytes", str(2**40)) == ["v1", "v2", "v3"]
    assert ids("bytes", str(2**70)) == []
    assert ids("name", "one") == ["v1"]
    assert ids("name", "") == ["v3"]
    assert ids("name", "", empty_is_null=True) == ["v2", "v3"]


def test_a_row_is_inserted_once(conn: sa.Connection) -> None:
    row = {"id": "v1", "name": "other", "size": 1, "bytes": 1, "bootable": False, "revision": 1, "updated_at": 0}
    assert not insert_if_absent(conn, volumes, row)
    assert conn.execute(sa.select(volumes.c.name).where(volumes.c.id == "v1")).scalar_one() == "one"


def test_a_write_needs_the_revision_that_was_read(conn: sa.Connection) -> None:
    revisions.update(conn, volumes.c.revision, "v1", 1, {"name": "new"}, now=7)
    row = conn.execute(sa.select(volumes).where(volumes.c.id == "v1")).one()
    assert (row.name, row.revision, row.updated_at) == ("new", 2, 7)
    with pytest.raises(Changed):
        revisions.update(conn, volumes.c.revision, "v1", 1, {"name": "newer"}, now=8)
    with pytest.raises(Changed):
        revisions.delete(conn, volumes.c.revision, "v1", 1)
    revisions.delete(conn, volumes.c.revision, "v1", 2)
    with pytest.raises(Changed):
        revisions.update(conn, volumes.c.revision, "v1", 2, {"name": "newest"}, now=9)


def test_a_touch_counts_the_revision_of_rows_up_whatever_it_is(conn: sa.Connection) -> None:
    assert revisions.touch(conn, volumes.c.revision, volumes.c.id.in_(["v1", "v2"]), now=7, name="new") == 2
    rows = conn.execute(sa.select(volumes).order_by(volumes.c.id)).all()
    assert [(row.name, row.revision, row.updated_at) for row in rows[:2]] == [("new", 2, 7)] * 2
    assert (rows[2].name, rows[2].updated_at) != ("new", 7)
    assert revisions.touch(conn, volumes.c.revision, volumes.c.id == "gone", now=8) == 0


async def test_a_handler_runs_until_nobody_comes_between() -> None:
    runs = 0

    async def handler(changes: int) -> int:
        nonlocal runs
        runs += 1
        if runs <= changes:
            raise Changed
        return runs

    assert await retry(handler, 2) == 3
    with pytest.raises(Contended):
        await retry(handler, 3 + ATTEMPTS)
    assert runs == 3 + ATTEMPTS


def test_ids_are_cut_into_chunks_without_repetition() -> None:
    ids = [str(number) for number in range(SIZE + 1)]
    assert list(chunks([*ids, None, "", "0"])) == [ids[:SIZE], [str(SIZE)]]
    assert list(chunks([])) == []
