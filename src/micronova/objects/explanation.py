"""Why the scheduler decided as it did: kept with the operation and shown to admins."""

from typing import Any

import msgspec


class FilterStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one filter did to the hosts that were left when it was asked."""

    name: str
    removed: int
    remaining: int
    error: str = ""  # the filter failed and was passed over


class Winner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The host that was chosen for one instance, and what each weigher added to its weight."""

    host: str
    node: str
    weight: float = 0.0
    weighers: dict[str, float] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision: the hosts considered, the filters in the order asked, the winners in the order placed."""

    hosts: int
    filters: tuple[FilterStep, ...] = ()
    winners: tuple[Winner, ...] = ()
    forced: bool = False  # an admin named the host: no filter was asked

    def reasons(self) -> list[dict[str, Any]]:
        """Give the filters' part as plain data, for the details of an error."""
        return [msgspec.structs.asdict(step) for step in self.filters]
