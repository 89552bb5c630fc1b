"""The conductor role: the server end of its messages, and its periodic jobs."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from functools import partial

from micronova.conductor.consoles import Consoles
from micronova.conductor.heartbeat_interval import interval_of, longest_interval, too_often
from micronova.conductor.heartbeat_transaction import HeartbeatTransaction
from micronova.conductor.heartbeats import Heartbeats
from micronova.conductor.host_boot import start_guests_after_host_boot
from micronova.conductor.host_keys import HostKeyIssuer
from micronova.conductor.host_users import HostUsers
from micronova.conductor.image_caching import CacheImagesTasks
from micronova.conductor.jobs import Jobs
from micronova.conductor.operations.admin_password import ChangePassword
from micronova.conductor.operations.bind_ports import BindPorts
from micronova.conductor.operations.build import Build
from micronova.conductor.operations.confirm_revert import ConfirmResize, RevertResize
from micronova.conductor.operations.create_image import CreateImage
from micronova.conductor.operations.create_volume_image import CreateVolumeImage
from micronova.conductor.operations.delete import Delete
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.discard_image import DiscardImage
from micronova.conductor.operations.engine import Engine, Operation
from micronova.conductor.operations.evacuate import Evacuate
from micronova.conductor.operations.host_kind import HostKind, apply_progress, apply_report, reported_error
from micronova.conductor.operations.interfaces import AttachInterface, DetachInterface
from micronova.conductor.operations.move import MOVE_KINDS, Move
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, OperationKind
from micronova.conductor.operations.power import POWER_KINDS, Power
from micronova.conductor.operations.rebuild import Rebuild
from micronova.conductor.operations.rescue import Rescue
from micronova.conductor.operations.settle_volumes import SettleVolumes
from micronova.conductor.operations.shelve import Shelve
from micronova.conductor.operations.shelve_offload import ShelveOffload
from micronova.conductor.operations.soft_delete import Restore, SoftDelete
from micronova.conductor.operations.undo_move import UndoMove
from micronova.conductor.operations.unshelve import Unshelve
from micronova.conductor.operations.unshelve_offloaded import UnshelveOffloaded
from micronova.conductor.operations.volumes import AttachVolume, DetachVolume, ExtendVolume, SwapVolume
from micronova.conductor.region_metrics import RegionMetrics
from micronova.conductor.rpcapi import (
    CONSOLE,
    HOSTS,
    KEYS,
    TASKS,
    CacheImages,
    Ping,
    PluggedPorts,
    PluggedPortsRequest,
    Pong,
    ProbeAPI,
    RunOperations,
)
from micronova.db import instances, services
from micronova.notifications import registration, resources
from micronova.objects.background import keep_running
from micronova.objects.context import Context
from micronova.objects.errors import HostNotHeard, Unavailable
from micronova.objects.orders import (
    GuestsOff,
    GuestsToStart,
    Heartbeat,
    HeartbeatReply,
    Progress,
    ProgressReply,
    Report,
    ReportReply,
)
from micronova.objects.service_names import COMPUTE, CONDUCTOR, SERVICE_VERSION
from micronova.rpc.bus import Bus
from micronova.rpc.server import Server
from micronova.scheduler.rpcapi import SchedulerAPI
from micronova.telemetry.logs import server_id

log = logging.getLogger(__name__)

PING_TIMEOUT = 2.0
ANSWER_TIMEOUT = 2.0  # seconds in which a host answers that another one waits for
MOST_HOSTS_ASKED = 4
"""Hosts that a conductor asks at once on behalf of one host: it must not be able to keep another one busy."""
FLEET_COUNT_INTERVAL = 30.0  # seconds after which the hosts are counted again
HOST_MESSAGES = 2000
"""Messages of hosts that a conductor takes at once: many heartbeats share a transaction, and a ping does not wait."""


class ConductorManager:
    """Handles the messages of the API and of hosts."""

    def __init__(
        self,
        *,
        bus: Bus,
        dependencies: ConductorDependencies,
        host: str,
        report_interval: float,
        ratios: dict[str, float],
        stored_metrics: Collection[str] = (),
        max_attempts: int,
        shelved_offload_time: int,
        host_users: HostUsers,
        host_keys: HostKeyIssuer,
        jobs: Jobs,
        region_metrics: RegionMetrics,
        image_caching: CacheImagesTasks,
    ) -> None:
        self._bus = bus
        self._dependencies = dependencies
        self.engine: Engine = dependencies.engine
        self._host = host
        self._report_interval = report_interval
        self._probe = ProbeAPI(bus)
        self._consoles = Consoles(self.engine.database, dependencies.compute, host_users, self.engine.clock)
        self._host_users = host_users
        self._questions: Counter[str] = Counter()  # under way, by the host that waits for the answer
        self._host_keys = host_keys
        self._jobs = jobs
        self._region_metrics = region_metrics
        self._image_caching = image_caching
        self._servers: list[Server] = []
        self._loops: list[asyncio.Task[None]] = []
        scheduler = SchedulerAPI(bus)
        kinds: tuple[OperationKind, ...] = (
            Build(dependencies, scheduler, max_attempts),
            Rebuild(dependencies, scheduler),
            Delete(dependencies),
            *(Power(dependencies, kind) for kind in POWER_KINDS),
            Rescue(dependencies),
            ChangePassword(dependencies),
            SoftDelete(dependencies),
            Restore(dependencies),
            AttachInterface(dependencies),
            DetachInterface(dependencies),
            *(CreateImage(dependencies, kind) for kind in ("create_image", "create_backup")),
            CreateVolumeImage(dependencies),
            *(Move(dependencies, kind, scheduler, max_attempts) for kind in MOVE_KINDS),
            ConfirmResize(dependencies),
            RevertResize(dependencies),
            BindPorts(dependencies),
            Evacuate(dependencies, scheduler, max_attempts),
            Shelve(dependencies, offloads=shelved_offload_time == 0),
            ShelveOffload(dependencies),
            Unshelve(dependencies),
            UnshelveOffloaded(dependencies, scheduler, max_attempts),
            DiscardImage(dependencies),
            UndoMove(dependencies),
            AttachVolume(dependencies),
            DetachVolume(dependencies),
            ExtendVolume(dependencies),
            SwapVolume(dependencies),
            SettleVolumes(dependencies),
        )
        self._kinds = {kind.name: kind for kind in kinds}
        self.engine.set_kinds(self._kinds)
        transaction = HeartbeatTransaction(dependencies, self._kinds, ratios, stored_metrics)
        self._heartbeats = Heartbeats(dependencies, transaction)
        self._longest_interval = longest_interval(dependencies.service_down_time, self.engine.lease_seconds)
        self._too_often: str | None = None  # what the log says of the number of heartbeats
        self._fleet_counted_at = float("-inf")

    async def start(self) -> None:
        """Serve messages and start the periodic jobs."""
        await self._host_users.refresh()
        await self.engine.start()
        self._servers = [
            await self._bus.serve(TASKS, self),
            await self._bus.serve(HOSTS, self, prefetch=HOST_MESSAGES),
            await self._bus.serve(CONSOLE, self._consoles),
            await self._bus.serve(KEYS, self._host_keys, prefetch=HOST_MESSAGES),
        ]
        self._loops = [
            keep_running(self._beat_forever, name="conductor-heartbeat", clock=self.engine.clock),
            keep_running(self._consoles.purge_forever, name="conductor-consoles", clock=self.engine.clock),
        ]
        self._jobs.start()
        self._region_metrics.start()

    async def stop(self) -> None:
        """Stop serving and release the leases."""
        for loop in self._loops:
            loop.cancel()
        await self._region_metrics.stop()
        await self._jobs.stop()
        await self._image_caching.stop()
        for server in self._servers:
            await server.stop()
        await self._heartbeats.stop()
        await self.engine.stop()

    async def _beat_forever(self) -> None:
        while True:
            try:
                now = self.engine.now()
                if await self.engine.database.write(services.heartbeat, CONDUCTOR, [self._host], now, SERVICE_VERSION):
                    await registration.announce(
                        self.engine.database, self._dependencies.notifier, CONDUCTOR, self._host
                    )
                await self._host_users.refresh()
                await self._count_fleet()
                await self._probe.ping(PING_TIMEOUT)
                self._check_heartbeats()
                self.engine.health.proved()
            except Exception as error:
                self.engine.health.outage_noticed()
                log.warning("the database or the bus does not answer this conductor, which tries again: %s", error)
            await self.engine.clock.sleep(self._report_interval)

    def _check_heartbeats(self) -> None:
        """Raise Unavailable if heartbeats have waited so long that hosts may seem down, such as for a locked row."""
        if (wait := self._heartbeats.oldest_wait) > self._longest_interval:
            raise Unavailable(f"The transaction that applies heartbeats of hosts has not ended for {wait:.1f} s.")

    async def _count_fleet(self) -> None:
        """Let hosts send heartbeats less often, the more there are."""
        if self.engine.clock.monotonic() - self._fleet_counted_at < FLEET_COUNT_INTERVAL:
            return
        up = await self.engine.database.read(
            services.count_up, COMPUTE, self.engine.now(), self._dependencies.service_down_time
        )
        self._fleet_counted_at = self.engine.clock.monotonic()
        limits = {"report_interval": self._report_interval, "longest": self._longest_interval}
        self._heartbeats.interval = interval_of(up, **limits)
        before, self._too_often = self._too_often, too_often(up, **limits)
        if self._too_often is not None and before is None:
            log.warning("%s", self._too_often)

    # --- messages from the API -------------------------------------------------------------------------------

    async def run_operations(self, context: Context, request: RunOperations) -> None:
        """Lease and run operations that were just recorded."""
        await self.engine.lease_and_run(request.ids)

    async def cache_images(self, context: Context, request: CacheImages) -> None:
        """Let the hosts of an aggregate fetch images."""
        self._image_caching.begin(context, request.aggregate, request.images)

    # --- messages from hosts ---------------------------------------------------------------------------------

    async def ping(self, context: Context, ping: Ping) -> Pong:
        """Answer a conductor that proves that the bus works, or the audit."""
        return Pong(self.engine.health.undisturbed_for())

    async def report(self, context: Context, report: Report) -> ReportReply:
        """Apply the end of an order: refuse a stale report, else end or continue the operation."""
        self._host_users.check(context, report.host)
        server_id.set(report.instance_uuid)
        with self._host_users.one_message_of(report.host):
            found = await self.engine.write_for_host(apply_report, self._kinds, report)
        if found is None:
            log.info("host %s reports on operation %s, which is not known: ignored", report.host, report.operation_id)
            return ReportReply(accepted=False)
        kind, operation, result = found
        if operation.instance_uuid != report.instance_uuid:
            log.warning(
                "host %s reported on instance %s with an operation of instance %s: the report is refused",
                report.host,
                report.instance_uuid,
                operation.instance_uuid,
            )
            return ReportReply(accepted=False)
        what = report.outcome if report.outcome == "done" else f"{report.outcome}: {report.message}"
        if isinstance(result, NoMoreWork) and not result.accepted:
            what += ", too late: refused"
        log.info("host %s reports %s of instance %s: %s", report.host, kind.name, report.instance_uuid, what)
        if report.outcome != "done" and not report.temporary and (isinstance(result, Continue) or result.accepted):
            error, server = reported_error(report), report.instance_uuid
            failed = partial(resources.host_failed, report.host, operation.kind, server, error)
            self._dependencies.notifier.announce(operation.context, failed)
        kind.announce(operation, result)
        await kind.start_follow_ups(result)
        if isinstance(result, Continue):
            self.engine.committed(kind.name, result.operation.step)
            self.engine.run([result.operation])
            return ReportReply(accepted=True)
        if result.built:
            for each in result.notifications:
                self._dependencies.hooks.post("build_instance", each.row, operation.context, each.row)
        return ReportReply(accepted=result.accepted, destroy=result.destroy)

    async def progress(self, context: Context, progress: Progress) -> ProgressReply:
        """Show the task state that a host has reached; refuse it if the operation is not the host's any more."""
        self._host_users.check(context, progress.host)
        with self._host_users.one_message_of(progress.host):
            try:
                found = await self._apply_progress(progress)
            except HostNotHeard as error:
                if progress.waited is None:
                    raise
                answered = error.details["host"]
                # If it does not answer, its next heartbeats tell that it is there.
                if not await self._answers(answered, asker=progress.host):
                    return ProgressReply(accepted=True, ask_again=True)
                found = await self._apply_progress(progress, answered)
        if found is None:
            return ProgressReply(accepted=False)
        kind, operation = found
        return ProgressReply(accepted=True, upload_url=kind.upload_url_for(operation, progress))

    async def _answers(self, host: str, *, asker: str) -> bool:
        """Return whether a host answers now; False if too many are asked on behalf of the same host."""
        if self._questions[asker] >= MOST_HOSTS_ASKED:
            return False
        self._questions[asker] += 1
        try:
            return await self._dependencies.compute.answers(host, ANSWER_TIMEOUT)
        finally:
            self._questions[asker] -= 1
            if not self._questions[asker]:
                del self._questions[asker]

    async def _apply_progress(
        self, progress: Progress, answered: str | None = None
    ) -> tuple[HostKind, Operation] | None:
        return await self.engine.write_for_host(apply_progress, self._kinds, progress, self.engine.now(), answered)

    async def heartbeat(self, context: Context, heartbeat: Heartbeat) -> HeartbeatReply:
        """Apply the heartbeat of one or more hosts."""
        for beat in heartbeat.hosts:
            self._host_users.check(context, beat.host)
        return await self._heartbeats.handle(context.sender, heartbeat)

    async def plugged_ports(self, context: Context, request: PluggedPortsRequest) -> PluggedPorts:
        """Return those of an instance's ports that are plugged on its host; the event of one may have been lost."""
        self._host_users.check(context, request.host)
        with self._host_users.one_message_of(request.host):
            row = await self.engine.database.read(instances.get, request.instance_uuid)
            if row is None or row["host"] != request.host or self._dependencies.network_client is None:
                return PluggedPorts(())
            plugged = await self._dependencies.network_client.plugged_ports(request.instance_uuid, request.host)
            return PluggedPorts(tuple(port for port in request.ports if port in plugged))

    async def start_guests_after_host_boot(self, context: Context, guests: GuestsOff) -> GuestsToStart:
        """Start the guests of a host that was switched off and on."""
        self._host_users.check(context, guests.host)
        with self._host_users.one_message_of(guests.host):
            return GuestsToStart(instance_uuids=await start_guests_after_host_boot(self._dependencies, guests))
