"""Which images the servers on hosts have, for the weigher that compares their properties with the requested image.

Only this weigher needs it, and it is off by default. The counts are read for a decision that needs them, at most every
few seconds: all servers are counted.
"""

import asyncio
from collections.abc import Mapping

from micronova.db import server_hosts
from micronova.db.engine import Database
from micronova.objects.clock import Clock
from micronova.objects.image import ImageMeta
from micronova.objects.image_properties import canonical_properties

MAX_AGE = 5.0  # seconds


class ImageCounts:
    """Counts servers by host and image."""

    def __init__(self, database: Database, clock: Clock, ratios: Mapping[str, float]) -> None:
        """`ratios` say which properties count and how much; without any, all count the same."""
        self._database = database
        self._clock = clock
        self._ratios = ratios
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()  # requests that wait at the same time share one read
        self._hosts: dict[str, dict[str, int]] = {}  # image -> host -> servers
        self._properties: dict[str, frozenset[tuple[str, str]]] = {}  # by image, as they were when a server was created

    async def alike(self, image: ImageMeta) -> dict[str, float]:
        """Return by host how many properties of its servers' images are the same as those of this image."""
        wanted = pairs(image)
        if not wanted:
            return {}
        await self._refresh()
        found: dict[str, float] = {}
        for other, hosts in self._hosts.items():
            common = wanted & self._properties.get(other, frozenset())
            each = sum(self._ratios.get(name, 0.0) for name, _ in common) if self._ratios else float(len(common))
            if each:
                for host, count in hosts.items():
                    found[host] = found.get(host, 0.0) + each * count
        return found

    async def _refresh(self) -> None:
        async with self._reading:
            now = self._clock.monotonic()
            if now - self._read_at >= MAX_AGE:
                await self._read()
                self._read_at = now

    async def _read(self) -> None:
        hosts: dict[str, dict[str, int]] = {}
        for host, id, count in await self._database.read(server_hosts.servers_by_image):
            hosts.setdefault(id, {})[host] = count
        known = {id: pairs for id, pairs in self._properties.items() if id in hosts}
        if new := sorted(hosts.keys() - known.keys()):
            images = await self._database.read(server_hosts.images_of_servers, new)
            known |= {id: pairs(image) for id, image in images.items()}
        self._hosts, self._properties = hosts, known


def pairs(image: ImageMeta) -> frozenset[tuple[str, str]]:
    """Return the properties of an image that are compared with those of others."""
    return frozenset(canonical_properties(image.properties).items())
