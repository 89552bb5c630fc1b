"""Fetches images to the cache of a host before guests need them.

A download may take longer than a conductor waits for an answer. So a call that has waited for some time is answered
with "caching", and the conductor asks again; the download goes on meanwhile, even if nobody asks any more.
"""

import asyncio
import logging

from micronova.compute.rpcapi import CacheStatus
from micronova.compute.waiting import wait_for_all
from micronova.objects.clock import Clock
from micronova.objects.errors import NotSupported, Unavailable
from micronova.objects.image import ImageMeta
from micronova.virt.driver import Driver, ImageCaching, capable_driver, verifies

log = logging.getLogger(__name__)

LONGEST_WAIT = 20.0
"""Seconds after which a call is answered, less than a caller waits."""


class ImageFetches:
    """The downloads of one host that no guest waits for."""

    def __init__(self, host: str, driver: Driver, clock: Clock) -> None:
        self._host = host
        self._driver = driver
        self._clock = clock
        self._downloads: dict[str, asyncio.Task[bool]] = {}  # by the image's id

    async def cache(self, image: ImageMeta, url: str | None) -> CacheStatus:
        """Begin to fetch an image, or wait for it; raise what the driver raises."""
        driver = capable_driver(self._driver, ImageCaching, f"The host {self._host} has no image cache.")
        if not verifies(self._driver, image):
            raise NotSupported(f"The host {self._host} does not verify signatures of images.")
        task = self._downloads.get(image.id)
        if task is None:
            task = asyncio.create_task(driver.cache_image(image, url), name=f"cache-image-{image.id}")
            self._downloads[image.id] = task
            task.add_done_callback(lambda done: self._ended(image.id, done))
        await wait_for_all(self._clock, [task], LONGEST_WAIT)
        if not task.done():
            return "caching"
        if task.cancelled():
            raise Unavailable(f"The agent of host {self._host} stops.")
        return "cached" if task.result() else "existing"

    def cancel(self) -> None:
        """End the downloads: the agent stops."""
        for task in self._downloads.values():
            task.cancel()

    def _ended(self, image: str, task: asyncio.Task[bool]) -> None:
        del self._downloads[image]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("host %s: the image %s could not be cached: %s", self._host, image, error)
