"""Finds the allocation candidates of a request: the ways in which resource providers can serve it.

A candidate is found in one tree at a time. The tree's providers, and the sharing providers that have an aggregate in
common with one of them, may serve groups of the request. For each group the choices are listed first; then one choice
per group is combined, and a combination is given up as soon as a part of it cannot be right.

- A group without a suffix may be served by several providers, each resource class by one. Together they have the
  required traits; none of them has a forbidden one.
- A group with a suffix is served by one provider.
- For a group without a suffix, an aggregate of the root counts for the whole tree.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from micronova.objects.bounded_search import Matching, StepBudget, TooManySteps
from micronova.placement.model import Candidate, Provider, RequestGroup, ResourceRequest, by_root, fits_units

Amounts: TypeAlias = Mapping[tuple[str, str], int]
"""Amounts by provider and resource class."""
_Choice: TypeAlias = Mapping[str, Provider]
"""Who serves each resource class of a group; "" is who serves a group without resources."""

log = logging.getLogger(__name__)

MOST_CANDIDATES: Final = 10_000
"""The most candidates that are returned, whatever limit a request has."""
_MOST_STEPS: Final = 20_000  # for a tree: about 0.1 s
_STEPS_PER_CANDIDATE: Final = 16
_MOST_CHOICES: Final = 5_000  # of one group
MOST_STEPS_OF_A_REQUEST: Final = 400_000
"""Steps in all trees of a request: about 2 s. The first `_FREE_STEPS` of each search are not counted."""
_FREE_STEPS: Final = 100  # for a tree, however many trees there were before
ROUNDS: Final = (_FREE_STEPS, 2_000, _MOST_STEPS)
"""The steps for a tree in each round, if many trees are searched. A round searches again only the trees that took more
steps than the round before gave them. So a few hard trees do not use up what all others need."""


class RequestSteps:
    """The steps that the searches of one request may still take, however many trees and consumers it has."""

    def __init__(self) -> None:
        self.most = _MOST_STEPS  # for one search
        self.ended_early = 0  # searches
        self._left = MOST_STEPS_OF_A_REQUEST
        self._warned = False

    @contextlib.contextmanager
    def search(self, root: str, limit: int) -> Iterator[StepBudget]:
        """Give the steps for one search in a tree; one that takes more ends early.

        The first that took all that it may ever take is logged.
        """
        most = min(self.most + _STEPS_PER_CANDIDATE * limit, _FREE_STEPS + self._left)
        budget = StepBudget(most)
        try:
            yield budget
        except TooManySteps:
            self.ended_early += 1
            if not self._warned and self.most == _MOST_STEPS:
                self._warned = True
                log.warning(
                    "the candidates of the tree of provider %s took too many steps; some were not found, and perhaps "
                    "those of other trees for the same request",
                    root,
                )
        finally:
            self._left -= max(0, most - budget.left - _FREE_STEPS)


def find(
    request: ResourceRequest,
    providers: Iterable[Provider],
    roots: Sequence[str] | None = None,
    steps: RequestSteps | None = None,
    held: Amounts | None = None,
) -> list[Candidate]:
    """Return the candidates in the trees with these roots, by default in all, up to the request's limit.

    `providers` has the whole trees, and the sharing providers with their trees. `held` is what the consumer takes
    besides, which is used already: no consumer has more of a provider than its `max_unit`. The work is bounded: at most
    `MOST_CANDIDATES` are returned, and of a tree those that are found in a number of steps. Searches for the same
    request share its `steps`.
    """
    steps = steps or RequestSteps()
    limit = MOST_CANDIDATES if request.limit is None else min(request.limit, MOST_CANDIDATES)
    known = {each.uuid: each for each in providers}
    trees = by_root(known.values())
    sharing = [each for each in known.values() if each.shares]
    found: dict[tuple[frozenset[tuple[str, str, int]], frozenset[tuple[str, tuple[str, ...]]]], Candidate] = {}
    for root in trees if roots is None else roots:
        if root not in trees:
            continue
        with steps.search(root, limit) as budget:
            for candidate in _of_tree(request, known, root, trees[root], sharing, budget, held or {}):
                taken = frozenset(
                    (uuid, name, amount)
                    for uuid, each in candidate.allocations.items()
                    for name, amount in each.items()
                )
                found.setdefault((taken, frozenset(candidate.mappings.items())), candidate)
                if len(found) >= limit:
                    return list(found.values())
    return list(found.values())


def take(providers: Sequence[Provider], amounts: Amounts) -> list[Provider]:
    """Return providers of which so much more is used, by provider and resource class."""
    changed = []
    for each in providers:
        own = {name: amount for (uuid, name), amount in amounts.items() if uuid == each.uuid and amount}
        inventories = {
            name: dataclasses.replace(inventory, used=inventory.used + own[name]) if name in own else inventory
            for name, inventory in each.inventories.items()
        }
        changed.append(dataclasses.replace(each, inventories=inventories) if own else each)
    return changed


def how_many(
    request: ResourceRequest,
    providers: Sequence[Provider],
    root: str,
    own: Mapping[str, int],
    most: int,
    steps: RequestSteps | None = None,
) -> int:
    """Return how many consumers of a request the tree of a root can serve, up to a number.

    `own` is what each of them takes of the root besides. Searches for the same request share its `steps`.
    """
    steps = steps or RequestSteps()
    if most > 1 and len(request.groups) == 1 and len(request.classes) == 1 and not request.classes & own.keys():
        return min(most, _units(request, providers, root, steps))
    of_root = {(root, name): amount for name, amount in own.items()}
    for count in range(most):
        providers = take(providers, of_root)
        found = find(dataclasses.replace(request, limit=1), providers, [root], steps, of_root)
        if not found:
            return count
        providers = take(providers, amounts_of(found[0]))
    return most


def _units(request: ResourceRequest, providers: Sequence[Provider], root: str, steps: RequestSteps) -> int:
    """Return how often a request for one resource class can be served: each provider does so until nothing is left."""
    [(name, amount)] = request.groups[0].resources.items()
    known = {each.uuid: each.inventories for each in providers}
    able = {uuid for each in find(request, providers, [root], steps) for uuid in each.allocations}
    return sum((known[uuid][name].capacity - known[uuid][name].used) // amount for uuid in able)


class SharedNeed(NamedTuple):
    """Resources of one sharing provider that each consumer on a node takes if the node's own tree has no more."""

    resources: tuple[tuple[str, int], ...]
    providers: tuple[str, ...]  # that may serve it, the preferred one first


def shared_needs(
    request: ResourceRequest, tree: Sequence[Provider], sharing: Sequence[Provider], most: int
) -> list[tuple[SharedNeed, int]]:
    """Return what up to `most` consumers on a node need of sharing providers, and how many need none of each.

    What relates the groups of a request is left out: these are the least needs.
    """
    others = _sharing_with(tree, sharing)
    if not others:
        return []
    known = {each.uuid: each for each in (*tree, *sharing)}
    found = []
    for group in request.groups:
        whole = dict(group.resources)
        for resources in [whole] if group.suffix else [{name: amount} for name, amount in whole.items()]:
            own = sum(_times(each, resources) for each in tree if _serves_part(group, resources, each, known))
            able = tuple(each.uuid for each in others if _serves_part(group, resources, each, known))
            if resources and able and own < most:
                found.append((SharedNeed(tuple(resources.items()), able), own))
    return found


def _sharing_with(tree: Sequence[Provider], sharing: Iterable[Provider]) -> list[Provider]:
    """Return the sharing providers of other trees that serve a tree, too."""
    offered = [each for each in sharing if each.shares]
    if not offered:
        return []
    aggregates = frozenset[str]().union(*(each.aggregates for each in tree))
    roots = {each.root for each in tree}
    return [each for each in offered if each.root not in roots and each.aggregates & aggregates]


def _serves_part(
    group: RequestGroup, resources: Mapping[str, int], provider: Provider, known: Mapping[str, Provider]
) -> bool:
    """Return whether a provider may serve resources of a group, however much is left."""
    inventories = provider.inventories
    return (
        all(name in inventories and fits_units(inventories[name], amount) for name, amount in resources.items())
        and _may_serve(group, provider, known)
        and (not group.suffix or group.admits_traits(provider.traits))
    )


def _times(provider: Provider, resources: Mapping[str, int]) -> int:
    """Return how often resources can be taken of what is left of a provider."""
    own = provider.inventories
    free = [(own[name].capacity - own[name].used) // amount for name, amount in resources.items() if amount > 0]
    return max(0, min(free, default=0))


def amounts_of(candidate: Candidate) -> dict[tuple[str, str], int]:
    """Return what a candidate takes, by provider and resource class."""
    return {(uuid, name): amount for uuid, own in candidate.allocations.items() for name, amount in own.items()}


def _of_tree(
    request: ResourceRequest,
    known: Mapping[str, Provider],
    root: str,
    tree: Sequence[Provider],
    sharing: Sequence[Provider],
    budget: StepBudget,
    held: Amounts,
) -> Iterator[Candidate]:
    traits = known[root].traits if root in known else frozenset()
    if not request.root_required <= traits or request.root_forbidden & traits:
        return
    usable = [*tree, *_sharing_with(tree, sharing)]
    if not _has_enough(request, usable):
        return
    choices: list[list[tuple[RequestGroup, _Choice]]] = []
    are_all = True
    for group in request.groups:
        able = [each for each in usable if _may_serve(group, each, known)]
        if group.suffix:
            listed, complete = _first(_single(group, able, held))
        else:
            # Half of the steps are left to combine what is listed.
            part = StepBudget(steps := budget.left // 2)
            listed, complete = _first(_several(group, able, traits, held, part))
            budget.spend(steps - part.left)
        if complete and not listed:
            return
        are_all = are_all and complete
        choices.append([(group, each) for each in listed])
    choices.sort(key=len)
    for chosen in _Combinations(request, choices, known, budget, held):
        candidate = _candidate(root, request, chosen)
        if request.nested or _one_per_tree(candidate, known):
            yield candidate
    if not are_all:
        raise TooManySteps


def _first(offered: Iterator[_Choice]) -> tuple[list[_Choice], bool]:
    """Return the first choices of a group, and whether these are all."""
    listed: list[_Choice] = []
    try:
        for each in offered:
            if len(listed) == _MOST_CHOICES:
                return listed, False
            listed.append(each)
    except TooManySteps:
        return listed, False
    return listed, True


def _has_enough(request: ResourceRequest, usable: Sequence[Provider]) -> bool:
    """Return False if providers have too little for all groups together, whoever serves which."""
    wanted: dict[str, list[int]] = {}
    for group in request.groups:
        for name, amount in group.resources.items():
            wanted.setdefault(name, []).append(amount)
    for name, amounts in wanted.items():
        if len(amounts) == 1:
            continue
        free = [own.capacity - own.used for each in usable if (own := each.inventories.get(name)) is not None]
        if sum(amounts) > sum(left for left in free if left > 0):
            return False
        for least in set(amounts):
            # A provider serves no more groups that ask for so much or more.
            if sum(amount >= least for amount in amounts) > sum(left // least for left in free if left > 0):
                return False
    return True


def _may_serve(group: RequestGroup, provider: Provider, known: Mapping[str, Provider]) -> bool:
    """Return whether a provider is where the group wants it, and has no forbidden trait."""
    if provider.traits & group.forbidden:
        return False
    root = None if group.suffix else known.get(provider.root)
    aggregates = provider.aggregates if root is None else provider.aggregates | root.aggregates
    if not group.admits_aggregates(aggregates):
        return False
    return group.in_tree is None or ((wanted := known.get(group.in_tree)) is not None and provider.root == wanted.root)


def _single(group: RequestGroup, able: Sequence[Provider], held: Amounts) -> Iterator[_Choice]:
    """Yield the providers that serve a whole group alone."""
    for each in able:
        has_all = all(_has(each, name, amount, held) for name, amount in group.resources.items())
        if has_all and group.admits_traits(each.traits):
            yield dict.fromkeys(group.resources or ("",), each)


def _has(provider: Provider, name: str, amount: int, held: Amounts) -> bool:
    own = provider.inventories.get(name)
    return own is not None and own.has(amount, held.get((provider.uuid, name), 0))


def _several(
    group: RequestGroup, able: Sequence[Provider], of_root: frozenset[str], held: Amounts, budget: StepBudget
) -> Iterator[_Choice]:
    """Yield the choices of one provider for each resource class that together have the required traits.

    Providers that have more of these traits are tried first.
    """
    always = of_root if group.with_root else frozenset[str]()
    required = [wanted for wanted in group.required if not always & wanted]
    able = sorted(able, key=lambda each: sum(not wanted & each.traits for wanted in required))
    by_class = [[each for each in able if _has(each, name, amount, held)] for name, amount in group.resources.items()]
    possible = frozenset[str]().union(*(each.traits for own in by_class for each in own))
    if not all(possible & wanted for wanted in required):
        return
    for chosen in itertools.product(*by_class):
        budget.spend()
        if all(any(wanted & each.traits for each in chosen) for wanted in required):
            yield dict(zip(group.resources, chosen, strict=True))


class _Combinations:
    """The combinations of one choice per group that fit together.

    A choice is made only if the groups that are left can still get different providers, where these have to differ.
    What follows a choice depends on what is taken then, and not on the order: a state that led to nothing is not
    tried again. So groups that ask for the same cost no more than one of them.
    """

    def __init__(
        self,
        request: ResourceRequest,
        choices: Sequence[Sequence[tuple[RequestGroup, _Choice]]],
        known: Mapping[str, Provider],
        budget: StepBudget,
        held: Amounts,
    ) -> None:
        self._held = held
        self._request = request
        self._choices = choices
        self._known = known
        self._budget = budget
        self._related = frozenset[str]().union(*request.same_subtrees)
        self._numbers: dict[str, int] = {}  # by provider
        self._options = [self._bits(each) for each in choices]
        self._failed: set[tuple[object, ...]] = set()

    def __iter__(self) -> Iterator[list[tuple[RequestGroup, _Choice]]]:
        return self._extend([], Counter(), 0) if self._leaves_providers(0, 0) else iter(())

    def _extend(
        self, chosen: list[tuple[RequestGroup, _Choice]], taken: Counter[tuple[str, str]], used: int
    ) -> Iterator[list[tuple[RequestGroup, _Choice]]]:
        request = self._request
        if len(chosen) == len(self._choices):
            if all(_in_one_subtree(suffixes, chosen, self._known) for suffixes in request.same_subtrees):
                yield list(chosen)
            return
        state = self._state(chosen, taken, used)
        if state in self._failed:
            return
        any_found = False
        for group, choice in self._choices[len(chosen)]:
            self._budget.spend()
            own = self._bits([(group, choice)])
            if own & used:
                continue
            more = Counter({(choice[name].uuid, name): amount for name, amount in group.resources.items()})
            total = taken + more
            if not all(_has(choice[name], name, total[uuid, name], self._held) for uuid, name in more):
                continue
            if own and not self._leaves_providers(len(chosen) + 1, used | own):
                continue
            chosen.append((group, choice))
            for found in self._extend(chosen, total, used | own):
                any_found = True
                yield found
            chosen.pop()
        if not any_found:
            self._failed.add(state)

    def _bits(self, choices: Sequence[tuple[RequestGroup, _Choice]]) -> int:
        """Return the providers that no other group with a suffix may have then, as bits; none without that rule."""
        found = 0
        for group, choice in choices if self._request.isolate else ():
            for each in choice.values() if group.suffix else ():
                found |= 1 << self._numbers.setdefault(each.uuid, len(self._numbers))
        return found

    def _leaves_providers(self, position: int, used: int) -> bool:
        """Return whether the groups from a position on can have different providers that are not used yet."""
        rest = Matching(self._budget)
        return all(rest.add(options & ~used) for options in self._options[position:] if options)

    def _state(
        self, chosen: Sequence[tuple[RequestGroup, _Choice]], taken: Counter[tuple[str, str]], used: int
    ) -> tuple[object, ...]:
        related = tuple(
            (group.suffix, each.uuid)
            for group, choice in chosen
            if group.suffix in self._related
            for each in choice.values()
        )
        return len(chosen), frozenset(taken.items()), used, related


def _in_one_subtree(
    suffixes: frozenset[str], chosen: Sequence[tuple[RequestGroup, _Choice]], known: Mapping[str, Provider]
) -> bool:
    """Return whether one of the providers of these groups is an ancestor of all of them, or is all of them."""
    uuids = {each.uuid for group, choice in chosen if group.suffix in suffixes for each in choice.values()}
    return any(all(uuid in _lineage(other, known) for other in uuids) for uuid in uuids)


def _lineage(uuid: str, known: Mapping[str, Provider]) -> set[str]:
    """Return a provider and its ancestors."""
    found: set[str] = set()
    current: str | None = uuid
    while current is not None and current not in found:
        found.add(current)
        provider = known.get(current)
        current = provider.parent if provider is not None else None
    return found


def _candidate(root: str, request: ResourceRequest, chosen: Sequence[tuple[RequestGroup, _Choice]]) -> Candidate:
    allocations: dict[str, dict[str, int]] = {}
    mappings: dict[str, tuple[str, ...]] = {}
    in_order = {group.suffix: (group, choice) for group, choice in chosen}
    for wanted in request.groups:
        group, choice = in_order[wanted.suffix]
        for name, amount in group.resources.items():
            own = allocations.setdefault(choice[name].uuid, {})
            own[name] = own.get(name, 0) + amount
        mappings[group.suffix] = tuple(dict.fromkeys(each.uuid for each in choice.values()))
    return Candidate(root=root, allocations=allocations, mappings=mappings)


def _one_per_tree(candidate: Candidate, known: Mapping[str, Provider]) -> bool:
    roots = [known[uuid].root for uuid in candidate.allocations]
    return len(roots) == len(set(roots))
