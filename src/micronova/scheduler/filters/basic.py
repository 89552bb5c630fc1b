"""Filters on where a host is, whether it is up, and whether it was tried before.

Zones and excluded hosts count whichever filters are enabled, also for a host that an administrator forces. In Nova
they are not filters: Placement is asked for the zone.
"""

from micronova.objects.explanation import COMPUTE_FILTER
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView


class RetryFilter(HostFilter):
    """Removes hosts that were tried before, or that the request excludes."""

    name = "RetryFilter"
    always = True
    narrows = True
    predicate = "was not tried before and is not excluded"
    lack = "are excluded"
    scope = Scope.REQUEST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        if not spec.ignore_hosts:
            return None
        return ~hosts.on_hosts(spec.ignore_hosts)


class AvailabilityZoneFilter(HostFilter):
    """Passes hosts in the requested availability zone."""

    name = "AvailabilityZoneFilter"
    always = True
    narrows = True
    lack = "are in another availability zone"
    scope = Scope.REQUEST

    def describe(self, spec: RequestSpec) -> str:
        return f"is in the availability zone {spec.availability_zone}"

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        if not spec.availability_zone:
            return None
        return hosts.in_zone(spec.availability_zone)


class AllHostsFilter(HostFilter):
    """Passes all hosts: for those who want no filter at all, because there must be one."""

    name = "AllHostsFilter"
    scope = Scope.REQUEST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        return None


class ComputeFilter(HostFilter):
    """Passes hosts whose service is enabled and up, by the rule of `db.services.is_up`."""

    name = COMPUTE_FILTER
    predicate = "is up"  # those that are disabled were removed before
    lack = "are down"
    scope = Scope.REQUEST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        passes = hosts.up_since(hosts.now - self.options.service_down_time)
        passes &= hosts.column("enabled")
        return passes
