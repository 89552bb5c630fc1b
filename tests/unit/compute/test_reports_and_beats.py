"""Reports that are repeated, heartbeats, drops and departures."""

from micronova.conductor.rpcapi import ReportReply
from micronova.objects.orders import Departed, HostReply
from tests.unit.compute.world import CONTEXT, World, again, order, settle


async def test_a_report_is_repeated_until_it_is_heard(world: World) -> None:
    world.conductor.away = True
    build = order()
    await world.send(build)
    await world.clock.advance(60)
    assert world.conductor.failures > 5
    assert world.in_hand() == [build.operation_id]
    world.conductor.away = False
    await world.clock.advance(10)
    assert (await world.conductor.next_report()).outcome == "done"
    assert world.in_hand() == []


async def test_a_refused_report_is_forgotten(world: World) -> None:
    world.conductor.judge = lambda _: ReportReply(accepted=False)
    await world.carry_out(order())
    await settle()
    assert world.in_hand() == []
    assert await world.guest("i-1") is not None


async def test_a_refused_build_of_an_instance_that_left_is_destroyed(world: World) -> None:
    world.conductor.judge = lambda _: ReportReply(accepted=False, destroy=True)
    await world.carry_out(order(epoch=2))
    await settle()
    assert await world.guest("i-1") is None
    assert (await world.beat()).departed == (Departed("i-1", 2),)
    assert (await world.beat()).departed == ()


async def test_the_order_to_destroy_is_kept_while_the_driver_fails(world: World) -> None:
    world.conductor.judge = lambda _: ReportReply(accepted=False, destroy=True)
    await world.rules({"operation": "destroy", "kind": "fail"})
    await world.carry_out(order(epoch=2))
    await world.clock.advance(30)
    assert await world.guest("i-1") is not None
    await world.rules()
    await world.clock.advance(10)
    assert await world.guest("i-1") is None


async def test_a_refused_failure_destroys_nothing(world: World) -> None:
    await world.carry_out(order(epoch=2))
    world.conductor.judge = lambda _: ReportReply(accepted=False, destroy=True)
    await world.carry_out(order("stop", epoch=3))
    await settle()
    assert await world.guest("i-1") is not None


async def test_the_first_beat_comes_at_once_and_tells_the_nodes(world: World) -> None:
    beat = world.conductor.last_beat()
    assert len(world.conductor.beats) == 1
    node = beat.nodes[0]
    assert (node.node, node.vcpus, node.memory_mb, node.vcpus_used) == ("host-1", 64, 262_144, 0)
    assert node.allocation_ratios["VCPU"] == 4.0
    assert (await world.beat()).nodes == ()


async def test_claims_change_what_the_beat_tells(world: World) -> None:
    await world.carry_out(order())
    node = (await world.beat()).nodes[0]
    assert (node.vcpus_used, node.memory_mb_used, node.local_gb_used, node.running_vms) == (1, 512, 1, 1)
    await world.carry_out(order("delete", epoch=3))
    node = (await world.beat()).nodes[0]
    assert (node.vcpus_used, node.memory_mb_used, node.running_vms) == (0, 0, 0)
    assert (await world.beat()).nodes == ()


async def test_nodes_are_sent_again_on_request_at_once(world: World) -> None:
    world.conductor.replies.append(HostReply(host="host-1"))
    world.conductor.replies.append(HostReply(host="host-1", resend_nodes=True))
    await world.beat()
    before = len(world.conductor.beats)
    beat = await world.beat()
    assert len(world.conductor.beats) == before + 2
    assert len(beat.nodes) == 1


async def test_what_a_lost_beat_told_is_told_again(world: World) -> None:
    await world.carry_out(order())
    world.conductor.away = True
    await world.clock.advance(6)
    world.conductor.away = False
    await world.clock.advance(2)
    assert len(world.conductor.last_beat().nodes) == 1


async def test_beats_list_what_is_in_hand(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "hang"})
    build = order(epoch=7)
    await world.send(build)
    world.manager._agents["host-1"].host.progress("i-1", 40)
    beat = await world.beat()
    assert [(each.operation_id, each.epoch, each.progress) for each in beat.in_hand] == [(build.operation_id, 7, 40)]


async def test_dropped_work_is_stopped_and_undone(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "hang"})
    build = order()
    await world.send(build)
    await world.beat(reply=HostReply(host="host-1", drop=(build.operation_id,)))
    assert world.in_hand() == []
    assert await world.guest("i-1") is None
    assert world.conductor.reports.empty()
    assert world.manager._agents["host-1"].host.tracker(None).used()["VCPU"] == 0


async def test_what_is_being_reported_is_not_dropped(world: World) -> None:
    """The report may have been heard and its answer lost: the guest may be somebody's running server."""
    build = order()
    world.conductor.away = True
    await world.send(build)
    world.conductor.away = False
    agent = world.manager._agents["host-1"]
    agent.beat_heard(agent.beat(), HostReply(host="host-1", drop=(build.operation_id,)))
    await world.clock.advance(10)
    assert (await world.conductor.next_report()).outcome == "done"
    assert await world.guest("i-1") is not None


async def test_a_drop_means_what_the_beat_listed(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "delay", "delay": 10})
    build = order(epoch=2)
    await world.send(build)
    agent = world.manager._agents["host-1"]
    beat = agent.beat()
    await world.send(again(build, epoch=4))  # came back while the beat was under way
    agent.beat_heard(beat, HostReply(host="host-1", drop=(build.operation_id,)))
    await world.clock.advance(10)
    report = await world.conductor.next_report()
    assert (report.outcome, report.epoch) == ("done", 4)


async def test_a_departure_destroys_the_guest_and_is_answered(world: World) -> None:
    await world.carry_out(order(epoch=2))
    await world.beat(reply=HostReply(host="host-1", departures=(Departed("i-1", 3),)))
    assert await world.guest("i-1") is None
    assert (await world.beat()).departed == (Departed("i-1", 3),)
    assert (await world.beat()).departed == ()


async def test_a_departure_spares_a_newer_guest(world: World) -> None:
    await world.carry_out(order(epoch=5))
    await world.beat(reply=HostReply(host="host-1", departures=(Departed("i-1", 4),)))
    assert await world.guest("i-1") is not None
    assert (await world.beat()).departed == (Departed("i-1", 4),)


async def test_a_departure_of_the_unknown_is_answered(world: World) -> None:
    await world.beat(reply=HostReply(host="host-1", departures=(Departed("i-9", 4),)))
    assert (await world.beat()).departed == (Departed("i-9", 4),)


async def test_a_departure_stops_a_build(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "hang", "count": 1})
    await world.send(order(epoch=2))
    await world.beat(reply=HostReply(host="host-1", departures=(Departed("i-1", 2),)))
    assert await world.guest("i-1") is None
    assert world.conductor.reports.empty()
    await world.send(order(epoch=2))  # void since
    assert await world.guest("i-1") is None
    assert (await world.carry_out(order("delete", epoch=2))).outcome == "done"  # but a delete may come
    assert (await world.carry_out(order(epoch=3))).outcome == "done"


async def test_a_departure_that_fails_is_tried_again(world: World) -> None:
    await world.carry_out(order(epoch=2))
    await world.rules({"operation": "destroy", "kind": "fail", "count": 3})
    await world.beat(reply=HostReply(host="host-1", departures=(Departed("i-1", 3),)))
    await world.clock.advance(3)
    assert await world.guest("i-1") is not None
    await world.beat()
    assert await world.guest("i-1") is None


async def test_a_guest_that_stops_itself_is_told_at_once_and_with_the_beat(world: World) -> None:
    await world.carry_out(order(epoch=2))
    await world.beat()
    world.driver.guest_stops("i-1")
    await settle()
    event = world.conductor.events[-1]
    assert (event.instance_uuid, event.epoch, event.power_state) == ("i-1", 2, 4)
    beat = await world.beat()
    assert [(each.instance_uuid, each.power_state) for each in beat.power_changes] == [("i-1", 4)]
    assert not (await world.beat()).power_changes


async def test_what_an_order_does_is_no_event(world: World) -> None:
    await world.carry_out(order(epoch=2))
    await world.carry_out(order("stop", epoch=3))
    await world.carry_out(order("start", epoch=4))
    assert world.conductor.events == []
    assert not (await world.beat()).power_changes


async def test_the_periodic_update_mends_drift(world: World) -> None:
    await world.carry_out(order(uuid="i-1"))
    await world.carry_out(order(uuid="i-2"))
    await world.rules({"operation": "spawn", "kind": "delay", "delay": 500, "name": "i-3"})
    await world.send(order(uuid="i-3"))
    await world.beat()
    await world.driver.destroy("i-1")  # by hand, behind the agent's back
    await world.clock.advance(65)
    tracker = world.manager._agents["host-1"].host.tracker(None)
    assert not tracker.holds("i-1")
    assert tracker.holds("i-2")
    assert tracker.holds("i-3")  # being built
    assert any(beat.hosts[0].nodes and beat.hosts[0].nodes[0].vcpus_used == 2 for beat in world.conductor.beats)


async def test_questions(world: World) -> None:
    await world.carry_out(order(epoch=2))
    guests = await world.compute.list_guests(CONTEXT, "host-1")
    assert [(guest.uuid, guest.epoch) for guest in guests] == [("i-1", 2)]
    assert "server-i-1" in await world.compute.get_console_output(CONTEXT, "host-1", "i-1")
    assert len((await world.compute.get_console_output(CONTEXT, "host-1", "i-1", 2)).splitlines()) == 2
    assert "load average" in await world.compute.get_host_uptime(CONTEXT, "host-1")
    await world.rules({"operation": "spawn", "kind": "fail", "count": 0})
    assert (await world.compute.fault_rules(CONTEXT, "host-1"))[0]["kind"] == "fail"


async def test_a_drop_does_not_interrupt_the_undoing(world: World) -> None:
    await world.rules({"operation": "spawn", "kind": "fail"}, {"operation": "destroy", "kind": "delay", "delay": 8})
    build = order()
    await world.send(build)
    await world.beat(reply=HostReply(host="host-1", drop=(build.operation_id,)))
    assert await world.guest("i-1") is not None
    await world.clock.advance(8)
    assert await world.guest("i-1") is None
    assert world.conductor.reports.empty()
    assert world.in_hand() == []
