"""Drives the scheduler with the requests of a trace, in virtual time.

The decisions, the host table, the filters and the weighers are those of a cloud (`scheduler/`). A request of several
servers is one decision, and gets all hosts or none. A refused request is not repeated, unless hosts were not compared
with it yet.
"""

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from micronova.fleetsim.claims import Claims, Held
from micronova.fleetsim.fleet import FleetModel, make_hosts
from micronova.fleetsim.measures import Demands, Interval, Sample, category, sample
from micronova.fleetsim.policies import Policy, PolicyScheduler
from micronova.fleetsim.trace import Request
from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import explanation_of
from micronova.objects.scheduling import SERVER_HINTS, RequestSpec, SchedulerDecision
from micronova.objects.topology_request import topology_request
from micronova.placement import extra_specs
from micronova.scheduler.host_table import HostTable


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is simulated, besides the policy."""

    fleet: FleetModel
    hosts: int
    requests: Sequence[Request]
    seed: int = 1
    build_time: float = 30.0  # seconds that a host works on a new server
    samples: int = 200  # moments that are measured, evenly over the time


@dataclass(slots=True)
class Outcome:
    """What became of a trace under a policy."""

    policy: Policy
    hosts: int
    largest_flavor: str
    samples: list[Sample] = field(default_factory=list)
    placed_requests: int = 0
    placed_servers: int = 0
    refused_requests: int = 0
    refused_servers: dict[str, int] = field(default_factory=dict)  # by category
    decision_seconds: "array[float]" = field(default_factory=lambda: array("d"))


class _Event(IntEnum):
    """What happens without a request; of events at the same time, the smallest is first."""

    BUILT = 0
    DELETED = 1


def check(experiment: Experiment, policies: Sequence[Policy]) -> None:
    """Raise Invalid if a policy cannot be simulated, or would refuse a request as malformed."""
    for policy in policies:
        PolicyScheduler(policy, experiment.seed).check(experiment.requests, experiment.fleet.zones)


async def simulate(
    experiment: Experiment, policy: Policy, *, timer: Callable[[], float], progress: Callable[[int], None] | None = None
) -> Outcome:
    """Run a trace; `progress` is called with the number of requests that are decided, `timer` measures decisions."""
    return await _Run(experiment, policy, timer).run(progress)


class _Run:
    def __init__(self, experiment: Experiment, policy: Policy, timer: Callable[[], float]) -> None:
        self._experiment = experiment
        self._timer = timer
        made = PolicyScheduler(policy, experiment.seed)
        self._scheduler, self._aliases = made.scheduler, made.aliases
        self._table = HostTable()
        self._claims = Claims(make_hosts(experiment.fleet, experiment.hosts, policy.settings.default), self._table)
        self._demands = Demands(request.spec for request in experiment.requests)
        self._events: list[tuple[float, _Event, int, Held]] = []
        self._named: dict[tuple[str, str], Held] = {}  # by the project and the id of a line, for hints
        self._outcome = Outcome(policy, experiment.hosts, self._demands.largest_name)
        self._since = Interval()

    async def run(self, progress: Callable[[int], None] | None) -> Outcome:
        """Decide about all requests; the end is the arrival of the last one."""
        moments = self._moments()
        due = next(moments, None)
        for number, request in enumerate(self._experiment.requests):
            while due is not None and due <= request.at:
                self._measure(due)
                due = next(moments, None)
            self._pass_time(request.at)
            await self._decide(number, request)
            if progress is not None:
                progress(number + 1)
        self._measure(self._experiment.requests[-1].at)
        return self._outcome

    def _moments(self) -> Iterator[float]:
        """Yield the times of all samples but the last one."""
        end, count = self._experiment.requests[-1].at, self._experiment.samples
        return (end * position / count for position in range(1, count))

    def _pass_time(self, until: float) -> None:
        """Let builds end and servers be deleted."""
        events, claims = self._events, self._claims
        while events and events[0][0] <= until:
            _, kind, number, held = heapq.heappop(events)
            if kind is _Event.BUILT:
                claims.built(held)
            else:
                ended = self._experiment.requests[number]
                claims.release(
                    held, building=ended.lifetime is not None and ended.lifetime <= self._experiment.build_time
                )
                if ended.id is not None:
                    del self._named[ended.spec.project_id, ended.id]
        claims.feed()
        self._table.set_heard_since(until)  # no host of the fleet ever fails

    async def _decide(self, number: int, request: Request) -> None:
        spec, outcome, since = self._with_hosts(request.spec), self._outcome, self._since
        uuids = [f"{number}-{position}" for position in range(request.count)]
        since.requested += request.count
        found, took = await self._select(spec, uuids, request.at)
        if isinstance(found, NoValidHost):
            lacking = category(explanation_of(found))
            outcome.refused_requests += 1
            for counted in (outcome.refused_servers, since.refused):
                counted[lacking] = counted.get(lacking, 0) + request.count
        else:
            outcome.placed_requests += 1
            outcome.placed_servers += request.count
            self._place(number, request, spec, tuple(each.selected.node_uuid for each in found.destinations))
        outcome.decision_seconds.append(took)
        since.decisions += 1
        since.decision_seconds += took

    async def _select(
        self, spec: RequestSpec, uuids: Sequence[str], now: float
    ) -> tuple[SchedulerDecision | NoValidHost, float]:
        """Decide, again until all hosts are compared with the request; return how long the last decision took, too."""
        left = self._experiment.hosts + 1
        while True:
            await self._scheduler.prepare(self._table, spec)
            begun = self._timer()
            try:
                return self._scheduler.select(self._table, spec, uuids, now=now), self._timer() - begun
            except NoValidHost as error:
                took = self._timer() - begun
                uncompared = error.details.get("uncompared", 0)
                if not 0 < uncompared < left:
                    return error, took
                left = uncompared

    def _place(self, number: int, request: Request, spec: RequestSpec, nodes: tuple[str, ...]) -> None:
        held = self._claims.claim(
            nodes,
            extra_specs.node_resources(spec.flavor, spec.image),
            topology_request(spec.flavor, spec.image, self._aliases),
            None if spec.server_group is None else spec.server_group.id,
        )
        if request.id is not None:
            self._named[spec.project_id, request.id] = held
        if request.lifetime is None or request.lifetime > self._experiment.build_time:
            heapq.heappush(self._events, (request.at + self._experiment.build_time, _Event.BUILT, number, held))
        if request.lifetime is not None:
            heapq.heappush(self._events, (request.at + request.lifetime, _Event.DELETED, number, held))

    def _with_hosts(self, spec: RequestSpec) -> RequestSpec:
        """Return the spec with the hosts of its group and of the servers that its hints name, as the manager does."""
        if spec.hints:
            hosts = {hint: self._hosts_of(spec, hint) for hint in SERVER_HINTS if spec.hints.get(hint)}
            spec = msgspec.structs.replace(spec, hinted_hosts=hosts)
        if spec.server_group is not None:
            group = msgspec.structs.replace(spec.server_group, hosts=self._claims.hosts_of_group(spec.server_group.id))
            spec = msgspec.structs.replace(spec, server_group=group)
        return spec

    def _hosts_of(self, spec: RequestSpec, hint: str) -> tuple[str, ...]:
        """Return the hosts of the servers that a hint names; those that are deleted have none."""
        held = [self._named.get((spec.project_id, each)) for each in spec.hints[hint]]
        return tuple(sorted({host for each in held if each is not None for host in self._claims.hosts_of(each)}))

    def _measure(self, moment: float) -> None:
        self._pass_time(moment)
        self._outcome.samples.append(sample(moment, self._since, self._claims, self._table, self._demands))
        self._since = Interval()
