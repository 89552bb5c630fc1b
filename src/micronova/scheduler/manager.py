"""The scheduler role: answers select_destinations by deciding in memory and claiming in the database.

The requests of one process share the host table and are decided one after the other, each in well under a
millisecond. Claims of several schedulers race in the database. A scheduler that loses reads the nodes that it had
wrong, and decides again.
"""

import asyncio
import contextlib
import logging
import random as random_module
from collections.abc import Callable

import msgspec

from micronova.conf.control import FilterSchedulerSettings
from micronova.db import allocations, services
from micronova.db.allocations import Claim, ClaimResult
from micronova.db.engine import Database
from micronova.objects import service_names
from micronova.objects.clock import Clock, micros
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost, Stale, Unavailable
from micronova.objects.scheduling import RequestSpec, SelectDestinations
from micronova.rpc.bus import Bus
from micronova.rpc.server import Server
from micronova.scheduler.feed import HostFeed
from micronova.scheduler.filter_scheduler import Decision, FilterScheduler
from micronova.scheduler.filters.base import FilterOptions
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.rpcapi import SCHEDULER_INTERFACE, Selected
from micronova.scheduler.weights.registry import load_weighers

log = logging.getLogger(__name__)

Timed = Callable[[float], None]
Notify = Callable[[Context, str, SelectDestinations], None]

# Claims that a request may lose in a row. Each lost claim means that another request won, so that many do not happen
# by chance.
RACES = 64
WIDEST_SPREAD = 64  # most hosts among which a request that lost chooses at random


def no_notifications(context: Context, event: str, request: SelectDestinations) -> None:
    """Do nothing."""


def not_timed(seconds: float) -> None:
    """Do nothing."""


class SchedulerManager:
    """The scheduler role."""

    def __init__(
        self,
        options: FilterSchedulerSettings,
        database: Database,
        bus: Bus,
        clock: Clock,
        random: random_module.Random,
        notify: Notify = no_notifications,
        timed: Timed = not_timed,
        *,
        host: str,
        report_interval: float,
        service_down_time: float,
        refresh_interval: float,
        max_attempts: int,
        default_zone: str,
    ) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._notify = notify
        self._timed = timed
        self._refresh_interval = refresh_interval
        self._host = host
        self._report_interval = report_interval
        self._service_down_time = service_down_time
        self._feed = HostFeed(
            database,
            clock,
            default_zone=default_zone,
            heartbeat_interval=service_down_time / 4,
        )
        self._scheduler = FilterScheduler(
            load_filters(FilterOptions(service_down_time=service_down_time), options.enabled_filters),
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
            max_attempts=max_attempts,
            host_subset_size=options.host_subset_size,
            shuffle_best_same_weighed_hosts=options.shuffle_best_same_weighed_hosts,
        )
        self._server: Server | None = None
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read all hosts, then serve requests."""
        await self._feed.reload_all()
        self._loops = [
            asyncio.create_task(self._feed.run(), name="scheduler-feed"),
            asyncio.create_task(self._beat_forever(), name="scheduler-heartbeat"),
        ]
        self._server = await self._bus.serve(SCHEDULER_INTERFACE, self)

    async def stop(self) -> None:
        """Finish the running requests, then stop."""
        if self._server is not None:
            await self._server.stop()
        for loop in self._loops:
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop

    async def _beat_forever(self) -> None:
        """Send heartbeats, by which operators see that this scheduler is up; nothing else uses them."""
        while True:
            try:
                await self._database.write(
                    services.heartbeat, service_names.SCHEDULER, [self._host], micros(self._clock.now())
                )
            except Exception as error:
                log.warning("the scheduler's heartbeat was not written: %s", error)
            await self._clock.sleep(self._report_interval)

    async def select_destinations(self, context: Context, request: SelectDestinations) -> Selected:
        """Choose hosts for all instances of a request and claim their resources, or raise NoValidHost."""
        self._notify(context, "scheduler.select_destinations.start", request)
        decision = await self._place(request)
        self._notify(context, "scheduler.select_destinations.end", request)
        return Selected(placements=decision.placements, explanation=decision.explanation)

    async def _place(self, request: SelectDestinations) -> Decision:
        await self._feed.refresh(self._refresh_interval)
        spec = await self._with_group(request.spec)
        held: dict[str, str] = {}  # instance -> the node where it holds its resources already
        on_deleted_nodes: set[str] = set()  # instances that hold resources on a node that was deleted
        for race in range(RACES):
            try:
                decision = self._decide(spec, request, held, spread=min(2**race, WIDEST_SPREAD))
            except NoValidHost:
                await self._feed.refresh_fully()
                spec = await self._with_group(request.spec)
                held |= await self._held_already(spec, request)
                decision = self._decide_finally(spec, request, held)
            result = await self._claim(spec, request, decision, on_deleted_nodes)
            if result.claimed:
                return decision
            await self._correct_table(decision, result)
            if result.stale:
                raise Stale(
                    "The request is out of date: an instance is gone or at another epoch.",
                    instances=list(result.stale),
                )
            for uuid, node in result.held.items():
                if node in self._feed.table:
                    held[uuid] = node
                else:
                    on_deleted_nodes.add(uuid)
            spec = await self._with_group(request.spec)
            log.debug("the claim was lost, the scheduler decides again: %s", result)
        raise Unavailable(f"The scheduler lost {RACES} races for hosts in a row. Try again.")

    def _decide(self, spec: RequestSpec, request: SelectDestinations, held: dict[str, str], *, spread: int) -> Decision:
        begun = self._clock.monotonic()
        try:
            return self._scheduler.select(
                self._feed.table, spec, request.instance_uuids, now=self._clock.now(), held=held, spread=spread
            )
        finally:
            self._timed(self._clock.monotonic() - begun)

    async def _held_already(self, spec: RequestSpec, request: SelectDestinations) -> dict[str, str]:
        """Return the nodes where instances hold resources of an earlier request. No other host may have room."""
        found = await self._database.read(allocations.get_many, request.instance_uuids)
        host, node = spec.force_host or spec.requested_host, spec.force_node or spec.requested_node
        held = {}
        for uuid, [first, *others] in found.items():
            row = self._feed.table.index(first.node_uuid)
            if row is None or others or first.resources != spec.flavor.resources():
                continue
            selection = self._feed.table.selections[row]
            if (
                host in (None, selection.host)
                and node in (None, selection.node)
                and selection.host not in spec.ignore_hosts
            ):
                held[uuid] = first.node_uuid
        return held

    def _decide_finally(self, spec: RequestSpec, request: SelectDestinations, held: dict[str, str]) -> Decision:
        """Decide; if there is no valid host, say whether one may return.

        Agents that are restarted, all of them perhaps, are silent for some seconds. So a host that is down may return
        within `service_down_time`; a host that announced its stop is down at once.
        """
        try:
            return self._decide(spec, request, held, spread=1)
        except NoValidHost as error:
            earlier = self._clock.now() - self._service_down_time
            if self._scheduler.would_fit(self._feed.table, spec, request.instance_uuids, now=earlier, held=held):
                error.details["hosts_may_return"] = True
            log.info("no valid host for %d instances: %s", len(request.instance_uuids), error.details)
            raise

    async def _claim(
        self, spec: RequestSpec, request: SelectDestinations, decision: Decision, on_deleted_nodes: set[str]
    ) -> ClaimResult:
        # An instance with a requested host does not keep what it holds elsewhere.
        has_destination = any((spec.force_host, spec.force_node, spec.requested_host, spec.requested_node))
        claims = [
            Claim.of(
                placement.instance_uuid,
                placement.selected,
                spec,
                request.epochs.get(placement.instance_uuid),
                keep_held=not has_destination and placement.instance_uuid not in on_deleted_nodes,
            )
            for placement in decision.placements
        ]
        try:
            return await self._database.write(allocations.claim, claims, now=micros(self._clock.now()))
        except BaseException:
            # The claim may or may not be committed. The next read corrects what the table counts.
            self._feed.mark_outdated([claim.node_uuid for claim in claims])
            raise

    async def _correct_table(self, decision: Decision, result: ClaimResult) -> None:
        """Read the nodes of a claim that failed; this also undoes what the table counts on them."""
        nodes = {placement.selected.node_uuid for placement in decision.placements}
        await self._feed.reload_nodes(nodes | set(result.held.values()))

    async def _with_group(self, spec: RequestSpec) -> RequestSpec:
        """Return the spec with the hosts of the server group's present members."""
        if spec.group is None:
            return spec
        hosts = await self._database.read(allocations.group_hosts, spec.group.id)
        return msgspec.structs.replace(spec, group=msgspec.structs.replace(spec.group, hosts=hosts))
