"""Filters on free resources. `filter_scheduler` checks the resource classes that no enabled filter covers."""

from typing import ClassVar

import numpy as np

from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.aggregate_metadata import lowest_of
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView


def has_free(hosts: HostView, resource_class: str, amount: int) -> Bools | None:
    """Return which hosts have an amount of a resource class free, None if nothing is needed."""
    return hosts.free(resource_class) >= amount if amount > 0 else None


LITTLE_ROOM = "have too little room"  # of hosts that have too little of a resource class free, for users


def free_amount(resource_class: str, amount: int) -> str:
    """Return what a host has that has an amount of a resource class free, for users."""
    return f"has {_amount(resource_class, amount, 'free')}"


def large_enough(resource_class: str, amount: int) -> str:
    """Return what a host is that may give one server an amount of a resource class, for users."""
    return f"is large enough for {_amount(resource_class, amount)}"


def _amount(resource_class: str, amount: int, adjective: str = "") -> str:
    """Return an amount in words: 2 free vCPUs, 512 MiB of free memory."""
    before = f"{adjective} " if adjective else ""
    match resource_class:
        case "VCPU":
            return f"{amount} {before}vCPU{'s' if amount != 1 else ''}"
        case "MEMORY_MB" if amount % 1024:
            return f"{amount} MiB of {before}memory"
        case "MEMORY_MB":
            return f"{amount // 1024} GiB of {before}memory"
        case "DISK_GB":
            return f"{amount} GiB of {before}disk"
        case _:
            return f"{amount} of {resource_class} {adjective}".rstrip()


class _Resource(HostFilter):
    """Passes hosts with enough of one resource class."""

    lack = LITTLE_ROOM
    scope = Scope.HOST
    resource_class: ClassVar[str]

    def amount(self, spec: RequestSpec) -> int:
        """Return how much the request needs."""
        return extra_specs.node_resources(spec.flavor, spec.image).get(self.resource_class, 0)

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        return has_free(hosts, self.resource_class, self.amount(spec))

    def describe(self, spec: RequestSpec) -> str:
        return free_amount(self.resource_class, self.amount(spec))


class CoreFilter(_Resource):
    """Passes hosts with enough free CPUs."""

    name = "CoreFilter"
    resource_class = "VCPU"
    covers = frozenset({"VCPU"})


class RamFilter(_Resource):
    """Passes hosts with enough free memory."""

    name = "RamFilter"
    resource_class = "MEMORY_MB"
    covers = frozenset({"MEMORY_MB"})


class DiskFilter(_Resource):
    """Passes hosts with enough free disk for root, ephemeral and swap."""

    name = "DiskFilter"
    resource_class = "DISK_GB"
    covers = frozenset({"DISK_GB"})


class _AggregateResource(_Resource):
    """Passes hosts with enough of a resource class by the lowest allocation ratio in the metadata of their aggregates.

    Claims count with the host's own ratio, which is the most that an aggregate can allow. It covers no resource class:
    after each instance, this filter is asked again.
    """

    key: ClassVar[str]

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        amount, key = self.amount(spec), self.key
        ratios = hosts.numbers_by_aggregates(("ratio", key), lambda aggregates: lowest_of(aggregates, key, -1.0))
        enough = super().mask(hosts, spec)
        if enough is None or (isinstance(ratios, float) and ratios < 0):
            return enough
        allowed = np.floor((hosts.total(self.resource_class) - hosts.reserved(self.resource_class)) * ratios)
        enough &= (ratios < 0) | (allowed - hosts.used(self.resource_class) >= amount)
        return enough


class AggregateCoreFilter(_AggregateResource):
    """CoreFilter with `cpu_allocation_ratio` in the metadata of aggregates."""

    name = "AggregateCoreFilter"
    resource_class = "VCPU"
    key = "cpu_allocation_ratio"


class AggregateRamFilter(_AggregateResource):
    """RamFilter with `ram_allocation_ratio` in the metadata of aggregates."""

    name = "AggregateRamFilter"
    resource_class = "MEMORY_MB"
    key = "ram_allocation_ratio"


class AggregateDiskFilter(_AggregateResource):
    """DiskFilter with `disk_allocation_ratio` in the metadata of aggregates."""

    name = "AggregateDiskFilter"
    resource_class = "DISK_GB"
    key = "disk_allocation_ratio"
