"""The scheduler role: answers select_destinations by deciding in memory and claiming in the database.

Requests of one process share the table and are decided one after the other, each in well under a
millisecond; claims of many schedulers race in the database, where the loser finds out, reads what it had
wrong, and decides again.
"""

import asyncio
import contextlib
import logging
import random as random_module
import socket
from collections.abc import Callable

import msgspec

from micronova.conf.settings import Settings
from micronova.db import allocations, services
from micronova.db.allocations import Claim, ClaimResult
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import NoValidHost, Stale, Unavailable
from micronova.objects.scheduling import RequestSpec
from micronova.rpc.bus import Bus, Server
from micronova.rpc.contract import Context
from micronova.scheduler.feed import HostFeed
from micronova.scheduler.filter_scheduler import Decision, FilterScheduler
from micronova.scheduler.filters.base import FilterOptions
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.rpcapi import SCHEDULER, HostsChanged, SelectDestinations, Selected
from micronova.scheduler.weights.registry import load_weighers

log = logging.getLogger(__name__)

Timed = Callable[[float], None]
Notify = Callable[[Context, str, SelectDestinations], None]

# Each lost race means that somebody else got on, so that losing so often in a row does not happen by chance.
RACES = 64
WIDEST_SPREAD = 64


def no_notifications(context: Context, event: str, request: SelectDestinations) -> None:
    """Send nothing."""


def not_timed(seconds: float) -> None:
    """Count nothing."""


class SchedulerManager:
    """A scheduler."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        bus: Bus,
        clock: Clock,
        random: random_module.Random,
        notify: Notify = no_notifications,
        timed: Timed = not_timed,
    ) -> None:
        options = settings.filter_scheduler
        self._database = database
        self._bus = bus
        self._clock = clock
        self._notify = notify
        self._timed = timed
        self._refresh_interval = settings.scheduler.refresh_interval
        self._host = settings.default.host or socket.gethostname()
        self._report_interval = settings.default.report_interval
        self._feed = HostFeed(
            database,
            clock,
            default_zone=settings.default.default_availability_zone,
            heartbeat_interval=settings.default.service_down_time / 4,
        )
        self._scheduler = FilterScheduler(
            load_filters(options.enabled_filters, FilterOptions(service_down_time=settings.default.service_down_time)),
            load_weighers(
                {
                    "RAMWeigher": options.ram_weight_multiplier,
                    "CPUWeigher": options.cpu_weight_multiplier,
                    "DiskWeigher": options.disk_weight_multiplier,
                    "ServerGroupSoftAffinityWeigher": options.soft_affinity_weight_multiplier,
                    "ServerGroupSoftAntiAffinityWeigher": options.soft_anti_affinity_weight_multiplier,
                    "BuildFailureWeigher": options.build_failure_weight_multiplier,
                }
            ),
            random=random,
            max_attempts=settings.scheduler.max_attempts,
            host_subset_size=options.host_subset_size,
            shuffle_best_same_weighed_hosts=options.shuffle_best_same_weighed_hosts,
        )
        self._server: Server | None = None
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read all hosts and begin to answer."""
        await self._feed.complete()
        self._loops = [
            asyncio.create_task(self._feed.run(), name="scheduler-feed"),
            asyncio.create_task(self._beat_forever(), name="scheduler-heartbeat"),
        ]
        self._server = await self._bus.serve(SCHEDULER, self)

    async def stop(self) -> None:
        """Answer what was asked, then stop."""
        if self._server is not None:
            await self._server.stop()
        for loop in self._loops:
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop

    async def _beat_forever(self) -> None:
        """Let operators see that this scheduler lives; nothing else depends on it."""
        while True:
            try:
                await self._database.write(
                    services.heartbeat, "nova-scheduler", [self._host], micros(self._clock.now())
                )
            except Exception as error:
                log.warning("heartbeat: %s", error)
            await self._clock.sleep(self._report_interval)

    async def select_destinations(self, context: Context, request: SelectDestinations) -> Selected:
        """Choose hosts for all instances of a request and claim their resources, or raise NoValidHost."""
        self._notify(context, "scheduler.select_destinations.start", request)
        decision = await self._place(request)
        self._notify(context, "scheduler.select_destinations.end", request)
        return Selected(placements=decision.placements, explanation=decision.explanation)

    async def hosts_changed(self, context: Context, hint: HostsChanged) -> None:
        """Look at the database before the next decision."""
        self._feed.doubt()

    async def _place(self, request: SelectDestinations) -> Decision:
        await self._feed.at_most_behind(self._refresh_interval)
        spec = await self._with_group(request.spec)
        held: dict[str, str] = {}  # instance -> node, where one holds already what it needs
        homeless: set[str] = set()  # instances that hold something on a node that is no more
        for race in range(RACES):
            try:
                decision = self._decide(spec, request, held, spread=min(2**race, WIDEST_SPREAD))
            except NoValidHost:
                await self._feed.before_refusing()
                spec = await self._with_group(request.spec)
                decision = self._decide(spec, request, held, spread=1)
            result = await self._claim(spec, request, decision, homeless)
            if result.claimed:
                return decision
            await self._learn(decision, result)
            if result.stale:
                raise Stale(
                    "The request is out of date: an instance is gone or at another epoch.",
                    instances=list(result.stale),
                )
            for uuid, node in result.held.items():
                if node in self._feed.table:
                    held[uuid] = node
                else:
                    homeless.add(uuid)
            spec = await self._with_group(request.spec)
            log.debug("Claim lost, deciding again: %s", result)
        raise Unavailable(f"The scheduler lost {RACES} races for hosts in a row. Try again.")

    def _decide(self, spec: RequestSpec, request: SelectDestinations, held: dict[str, str], *, spread: int) -> Decision:
        begun = self._clock.monotonic()
        try:
            return self._scheduler.select(
                self._feed.table, spec, request.instance_uuids, now=self._clock.now(), held=held, spread=spread
            )
        finally:
            self._timed(self._clock.monotonic() - begun)

    async def _claim(
        self, spec: RequestSpec, request: SelectDestinations, decision: Decision, homeless: set[str]
    ) -> ClaimResult:
        resources = spec.flavor.resources()
        # Who is sent to a certain host does not stay where it is.
        sent = any((spec.force_host, spec.force_node, spec.requested_host, spec.requested_node))
        claims = [
            Claim(
                consumer_uuid=placement.instance_uuid,
                node_uuid=placement.selected.node_uuid,
                host=placement.selected.host,
                resources=resources,
                group=spec.group,
                epoch=request.epochs.get(placement.instance_uuid),
                keep_held=not sent and placement.instance_uuid not in homeless,
                avoid_hosts=spec.ignore_hosts,
            )
            for placement in decision.placements
        ]
        try:
            return await self._database.write(allocations.claim, claims, now=micros(self._clock.now()))
        except BaseException:
            # Nobody knows whether it was committed: what was counted in memory is put right by the next read.
            self._feed.doubt([claim.node_uuid for claim in claims])
            raise

    async def _learn(self, decision: Decision, result: ClaimResult) -> None:
        """Read the nodes of a claim that failed: that also takes back what was counted on them in memory."""
        nodes = {placement.selected.node_uuid for placement in decision.placements}
        await self._feed.reload(nodes | set(result.held.values()))

    async def _with_group(self, spec: RequestSpec) -> RequestSpec:
        """The spec with the group's members where they are now."""
        if spec.group is None:
            return spec
        hosts = await self._database.read(allocations.group_hosts, spec.group.id)
        return msgspec.structs.replace(spec, group=msgspec.structs.replace(spec.group, hosts=hosts))
