"""Commits in doubt: each transaction happens once, and its caller gets the result."""

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from micronova.db import postgres as postgres_module
from micronova.db.engine import Database, open_database
from micronova.objects.errors import Unavailable
from tests.services.lossy_proxy import Loss, LossyProxy
from tests.services.postgres import Postgres

NOTES = sa.Table("notes", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("text", sa.Text))


def _add(conn: sa.Connection, text: str) -> int:
    """Insert a note under a new id, as a request does that makes its ids within the transaction."""
    id: int = conn.execute(NOTES.insert().values(text=text).returning(NOTES.c.id)).scalar_one()
    return id


def _stored(conn: sa.Connection) -> list[tuple[int, str]]:
    return [(row.id, row.text) for row in conn.execute(sa.select(NOTES).order_by(NOTES.c.id))]


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(database_url) as made:
        yield made


@pytest.fixture
async def database(proxy: LossyProxy) -> AsyncIterator[Database]:
    opened = open_database(proxy.url)
    await opened.write(NOTES.metadata.create_all)
    yield opened
    proxy.loss = Loss.NOTHING
    await opened.close()


async def test_a_commit_whose_answer_is_lost_happens_once(database: Database, proxy: LossyProxy) -> None:
    proxy.loss = Loss.ANSWER
    ids = [await database.write(_add, str(number)) for number in range(3)]
    assert proxy.lost == 3
    assert await database.read(_stored) == list(zip(ids, ("0", "1", "2"), strict=True))


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.SILENCE])
async def test_a_commit_that_never_arrived_is_done_by_a_second_transaction(
    database: Database, proxy: LossyProxy, loss: Loss
) -> None:
    """Also if the server does not know that its client has gone, and would keep the transaction's locks."""

    def add_and_calm(conn: sa.Connection) -> int:
        conn.execute(sa.text("LOCK TABLE notes"))
        id = _add(conn, "once")
        if proxy.lost:
            proxy.loss = Loss.NOTHING
        return id

    proxy.loss = loss
    id = await database.write(add_and_calm)
    assert proxy.lost == 1
    assert await database.read(_stored) == [(id, "once")]


async def test_what_became_of_a_commit_is_asked_on_a_new_connection(
    database: Database, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall forgets all connections: nothing is cut, and nobody answers. New connections are fine."""
    await asyncio.gather(*(database.write(_add, "before") for _ in range(8)))
    monkeypatch.setattr(postgres_module, "ANSWER", 2.0)
    proxy.loss = Loss.HUSH
    async with asyncio.timeout(50):
        id = await database.write(_add, "once")
        assert database.statistics.retries == 0, "the commit is not done again"
        later = await asyncio.gather(*(database.write(_add, "later") for _ in range(8)))
    assert database.statistics.retries == 0, "no transaction gets one of the silent connections"
    stored = await database.read(_stored)
    assert [each for each in stored if each[1] == "once"] == [(id, "once")]
    assert [number for number, text in stored if text == "later"] == sorted(later)


async def test_many_at_once(database: Database, proxy: LossyProxy) -> None:
    proxy.loss = Loss.ANSWER
    ids = await asyncio.gather(*(database.write(_add, str(number)) for number in range(30)))
    assert proxy.lost == 30
    assert await database.read(_stored) == sorted((id, str(number)) for number, id in enumerate(ids))


async def test_if_nobody_knows_the_caller_is_told_so(
    database: Database, proxy: LossyProxy, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database stays away after the answer was lost: the caller hears neither success nor failure."""
    monkeypatch.setattr(postgres_module, "DOUBT", 0.2)

    def add_and_vanish(conn: sa.Connection) -> int:
        proxy._listener.close()
        return _add(conn, "who knows")

    proxy.loss = Loss.ANSWER
    with pytest.raises(Unavailable, match="not known whether the change was made"):
        await database.write(add_and_vanish)


async def test_an_error_of_commit_is_an_error(database: Database) -> None:
    """A constraint that is checked at COMMIT: there is no doubt, and nothing is tried again."""
    await database.write(
        lambda conn: conn.execute(
            sa.text("ALTER TABLE notes ADD CONSTRAINT one UNIQUE (text) DEFERRABLE INITIALLY DEFERRED")
        )
    )
    await database.write(_add, "same")
    with pytest.raises(sa.exc.IntegrityError):
        await database.write(_add, "same")
    assert database.statistics.retries == 0


async def test_a_commit_of_sqlite_that_raises_has_not_happened(tmp_path: Path) -> None:
    """SQLite writes a transaction when it commits: of commits that fail for lack of space nothing is left."""
    opened = open_database(f"sqlite:///{tmp_path}/notes.db")
    await opened.write(NOTES.metadata.create_all)
    texts = [str(number).ljust(200_000) for number in range(90)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, before[1]))
    try:
        results = await asyncio.gather(*(opened.write(_add, text) for text in texts), return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = [(id, text) for id, text in zip(results, texts, strict=True) if isinstance(id, int)]
    assert 0 < len(kept) < len(texts)
    assert {type(result) for result in results} == {int, Unavailable}
    assert await opened.read(_stored) == sorted(kept)
    await opened.close()
