"""Builds: each way in which they fail, and what follows."""

from typing import Any

import pytest

from micronova.objects.flavor import Flavor
from micronova.objects.network import VIF
from tests.unit.compute.world import World, order, settle

HUGE = Flavor(id="9", name="huge", ram=1_000_000_000, vcpus=1, disk=1)
PORT = VIF(port_id="port-1", network_id="n", network_label="private", mac_address="fa:16:3e:00:00:01")


@pytest.mark.parametrize(
    ("kind", "outcome", "code"),
    [
        ("fail", "reschedule", "build_failed"),
        ("no_resources", "reschedule", "insufficient_resources"),
        ("abort", "abort", "build_aborted"),
    ],
)
async def test_faults_of_the_driver(world: World, kind: str, outcome: str, code: str) -> None:
    await world.rules({"operation": "spawn", "kind": kind, "message": "because", "count": 1})
    report = await world.carry_out(order(epoch=2))
    assert (report.outcome, report.error_code, report.message) == (outcome, code, "because")
    assert not report.left_behind
    assert await world.guest("i-1") is None
    beat = await world.beat()
    assert beat.nodes[0].memory_mb_used == 0
    assert (await world.carry_out(order(epoch=4))).outcome == "done"


async def test_an_unexpected_error_of_the_driver_is_rescheduled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def spawn(plan: Any) -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(world.driver, "spawn", spawn)
    report = await world.carry_out(order())
    assert (report.outcome, report.error_code) == ("reschedule", "build_failed")
    assert "secret" not in (report.message or "")
    assert "RuntimeError: secret inside" in (report.details or "")


async def test_an_error_of_our_own_code_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(an_order: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(world.manager._agents["host-1"].host.tracker(None), "instance_claim", broken)
    report = await world.carry_out(order())
    assert (report.outcome, report.error_code) == ("error", "internal")


async def test_a_refused_claim_is_rescheduled(world: World) -> None:
    report = await world.carry_out(order(instance_flavor=HUGE))
    assert (report.outcome, report.error_code) == ("reschedule", "insufficient_resources")
    assert "memory" in (report.message or "")
    assert await world.guest("i-1") is None
    assert not report.left_behind


async def test_an_unknown_node_is_rescheduled(world: World) -> None:
    report = await world.carry_out(order(instance_node="elsewhere"))
    assert (report.outcome, report.error_code) == ("reschedule", "insufficient_resources")


async def test_what_cannot_be_undone_is_said(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "fail"}, {"operation": "destroy", "kind": "fail"})
    await world.send(order())
    await world.clock.advance(3)
    report = await world.conductor.next_report()
    assert (report.outcome, report.left_behind) == ("reschedule", True)


async def test_a_build_cancelled_while_it_undoes_itself_stays_quiet(world: World) -> None:
    await world.rules(
        {"operation": "spawn", "kind": "fail"},
        {"operation": "destroy", "kind": "delay", "delay": 3, "count": 1},
    )
    await world.send(order(epoch=2))
    await world.send(order("delete", epoch=3))
    await world.clock.advance(3)
    report = await world.conductor.next_report()
    assert (report.outcome, report.epoch) == ("done", 3)
    assert world.conductor.reports.empty()


async def test_only_so_many_builds_at_a_time() -> None:
    world = World(max_concurrent_builds=2)
    await world.start()
    await world.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    for number in range(5):
        await world.send(order(uuid=f"i-{number}"))
    assert len(await world.driver.list_guests()) == 2
    assert len(world.in_hand()) == 5
    await world.clock.advance(10)
    assert len(await world.driver.list_guests()) == 4
    await world.clock.advance(20)
    assert world.conductor.reports.qsize() == 5
    await world.close()


async def test_no_limit_of_builds() -> None:
    world = World(max_concurrent_builds=0)
    await world.start()
    await world.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    for number in range(20):
        await world.send(order(uuid=f"i-{number}"))
    assert len(await world.driver.list_guests()) == 20
    await world.clock.advance(10)
    await world.close()


def with_port(**fields: Any) -> Any:
    return order(network_info=(PORT,), wait_for_plugs=("port-1",), **fields)


async def test_the_guest_runs_once_its_port_is_plugged(world: World) -> None:
    await world.send(with_port())
    guest = await world.guest("i-1")
    assert guest is not None
    assert guest.power_state == 0
    await world.plug("i-1", "another")
    assert world.conductor.reports.empty()
    await world.plug("i-1", "port-1")
    assert (await world.conductor.next_report()).outcome == "done"


async def test_an_event_before_the_order_is_not_lost(world: World) -> None:
    await world.plug("i-1", "port-1")
    assert (await world.carry_out(with_port())).outcome == "done"


async def test_an_event_before_the_wait_is_not_lost(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    await world.send(with_port())
    await world.plug("i-1", "port-1")
    await world.clock.advance(10)
    assert (await world.conductor.next_report()).outcome == "done"


async def test_an_event_serves_only_once(world: World) -> None:
    await world.plug("i-1", "port-1")
    await world.carry_out(with_port(epoch=2))
    await world.carry_out(order("stop", epoch=3))
    await world.send(with_port(kind="start", epoch=4))
    assert world.conductor.reports.empty()
    await world.plug("i-1", "port-1")
    assert (await world.conductor.next_report()).outcome == "done"


async def test_an_old_or_withdrawn_event_does_not_count(world: World) -> None:
    await world.plug("i-1", "port-1")
    await world.clock.advance(301)
    await world.send(with_port(epoch=2))
    assert world.conductor.reports.empty()
    await world.plug("i-1", "port-1")
    await world.conductor.next_report()


async def test_a_port_that_is_not_plugged_in_time_aborts_the_build(world: World) -> None:
    await world.send(with_port())
    await world.clock.advance(299)
    assert world.conductor.reports.empty()
    await world.clock.advance(1)
    report = await world.conductor.next_report()
    assert report.outcome == "abort"
    assert "port-1" in (report.message or "")
    assert await world.guest("i-1") is None


async def test_a_port_that_cannot_be_plugged_aborts_the_build(world: World) -> None:
    await world.send(with_port())
    await world.plug("i-1", "port-1", status="failed")
    assert (await world.conductor.next_report()).outcome == "abort"


async def test_a_plugging_that_does_not_matter() -> None:
    world = World(vif_plugging_is_fatal=False, vif_plugging_timeout=10.0)
    await world.start()
    await world.send(with_port())
    await world.clock.advance(10)
    assert (await world.conductor.next_report()).outcome == "done"
    await world.close()


async def test_a_guest_that_crashes_at_once_was_built_and_is_told_of(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "crash"})
    assert (await world.carry_out(order())).power_state == 1
    await settle()
    beat = await world.beat()
    assert [(change.instance_uuid, change.power_state) for change in beat.power_changes] == [("i-1", 6)]
    assert not (await world.beat()).power_changes
