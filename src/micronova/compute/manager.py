"""The compute role: the server end of the messages to its hosts, their heartbeat, start and end."""

import asyncio
import itertools
import logging
from collections.abc import Mapping
from random import Random

from micronova.compute.agent import HostAgent
from micronova.compute.boot_watch import look_interval
from micronova.compute.conductor_client import ConductorClient
from micronova.compute.guest_consoles import find_console
from micronova.compute.host import Host
from micronova.compute.rpcapi import (
    COMPUTE,
    ConsoleOutput,
    ConsoleRequest,
    ConsoleWanted,
    DiagnosticsRequest,
    FaultRules,
    GuestList,
    HostUptimeText,
    InstanceEvent,
    Nothing,
)
from micronova.compute.settings import ComputeSettings
from micronova.compute.waiting import wait_for_all
from micronova.console.relay import ConsoleRelay
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import NotSupported
from micronova.objects.orders import Heartbeat, HostBeat, WorkOrder
from micronova.rpc.bus import Bus, Server
from micronova.rpc.contract import Context
from micronova.virt.driver import ConsoleLog, Diagnostics, Driver, FaultInjection, HostUptime

log = logging.getLogger(__name__)

HOSTS_PER_BEAT = 500
"""A process that simulates more hosts sends several messages, so that none becomes huge."""
RETRY_PAUSE = 0.2
"""After a heartbeat that nobody heard; doubled up to the interval. Short, for roles that start together."""
UNDO_TIME = 5.0
"""How long work that was cancelled at the end may take to undo itself."""
LAST_BEAT_TIMEOUT = 2.0


class HostManager:
    """Handles the messages to one host. An order is taken in hand and the handler returns."""

    def __init__(self, agent: HostAgent, relay: ConsoleRelay) -> None:
        self._agent = agent
        self._host = agent.host
        self._relay = relay

    async def build_and_run_instance(self, context: Context, order: WorkOrder) -> None:
        """Build a guest and let it run."""
        self._agent.receive(order, context)

    async def terminate_instance(self, context: Context, order: WorkOrder) -> None:
        """Remove a guest."""
        self._agent.receive(order, context)

    async def stop_instance(self, context: Context, order: WorkOrder) -> None:
        """Shut a guest down."""
        self._agent.receive(order, context)

    async def start_instance(self, context: Context, order: WorkOrder) -> None:
        """Let a guest run."""
        self._agent.receive(order, context)

    async def reboot_instance(self, context: Context, order: WorkOrder) -> None:
        """Restart a guest."""
        self._agent.receive(order, context)

    async def pause_instance(self, context: Context, order: WorkOrder) -> None:
        """Let a guest run no further."""
        self._agent.receive(order, context)

    async def unpause_instance(self, context: Context, order: WorkOrder) -> None:
        """Let a guest go on."""
        self._agent.receive(order, context)

    async def suspend_instance(self, context: Context, order: WorkOrder) -> None:
        """Put a guest's memory away."""
        self._agent.receive(order, context)

    async def resume_instance(self, context: Context, order: WorkOrder) -> None:
        """Let a guest go on where it was suspended."""
        self._agent.receive(order, context)

    async def attach_interface(self, context: Context, order: WorkOrder) -> None:
        """Plug an interface into a guest."""
        self._agent.receive(order, context)

    async def detach_interface(self, context: Context, order: WorkOrder) -> None:
        """Unplug an interface of a guest."""
        self._agent.receive(order, context)

    async def external_instance_event(self, context: Context, event: InstanceEvent) -> None:
        """Take what a neighbour tells of an instance."""
        if event.tag:
            self._host.plugs.event(event.instance_uuid, event.name, event.tag, event.status)

    async def get_console_output(self, context: Context, request: ConsoleRequest) -> ConsoleOutput:
        """Read a guest's console log."""
        driver = self._host.driver
        if not isinstance(driver, ConsoleLog):
            raise NotSupported(f"The host {self._host.name} keeps no console logs.")
        return ConsoleOutput(await driver.get_console_output(request.instance_uuid, request.length))

    async def get_console(self, context: Context, wanted: ConsoleWanted) -> ConsoleEndpoint:
        """Say where a guest's screen or serial port is."""
        host = self._host
        return await find_console(host.name, host.driver, self._relay, wanted.instance_uuid, wanted.protocol)

    async def get_diagnostics(self, context: Context, request: DiagnosticsRequest) -> GuestDiagnostics:
        """Measure a guest."""
        driver = self._host.driver
        if not isinstance(driver, Diagnostics):
            raise NotSupported(f"The host {self._host.name} does not measure its guests.")
        return await driver.get_diagnostics(request.instance_uuid)

    async def list_guests(self, context: Context, request: Nothing) -> GuestList:
        """List what the hypervisor really holds."""
        return GuestList(tuple(await self._host.driver.list_guests()))

    async def get_host_uptime(self, context: Context, request: Nothing) -> HostUptimeText:
        """Say how long the host is up."""
        driver = self._host.driver
        if not isinstance(driver, HostUptime):
            raise NotSupported(f"The host {self._host.name} does not know how long it is up.")
        return HostUptimeText(await driver.get_host_uptime())

    async def fault_rules(self, context: Context, request: FaultRules) -> FaultRules:
        """Replace or list the fault rules of a simulated host."""
        driver = self._host.driver
        if not isinstance(driver, FaultInjection):
            raise NotSupported(f"The host {self._host.name} is real: it does not fail on request.")
        if request.rules is not None:
            driver.set_fault_rules(request.rules)
        return FaultRules(driver.fault_rules())


class ComputeManager:
    """Runs the agent of one host, or of many simulated ones."""

    def __init__(
        self,
        settings: ComputeSettings,
        hosts: Mapping[str, Driver],
        bus: Bus,
        clock: Clock,
        random: Random,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._random = random
        self._conductor = ConductorClient(bus, clock, random)
        self._relay = ConsoleRelay(settings.console_relay_listen, clock, random)
        self._agents = {
            name: HostAgent(Host(name, driver, settings, clock), self._conductor) for name, driver in hosts.items()
        }
        self._servers: list[Server] = []
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find what the hypervisors hold, take orders, and begin to send heartbeats."""
        await self._relay.start()
        for agent in self._agents.values():
            await agent.host.start()
        for name, agent in self._agents.items():
            manager = HostManager(agent, self._relay)
            self._servers.append(await self._bus.serve(COMPUTE, manager, host=name, shared=False))
        self._loops = [
            asyncio.create_task(self._send_heartbeats(), name="compute-heartbeat"),
            asyncio.create_task(self._update_resources(), name="compute-resources"),
        ]
        if self._settings.boot_timeout > 0:
            self._loops.append(asyncio.create_task(self._watch_boots(), name="compute-boots"))

    async def stop(self) -> None:
        """Take no more orders, let work finish within the grace time, undo the rest, give the leases back."""
        agents = self._agents.values()
        for agent in agents:
            agent.refuse_orders()
        # Heartbeats and events go on meanwhile: work in hand needs both.
        await self._wait(self._settings.shutdown_grace)
        for agent in agents:
            agent.cancel()
        await self._wait(UNDO_TIME)
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))
        for agent in agents:
            agent.abandon()
        await self._wait(UNDO_TIME)
        await self._relay.stop()
        for agent in agents:
            await agent.host.driver.close()
        await self._last_beat()

    @property
    def synchronised(self) -> bool:
        """Whether a conductor has answered for every host: from then on orders are taken as they come."""
        return all(agent.synchronised for agent in self._agents.values())

    def builds_in_flight(self) -> int:
        """How many guests are being built on the hosts of this process."""
        return sum(work.order.kind == "build" for agent in self._agents.values() for work in agent.host.book.all())

    async def beat(self) -> bool:
        """Send one heartbeat for all hosts; say whether it was heard."""
        heard = True
        agents = iter(self._agents.values())
        while part := list(itertools.islice(agents, HOSTS_PER_BEAT)):
            beats = [(agent, agent.beat()) for agent in part]
            try:
                reply = await self._conductor.heartbeat(Heartbeat(hosts=tuple(beat for _, beat in beats)))
            except Exception as error:  # whatever it is, the next beat is sent
                log.warning("no conductor heard the heartbeat: %s", error)
                for agent, beat in beats:
                    agent.beat_lost(beat)
                heard = False
                continue
            replies = {answer.host: answer for answer in reply.hosts}
            for agent, beat in beats:
                agent.beat_heard(beat, replies.get(beat.host), reply.now)
        return heard

    async def _send_heartbeats(self) -> None:
        interval = self._settings.report_interval
        pause = RETRY_PAUSE
        hurried = False
        while True:
            try:
                heard = await self.beat()
            except Exception:
                # Without heartbeats the host is dead to the cloud: whatever it is, the next one is sent.
                log.exception("the heartbeat failed")
                heard = False
            # Nodes that the database does not know can take no instance: they are sent at once, but once.
            hurried = heard and not hurried and any(agent.wants_beat for agent in self._agents.values())
            if heard:
                pause = RETRY_PAUSE
                if not hurried:
                    await self._clock.sleep(interval)
            else:
                await self._clock.sleep(pause * self._random.uniform(0.5, 1.0))
                pause = min(interval, pause * 2)

    async def _update_resources(self) -> None:
        while True:
            await self._clock.sleep(self._settings.resource_interval)
            for name, agent in self._agents.items():
                try:
                    await agent.host.update_available_resource()
                except Exception:
                    log.exception("host %s: its resources cannot be told", name)

    async def _watch_boots(self) -> None:
        interval = look_interval(self._settings)
        while True:
            await self._clock.sleep(interval)
            for name, agent in self._agents.items():
                try:
                    await agent.host.boots.look()
                except Exception as error:  # drivers may raise anything; the next look tells
                    log.warning("host %s: whether its guests boot cannot be told: %s", name, error)

    async def _wait(self, seconds: float) -> None:
        await wait_for_all(self._clock, [task for agent in self._agents.values() for task in agent.tasks()], seconds)

    async def _last_beat(self) -> None:
        hosts = tuple(HostBeat(host=name, stopping=True) for name in self._agents)
        try:
            await self._conductor.heartbeat(Heartbeat(hosts=hosts), LAST_BEAT_TIMEOUT)
        except Exception as error:  # the agent stops in any case
            log.warning("the leases could not be given back, they will run out: %s", error)
