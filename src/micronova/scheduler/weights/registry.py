"""Weighers and their multipliers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from micronova.plugins import entry_points
from micronova.scheduler.weights.base import HostWeigher, WeigherOptions, weigher_of
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
        for name in sorted(entry_points.registered(GROUP)):
            make = partial(_make, name=name, multipliers=known, options=given)
            made += [weigher for _, weigher in entry_points.load(GROUP, make, {name})]
    return made


def _make(loaded: Any, *, name: str, multipliers: Mapping[str, float], options: WeigherOptions) -> HostWeigher:
    if callable(loaded) and not isinstance(loaded, type):
        return weigher_of(name, loaded, multipliers.get(name, 1.0))
    made = loaded.of(multipliers.get(loaded.name, 1.0), options)
    if not isinstance(made, HostWeigher):
        raise TypeError(f"{loaded!r} is not a HostWeigher")
    return made
