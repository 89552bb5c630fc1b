"""Transactions when the machine or the database lacks something, or when nobody waits for them any more."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from micronova.db.engine import Database, open_database
from micronova.objects.errors import Unavailable
from tests.services.postgres import Postgres
from tests.unit.db.databases import open_transaction

NOTES = sa.Table("notes", sa.MetaData(), sa.Column("text", sa.Text))


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = open_database(f"sqlite:///{tmp_path}/notes.db")
    await opened.write(NOTES.metadata.create_all)
    yield opened
    await opened.close()


def _insert(conn: sa.Connection, size: int) -> None:
    conn.execute(NOTES.insert(), {"text": "x" * size})


def _limit(conn: sa.Connection, pages: int) -> None:
    conn.execute(sa.text(f"PRAGMA max_page_count={pages}"))


async def test_a_full_disk_is_temporary(database: Database) -> None:
    await database.write(_limit, 10)
    with pytest.raises(Unavailable, match="cannot be used at the moment"):
        await database.write(_insert, 1_000_000)
    await database.write(_limit, 1_000_000)
    await database.write(_insert, 1_000_000)


async def test_one_transaction_that_finds_the_disk_full_leaves_the_others_of_its_commit_alone(
    database: Database,
) -> None:
    await database.write(_limit, 20)
    sizes = [10, 1_000_000, 10]
    results = await asyncio.gather(*(database.write(_insert, size) for size in sizes), return_exceptions=True)
    kinds = [type(result) for result in results]
    assert kinds[1] is Unavailable
    stored = await database.read(lambda conn: conn.execute(sa.select(sa.func.count()).select_from(NOTES)).scalar_one())
    assert stored == kinds.count(type(None))


async def test_an_exhausted_pool_is_temporary(postgres: Postgres) -> None:
    """More transactions than connections: who gets none in time is told to come again, not that it failed."""
    database = open_database(postgres.url, pool_size=1, pool_timeout=0.05)
    try:
        async with open_transaction(database):
            with pytest.raises(Unavailable, match="all connections are in use"):
                await database.read(lambda conn: conn.execute(sa.text("SELECT 1")))
    finally:
        await database.close()


async def test_a_locked_database_keeps_everybody_waiting_once(tmp_path: Path) -> None:
    """Another process holds the write lock: all transactions of a commit fail together, not one after the other."""
    database = open_database(f"sqlite:///{tmp_path}/notes.db")
    await database.write(NOTES.metadata.create_all)
    await database.write(lambda conn: conn.execute(sa.text("PRAGMA busy_timeout=300")))
    other = sqlite3.connect(tmp_path / "notes.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        begun = asyncio.get_running_loop().time()
        results = await asyncio.gather(*(database.write(_insert, 1) for _ in range(20)), return_exceptions=True)
        assert {type(result) for result in results} == {Unavailable}
        assert asyncio.get_running_loop().time() - begun < 20 * 0.3
    finally:
        other.close()
        await database.close()


async def test_a_database_that_cannot_be_opened_is_temporary(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/missing/notes.db")
    try:
        with pytest.raises(Unavailable):
            await database.read(lambda conn: conn.execute(sa.text("SELECT 1")))
        with pytest.raises(Unavailable):
            await database.write(lambda conn: conn.execute(sa.text("SELECT 1")))
    finally:
        await database.close()


async def test_a_transaction_of_a_cancelled_caller_does_not_keep_others_waiting(database: Database) -> None:
    """It is not run if it has not begun; a caller that was cancelled while it ran finds it committed."""
    entered, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(conn: sa.Connection) -> None:
        _insert(conn, 1)
        loop.call_soon_threadsafe(entered.set)
        leave.wait()

    running = asyncio.create_task(database.write(hold))
    await entered.wait()
    waiting = [asyncio.create_task(database.write(_insert, size)) for size in (2, 3, 4)]
    await asyncio.sleep(0)  # they are in the queue
    for task in (running, *waiting[:2]):
        task.cancel()
    await asyncio.wait([running, *waiting[:2]])
    leave.set()
    await waiting[2]
    stored = await database.read(lambda conn: conn.execute(sa.select(sa.func.length(NOTES.c.text))).scalars().all())
    assert sorted(stored) == [1, 4]
