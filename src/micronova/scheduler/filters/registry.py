"""Filters by name."""

from collections.abc import Iterable

from micronova.objects.errors import Invalid
from micronova.scheduler import plugins
from micronova.scheduler.filters.base import FilterOptions, HostFilter
from micronova.scheduler.filters.basic import AvailabilityZoneFilter, ComputeFilter, RetryFilter
from micronova.scheduler.filters.capabilities import ComputeCapabilitiesFilter
from micronova.scheduler.filters.groups import ServerGroupAffinityFilter, ServerGroupAntiAffinityFilter
from micronova.scheduler.filters.image import ImagePropertiesFilter
from micronova.scheduler.filters.room import DiskFilter, RamFilter

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
    )
}


def load_filters(names: Iterable[str] | None = None, options: FilterOptions | None = None) -> list[HostFilter]:
    """Make the filters of these names, in this order; the built-in nine if none are named."""
    wanted = list(BUILT_IN if names is None else names)
    options = options or FilterOptions()
    strange = {name for name in wanted if name not in BUILT_IN}
    found = plugins.load(GROUP, lambda each: _make(each, options), strange) if strange else {}
    missing = strange - found.keys()
    if missing and (unknown := missing - plugins.known(GROUP)):
        # A misspelt filter is not a faulty one: without it instances would land where they must not.
        raise Invalid(
            f"Unknown scheduler filter {', '.join(sorted(unknown))}: "
            f"enabled_filters may name {', '.join(sorted(BUILT_IN))}, or a filter that a plugin brings."
        )
    made = {name: BUILT_IN[name](options) for name in wanted if name in BUILT_IN} | found
    return [made[name] for name in wanted if name in made]


def _make(loaded: type[HostFilter], options: FilterOptions) -> HostFilter:
    made = loaded(options)
    if not isinstance(made, HostFilter):
        raise TypeError(f"{loaded!r} is not a HostFilter")
    return made
