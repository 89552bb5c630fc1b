"""Synthetic traces, in the shape of published ones: many small servers that live briefly, few large ones that stay.

The figures follow what was published of Azure (Cortez and others, SOSP 2017, and the data set that came with it): four
servers of five have one or two CPUs, nine of ten live for less than a day, but the others use most of the time of
CPUs; two requests of five are for one server, four of five for at most five; more requests arrive by day than by night.

Only `random.Random` draws, so that a seed gives the same trace on every machine.
"""

import math
import random as random_module
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from micronova.conf.default import DefaultSettings
from micronova.fleetsim.fleet import FleetModel, make_hosts
from micronova.fleetsim.trace import Request
from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.scheduling import GroupSpec, RequestSpec

Floats = npt.NDArray[np.float64]

MINUTE: Final = 60.0
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
_LONGEST: Final = 365 * DAY
_DAY_AND_NIGHT: Final = 0.5  # the busiest hour has three times the arrivals of the quietest
_BUSIEST: Final = 14 * HOUR
_MOST_CPUS: Final = 512  # of the servers of one request together
_MOST_OF_FLEET: Final = 0.02  # that the servers of one request may need together, if it is for several
_STEPS: Final = 24  # of the search for the rate: more precise than any figure of a report


class _Size(NamedTuple):
    name: str
    vcpus: int
    gib: int  # of memory
    disk: int  # GiB
    weight: float  # percent of the requests


_SIZES: Final = (
    _Size("c1.m1", 1, 1, 10, 20.0),
    _Size("c1.m2", 1, 2, 20, 26.0),
    _Size("c2.m4", 2, 4, 40, 24.0),
    _Size("c2.m8", 2, 8, 40, 9.0),
    _Size("c4.m8", 4, 8, 80, 6.0),
    _Size("c4.m16", 4, 16, 80, 6.0),
    _Size("c8.m32", 8, 32, 160, 5.0),
    _Size("c8.m64", 8, 64, 160, 1.2),
    _Size("c16.m64", 16, 64, 320, 1.8),
    _Size("c32.m128", 32, 128, 640, 0.8),
    _Size("c48.m192", 48, 192, 960, 0.2),
)


_WEIGHTS: Final = [size.weight for size in _SIZES]
_FLAVORS: Final = {
    size.name: Flavor(id=size.name, name=size.name, vcpus=size.vcpus, ram=size.gib * 1024, disk=size.disk)
    for size in _SIZES
}


class _Draft(NamedTuple):
    lifetime: float
    servers: int
    spec: RequestSpec


def generate(
    fleet: FleetModel, hosts: int, count: int, *, load: float, days: float | None = None, seed: int
) -> list[Request]:
    """Return a trace for a fleet.

    The largest demand of all servers that want to run at the same time is `load` times the fleet's memory, CPUs or disk
    with the default settings. This determines how long the trace takes, unless `days` is given.
    """
    chance = random_module.Random(seed)
    capacity = _capacity(fleet, hosts)
    most = {size.name: _most_servers(size, capacity) for size in _SIZES}
    drafts = [_draft(chance, number, fleet.zones, most) for number in range(count)]
    sums, total = [], 0.0
    for _ in range(count):
        total += chance.expovariate(1.0)
        sums.append(total)
    arrivals = np.array(sums)
    if days is None:
        times = _times(arrivals, _rate(capacity, drafts, arrivals, load))
    else:
        times = _times(arrivals, total / (days * DAY))
    return [
        Request(at=round(at, 3), lifetime=round(draft.lifetime, 3), count=draft.servers, spec=draft.spec)
        for at, draft in zip(times.tolist(), drafts, strict=True)
    ]


def _most_servers(size: _Size, capacity: Mapping[str, int]) -> int:
    fitting = [
        int(capacity[name] * _MOST_OF_FLEET) // amount for name, amount in _FLAVORS[size.name].resources().items()
    ]
    return max(1, min(_MOST_CPUS // size.vcpus, *fitting))


def _draft(chance: random_module.Random, number: int, zones: Sequence[str], most: Mapping[str, int]) -> _Draft:
    size = chance.choices(_SIZES, _WEIGHTS)[0]
    count = min(_count(chance), most[size.name])
    lifetime = _lifetime(chance)
    placing = chance.random()
    zone = chance.choice(zones) if placing < 0.1 else None
    group = None
    if count > 1 and placing > 0.9:
        policy = "anti-affinity" if count <= 8 else "soft-anti-affinity"
        group = GroupSpec(id=f"group-{number}", policy=policy)
    spec = RequestSpec(
        project_id="project", user_id="user", flavor=_FLAVORS[size.name], availability_zone=zone, server_group=group
    )
    return _Draft(lifetime, count, spec)


def _count(chance: random_module.Random) -> int:
    """Draw the servers of a request."""
    kind = chance.random()
    if kind < 0.4:
        return 1
    if kind < 0.8:
        return chance.randint(2, 5)
    return int(_pareto(chance, 6.0, 300.0, 0.55))


def _lifetime(chance: random_module.Random) -> float:
    """Draw the seconds that the servers of a request live."""
    kind = chance.random()
    if kind < 0.55:
        return min(max(MINUTE, chance.lognormvariate(math.log(20 * MINUTE), 1.2)), DAY)
    if kind < 0.9:
        return min(max(MINUTE, chance.lognormvariate(math.log(4 * HOUR), 1.0)), DAY)
    return _pareto(chance, DAY, _LONGEST, 0.6)


def _pareto(chance: random_module.Random, low: float, high: float, exponent: float) -> float:
    """Draw from a Pareto distribution that is cut off."""
    whole = 1.0 - (low / high) ** exponent
    return float(low * (1.0 - chance.random() * whole) ** (-1.0 / exponent))


# --- arrivals ---


def _times(arrivals: Floats, rate: float) -> Floats:
    """Turn a Poisson process of rate 1 into one whose mean rate is `rate` per second, with days and nights."""
    end = arrivals[-1] / rate * 2 + DAY
    grid = np.arange(0.0, end, min(600.0, end / 1000))
    swing = DAY / (2 * math.pi) * _DAY_AND_NIGHT
    angle = 2 * math.pi / DAY
    expected = rate * (grid + swing * (np.sin(angle * (grid - _BUSIEST)) + math.sin(angle * _BUSIEST)))
    return np.interp(arrivals, expected, grid)


def _rate(capacity: Mapping[str, int], drafts: Sequence[_Draft], arrivals: Floats, load: float) -> float:
    """Return the requests per second with which the peak of the demand is `load` times the fleet."""
    lifetimes = np.array([draft.lifetime for draft in drafts])
    demand = {
        name: np.array([draft.spec.flavor.resources().get(name, 0) * draft.servers for draft in drafts], np.float64)
        for name in ("VCPU", "MEMORY_MB", "DISK_GB")
    }
    most = max(float(amounts.sum()) / capacity[name] for name, amounts in demand.items())
    if most < load:
        servers = sum(draft.servers for draft in drafts)
        raise Invalid(
            f"{len(drafts)} requests ({servers} servers) need at most {most:.2g} times these hosts, not "
            f"{load:g}: ask for more requests (--count), fewer hosts, a lower --load, or give --days."
        )
    low, high = float(arrivals[-1]) / (10 * _LONGEST), float(arrivals[-1]) / MINUTE
    if (least := _peak(_times(arrivals, low), lifetimes, demand, capacity)) > load:
        raise Invalid(f"Single requests need {least:.2g} times these hosts: ask for a higher --load or for more hosts.")
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        peak = _peak(_times(arrivals, middle), lifetimes, demand, capacity)
        low, high = (middle, high) if peak < load else (low, middle)
    return high


def _capacity(fleet: FleetModel, hosts: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for state in make_hosts(fleet, hosts, DefaultSettings()):
        for name, amount in state.capacity.items():
            total[name] = total.get(name, 0) + amount
    return total


def _peak(times: Floats, lifetimes: Floats, demand: Mapping[str, Floats], capacity: Mapping[str, int]) -> float:
    """Return the largest share of a resource class that servers want at the same time."""
    moments = np.concatenate([times + lifetimes, times])
    order = np.argsort(moments, kind="stable")
    within = order[moments[order] <= times[-1]]
    return max(
        float(np.cumsum(np.concatenate([-amounts, amounts])[within]).max()) / capacity[name]
        for name, amounts in demand.items()
    )
