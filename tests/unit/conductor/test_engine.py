"""The engine of operations: deadlines, leases, and temporary failures."""

import asyncio
import errno
from collections.abc import AsyncIterator

import msgspec
import pytest
import sqlalchemy as sa

from micronova.conductor.operations.engine import MOST_SWEPT, Engine, Kind, Operation
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import HostUnavailable, Unavailable
from tests.unit.db.databases import compute_database

LEASE = 20.0


class SteppingClock:
    """A clock that moves on by `step` seconds at each look."""

    def __init__(self) -> None:
        self.time = 1_000.0
        self.set_by = 0.0
        self.step = 0.0
        self.ticks: asyncio.Queue[None] = asyncio.Queue()

    def now(self) -> float:
        self.time += self.step
        return self.time + self.set_by

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        await self.ticks.get()


class Recorder(Kind):
    """Notes what the engine does with operations, and fails on request."""

    name = "stop"

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.running: asyncio.Queue[list[Operation]] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.can_fail = True

    def may_fail(self, operation: Operation) -> bool:
        return self.can_fail

    async def run(self, operations: list[Operation]) -> None:
        self.ran += [operation.id for operation in operations]
        self.running.put_nowait(operations)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error

    async def fail(self, operation: Operation, error: Exception) -> None:
        self.failed.append((operation.id, str(error)))


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


@pytest.fixture
def clock() -> SteppingClock:
    return SteppingClock()


@pytest.fixture
def kind() -> Recorder:
    return Recorder()


@pytest.fixture
async def engine(database: Database, clock: SteppingClock, kind: Recorder) -> AsyncIterator[Engine]:
    made = Engine(
        database,
        clock,
        owner="conductor:test",
        lease_seconds=LEASE,
        sweep_interval=5.0,
        concurrency=4,
        proof_valid=50.0,
    )
    made.set_kinds({kind.name: kind})
    yield made
    await made.stop()


async def record(
    database: Database, clock: SteppingClock, *deadlines: float, kind: str = "stop", together: bool = True
) -> list[str]:
    made = [
        operation_rows.new_row(
            id=f"{kind}-{number}",
            kind=kind,
            instance_uuid=f"i-{kind}-{number}",
            batch_id="r-1" if kind == "stop" and together else f"r-{number}",
            step="new",
            epoch=1,
            now=micros(clock.time),
            deadline=micros(deadline),
            context=Context(),
        )
        for number, deadline in enumerate(deadlines)
    ]
    await database.write(operation_rows.insert, made)
    return [row["id"] for row in made]


async def lease_of(database: Database, id: str) -> int:
    row = await database.read(operation_rows.get, id)
    assert row is not None
    return row["lease_until"]


async def test_a_deadline_between_two_reads_of_the_clock(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """Each operation either runs or fails, wherever its deadline falls while the engine looks at the clock."""
    ids = await record(database, clock, *(clock.time + 10.5 + number for number in range(20)))
    clock.step = 1.0
    await engine.lease_and_run(ids)
    await engine.idle()
    assert sorted(kind.ran + [id for id, _ in kind.failed]) == sorted(ids)
    assert not set(kind.ran) & {id for id, _ in kind.failed}


async def test_a_late_operation_that_cannot_be_read(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """It ends with the reason, and those that run beside it go on."""
    broken, timely = await record(database, clock, clock.time - 1, clock.time + 3600)

    def damage(conn: sa.Connection) -> None:
        conn.execute(
            sa.text("UPDATE operations SET payload = :payload WHERE id = :id"), {"payload": b"\xc1", "id": broken}
        )

    await database.write(damage)
    await engine.lease_and_run([broken, timely])
    await engine.idle()
    [(failed, why)] = kind.failed
    assert (kind.ran, failed) == ([timely], broken)
    assert "MessagePack" in why


async def test_the_lease_of_a_late_operation_is_not_renewed(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """An operation that could not be ended runs again when its lease expires; the engine does not keep it."""
    late, timely = await record(database, clock, clock.time - 1, clock.time + 3600)
    await engine.lease_and_run([late, timely])
    await engine.idle()
    assert (kind.ran, [id for id, _ in kind.failed]) == ([timely], [late])
    before = await lease_of(database, late)
    clock.time += LEASE / 2
    await engine.renew()
    assert await lease_of(database, late) == before


async def test_a_clock_that_is_set_forward_ends_no_operation(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """Its time is over by the clock, but nobody has worked on it for so long."""
    [id] = await record(database, clock, clock.time + 100)
    clock.set_by = 7200.0
    for runs in (1, 2, 3):  # from then on it has the time that it had before
        await engine.lease_and_run([id])
        await engine.idle()
        assert (kind.ran, kind.failed) == ([id] * runs, [])
        clock.time += 40.0
        engine.health.proved()
    await engine.lease_and_run([id])
    await engine.idle()
    assert [failed for failed, _ in kind.failed] == [id]


@pytest.mark.parametrize("outage", ["noticed", "standstill"])
async def test_an_outage_that_is_longer_than_the_deadline_ends_no_operation(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder, outage: str
) -> None:
    [id] = await record(database, clock, clock.time + 100)
    clock.time += 200
    if outage == "noticed":
        engine.health.proved()
        engine.health.outage_noticed()
    await engine.lease_and_run([id])
    await engine.idle()
    assert (kind.ran, kind.failed) == ([id], [])


async def test_a_step_that_cannot_fail_is_repeated(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """Neither its deadline nor an error ends it."""
    [id] = await record(database, clock, clock.time - 1)
    kind.can_fail = False
    kind.error = ValueError("unexpected")
    for _ in range(2):
        await engine.lease_and_run([id])
        await engine.idle()
        clock.time += LEASE
    assert (kind.ran, kind.failed) == ([id, id], [])


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
        RuntimeError("can't start new thread"),
        Unavailable("the scheduler does not answer"),
    ],
    ids=repr,
)
async def test_a_temporary_lack_does_not_end_an_operation(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder, error: Exception
) -> None:
    [id] = await record(database, clock, clock.time + 3600)
    kind.error = error
    await engine.lease_and_run([id])
    await engine.idle()
    assert kind.failed == []
    kind.error = None
    clock.time += LEASE  # the pause is over
    await engine.lease_and_run([id])
    await engine.idle()
    assert kind.ran == [id, id]


async def test_any_other_error_ends_an_operation(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    [id] = await record(database, clock, clock.time + 3600)
    kind.error = OSError(errno.ENOENT, "No such file or directory")
    await engine.lease_and_run([id])
    await engine.idle()
    assert [failed for failed, _ in kind.failed] == [id]


async def test_an_operation_runs_once_at_a_time_in_a_process(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """After a standstill the lease of a running operation has expired: the sweep of the same conductor finds it."""
    [id] = await record(database, clock, clock.time + 3600)
    kind.may_end.clear()
    await engine.lease_and_run([id])
    await kind.running.get()
    clock.time += LEASE + 1
    await engine.lease_and_run([id])
    for _ in range(100):
        await asyncio.sleep(0)
    assert kind.ran == [id]
    kind.may_end.set()
    await engine.idle()
    assert kind.ran == [id, id]  # it was not ended, so it runs again, after the first run


async def test_the_lease_of_a_second_run_is_renewed_when_the_first_ends(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """A report may return an operation to a conductor whose task is still sending the order."""
    [id] = await record(database, clock, clock.time + 3600)
    kind.may_end.clear()
    await engine.lease_and_run([id])
    [operation] = await kind.running.get()
    first, kind.may_end = kind.may_end, asyncio.Event()
    engine.run([msgspec.structs.replace(operation)])
    await kind.running.get()
    first.set()
    for _ in range(100):
        await asyncio.sleep(0)
    clock.time += LEASE / 2
    await engine.renew()
    assert await lease_of(database, id) == micros(clock.time + LEASE)
    kind.may_end.set()


async def test_a_run_whose_operation_was_leased_again_changes_nothing(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """Owner and epoch do not tell two leases of one conductor apart: the number of leases does."""
    [id] = await record(database, clock, clock.time + 3600)
    await engine.lease_and_run([id])
    [old] = await kind.running.get()
    await engine.idle()
    clock.time += LEASE + 1
    await engine.lease_and_run([id])
    [new] = await kind.running.get()
    await engine.idle()
    assert (old.owner, old.epoch) == (new.owner, new.epoch)
    until = await lease_of(database, id)
    await engine.postpone([old], Unavailable("late"))
    assert await lease_of(database, id) == until
    for each, done in ((old, False), (new, True)):
        assert await database.write(operation_rows.finish, id, micros(clock.time), "success", each.lease) is done


async def test_follow_ups_leave_room_for_operations_that_somebody_waits_for(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """They last as long as another service does not answer, and begin again when they have failed."""
    discard = Recorder()
    discard.name = "discard_image"
    discard.may_end.clear()
    engine.set_kinds({each.name: each for each in (kind, discard)})
    waiting = await record(database, clock, *[clock.time + 3600] * 8, kind="discard_image")
    [id] = await record(database, clock, clock.time + 3600)
    await engine.lease_and_run(waiting)
    await asyncio.wait_for(discard.running.get(), 10)
    await engine.lease_and_run([id])
    await asyncio.wait_for(kind.running.get(), 10)
    discard.may_end.set()
    await engine.idle()
    assert sorted(discard.ran) == sorted(waiting)


class Waiter(Recorder):
    """Waits for another service, in two parts, before it does anything."""

    name = "start"

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.most_at_work = self._at_work = 0

    async def run(self, operations: list[Operation]) -> None:
        await asyncio.gather(self._wait(), self._wait())
        self._at_work += 1
        self.most_at_work = max(self.most_at_work, self._at_work)
        await asyncio.sleep(0)
        self._at_work -= 1
        self.ran += [operation.id for operation in operations]

    async def _wait(self) -> None:
        assert self.engine is not None
        async with self.engine.waiting():
            await self.may_end.wait()


async def test_what_waits_for_another_service_takes_no_place(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """Neither one in which operations run nor one in which a sweep takes them; both are taken again afterwards."""
    waiter = Waiter()
    waiter.engine = engine
    waiter.may_end.clear()
    engine.set_kinds({each.name: each for each in (kind, waiter)})
    waiting = await record(database, clock, *[clock.time + 3600] * (MOST_SWEPT + 1), kind="start")
    await engine.lease_and_run(waiting)
    [id] = await record(database, clock, clock.time + 3600)
    await engine.start()  # a sweep finds the other one
    await asyncio.wait_for(kind.running.get(), 10)
    waiter.may_end.set()
    await engine.idle()
    assert (sorted(waiter.ran), kind.ran) == (sorted(waiting), [id])
    assert waiter.most_at_work == 4


async def test_a_stop_does_not_wait_for_another_service(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    waiter = Waiter()
    waiter.engine = engine
    waiter.may_end.clear()
    engine.set_kinds({waiter.name: waiter})
    await engine.lease_and_run(await record(database, clock, *[clock.time + 3600] * 20, kind="start"))
    await asyncio.wait_for(engine.stop(grace=0.01), 10)
    assert waiter.ran == []


async def test_a_sweep_leaves_what_it_has_no_room_for_to_other_conductors(
    engine: Engine, database: Database, clock: SteppingClock, kind: Recorder
) -> None:
    """One conductor does not lease all that is due: what it leases waits for its slots."""
    ids = await record(database, clock, *[clock.time + 3600] * (2 * MOST_SWEPT), together=False)

    async def owned() -> int:
        rows = await database.read(operation_rows.get_many, ids)
        return sum(row["owner"] is not None for row in rows.values())

    kind.may_end.clear()
    await engine.start()
    async with asyncio.timeout(60):
        while await owned() == 0:
            await asyncio.sleep(0.01)
        while database.statistics.by_function.get("renew", 0) < 3:
            clock.ticks.put_nowait(None)  # for a sweep or a renewal of leases
            await asyncio.sleep(0.01)
    assert await owned() == MOST_SWEPT
    kind.may_end.set()
    await engine.idle()


@pytest.mark.parametrize("error, healthy", [(Unavailable("no answer"), False), (HostUnavailable("it is down"), True)])
async def test_only_a_database_that_does_not_answer_hosts_is_an_outage(
    engine: Engine, clock: SteppingClock, error: Unavailable, healthy: bool
) -> None:
    """A message that is refused because another host is down says nothing about heartbeats."""

    def refuse(conn: sa.Connection) -> None:
        raise error

    clock.time += LEASE + 1
    engine.health.proved()
    with pytest.raises(type(error)):
        await engine.write_for_host(refuse)
    assert engine.health.healthy() is healthy
