"""The compute role: the server end of the messages to its hosts, and their heartbeat."""

import asyncio
import functools
import itertools
import logging
import socket
from collections.abc import Awaitable, Collection, Iterable, Mapping
from random import Random
from typing import TypeVar

from micronova.compute import volume_statistics
from micronova.compute.agent import Conductor, HostAgent
from micronova.compute.boot_watch import check_interval
from micronova.compute.consoles import find_console
from micronova.compute.host import Host
from micronova.compute.rpcapi import (
    COMPUTE_INTERFACE,
    CacheImageReply,
    CacheImageRequest,
    ConsoleOutput,
    ConsoleOutputRequest,
    ConsoleRequest,
    DiagnosticsRequest,
    FaultRules,
    GuestList,
    HostUptimeText,
    InstanceEvent,
    LiveMigrationRequest,
    Nothing,
    QuiesceRequest,
    StopGuestRequest,
    UnquiesceReply,
    VolumeStatisticsReply,
    VolumeStatisticsRequest,
)
from micronova.compute.settings import ComputeAgentSettings
from micronova.compute.waiting import wait_for_all
from micronova.console.relay import ConsoleRelay
from micronova.http.image_uploads import ImageUploads
from micronova.objects.background import keep_running
from micronova.objects.clock import Clock, micros
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.context import Context
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import MicronovaError, OperationFailed, StaleHeartbeat
from micronova.objects.orders import Heartbeat, HostBeat, WorkOrder
from micronova.objects.service_names import SERVICE_VERSION
from micronova.rpc.bus import Bus
from micronova.rpc.server import Server
from micronova.virt.driver import (
    ConsoleLog,
    Diagnostics,
    Driver,
    DriverFailed,
    FaultInjection,
    HostUptime,
    LiveMigrate,
    capable_driver,
)

log = logging.getLogger(__name__)

HOSTS_PER_BEAT = 500
"""A process that simulates more hosts sends several messages."""
RETRY_PAUSE = 0.2
"""Seconds after a first heartbeat without a reply; doubled up to the interval. Short: roles start together."""
CHANGES_TOGETHER = 0.1
"""Seconds after a power change until the heartbeat that reports it: others may follow."""
UNDO_TIME = 5.0
"""Seconds that cancelled work has to undo itself when the agent stops."""
LAST_BEAT_TIMEOUT = 2.0
T = TypeVar("T")


async def _answer(asked: Awaitable[T]) -> T:
    """Return what the driver answers.

    The API does not know the errors of drivers: a failure of the hypervisor becomes one whose message users see.
    """
    try:
        return await asked
    except DriverFailed as error:
        raise OperationFailed(error.message) from error


class HostManager:
    """Handles the messages to one host."""

    def __init__(self, agent: HostAgent, relay: ConsoleRelay) -> None:
        self._agent = agent
        self._host = agent.host
        self._relay = relay

    async def execute_order(self, context: Context, order: WorkOrder) -> None:
        """Start to carry out an order; a report tells the conductor how it ends."""
        self._agent.accept_sent(order, context)

    async def external_instance_event(self, context: Context, event: InstanceEvent) -> None:
        """Pass an event about a port to the orders that wait for it."""
        if event.tag:
            self._host.plug_events.receive(event.instance_uuid, event.name, event.tag, event.status)

    async def get_console_output(self, context: Context, request: ConsoleOutputRequest) -> ConsoleOutput:
        """Read a guest's console log."""
        driver = capable_driver(self._host.driver, ConsoleLog, "The server's host keeps no console logs.")
        return ConsoleOutput(await _answer(driver.get_console_output(request.instance_uuid, request.length)))

    async def get_console(self, context: Context, request: ConsoleRequest) -> ConsoleEndpoint:
        """Return the address of a guest's screen or serial port."""
        host = self._host
        found = find_console(host.name, host.driver, self._relay, request.instance_uuid, request.protocol)
        return await _answer(found)

    async def get_diagnostics(self, context: Context, request: DiagnosticsRequest) -> GuestDiagnostics:
        """Return the diagnostics of a guest."""
        driver = capable_driver(self._host.driver, Diagnostics, "The server's host does not measure its guests.")
        return await _answer(driver.get_diagnostics(request.instance_uuid))

    async def get_volume_statistics(self, context: Context, request: VolumeStatisticsRequest) -> VolumeStatisticsReply:
        """Return what guests have read and written of their volumes."""
        found = {}
        for uuid in request.instance_uuids:
            try:
                found[uuid] = await volume_statistics.of_guest(self._host.driver, uuid)
            except MicronovaError as error:
                log.warning("the use of volumes by guest %s could not be measured: %s", uuid, error)
        return VolumeStatisticsReply(found)

    async def force_complete_live_migration(self, context: Context, request: LiveMigrationRequest) -> Nothing:
        """Let a live migration end soon; the order that carries it out goes on."""
        driver = capable_driver(self._host.driver, LiveMigrate, "The server's host cannot send running guests.")
        await _answer(driver.force_complete_live_migration(request.instance_uuid))
        return Nothing()

    async def quiesce_guest(self, context: Context, request: QuiesceRequest) -> Nothing:
        """Freeze the file systems of a guest."""
        await _answer(self._host.quiesced_guests.quiesce(request.instance_uuid))
        return Nothing()

    async def unquiesce_guest(self, context: Context, request: QuiesceRequest) -> UnquiesceReply:
        """Thaw the file systems of a guest."""
        return UnquiesceReply(await self._host.quiesced_guests.unquiesce(request.instance_uuid))

    async def list_guests(self, context: Context, request: Nothing) -> GuestList:
        """List the guests of the hypervisor."""
        return GuestList(tuple(await self._host.driver.list_guests()))

    async def stop_guest(self, context: Context, request: StopGuestRequest) -> Nothing:
        """Switch off the guest of a server that is deleted."""
        await self._agent.stop_guest(request.instance_uuid, request.epoch)
        return Nothing()

    async def get_host_uptime(self, context: Context, request: Nothing) -> HostUptimeText:
        """Return the uptime of the host."""
        driver = capable_driver(self._host.driver, HostUptime, f"The host {self._host.name} does not know its uptime.")
        return HostUptimeText(await _answer(driver.get_host_uptime()))

    async def cache_image(self, context: Context, request: CacheImageRequest) -> CacheImageReply:
        """Fetch an image to the host's cache."""
        return CacheImageReply(await self._host.image_caching.cache(request.image, request.url))

    async def fault_rules(self, context: Context, request: FaultRules) -> FaultRules:
        """Replace or list the fault rules of a simulated host."""
        driver = capable_driver(
            self._host.driver, FaultInjection, f"The host {self._host.name} is real: it does not fail on request."
        )
        if request.rules is not None:
            driver.set_fault_rules(request.rules)
        return FaultRules(driver.fault_rules())


class ComputeManager:
    """Runs the agent of one host, or of many simulated ones."""

    def __init__(
        self,
        settings: ComputeAgentSettings,
        hosts: Mapping[str, Driver],
        bus: Bus,
        conductor: Conductor,
        clock: Clock,
        random: Random,
        relay_socket: socket.socket | None = None,
        uploads: ImageUploads | None = None,
    ) -> None:
        """`relay_socket` is a Unix socket by which the console proxy of this machine reaches the consoles."""
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._random = random
        self._conductor = conductor
        self._relay = ConsoleRelay(settings.console_relay_listen, clock, random, relay_socket)
        self._agents = {
            name: HostAgent(Host(name, driver, settings, clock, uploads), self._conductor)
            for name, driver in hosts.items()
        }
        # Higher than that of an earlier agent on this host; if its clock was ahead, a conductor says so.
        self._number = micros(clock.now())
        self._answered_at = 0.0  # the time of the conductor's clock in the last reply
        self._changed: set[str] = set()  # hosts with power changes that were not sent yet
        self._power_changed = asyncio.Event()
        self._interval = self._pause = settings.report_interval  # seconds between heartbeats; until the next one
        self._servers: list[Server] = []
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read the guests of the hypervisors, accept orders, and start to send heartbeats."""
        await self._relay.start()
        for name, agent in self._agents.items():
            agent.host.on_power_change = functools.partial(self._note_power_change, name)
            await agent.host.start()
        for name, agent in self._agents.items():
            manager = HostManager(agent, self._relay)
            self._servers.append(await self._bus.serve(COMPUTE_INTERFACE, manager, host=name, shared=False))
        self._loops = [
            keep_running(self._send_heartbeats, name="compute-heartbeat", clock=self._clock),
            keep_running(self._update_resources, name="compute-resources", clock=self._clock),
        ]
        if self._settings.boot_timeout > 0:
            self._loops.append(keep_running(self._watch_boots, name="compute-boots", clock=self._clock))

    async def stop(self) -> None:
        """Refuse orders, let work finish within the grace time, undo the rest, and release the leases."""
        agents = self._agents.values()
        for agent in agents:
            agent.refuse_orders()
            agent.host.image_caching.cancel()
        # Heartbeats and events continue meanwhile: unfinished work needs both.
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
            await agent.host.quiesced_guests.stop(UNDO_TIME)
            await agent.host.driver.close()
        await self._last_beat()

    @property
    def synchronised(self) -> bool:
        """Whether a conductor has replied to a heartbeat of every host; orders are accepted from then on."""
        return all(agent.synchronised for agent in self._agents.values())

    def builds_in_flight(self) -> int:
        """Return how many guests are being built on the hosts of this process."""
        return sum(
            work.order.kind == "build" for agent in self._agents.values() for work in agent.host.work_registry.all()
        )

    async def beat(self, hosts: Collection[str] | None = None) -> bool:
        """Send one heartbeat for all hosts, or for some; return whether a conductor replied."""
        answered, interval = True, self._interval
        agents = iter([agent for name, agent in self._agents.items() if hosts is None or name in hosts])
        while part := list(itertools.islice(agents, HOSTS_PER_BEAT)):
            beats = [(agent, agent.beat()) for agent in part]
            try:
                reply = await self._conductor.heartbeat(self._heartbeat(beat for _, beat in beats))
            except Exception as error:  # the next heartbeat is sent in any case
                log.warning("no conductor answered the heartbeat; it is repeated: %s", error)
                if isinstance(error, StaleHeartbeat):
                    self._number = max(self._number, int(error.details["newest"]))
                for agent, beat in beats:
                    agent.beat_failed(beat)
                answered = False
                continue
            # A conductor asks for longer intervals when there are many hosts.
            interval = max(self._settings.report_interval, reply.interval)
            self._answered_at = reply.now
            replies = {answer.host: answer for answer in reply.hosts}
            for agent, beat in beats:
                agent.beat_answered(beat, replies.get(beat.host), reply.now)
        self._interval, before = interval, self._interval
        # Jitter, so that hosts that started together do not send their heartbeats together for ever.
        self._pause = self._random.uniform(min(before, 0.9 * interval), interval)
        return answered

    async def _send_heartbeats(self) -> None:
        pause = RETRY_PAUSE
        resends_nodes = False
        while True:
            try:
                answered = await self.beat()
                if answered:  # before that, orders are not accepted
                    for agent in self._agents.values():
                        await agent.start_guests_after_host_boot()
                # Nodes that the database does not know get no instances: they are sent again at once, but only once.
                resends_nodes = (
                    answered and not resends_nodes and any(agent.nodes_requested for agent in self._agents.values())
                )
                if answered and not resends_nodes:
                    await self._report_changes(self._pause)
            except Exception:
                # Without heartbeats the host counts as down, so the loop never ends.
                log.exception("the heartbeat failed and is repeated")
                answered = resends_nodes = False
            if answered:
                pause = RETRY_PAUSE
            else:
                await self._clock.sleep(pause * self._random.uniform(0.5, 1.0))
                pause = min(self._interval, pause * 2)

    def _heartbeat(self, beats: Iterable[HostBeat]) -> Heartbeat:
        self._number += 1
        return Heartbeat(
            hosts=tuple(beats),
            number=self._number,
            answered_at=self._answered_at,
            service_version=SERVICE_VERSION,
        )

    def _note_power_change(self, host: str) -> None:
        self._changed.add(host)
        self._power_changed.set()

    async def _report_changes(self, seconds: float) -> None:
        """Wait until the next heartbeat is due; meanwhile send one for hosts whose guests change their power state."""
        due = self._clock.monotonic() + seconds
        while (left := due - self._clock.monotonic()) > 0:
            waits = [asyncio.ensure_future(self._clock.sleep(left)), asyncio.ensure_future(self._power_changed.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self._power_changed.is_set():
                await self._clock.sleep(min(CHANGES_TOGETHER, max(0.0, due - self._clock.monotonic())))
                self._power_changed.clear()
                hosts, self._changed = self._changed, set()
                if due > self._clock.monotonic() and not await self.beat(hosts):
                    return

    async def _update_resources(self) -> None:
        while True:
            await self._clock.sleep(self._settings.resource_interval)
            for name, agent in self._agents.items():
                try:
                    await agent.host.update_available_resource()
                except Exception:
                    log.exception(
                        "host %s: its resources could not be read from the hypervisor; this is repeated", name
                    )

    async def _watch_boots(self) -> None:
        interval = check_interval(self._settings)
        while True:
            await self._clock.sleep(interval)
            for name, agent in self._agents.items():
                try:
                    await agent.host.boots.check()
                except Exception as error:  # drivers may raise anything; the next check follows
                    log.warning(
                        "host %s: whether its guests boot could not be checked; this is repeated: %s", name, error
                    )

    async def _wait(self, seconds: float) -> None:
        await wait_for_all(self._clock, [task for agent in self._agents.values() for task in agent.tasks()], seconds)

    async def _last_beat(self) -> None:
        last = self._heartbeat(HostBeat(host=name, stopping=True) for name in self._agents)
        try:
            await self._conductor.heartbeat(last, LAST_BEAT_TIMEOUT)
        except Exception as error:  # the agent stops in any case
            log.warning("the leases could not be released and will expire: %s", error)
