"""Plugging interfaces on a host: what is waited for, and what is undone."""

from typing import Any

from micronova.conductor.rpcapi import ReportReply
from micronova.objects.network import VIF
from micronova.objects.orders import WorkOrder
from tests.unit.compute.world import World, again, order, settle

NIC = VIF(port_id="q", network_id="n", network_label="private", mac_address="fa:16:3e:00:00:02")


def _attach(**fields: Any) -> WorkOrder:
    return order("attach_interface", epoch=3, network_info=(NIC,), parameters={"port_id": "q"}, **fields)


async def _nics(world: World) -> list[str]:
    return [nic.mac_address for nic in (await world.driver.get_diagnostics("i-1")).nic_details]


async def test_a_running_guest_waits_for_the_network(world: World) -> None:
    await world.carry_out(order())
    await world.send(_attach(wait_for_plugs=("q",)))
    assert world.conductor.reports.empty()
    await world.plug("i-1", "q")
    assert (await world.conductor.next_report()).outcome == "done"
    assert await _nics(world) == [NIC.mac_address]


async def test_a_network_that_fails_ends_it(world: World) -> None:
    await world.carry_out(order())
    await world.send(_attach(wait_for_plugs=("q",)))
    await world.plug("i-1", "q", "failed")
    report = await world.conductor.next_report()
    assert report.outcome == "error" and "q" in (report.message or "")
    assert await _nics(world) == []


async def test_a_guest_that_does_not_run_waits_for_nothing(world: World) -> None:
    await world.carry_out(order())
    await world.carry_out(order("stop", epoch=3))
    assert (await world.carry_out(again(_attach(wait_for_plugs=("q",)), epoch=4))).outcome == "done"
    assert await _nics(world) == [NIC.mac_address]


async def test_what_nobody_wants_any_more_is_unplugged_again(world: World) -> None:
    await world.carry_out(order())
    world.conductor.judge = lambda _: ReportReply(accepted=False)
    assert (await world.carry_out(_attach())).outcome == "done"
    await settle()
    assert await _nics(world) == []


async def test_an_order_that_does_not_describe_its_port(world: World) -> None:
    await world.carry_out(order())
    report = await world.carry_out(again(_attach(), network_info=()))
    assert report.outcome == "error" and "q" in (report.message or "")


async def test_twice_is_once(world: World) -> None:
    await world.carry_out(order())
    one = _attach()
    assert (await world.carry_out(one)).outcome == "done"
    await world.send(one)
    assert await _nics(world) == [NIC.mac_address]
    gone = order("detach_interface", epoch=4, network_info=(NIC,), parameters={"port_id": "q"})
    assert (await world.carry_out(gone)).outcome == "done"
    assert (await world.carry_out(again(gone, operation_id="op-x", epoch=5))).outcome == "done"
    assert await _nics(world) == []


async def test_the_host_tells_what_its_driver_can(world: World) -> None:
    beat = world.conductor.last_beat()
    for node in (each for each in world.conductor.beats[0].hosts[0].nodes):
        assert node.capabilities["supports_pause"] == "true"
        assert node.capabilities["supports_hot_plug"] == "true"
    assert beat.host == "host-1"
