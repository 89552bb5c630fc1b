"""The agent is killed, restarted, stopped: nothing is built twice, nothing is lost, leases are given back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from micronova.objects.orders import HostReply
from tests.unit.compute.world import CONTEXT, World, again, order, settle


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """An agent whose guests survive it."""
    world = World(tmp_path)
    await world.start()
    yield world
    await world.close()


async def restart(world: World, *orders: object) -> None:
    await world.kill_agent()
    world.conductor.replies.append(HostReply(host="host-1", orders=orders))  # type: ignore[arg-type]
    await world.start_agent()


async def test_guests_survive_kill_9(world: World) -> None:
    await world.carry_out(order(uuid="i-1", epoch=2))
    await world.carry_out(order(uuid="i-2", epoch=3))
    await world.carry_out(order("delete", uuid="i-2", epoch=4))
    await restart(world)
    assert [(guest.uuid, guest.epoch, guest.power_state) for guest in await world.driver.list_guests()] == [
        ("i-1", 2, 1)
    ]
    beat = world.conductor.last_beat()
    assert beat.nodes[0].vcpus_used == 1
    assert [(each.instance_uuid, each.power_state) for each in beat.power_changes] == [("i-1", 1)]
    assert beat.in_hand == ()


async def test_a_guest_that_was_built_is_not_built_twice(world: World) -> None:
    build = order(epoch=2)
    world.conductor.away = True
    await world.send(build)
    world.conductor.away = False
    await restart(world, build)
    report = await world.conductor.next_report()
    assert (report.operation_id, report.outcome, report.power_state) == (build.operation_id, "done", 1)
    assert (await world.driver.get_console_output("i-1", None)).count("Linux version") == 1


async def test_a_built_guest_that_stopped_since_keeps_its_disk(world: World) -> None:
    build = order(epoch=2)
    await world.carry_out(build)
    world.driver.guest_stops("i-1")
    await restart(world, build)
    report = await world.conductor.next_report()
    assert (report.outcome, report.power_state) == ("done", 4)


async def test_a_half_built_guest_is_built_anew(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "hang"})
    build = order(epoch=2)
    await world.send(build)
    await restart(world, build)
    report = await world.conductor.next_report()
    assert report.outcome == "done"
    guest = await world.guest("i-1")
    assert guest is not None
    assert guest.power_state == 1


async def test_a_guest_of_an_older_epoch_is_built_anew(world: World) -> None:
    build = order(epoch=2)
    await world.carry_out(build)
    await restart(world, again(build, epoch=4))
    assert (await world.conductor.next_report()).epoch == 4
    guest = await world.guest("i-1")
    assert guest is not None
    assert guest.epoch == 4


async def test_epochs_of_guests_are_known_after_a_restart(world: World) -> None:
    await world.carry_out(order(epoch=5))
    await restart(world)
    await world.send(order("delete", epoch=4))
    assert world.conductor.reports.empty()
    assert await world.guest("i-1") is not None


async def test_orders_are_carried_out_again_after_a_restart(world: World) -> None:
    await world.carry_out(order(epoch=2))
    await world.rules({"operation": "destroy", "kind": "hang"})
    delete = order("delete", epoch=3)
    await world.send(delete)
    await restart(world, delete)
    assert (await world.conductor.next_report()).outcome == "done"
    assert await world.guest("i-1") is None


async def test_stop_gives_the_leases_back(world: World) -> None:
    await world.stop()
    last = world.conductor.last_beat()
    assert last.stopping
    assert last.in_hand == ()


async def test_stop_lets_work_finish(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "delay", "delay": 0.5})
    await world.send(order())
    await world.stop()
    assert (await world.conductor.next_report()).outcome == "done"
    assert world.conductor.last_beat().stopping


async def test_stop_undoes_what_does_not_finish(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "hang"})
    build = order()
    await world.send(build)
    await world.stop()
    assert world.conductor.reports.empty()
    assert await world.guest("i-1") is None
    await restart(world, build)
    assert (await world.conductor.next_report()).outcome == "done"


async def test_stop_keeps_a_guest_whose_report_is_not_heard(world: World) -> None:
    world.conductor.away = True
    build = order()
    await world.send(build)
    await world.stop()
    world.conductor.away = False
    assert await world.guest("i-1") is not None
    await restart(world, build)
    assert (await world.conductor.next_report()).outcome == "done"


async def test_stop_does_not_hang_with_the_driver(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "hang"}, {"operation": "destroy", "kind": "hang"})
    await world.send(order())
    await world.stop()
    assert world.conductor.last_beat().stopping


async def test_no_order_is_taken_while_stopping(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "hang", "name": "i-1"})
    await world.send(order(uuid="i-1"))
    stopping = asyncio.create_task(world.manager.stop())
    await settle()
    await world.send(order(uuid="i-2"))
    assert await world.guest("i-2") is None
    await world.clock.advance(10)
    await asyncio.wait_for(stopping, 20)


async def test_events_still_arrive_while_stopping(world: World) -> None:
    await world.send(order(wait_for_plugs=("port-1",)))
    stopping = asyncio.create_task(world.manager.stop())
    await settle()
    await world.plug("i-1", "port-1")
    assert (await world.conductor.next_report()).outcome == "done"
    await world.clock.advance(10)
    await asyncio.wait_for(stopping, 20)


async def test_many_hosts_in_one_process() -> None:
    world = World()
    world.options = {"hosts": 1200, "vcpus": 4, "memory_mb": 1024, "local_gb": 10}
    await world.start()
    assert sum(len(beat.hosts) for beat in world.conductor.beats) == 1200
    assert len(world.conductor.beats) == 3
    for number in (1, 600, 1200):
        report = await world.carry_out(order(uuid=f"i-{number}", host=f"fake-{number}"))
        assert (report.outcome, report.host) == ("done", f"fake-{number}")
    await world.close()


async def test_no_order_counts_before_the_first_heartbeat_is_answered(world: World) -> None:
    """A broker gives a new agent what the old one had not acknowledged, however long it is overtaken."""
    await world.carry_out(order(epoch=2))
    stop = order("stop", epoch=3)
    await world.carry_out(stop)
    await world.carry_out(order("start", epoch=4))
    await world.kill_agent()
    await world.compute.send_order(CONTEXT, stop)
    world.conductor.away = True
    await world.start_agent()
    guest = await world.guest("i-1")
    assert guest is not None
    assert guest.power_state == 1
    world.conductor.away = False
    await world.clock.advance(5)
    assert (await world.carry_out(order("stop", epoch=5))).outcome == "done"


async def test_an_order_from_before_the_agent_is_void_when_it_comes_by_itself(world: World) -> None:
    late = order(epoch=2, issued_at=world.clock.now())
    await world.clock.advance(1)
    await world.kill_agent()
    world.conductor.now = world.clock.now()
    await world.start_agent()
    await world.send(late)
    assert await world.guest("i-1") is None
    await world.beat(reply=HostReply(host="host-1", orders=(late,)))  # but not in a heartbeat's answer
    assert (await world.conductor.next_report()).outcome == "done"
    await world.clock.advance(1)
    assert (await world.carry_out(order(uuid="i-2", issued_at=world.clock.now()))).outcome == "done"
