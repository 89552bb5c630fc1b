"""Filters that limit how many servers a host has, and how many of them it works on at once."""

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.aggregate_metadata import lowest_of
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools, Floats
from micronova.scheduler.host_view import HostView


class NumInstancesFilter(HostFilter):
    """Passes hosts with fewer servers than `max_instances_per_host`."""

    name = "NumInstancesFilter"
    predicate = "may have more servers"
    lack = "have too many servers"
    scope = Scope.HOST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        below: Bools = hosts.column("num_instances") < self.options.settings.max_instances_per_host
        return below


class AggregateNumInstancesFilter(HostFilter):
    """The same, with `max_instances_per_host` in the metadata of aggregates before the setting."""

    name = "AggregateNumInstancesFilter"
    predicate = NumInstancesFilter.predicate
    lack = NumInstancesFilter.lack
    scope = Scope.HOST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        below: Bools = hosts.column("num_instances") < _limit(
            hosts, "max_instances_per_host", self.options.settings.max_instances_per_host
        )
        return below


class IoOpsFilter(HostFilter):
    """Passes hosts that work on fewer servers (build, resize, snapshot, …) than `max_io_ops_per_host`."""

    name = "IoOpsFilter"
    predicate = "may work on more servers at once"
    lack = "are too busy"
    scope = Scope.HOST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        below: Bools = hosts.column("num_io_ops") < self.options.settings.max_io_ops_per_host
        return below


class AggregateIoOpsFilter(HostFilter):
    """The same, with `max_io_ops_per_host` in the metadata of aggregates before the setting."""

    name = "AggregateIoOpsFilter"
    predicate = IoOpsFilter.predicate
    lack = IoOpsFilter.lack
    scope = Scope.HOST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        below: Bools = hosts.column("num_io_ops") < _limit(
            hosts, "max_io_ops_per_host", self.options.settings.max_io_ops_per_host
        )
        return below


def _limit(hosts: HostView, key: str, default: int) -> Floats | float:
    return hosts.numbers_by_aggregates(
        ("limit", key, default), lambda aggregates: lowest_of(aggregates, key, default, whole=True)
    )
