"""The bus stands still for longer than it takes to believe that hosts are dead. It costs time and nothing else."""

import asyncio

import pytest

from micronova.rpc.bus import Bus
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.paused_bus import PausedBus, look_dead

pytestmark = [
    pytest.mark.thorough,
    only_in_one_process("stops the bus; tests/integration/test_outage.py stops the broker"),
]


buses: list[PausedBus] = []


def _wrap(bus: Bus) -> Bus:
    buses[:] = [PausedBus(bus)]
    return buses[0]


CLOUD = CloudOptions(
    hosts=3,
    wrap_bus=_wrap,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


async def test_servers_are_built_on_their_hosts_after_the_outage(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "delay", "delay": 3.0}):
        building = [await user.create() for _ in range(6)]
        for id in building:
            await user.wait_for(id, "BUILD", task="spawning")
        hosts = {id: await user.host_of(id) for id in building}
        buses[0].running.clear()
        try:
            waiting = [await user.create() for _ in range(3)]
            await cloud.until(lambda: look_dead(cloud, user), "all hosts to look dead and all leases to be over")
        finally:
            buses[0].running.set()
        for id in [*building, *waiting]:
            assert "fault" not in await user.wait_for(id, "ACTIVE")
        assert {id: await user.host_of(id) for id in building} == hosts, "no build was taken from a living host"
    await cloud.assert_clean()


async def test_heartbeats_that_arrive_after_the_scheduler_decided(cloud: Cloud, user: Caller) -> None:
    """The scheduler found all hosts down; when its answer comes, they are up again, and the server is built."""
    bus = buses[0]
    bus.running.clear()
    try:
        await cloud.until(lambda: look_dead(cloud, user), "all hosts to look dead")
        bus.decided = asyncio.Event()
        id = await user.create()
        async with asyncio.timeout(30):
            await bus.decided.wait()
        bus.running.set()
        await cloud.until(lambda: _are_up(user), "all hosts to be up")
    finally:
        bus.running.set()
        bus.decided = None
        bus.reply.set()
    assert "fault" not in await user.wait_for(id, "ACTIVE")


async def test_a_server_with_an_availability_zone_is_accepted_during_the_outage(cloud: Cloud, user: Caller) -> None:
    buses[0].running.clear()
    try:
        await cloud.until(lambda: look_dead(cloud, user), "all hosts to look dead")
        id = await user.create(availability_zone="nova")
    finally:
        buses[0].running.set()
    assert "fault" not in await user.wait_for(id, "ACTIVE")


async def _are_up(user: Caller) -> bool | None:
    services = (await user.admin.get("/os-services?binary=nova-compute"))["services"]
    return True if all(service["state"] == "up" for service in services) else None
