"""The scheduler role: answers select_destinations by deciding in memory and claiming in the database.

The requests of one process share the host table and are decided one after the other, each in well under a
millisecond. Claims of several schedulers race in the database. A scheduler that loses reads the nodes that it had
wrong, and decides again.
"""

import asyncio
import logging
import random as random_module
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings, ratios_of
from micronova.db import aggregates, allocations, claims, group_members, server_hosts, services
from micronova.db.aggregates import AggregateRow
from micronova.db.claims import Claim, ClaimResult
from micronova.db.engine import Database
from micronova.objects import service_names
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock, micros
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost, Stale, Unavailable
from micronova.objects.explanation import Explanation, counted, explanation_of
from micronova.objects.fleet import Fleet, ListHosts
from micronova.objects.pci_devices import Alias
from micronova.objects.scheduling import (
    SERVER_HINTS,
    CheckImage,
    DryRun,
    DryRunResult,
    RequestSpec,
    SchedulerDecision,
    SelectDestinations,
    Selection,
)
from micronova.placement import extra_specs
from micronova.rpc.bus import Bus
from micronova.rpc.server import Server
from micronova.scheduler import fleet
from micronova.scheduler.aggregate_metadata import names_project
from micronova.scheduler.feed import HostFeed
from micronova.scheduler.filter_scheduler import FilterScheduler, RemovedBy
from micronova.scheduler.image_counts import ImageCounts
from micronova.scheduler.no_valid_host import claims_refused
from micronova.scheduler.prefilters import DEFAULT_PREFILTERS, Prefilters
from micronova.scheduler.refused_claims import RefusedClaims
from micronova.scheduler.request_groups import RequestGroups
from micronova.scheduler.rpcapi import SCHEDULER_INTERFACE
from micronova.scheduler.servable import Servable

log = logging.getLogger(__name__)

Timed = Callable[[float], None]
Notify = Callable[[Context, str, SelectDestinations], None]

# Claims that a request may lose in a row. Each lost claim means that another request won: so many in a row do not
# happen by chance.
RACES = 64
WIDEST_SPREAD = 64  # most hosts among which a request that lost chooses at random


def no_notifications(context: Context, event: str, request: SelectDestinations) -> None:
    """Do nothing."""


def not_timed(seconds: float) -> None:
    """Do nothing."""


async def no_registration_callback() -> None:
    """Do nothing."""


class SchedulerManager:
    """The scheduler role."""

    def __init__(
        self,
        settings: FilterSchedulerSettings,
        metrics: MetricsSettings,
        database: Database,
        bus: Bus,
        clock: Clock,
        random: random_module.Random,
        notify: Notify = no_notifications,
        timed: Timed = not_timed,
        registered: Callable[[], Awaitable[None]] = no_registration_callback,
        *,
        host: str,
        report_interval: float,
        service_down_time: float,
        refresh_interval: float,
        max_attempts: int,
        default_zone: str,
        prefilters: Prefilters = DEFAULT_PREFILTERS,
        pci_aliases: Mapping[str, Alias] | None = None,
    ) -> None:
        self._pci_aliases = dict(pci_aliases or {})
        self._prefilters = prefilters
        self._database = database
        self._bus = bus
        self._clock = clock
        self._notify = notify
        self._timed = timed
        self._registered = registered
        self._refresh_interval = refresh_interval
        self._host = host
        self._report_interval = report_interval
        self._service_down_time = service_down_time
        self._feed = HostFeed(
            database,
            clock,
            default_zone=default_zone,
            heartbeat_read_interval=service_down_time / 4,
        )
        self._scheduler = FilterScheduler.of(
            settings,
            metrics,
            random=random,
            service_down_time=service_down_time,
            max_attempts=max_attempts,
            prefilters=prefilters,
            aliases=self._pci_aliases,
        )
        self._image_counts: ImageCounts | None = None
        if settings.image_props_weight_multiplier:
            ratios = ratios_of(settings.image_props_weight_setting)
            self._image_counts = ImageCounts(database, clock, ratios)
        self._server: Server | None = None
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read all hosts, then serve requests."""
        await self._feed.reload_all()
        self._loops = [
            keep_running(self._feed.run, name="scheduler-feed", clock=self._clock),
            keep_running(self._beat_forever, name="scheduler-heartbeat", clock=self._clock),
        ]
        self._server = await self._bus.serve(SCHEDULER_INTERFACE, self)

    async def stop(self) -> None:
        """Finish the running requests, then stop."""
        if self._server is not None:
            await self._server.stop()
        await end_tasks(*self._loops)

    async def _beat_forever(self) -> None:
        """Send heartbeats, by which operators see that this scheduler is up; nothing else uses them."""
        while True:
            try:
                now = micros(self._clock.now())
                version = service_names.SERVICE_VERSION
                if await self._database.write(services.heartbeat, service_names.SCHEDULER, [self._host], now, version):
                    await self._registered()
            except Exception as error:
                log.warning(
                    "the scheduler's heartbeat was not written, the next attempt follows in %g s: %s",
                    self._report_interval,
                    error,
                )
            await self._clock.sleep(self._report_interval)

    async def select_destinations(self, context: Context, request: SelectDestinations) -> SchedulerDecision:
        """Choose hosts for all instances of a request and claim their resources, or raise NoValidHost."""
        self._notify(context, "scheduler.select_destinations.start", request)
        decision = await self._place(request)
        self._notify(context, "scheduler.select_destinations.end", request)
        return decision

    async def check_image(self, context: Context, request: CheckImage) -> Explanation:
        """Return what the filters that compare images decide about the node of a server; nothing is claimed.

        Raise NoValidHost if one of them refuses it."""
        await self._feed.refresh(self._refresh_interval)
        try:
            return self._scheduler.check_image(self._feed.table, request.spec, request.node_uuid, now=self._clock.now())
        except NoValidHost:
            await self._feed.refresh_fully()
        return self._scheduler.check_image(self._feed.table, request.spec, request.node_uuid, now=self._clock.now())

    async def dry_run(self, context: Context, request: DryRun) -> DryRunResult:
        """Return where the servers of a request would go, or what refuses them; nothing is claimed or counted."""
        asked = SelectDestinations(spec=request.spec, instance_uuids=tuple(map(str, range(request.count))))
        await self._feed.refresh(self._refresh_interval)
        result = await self._preview(asked, request.with_hosts)
        if not result.selections:
            await self._feed.refresh_fully()
            result = await self._preview(asked, request.with_hosts)
        return result

    async def _preview(self, request: SelectDestinations, with_hosts: bool) -> DryRunResult:
        spec = await self._completed_spec(request)
        groups = self._request_groups(spec, request)
        await self._scheduler.prepare(self._feed.table, spec)
        servable = await self._servable(spec, groups, RefusedClaims(), now=self._before_silence())
        # There is no pause from here on: no other request sees what the decision counts and undoes.
        table, now, uuids = self._feed.table, self._clock.now(), request.instance_uuids
        removed_by, begun = RemovedBy(), self._clock.monotonic()
        selections: tuple[Selection, ...] = ()
        message = ""
        try:
            decision = self._scheduler.preview(table, spec, uuids, now=now, servable=servable, removed_by=removed_by)
            selections = tuple(destination.selected for destination in decision.destinations)
            explanation = decision.explanation
            fit = len(selections)
        except NoValidHost as error:
            message, fit = error.message, error.details["placed"]
            found = explanation_of(error)
            assert found is not None  # the error comes from a decision
            waits = self._would_fit(spec, uuids, now=self._before_silence(), servable=servable)
            explanation = msgspec.structs.replace(found, waits=waits)
        took = max(1, micros(self._clock.monotonic() - begun))
        use = None
        if with_hosts:
            names = [step.name for step in explanation.filters]
            use = fleet.fleet_of(table, now, self._service_down_time, removed_by, names, selections)
        return DryRunResult(
            selections=selections,
            explanation=msgspec.structs.replace(explanation, took=took),
            fit=fit,
            message=message,
            fleet=use,
        )

    async def list_hosts(self, context: Context, request: ListHosts) -> Fleet:
        """Return all hosts with their use, as this scheduler knows them."""
        await self._feed.refresh(self._refresh_interval)
        return fleet.fleet_of(self._feed.table, self._clock.now(), self._service_down_time)

    async def _place(self, request: SelectDestinations) -> SchedulerDecision:
        await self._feed.refresh(self._refresh_interval)
        spec = await self._completed_spec(request)
        held: dict[str, str] = {}  # instance -> the node where it holds its resources already
        refused = RefusedClaims()
        await self._scheduler.prepare(self._feed.table, spec)
        groups = self._request_groups(spec, request)
        for race in range(RACES):
            try:
                servable = await self._servable(spec, groups, refused, now=self._clock.now())
                decision = self._decide(spec, request, held, servable, spread=min(2**race, WIDEST_SPREAD))
            except NoValidHost:
                await self._feed.refresh_fully()
                spec = await self._completed_spec(request)
                held |= await self._held_already(spec, request)
                # Hosts may have changed. Hosts that were not compared before are compared now.
                await self._scheduler.prepare(self._feed.table, spec)
                servable = await self._servable(spec, groups, refused, now=self._before_silence())
                decision = self._decide_after_refresh(spec, request, held, servable)
            nodes = {each.selected.node_uuid for each in decision.destinations}
            with self._feed.unconfirmed(nodes):
                result = await self._claim(spec, request, decision, held)
                if result.claimed:
                    return decision
                nodes = nodes | set(result.held.values())
                # This also undoes what the table counts on them.
                await self._feed.reload_nodes(nodes)
            if groups is not None:
                groups.forget(nodes)
            if result.stale:
                raise Stale(
                    "The request is out of date: an instance is gone or at another epoch.",
                    instances=list(result.stale),
                )
            held |= result.held
            spec = await self._completed_spec(request)
            refused.note(result.failures, Counter(each.selected.node_uuid for each in decision.destinations))
            log.debug("the claim was lost, the scheduler decides again: %s", result)
        if refused.are_final():
            raise claims_refused(decision.explanation, refused.reasons)
        raise Unavailable(f"The scheduler lost {RACES} races for hosts in a row. Try again.")

    def _request_groups(self, spec: RequestSpec, request: SelectDestinations) -> RequestGroups | None:
        """Return the counter of the instances that the providers of each node can serve; None without groups."""
        wanted = extra_specs.resource_request(spec.flavor, spec.image, spec.ports)
        if wanted is None:
            return None
        own, count = extra_specs.node_resources(spec.flavor, spec.image), len(request.instance_uuids)
        return RequestGroups(self._database, wanted, own, count)

    async def _servable(
        self, spec: RequestSpec, groups: RequestGroups | None, refused: RefusedClaims, *, now: float
    ) -> Servable | None:
        """Return how many instances nodes can take that pass the filters at `now`.

        Return None without request groups, unless nodes refuse claims.
        """
        servable = None
        if groups is not None:
            servable = await groups.count(self._scheduler.passing(self._feed.table, spec, now=now))
        refused.compare(lambda node: self._known(node, spec, groups))
        if refused.limits:
            servable = servable or Servable()
            servable.limit(refused.limits, refused.reasons)
        return servable

    def _known(self, node: str, spec: RequestSpec, groups: RequestGroups | None) -> object:
        """Return all that claims compare on a node, as this scheduler has read it."""
        members = None if spec.server_group is None else spec.server_group.hosts
        row = self._feed.table.index(node)
        if row is None:
            return None
        state = self._feed.table.state(row)
        status = state.enabled, state.forced_down
        resources = state.total, state.capacity, state.used, state.topology, state.held
        return status, resources, members, None if groups is None else groups.known(node)

    def _decide(
        self,
        spec: RequestSpec,
        request: SelectDestinations,
        held: dict[str, str],
        servable: Servable | None,
        *,
        spread: int,
    ) -> SchedulerDecision:
        begun = self._clock.monotonic()
        try:
            decision = self._scheduler.select(
                self._feed.table,
                spec,
                request.instance_uuids,
                now=self._clock.now(),
                held=held,
                spread=spread,
                servable=servable,
            )
        except NoValidHost as error:
            error.details["took"] = self._took(begun)
            raise
        explanation = msgspec.structs.replace(decision.explanation, took=self._took(begun))
        return msgspec.structs.replace(decision, explanation=explanation)

    def _took(self, begun: float) -> int:
        """Count how long a decision took, and return it in microseconds, at least 1."""
        seconds = self._clock.monotonic() - begun
        self._timed(seconds)
        return max(1, micros(seconds))

    async def _held_already(self, spec: RequestSpec, request: SelectDestinations) -> dict[str, str]:
        """Return the nodes where instances hold resources of an earlier request: others may have too little."""
        found = await self._database.read(allocations.get_many, request.instance_uuids)
        host, node = spec.force_host or spec.requested_host, spec.force_node or spec.requested_node
        held = {}
        own = extra_specs.node_resources(spec.flavor, spec.image)
        resource_request = extra_specs.resource_request(spec.flavor, spec.image, spec.ports)
        for uuid, all_held in found.items():
            allocation = allocations.node_allocation(all_held, own, resource_request)
            row = None if allocation is None else self._feed.table.index(allocation.node_uuid)
            if row is None:
                continue
            selection = self._feed.table.selections[row]
            if (
                host in (None, selection.host)
                and node in (None, selection.node)
                and selection.host not in spec.ignore_hosts
            ):
                held[uuid] = selection.node_uuid
        return held

    def _decide_after_refresh(
        self, spec: RequestSpec, request: SelectDestinations, held: dict[str, str], servable: Servable | None
    ) -> SchedulerDecision:
        """Decide; if there is no valid host, say whether one may return.

        Raise Unavailable if not all hosts were compared: the next attempt goes on with them.
        """
        try:
            return self._decide(spec, request, held, servable, spread=1)
        except NoValidHost as error:
            if uncompared := error.details.get("uncompared"):
                raise Unavailable(
                    f"The request takes long to compare with hosts: {uncompared} were not compared yet. Try again."
                ) from error
            uuids = request.instance_uuids
            if self._would_fit(spec, uuids, now=self._before_silence(), held=held, servable=servable):
                error.details["hosts_may_return"] = True
            log.info(
                "no valid host for %s (the first is %s), `micronova explain` shows what each filter removed: %s",
                counted(len(uuids), "instance"),
                uuids[0],
                error.message,
            )
            raise

    def _before_silence(self) -> float:
        """Return a time at which the hosts that are down now and may return count as up.

        The rule is that of `db.services.host_may_return`: a host that is down may return within `service_down_time`. A
        host that announced its stop is down at once.
        """
        return self._clock.now() - self._service_down_time

    def _would_fit(self, spec: RequestSpec, uuids: Sequence[str], **options: Any) -> bool:
        """Return whether there would be hosts for all instances, at another time."""
        try:
            self._scheduler.preview(self._feed.table, spec, uuids, **options)
        except NoValidHost:
            return False
        return True

    async def _claim(
        self,
        spec: RequestSpec,
        request: SelectDestinations,
        decision: SchedulerDecision,
        held: Mapping[str, str],
    ) -> ClaimResult:
        # An instance with a requested host does not keep what it holds elsewhere.
        wanted = [
            Claim.of(
                destination.instance_uuid,
                destination.selected,
                spec,
                request.epochs.get(destination.instance_uuid),
                aliases=self._pci_aliases,
                keep_held=not spec.names_host,
                avoid_node=held.get(destination.instance_uuid),  # it was known, and another one was chosen
                moving=request.moving.get(destination.instance_uuid),
            )
            for destination in decision.destinations
        ]
        return await self._database.write(claims.claim, wanted, now=micros(self._clock.now()))

    async def _completed_spec(self, request: SelectDestinations) -> RequestSpec:
        """Return the request's spec with what is read for it.

        That is whether an aggregate names its project, if aggregates may limit projects; the hosts of the server
        group's other members; the hosts of servers that hints name; and how alike the
        images on each host are, if a weigher compares them. A server group that was deleted is left out, and so is
        the zone of a forced host if no aggregate has it, as in Nova: `nova:HOST` is any zone.
        """
        spec = request.spec
        zone_of_forced = spec.availability_zone if spec.forced else None
        known: Sequence[AggregateRow] = ()
        if self._prefilters.tenants or zone_of_forced:
            known = await self._database.read(aggregates.list_)
        if zone_of_forced and all(each.metadata.get(aggregates.ZONE) != zone_of_forced for each in known):
            spec = msgspec.structs.replace(spec, availability_zone=None)
        if self._prefilters.tenants:
            limited = any(names_project(each.metadata, spec.project_id) for each in known)
            spec = msgspec.structs.replace(spec, has_aggregates=limited)
        named = {hint: spec.hints[hint] for hint in SERVER_HINTS if spec.hints.get(hint)}
        if named:
            hinted = await self._database.read(server_hosts.hosts_of_servers, spec.project_id, named)
            spec = msgspec.structs.replace(spec, hinted_hosts=hinted)
        if self._image_counts is not None and spec.image is not None:
            spec = msgspec.structs.replace(spec, alike_images=await self._image_counts.alike(spec.image))
        if spec.server_group is None:
            return spec
        own = [*request.instance_uuids, *request.moving.values()]
        hosts = await self._database.read(_members, spec.server_group.id, own)
        group = None if hosts is None else msgspec.structs.replace(spec.server_group, hosts=hosts)
        return msgspec.structs.replace(spec, server_group=group)


def _members(conn: sa.Connection, group_uuid: str, without: Sequence[str]) -> dict[str, int] | None:
    """Return host -> members of a group, None if there is no such group; what these consumers hold is left out.

    The servers of a request, and the migrations that hold what they leave, do not bind the request to their hosts.
    """
    hosts = group_members.by_host(conn, group_uuid)
    return dict(Counter(hosts) - allocations.hosts_of(conn, without)) if hosts else hosts
