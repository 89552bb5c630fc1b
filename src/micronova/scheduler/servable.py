"""How many more instances of a request each node can take, besides what the host table says.

- The providers of a node's tree serve the request groups of only so many instances.
- What sharing providers have left counts once, however many nodes can have it.
- A node that refuses claims for no reason that the scheduler sees gets fewer instances, or none.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from micronova.placement.candidates import SharedNeed

Stock = dict[tuple[str, str], int]  # what is left, by provider and resource class
Needs = Mapping[str, Sequence[tuple[SharedNeed, int]]]  # by node: of sharing providers, and how many need none


class Servable:
    """What is left for the instances of one decision. Decisions about the same request begin with copies."""

    def __init__(
        self,
        counts: Mapping[str, int] | None = None,
        needs: Needs | None = None,
        stock: Mapping[tuple[str, str], int] | None = None,
        unfinished: Collection[str] = (),
    ) -> None:
        """`counts` are by node, None without request groups: a node that is not named there serves none.

        The search for the providers of `unfinished` nodes has ended early.
        """
        self.grouped = counts is not None
        self.reasons: Collection[str] = ()  # for which nodes refuse claims
        self._counts = dict(counts or {})
        self._needs: Needs = needs or {}
        self._stock = dict(stock or {})
        self._unfinished = unfinished
        self._limits: dict[str, int] = {}
        self._taken: Counter[str] = Counter()  # instances by node
        self._shares: dict[tuple[SharedNeed, ...], Stock | None] = {}

    def copy(self) -> "Servable":
        """Return a copy for one decision, with what was left before it: nothing is taken from the original."""
        made = Servable(self._counts if self.grouped else None, self._needs, self._stock, self._unfinished)
        made.limit(self._limits, self.reasons)
        return made

    def limit(self, limits: Mapping[str, int], reasons: Collection[str]) -> None:
        """Limit the instances of nodes that refused claims for these reasons."""
        self._limits, self.reasons = dict(limits), reasons

    def able(self) -> Iterable[str]:
        """Return the nodes whose providers can serve another instance."""
        return [uuid for uuid in self._counts if self._is_served(uuid)]

    def unknown(self) -> Iterable[str]:
        """Return the nodes of which it is not known whether their providers can serve another instance."""
        return [uuid for uuid in self._unfinished if not self._is_served(uuid)]

    def refusing(self) -> Iterable[str]:
        """Return the nodes that would refuse the claim of another instance."""
        return [uuid for uuid, most in self._limits.items() if most <= 0]

    def takes(self, uuid: str) -> bool:
        """Return whether a node can take another instance."""
        return self._limits.get(uuid, 1) > 0 and (not self.grouped or self._is_served(uuid))

    def take(self, uuid: str) -> bool:
        """Count an instance on a node; return whether other nodes may not take one any more."""
        amounts = self._shared(self._needed(uuid)) or {}
        self._taken[uuid] += 1
        if uuid in self._limits:
            self._limits[uuid] -= 1
        if self.grouped:
            self._counts[uuid] -= 1
        if not amounts:
            return False
        served = [needs for needs, found in self._shares.items() if found is not None]
        self._shares.clear()
        for key, amount in amounts.items():
            self._stock[key] -= amount
        return any(self._shared(needs) is None for needs in served)

    def _is_served(self, uuid: str) -> bool:
        return self._counts.get(uuid, 0) > 0 and self._shared(self._needed(uuid)) is not None

    def _needed(self, uuid: str) -> tuple[SharedNeed, ...]:
        """Return what the next instance on a node needs of sharing providers."""
        taken = self._taken.get(uuid, 0)
        return tuple(need for need, own in self._needs.get(uuid, ()) if own <= taken)

    def _shared(self, needs: tuple[SharedNeed, ...]) -> Stock | None:
        """Return what an instance takes of sharing providers; None if they have too little."""
        if needs not in self._shares:
            self._shares[needs] = self._find(needs)
        return self._shares[needs]

    def _find(self, needs: tuple[SharedNeed, ...]) -> Stock | None:
        taken: Stock = {}
        for need in needs:
            for provider in need.providers:
                total = {(provider, name): taken.get((provider, name), 0) + n for name, n in need.resources}
                if all(amount <= self._stock.get(key, 0) for key, amount in total.items()):
                    taken |= total
                    break
            else:
                return None
        return taken
