"""What is measured of a simulated fleet at a moment: how much is used, and how much of the rest is of use."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from micronova.fleetsim.claims import Claims
from micronova.objects.explanation import CAPACITY, MAX_UNIT, Explanation
from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.placement.model import Resources
from micronova.placement.standard import NODE_CLASSES
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.host_view import HostView

_CATEGORIES = {
    "AggregateCoreFilter": "vCPUs",
    "AggregateDiskFilter": "disk",
    "AggregateRamFilter": "memory",
    CAPACITY.format("DISK_GB"): "disk",
    CAPACITY.format("MEMORY_MB"): "memory",
    CAPACITY.format("PCPU"): "dedicated CPUs",
    CAPACITY.format("VCPU"): "vCPUs",
    "CoreFilter": "vCPUs",
    "DiskFilter": "disk",
    "IoOpsFilter": "work of hosts",
    **dict.fromkeys(map(MAX_UNIT.format, NODE_CLASSES), "larger hosts"),
    "NUMATopologyFilter": "NUMA nodes",
    "NumInstancesFilter": "servers per host",
    "PciPassthroughFilter": "PCI devices",
    "RamFilter": "memory",
    "ServerGroupAffinityFilter": "affinity",
    "ServerGroupAntiAffinityFilter": "anti-affinity",
    "Traits": "traits",
}


def category(explanation: Explanation | None) -> str:
    """Return what was lacking: what the step that left no host looks at, or the name of its filter."""
    steps = explanation.filters if explanation is not None else ()
    found = next((step.name for step in steps if not step.remaining), "no host")
    return _CATEGORIES.get(found, found)


@dataclass(slots=True)
class Interval:
    """What happened between two samples."""

    requested: int = 0  # servers
    decisions: int = 0
    decision_seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)  # servers, by category

    def add(self, later: "Interval") -> None:
        """Count what happened in the interval after this one, too."""
        self.requested += later.requested
        self.decisions += later.decisions
        self.decision_seconds += later.decision_seconds
        for name, servers in later.refused.items():
            self.refused[name] = self.refused.get(name, 0) + servers


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at a moment, and what has happened since the sample before."""

    time: float  # seconds
    since: Interval
    used: dict[str, float]  # of the capacity, by resource class
    unusable: float  # of the memory: free where no flavor of the trace fits
    largest_fits: int  # servers of the largest flavor that would find room
    servers: int
    occupied: int  # hosts that have servers


class Demands:
    """What the flavors of a trace need: the largest, and those of which one fits wherever any fits."""

    def __init__(self, specs: Iterable[RequestSpec]) -> None:
        named: dict[str, Resources] = {}
        for spec in specs:
            if spec.flavor.name not in named:
                named[spec.flavor.name] = extra_specs.node_resources(spec.flavor, spec.image)
        self.largest_name, self.largest = max(
            named.items(), key=lambda each: (each[1].get("MEMORY_MB", 0), each[1].get("VCPU", 0), each[0])
        )
        self._smallest = _smallest(list(named.values()))

    def unusable_memory(self, hosts: HostView) -> float:
        """Return the MiB of memory that are free on hosts where no flavor fits."""
        fits = np.zeros(len(hosts), np.bool_)
        for amounts in self._smallest:
            fits |= _room(hosts, amounts) > 0
        return float(hosts.free("MEMORY_MB")[~fits].sum())

    def largest_fits(self, hosts: HostView) -> int:
        """Return how many servers of the largest flavor would find room."""
        return int(_room(hosts, self.largest).sum()) if self.largest else 0


def _smallest(demands: Collection[Resources]) -> list[Resources]:
    """Return the demands that need no less of everything than another one."""
    different = {tuple(sorted(each.items())): each for each in demands}.values()
    return [
        each
        for each in different
        if not any(
            other is not each and all(amount <= each.get(name, 0) for name, amount in other.items())
            for other in different
        )
    ]


def _room(hosts: HostView, amounts: Resources) -> npt.NDArray[np.float64]:
    """Return how many servers with these amounts each host has room for."""
    room = np.full(len(hosts), np.inf)
    for name, amount in amounts.items():
        room = np.minimum(room, hosts.free(name) // amount)
        if (able := hosts.may_give(name, amount)) is not None:
            room[~able] = 0.0
    return room.clip(min=0.0)


def sample(time: float, since: Interval, claims: Claims, table: HostTable, demands: Demands) -> Sample:
    """Measure the fleet; the table is up to date."""
    hosts = table.view()
    memory = claims.capacity["MEMORY_MB"]
    return Sample(
        time=time,
        since=since,
        used={name: claims.used[name] / total for name, total in claims.capacity.items() if total},
        unusable=demands.unusable_memory(hosts) / memory if memory else 0.0,
        largest_fits=demands.largest_fits(hosts),
        servers=claims.servers,
        occupied=claims.occupied,
    )
