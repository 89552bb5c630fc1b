"""The decision which hosts the instances of a request go to: a host table and a spec in, destinations out, no I/O.

Zones and excluded hosts narrow the hosts. Then free resources are checked, then the filters in their order, then the
weighers. The best host gets the instance. The table counts the instance at once, so that the decision about the next
one of the request sees it. Either all instances are placed or none.
"""

import functools
import logging
import random as random_module
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import CAPACITY, LONGEST_ERROR, MOST_NAMED, Explanation, FilterStep, Winner
from micronova.objects.pci_devices import Alias
from micronova.objects.scheduling import Destination, RequestSpec, SchedulerDecision
from micronova.objects.topology_request import topology_request
from micronova.placement import extra_specs
from micronova.scheduler.filters.base import Compared, FilterOptions, HostFilter, Scope
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.filters.resources import LITTLE_ROOM, free_amount, has_free
from micronova.scheduler.host_columns import Bools, Ints
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.host_view import HostView, spread_over
from micronova.scheduler.no_valid_host import (
    CLAIM_LACK,
    Removal,
    Room,
    accepts_claim,
    claim_step,
    compared,
    message,
    search_ended,
    serves_request_groups,
)
from micronova.scheduler.prefilters import DEFAULT_PREFILTERS, Prefilters
from micronova.scheduler.ranking import Ranking
from micronova.scheduler.servable import Servable
from micronova.scheduler.weights.base import HostWeigher, WeigherOptions
from micronova.scheduler.weights.registry import load_weighers

log = logging.getLogger(__name__)

REQUEST_GROUPS: Final = "RequestGroups"
SEARCH_ENDED: Final = "RequestGroupsSearch"
"""The step that removes hosts whose providers were not searched to the end, so that it is not known what they have."""

COMPARISON_ENDED: Final = "{}Search"
"""The step that removes hosts that a filter has not compared, because it takes long."""


class RemovedBy:
    """Which filter removed each host of a decision, for those who ask about every host."""

    def __init__(self) -> None:
        self.hosts: HostView | None = None  # those that were considered
        self.steps: Ints = np.zeros(0, np.int64)  # by position in `hosts`: the number of the filter, -1 if none did

    def begin(self, hosts: HostView) -> None:
        """Begin a pass through the filters; the last pass counts."""
        self.hosts, self.steps = hosts, np.full(len(hosts), -1)


class FilterScheduler:
    """Decides with filters, weighers and the rules of choosing among the best hosts."""

    def __init__(
        self,
        filters: Sequence[HostFilter],
        weighers: Sequence[HostWeigher],
        *,
        random: random_module.Random,
        max_attempts: int = 3,
        host_subset_size: int = 1,
        shuffle_best_same_weighed_hosts: bool = False,
        prefilters: Prefilters = DEFAULT_PREFILTERS,
        aliases: Mapping[str, Alias] | None = None,
    ) -> None:
        self.filters = sorted(filters, key=lambda each: not each.narrows)
        self.weighers = list(weighers)
        self._random = random
        self._alternates = max(0, max_attempts - 1)
        self._subset = max(1, host_subset_size)
        self._prefilters = prefilters
        self._shuffle = shuffle_best_same_weighed_hosts
        self._aliases = aliases or {}

    @classmethod
    def of(
        cls,
        settings: FilterSchedulerSettings,
        metrics: MetricsSettings,
        *,
        random: random_module.Random,
        service_down_time: float,
        max_attempts: int,
        prefilters: Prefilters,
        aliases: dict[str, Alias],
    ) -> "FilterScheduler":
        """Return the scheduler that the settings describe, with the filters and weighers that they enable."""
        filters = FilterOptions(
            service_down_time=service_down_time, settings=settings, metrics=metrics, pci_aliases=aliases
        )
        return cls(
            load_filters(filters),
            load_weighers(options=WeigherOptions(settings=settings, metrics=metrics)),
            random=random,
            max_attempts=max_attempts,
            host_subset_size=settings.host_subset_size,
            shuffle_best_same_weighed_hosts=settings.shuffle_best_same_weighed_hosts,
            prefilters=prefilters,
            aliases=aliases,
        )

    def select(
        self,
        table: HostTable,
        spec: RequestSpec,
        instance_uuids: Sequence[str],
        *,
        now: float,
        held: Mapping[str, str] | None = None,
        spread: int = 1,
        servable: Servable | None = None,
        removed_by: RemovedBy | None = None,
    ) -> SchedulerDecision:
        """Place all instances and count them in the table, or raise NoValidHost and leave the table as it was.

        `held` names the node of instances that hold their resources already. They are not counted, and stay there
        unless something else than the instances on it closes the host to the request.
        `spread` is how many of the best hosts to choose among at random, for schedulers that lost a race for the best.
        `servable` is how many instances nodes can take, if the request has request groups or claims were refused.
        `removed_by` gets the filter that removed each host.
        """
        table.now = now
        table.begin_consuming()
        resources = extra_specs.node_resources(spec.flavor, spec.image)
        topology = topology_request(spec.flavor, spec.image, self._aliases)
        hosts = _considered(table, spec)
        kept = self._kept_rows(table, spec, held)
        for row in kept.values():  # those that stay are members of their group, and the others are not
            spec = _joined(spec, table.selections[row].host)
        filtered = self._filter(hosts, spec, resources, servable, removed_by)
        bulk = len(instance_uuids) > 1
        ranking = Ranking(table, filtered.passing(), self.weighers, spec, lasting=bulk)
        rows: list[int] = []
        left = servable.copy() if servable is not None else None
        winners: list[Winner] = []
        alternates: list[int] = []
        for uuid in instance_uuids:
            if uuid in kept:
                row = kept[uuid]
                winners.append(_winner(table, uuid, row))
            elif len(ranking):
                position = self._choose(ranking, spread)
                row = ranking.row(position)
                winners.append(_winner(table, uuid, row, ranking, position))
            else:
                counted = [row for row, uuid in zip(rows, instance_uuids, strict=False) if uuid not in kept]
                if counted:
                    filtered = self._filter(hosts, spec, resources, left, removed_by)
                    _undo(table, counted, resources)
                raise _no_valid_host(spec, filtered, Room(len(rows), len(instance_uuids)), placed=len(counted))
            rows.append(row)
            if not bulk:  # before it is counted, or an affinity rule would exclude all other hosts
                alternates = ranking.best(self._alternates, without_host=table.selections[row].host)
            if uuid not in kept:
                table.consume(row, resources, topology)
                drained = left is not None and left.take(table.selections[row].node_uuid)
                if bulk:
                    spec = _joined(spec, table.selections[row].host)
                    self._ask_again(table, ranking, filtered.again, row, spec, resources, left, drained=drained)
        destinations = self._destinations(
            table, ranking, instance_uuids, rows, None if bulk else alternates, spec.forced
        )
        return SchedulerDecision(
            destinations=destinations,
            explanation=Explanation(
                hosts=len(hosts), filters=tuple(filtered.steps), winners=tuple(winners), forced=spec.forced
            ),
        )

    def _filters_for(self, spec: RequestSpec) -> list[HostFilter]:
        """Return the filters that are asked about a request: about a forced host, only those that always are."""
        return [each for each in self.filters if each.always or not spec.forced]

    async def prepare(self, table: HostTable, spec: RequestSpec) -> None:
        """Let filters do beforehand what takes long, with pauses; a decision has none.

        A filter that fails here is asked in the decision nevertheless.
        """
        for each in self._filters_for(spec):
            if type(each).prepare is HostFilter.prepare:
                continue
            try:
                await self._prepare(each, table, spec)
            except Exception:  # a plugin's code may raise anything
                log.exception("the filter %s failed to prepare a decision", _name(each))

    async def _prepare(self, each: HostFilter, table: HostTable, spec: RequestSpec) -> None:
        if each.asks_remaining and not each.concerns(spec):
            return
        hosts = _considered(table, spec)
        if each.asks_remaining:
            narrowing = [one for one in self._filters_for(spec) if one.narrows]
            resources = extra_specs.node_resources(spec.flavor, spec.image)
            hosts = self._filter(hosts, spec, resources, filters=narrowing).passing()
        await each.prepare(hosts, spec)

    def preview(
        self,
        table: HostTable,
        spec: RequestSpec,
        instance_uuids: Sequence[str],
        *,
        now: float,
        held: Mapping[str, str] | None = None,
        servable: Servable | None = None,
        removed_by: RemovedBy | None = None,
    ) -> SchedulerDecision:
        """Return what `select` would return at this time, or raise NoValidHost; the table stays as it was."""
        decision = self.select(
            table, spec, instance_uuids, now=now, held=held, servable=servable, removed_by=removed_by
        )
        kept = self._kept_rows(table, spec, held)
        chosen = [each.selected.node_uuid for each in decision.destinations if each.instance_uuid not in kept]
        counted = [row for uuid in chosen if (row := table.index(uuid)) is not None]
        _undo(table, counted, extra_specs.node_resources(spec.flavor, spec.image))
        return decision

    def passing(self, table: HostTable, spec: RequestSpec, *, now: float) -> list[str]:
        """Return the nodes that pass all but request groups at this time; their providers are asked then."""
        table.now = now
        table.begin_consuming()
        resources = extra_specs.node_resources(spec.flavor, spec.image)
        filtered = self._filter(_considered(table, spec), spec, resources)
        return [each.node_uuid for each in filtered.passing().selections()]

    def check_image(self, table: HostTable, spec: RequestSpec, node_uuid: str, *, now: float) -> Explanation:
        """Return what the filters that compare images decide about one node; raise NoValidHost if one refuses it.

        A server on that node keeps what it holds: other filters would count it as a second one.
        """
        table.now = now
        row = table.index(node_uuid)
        hosts = table.view(np.array([] if row is None else [row], np.intp))
        filtered = _Filtered(hosts, None)
        for each in self._prefilters.masks_of_rebuild(hosts, spec):
            filtered.apply(each.name, each.describe, each.lack, each.mask)
        filtered.ask([each for each in self.filters if each.compares_images], spec)
        if row is None or not filtered.remaining:
            raise _no_valid_host(spec, filtered, Room(0, 1), only=True)
        return Explanation(hosts=len(hosts), filters=tuple(filtered.steps))

    def _kept_rows(self, table: HostTable, spec: RequestSpec, held: Mapping[str, str] | None) -> dict[str, int]:
        """Return the rows of instances that hold their resources already, on hosts that still take the request.

        Only those filters are asked that do not depend on what is placed on a host: others would count these instances
        a second time. A request that names its host has no other one.
        """
        rows = {uuid: row for uuid, node in (held or {}).items() if (row := table.index(node)) is not None}
        if not rows or spec.names_host:
            return rows
        wanted = sorted(set(rows.values()))
        filters = [each for each in self._filters_for(spec) if each.scope is Scope.REQUEST]
        filtered = _Filtered(table.view(np.array(wanted, np.intp)), None)
        for prefilter in self._prefilters.masks(filtered.hosts, spec):
            filtered.apply(prefilter.name, prefilter.describe, prefilter.lack, prefilter.mask)
        filtered.ask(filters, spec)
        nodes = {each.node_uuid for each in filtered.passing().selections()} if filtered.remaining else set()
        return {uuid: row for uuid, row in rows.items() if table.selections[row].node_uuid in nodes}

    def _filter(
        self,
        hosts: HostView,
        spec: RequestSpec,
        resources: Mapping[str, int],
        servable: Servable | None = None,
        removed_by: RemovedBy | None = None,
        *,
        filters: Sequence[HostFilter] | None = None,
    ) -> "_Filtered":
        """Ask the filters that concern a request, or those that are given, about hosts."""
        if filters is None:
            filters = self._filters_for(spec)
        filtered = _Filtered(hosts, removed_by)
        first = sum(each.narrows for each in filters)  # they come first
        filtered.ask(filters[:first], spec)
        for name, amount in resources.items():
            if not any(name in each.covers for each in filters):
                predicate = functools.partial(free_amount, name, amount)
                filtered.apply(CAPACITY.format(name), predicate, LITTLE_ROOM, has_free(hosts, name, amount))
        for prefilter in self._prefilters.masks(hosts, spec):
            filtered.apply(prefilter.name, prefilter.describe, prefilter.lack, prefilter.mask)
        filtered.ask(filters[first:], spec)
        if servable is not None and servable.grouped and filtered.remaining:
            able, unknown = hosts.on_nodes(servable.able()), hosts.on_nodes(servable.unknown())
            predicate = functools.partial(serves_request_groups, spec)
            filtered.apply(REQUEST_GROUPS, predicate, "lack further resources", able | unknown)
            if filtered.remaining and unknown.any():
                filtered.apply(SEARCH_ENDED, search_ended, "were not searched to the end", ~unknown, certain=False)
        if servable is not None and servable.reasons and filtered.remaining:
            predicate = functools.partial(accepts_claim, servable.reasons)
            filtered.apply(claim_step(servable.reasons), predicate, CLAIM_LACK, ~hosts.on_nodes(servable.refusing()))
        return filtered

    def _ask_again(
        self,
        table: HostTable,
        ranking: Ranking,
        filters: Sequence[HostFilter],
        row: int,
        spec: RequestSpec,
        resources: Mapping[str, int],
        servable: Servable | None,
        *,
        drained: bool,
    ) -> None:
        """After an instance was counted on a host, drop hosts that no longer pass and weigh the changed ones again.

        `drained`: it took of sharing providers what other hosts need, too.
        """
        host = table.selections[row].host
        touched = ranking.positions_of(host)
        rows = [ranking.row(position) for position in touched]
        passes = [
            table.fits(each, resources) and (servable is None or servable.takes(table.selections[each].node_uuid))
            for each in rows
        ]
        few = table.view(np.array(rows, np.intp))
        mask: Bools | None = None
        if servable is not None and drained:
            mask = ranking.hosts.on_nodes(servable.able())
        for each in filters:
            if each.scope is Scope.HOST:
                own = _ask(each, few, spec)[0].mask
                if own is not None:
                    passes = [passed and bool(more) for passed, more in zip(passes, own, strict=True)]
            else:
                own = _ask(each, ranking.hosts, spec)[0].mask
                if own is not None:
                    mask = own if mask is None else mask & own
        if not all(passes):
            mask = np.ones(len(ranking), np.bool_) if mask is None else mask.copy()
            mask[touched] &= passes
        if mask is not None and not mask.all():
            ranking.keep(mask)
            touched = ranking.positions_of(host)
        ranking.weigh_again(touched, spec)

    def _choose(self, ranking: Ranking, spread: int) -> int:
        totals = ranking.totals
        size = min(max(self._subset, spread), len(totals))
        if self._shuffle:
            best = np.flatnonzero(totals == totals.max())
            if len(best) >= size:
                return int(best[self._random.randrange(len(best))])
        if size == 1:
            return int(totals.argmax())
        # A stable sort: among equal hosts the first wins, as argmax does.
        order = np.argsort(-totals, kind="stable")
        return int(order[self._random.randrange(size)])

    def _destinations(
        self,
        table: HostTable,
        ranking: Ranking,
        instance_uuids: Sequence[str],
        rows: list[int],
        alternates: list[int] | None,
        forced: bool,
    ) -> tuple[Destination, ...]:
        """Return the destinations; without `alternates`, they are the best hosts after all were placed."""
        best: list[int] | None = None
        destinations = []
        for uuid, row in zip(instance_uuids, rows, strict=True):
            chosen = table.selections[row]
            if forced:
                others = []
            elif alternates is not None:
                others = alternates
            else:
                if best is None:
                    best = ranking.best(self._alternates + 1)
                others = [each for each in best if table.selections[each].host != chosen.host]
            names = tuple(table.selections[each] for each in others[: self._alternates])
            destinations.append(Destination(instance_uuid=uuid, selected=chosen, alternates=names))
        return tuple(destinations)


class _Filtered:
    """The hosts that pass all steps so far, and what each step removed."""

    def __init__(self, hosts: HostView, removed_by: RemovedBy | None) -> None:
        self.hosts = hosts  # all of them
        self._removed_by = removed_by
        if removed_by is not None:
            removed_by.begin(hosts)
        self._mask: Bools | None = None  # None: all pass
        self.remaining = len(hosts)
        self.steps: list[FilterStep] = []
        self.uncompared = 0  # hosts that were removed because it takes long to compare them
        self.removals: list[Removal] = []  # of each step that removed hosts
        self.again: list[HostFilter] = []  # filters whose mask may differ for the next instance of the request

    def passing(self) -> HostView:
        """Return the hosts that pass."""
        return self.hosts if self._mask is None else self.hosts.only(self._mask)

    def ask(self, filters: Sequence[HostFilter], spec: RequestSpec) -> None:
        """Remove the hosts that filters exclude; those after the one that leaves none are not asked."""
        for each in filters:
            if not self.remaining:
                break
            few = self._mask if each.asks_remaining else None
            (mask, uncompared), error = _ask(each, self.hosts if few is None else self.passing(), spec)
            if few is not None:
                mask = None if mask is None else spread_over(mask, few)
                uncompared = None if uncompared is None else spread_over(uncompared, few)
            if mask is not None and uncompared is not None:
                mask = mask | uncompared
            predicate = (
                functools.partial(_failed_predicate, each) if error else functools.partial(_describe, each, spec)
            )
            self.apply(_name(each), predicate, each.lack, mask, error, narrows=each.narrows and not error)
            if uncompared is not None and self.remaining:
                name = COMPARISON_ENDED.format(_name(each))
                self.apply(name, compared, "were not compared", ~uncompared, certain=False)
                self.uncompared += self.steps[-1].removed
            # Free resources, which the Ram and Disk filters cover, are checked again in any case.
            if each.scope is Scope.ALL or (each.scope is Scope.HOST and mask is not None and not each.covers):
                self.again.append(each)

    def apply(
        self,
        name: str,
        predicate: Callable[[], str],
        lack: str,
        mask: Bools | None,
        error: str = "",
        *,
        narrows: bool = False,
        certain: bool = True,
    ) -> None:
        """Remove the hosts that a mask excludes; the words and what they are about are for users, see `Removal`.

        A step after the one that leaves none is not part of the explanation.
        """
        if not self.remaining:
            return
        before, entered = self._mask, self.remaining
        names: tuple[str, ...] = ()
        if mask is not None:
            self._mask = mask if before is None else before & mask
            self.remaining = int(np.count_nonzero(self._mask))
            if self.remaining < entered:
                self.removals.append(Removal(entered - self.remaining, predicate, lack, narrows, certain))
                names = self._note(np.flatnonzero(~mask if before is None else before > mask))  # before and not mask
        step = FilterStep(
            name=name,
            removed=entered - self.remaining,
            remaining=self.remaining,
            error=error[:LONGEST_ERROR],
            hosts=names,
        )
        self.steps.append(step)

    def _note(self, removed: npt.NDArray[np.intp]) -> tuple[str, ...]:
        """Note which hosts the present step removed; return the names of the first."""
        if self._removed_by is not None:
            self._removed_by.steps[removed] = len(self.steps)
        return tuple(each.host for each in self.hosts.at(removed[:MOST_NAMED]).selections())


def _no_valid_host(
    spec: RequestSpec, filtered: _Filtered, room: Room, *, placed: int = 0, only: bool = False
) -> NoValidHost:
    """Return the error of a request that the filters leave no host for; `placed` servers found one before.

    `only`: the request is about one host, whether it names it or not.
    """
    hosts = len(filtered.hosts)
    text = message(spec, filtered.removals, room, only=hosts == 1 and (only or spec.names_host))
    reasons = Explanation(hosts=hosts, filters=tuple(filtered.steps)).reasons()
    error = NoValidHost(text, hosts=hosts, placed=placed, reasons=reasons)
    if filtered.uncompared:
        error.details["uncompared"] = filtered.uncompared
    return error


def _undo(table: HostTable, rows: Sequence[int], resources: Mapping[str, int]) -> None:
    """Undo what was counted on these rows of the table."""
    table.undo_topologies()
    for row in rows:
        table.release(row, resources)


def _considered(table: HostTable, spec: RequestSpec) -> HostView:
    if spec.forced:
        return table.view(table.find_rows(spec.force_host, spec.force_node))
    if spec.requested_host is not None or spec.requested_node is not None:
        return table.view(table.find_rows(spec.requested_host, spec.requested_node))
    return table.view()


def _ask(each: HostFilter, hosts: HostView, spec: RequestSpec) -> tuple[Compared, str]:
    """Return a filter's answer and its error; a filter that fails is reported and lets no host pass.

    It may be there to keep servers from hosts that are for others.
    """
    try:
        answer = Compared.of(each.mask(hosts, spec))
        mask = answer.mask
        if mask is not None and (mask.dtype != np.bool_ or mask.shape != (len(hosts),)):
            raise TypeError("a filter has to return one bool per host")
        return answer, ""
    except Exception as error:  # a plugin's code may raise anything
        log.exception("the filter %s failed; no host passes it", _name(each))
        return Compared(np.zeros(len(hosts), np.bool_)), f"{type(error).__name__}: {error}"


def _describe(each: HostFilter, spec: RequestSpec) -> str:
    """Return what a filter says of hosts that pass; one that fails to say it says what any filter would."""
    try:
        return each.describe(spec)
    except Exception:  # a plugin's code may raise anything
        log.exception("the filter %s failed to describe what it asks for", _name(each))
        return HostFilter.predicate


def _failed_predicate(each: HostFilter) -> str:
    return f"is known to meet the request, because the filter {_name(each)} failed"


def _name(each: HostFilter) -> str:
    return each.name or type(each).__name__


def _winner(
    table: HostTable, instance_uuid: str, row: int, ranking: Ranking | None = None, position: int = 0
) -> Winner:
    chosen = table.selections[row]
    if ranking is None:
        return Winner(host=chosen.host, node=chosen.node, instance_uuid=instance_uuid)
    return Winner(
        host=chosen.host,
        node=chosen.node,
        weight=float(ranking.totals[position]),
        weighers=ranking.contributions(position),
        instance_uuid=instance_uuid,
    )


def _joined(spec: RequestSpec, host: str) -> RequestSpec:
    """Return the spec for the next instance of the request: the server group has one more member on this host."""
    if spec.server_group is None:
        return spec
    members = {**spec.server_group.hosts, host: spec.server_group.hosts.get(host, 0) + 1}
    return msgspec.structs.replace(spec, server_group=msgspec.structs.replace(spec.server_group, hosts=members))
