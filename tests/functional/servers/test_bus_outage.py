"""The bus stands still for longer than it takes to believe that hosts are dead. It costs time and nothing else."""

import asyncio
import time
from typing import Any

import pytest

from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Method, P, R, Target
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.rpc.wrapper import BusWrapper
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

pytestmark = [
    pytest.mark.thorough,
    only_in_one_process("stops the bus; tests/integration/test_outage.py stops the broker"),
]


class PausedBus(BusWrapper):
    """Delivers nothing while it is paused, as a broker that stands still: senders wait, and give up in the end."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.running = asyncio.Event()
        self.running.set()
        self.decided: asyncio.Event | None = None  # if it is there, schedulers are reached also during a pause,
        self.reply = asyncio.Event()  # and the error of one waits for this

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        if not await self._delivers(0.2):
            raise BusUnavailable("The broker does not confirm.")
        await super().cast(target, method, params, context=context)

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        if method.label == "scheduler.select_destinations" and self.decided is not None:
            try:
                return await super().call(target, method, params, context=context, timeout=timeout)
            except NoValidHost:
                self.decided.set()
                await self.reply.wait()
                raise
        if not await self._delivers(min(timeout, 0.5)):
            raise CallTimeout(f"{method.label} did not answer in time")
        return await super().call(target, method, params, context=context, timeout=timeout)

    async def _delivers(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.running.wait(), seconds)
        except TimeoutError:
            return False
        return True


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
            await cloud.until(lambda: _look_dead(cloud, user), "all hosts to look dead and all leases to be over")
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
        await cloud.until(lambda: _look_dead(cloud, user), "all hosts to look dead")
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
        await cloud.until(lambda: _look_dead(cloud, user), "all hosts to look dead")
        id = await user.create(availability_zone="nova")
    finally:
        buses[0].running.set()
    assert "fault" not in await user.wait_for(id, "ACTIVE")


async def _are_up(user: Caller) -> bool | None:
    services = (await user.admin.get("/os-services?binary=nova-compute"))["services"]
    return True if all(service["state"] == "up" for service in services) else None


async def _look_dead(cloud: Cloud, user: Caller) -> bool | None:
    services = (await user.admin.get("/os-services?binary=nova-compute"))["services"]
    now = micros(time.time())
    leased = [row for row in await cloud.open_operations() if row.owner and row.owner.startswith("host:")]
    over = all(row.lease_until < now for row in leased)
    return True if over and all(service["state"] == "down" for service in services) else None
