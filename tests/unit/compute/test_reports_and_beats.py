"""Reports that are repeated, heartbeats, drops and departures."""

import asyncio
import itertools
from typing import Any

import pytest

from micronova.compute import agent
from micronova.compute.manager import CHANGES_TOGETHER
from micronova.objects import power_state
from micronova.objects.errors import OperationFailed
from micronova.objects.orders import Departure, Guest, HostBeat, HostReply, RemovedGuest, ReportReply
from micronova.virt.driver import DriverFailed
from tests.clocks import settle
from tests.unit.compute.agent_harness import CONTEXT, AgentHarness, again, order


async def test_an_order_whose_report_was_refused_is_carried_out_again(harness: AgentHarness) -> None:
    """A conductor took the operation over while the host stood still, and orders the same again."""
    await harness.carry_out(order())
    stop = order("stop", epoch=3)
    harness.conductor.judge = lambda _: ReportReply(accepted=False)
    assert (await harness.carry_out(stop)).outcome == "done"
    harness.conductor.judge = lambda _: ReportReply(accepted=True)
    await harness.beat(reply=HostReply(host="host-1", orders=(stop,)))
    assert (await harness.conductor.next_report()).operation_id == stop.operation_id
    await harness.beat(reply=HostReply(host="host-1", orders=(stop,)))
    assert harness.conductor.reports.empty()


async def test_a_report_is_repeated_until_a_conductor_replies(harness: AgentHarness) -> None:
    harness.conductor.unavailable = True
    build = order()
    await harness.send(build)
    await harness.clock.advance(60)
    assert harness.conductor.failures > 5
    assert harness.running_operations() == [build.operation_id]
    harness.conductor.unavailable = False
    await harness.clock.advance(10)
    assert (await harness.conductor.next_report()).outcome == "done"
    assert harness.running_operations() == []


async def test_a_refused_report_is_forgotten(harness: AgentHarness) -> None:
    harness.conductor.judge = lambda _: ReportReply(accepted=False)
    await harness.carry_out(order())
    await settle()
    assert harness.running_operations() == []
    assert await harness.guest("i-1") is not None


async def test_a_refused_build_of_an_instance_that_left_is_destroyed(harness: AgentHarness) -> None:
    harness.conductor.judge = lambda _: ReportReply(accepted=False, destroy=True)
    await harness.carry_out(order(epoch=2))
    await settle()
    assert await harness.guest("i-1") is None
    assert (await harness.beat()).removed_guests == (RemovedGuest("i-1", 2),)
    assert (await harness.beat()).removed_guests == ()


async def test_the_order_to_destroy_is_kept_while_the_driver_fails(harness: AgentHarness) -> None:
    harness.conductor.judge = lambda _: ReportReply(accepted=False, destroy=True)
    await harness.rules({"operation": "destroy", "kind": "fail"})
    await harness.carry_out(order(epoch=2))
    await harness.clock.advance(30)
    assert await harness.guest("i-1") is not None
    await harness.rules()
    await harness.clock.advance(10)
    assert await harness.guest("i-1") is None


async def test_a_refused_failure_destroys_nothing(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    harness.conductor.judge = lambda _: ReportReply(accepted=False, destroy=True)
    await harness.carry_out(order("stop", epoch=3))
    await settle()
    assert await harness.guest("i-1") is not None


async def test_the_first_beat_comes_at_once_and_lists_the_nodes(harness: AgentHarness) -> None:
    beat = harness.conductor.last_beat()
    assert len(harness.conductor.beats) == 1
    node = beat.nodes[0]
    assert (node.node, node.vcpus, node.memory_mb, node.vcpus_used) == ("host-1", 64, 262_144, 0)
    assert (node.allocation_ratios, node.initial_allocation_ratios["VCPU"]) == ({}, 4.0)
    assert (await harness.beat()).nodes == ()


async def test_claims_change_the_resources_in_the_beat(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    node = (await harness.beat()).nodes[0]
    assert (node.vcpus_used, node.memory_mb_used, node.local_gb_used, node.running_vms) == (1, 512, 1, 1)
    await harness.carry_out(order("delete", epoch=3))
    node = (await harness.beat()).nodes[0]
    assert (node.vcpus_used, node.memory_mb_used, node.running_vms) == (0, 0, 0)
    assert (await harness.beat()).nodes == ()


async def test_nodes_are_sent_again_on_request_at_once(harness: AgentHarness) -> None:
    harness.conductor.replies.append(HostReply(host="host-1"))
    harness.conductor.replies.append(HostReply(host="host-1", resend_nodes=True))
    await harness.beat()
    before = len(harness.conductor.beats)
    beat = await harness.beat()
    assert len(harness.conductor.beats) == before + 2
    assert len(beat.nodes) == 1


async def test_what_a_lost_beat_said_is_repeated(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    harness.conductor.unavailable = True
    await harness.clock.advance(6)
    harness.conductor.unavailable = False
    await harness.clock.advance(2)
    assert len(harness.conductor.last_beat().nodes) == 1


async def test_beats_list_the_running_orders(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang"})
    build = order(epoch=7)
    await harness.send(build)
    beat = await harness.beat()
    assert [(each.operation_id, each.epoch) for each in beat.running_orders] == [(build.operation_id, 7)]


async def test_dropped_work_is_stopped_and_undone(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang"})
    build = order()
    await harness.send(build)
    await harness.beat(reply=HostReply(host="host-1", drop=(build.operation_id,)))
    assert harness.running_operations() == []
    assert await harness.guest("i-1") is None
    assert harness.conductor.reports.empty()
    assert harness.manager._agents["host-1"].host.tracker(None).used()["VCPU"] == 0


async def test_what_is_being_reported_is_not_dropped(harness: AgentHarness) -> None:
    """The conductor may have accepted the report and its answer may be lost: then the guest is a running server."""
    build = order()
    harness.conductor.unavailable = True
    await harness.send(build)
    harness.conductor.unavailable = False
    agent = harness.manager._agents["host-1"]
    agent.beat_answered(agent.beat(), HostReply(host="host-1", drop=(build.operation_id,)))
    await harness.clock.advance(10)
    assert (await harness.conductor.next_report()).outcome == "done"
    assert await harness.guest("i-1") is not None


async def test_a_drop_means_what_the_beat_listed(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    build = order(epoch=2)
    await harness.send(build)
    agent = harness.manager._agents["host-1"]
    beat = agent.beat()
    await harness.send(again(build, epoch=4))  # sent again while the heartbeat was under way
    agent.beat_answered(beat, HostReply(host="host-1", drop=(build.operation_id,)))
    await harness.clock.advance(10)
    report = await harness.conductor.next_report()
    assert (report.outcome, report.epoch) == ("done", 4)


async def test_a_departure_destroys_the_guest_and_is_answered(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.beat(reply=HostReply(host="host-1", departures=(Departure("i-1", 3),)))
    assert await harness.guest("i-1") is None
    assert (await harness.beat()).removed_guests == (RemovedGuest("i-1", 3),)
    assert (await harness.beat()).removed_guests == ()


async def test_a_departure_spares_a_newer_guest(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=5))
    await harness.beat(reply=HostReply(host="host-1", departures=(Departure("i-1", 4),)))
    assert await harness.guest("i-1") is not None
    assert (await harness.beat()).removed_guests == (RemovedGuest("i-1", 4),)


async def test_a_departure_of_a_deleted_server_spares_no_guest(harness: AgentHarness) -> None:
    """The guest may be newer only if the database was restored before the server was deleted."""
    await harness.carry_out(order(epoch=5))
    await harness.beat(reply=HostReply(host="host-1", departures=(Departure("i-1", 4, deleted=True),)))
    assert await harness.guest("i-1") is None
    assert (await harness.beat()).removed_guests == (RemovedGuest("i-1", 4),)


async def test_a_departure_of_an_unknown_instance_is_answered(harness: AgentHarness) -> None:
    await harness.beat(reply=HostReply(host="host-1", departures=(Departure("i-9", 4),)))
    assert (await harness.beat()).removed_guests == (RemovedGuest("i-9", 4),)


async def test_a_departure_stops_a_build(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang", "count": 1})
    await harness.send(order(epoch=2))
    await harness.beat(reply=HostReply(host="host-1", departures=(Departure("i-1", 2),)))
    assert await harness.guest("i-1") is None
    assert harness.conductor.reports.empty()
    await harness.send(order(epoch=2))  # refused since
    assert await harness.guest("i-1") is None
    assert (await harness.carry_out(order("delete", epoch=2))).outcome == "done"  # but a delete is accepted
    assert (await harness.carry_out(order(epoch=3))).outcome == "done"


async def test_what_a_heartbeat_has_no_room_for_is_in_the_next_one(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "MOST_REPORTED", 2)
    gone = tuple(Departure(f"i-{number}", 4) for number in range(3))
    await harness.beat(reply=HostReply(host="host-1", departures=gone))
    await settle()
    removed = [(await harness.beat()).removed_guests for _ in range(3)]
    assert [len(each) for each in removed] == [2, 1, 0]
    assert {each.instance_uuid for part in removed for each in part} == {"i-0", "i-1", "i-2"}


async def test_a_departure_that_fails_is_tried_again(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.rules({"operation": "destroy", "kind": "fail", "count": 3})
    await harness.beat(reply=HostReply(host="host-1", departures=(Departure("i-1", 3),)))
    await harness.clock.advance(3)
    assert await harness.guest("i-1") is not None
    await harness.beat()
    assert await harness.guest("i-1") is None


async def test_a_guest_that_stops_itself_is_reported_at_once(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.beat()
    harness.driver.guest_stops("i-1")
    await harness.clock.advance(CHANGES_TOGETHER)
    [change] = harness.conductor.last_beat().power_changes
    assert (change.instance_uuid, change.epoch, change.power_state) == ("i-1", 2, 4)
    assert not (await harness.beat()).power_changes


async def test_a_power_change_of_an_unanswered_heartbeat_is_repeated_after_an_order(harness: AgentHarness) -> None:
    """A conductor may apply that heartbeat still, after the report of the order."""
    await harness.carry_out(order(epoch=2))
    await harness.beat()
    harness.conductor.unavailable = True
    harness.driver.guest_stops("i-1")
    await harness.clock.advance(CHANGES_TOGETHER)
    harness.conductor.unavailable = False
    answered = len(harness.conductor.beats)
    await harness.carry_out(order("start", epoch=3))
    await harness.beat()
    later = [change for beat in harness.conductor.beats[answered:] for change in beat.hosts[0].power_changes]
    assert [(each.instance_uuid, each.power_state) for each in later] == [("i-1", 1)]


async def test_a_power_change_that_the_conductor_could_not_judge_is_repeated(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.beat()
    harness.conductor.replies.append(HostReply(host="host-1", repeat_power=("i-1",)))
    harness.driver.guest_stops("i-1")
    await harness.clock.advance(CHANGES_TOGETHER)
    first = harness.conductor.last_beat().power_changes
    assert first and (await harness.beat()).power_changes == first
    assert not (await harness.beat()).power_changes


async def test_heartbeats_are_numbered_also_by_the_next_agent(harness: AgentHarness) -> None:
    await harness.beat()
    await harness.beat()
    await harness.kill_agent()
    await harness.clock.advance(1.0)
    await harness.start_agent()
    await harness.beat()
    numbers = [beat.number for beat in harness.conductor.beats]
    assert len(numbers) > 3 and all(one < next for one, next in itertools.pairwise(numbers))


async def test_an_agent_whose_clock_was_ahead_learns_the_newest_number(harness: AgentHarness) -> None:
    newest = harness.conductor.beats[-1].number + 10_000_000_000
    harness.conductor.newest = newest
    await harness.clock.advance(harness.settings.report_interval)
    assert harness.conductor.beats[-1].number == newest + 1


async def test_what_an_order_does_is_no_event(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.carry_out(order("stop", epoch=3))
    await harness.carry_out(order("start", epoch=4))
    assert not (await harness.beat()).power_changes


async def test_the_periodic_update_mends_drift(harness: AgentHarness) -> None:
    await harness.carry_out(order(uuid="i-1"))
    await harness.carry_out(order(uuid="i-2"))
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 500, "name": "i-3"})
    await harness.send(order(uuid="i-3"))
    await harness.beat()
    await harness.driver.destroy("i-1")  # by an operator, without the agent
    await harness.clock.advance(65)
    # Those of i-2, and of i-3, which is being built.
    assert any(beat.hosts[0].nodes and beat.hosts[0].nodes[0].vcpus_used == 2 for beat in harness.conductor.beats)


async def test_questions(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    guests = await harness.compute.list_guests(CONTEXT, "host-1")
    assert [(guest.uuid, guest.epoch) for guest in guests] == [("i-1", 2)]
    assert "server-i-1" in await harness.compute.get_console_output(CONTEXT, "host-1", "i-1")
    assert len((await harness.compute.get_console_output(CONTEXT, "host-1", "i-1", 2)).splitlines()) == 2
    assert "load average" in await harness.compute.get_host_uptime(CONTEXT, "host-1")
    await harness.rules({"operation": "spawn", "kind": "fail", "count": 0})
    assert (await harness.compute.fault_rules(CONTEXT, "host-1"))[0]["kind"] == "fail"


async def test_a_driver_that_fails_has_answered(harness: AgentHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API knows the error, and a conductor that asks whether the host is there knows that it is."""
    compute = harness.compute
    assert await compute.answers("host-1", 5.0)

    async def fail(*_: Any) -> Any:
        raise DriverFailed("The hypervisor failed.")

    monkeypatch.setattr(harness.driver, "get_host_uptime", fail)
    monkeypatch.setattr(harness.driver, "force_complete_live_migration", fail)
    with pytest.raises(OperationFailed, match="The hypervisor failed"):
        await compute.get_host_uptime(CONTEXT, "host-1")
    with pytest.raises(OperationFailed, match="The hypervisor failed"):
        await compute.force_complete_live_migration(CONTEXT, "host-1", "i-1")
    assert await compute.answers("host-1", 5.0)

    async def break_down(*_: Any) -> Any:
        raise RuntimeError("an error that nobody expected")

    monkeypatch.setattr(harness.driver, "get_host_uptime", break_down)
    assert await compute.answers("host-1", 5.0), "whatever it says"
    asked = asyncio.create_task(compute.answers("host-2", 5.0))
    await settle()
    await harness.clock.advance(6)
    assert not await asked


async def test_a_drop_does_not_interrupt_the_undoing(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "fail"}, {"operation": "destroy", "kind": "delay", "delay": 8})
    build = order()
    await harness.send(build)
    await harness.beat(reply=HostReply(host="host-1", drop=(build.operation_id,)))
    assert await harness.guest("i-1") is not None
    await harness.clock.advance(8)
    assert await harness.guest("i-1") is None
    assert harness.conductor.reports.empty()
    assert harness.running_operations() == []


async def test_the_conductor_says_when_the_next_beat_is_due(harness: AgentHarness) -> None:
    own = harness.settings.report_interval
    harness.conductor.interval = 10 * own
    await harness.beat()
    await harness.clock.advance(10 * own)  # the first longer pause has a random length, so that hosts spread
    before = len(harness.conductor.beats)
    await harness.clock.advance(8 * own)
    assert len(harness.conductor.beats) <= before + 1
    before = len(harness.conductor.beats)
    harness.conductor.interval = own / 10  # never more often than the agent is set to
    await harness.clock.advance(10 * own)
    before = len(harness.conductor.beats)
    await harness.clock.advance(own)
    assert before < len(harness.conductor.beats) <= before + 2


async def test_an_event_is_newer_than_what_is_being_read_of_the_hypervisor(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.carry_out(order())
    await harness.beat()
    await harness.beat()
    list_guests = harness.driver.list_guests

    async def stops_meanwhile() -> list[Guest]:
        found: list[Guest] = await list_guests()
        if harness.driver._store.get("i-1").power_state == power_state.RUNNING:
            harness.driver.guest_stops("i-1")
        return found

    before = len(harness.conductor.beats)
    monkeypatch.setattr(harness.driver, "list_guests", stops_meanwhile)
    await harness.manager._agents["host-1"].host.update_available_resource()
    await harness.beat()
    reported = [change for beat in harness.conductor.beats[before:] for change in beat.hosts[0].power_changes]
    assert {change.power_state for change in reported} == {power_state.SHUTDOWN}


async def test_an_error_in_a_heartbeat_about_a_power_change_is_not_the_last_one(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.carry_out(order())
    await harness.beat()
    agent = harness.manager._agents["host-1"]
    make, failures = agent.beat, [MemoryError()]

    def beat() -> HostBeat:
        if failures:
            raise failures.pop()
        return make()

    monkeypatch.setattr(agent, "beat", beat)
    before = len(harness.conductor.beats)
    harness.driver.guest_stops("i-1")
    await harness.beat()
    assert not failures
    reported = [change for beat in harness.conductor.beats[before:] for change in beat.hosts[0].power_changes]
    assert [change.power_state for change in reported] == [power_state.SHUTDOWN]
