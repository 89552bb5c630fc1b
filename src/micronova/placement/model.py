"""Resource providers, their inventories, and requests for resources of them, as plain data.

A provider has inventories (so much of a resource class), traits (what it is) and aggregates (where it belongs).
Providers form trees: a compute node is a root, and other services may put children below it, such as a network
interface with its bandwidth. A provider with the trait MISC_SHARES_VIA_AGGREGATE serves all trees that have a member in
one of its aggregates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from micronova.placement.standard import SHARES_VIA_AGGREGATE

Resources = Mapping[str, int]  # amounts by resource class
NOTHING: frozenset[str] = frozenset()
MOST_UNITS: Final = 2_147_483_647  # the largest amount that a column or a message can hold


class Units(Protocol):
    """How an inventory may be taken by one consumer: an `Inventory`, or a row of `inventories`."""

    @property
    def min_unit(self) -> int:
        """The smallest amount."""

    @property
    def max_unit(self) -> int:
        """The largest amount."""

    @property
    def step_size(self) -> int:
        """Of which the amount is a multiple."""


def fits_units(inventory: Units, amount: int) -> bool:
    """Return whether one consumer may ask for this amount, however much is left."""
    return inventory.min_unit <= amount <= inventory.max_unit and amount % inventory.step_size == 0


def whole(total: int) -> int:
    """Return the `max_unit` of what a host reports: one server never gets more than all of it, whatever the ratio."""
    return max(total, 1)


def capacity(total: int, reserved: int, ratio: float) -> int:
    """Return how much of an inventory may be used in all; `MOST_UNITS` if it is more."""
    return int(max(-MOST_UNITS, min((total - reserved) * ratio, MOST_UNITS)))


@dataclass(frozen=True, slots=True)
class Inventory:
    """How much a provider has of a resource class, and how it may be taken."""

    total: int
    reserved: int
    min_unit: int
    max_unit: int
    step_size: int
    allocation_ratio: float
    capacity: int
    used: int

    def has(self, amount: int, besides: int = 0) -> bool:
        """Return whether one consumer may take this amount now; `besides` is what it has, which is used already."""
        return fits_units(self, amount) and amount + besides <= self.max_unit and self.used + amount <= self.capacity


@dataclass(frozen=True, slots=True)
class Provider:
    """A resource provider with all that decides what it can serve."""

    uuid: str
    name: str
    parent: str | None
    root: str
    generation: int = 0
    traits: frozenset[str] = NOTHING
    aggregates: frozenset[str] = NOTHING
    inventories: Mapping[str, Inventory] = field(default_factory=dict)

    @property
    def shares(self) -> bool:
        """Whether it serves the trees with members of its aggregates."""
        return SHARES_VIA_AGGREGATE in self.traits and bool(self.aggregates)


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Resources that are wanted together: of one provider if the group has a suffix, of any of a tree if not."""

    suffix: str = ""
    resources: Resources = field(default_factory=dict)
    required: tuple[frozenset[str], ...] = ()  # of each set the provider has a trait
    forbidden: frozenset[str] = NOTHING  # the provider has none of these traits
    member_of: tuple[frozenset[str], ...] = ()  # the provider is in an aggregate of each set
    not_member_of: frozenset[str] = NOTHING
    in_tree: str | None = None  # the uuid of a provider of the tree
    with_root: bool = False  # the root serves the consumer besides: its traits count, too

    def admits_traits(self, traits: frozenset[str]) -> bool:
        """Return whether traits have what is required and nothing that is forbidden."""
        return not (traits & self.forbidden) and all(traits & each for each in self.required)

    def admits_aggregates(self, aggregates: frozenset[str]) -> bool:
        """Return whether a member of these aggregates is among the wanted providers."""
        return not (aggregates & self.not_member_of) and all(aggregates & each for each in self.member_of)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """A whole request: groups, and what relates the providers that serve them."""

    groups: tuple[RequestGroup, ...]
    isolate: bool = False  # groups with suffixes are served by different providers
    root_required: frozenset[str] = NOTHING
    root_forbidden: frozenset[str] = NOTHING
    same_subtrees: tuple[frozenset[str], ...] = ()  # suffixes whose providers are below one of them
    nested: bool = True  # several providers of one tree may serve it
    limit: int | None = None

    @property
    def classes(self) -> set[str]:
        """The resource classes that it names."""
        return {name for group in self.groups for name in group.resources}

    @property
    def traits(self) -> set[str]:
        """The traits that it names."""
        named: set[str] = {*self.root_required, *self.root_forbidden}
        for group in self.groups:
            named |= group.forbidden.union(*group.required)
        return named


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to serve a request: what to take of which provider, and which providers serve which group."""

    root: str
    allocations: Mapping[str, Resources]  # by provider
    mappings: Mapping[str, tuple[str, ...]]  # the providers by suffix


def by_root(providers: Iterable[Provider]) -> dict[str, list[Provider]]:
    """Return providers by the root of their tree, in their order."""
    trees: dict[str, list[Provider]] = {}
    for each in providers:
        trees.setdefault(each.root, []).append(each)
    return trees
