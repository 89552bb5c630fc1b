"""Two conductors and one operation: whoever has lost it changes nothing any more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.cli.roles import make_conductor
from micronova.conductor.manager import ConductorManager
from micronova.db.tables import operations
from micronova.scheduler.manager import SchedulerManager
from tests.functional.cloud import Caller, OneProcess, Wanted

CLOUD = Wanted(
    settings={
        "default": {"report_interval": 0.1},
        "conductor": {"lease": 60.0, "sweep_interval": 0.05},
    }
)
Hold = Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(loop_scope="module")
async def second(cloud: OneProcess) -> AsyncIterator[ConductorManager]:
    """Another conductor of the same cloud."""
    made: Any = await make_conductor(cloud.process)
    await made.start()
    yield made
    await made.stop()


async def _expire(cloud: OneProcess, server: str) -> None:
    """Let the lease on a server's operation run out, as if its owner had been paused for long."""
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(
            sa.update(operations)
            .where(operations.c.instance_uuid == server, operations.c.finished_at.is_(None))
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
    from micronova.objects.errors import NoValidHost

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


@pytest.mark.parametrize("ending", ["places it", "finds no host"])
async def test_a_paused_conductor_comes_back_while_the_other_one_is_at_it(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch, ending: str
):
    from micronova.objects.errors import NoValidHost

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


async def _idle(cloud: OneProcess, second: ConductorManager) -> None:
    """Wait until neither conductor has anything in hand."""
    [first] = [role for role in cloud.process.started if isinstance(role, ConductorManager)]
    for _ in range(3):
        await first.engine.idle()
        await second.engine.idle()
        await asyncio.sleep(0)
