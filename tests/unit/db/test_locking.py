"""Statements that change several rows lock them in the order of their keys, whatever the order of the rows on disk."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from uuid import NAMESPACE_DNS, uuid5

import pytest
import sqlalchemy as sa

from micronova.db import node_reports, operations, services, tables
from micronova.db.engine import Database
from micronova.db.tables import operations as table
from micronova.objects.context import Context
from micronova.objects.operations import VERSIONS
from micronova.objects.orders import NodeResources
from tests.services.postgres import Postgres
from tests.unit.db.databases import OpenTransaction, compute_database, open_transaction

KNOWN = (("build", VERSIONS["build"]),)
IDS = ("c", "b", "a")  # as they are on disk


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("postgresql", request) as opened:
        rows = [
            operations.new_row(
                id=id,
                kind="build",
                instance_uuid=id,
                batch_id="g",
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


async def _waits(postgres: Postgres, holder: OpenTransaction, seconds: float = 30.0) -> None:
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
    async with open_transaction(database) as holder:
        await holder.execute(sa.select(table.c.id).where(table.c.id == "a").with_for_update())
        waiter = asyncio.ensure_future(database.write(change))
        await _waits(postgres, holder)
        free = await holder.execute(sa.select(table.c.id).where(table.c.id != "a").with_for_update(nowait=True))
        assert len(free.all()) == 2
    await waiter


async def test_a_lease_is_taken_once_by_those_who_wait_for_it(database: Database, postgres: Postgres) -> None:
    """The row is looked at again when its lock is free."""
    async with open_transaction(database) as holder:
        await holder.execute(sa.select(table.c.id).where(table.c.id == "a").with_for_update())
        takers = [
            asyncio.ensure_future(database.write(operations.lease, IDS, name, 5, 9, KNOWN)) for name in ("one", "two")
        ]
        await _waits(postgres, holder)
    taken = [{row["id"] for row in rows} for rows in await asyncio.gather(*takers)]
    assert sorted(taken, key=len) == [set(), set(IDS)]


def _register_services(conn: sa.Connection, hosts: Sequence[str]) -> None:
    services.heartbeat(conn, "nova-compute", hosts, 1)


def _register_nodes(conn: sa.Connection, hosts: Sequence[str]) -> None:
    found = {
        host: [
            NodeResources(
                node=host,
                node_uuid=str(uuid5(NAMESPACE_DNS, host)),
                hypervisor_type="fake",
                hypervisor_version=1,
                vcpus=1,
                memory_mb=1,
                local_gb=1,
            )
        ]
        for host in hosts
    }
    node_reports.record(conn, found, 1)


@pytest.mark.parametrize(
    ("register", "registered"), [(_register_services, tables.services), (_register_nodes, tables.compute_nodes)]
)
async def test_hosts_that_register_at_the_same_moment(
    database: Database,
    postgres: Postgres,
    register: Callable[[sa.Connection, Sequence[str]], None],
    registered: sa.Table,
) -> None:
    """Somebody registers the first host of the cloud: whoever waits for its id has registered no other."""
    fleet = [f"host-{number}" for number in range(12)]
    async with open_transaction(database) as holder:
        await holder.run(register, ["first"])
        waiter = asyncio.ensure_future(database.write(register, fleet))
        await _waits(postgres, holder)
        await holder.execute(sa.text("SET LOCAL lock_timeout = '1s'"))
        await holder.run(register, ["second", "third", "fourth", "fifth"])
    await waiter
    assert database.statistics.conflicts == 0, "they waited for each other"
    listed = await database.read(lambda conn: conn.execute(sa.select(registered.c.id, registered.c.host)).all())
    assert sorted(row.id for row in listed) == list(range(1, 18))
    assert {row.host for row in listed} == {*fleet, "first", "second", "third", "fourth", "fifth"}


async def test_heartbeats_of_services(database: Database) -> None:
    names = [f"host-{number}" for number in range(5)]
    assert await database.write(services.heartbeat, "nova-compute", names, 1) == set(names)
    assert await database.write(services.heartbeat, "nova-compute", names, 2) == set()
    seen = await database.read(services.list_, binary="nova-compute")
    assert {(row.host, row.last_seen_at) for row in seen} == {(name, 2) for name in names}


_LOCK = sa.text("SELECT pg_advisory_xact_lock(:key)")
_LOCKED = sa.text(
    "SELECT bool_or(granted), bool_or(NOT granted) FROM pg_locks WHERE locktype = 'advisory' AND objid = 2"
)


async def test_transactions_that_wait_for_each_other_are_counted(database: Database) -> None:
    attempts = 0

    def in_another_order(conn: sa.Connection) -> None:
        nonlocal attempts
        attempts += 1
        conn.execute(_LOCK, {"key": 2})
        while attempts == 1 and not conn.execute(_LOCKED).one()[1]:
            pass  # the other does not wait yet
        conn.execute(_LOCK, {"key": 1})

    async with open_transaction(database) as other:
        await other.execute(sa.text("SET LOCAL deadlock_timeout = '1h'"))  # it is not the one that is ended
        await other.execute(sa.text("SET LOCAL lock_timeout = 0"))
        await other.execute(_LOCK, {"key": 1})
        writing = asyncio.ensure_future(database.write(in_another_order))
        while not await database.read(lambda conn: conn.execute(_LOCKED).one()[0]):
            pass  # the write does not have it yet
        await other.execute(_LOCK, {"key": 2})
    await writing
    assert attempts == 1 + database.statistics.retries
    assert database.statistics.conflicts == 1
