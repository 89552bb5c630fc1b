"""What is reported to the manager, and which calls wait for others."""

import asyncio
import threading
from typing import Any, cast

import pytest

from micronova.objects import power_state
from micronova.objects.errors import Unavailable
from micronova.objects.orders import Guest
from micronova.virt.driver import Lifecycle
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.events import EventQueues, GuestEvent
from micronova.virt.libvirt.client.threads import CallOverdue
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.lifecycle import LifecycleReporter
from tests.clocks import ManualClock, settle


class World:
    """Guests whose states a test sets, and a manager that listens."""

    def __init__(self) -> None:
        self.states: dict[str, int] = {}
        self.reported: list[tuple[str, Lifecycle]] = []
        self.broken = False
        self.described = asyncio.Event()  # set: a read of all guests does not take long
        self.described.set()
        self.clock = ManualClock()
        self.reporter = LifecycleReporter(cast(GuestAccess, self), self.clock)
        self.reporter.start(self)

    async def get(self, uuid: str) -> Guest | None:
        if self.broken:
            raise Unavailable("libvirt is gone")
        power = self.states.get(uuid)
        return None if power is None else Guest(uuid=uuid, node="n", epoch=1, power_state=power)

    async def all(self) -> list[Guest]:
        found = [guest for uuid in self.states if (guest := await self.get(uuid)) is not None]
        await self.described.wait()
        return found

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        self.reported.append((uuid, event))

    def connection_failed(self, message: str) -> None:
        raise AssertionError(message)


@pytest.fixture
def world() -> World:
    return World()


async def test_hints_are_looked_into_and_only_news_are_told(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    for _ in range(3):
        world.reporter.check_soon("a")
    await settle()
    world.reporter.check_soon("a")
    world.reporter.check_soon("unknown")
    await settle()
    assert world.reported == [("a", "started")]
    world.states["a"] = power_state.PAUSED
    world.reporter.check_soon("a")
    await settle()
    world.states["a"] = power_state.RUNNING
    world.reporter.check_soon("a")
    await settle()
    assert world.reported[1:] == [("a", "paused"), ("a", "resumed")]


async def test_what_an_order_causes_is_told_before_it_returns_and_once(world: World) -> None:
    async with world.reporter.changing("a"):
        world.states["a"] = power_state.PAUSED  # on the way
        world.reporter.check_soon("a")
        await settle()
        assert world.reported == []
        world.states["a"] = power_state.RUNNING
    assert world.reported == [("a", "started")]
    world.reporter.check_soon("a")  # the events of all that, late
    await settle()
    assert world.reported == [("a", "started")]


async def test_a_half_made_guest_has_no_state_to_tell(world: World) -> None:
    world.states["a"] = power_state.NOSTATE
    with pytest.raises(ValueError, match="spawn failed"):
        async with world.reporter.changing("a"):
            raise ValueError("spawn failed")
    await settle()
    assert world.reported == []


async def test_a_failed_order_is_looked_after(world: World) -> None:
    with pytest.raises(ValueError, match="no"):
        async with world.reporter.changing("a"):
            world.states["a"] = power_state.SHUTDOWN
            raise ValueError("no")
    await settle()
    assert world.reported == [("a", "stopped")]


async def test_an_order_that_was_carried_out_does_not_fail_for_the_look(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    async with world.reporter.changing("a"):
        world.broken = True
    world.broken = False
    await settle()
    world.reporter.check_all_soon()
    await settle()
    assert world.reported == [("a", "started")]


async def test_after_a_lost_connection_everything_is_looked_at(world: World) -> None:
    world.states.update(a=power_state.RUNNING, b=power_state.SHUTDOWN, c=power_state.SUSPENDED)
    world.reporter.check_all_soon()
    await settle()
    assert world.reported == [("a", "started"), ("b", "stopped"), ("c", "suspended")]


async def test_a_guest_that_libvirtd_finds_ended_after_its_start_is_reported_without_an_event(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    world.reporter.check_all_soon()
    await settle()
    world.states["a"] = power_state.SHUTDOWN
    await world.clock.advance(1.0)
    assert world.reported == [("a", "started"), ("a", "stopped")]
    await world.reporter.stop()


async def test_a_read_that_began_before_an_order_is_not_reported_after_it(world: World) -> None:
    world.states.update(a=power_state.RUNNING, b=power_state.RUNNING)
    world.reporter.check_all_soon()
    await settle()
    world.reported.clear()
    world.described.clear()
    world.reporter.check_all_soon()
    await settle()
    async with world.reporter.changing("a"):
        world.states["a"] = power_state.SHUTDOWN
    world.described.set()
    await settle()
    assert world.reported == [("a", "stopped")]


async def test_a_read_that_began_before_an_event_is_not_reported_after_it(world: World) -> None:
    world.states.update(a=power_state.RUNNING, b=power_state.RUNNING)
    world.reporter.check_all_soon()
    await settle()
    world.reported.clear()
    world.described.clear()
    world.reporter.check_all_soon()
    await settle()
    world.states.update(a=power_state.SHUTDOWN, b=power_state.PAUSED)
    world.reporter.check_soon("a")
    await settle()
    world.described.set()
    await settle()
    assert world.reported == [("a", "stopped")]
    await world.clock.advance(1.0)  # the next read finds what the one before was too early for
    assert world.reported == [("a", "stopped"), ("b", "paused")]
    await world.reporter.stop()


async def test_a_read_is_out_of_date_also_if_a_newer_one_found_nothing_new(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    world.reporter.check_all_soon()
    await settle()
    world.described.clear()
    world.states["a"] = power_state.SHUTDOWN  # for a moment
    world.reporter.check_all_soon()
    await settle()
    world.states["a"] = power_state.RUNNING
    world.reporter.check_soon("a")
    await settle()
    world.described.set()
    await settle()
    assert world.reported == [("a", "started")]
    await world.reporter.stop()


async def test_nothing_is_told_after_the_end(world: World) -> None:
    world.states["a"] = power_state.RUNNING
    await world.reporter.stop()
    world.reporter.check_soon("a")
    world.reporter.check_all_soon()
    await settle()
    assert world.reported == []


async def test_watching() -> None:
    queues = EventQueues()
    with queues.watch("a") as watch:
        queues.put(GuestEvent("b", "reboot"))
        queues.put(GuestEvent("a", "reboot"))
        assert await watch.next(5.0) == GuestEvent("a", "reboot")
        assert await watch.next(0.01) is None
    queues.put(GuestEvent("a", "reboot"))


async def test_nothing_is_done_to_a_guest_behind_a_call_that_hangs() -> None:
    """A guest whose start hangs must not be removed before the start has ended: it would appear again."""
    connection = Connection(
        "test:///default",
        ManualClock(),
        on_event=lambda _: None,
        on_restored=lambda: None,
        on_failed=lambda _: None,
        timeout=0.05,
    )
    connection._connection = cast(Connect, object())
    release = threading.Event()
    done: list[str] = []

    def start(_: Any) -> None:
        release.wait()
        done.append("started")

    def remove(_: Any) -> None:
        done.append("removed")

    with pytest.raises(CallOverdue):
        await connection.change("a", start, "start it")
    with pytest.raises(Unavailable, match="An earlier call"):
        await connection.change("a", remove, "remove it")
    await connection.change("b", lambda _: done.append("other"), "work on another")
    asyncio.get_running_loop().call_later(0.05, release.set)
    await connection.change("a", remove, "remove it", timeout=5.0)
    assert done == ["other", "started", "removed"]
