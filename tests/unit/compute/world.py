"""A small world around the compute agent: a clock by hand, a conductor that records, and orders to give."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from micronova.compute.manager import ComputeManager
from micronova.compute.rpcapi import ComputeAPI, InstanceEvent
from micronova.compute.settings import ComputeSettings
from micronova.conductor.rpcapi import HOST, GuestEvent, ReportReply
from micronova.objects.errors import Unavailable
from micronova.objects.flavor import Flavor
from micronova.objects.orders import (
    Guest,
    Heartbeat,
    HeartbeatReply,
    HostBeat,
    HostReply,
    InstanceSpec,
    Report,
    WorkOrder,
)
from micronova.rpc.bus import Bus, connect
from micronova.rpc.contract import Context
from micronova.virt.driver import Driver
from micronova.virt.loader import DriverSetup, create_drivers

CONTEXT = Context(request_id="req-1")
TINY = Flavor(id="1", name="m1.tiny", ram=512, vcpus=1, disk=1)


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(200):
        await asyncio.sleep(0)


class ManualClock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self._time = 1_000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._time + 1_700_000_000.0

    def monotonic(self) -> float:
        return self._time

    async def sleep(self, seconds: float) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._time + seconds, next(self._order), sleeper))
        await sleeper

    async def advance(self, seconds: float) -> None:
        """Let time pass, stopping at everybody who wakes up."""
        await settle()
        until = self._time + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            when, _, sleeper = heapq.heappop(self._sleepers)
            self._time = max(self._time, when)
            if not sleeper.done():
                sleeper.set_result(None)
                await settle()
        self._time = until
        await settle()


class FakeConductor:
    """Hears hosts: records everything, and answers as the test wants."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.beats: list[Heartbeat] = []
        self.events: list[GuestEvent] = []
        self.replies: deque[HostReply] = deque()
        self.away = False
        self.failures = 0
        self.now = 0.0
        self.judge: Callable[[Report], ReportReply] = lambda _: ReportReply(accepted=True)

    async def report(self, context: Context, params: Report) -> ReportReply:
        self._answering()
        self.reports.put_nowait(params)
        return self.judge(params)

    async def heartbeat(self, context: Context, params: Heartbeat) -> HeartbeatReply:
        self._answering()
        self.beats.append(params)
        hosts = (self.replies.popleft(),) if self.replies else ()
        return HeartbeatReply(hosts=hosts, now=self.now)

    async def guest_event(self, context: Context, params: GuestEvent) -> None:
        self.events.append(params)

    async def next_report(self) -> Report:
        """Wait for a report."""
        return await asyncio.wait_for(self.reports.get(), 20)

    def last_beat(self, host: str = "host-1") -> HostBeat:
        """The newest beat of a host."""
        return next(beat for beat in self.beats[-1].hosts if beat.host == host)

    def _answering(self) -> None:
        if self.away:
            self.failures += 1
            raise Unavailable("The database is away.")


class World:
    """One agent process with its conductor; `restart(kill=True)` is what kill -9 leaves."""

    def __init__(self, state_dir: Path | None = None, **settings: Any) -> None:
        self.clock = ManualClock()
        self.random = Random(7)
        self.settings = ComputeSettings(**{"shutdown_grace": 1.0, **settings})
        self.state_dir = state_dir
        self.options: dict[str, Any] = {}
        self.conductor = FakeConductor()
        self.bus: Bus = connect("local://compute-tests", clock=self.clock, random=self.random)
        self.compute = ComputeAPI(self.bus)
        self.driver: Any = None
        self.drivers: dict[str, Driver] = {}
        self.agent_bus: Bus = self.bus
        self.manager: ComputeManager

    async def start(self) -> None:
        await self.bus.start()
        await self.bus.serve(HOST, self.conductor)
        await self.start_agent()

    async def start_agent(self) -> None:
        if not self.drivers:
            setup = DriverSetup(
                host="host-1",
                cloud_id="cloud-1",
                clock=self.clock,
                random=self.random,
                state_dir=self.state_dir,
                options=self.options,
            )
            self.drivers = create_drivers("fake", setup)
        self.driver = next(iter(self.drivers.values()))
        self.agent_bus = connect("local://compute-tests", clock=self.clock, random=self.random, grace=0.0)
        await self.agent_bus.start()
        self.manager = ComputeManager(self.settings, self.drivers, self.agent_bus, self.clock, self.random)
        await self.manager.start()
        await settle()

    async def kill_agent(self) -> None:
        """End the agent as kill -9 would: nothing of it runs on, nothing is said."""
        manager = self.manager
        for agent in manager._agents.values():
            agent.refuse_orders()
        for loop in manager._loops:
            loop.cancel()
        tasks = [task for agent in manager._agents.values() for task in agent.tasks()]
        for server in manager._servers:
            await server.stop(0.0)
        # A killed process does not clean up after itself: freeze its driver, then let the tasks go.
        for driver in self.drivers.values():
            _freeze(driver)
        for task in tasks:
            task.cancel()
        await settle()
        for task in tasks:
            task.cancel()
        await settle()
        self.drivers = {}

    async def stop(self) -> None:
        stopping = asyncio.create_task(self.manager.stop())
        await self.clock.advance(60.0)
        await asyncio.wait_for(stopping, 20)

    async def close(self) -> None:
        await self.stop()
        await self.agent_bus.stop()
        await self.bus.stop()

    async def beat(self, *, reply: HostReply | None = None) -> HostBeat:
        """Let the next heartbeat happen, give what it says, and answer it."""
        before = len(self.conductor.beats)
        if reply is not None:
            self.conductor.replies.append(reply)
        await self.clock.advance(self.settings.report_interval)
        assert len(self.conductor.beats) > before
        return self.conductor.last_beat()

    async def rules(self, *rules: dict[str, Any]) -> None:
        await self.compute.fault_rules(CONTEXT, "host-1", list(rules))

    async def send(self, order: WorkOrder) -> None:
        await self.compute.send_order(CONTEXT, order)
        await settle()

    async def carry_out(self, order: WorkOrder) -> Report:
        await self.send(order)
        return await self.conductor.next_report()

    async def plug(self, uuid: str, port: str, status: str = "completed") -> None:
        event = InstanceEvent(instance_uuid=uuid, name="network-vif-plugged", tag=port, status=status)
        await self.compute.external_instance_event(CONTEXT, "host-1", event)
        await settle()

    async def guest(self, uuid: str) -> Guest | None:
        found: Guest | None = await self.driver.info(uuid)
        return found

    def in_hand(self) -> list[str]:
        agent = self.manager._agents["host-1"]
        return [each.operation_id for each in agent.host.book.in_hand()]


_operations = itertools.count(1)


def order(kind: str = "build", uuid: str = "i-1", epoch: int = 2, **fields: Any) -> WorkOrder:
    """Make an order; fields of the instance are given as `instance_…`."""
    instance: dict[str, Any] = {
        "uuid": uuid,
        "epoch": epoch,
        "project_id": "p",
        "user_id": "u",
        "name": f"server-{uuid}",
        "hostname": f"server-{uuid}",
        "flavor": TINY,
    }
    for name in [name for name in fields if name.startswith("instance_")]:
        instance[name.removeprefix("instance_")] = fields.pop(name)
    base: dict[str, Any] = {
        "operation_id": f"op-{next(_operations)}",
        "kind": kind,
        "epoch": epoch,
        "host": "host-1",
        "instance": InstanceSpec(**instance),
    }
    return WorkOrder(**{**base, **fields})


def again(an_order: WorkOrder, **changes: Any) -> WorkOrder:
    """The same order, a little different."""
    return msgspec.structs.replace(an_order, **changes)


def _freeze(driver: Any) -> None:
    async def never(*_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    driver.destroy = never
