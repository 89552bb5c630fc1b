"""The database was restored: it offers orders again that the host has carried out, and newer ones have followed."""

from typing import Any

import pytest

from micronova.compute.agent import NEWER_GUEST
from micronova.objects.flavor import Flavor
from micronova.objects.orders import Departure, HostReply, MoveOrder, Report, WorkOrder
from tests.clocks import settle
from tests.unit.compute.agent_harness import TINY, AgentHarness, order

SMALL = Flavor(id="2", name="m1.small", ram=1024, vcpus=1, disk=2)
SAME_HOST = MoveOrder(source="host-1", destination="host-1", old_flavor=TINY)


async def offered_again(harness: AgentHarness, former: WorkOrder) -> Report:
    """Return the report of an order that the replies to two heartbeats bring: the host refuses the first."""
    for _ in range(2):
        await harness.beat(reply=HostReply(host="host-1", orders=(former,)))
        await settle()
    return await harness.conductor.next_report()


async def test_a_finished_resize_can_still_be_reverted(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    resize = order("resize_instance", epoch=4, move=SAME_HOST, instance_flavor=SMALL)
    await harness.carry_out(resize)
    await harness.carry_out(order("finish_resize", epoch=5, move=SAME_HOST, instance_flavor=SMALL))
    report = await offered_again(harness, resize)
    assert (report.outcome, report.message) == ("error", NEWER_GUEST)
    guest = await harness.guest("i-1")
    assert guest is not None and (guest.power_state, guest.epoch) == (1, 5)
    assert harness.driver._simulated.require("i-1").previous is not None


@pytest.mark.parametrize("kind", ["finish_revert_resize", "confirm_resize"])
async def test_the_end_of_a_former_resize_does_not_end_the_newer_one(harness: AgentHarness, kind: str) -> None:
    await harness.carry_out(order(epoch=2))
    epoch = 2
    former = None
    for _ in range(2):
        for step in ("resize_instance", "finish_resize"):
            epoch += 1
            await harness.carry_out(order(step, epoch=epoch, move=SAME_HOST, instance_flavor=SMALL))
        if former is None:
            epoch += 1
            former = order(kind, epoch=epoch, move=SAME_HOST, instance_flavor=TINY)
            assert (await harness.carry_out(former)).outcome == "done"
    assert former is not None
    report = await offered_again(harness, former)
    assert (report.outcome, report.message) == ("error", NEWER_GUEST)
    assert harness.driver._simulated.require("i-1").previous is not None


@pytest.mark.parametrize("kind", ["build", "rebuild", "finish_resize", "post_live_migration_at_destination"])
async def test_no_second_guest_is_made_of_one_that_has_left(harness: AgentHarness, kind: str) -> None:
    """It runs on another host by now, with its ports and volumes."""
    await harness.carry_out(order(epoch=2))
    move = MoveOrder(source="host-2", destination="host-1", old_flavor=TINY)
    more: dict[str, Any] = {} if kind in ("build", "rebuild") else {"move": move}
    former = order(kind, epoch=3, **more)
    await harness.beat(reply=HostReply(host="host-1", departures=(Departure("i-1", 4),)))
    await settle()
    assert await harness.guest("i-1") is None
    report = await offered_again(harness, former)
    assert (report.outcome, report.message) == ("error", NEWER_GUEST)
    assert await harness.guest("i-1") is None
