"""Builds, and the outcome of each kind of failure."""

import asyncio
from typing import Any

import pytest

from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF
from tests.clocks import settle
from tests.unit.compute.agent_harness import AgentHarness, again, order

HUGE = Flavor(id="9", name="huge", ram=1_000_000_000, vcpus=1, disk=1)
PORT = VIF(port_id="port-1", network_id="n", network_label="private", mac_address="fa:16:3e:00:00:01")


@pytest.mark.parametrize(
    ("kind", "outcome", "code"),
    [
        ("fail", "reschedule", None),
        ("no_resources", "reschedule", None),
        ("unavailable", "reschedule", "unavailable"),
        ("abort", "abort", None),
    ],
)
async def test_faults_of_the_driver(harness: AgentHarness, kind: str, outcome: str, code: str | None) -> None:
    await harness.rules({"operation": "spawn", "kind": kind, "message": "because", "count": 1})
    report = await harness.carry_out(order(epoch=2))
    assert (report.outcome, report.error_code, report.message) == (outcome, code, "because")
    assert not report.left_behind
    assert await harness.guest("i-1") is None
    beat = await harness.beat()
    assert beat.nodes[0].memory_mb_used == 0
    assert (await harness.carry_out(order(epoch=4))).outcome == "done"


async def test_an_unexpected_error_of_the_driver_is_rescheduled(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def spawn(plan: Any) -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(harness.driver, "spawn", spawn)
    report = await harness.carry_out(order())
    assert report.outcome == "reschedule"
    assert "secret" not in (report.message or "")
    assert "RuntimeError: secret inside" in (report.details or "")


async def test_an_error_of_our_own_code_is_an_error(harness: AgentHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(an_order: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(harness.manager._agents["host-1"].host.tracker(None), "instance_claim", broken)
    report = await harness.carry_out(order())
    assert report.outcome == "error"


@pytest.mark.parametrize(("asked", "forced"), [(False, False), (True, False), (False, True)])
async def test_the_report_says_whether_the_guest_has_a_config_drive(
    asked: bool, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = AgentHarness(force_config_drive=forced)
    await harness.start()
    spawn, plans = harness.driver.spawn, []

    async def spying(plan: Any) -> None:
        plans.append(plan.instance.config_drive)
        await spawn(plan)

    monkeypatch.setattr(harness.driver, "spawn", spying)
    built = order(instance_config_drive=asked)
    assert (await harness.carry_out(built)).config_drive == (asked or forced)
    assert (await harness.carry_out(again(built, operation_id="again"))).config_drive == (asked or forced)
    assert plans == [asked or forced]
    await harness.close()


async def test_a_refused_claim_is_rescheduled(harness: AgentHarness) -> None:
    report = await harness.carry_out(order(instance_flavor=HUGE))
    assert report.outcome == "reschedule"
    assert "memory" in (report.details or "") and "memory" not in (report.message or "")
    assert await harness.guest("i-1") is None
    assert not report.left_behind


async def test_an_unknown_node_is_rescheduled(harness: AgentHarness) -> None:
    report = await harness.carry_out(order(instance_node="elsewhere"))
    assert report.outcome == "reschedule"


async def test_a_guest_that_cannot_be_removed_is_reported(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "fail"}, {"operation": "destroy", "kind": "fail"})
    await harness.send(order())
    await harness.clock.advance(3)
    report = await harness.conductor.next_report()
    assert (report.outcome, report.left_behind) == ("reschedule", True)


async def test_a_build_cancelled_while_it_is_undone_is_not_reported(harness: AgentHarness) -> None:
    await harness.rules(
        {"operation": "spawn", "kind": "fail"},
        {"operation": "destroy", "kind": "delay", "delay": 3, "count": 1},
    )
    await harness.send(order(epoch=2))
    await harness.send(order("delete", epoch=3))
    await harness.clock.advance(3)
    report = await harness.conductor.next_report()
    assert (report.outcome, report.epoch) == ("done", 3)
    assert harness.conductor.reports.empty()


async def test_the_limit_of_concurrent_builds() -> None:
    harness = AgentHarness(max_concurrent_builds=2)
    await harness.start()
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    for number in range(5):
        await harness.send(order(uuid=f"i-{number}", instance_project_id=f"p-{number}"))
    assert len(await harness.driver.list_guests()) == 2
    assert len(harness.running_operations()) == 5
    await harness.clock.advance(10)
    assert len(await harness.driver.list_guests()) == 4
    await harness.clock.advance(20)
    assert harness.conductor.reports.qsize() == 5
    await harness.close()


async def test_one_project_leaves_a_build_slot_to_others() -> None:
    harness = AgentHarness(max_concurrent_builds=3)
    await harness.start()
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    for number in range(3):
        await harness.send(order(uuid=f"a-{number}", instance_project_id="a"))
    assert len(await harness.driver.list_guests()) == 2
    await harness.send(order(uuid="b", instance_project_id="b"))
    assert {guest.uuid for guest in await harness.driver.list_guests()} == {"a-0", "a-1", "b"}
    await harness.clock.advance(20)
    assert harness.conductor.reports.qsize() == 4
    await harness.close()


async def test_no_limit_of_builds() -> None:
    harness = AgentHarness(max_concurrent_builds=0)
    await harness.start()
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    for number in range(20):
        await harness.send(order(uuid=f"i-{number}"))
    assert len(await harness.driver.list_guests()) == 20
    await harness.clock.advance(10)
    await harness.close()


def with_port(**fields: Any) -> Any:
    return order(network_info=(PORT,), wait_for_plugs=("port-1",), **fields)


async def test_the_guest_runs_once_its_port_is_plugged(harness: AgentHarness) -> None:
    await harness.send(with_port())
    guest = await harness.guest("i-1")
    assert guest is not None
    assert guest.power_state == 0
    await harness.plug("i-1", "another")
    assert harness.conductor.reports.empty()
    await harness.plug("i-1", "port-1")
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_an_event_before_the_order_is_not_lost(harness: AgentHarness) -> None:
    await harness.plug("i-1", "port-1")
    assert (await harness.carry_out(with_port())).outcome == "done"


async def test_an_event_before_the_wait_is_not_lost(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    await harness.send(with_port())
    await harness.plug("i-1", "port-1")
    await harness.clock.advance(10)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_an_event_counts_only_once(harness: AgentHarness) -> None:
    await harness.plug("i-1", "port-1")
    await harness.carry_out(with_port(epoch=2))
    await harness.carry_out(order("stop", epoch=3))
    await harness.send(with_port(kind="start", epoch=4))
    assert harness.conductor.reports.empty()
    await harness.plug("i-1", "port-1")
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_an_old_or_withdrawn_event_does_not_count(harness: AgentHarness) -> None:
    await harness.plug("i-1", "port-1")
    await harness.clock.advance(301)
    await harness.send(with_port(epoch=2))
    assert harness.conductor.reports.empty()
    await harness.plug("i-1", "port-1")
    await harness.conductor.next_report()


async def test_a_port_that_is_not_plugged_in_time_aborts_the_build(harness: AgentHarness) -> None:
    await harness.send(with_port())
    await harness.clock.advance(299)
    assert harness.conductor.reports.empty()
    await harness.clock.advance(1)
    report = await harness.conductor.next_report()
    assert report.outcome == "abort"
    assert "port-1" in (report.message or "")
    assert await harness.guest("i-1") is None


async def test_a_port_whose_event_came_before_the_server_had_a_host(harness: AgentHarness) -> None:
    harness.conductor.plugged.add("port-1")
    assert (await harness.carry_out(with_port())).outcome == "done"
    [question] = harness.conductor.questions
    assert (question.host, question.instance_uuid, question.ports) == ("host-1", "i-1", ("port-1",))


async def test_a_port_whose_event_is_lost_during_the_wait(harness: AgentHarness) -> None:
    await harness.send(with_port())
    harness.conductor.plugged.add("port-1")
    await harness.clock.advance(60)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_time_in_which_nobody_can_tell_the_status_does_not_count(harness: AgentHarness) -> None:
    harness.conductor.unavailable = True
    await harness.send(with_port())
    await harness.clock.advance(1_000)
    assert harness.conductor.reports.empty()
    harness.conductor.unavailable = False
    await harness.clock.advance(290)
    assert harness.conductor.reports.empty()
    harness.conductor.plugged.add("port-1")
    await harness.clock.advance(60)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_an_event_ends_the_wait_while_no_conductor_answers(harness: AgentHarness) -> None:
    harness.conductor.unavailable = True
    await harness.send(with_port())
    await harness.plug("i-1", "port-1")
    harness.conductor.unavailable = False
    await harness.clock.advance(1)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_a_port_that_cannot_be_plugged_aborts_the_build(harness: AgentHarness) -> None:
    await harness.send(with_port())
    await harness.plug("i-1", "port-1", status="failed")
    assert (await harness.conductor.next_report()).outcome == "abort"


async def test_a_port_that_is_not_plugged_when_that_is_not_fatal() -> None:
    harness = AgentHarness(vif_plugging_is_fatal=False, vif_plugging_timeout=10.0)
    await harness.start()
    await harness.send(with_port())
    await harness.clock.advance(10)
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.close()


async def test_a_guest_that_crashes_at_once_was_built_and_is_reported(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "crash"})
    assert (await harness.carry_out(order())).power_state == 1
    await settle()
    beat = await harness.beat()
    assert [(change.instance_uuid, change.power_state) for change in beat.power_changes] == [("i-1", 6)]
    assert not (await harness.beat()).power_changes


async def test_a_rescue_is_one_of_the_builds_of_a_host_until_its_guest_shuts_down() -> None:
    harness = AgentHarness(max_concurrent_builds=1)
    await harness.start()
    await harness.carry_out(order(uuid="i-1"))
    await harness.rules(
        {"operation": "rescue", "kind": "delay", "delay": 30}, {"operation": "shutdown", "kind": "hang"}
    )
    slow = ImageMeta(id="image-1", properties={"os_shutdown_timeout": "3000"})
    await harness.send(order("rescue", uuid="i-1", epoch=3, instance_image=slow, rescue_image=slow))
    await harness.send(order(uuid="i-2"))
    await harness.clock.advance(29)
    assert harness.conductor.reports.empty()
    await harness.clock.advance(2)
    assert (await harness.conductor.next_report()).instance_uuid == "i-2"
    assert harness.conductor.reports.empty()
    await harness.clock.advance(3000)
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.close()


async def test_no_build_waits_for_a_port_that_the_network_does_not_confirm() -> None:
    harness = AgentHarness(max_concurrent_builds=1)
    await harness.start()
    waiting = order(uuid="i-1", wait_for_plugs=("port-1",), network_info=(PORT,))
    await harness.send(waiting)
    await harness.send(order(uuid="i-2"))
    report = await asyncio.wait_for(harness.conductor.reports.get(), 2)
    assert (report.instance_uuid, report.outcome) == ("i-2", "done")
    assert harness.running_operations() == [waiting.operation_id]
    await harness.plug("i-1", "port-1")
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.close()


async def test_no_build_waits_for_a_guest_that_is_rebuilt_and_does_not_shut_down() -> None:
    harness = AgentHarness(max_concurrent_builds=1)
    await harness.start()
    await harness.carry_out(order(uuid="i-1"))
    await harness.rules({"operation": "shutdown", "kind": "hang"})
    slow = ImageMeta(id="image-1", properties={"os_shutdown_timeout": "3000"})
    rebuild = order("rebuild", uuid="i-1", epoch=3, instance_image=slow)
    await harness.send(rebuild)
    await harness.send(order(uuid="i-2"))
    report = await asyncio.wait_for(harness.conductor.reports.get(), 2)
    assert (report.instance_uuid, report.outcome) == ("i-2", "done")
    assert harness.running_operations() == [rebuild.operation_id]
    await harness.clock.advance(3000)
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.close()
