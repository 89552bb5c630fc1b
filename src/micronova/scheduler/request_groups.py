"""Counts how many instances of a request the providers of nodes can serve, if its flavor has request groups.

Providers are not in the host table: their trees are read from the database. So only those of nodes that pass all
filters are read, some at a time, and each once per request unless a claim shows that others have taken of it.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from micronova.db import provider_trees
from micronova.db.engine import Database
from micronova.placement import candidates
from micronova.placement.model import Provider, ResourceRequest, by_root

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
        self._sharing: list[Provider] | None = None
        self._counts: dict[str, int] = {}  # of all nodes that were asked, by uuid

    async def count(self, node_uuids: Sequence[str]) -> dict[str, int]:
        """Return how many instances each of these nodes can serve; nodes that were asked before are not asked again."""
        unknown = [uuid for uuid in node_uuids if uuid not in self._counts]
        if unknown and self._sharing is None:
            self._sharing = await self._database.read(provider_trees.load_sharing)
        sharing = self._sharing or []
        if len(unknown) > PART:
            able = set(await self._database.read(provider_trees.roots_of, self._request, sharing))
            self._counts |= {uuid: 0 for uuid in unknown if uuid not in able}
            unknown = [uuid for uuid in unknown if uuid in able]
        for first in range(0, len(unknown), PART):
            await self._ask(unknown[first : first + PART], sharing)
        return {uuid: self._counts[uuid] for uuid in node_uuids}

    async def _ask(self, part: Sequence[str], sharing: Sequence[Provider]) -> None:
        trees = by_root(await self._database.read(provider_trees.load_trees, part))
        for root in part:
            others = [each for each in sharing if each.root != root]
            providers = [*trees.get(root, ()), *others]
            self._counts[root] = candidates.how_many(self._request, providers, root, self._own, self._most, self._steps)
            await asyncio.sleep(0)

    def forget(self, node_uuids: Collection[str]) -> None:
        """Ask these nodes again: others have taken of them, or of a provider that serves all of them."""
        if self._sharing:
            self._counts.clear()
            self._sharing = None
        for uuid in node_uuids:
            self._counts.pop(uuid, None)
