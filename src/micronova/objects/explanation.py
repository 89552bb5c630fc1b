"""The explanation of a scheduler's decision: kept with the operation and shown to admins."""

from typing import Any, Final

import msgspec

from micronova.objects.errors import NoValidHost

COMPUTE_FILTER: Final = "ComputeFilter"  # the filter that removes hosts that are disabled or down


class FilterStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many hosts one filter removed, and how many remained."""

    name: str
    removed: int
    remaining: int
    error: str = ""  # the filter failed, so it let no host pass


class Winner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The host that was chosen for one instance, and what each weigher added to its weight."""

    host: str
    node: str
    weight: float = 0.0
    weighers: dict[str, float] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision: how many hosts were considered, the filters in the order applied, the winners in the order placed."""

    hosts: int
    filters: tuple[FilterStep, ...] = ()
    winners: tuple[Winner, ...] = ()
    forced: bool = False  # an admin named the host: no filter was applied
    same_as: str = ""  # the operation of the same request that has the filters; they are stored once
    earlier: "tuple[Explanation, ...]" = ()  # of the attempts before, the first one first

    def of_one(self, host: str, node: str, same_as: str) -> "Explanation":
        """Return the part that is stored with one server: its own winner, and the filters unless `same_as` has them."""
        own = tuple(winner for winner in self.winners if (winner.host, winner.node) == (host, node))[:1]
        filters = () if same_as else self.filters
        return Explanation(hosts=self.hosts, filters=filters, winners=own, forced=self.forced, same_as=same_as)

    def reasons(self) -> list[dict[str, Any]]:
        """Return the filters as plain data, for the details of an error."""
        return [msgspec.structs.asdict(step) for step in self.filters]


def refusal(error: NoValidHost) -> Explanation | None:
    """Return why the scheduler found no host; None if the error says only that no host succeeded."""
    if "reasons" not in error.details:
        return None
    filters = msgspec.convert(error.details["reasons"], tuple[FilterStep, ...])
    return Explanation(hosts=error.details.get("hosts", 0), filters=filters)
