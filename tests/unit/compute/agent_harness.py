"""A harness for the compute agent: a conductor that records messages, and functions to make orders."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from micronova.compute.manager import ComputeManager
from micronova.compute.rpcapi import ComputeAPI, InstanceEvent
from micronova.conductor.rpcapi import HOSTS, HostConductorAPI, Ping, PluggedPorts, PluggedPortsRequest, Pong
from micronova.objects.context import Context
from micronova.objects.errors import StaleHeartbeat, Unavailable
from micronova.objects.flavor import Flavor
from micronova.objects.orders import (
    Guest,
    GuestsOff,
    GuestsToStart,
    Heartbeat,
    HeartbeatReply,
    HostBeat,
    HostReply,
    InstanceSpec,
    Progress,
    ProgressReply,
    Report,
    ReportReply,
    WorkOrder,
)
from micronova.rpc.bus import Bus, connect
from micronova.virt.driver import Driver
from micronova.virt.loader import DriverSetup, create_drivers
from tests.clocks import ManualClock, settle
from tests.compute_settings import compute_settings

CONTEXT = Context(request_id="req-1")
TINY = Flavor(id="1", name="m1.tiny", ram=512, vcpus=1, disk=1)


class FakeConductor:
    """Records the messages of hosts, and answers as the test has set."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.beats: list[Heartbeat] = []
        self.replies: deque[HostReply] = deque()
        self.unavailable = False
        self.newest = 0
        self.plugged: set[str] = set()
        self.questions: list[PluggedPortsRequest] = []
        self.failures = 0
        self.now = 0.0
        self.interval = 0.0
        self.progresses: list[Progress] = []
        self.judge_progress: Callable[[Progress], ProgressReply] = lambda _: ProgressReply(accepted=True)
        self.judge: Callable[[Report], ReportReply] = lambda _: ReportReply(accepted=True)

    async def report(self, context: Context, params: Report) -> ReportReply:
        self._check_available()
        self.reports.put_nowait(params)
        return self.judge(params)

    async def progress(self, context: Context, params: Progress) -> ProgressReply:
        self._check_available()
        self.progresses.append(params)
        return self.judge_progress(params)

    async def heartbeat(self, context: Context, params: Heartbeat) -> HeartbeatReply:
        self._check_available()
        if params.number < self.newest:
            raise StaleHeartbeat("A newer heartbeat is known.", newest=self.newest)
        self.beats.append(params)
        hosts = (self.replies.popleft(),) if self.replies else ()
        return HeartbeatReply(hosts=hosts, now=self.now, interval=self.interval)

    async def ping(self, context: Context, params: Ping) -> Pong:
        return Pong()

    async def plugged_ports(self, context: Context, params: PluggedPortsRequest) -> PluggedPorts:
        self._check_available()
        self.questions.append(params)
        return PluggedPorts(tuple(port for port in params.ports if port in self.plugged))

    async def start_guests_after_host_boot(self, context: Context, params: GuestsOff) -> GuestsToStart:
        self._check_available()
        return GuestsToStart(instance_uuids=())

    async def next_report(self) -> Report:
        """Return the next report; wait for it."""
        return await asyncio.wait_for(self.reports.get(), 20)

    def last_beat(self, host: str = "host-1") -> HostBeat:
        """Return a host's part of the newest heartbeat."""
        return next(beat for beat in self.beats[-1].hosts if beat.host == host)

    def _check_available(self) -> None:
        if self.unavailable:
            self.failures += 1
            raise Unavailable("The database is unavailable.")


class AgentHarness:
    """One agent process and a fake conductor."""

    def __init__(self, state_dir: Path | None = None, **settings: Any) -> None:
        self.clock = ManualClock()
        self.random = Random(7)
        self.settings = compute_settings(**{"shutdown_grace": 1.0, **settings})
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
        await self.bus.serve(HOSTS, self.conductor)
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
        self.manager = ComputeManager(
            self.settings,
            self.drivers,
            self.agent_bus,
            HostConductorAPI(self.agent_bus, self.clock, self.random),
            self.clock,
            self.random,
        )
        await self.manager.start()
        await settle()

    async def kill_agent(self) -> None:
        """End the agent as kill -9 does: nothing of it continues, it sends no message."""
        manager = self.manager
        for agent in manager._agents.values():
            agent.refuse_orders()
        for loop in manager._loops:
            loop.cancel()
        tasks = [task for agent in manager._agents.values() for task in agent.tasks()]
        for server in manager._servers:
            await server.stop(0.0)
        # A killed process undoes nothing: freeze its driver, then cancel the tasks.
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
        """Advance to the next heartbeat, reply to it, and return it."""
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

    def running_operations(self) -> list[str]:
        agent = self.manager._agents["host-1"]
        return [each.operation_id for each in agent.host.work_registry.running_orders()]


_operations = itertools.count(1)


def order(kind: str = "build", uuid: str = "i-1", epoch: int = 2, **fields: Any) -> WorkOrder:
    """Return an order; fields of the instance are given as `instance_…`."""
    instance: dict[str, Any] = {
        "uuid": uuid,
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
    """Return the same order with some fields changed."""
    return msgspec.structs.replace(an_order, **changes)


def _freeze(driver: Any) -> None:
    async def never(*_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    driver.destroy = never
