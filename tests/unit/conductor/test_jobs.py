"""The jobs of the whole cloud: of several conductors, one does each."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from micronova.conductor.jobs import PURGE_INTERVAL, REPAIR_INTERVAL, Jobs, PeriodicJob
from micronova.db import allocation_audit, allocations, periodic_jobs, retention
from micronova.db import claims as claim_rows
from micronova.db.engine import Database
from micronova.db.tables import deleted_instances, operations
from micronova.objects.clock import micros
from tests.clocks import ManualClock, settle
from tests.unit.db.databases import compute_database
from tests.unit.db.test_retention import _instance, _operation
from tests.unit.scheduler.rows import a_claim, add_host, add_instances, used


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


def _jobs(database: Database, clock: ManualClock, owner: str, keep_deleted: float = 0.0) -> Jobs:
    return Jobs(database, clock, owner=owner, keep_finished=100.0, keep_deleted=keep_deleted)


async def test_three_conductors_repair_once(database: Database) -> None:
    clock = ManualClock()
    conductors = [_jobs(database, clock, owner) for owner in "abc"]
    for each in conductors:
        each.start()
    try:
        for count in (1, 2):
            await clock.advance(REPAIR_INTERVAL)
            async with asyncio.timeout(60):
                while database.statistics.by_function.get("_needed_repairs", 0) < count:
                    await asyncio.sleep(0.01)
            await database.write(lambda conn: None)  # the writer is done with what the conductors asked for
            assert database.statistics.by_function["_needed_repairs"] == count
    finally:
        await asyncio.gather(*(each.stop() for each in conductors))


async def test_the_last_run_is_recorded(database: Database) -> None:
    clock, error = ManualClock(), "the wrong moment"

    async def fail() -> None:
        if error:
            raise RuntimeError(error)

    async def row() -> periodic_jobs.PeriodicJobRow | None:
        return next((each for each in await database.read(periodic_jobs.list_) if each.name == "own"), None)

    jobs = Jobs(
        database, clock, owner="a", keep_finished=100.0, keep_deleted=0.0, more=[PeriodicJob("own", fail, 10.0)]
    )
    jobs.start()
    try:
        for expected in ("RuntimeError: the wrong moment", ""):
            await clock.advance(10.0)
            async with asyncio.timeout(60):
                while (found := await row()) is None or found.began_at != micros(clock.now()) or not found.ended_at:
                    await asyncio.sleep(0.001)
            assert (found.ended_at, found.error) == (micros(clock.now()), expected)
            error = ""
    finally:
        await jobs.stop()


async def test_jobs_are_listed_before_their_first_run(database: Database) -> None:
    clock = ManualClock()

    async def nothing() -> None:
        """Do nothing."""

    jobs = Jobs(
        database, clock, owner="a", keep_finished=100.0, keep_deleted=0.0, more=[PeriodicJob("own", nothing, 1e5)]
    )
    jobs.start()
    try:
        async with asyncio.timeout(60):
            while len(found := await database.read(periodic_jobs.list_)) < 4:
                await asyncio.sleep(0.001)
        names = ("cache_images", "own", "purge", "repair_counters")
        assert {each.name: each.began_at for each in found} == dict.fromkeys(names)
        assert await database.write(periodic_jobs.claim, "own", "b", micros(clock.now()), 10)
        await database.write(periodic_jobs.declare, ["own"])
        assert [each.owner for each in await database.read(periodic_jobs.list_) if each.name == "own"] == ["b"]
    finally:
        await jobs.stop()


async def test_what_is_right_when_it_is_locked_is_not_repaired(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found without locks may be a claim or a delete under way; allocations may have no inventory."""
    await database.write(lambda conn: add_host(conn, "a", 1))
    await database.write(add_instances, "i-1")
    await database.write(claim_rows.claim, [a_claim("i-1", "a")], now=1)
    under_way = [
        allocation_audit.Drift(kind="used", where="node-a", what="VCPU", recorded=9, actual=1),
        allocation_audit.Drift(kind="used", where="node-b", what="VCPU", recorded=0, actual=1),
        allocation_audit.Drift(kind="orphan", where="i-1", what="node-a", recorded=1, actual=0),
        allocation_audit.Drift(kind="orphan", where="i-2", what="node-a", recorded=1, actual=0),
    ]
    before = await database.read(used)
    with monkeypatch.context() as patched:
        patched.setattr(allocation_audit, "audit", lambda conn: under_way)
        await _jobs(database, ManualClock(), "a").repair_counters()
    assert "had drifted: allocation" not in caplog.text
    assert await database.read(used) == before
    assert list(await database.read(allocations.get_many, ["i-1"])) == ["i-1"]


@pytest.mark.parametrize(("keep_deleted", "left"), [(0.0, {"old", "new"}), (100.0, {"new"})])
async def test_what_is_too_old_is_purged(database: Database, keep_deleted: float, left: set[str]) -> None:
    clock = ManualClock()
    now = clock.now()
    old, new = micros(now - 101), micros(now)
    await database.write(
        lambda conn: [
            conn.execute(operations.insert(), [_operation("old", old), _operation("new", new)]),
            conn.execute(
                deleted_instances.insert(), [_instance("old", deleted_at=old), _instance("new", deleted_at=new)]
            ),
        ]
    )
    await _jobs(database, clock, "a", keep_deleted).purge()
    finished = await database.read(lambda conn: set(conn.execute(operations.select()).scalars()))
    servers = await database.read(lambda conn: set(conn.execute(deleted_instances.select()).scalars()))
    assert (finished, servers) == ({"new"}, left)


async def test_a_purge_takes_many_batches(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    old = micros(clock.now() - 1_000)
    rows = [_operation(f"o{number}", old) for number in range(2 * retention.BATCH + 1)]
    await database.write(lambda conn: conn.execute(operations.insert(), rows))
    purge = asyncio.create_task(_jobs(database, clock, "a").purge())
    while not purge.done():
        await clock.advance(PURGE_INTERVAL / 100)
        await asyncio.sleep(0.001)
    await purge
    assert await database.read(retention.count_operations, micros(clock.now())) == 0


async def test_a_run_that_takes_longer_than_its_interval_is_done_by_one(database: Database) -> None:
    """Nobody else begins the job while it runs, nor waits long when it has ended."""
    clock, running, ended = ManualClock(), 0, asyncio.Event()

    async def run() -> None:
        nonlocal running
        running += 1
        await ended.wait()

    conductors = [
        Jobs(database, clock, owner=owner, keep_finished=1e6, keep_deleted=0.0, more=[PeriodicJob("own", run, 20.0)])
        for owner in "ab"
    ]
    for each in conductors:
        each.start()
    try:
        for _ in range(30):
            await clock.advance(4.0)
            await database.write(lambda conn: None)  # the writer is done with what the conductors asked for
            await settle()
        assert running == 1
        ended.set()
        for _ in range(10):
            await settle()
            await database.write(lambda conn: None)
            await clock.advance(4.0)
        assert running > 1
    finally:
        await asyncio.gather(*(each.stop() for each in conductors))
