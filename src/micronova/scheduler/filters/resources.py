"""Filters on free resources. `filter_scheduler` checks the resource classes that no enabled filter covers."""

from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_table import Bools, HostView


def has_free(hosts: HostView, resource_class: str, amount: int) -> Bools | None:
    """Return which hosts have an amount of a resource class free, None if nothing is needed."""
    return hosts.free(resource_class) >= amount if amount > 0 else None


class RamFilter(HostFilter):
    """Passes hosts with enough free memory."""

    name = "RamFilter"
    scope = Scope.HOST
    covers = frozenset({"MEMORY_MB"})

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        return has_free(hosts, "MEMORY_MB", extra_specs.claimed(spec.flavor).get("MEMORY_MB", 0))


class DiskFilter(HostFilter):
    """Passes hosts with enough free disk for root, ephemeral and swap."""

    name = "DiskFilter"
    scope = Scope.HOST
    covers = frozenset({"DISK_GB"})

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        return has_free(hosts, "DISK_GB", extra_specs.claimed(spec.flavor).get("DISK_GB", 0))
