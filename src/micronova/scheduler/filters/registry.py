"""Filters by name."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from micronova.objects.errors import Invalid
from micronova.plugins import entry_points
from micronova.scheduler.filters.address import SimpleCIDRAffinityFilter
from micronova.scheduler.filters.aggregates import (
    AggregateImagePropertiesIsolation,
    AggregateInstanceExtraSpecsFilter,
    AggregateMultiTenancyIsolation,
    AggregateTypeAffinityFilter,
)
from micronova.scheduler.filters.base import FilterOptions, HostFilter, filter_of
from micronova.scheduler.filters.basic import AllHostsFilter, AvailabilityZoneFilter, ComputeFilter, RetryFilter
from micronova.scheduler.filters.capabilities import ComputeCapabilitiesFilter
from micronova.scheduler.filters.groups import ServerGroupAffinityFilter, ServerGroupAntiAffinityFilter
from micronova.scheduler.filters.hints import DifferentHostFilter, SameHostFilter
from micronova.scheduler.filters.image import ImagePropertiesFilter
from micronova.scheduler.filters.isolation import IsolatedHostsFilter
from micronova.scheduler.filters.limits import (
    AggregateIoOpsFilter,
    AggregateNumInstancesFilter,
    IoOpsFilter,
    NumInstancesFilter,
)
from micronova.scheduler.filters.metrics import MetricsFilter
from micronova.scheduler.filters.query import JsonFilter
from micronova.scheduler.filters.resources import (
    AggregateCoreFilter,
    AggregateDiskFilter,
    AggregateRamFilter,
    CoreFilter,
    DiskFilter,
    RamFilter,
)
from micronova.scheduler.filters.topology import NUMATopologyFilter, PciPassthroughFilter

GROUP = "micronova.filters"

BUILT_IN: dict[str, type[HostFilter]] = {
    each.name: each
    for each in (
        RetryFilter,
        AvailabilityZoneFilter,
        RamFilter,
        DiskFilter,
        ComputeFilter,
        ComputeCapabilitiesFilter,
        ImagePropertiesFilter,
        ServerGroupAntiAffinityFilter,
        ServerGroupAffinityFilter,
        SameHostFilter,
        DifferentHostFilter,
        AggregateCoreFilter,
        AggregateDiskFilter,
        AggregateImagePropertiesIsolation,
        AggregateInstanceExtraSpecsFilter,
        AggregateIoOpsFilter,
        AggregateMultiTenancyIsolation,
        AggregateNumInstancesFilter,
        AggregateRamFilter,
        AggregateTypeAffinityFilter,
        AllHostsFilter,
        CoreFilter,
        IoOpsFilter,
        IsolatedHostsFilter,
        JsonFilter,
        MetricsFilter,
        NumInstancesFilter,
        SimpleCIDRAffinityFilter,
        NUMATopologyFilter,
        PciPassthroughFilter,
    )
}


def load_filters(options: FilterOptions, names: Iterable[str] | None = None) -> list[HostFilter]:
    """Return the filters of these names in this order, those of the settings if no names are given.

    Hosts without a metric that is required get no servers, whether MetricsFilter is named or not. Filters that
    are `always` in effect are there in any case.
    """
    wanted = list(options.settings.enabled_filters if names is None else names)
    if names is None and options.metrics.required and options.metrics.weight_setting:
        wanted += {MetricsFilter.name} - set(wanted)
    wanted += [name for name, each in BUILT_IN.items() if each.always and name not in wanted]
    others = {name for name in wanted if name not in BUILT_IN}
    loaded = {
        name: made
        for name in others
        for _, made in entry_points.load(GROUP, partial(_make, name=name, options=options), {name})
    }
    # A filter is refused, not skipped: without it instances would land where they must not.
    missing = others - loaded.keys()
    if missing and (unknown := missing - entry_points.registered(GROUP)):
        raise Invalid(
            f"Unknown scheduler filter {', '.join(sorted(unknown))}: "
            f"enabled_filters may name {', '.join(sorted(BUILT_IN))}, or a filter that a plugin brings."
        )
    if missing:
        raise Invalid(
            f"The scheduler filter {', '.join(sorted(missing))} of a plugin cannot be loaded, the log says why: "
            "repair it, or remove it from enabled_filters."
        )
    made = {name: BUILT_IN[name](options) for name in wanted if name in BUILT_IN} | loaded
    return [made[name] for name in wanted]


def _make(loaded: Any, *, name: str, options: FilterOptions) -> HostFilter:
    if callable(loaded) and not isinstance(loaded, type):
        return filter_of(name, loaded, options)
    made = loaded(options)
    if not isinstance(made, HostFilter):
        raise TypeError(f"{loaded!r} is not a HostFilter")
    return made
