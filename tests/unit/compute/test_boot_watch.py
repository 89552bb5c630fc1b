"""Guests that were started are watched until they show that they boot; of those that never do, a conductor hears."""

from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from micronova.objects.orders import BootVerdict, HostReply
from tests.unit.compute.world import World, order

HANGS = {"operation": "boot", "kind": "hang"}
SLOW = {"operation": "boot", "kind": "delay", "delay": 400.0}
TOLD_AT = 320.0  # the time-out, the next look, the next beat


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """An agent whose guests survive it."""
    world = World(tmp_path)
    await world.start()
    yield world
    await world.close()


def told(world: World) -> list[BootVerdict]:
    """Everything that conductors have heard so far."""
    return [verdict for beat in world.conductor.beats for host in beat.hosts for verdict in host.boots]


async def test_a_guest_that_never_boots_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.rules(HANGS)
    await world.carry_out(order(epoch=2))
    await world.clock.advance(299)
    assert told(world) == []
    await world.clock.advance(21)
    [verdict] = told(world)
    assert (verdict.instance_uuid, verdict.epoch, verdict.found) == ("i-1", 2, False)
    assert verdict.fault.startswith("The guest has not begun to boot: within 300 s it read 512 bytes of its disks")
    assert verdict.fault.endswith("Look at its console; a hard reboot tries again.") and len(verdict.fault) <= 255
    await world.clock.advance(1000)
    assert told(world) == [verdict]
    [line] = [record.message for record in caplog.records if "has not begun to boot" in record.message]
    assert "host-1" in line and "i-1" in line


async def test_a_boot_that_goes_well_costs_one_look_and_no_word(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[set[str]] = []
    look = world.driver.boot_signs

    async def counted(uuids: Collection[str]) -> Any:
        looks.append(set(uuids))
        return await look(uuids)

    monkeypatch.setattr(world.driver, "boot_signs", counted)
    for uuid in ("i-1", "i-2", "i-3"):
        await world.carry_out(order(uuid=uuid))
    await world.clock.advance(1000)
    assert looks == [{"i-1", "i-2", "i-3"}]
    assert told(world) == []


async def test_a_guest_that_boots_after_all_is_told_as_such(world: World) -> None:
    await world.rules(SLOW)
    await world.carry_out(order())
    await world.clock.advance(1000)
    assert [bool(verdict.fault) for verdict in told(world)] == [True, False]


async def test_it_is_told_until_a_conductor_hears_it(world: World) -> None:
    await world.rules(HANGS)
    await world.carry_out(order())
    world.conductor.away = True
    await world.clock.advance(TOLD_AT)
    assert world.conductor.failures and told(world) == []
    world.conductor.away = False
    await world.clock.advance(20)
    assert len(told(world)) == 1


async def test_it_is_told_again_when_it_came_amid_an_operation(world: World) -> None:
    await world.rules(HANGS)
    await world.carry_out(order())
    await world.clock.advance(290)
    world.conductor.replies.extend([HostReply(host="host-1", boots_again=("i-1",))] * 8)
    await world.clock.advance(100)
    assert len(told(world)) > 1
    before = len(told(world))
    await world.clock.advance(100)
    assert len(told(world)) == before


@pytest.mark.parametrize("kind", ["stop", "pause", "suspend", "delete"])
async def test_a_guest_that_does_not_run_is_not_watched(world: World, kind: str) -> None:
    await world.rules(HANGS)
    await world.carry_out(order(epoch=2))
    await world.carry_out(order(kind, epoch=3))
    await world.clock.advance(1000)
    assert told(world) == []


@pytest.mark.parametrize("kind", ["start", "reboot"])
async def test_every_start_is_watched(world: World, kind: str) -> None:
    await world.carry_out(order(epoch=2))
    await world.clock.advance(20)
    if kind == "start":
        await world.carry_out(order("stop", epoch=3))
    await world.rules(HANGS)
    await world.carry_out(order(kind, epoch=4, parameters={"type": "HARD"}))
    await world.clock.advance(TOLD_AT)
    assert [(verdict.epoch, bool(verdict.fault)) for verdict in told(world)] == [(4, True)]


async def test_a_start_by_hand_is_watched_too(world: World) -> None:
    await world.rules(HANGS)
    await world.carry_out(order())
    world.driver.guest_becomes("i-1", "stopped")
    await world.clock.advance(20)
    world.driver.guest_becomes("i-1", "started")
    await world.clock.advance(TOLD_AT)
    assert len(told(world)) == 1


async def test_a_new_start_is_given_its_own_time(world: World) -> None:
    await world.rules(HANGS)
    await world.carry_out(order(epoch=2))
    await world.clock.advance(TOLD_AT)
    await world.rules()
    await world.carry_out(order("reboot", epoch=3, parameters={"type": "HARD"}))
    await world.clock.advance(30)
    assert [(verdict.epoch, bool(verdict.fault)) for verdict in told(world)] == [(2, True), (3, False)]


async def test_what_was_not_heard_is_void_after_a_new_start(world: World) -> None:
    await world.rules(HANGS)
    await world.carry_out(order(epoch=2))
    world.conductor.away = True
    await world.clock.advance(TOLD_AT)
    await world.rules()
    await world.send(order("reboot", epoch=3, parameters={"type": "HARD"}))
    world.conductor.away = False
    await world.clock.advance(60)
    assert all(not verdict.fault for verdict in told(world))


async def test_the_next_agent_watches_on(world: World) -> None:
    await world.carry_out(order(uuid="lives", epoch=2))
    await world.rules(HANGS)
    await world.carry_out(order(uuid="hangs", epoch=3))
    await world.carry_out(order("attach_interface", uuid="hangs", epoch=4))
    await world.clock.advance(200)
    await world.kill_agent()
    await world.start_agent()
    await world.clock.advance(30)
    # Whether it was thought not to boot no agent knows that has just started: so that is set right, once.
    assert told(world) == [BootVerdict(instance_uuid="lives", epoch=2, found=True)]
    await world.clock.advance(TOLD_AT)
    verdict = told(world)[-1]
    assert (verdict.instance_uuid, verdict.epoch, verdict.found) == ("hangs", 3, True)
    assert verdict.fault and len(told(world)) == 2


async def test_an_order_tells_the_next_agent_the_epoch(world: World) -> None:
    await world.rules(HANGS)
    await world.carry_out(order(epoch=2))
    await world.kill_agent()
    await world.start_agent()
    await world.carry_out(order("pause", epoch=7))
    await world.carry_out(order("unpause", epoch=8))
    await world.clock.advance(TOLD_AT)
    assert [(verdict.epoch, verdict.found) for verdict in told(world)] == [(8, False)]


async def test_nobody_is_watched_where_the_operator_does_not_want_it() -> None:
    world = World(boot_timeout=0.0)
    await world.start()
    await world.rules(HANGS)
    await world.carry_out(order())
    await world.clock.advance(1_000)
    assert told(world) == []
    await world.close()


async def test_a_hypervisor_that_cannot_be_asked_says_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(_: Collection[str]) -> Any:
        raise RuntimeError("the hypervisor is away")

    await world.rules(HANGS)
    await world.carry_out(order())
    monkeypatch.setattr(world.driver, "boot_signs", fails)
    await world.clock.advance(TOLD_AT)
    assert told(world) == [] and "the hypervisor is away" in caplog.text
    monkeypatch.undo()
    await world.clock.advance(20)
    assert len(told(world)) == 1
