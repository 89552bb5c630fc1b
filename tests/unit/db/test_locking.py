"""Statements that change several rows lock them in the order of their keys, whatever the order of the rows on disk."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from micronova.db import operations, services
from micronova.db.engine import Database
from micronova.db.tables import operations as table
from micronova.objects.context import Context
from tests.services.postgres import Postgres
from tests.unit.db.databases import compute_database

KNOWN = (("build", 1),)
IDS = ("c", "b", "a")  # as they are on disk


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("postgresql", request) as opened:
        rows = [
            operations.new_row(
                id=id,
                kind="build",
                instance_uuid=id,
                group_id="g",
                step="new",
                epoch=1,
                now=0,
                deadline=10,
                context=Context(request_id="req-1"),
            )
            for id in IDS
        ]
        await opened.write(operations.insert, rows)
        await opened.write(operations.lease, IDS, "me", 1, 2, KNOWN)
        yield opened


async def _waits(postgres: Postgres, holder: AsyncConnection, seconds: float = 30.0) -> None:
    """Return when a transaction waits for a lock of the holder."""
    pid = (await holder.execute(sa.text("SELECT pg_backend_pid()"))).scalar_one()
    query = f"SELECT count(*) FROM pg_stat_activity WHERE {pid} = ANY (pg_blocking_pids(pid))"
    deadline = asyncio.get_running_loop().time() + seconds
    while postgres.sql(query) == "0":
        assert asyncio.get_running_loop().time() < deadline, "nobody waits"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda conn: operations.lease(conn, IDS, "you", 5, 6, KNOWN), id="lease"),
        pytest.param(lambda conn: operations.renew(conn, IDS, "me", 6), id="renew"),
        pytest.param(lambda conn: operations.release_leases(conn, "me"), id="release leases"),
        pytest.param(lambda conn: operations.lock_many(conn, IDS), id="lock"),
    ],
)
async def test_operations(database: Database, postgres: Postgres, change: Callable[[sa.Connection], None]) -> None:
    """Somebody holds the first row by key: whoever waits for it holds none of the others."""
    engine = database._engine  # type: ignore[attr-defined]
    async with engine.begin() as holder:
        await holder.execute(sa.select(table.c.id).where(table.c.id == "a").with_for_update())
        waiter = asyncio.ensure_future(database.write(change))
        await _waits(postgres, holder)
        free = await holder.execute(sa.select(table.c.id).where(table.c.id != "a").with_for_update(nowait=True))
        assert len(free.all()) == 2
    await waiter


async def test_a_lease_is_taken_once_by_those_who_wait_for_it(database: Database, postgres: Postgres) -> None:
    """The row is looked at again when its lock is free."""
    engine = database._engine  # type: ignore[attr-defined]
    async with engine.begin() as holder:
        await holder.execute(sa.select(table.c.id).where(table.c.id == "a").with_for_update())
        takers = [
            asyncio.ensure_future(database.write(operations.lease, IDS, name, 5, 9, KNOWN)) for name in ("one", "two")
        ]
        await _waits(postgres, holder)
    taken = [{row["id"] for row in rows} for rows in await asyncio.gather(*takers)]
    assert sorted(taken, key=len) == [set(), set(IDS)]


async def test_heartbeats_of_services(database: Database) -> None:
    names = [f"host-{number}" for number in range(5)]
    assert await database.write(services.heartbeat, "nova-compute", names, 1) == set(names)
    assert await database.write(services.heartbeat, "nova-compute", names, 2) == set()
    seen = await database.read(services.list_, binary="nova-compute")
    assert [(row.host, row.last_seen_at) for row in seen] == [(name, 2) for name in names]
