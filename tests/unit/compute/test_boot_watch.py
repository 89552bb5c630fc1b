"""Guests are watched after their start; those that show no sign of booting are reported to the conductor."""

from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from micronova.objects.orders import BootResult, HostReply
from tests.unit.compute.agent_harness import AgentHarness, order

HANGS = {"operation": "boot", "kind": "hang"}
SLOW = {"operation": "boot", "kind": "delay", "delay": 400.0}
REPORTED_AFTER = 320.0  # the time-out, the next check, the next heartbeat


@pytest_asyncio.fixture
async def harness(tmp_path: Path) -> AsyncIterator[AgentHarness]:
    """An agent whose guests are kept in a file, so that they survive it."""
    harness = AgentHarness(tmp_path)
    await harness.start()
    yield harness
    await harness.close()


def results(harness: AgentHarness) -> list[BootResult]:
    """Return all results that the conductor has received."""
    return [result for beat in harness.conductor.beats for host in beat.hosts for result in host.boots]


async def test_a_guest_that_never_boots_is_reported_once(
    harness: AgentHarness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order(epoch=2))
    await harness.clock.advance(299)
    assert results(harness) == []
    await harness.clock.advance(21)
    [result] = results(harness)
    assert (result.instance_uuid, result.epoch, result.found) == ("i-1", 2, False)
    assert result.fault.startswith("The guest has not begun to boot: within 300 s it read 512 bytes of its disks")
    assert result.fault.endswith("Look at its console; a hard reboot tries again.") and len(result.fault) <= 255
    await harness.clock.advance(1000)
    assert results(harness) == [result]
    [line] = [record.message for record in caplog.records if "has not begun to boot" in record.message]
    assert "host-1" in line and "i-1" in line


async def test_a_boot_that_goes_well_costs_one_check_and_no_message(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[set[str]] = []
    boot_signs = harness.driver.boot_signs

    async def counted(uuids: Collection[str]) -> Any:
        checks.append(set(uuids))
        return await boot_signs(uuids)

    monkeypatch.setattr(harness.driver, "boot_signs", counted)
    for uuid in ("i-1", "i-2", "i-3"):
        await harness.carry_out(order(uuid=uuid))
    await harness.clock.advance(1000)
    assert checks == [{"i-1", "i-2", "i-3"}]
    assert results(harness) == []


async def test_a_guest_that_boots_after_all_is_reported_as_such(harness: AgentHarness) -> None:
    await harness.rules(SLOW)
    await harness.carry_out(order())
    await harness.clock.advance(1000)
    assert [bool(result.fault) for result in results(harness)] == [True, False]


async def test_it_is_reported_until_a_conductor_replies(harness: AgentHarness) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order())
    harness.conductor.unavailable = True
    await harness.clock.advance(REPORTED_AFTER)
    assert harness.conductor.failures and results(harness) == []
    harness.conductor.unavailable = False
    await harness.clock.advance(20)
    assert len(results(harness)) == 1


async def test_it_is_reported_again_when_it_came_during_an_operation(harness: AgentHarness) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order())
    await harness.clock.advance(290)
    harness.conductor.replies.extend([HostReply(host="host-1", repeat_boots=("i-1",))] * 8)
    await harness.clock.advance(100)
    assert len(results(harness)) > 1
    before = len(results(harness))
    await harness.clock.advance(100)
    assert len(results(harness)) == before


@pytest.mark.parametrize("kind", ["stop", "pause", "suspend", "delete"])
async def test_a_guest_that_does_not_run_is_not_watched(harness: AgentHarness, kind: str) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order(epoch=2))
    await harness.carry_out(order(kind, epoch=3))
    await harness.clock.advance(1000)
    assert results(harness) == []


@pytest.mark.parametrize("kind", ["start", "reboot"])
async def test_every_start_is_watched(harness: AgentHarness, kind: str) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.clock.advance(20)
    if kind == "start":
        await harness.carry_out(order("stop", epoch=3))
    await harness.rules(HANGS)
    await harness.carry_out(order(kind, epoch=4, parameters={"type": "HARD"}))
    await harness.clock.advance(REPORTED_AFTER)
    assert [(result.epoch, bool(result.fault)) for result in results(harness)] == [(4, True)]


async def test_a_start_by_hand_is_watched_too(harness: AgentHarness) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order())
    harness.driver.guest_becomes("i-1", "stopped")
    await harness.clock.advance(20)
    harness.driver.guest_becomes("i-1", "started")
    await harness.clock.advance(REPORTED_AFTER)
    assert len(results(harness)) == 1


async def test_a_new_start_is_given_its_own_time(harness: AgentHarness) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order(epoch=2))
    await harness.clock.advance(REPORTED_AFTER)
    await harness.rules()
    await harness.carry_out(order("reboot", epoch=3, parameters={"type": "HARD"}))
    await harness.clock.advance(30)
    assert [(result.epoch, bool(result.fault)) for result in results(harness)] == [(2, True), (3, False)]


async def test_a_result_that_was_not_received_is_dropped_after_a_new_start(harness: AgentHarness) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order(epoch=2))
    harness.conductor.unavailable = True
    await harness.clock.advance(REPORTED_AFTER)
    await harness.rules()
    await harness.send(order("reboot", epoch=3, parameters={"type": "HARD"}))
    harness.conductor.unavailable = False
    await harness.clock.advance(60)
    assert all(not result.fault for result in results(harness))


async def test_the_next_agent_watches_on(harness: AgentHarness) -> None:
    await harness.carry_out(order(uuid="lives", epoch=2))
    await harness.rules(HANGS)
    await harness.carry_out(order(uuid="hangs", epoch=3))
    await harness.carry_out(order("attach_interface", uuid="hangs", epoch=4))
    await harness.clock.advance(200)
    await harness.kill_agent()
    await harness.start_agent()
    await harness.clock.advance(30)
    # A new agent does not know whether the guest was reported as not booting, so it reports the boot once.
    assert results(harness) == [BootResult(instance_uuid="lives", epoch=2, found=True)]
    await harness.clock.advance(REPORTED_AFTER)
    result = results(harness)[-1]
    assert (result.instance_uuid, result.epoch, result.found) == ("hangs", 3, True)
    assert result.fault and len(results(harness)) == 2


async def test_an_order_tells_the_next_agent_the_epoch(harness: AgentHarness) -> None:
    await harness.rules(HANGS)
    await harness.carry_out(order(epoch=2))
    await harness.kill_agent()
    await harness.start_agent()
    await harness.carry_out(order("pause", epoch=7))
    await harness.carry_out(order("unpause", epoch=8))
    await harness.clock.advance(REPORTED_AFTER)
    assert [(result.epoch, result.found) for result in results(harness)] == [(8, False)]


async def test_a_boot_timeout_of_zero_disables_the_watch() -> None:
    harness = AgentHarness(boot_timeout=0.0)
    await harness.start()
    await harness.rules(HANGS)
    await harness.carry_out(order())
    await harness.clock.advance(1_000)
    assert results(harness) == []
    await harness.close()


async def test_a_hypervisor_that_fails_gives_no_result(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(_: Collection[str]) -> Any:
        raise RuntimeError("the hypervisor is away")

    await harness.rules(HANGS)
    await harness.carry_out(order())
    monkeypatch.setattr(harness.driver, "boot_signs", fails)
    await harness.clock.advance(REPORTED_AFTER)
    assert results(harness) == [] and "the hypervisor is away" in caplog.text
    monkeypatch.undo()
    await harness.clock.advance(20)
    assert len(results(harness)) == 1


def test_replies_have_the_name_that_agents_of_earlier_releases_read() -> None:
    reply = HostReply(host="host-1", repeat_boots=("i-1",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply))["repeat_verdicts"] == ["i-1"]
