"""An order that arrives after its operation was cancelled by a request that sends no order: it destroys nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from micronova.objects.errors import Stale
from micronova.rpc.bus import Bus
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image
from tests.functional.servers.held_orders import HoldingBus, no_orders_by_heartbeat

pytestmark = [pytest.mark.thorough, only_in_one_process("holds orders back")]
buses: list[HoldingBus] = []


def _wrap(bus: Bus) -> Bus:
    buses[:] = [HoldingBus(bus)]
    return buses[0]


CLOUD = CloudOptions(
    hosts=2,
    roles=("image",),
    wrap_bus=_wrap,
    settings={"default": {"shelved_offload_time": -1, "allow_resize_to_same_host": True}},
)


async def _rebuild(user: Caller, id: str) -> None:
    await user.act(id, "rebuild", {"imageRef": (await user.show(id))["image"]["id"]})


async def _offload(user: Caller, id: str) -> None:
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED")
    await user.admin.act(id, "shelveOffload")


@pytest.mark.parametrize(
    "begin, order",
    [(_rebuild, "rebuild"), (_offload, "shelve_offload")],
    ids=["rebuild", "offload"],
)
async def test_the_guest_stays_as_it_is(
    cloud: OneProcess,
    user: Caller,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[Caller, str], Awaitable[Any]],
    order: str,
) -> None:
    no_orders_by_heartbeat(monkeypatch)
    id = (await user.boot(imageRef=await image(user)))["id"]
    home = await user.host_of(id)
    buses[0].hold(order)
    await begin(user, id)
    await buses[0].held()
    before = (await cloud.guests(home))[id]
    await user.admin.act(id, "os-resetState", {"state": "active"})
    answer = asyncio.create_task(buses[0].asked())
    await buses[0].release()
    assert not (await answer).accepted
    await user.act(id, "os-stop")  # it waits for the work on the late order
    await user.wait_for(id, "SHUTOFF")
    after = (await cloud.guests(home))[id]
    assert (after.epoch, after.vcpus, after.memory_mb) == (before.epoch, before.vcpus, before.memory_mb)
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")


async def test_a_claim_that_comes_after_the_move_was_given_up(cloud: OneProcess, user: Caller) -> None:
    """A scheduler stands still between its decision and its claim; the server keeps its claim where its guest is."""
    id = (await user.boot(imageRef=await image(user)))["id"]
    home = await user.host_of(id)
    [other] = set(cloud.hosts) - {home}
    [service] = (await user.admin.get(f"/os-services?binary=nova-compute&host={other}"))["services"]
    late = buses[0].delay_schedule()
    await user.admin.act(id, "migrate")
    await buses[0].held()
    await user.admin.put(f"/os-services/{service['id']}", {"status": "disabled"})
    await user.wait_for(id, "ACTIVE")
    await user.admin.put(f"/os-services/{service['id']}", {"status": "enabled"})
    with pytest.raises(Stale):
        await late()
    await cloud.assert_clean()
