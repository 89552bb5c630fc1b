"""Attaching and detaching interfaces on a host: when it waits for the network, and what it undoes."""

from typing import Any

from micronova.objects.network import VIF
from micronova.objects.orders import ReportReply, WorkOrder
from tests.clocks import settle
from tests.unit.compute.agent_harness import AgentHarness, again, order

NIC = VIF(port_id="q", network_id="n", network_label="private", mac_address="fa:16:3e:00:00:02")


def _attach(**fields: Any) -> WorkOrder:
    return order("attach_interface", epoch=3, network_info=(NIC,), parameters={"port_id": "q"}, **fields)


async def _nics(harness: AgentHarness) -> list[str]:
    return [nic.mac_address for nic in (await harness.driver.get_diagnostics("i-1")).nic_details]


async def test_a_running_guest_waits_for_the_network(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    await harness.send(_attach(wait_for_plugs=("q",)))
    assert harness.conductor.reports.empty()
    await harness.plug("i-1", "q")
    assert (await harness.conductor.next_report()).outcome == "done"
    assert await _nics(harness) == [NIC.mac_address]


async def test_a_network_that_fails_fails_the_order(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    await harness.send(_attach(wait_for_plugs=("q",)))
    await harness.plug("i-1", "q", "failed")
    report = await harness.conductor.next_report()
    assert report.outcome == "error" and "q" in (report.message or "")
    assert await _nics(harness) == []


async def test_a_guest_that_does_not_run_waits_for_nothing(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    await harness.carry_out(order("stop", epoch=3))
    assert (await harness.carry_out(again(_attach(wait_for_plugs=("q",)), epoch=4))).outcome == "done"
    assert await _nics(harness) == [NIC.mac_address]


async def test_an_interface_is_unplugged_when_its_report_is_refused(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    harness.conductor.judge = lambda _: ReportReply(accepted=False)
    assert (await harness.carry_out(_attach())).outcome == "done"
    await settle()
    assert await _nics(harness) == []


async def test_an_order_that_does_not_describe_its_port(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    report = await harness.carry_out(again(_attach(), network_info=()))
    assert report.outcome == "error" and "q" in (report.message or "")


async def test_a_repeated_order_changes_nothing(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    one = _attach()
    assert (await harness.carry_out(one)).outcome == "done"
    await harness.send(one)
    assert await _nics(harness) == [NIC.mac_address]
    gone = order("detach_interface", epoch=4, network_info=(NIC,), parameters={"port_id": "q"})
    assert (await harness.carry_out(gone)).outcome == "done"
    assert (await harness.carry_out(again(gone, operation_id="op-x", epoch=5))).outcome == "done"
    assert await _nics(harness) == []


async def test_the_host_reports_the_capabilities_of_its_driver(harness: AgentHarness) -> None:
    beat = harness.conductor.last_beat()
    for node in (each for each in harness.conductor.beats[0].hosts[0].nodes):
        assert node.capabilities["supports_pause"] == "true"
        assert node.capabilities["supports_hot_plug"] == "true"
    assert beat.host == "host-1"
