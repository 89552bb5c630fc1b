"""What the manager is told of guests, and what waits for what."""

import asyncio
import threading
from typing import Any, cast

import pytest

from micronova.objects.errors import Unavailable
from micronova.objects.orders import Guest
from micronova.virt import power_state
from micronova.virt.driver import Lifecycle
from micronova.virt.libvirt.connection import Connection
from micronova.virt.libvirt.events import GuestEvent, Watchers
from micronova.virt.libvirt.guests import Guests
from micronova.virt.libvirt.observer import Observer
from micronova.virt.libvirt.pool import Overdue
from tests.unit.compute.world import ManualClock, settle


class World:
    """Guests whose states a test sets, and a manager that listens."""

    def __init__(self) -> None:
        self.states: dict[str, int] = {}
        self.told: list[tuple[str, Lifecycle]] = []
        self.broken = False
        self.observer = Observer(cast(Guests, self))
        self.observer.start(self)

    async def one(self, uuid: str) -> Guest | None:
        if self.broken:
            raise Unavailable("libvirt is gone")
        power = self.states.get(uuid)
        return None if power is None else Guest(uuid=uuid, node="n", epoch=1, power_state=power)

    async def all(self) -> list[Guest]:
        return [guest for uuid in self.states if (guest := await self.one(uuid)) is not None]

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        self.told.append((uuid, event))

    def progress(self, uuid: str, percent: int) -> None: ...


@pytest.fixture
def world() -> World:
    return World()


async def test_hints_are_looked_into_and_only_news_are_told(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    for _ in range(3):
        world.observer.hint("a")
    await settle()
    world.observer.hint("a")
    world.observer.hint("unknown")
    await settle()
    assert world.told == [("a", "started")]
    world.states["a"] = power_state.PAUSED
    world.observer.hint("a")
    await settle()
    world.states["a"] = power_state.RUNNING
    world.observer.hint("a")
    await settle()
    assert world.told[1:] == [("a", "paused"), ("a", "resumed")]


async def test_what_an_order_causes_is_told_before_it_returns_and_once(world: World) -> None:
    async with world.observer.changing("a"):
        world.states["a"] = power_state.PAUSED  # on the way
        world.observer.hint("a")
        await settle()
        assert world.told == []
        world.states["a"] = power_state.RUNNING
    assert world.told == [("a", "started")]
    world.observer.hint("a")  # the events of all that, late
    await settle()
    assert world.told == [("a", "started")]


async def test_a_half_made_guest_has_no_state_to_tell(world: World) -> None:
    world.states["a"] = power_state.NOSTATE
    with pytest.raises(ValueError, match="spawn failed"):
        async with world.observer.changing("a"):
            raise ValueError("spawn failed")
    await settle()
    assert world.told == []


async def test_a_failed_order_is_looked_after(world: World) -> None:
    with pytest.raises(ValueError, match="no"):
        async with world.observer.changing("a"):
            world.states["a"] = power_state.SHUTDOWN
            raise ValueError("no")
    await settle()
    assert world.told == [("a", "stopped")]


async def test_an_order_that_was_carried_out_does_not_fail_for_the_look(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    async with world.observer.changing("a"):
        world.broken = True
    world.broken = False
    await settle()
    world.observer.hint_all()
    await settle()
    assert world.told == [("a", "started")]


async def test_after_a_lost_connection_everything_is_looked_at(world: World) -> None:
    world.states.update(a=power_state.RUNNING, b=power_state.SHUTDOWN, c=power_state.SUSPENDED)
    world.observer.hint_all()
    await settle()
    assert world.told == [("a", "started"), ("b", "stopped"), ("c", "suspended")]


async def test_nothing_is_told_after_the_end(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    await world.observer.stop()
    world.observer.hint("a")
    world.observer.hint_all()
    await settle()
    assert world.told == []


async def test_watching() -> None:
    watchers = Watchers()
    with watchers.watch("a") as watch:
        watchers.tell(GuestEvent("b", "reboot"))
        watchers.tell(GuestEvent("a", "reboot"))
        assert await watch.next(5.0) == GuestEvent("a", "reboot")
        assert await watch.next(0.01) is None
    watchers.tell(GuestEvent("a", "reboot"))


async def test_nothing_is_done_to_a_guest_behind_a_call_that_hangs() -> None:
    """A guest that is still being started somewhere must not be removed before: it would come back."""
    connection = Connection(
        "test:///default", ManualClock(), on_event=lambda _: None, on_restored=lambda: None, timeout=0.05
    )
    connection._connection = object()
    release = threading.Event()
    done: list[str] = []

    def start(_: Any) -> None:
        release.wait()
        done.append("started")

    def remove(_: Any) -> None:
        done.append("removed")

    with pytest.raises(Overdue):
        await connection.work("a", start, "start it")
    with pytest.raises(Unavailable, match="An earlier call"):
        await connection.work("a", remove, "remove it")
    await connection.work("b", lambda _: done.append("other"), "work on another")
    asyncio.get_running_loop().call_later(0.05, release.set)
    await connection.work("a", remove, "remove it", timeout=5.0)
    assert done == ["other", "started", "removed"]
