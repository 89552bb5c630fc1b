"""Weighers and their multipliers."""

from collections.abc import Mapping

from micronova.plugins import entry_points
from micronova.scheduler.weights.base import HostWeigher, WeigherOptions
from micronova.scheduler.weights.groups import (
    ServerGroupSoftAffinityWeigher,
    ServerGroupSoftAntiAffinityWeigher,
)
from micronova.scheduler.weights.hosts import (
    BuildFailureWeigher,
    HypervisorVersionWeigher,
    ImagePropertiesWeigher,
    IoOpsWeigher,
    MetricsWeigher,
    NumInstancesWeigher,
)
from micronova.scheduler.weights.pci import PCIWeigher
from micronova.scheduler.weights.resources import CPUWeigher, DiskWeigher, RAMWeigher

GROUP = "micronova.weighers"

BUILT_IN: dict[str, type[HostWeigher]] = {
    each.name: each
    for each in (
        RAMWeigher,
        CPUWeigher,
        DiskWeigher,
        ServerGroupSoftAffinityWeigher,
        ServerGroupSoftAntiAffinityWeigher,
        BuildFailureWeigher,
        IoOpsWeigher,
        NumInstancesWeigher,
        HypervisorVersionWeigher,
        MetricsWeigher,
        ImagePropertiesWeigher,
        PCIWeigher,
    )
}


def multipliers_of(options: WeigherOptions) -> dict[str, float]:
    """Return the multipliers of the settings, by weigher."""
    return {
        name: options.metrics.weight_multiplier if cls is MetricsWeigher else getattr(options.settings, cls.setting)
        for name, cls in BUILT_IN.items()
    }


def load_weighers(
    multipliers: Mapping[str, float] | None = None,
    *,
    options: WeigherOptions | None = None,
    with_plugins: bool = True,
) -> list[HostWeigher]:
    """Return all weighers. `multipliers`, by name, replace those of the settings; the default of a plugin's is 1.

    Weighers with the multiplier 0 are among them: aggregates may have another one.
    """
    given = options or WeigherOptions()
    known = multipliers_of(given) | dict(multipliers or {})
    made = [cls.of(known[name], given) for name, cls in BUILT_IN.items()]
    if with_plugins:
        made += [weigher for _, weigher in entry_points.load(GROUP, lambda each: _make(each, known, given))]
    return made


def _make(loaded: type[HostWeigher], multipliers: Mapping[str, float], options: WeigherOptions) -> HostWeigher:
    made = loaded.of(multipliers.get(loaded.name, 1.0), options)
    if not isinstance(made, HostWeigher):
        raise TypeError(f"{loaded!r} is not a HostWeigher")
    return made
