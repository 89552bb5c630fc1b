"""The explanation of a scheduler's decision: kept with the operation and shown to admins."""

import functools
from typing import Any, Final

import msgspec

from micronova.objects.errors import NoValidHost
from micronova.objects.fleet import by_number

COMPUTE_FILTER: Final = "ComputeFilter"  # the filter that removes hosts that are disabled or down
CAPACITY: Final = "Capacity({})"  # the step that removes hosts without room for a resource class
MAX_UNIT: Final = "MaxUnit({})"  # the step that removes hosts that are smaller, in a resource class, than one server
MOST_NAMED: Final = 10  # hosts that are named of those that a filter removed
FORCED: Final = (  # as `RequestSpec.forced` says
    "An admin named the host, so that only capacity, prefilters, request groups and the filters that are always in "
    "effect were asked."
)
LONGEST_ERROR: Final = 200  # characters of the error of a filter that failed


class FilterStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many hosts one filter removed, and how many remained."""

    name: str
    removed: int
    remaining: int
    error: str = ""  # the filter failed, so it let no host pass
    hosts: tuple[str, ...] = ()  # the first of those that it removed

    @property
    def entered(self) -> int:
        """How many hosts the filter was asked about."""
        return self.removed + self.remaining


class Winner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The host that was chosen for one instance, and what each weigher added to its weight."""

    host: str
    node: str
    weight: float = 0.0
    weighers: dict[str, float] = {}
    instance_uuid: str = ""  # empty where the explanation belongs to one server


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """How a scheduler decided.

    How many hosts it considered, the filters in the order applied, the winners in the order placed.
    """

    hosts: int
    filters: tuple[FilterStep, ...] = ()
    winners: tuple[Winner, ...] = ()
    forced: bool = False  # an admin named the host: see `RequestSpec.forced`
    took: int = 0  # microseconds, without the claim
    waits: bool = False  # there is no host; the scheduler is asked again, because a host may return
    same_as: str = ""  # the operation of the same request that has the filters; they are stored once
    earlier: "tuple[Explanation, ...]" = ()  # of the attempts before, the first one first

    def of_one(self, instance_uuid: str, host: str, node: str, same_as: str) -> "Explanation":
        """Return the part that is stored with one server: its own winner, and the filters unless `same_as` has them."""
        own = self._winner_of.get((instance_uuid, host, node)) or self._winner_of.get(("", host, node))
        winners = () if own is None else (msgspec.structs.replace(own, instance_uuid=""),)
        return msgspec.structs.replace(self, winners=winners).sharing_filters(same_as)

    def sharing_filters(self, same_as: str) -> "Explanation":
        """Return the decision as an operation stores it: without filters if `same_as`, one of its request, has them."""
        return msgspec.structs.replace(self, filters=(), same_as=same_as) if same_as else self

    @functools.cached_property
    def _winner_of(self) -> dict[tuple[str, str, str], Winner]:
        """The winners by instance, host and node; those without an instance are the first of a node.

        A scheduler of an older version does not say whose winner it is.
        """
        found: dict[tuple[str, str, str], Winner] = {}
        for winner in self.winners:
            found.setdefault((winner.instance_uuid, winner.host, winner.node), winner)
            found.setdefault(("", winner.host, winner.node), winner)
        return found

    def reasons(self) -> list[dict[str, Any]]:
        """Return the filters as plain data, for the details of an error."""
        return [msgspec.to_builtins(step) for step in self.filters]


def explanation_of(error: NoValidHost) -> Explanation | None:
    """Return why the scheduler found no host; None if the error says only that no host succeeded."""
    if "reasons" not in error.details:
        return None
    filters = msgspec.convert(error.details["reasons"], tuple[FilterStep, ...])
    return Explanation(hosts=error.details.get("hosts", 0), filters=filters, took=error.details.get("took", 0))


def attempts(last: Explanation) -> list[Explanation]:
    """Return the decisions about a server in their order."""
    return [*last.earlier, msgspec.structs.replace(last, earlier=())]


def sentences(explanation: Explanation) -> list[str]:
    """Return a decision in words: the hosts that entered and left each filter, and the weights of the chosen one.

    It names hosts: only who may see them may read it.
    """
    asked = f"The scheduler was asked about {counted(explanation.hosts, 'host')}"
    lines = [f"{asked} and decided in {explanation.took / 1000:.1f} ms." if explanation.took else f"{asked}."]
    if explanation.forced:
        lines.append(FORCED)
    silent = []
    for step in explanation.filters:
        if step.error:
            lines.append(f"{step.name} failed and let no host pass: {step.error}.")
        elif step.removed:
            lines.append(f"{step.name}: {step.entered} entered, {step.remaining} left; it removed {named(step)}.")
        else:
            silent.append(step.name)
    if silent:
        lines.append(f"These removed none: {', '.join(silent)}.")
    for winner in explanation.winners:
        parts = weights_of(winner)
        lines.append(f"Chosen: {winner.host}" + (f", weight {winner.weight:.2f} ({parts})." if parts else "."))
    if not explanation.winners:
        lines.append("No host was left." + (" The scheduler is asked again." if explanation.waits else ""))
    return lines


def weights_of(winner: Winner) -> str:
    """Return what each weigher added to the weight of a chosen host."""
    return ", ".join(f"{name} {weight + 0.0:+.2f}" for name, weight in winner.weighers.items())  # no -0.00


def named(step: FilterStep) -> str:
    """Return the hosts that a filter removed: the first by name, the others as a number."""
    more = step.removed - len(step.hosts)
    if not step.hosts:
        return counted(step.removed, "host")
    return ", ".join(sorted(step.hosts, key=by_number)) + (f" and {more} more" if more > 0 else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 host, 2 hosts."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
