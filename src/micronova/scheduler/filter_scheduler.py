"""The decision which hosts the instances of a request go to: a host table and a spec in, destinations out, no I/O.

Free resources are checked first, then the filters in their order, then the weighers. The best host gets the instance.
The table counts it at once, so that the next instance of the request sees it. Either all instances are placed or none.
"""

import functools
import logging
import random as random_module
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import CAPACITY, LONGEST_ERROR, MOST_NAMED, Explanation, FilterStep, Winner
from micronova.objects.pci_devices import Alias
from micronova.objects.scheduling import Destination, RequestSpec, SchedulerDecision
from micronova.objects.topology_request import topology_request
from micronova.placement import extra_specs
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.filters.resources import free_amount, has_free
from micronova.scheduler.host_table import Bools, HostTable, HostView, Ints
from micronova.scheduler.prefilters import ONLY_TRAITS, Prefilters
from micronova.scheduler.ranking import Ranking
from micronova.scheduler.weights.base import HostWeigher

log = logging.getLogger(__name__)

NOT_ENOUGH = "No valid host was found. There are not enough hosts available"


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
        prefilters: Prefilters = ONLY_TRAITS,
        aliases: Mapping[str, Alias] | None = None,
    ) -> None:
        self.filters = list(filters)
        self.weighers = list(weighers)
        self._random = random
        self._alternates = max(0, max_attempts - 1)
        self._subset = max(1, host_subset_size)
        self._prefilters = prefilters
        self._shuffle = shuffle_best_same_weighed_hosts
        self._aliases = aliases or {}

    def select(
        self,
        table: HostTable,
        spec: RequestSpec,
        instance_uuids: Sequence[str],
        *,
        now: float,
        held: Mapping[str, str] | None = None,
        spread: int = 1,
        servable: Mapping[str, int] | None = None,
        removed_by: RemovedBy | None = None,
    ) -> SchedulerDecision:
        """Place all instances and count them in the table, or raise NoValidHost and leave the table as it was.

        `held` names the node of instances that hold their resources already; they stay there and are not counted.
        `spread` is how many of the best hosts to choose among at random, for schedulers that lost a race for the best.
        `servable` is, by node, how many more instances its providers can serve, if the request has request groups; a
        node that it does not name serves none.
        `removed_by` gets the filter that removed each host.
        """
        table.now = now
        table.begin_consuming()
        filters = [each for each in self.filters if each.always or not spec.forced]
        resources = extra_specs.node_resources(spec.flavor, spec.image)
        topology = topology_request(spec.flavor, spec.image, self._aliases)
        hosts = _considered(table, spec)
        filtered = self._filter(hosts, spec, resources, filters, servable, removed_by)
        passing_hosts = hosts if filtered.mask is None else hosts.only(filtered.mask)
        kept = {uuid: row for uuid, node in (held or {}).items() if (row := table.index(node)) is not None}
        bulk = len(instance_uuids) > 1
        ranking = Ranking(table, passing_hosts, self.weighers, spec, lasting=bulk)
        rows: list[int] = []
        still_servable = dict(servable) if servable is not None else None
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
                    filtered = self._filter(hosts, spec, resources, filters, still_servable, removed_by)
                    _undo(table, counted, resources)
                message = _refusal(filtered, _Progress(len(rows), len(instance_uuids)))
                reasons = Explanation(hosts=len(hosts), filters=tuple(filtered.steps)).reasons()
                raise NoValidHost(message, hosts=len(hosts), placed=len(counted), reasons=reasons)
            rows.append(row)
            if not bulk:  # before it is counted, or an affinity rule would exclude all other hosts
                alternates = ranking.best(self._alternates, without_host=table.selections[row].host)
            if uuid not in kept:
                table.consume(row, resources, topology)
                if still_servable is not None:
                    still_servable[table.selections[row].node_uuid] -= 1
                if bulk:
                    spec = _joined(spec, table.selections[row].host)
                    self._ask_again(table, ranking, filtered.again, row, spec, resources, still_servable)
        destinations = self._destinations(
            table, ranking, instance_uuids, rows, None if bulk else alternates, spec.forced
        )
        return SchedulerDecision(
            destinations=destinations,
            explanation=Explanation(
                hosts=len(hosts), filters=tuple(filtered.steps), winners=tuple(winners), forced=spec.forced
            ),
        )

    def preview(
        self,
        table: HostTable,
        spec: RequestSpec,
        instance_uuids: Sequence[str],
        *,
        now: float,
        held: Mapping[str, str] | None = None,
        servable: Mapping[str, int] | None = None,
        removed_by: RemovedBy | None = None,
    ) -> SchedulerDecision:
        """Return what `select` would return at this time, or raise NoValidHost; the table stays as it was."""
        decision = self.select(
            table, spec, instance_uuids, now=now, held=held, servable=servable, removed_by=removed_by
        )
        chosen = [each.selected.node_uuid for each in decision.destinations if each.instance_uuid not in (held or {})]
        counted = [row for uuid in chosen if (row := table.index(uuid)) is not None]
        _undo(table, counted, extra_specs.node_resources(spec.flavor, spec.image))
        return decision

    def passing(self, table: HostTable, spec: RequestSpec, *, now: float) -> list[str]:
        """Return the nodes that pass all but request groups at this time; their providers are asked then."""
        table.now = now
        filters = [each for each in self.filters if each.always or not spec.forced]
        hosts = _considered(table, spec)
        filtered = self._filter(hosts, spec, extra_specs.node_resources(spec.flavor, spec.image), filters)
        passing_hosts = hosts if filtered.mask is None else hosts.only(filtered.mask)
        return [each.node_uuid for each in passing_hosts.selections()]

    def check_image(self, table: HostTable, spec: RequestSpec, node_uuid: str, *, now: float) -> Explanation:
        """Return what the filters that compare images decide about one node; raise NoValidHost if one refuses it.

        A server on that node keeps what it holds: other filters would count it as a second one.
        """
        table.now = now
        row = table.index(node_uuid)
        hosts = table.view(np.array([] if row is None else [row], np.intp))
        filtered = self._filter(hosts, spec, {}, [each for each in self.filters if each.compares_images])
        explanation = Explanation(hosts=len(hosts), filters=tuple(filtered.steps))
        if row is None or not filtered.remaining:
            message = _refusal(filtered, _Progress(0, 1))
            raise NoValidHost(message, hosts=len(hosts), placed=0, reasons=explanation.reasons())
        return explanation

    def _filter(
        self,
        hosts: HostView,
        spec: RequestSpec,
        resources: Mapping[str, int],
        filters: Sequence[HostFilter],
        servable: Mapping[str, int] | None = None,
        removed_by: RemovedBy | None = None,
    ) -> "_Filtered":
        filtered = _Filtered(hosts, removed_by)
        for name, amount in resources.items():
            if not any(name in each.covers for each in filters):
                predicate = functools.partial(free_amount, name, amount)
                filtered.apply(CAPACITY.format(name), predicate, has_free(hosts, name, amount))
        for prefilter in self._prefilters.masks(hosts, spec):
            filtered.apply(prefilter.name, prefilter.describe, prefilter.mask)
        for each in filters:
            if not filtered.remaining:
                break
            mask, error = _ask(each, hosts, spec)
            predicate = functools.partial(_not_asked, each) if error else functools.partial(each.describe, spec)
            filtered.apply(_name(each), predicate, mask, error)
            # Free resources, which the Ram and Disk filters cover, are checked again in any case.
            if each.scope is Scope.ALL or (each.scope is Scope.HOST and mask is not None and not each.covers):
                filtered.again.append(each)
        if servable is not None and filtered.remaining:
            filtered.apply("RequestGroups", _serves_request_groups, hosts.with_servable(servable))
        return filtered

    def _ask_again(
        self,
        table: HostTable,
        ranking: Ranking,
        filters: Sequence[HostFilter],
        row: int,
        spec: RequestSpec,
        resources: Mapping[str, int],
        servable: Mapping[str, int] | None,
    ) -> None:
        """After an instance was counted on a host, drop hosts that no longer pass and weigh the changed ones again."""
        host = table.selections[row].host
        touched = ranking.positions_of(host)
        rows = [ranking.row(position) for position in touched]
        passes = [
            table.fits(each, resources) and (servable is None or servable.get(table.selections[each].node_uuid, 0) > 0)
            for each in rows
        ]
        few = table.view(np.array(rows, np.intp))
        mask: Bools | None = None
        for each in filters:
            if each.scope is Scope.HOST:
                own, _ = _ask(each, few, spec)
                if own is not None:
                    passes = [passed and bool(more) for passed, more in zip(passes, own, strict=True)]
            else:
                own, _ = _ask(each, ranking.hosts, spec)
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
        self._hosts = hosts
        self._removed_by = removed_by
        if removed_by is not None:
            removed_by.begin(hosts)
        self.mask: Bools | None = None  # None: all pass
        self.remaining = len(hosts)
        self.steps: list[FilterStep] = []
        self.predicates: list[Callable[[], str]] = []
        """Of each step that removed hosts: returns what a host that passes is or has, for users."""
        self.again: list[HostFilter] = []  # filters whose mask may differ for the next instance of the request

    def apply(self, name: str, predicate: Callable[[], str], mask: Bools | None, error: str = "") -> None:
        """Remove the hosts that a mask excludes; `predicate` goes to `predicates`."""
        before, entered = self.mask, self.remaining
        names: tuple[str, ...] = ()
        if mask is not None:
            self.mask = mask if before is None else before & mask
            self.remaining = int(np.count_nonzero(self.mask))
            if self.remaining < entered:
                self.predicates.append(predicate)
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
        return tuple(each.host for each in self._hosts.at(removed[:MOST_NAMED]).selections())


class _Progress(NamedTuple):
    """How many servers of a request have a host, and how many need one."""

    placed: int
    servers: int


def _refusal(filtered: _Filtered, progress: _Progress) -> str:
    """Return why there is no host, for users: what no host is or has, and how many servers have a host.

    No host and no other server is named. Users learn the names of filters neither, but for those that failed.
    """
    lacking = [predicate() for predicate in filtered.predicates]
    if not lacking:
        return f"{NOT_ENOUGH}."
    *others, last = lacking
    all_of_them = f"{', '.join(others)} and {last}" if others else last
    remark = f" There is room for {progress.placed} of {progress.servers} servers." if progress.servers > 1 else ""
    return f"{NOT_ENOUGH}: no host {all_of_them}.{remark}"


def _serves_request_groups() -> str:
    return "has the further resources, with their traits, that the flavor asks for"


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


def _ask(each: HostFilter, hosts: HostView, spec: RequestSpec) -> tuple[Bools | None, str]:
    """Return a filter's mask and its error; a filter that fails is reported and lets no host pass.

    It may be there to keep servers from hosts that are for others.
    """
    try:
        mask = each.mask(hosts, spec)
        if mask is not None and (mask.dtype != np.bool_ or mask.shape != (len(hosts),)):
            raise TypeError("a filter gives one bool per host")
        return mask, ""
    except Exception as error:  # a plugin's code may raise anything
        log.exception("the filter %s failed; no host passes it", _name(each))
        return np.zeros(len(hosts), np.bool_), f"{type(error).__name__}: {error}"


def _not_asked(each: HostFilter) -> str:
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
