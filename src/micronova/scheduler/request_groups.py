"""Counts how many instances of a request the providers of nodes can serve, if its flavor has request groups.

Providers are not in the host table: their trees are read from the database. So only those of nodes that pass all
filters are read, some at a time, and each once per request unless a claim shows that another request has taken some of
it. What sharing providers have left is read again after each such claim, and counts once for all nodes.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from micronova.db import provider_trees
from micronova.db.engine import Database
from micronova.placement import candidates
from micronova.placement.candidates import SharedNeed
from micronova.placement.model import Provider, ResourceRequest, by_root
from micronova.scheduler.servable import Servable, Stock

PART = 50
"""Trees that are read at once: their rows are decoded in the event loop."""


class RequestGroups:
    """The instances that nodes can serve, of one request."""

    def __init__(self, database: Database, request: ResourceRequest, own: Mapping[str, int], most: int) -> None:
        """Prepare to count up to `most` instances per node; `own` is what each takes of the node itself besides."""
        self._database = database
        self._request = request
        self._own = own
        self._most = most
        self._steps = candidates.RequestSteps()
        self._sharing: list[Provider] | None = None  # None: to be read
        self._stock: Stock = {}  # what sharing providers have left
        self._counts: dict[str, int] = {}  # of all nodes that were asked, by uuid
        self._needs: dict[str, Sequence[tuple[SharedNeed, int]]] = {}  # of sharing providers
        self._unfinished: set[str] = set()  # nodes whose search has ended early

    async def count(self, node_uuids: Sequence[str]) -> Servable:
        """Return how many instances each of these nodes can serve; nodes that were asked before are not asked again."""
        if self._sharing is None:
            self._sharing = await self._database.read(provider_trees.load_sharing)
            self._restock(self._sharing)
        sharing = self._sharing
        unknown = [uuid for uuid in node_uuids if uuid not in self._counts]
        if len(unknown) > PART:
            able = set(await self._database.read(provider_trees.roots_of, self._request, sharing))
            self._counts |= {uuid: 0 for uuid in unknown if uuid not in able}
            unknown = [uuid for uuid in unknown if uuid in able]
        for steps in candidates.ROUNDS if len(unknown) > 1 else candidates.ROUNDS[-1:]:
            self._steps.most = steps
            for first in range(0, len(unknown), PART):
                await self._ask(unknown[first : first + PART], sharing)
            unknown = [uuid for uuid in unknown if uuid in self._unfinished]
        counts = {uuid: self._counts[uuid] for uuid in node_uuids}
        return Servable(counts, self._needs, self._stock, self._unfinished.intersection(node_uuids))

    def known(self, node_uuid: str) -> object:
        """Return what was read of the providers that serve a node."""
        needs = self._needs.get(node_uuid, ())
        shared = {uuid for need, _ in needs for uuid in need.providers}
        return self._counts.get(node_uuid), {key: left for key, left in self._stock.items() if key[0] in shared}

    async def _ask(self, part: Sequence[str], sharing: Sequence[Provider]) -> None:
        trees = by_root(await self._database.read(provider_trees.load_trees, part))
        for root in part:
            tree = trees.get(root, ())
            providers = [*tree, *(each for each in sharing if each.root != root)]
            before = self._steps.ended_early
            self._counts[root] = candidates.how_many(self._request, providers, root, self._own, self._most, self._steps)
            ended_early = self._steps.ended_early > before and self._counts[root] < self._most
            (self._unfinished.add if ended_early else self._unfinished.discard)(root)
            self._needs[root] = candidates.shared_needs(self._request, tree, sharing, self._most)
            await asyncio.sleep(0)

    def _restock(self, sharing: Sequence[Provider]) -> None:
        """Count what sharing providers have left; if one has more than before, nodes that lacked it are asked again."""
        before = self._stock
        self._stock = {
            (each.uuid, name): own.capacity - own.used
            for each in sharing
            for name, own in each.inventories.items()
            if name in self._request.classes
        }
        grown = {key[0] for key, left in self._stock.items() if left > before.get(key, 0)}
        for uuid, needs in self._needs.items():
            if self._counts.get(uuid, self._most) < self._most and any(
                not grown.isdisjoint(need.providers) for need, _ in needs
            ):
                del self._counts[uuid]

    def forget(self, node_uuids: Collection[str]) -> None:
        """Ask these nodes again, and what sharing providers have left: others have taken of them."""
        self._sharing = None
        for uuid in node_uuids:
            self._counts.pop(uuid, None)
