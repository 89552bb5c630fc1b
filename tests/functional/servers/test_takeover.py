"""Two conductors and one operation: whoever has lost it changes nothing any more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.cli.roles import make_conductor
from micronova.conductor.manager import ConductorManager
from micronova.conductor.operations import Crash, new_row
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import operations as operation_rows
from micronova.db.tables import operations
from micronova.objects.errors import NoValidHost
from micronova.rpc.contract import Context
from micronova.scheduler.manager import SchedulerManager
from tests.functional.cloud import Caller, OneProcess, Wanted
from tests.functional.servers.neighbours import network, ports_of


class Crashes:
    """Crashes the conductor's work after a step, so many times."""

    step: tuple[str, str] | None = None
    times = 0

    def __call__(self, kind: str, step: str) -> None:
        if self.times and self.step == (kind, step):
            self.times -= 1
            raise Crash(f"{kind} {step}")


crashes = Crashes()
pytestmark = pytest.mark.thorough

CLOUD = Wanted(
    hosts=2,
    roles=("network",),
    after_step=crashes,
    settings={
        "default": {"report_interval": 0.1},
        "conductor": {"lease": 60.0, "sweep_interval": 0.05},
    },
)
Hold = Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(loop_scope="module")
async def second(cloud: OneProcess) -> AsyncIterator[ConductorManager]:
    """Another conductor of the same cloud."""
    made: Any = await make_conductor(cloud.process)
    await made.start()
    yield made
    await made.stop()


async def _expire(cloud: OneProcess, *servers: str) -> None:
    """Let the leases on servers' operations run out, as if their owner had been paused for long."""
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(
            sa.update(operations)
            .where(operations.c.instance_uuid.in_(servers), operations.c.finished_at.is_(None))
            .values(lease_until=0)
        )
    )


class Gate:
    """Holds the first call of something until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self.left = asyncio.Event()

    def around(self, original: Any, fail: Exception | None = None) -> Any:
        first = True

        async def held(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            mine, first = first, False
            if not mine:
                return await original(*args, **kwargs)
            result = await original(*args, **kwargs)
            self.reached.set()
            await self.open.wait()
            self.left.set()
            if fail is not None:
                raise fail
            return result

        return held


@pytest.mark.parametrize("ending", ["places it", "finds no host", "fails"])
async def test_a_paused_conductor_comes_back_to_a_build_that_is_done(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch, ending: str
):
    error = {"places it": None, "finds no host": NoValidHost("none"), "fails": RuntimeError("broken")}[ending]
    gate = Gate()
    monkeypatch.setattr(SchedulerManager, "_place", gate.around(SchedulerManager._place, error))
    id = await user.create()
    await asyncio.wait_for(gate.reached.wait(), 10)
    await _expire(cloud, id)
    await user.wait_for(id, "ACTIVE")
    host = await user.host_of(id)
    gate.open.set()
    await gate.left.wait()
    await _idle(cloud, second)
    assert (await user.show(id))["status"] == "ACTIVE"
    assert await user.host_of(id) == host
    await cloud.assert_clean()


async def test_a_paused_conductor_leaves_the_ports_of_the_other_one_alone(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch
):
    net = await network(user)
    gate = Gate()
    monkeypatch.setattr(SchedulerManager, "_place", gate.around(SchedulerManager._place))
    id = await user.create(networks=[{"uuid": net["id"]}])
    await asyncio.wait_for(gate.reached.wait(), 10)
    await _expire(cloud, id)
    await user.wait_for(id, "ACTIVE")
    [port] = await ports_of(user, id)
    gate.open.set()
    await gate.left.wait()
    await _idle(cloud, second)
    assert [each["id"] for each in await ports_of(user, id)] == [port["id"]]
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


@pytest.mark.parametrize("ending", ["places it", "finds no host"])
async def test_a_paused_conductor_comes_back_while_the_other_one_is_at_it(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch, ending: str
):
    gate = Gate()
    error = NoValidHost("none") if ending == "finds no host" else None
    monkeypatch.setattr(SchedulerManager, "_place", gate.around(SchedulerManager._place, error))
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": user.project}):
        id = await user.create(name=user.project)
        await asyncio.wait_for(gate.reached.wait(), 10)
        await _expire(cloud, id)
        await user.wait_for(id, "BUILD", task="spawning")
        gate.open.set()
        await gate.left.wait()
        await _idle(cloud, second)
        shown = await user.show(id)
        assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("BUILD", "spawning")
        [operation] = await cloud.open_operations()
        assert operation.owner == f"host:{await user.host_of(id)}"
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


async def test_both_place_before_either_dispatches(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch
):
    """The paused one is back, and dispatches, just before the other does: nothing of it counts."""
    gates = [Gate(), Gate()]
    place = gates[1].around(SchedulerManager._place)
    monkeypatch.setattr(SchedulerManager, "_place", gates[0].around(place))
    id = await user.create()
    # The first call passes both gates' functions: the inner one holds it first, and so it is the later gate.
    await asyncio.wait_for(gates[1].reached.wait(), 10)
    await _expire(cloud, id)

    async def taken_over() -> bool | None:
        [row] = await cloud.open_operations()
        return True if row.attempts == 2 else None

    await cloud.until(taken_over, "the other conductor to take over")
    gates[1].open.set()
    gates[0].open.set()
    await user.wait_for(id, "ACTIVE")
    await _idle(cloud, second)
    await cloud.assert_clean()


async def test_each_server_of_a_request_has_tried_its_own_hosts(cloud: OneProcess, user: Caller):
    """Two servers fail on one host each; taken over together, each may go where the other one failed."""
    crashes.step, crashes.times = ("build", "schedule"), 2
    rule = {"operation": "spawn", "kind": "fail", "name": user.project, "count": 2}
    async with cloud.faults(rule):
        several = user.body(name=user.project, min_count=2, max_count=2, return_reservation_id=True)
        reservation = (await user.post("/servers", several))["reservation_id"]

        async def both_wait() -> list[Any] | None:
            rows = [row for row in await cloud.open_operations() if row.group_id == reservation]
            failed = [row for row in rows if row.step == "schedule" and row.epoch == 3]
            return failed if len(failed) == 2 and not crashes.times else None

        waiting = await cloud.until(both_wait, "both to have failed once")
        tried = [msgspec.msgpack.decode(row.payload)["tried"] for row in waiting]
        assert sorted(tried) == [["fake-1"], ["fake-2"]]
        await _expire(cloud, *(row.instance_uuid for row in waiting))
        servers = [await user.wait_for(row.instance_uuid, "ACTIVE") for row in waiting]
    for server, [failed_on] in zip(servers, tried, strict=True):
        assert await user.host_of(server["id"]) != failed_on
    await cloud.assert_clean()


async def test_operations_of_a_newer_version_are_left_to_who_knows_them(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
):
    """Also when there are many of them: the sweep still finds what it knows."""
    database = cloud.process.database
    assert database is not None
    unknown = [
        new_row(
            id=f"{user.project}-{number}", kind=kind, version=version, instance_uuid=f"none-{number}", group_id="g",
            step="new", epoch=1, now=0, deadline=1 << 60, context=Context(request_id="req-test"),
        )
        for number, (kind, version) in enumerate([("build", 99), ("teleport", 1)] * 150)
    ]  # fmt: skip
    await database.write(operation_rows.insert, unknown)

    async def lost(*_: Any) -> None:
        """No conductor hears of new work: only the sweep finds it."""

    monkeypatch.setattr(ConductorAPI, "build_instances", lost)
    try:
        for _ in range(3):
            await user.boot()
        ours = operations.c.id.like(f"{user.project}-%")
        left = await cloud.read(sa.select(operations.c.owner, operations.c.attempts).where(ours))
        assert len(left) == 300 and set(left) == {(None, 0)}
    finally:
        await database.write(lambda conn: conn.execute(sa.delete(operations).where(operations.c.group_id == "g")))


async def _idle(cloud: OneProcess, second: ConductorManager) -> None:
    """Wait until neither conductor has anything in hand."""
    [first] = [role for role in cloud.process.started if isinstance(role, ConductorManager)]
    for _ in range(3):
        await first.engine.idle()
        await second.engine.idle()
        await asyncio.sleep(0)
