"""The agent is killed, restarted and stopped: nothing is built twice, nothing is lost, leases are released."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from micronova.objects.orders import HostReply
from tests.clocks import settle
from tests.unit.compute.agent_harness import CONTEXT, AgentHarness, again, order


@pytest_asyncio.fixture
async def harness(tmp_path: Path) -> AsyncIterator[AgentHarness]:
    """An agent whose guests are kept in a file, so that they survive it."""
    harness = AgentHarness(tmp_path)
    await harness.start()
    yield harness
    await harness.close()


async def restart(harness: AgentHarness, *orders: object) -> None:
    await harness.kill_agent()
    harness.conductor.replies.append(HostReply(host="host-1", orders=orders))  # type: ignore[arg-type]
    await harness.start_agent()


async def test_guests_survive_kill_9(harness: AgentHarness) -> None:
    await harness.carry_out(order(uuid="i-1", epoch=2))
    await harness.carry_out(order(uuid="i-2", epoch=3))
    await harness.carry_out(order("delete", uuid="i-2", epoch=4))
    await restart(harness)
    assert [(guest.uuid, guest.epoch, guest.power_state) for guest in await harness.driver.list_guests()] == [
        ("i-1", 2, 1)
    ]
    beat = harness.conductor.last_beat()
    assert beat.nodes[0].vcpus_used == 1
    assert [(each.instance_uuid, each.power_state) for each in beat.power_changes] == [("i-1", 1)]
    assert beat.running_orders == ()


async def test_a_guest_that_was_built_is_not_built_twice(harness: AgentHarness) -> None:
    build = order(epoch=2)
    harness.conductor.unavailable = True
    await harness.send(build)
    harness.conductor.unavailable = False
    await restart(harness, build)
    report = await harness.conductor.next_report()
    assert (report.operation_id, report.outcome, report.power_state) == (build.operation_id, "done", 1)
    assert (await harness.driver.get_console_output("i-1", None)).count("Linux version") == 1


async def test_a_built_guest_that_stopped_since_keeps_its_disk(harness: AgentHarness) -> None:
    build = order(epoch=2)
    await harness.carry_out(build)
    harness.driver.guest_stops("i-1")
    await restart(harness, build)
    report = await harness.conductor.next_report()
    assert (report.outcome, report.power_state) == ("done", 4)


async def test_a_half_built_guest_is_built_anew(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang"})
    build = order(epoch=2)
    await harness.send(build)
    await restart(harness, build)
    report = await harness.conductor.next_report()
    assert report.outcome == "done"
    guest = await harness.guest("i-1")
    assert guest is not None
    assert guest.power_state == 1


async def test_a_guest_of_an_older_epoch_is_built_anew(harness: AgentHarness) -> None:
    build = order(epoch=2)
    await harness.carry_out(build)
    await restart(harness, again(build, epoch=4))
    assert (await harness.conductor.next_report()).epoch == 4
    guest = await harness.guest("i-1")
    assert guest is not None
    assert guest.epoch == 4


async def test_epochs_of_guests_are_known_after_a_restart(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=5))
    await restart(harness)
    await harness.send(order("delete", epoch=4))
    assert harness.conductor.reports.empty()
    assert await harness.guest("i-1") is not None


async def test_orders_are_carried_out_again_after_a_restart(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.rules({"operation": "destroy", "kind": "hang"})
    delete = order("delete", epoch=3)
    await harness.send(delete)
    await restart(harness, delete)
    assert (await harness.conductor.next_report()).outcome == "done"
    assert await harness.guest("i-1") is None


async def test_stop_releases_the_leases(harness: AgentHarness) -> None:
    await harness.stop()
    last = harness.conductor.last_beat()
    assert last.stopping
    assert last.running_orders == ()


async def test_stop_lets_work_finish(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 0.5})
    await harness.send(order())
    await harness.stop()
    assert (await harness.conductor.next_report()).outcome == "done"
    assert harness.conductor.last_beat().stopping


async def test_stop_undoes_what_does_not_finish(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang"})
    build = order()
    await harness.send(build)
    await harness.stop()
    assert harness.conductor.reports.empty()
    assert await harness.guest("i-1") is None
    await restart(harness, build)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_stop_keeps_a_guest_whose_report_is_not_answered(harness: AgentHarness) -> None:
    harness.conductor.unavailable = True
    build = order()
    await harness.send(build)
    await harness.stop()
    harness.conductor.unavailable = False
    assert await harness.guest("i-1") is not None
    await restart(harness, build)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_stop_does_not_hang_with_the_driver(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang"}, {"operation": "destroy", "kind": "hang"})
    await harness.send(order())
    await harness.stop()
    assert harness.conductor.last_beat().stopping


async def test_no_order_is_accepted_while_stopping(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang", "name": "i-1"})
    await harness.send(order(uuid="i-1"))
    stopping = asyncio.create_task(harness.manager.stop())
    await settle()
    await harness.send(order(uuid="i-2"))
    assert await harness.guest("i-2") is None
    await harness.clock.advance(10)
    await asyncio.wait_for(stopping, 20)


async def test_events_still_arrive_while_stopping(harness: AgentHarness) -> None:
    await harness.send(order(wait_for_plugs=("port-1",)))
    stopping = asyncio.create_task(harness.manager.stop())
    await settle()
    await harness.plug("i-1", "port-1")
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.clock.advance(10)
    await asyncio.wait_for(stopping, 20)


async def test_many_hosts_in_one_process() -> None:
    harness = AgentHarness()
    harness.options = {"hosts": 1200, "vcpus": 4, "memory_mb": 1024, "local_gb": 10}
    await harness.start()
    assert sum(len(beat.hosts) for beat in harness.conductor.beats) == 1200
    assert len(harness.conductor.beats) == 3
    for number in (1, 600, 1200):
        report = await harness.carry_out(order(uuid=f"i-{number}", host=f"fake-{number}"))
        assert (report.outcome, report.host) == ("done", f"fake-{number}")
    await harness.close()


async def test_orders_are_ignored_until_the_first_heartbeat_is_answered(harness: AgentHarness) -> None:
    """A broker delivers to a new agent what the old one had not acknowledged, even if newer orders have replaced it."""
    await harness.carry_out(order(epoch=2))
    stop = order("stop", epoch=3)
    await harness.carry_out(stop)
    await harness.carry_out(order("start", epoch=4))
    await harness.kill_agent()
    await harness.compute.send_order(CONTEXT, stop)
    harness.conductor.unavailable = True
    await harness.start_agent()
    guest = await harness.guest("i-1")
    assert guest is not None
    assert guest.power_state == 1
    harness.conductor.unavailable = False
    await harness.clock.advance(5)
    assert (await harness.carry_out(order("stop", epoch=5))).outcome == "done"


async def test_an_order_older_than_the_agent_is_accepted_only_from_a_heartbeat(harness: AgentHarness) -> None:
    late = order(epoch=2, issued_at=harness.clock.now())
    await harness.clock.advance(1)
    await harness.kill_agent()
    harness.conductor.now = harness.clock.now()
    await harness.start_agent()
    await harness.send(late)
    assert await harness.guest("i-1") is None
    await harness.beat(reply=HostReply(host="host-1", orders=(late,)))  # a heartbeat's reply brings it again
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.clock.advance(1)
    assert (await harness.carry_out(order(uuid="i-2", issued_at=harness.clock.now()))).outcome == "done"
