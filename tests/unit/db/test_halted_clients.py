"""What a client that is gone or stands still leaves behind in PostgreSQL, and errors that pass."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import sqlalchemy as sa

from micronova.db import postgres as postgres_module
from micronova.db import schema
from micronova.db.engine import Database, open_database
from micronova.objects.errors import Unavailable
from tests.services.postgres import Postgres
from tests.unit.db.databases import open_transaction

NOTES = sa.Table("notes", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("text", sa.Text))


@pytest.fixture
async def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    monkeypatch.setattr(postgres_module, "IDLE", 0.5)
    monkeypatch.setattr(postgres_module, "LOCK_WAIT", 0.1)
    opened = open_database(database_url)
    await opened.write(NOTES.metadata.create_all)
    await opened.write(lambda conn: conn.execute(NOTES.insert().values(id=1, text="old")))
    yield opened
    await opened.close()


def _change(conn: sa.Connection) -> None:
    conn.execute(NOTES.update().values(text="new"))


def _texts(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(NOTES.c.text)).scalars())


async def test_the_locks_of_a_transaction_that_stands_still_become_free(database: Database, database_url: str) -> None:
    halted = open_database(database_url)
    try:
        async with open_transaction(halted) as transaction:
            await transaction.run(_change)
            async with asyncio.timeout(50):
                await database.write(_change)
    finally:
        await halted.close()
    assert await database.read(_texts) == ["new"]


async def test_a_transaction_that_stood_still_is_run_again(
    database: Database, database_url: str, postgres: Postgres
) -> None:
    attempts: list[int] = []

    def stand_still(conn: sa.Connection) -> None:
        pid = conn.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        attempts.append(pid)
        _change(conn)
        if len(attempts) == 1:
            for _ in range(1000):
                if postgres.sql(f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}") == "0":
                    break
        conn.execute(NOTES.insert().values(id=2, text="more"))

    await database.write(stand_still)
    assert len(attempts) == 2
    assert await database.read(_texts) == ["new", "more"]


async def test_a_lock_that_stays_taken_is_a_temporary_error(database: Database, database_url: str) -> None:
    """Its holder is not ours, and no setting of ours ends its transaction."""
    holder = await asyncpg.connect(database_url)
    try:
        await holder.execute("BEGIN; LOCK TABLE notes")
        async with asyncio.timeout(50):
            with pytest.raises(Unavailable, match="held a lock for too long"):
                await database.write(_change)
    finally:
        await holder.close()
    await database.write(_change)


async def test_a_start_waits_for_the_migration_of_another_process(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration may take longer than a statement waits for a lock, and than other statements take."""
    monkeypatch.setattr(postgres_module, "LOCK_WAIT", 0.1)
    monkeypatch.setattr(postgres_module, "STATEMENT", 0.2)
    database = open_database(database_url)
    waiting = """
        SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """
    holder = await asyncpg.connect(database_url)
    try:
        await holder.execute(f"BEGIN; SELECT pg_advisory_xact_lock({schema._LOCK})")
        starter = asyncio.ensure_future(schema.upgrade(database, NOTES.metadata, "micronova.db.migrations"))
        while await holder.fetchval(waiting) == 0:
            assert not starter.done()
        await holder.execute("SELECT pg_sleep(0.4)")  # longer than LOCK_WAIT and STATEMENT
        await holder.execute("COMMIT")
        await starter
    finally:
        await holder.close()
        await database.close()
    assert database.statistics.retries == 0


async def test_the_server_looks_for_lost_clients(database: Database) -> None:
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")

    def settings(conn: sa.Connection) -> list[str]:
        return [conn.execute(sa.text(f"SELECT current_setting('{name}')")).scalar_one() for name in names]

    assert await database.read(settings) == ["10", "5", "3", "20000"]


@pytest.mark.parametrize(("code", "connections"), [("25006", 2), ("55000", 2), ("57014", 1), ("58030", 1)])
async def test_errors_that_mean_later_are_tried_again(database: Database, code: str, connections: int) -> None:
    """Read-only, not ready: on another connection, which may lead to another server; a statement timeout; a disk that
    fails for a moment."""
    pids: list[int] = []

    def fail_once(conn: sa.Connection) -> None:
        pids.append(conn.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())
        _change(conn)
        if len(pids) == 1:
            conn.execute(sa.text(f"DO $$ BEGIN RAISE EXCEPTION 'later' USING ERRCODE = '{code}'; END $$"))

    await database.write(fail_once)
    assert len(pids) == 2 and len(set(pids)) == connections
    assert await database.read(_texts) == ["new"]
