"""Weighers and their multipliers."""

from collections.abc import Mapping

from micronova.plugins import entry_points
from micronova.scheduler.weights.base import HostWeigher
from micronova.scheduler.weights.groups import (
    ServerGroupSoftAffinityWeigher,
    ServerGroupSoftAntiAffinityWeigher,
)
from micronova.scheduler.weights.resources import BuildFailureWeigher, CPUWeigher, DiskWeigher, RAMWeigher

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
    )
}


def load_weighers(multipliers: Mapping[str, float] | None = None, *, with_plugins: bool = True) -> list[HostWeigher]:
    """Return all weighers with these multipliers by name (1 where none is given); 0 switches a weigher off."""
    given = multipliers or {}
    made = [cls(given.get(name, 1.0)) for name, cls in BUILT_IN.items()]
    if with_plugins:
        made += [weigher for _, weigher in entry_points.load(GROUP, lambda each: _make(each, given))]
    return [weigher for weigher in made if weigher.multiplier]


def _make(loaded: type[HostWeigher], multipliers: Mapping[str, float]) -> HostWeigher:
    made = loaded(multipliers[loaded.name]) if loaded.name in multipliers else loaded()
    if not isinstance(made, HostWeigher):
        raise TypeError(f"{loaded!r} is not a HostWeigher")
    return made
