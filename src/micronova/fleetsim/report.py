"""What a simulation found: figures for each policy, and plots that show the policies side by side."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from micronova.fleetsim.measures import Interval, Sample
from micronova.fleetsim.simulation import Experiment, Outcome
from micronova.fleetsim.svg import HOUR, Panel, Series, plot

CLASSES: Final = {"VCPU": "vCPUs", "PCPU": "dedicated CPUs", "MEMORY_MB": "memory", "DISK_GB": "disk"}
_MOST_BARS: Final = 48
_MOST_CATEGORIES: Final = 8  # that a plot shows; the rest is "other"


def figures(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of one policy as plain data."""
    samples, times = outcome.samples, sorted(outcome.decision_seconds)
    seconds = sum(times)
    refused = sum(outcome.refused_servers.values())
    return {
        "policy": outcome.policy.name,
        "settings": outcome.policy.changed,
        "requests": len(experiment.requests),
        "servers": outcome.placed_servers + refused,
        "placed_requests": outcome.placed_requests,
        "placed_servers": outcome.placed_servers,
        "refused_requests": outcome.refused_requests,
        "refused_servers": refused,
        "refused_servers_by_category": dict(sorted(outcome.refused_servers.items(), key=lambda each: -each[1])),
        "decisions_per_second": len(times) / seconds if seconds else 0.0,
        "servers_per_second": (outcome.placed_servers + refused) / seconds if seconds else 0.0,
        "decision_ms_p50": _percentile(times, 0.5) * 1000,
        "decision_ms_p99": _percentile(times, 0.99) * 1000,
        "used": {name: _spread(samples, _share(name)) for name in samples[0].used},
        "unusable_memory": _spread(samples, lambda each: each.unusable),
        "largest_flavor": outcome.largest_flavor,
        "largest_flavor_fits": _spread(samples, lambda each: each.largest_fits),
        "hosts_without_servers": _spread(samples, lambda each: outcome.hosts - each.occupied),
        "samples": [_plain(each, outcome.hosts) for each in samples],
    }


def _share(name: str) -> Callable[[Sample], float]:
    return lambda sample: sample.used[name]


def _percent(name: str) -> Callable[[Sample], float]:
    return lambda sample: 100 * sample.used[name]


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _spread(samples: Sequence[Sample], value: Callable[[Sample], float]) -> dict[str, float]:
    values = [value(each) for each in samples]
    return {"mean": sum(values) / len(values), "least": min(values), "most": max(values), "end": values[-1]}


def _plain(sample: Sample, hosts: int) -> dict[str, Any]:
    return {
        "time": sample.time,
        "used": sample.used,
        "unusable_memory": sample.unusable,
        "largest_flavor_fits": sample.largest_fits,
        "servers": sample.servers,
        "hosts_without_servers": hosts - sample.occupied,
        "requested_servers": sample.since.requested,
        "refused_servers": sample.since.refused,
        "decisions": sample.since.decisions,
        "decision_seconds": sample.since.decision_seconds,
    }


def report(experiment: Experiment, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return all figures as plain data, for JSON."""
    return {
        "hosts": experiment.hosts,
        "kinds": [kind.name for kind in experiment.fleet.kinds],
        "seed": experiment.seed,
        "simulated_seconds": experiment.requests[-1].at,
        "build_time": experiment.build_time,
        "policies": [figures(experiment, each) for each in outcomes],
    }


def plots(experiment: Experiment, outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the plots, by the name of their file."""
    times, bars = _times(outcomes[0].samples), _times(merged(outcomes[0].samples))
    servers = sum(request.count for request in experiment.requests)
    requests = f"{len(experiment.requests):,} requests for {servers:,} servers"
    note = f"{experiment.hosts:,} hosts, {requests}, seed {experiment.seed}"
    return {
        "utilisation.svg": plot("Utilisation of the fleet", times, _utilisation(outcomes), note),
        "fragmentation.svg": plot("Fragmentation of what is free", times, _fragmentation(outcomes), note),
        "refusals.svg": plot("Refused servers by what was lacking", bars, _refusals(outcomes, bars), note),
        "decisions.svg": plot("Requests and decisions", bars, _decisions(outcomes, bars), note),
    }


def _times(samples: Sequence[Sample]) -> list[float]:
    return [each.time for each in samples]


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """Return fewer samples, with what happened between them: counts of short intervals would be mostly chance."""
    size = -(-len(samples) // _MOST_BARS)
    found = []
    for first in range(0, len(samples), size):
        part = samples[first : first + size]
        since = Interval()
        for each in part:
            since.add(each.since)
        found.append(replace(part[-1], since=since))
    return found


def _utilisation(outcomes: Sequence[Outcome]) -> list[Panel]:
    return [
        Panel(
            f"Used {CLASSES.get(name, name)}",
            "% of capacity",
            _each(outcomes, _percent(name)),
            top=100.0,
        )
        for name in outcomes[0].samples[0].used
    ]


def _fragmentation(outcomes: Sequence[Outcome]) -> list[Panel]:
    hosts = outcomes[0].hosts
    return [
        Panel(
            "Memory that is free on hosts where no flavor of the trace fits",
            "% of capacity",
            _each(outcomes, lambda sample: 100 * sample.unusable),
        ),
        Panel(
            f"Room for the largest flavor, {outcomes[0].largest_flavor}",
            "servers",
            _each(outcomes, lambda sample: sample.largest_fits),
        ),
        Panel("Hosts without servers", "hosts", _each(outcomes, lambda sample: hosts - sample.occupied)),
    ]


def _refusals(outcomes: Sequence[Outcome], times: Sequence[float]) -> list[Panel]:
    """One panel for each policy, with the same axis."""
    totals: dict[str, int] = {}
    for outcome in outcomes:
        for name, count in outcome.refused_servers.items():
            totals[name] = totals.get(name, 0) + count
    shown = sorted(totals, key=lambda name: -totals[name])
    if len(shown) > _MOST_CATEGORIES:
        shown = shown[: _MOST_CATEGORIES - 1]
    rest = totals.keys() - set(shown)
    top = 0.0
    panels = []
    for outcome in outcomes:
        counted = [each.since.refused for each in merged(outcome.samples)]
        rates = [Series(name, _per_hour([each.get(name, 0) for each in counted], times)) for name in shown]
        if rest:
            others = [sum(each.get(name, 0) for name in rest) for each in counted]
            rates.append(Series("other", _per_hour(others, times)))
        top = max([top, *(sum(values) for values in zip(*(each.values for each in rates), strict=True))])
        panels.append((outcome.policy.name, rates))
    return [Panel(f"Policy {name}", "servers per hour", rates, top=top or 1.0, stacked=True) for name, rates in panels]


def _decisions(outcomes: Sequence[Outcome], times: Sequence[float]) -> list[Panel]:
    requested = [each.since.requested for each in merged(outcomes[0].samples)]
    return [
        Panel(
            "CPU time of a decision",
            "ms, mean",
            _each(outcomes, lambda each: _decision_ms(each.since), merged),
        ),
        Panel("Servers that are requested", "per hour", [Series("all policies", _per_hour(requested, times))]),
        Panel("Servers that run", "servers", _each(outcomes, lambda sample: sample.servers, merged)),
    ]


def _decision_ms(since: Interval) -> float:
    return 1000 * since.decision_seconds / since.decisions if since.decisions else 0.0


def _each(
    outcomes: Iterable[Outcome],
    value: Callable[[Sample], float],
    choose: Callable[[Sequence[Sample]], Sequence[Sample]] = lambda samples: samples,
) -> list[Series]:
    return [Series(outcome.policy.name, [value(each) for each in choose(outcome.samples)]) for outcome in outcomes]


def _per_hour(counts: Sequence[int], times: Sequence[float]) -> list[float]:
    spans = [later - earlier for earlier, later in pairwise([0.0, *times])]
    return [count / span * HOUR if span else 0.0 for count, span in zip(counts, spans, strict=True)]
