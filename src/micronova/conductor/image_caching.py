"""Fetches images to the caches of an aggregate's hosts, before servers need them.

Such a request is a hint and no operation: nothing depends on it, because a build fetches an image that its host does
not have. So it is kept in the memory of one conductor. If that ends, the rest of the request is lost, as in Nova, and
the notification `aggregate.cache_images.end` is never sent; repeating the request costs nothing where images are cached
already. What an administrator learns of it are these notifications and the log.

At most `image_cache.precache_concurrency` hosts of all requests work for a conductor at the same time, because all
of them download from one image service. A host gets one image after the other, each by calls that it answers soon, so
that a dead host is noticed, and each with a new ticket.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import sqlalchemy as sa

from micronova.compute.rpcapi import CacheStatus
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import aggregates, periodic_jobs, services
from micronova.db.aggregates import AggregateRow
from micronova.notifications import resources
from micronova.objects.context import Context
from micronova.objects.errors import NotFound, NotSupported, OperationFailed, Unavailable
from micronova.objects.image import ImageMeta
from micronova.objects.service_names import COMPUTE
from micronova.rpc.errors import NoSuchMethod, VersionTooNew

log = logging.getLogger(__name__)

NAME: Final = "cache_images"
"""Under which `micronova status` shows the last request, among the periodic jobs."""

Results = dict[str, CacheStatus]


LONGEST_ERROR: Final = 255  # characters
_DONE: Final = ("cached", "existing")


class CacheImagesTasks:
    """Carries out the requests that this conductor has got."""

    def __init__(self, dependencies: ConductorDependencies, concurrency: int) -> None:
        self._dependencies = dependencies
        self._concurrency = concurrency
        self._hosts_at_work = asyncio.Semaphore(concurrency)
        self._requests: set[asyncio.Task[None]] = set()

    def begin(self, context: Context, aggregate: int, images: Sequence[ImageMeta]) -> None:
        """Begin to fetch images; return at once."""
        task = asyncio.create_task(self._run(context, aggregate, images), name=f"cache-images-{aggregate}")
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def stop(self) -> None:
        """Forget what is left of the requests; hosts finish the images that they fetch."""
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def _run(self, context: Context, aggregate: int, images: Sequence[ImageMeta]) -> None:
        await self._note(periodic_jobs.note_begin)
        try:
            row, hosts = await self._dependencies.engine.database.read(_with_hosts, aggregate)
            request = _Request(self._dependencies, self._hosts_at_work, context, row, hosts, images)
            failed = await request.run(self._concurrency)
        except NotFound as error:  # it was deleted meanwhile
            log.warning("images are not cached on hosts: %s", error)
            failed = error.message
        except Exception as error:
            log.exception("images could not be cached on the hosts of aggregate %d", aggregate)
            failed = f"{type(error).__name__}: {error}"
        await self._note(periodic_jobs.note_end, failed[:LONGEST_ERROR])

    async def _note(self, write: Callable[..., None], *values: str) -> None:
        """Record the begin or the end of a request, for `micronova status`."""
        engine = self._dependencies.engine
        try:
            await engine.database.write(write, NAME, engine.owner, engine.now(), *values)
        except Unavailable as error:
            log.warning("the request to cache images is not recorded, and goes on: %s", error)


class _Request:
    """One request."""

    def __init__(
        self,
        dependencies: ConductorDependencies,
        hosts_at_work: asyncio.Semaphore,
        context: Context,
        aggregate: AggregateRow,
        hosts: list[str],
        images: Sequence[ImageMeta],
    ) -> None:
        self._dependencies = dependencies
        self._hosts_at_work = hosts_at_work
        self._context = context
        self._aggregate = aggregate
        self._hosts = hosts
        self._images = images
        self._done = 0
        self._counts: Counter[CacheStatus] = Counter()

    async def run(self, concurrency: int) -> str:
        """Let all hosts fetch the images, and tell how it goes; return what failed, "" if nothing did."""
        self._announce("start")
        waiting = iter(self._hosts)
        workers = min(concurrency, len(self._hosts))
        await asyncio.gather(*(self._work(waiting) for _ in range(workers)))
        names = ", ".join(image.id for image in self._images)
        counts = ", ".join(f"{number} {status}" for status, number in sorted(self._counts.items()))
        log.info(
            "images %s on the %d hosts of aggregate %s: %s", names, len(self._hosts), self._aggregate.name, counts or 0
        )
        self._announce("end")
        failed = {status: number for status, number in self._counts.items() if status not in _DONE}
        return f"{self._aggregate.name}: {counts}" if failed else ""

    async def _work(self, waiting: Iterator[str]) -> None:
        for host in waiting:
            async with self._hosts_at_work:
                results = await self._fetch_all(host)
            self._done += 1
            self._counts.update(results.values())
            notification = partial(
                resources.aggregate_cache,
                self._aggregate,
                host,
                cached=[id for id, status in results.items() if status in _DONE],
                failed=[id for id, status in results.items() if status not in _DONE],
                index=self._done,
                total=len(self._hosts),
            )
            self._dependencies.notifier.announce(self._context, notification)

    async def _fetch_all(self, host: str) -> Results:
        """Let a host fetch the images; return what became of each."""
        results: Results = {}
        for image in self._images:
            try:
                if not await self._is_up(host):
                    log.info("host %s is not up: the image %s is not cached there", host, image.id)
                    results[image.id] = "skipped"
                else:
                    results[image.id] = await self._fetch(host, image)
            except (NotSupported, NoSuchMethod, VersionTooNew) as error:
                log.warning("host %s does not cache images ahead of time: %s", host, error)
                results[image.id] = "unsupported"
            except Exception as error:
                log.warning("host %s: the image %s could not be cached: %s", host, image.id, error)
                results[image.id] = "error"
        return results

    async def _fetch(self, host: str, image: ImageMeta) -> CacheStatus:
        """Let a host fetch an image."""
        client, compute = self._dependencies.image_client, self._dependencies.compute
        clock, longest = self._dependencies.engine.clock, self._dependencies.operation_timeout
        until = clock.monotonic() + longest
        while clock.monotonic() < until:
            url = None if client is None else client.download_url(image.id)
            status = await compute.cache_image(self._context, host, image, url)
            if status != "caching":
                return status
        raise OperationFailed(f"The download has not ended within {longest:g} s.")

    async def _is_up(self, host: str) -> bool:
        engine = self._dependencies.engine
        found = (await engine.database.read(services.on_hosts, COMPUTE, [host])).get(host)
        return found is not None and services.is_up(found, engine.now(), self._dependencies.service_down_time)

    def _announce(self, phase: str) -> None:
        notification = partial(resources.aggregate_of, "cache_images", phase, self._aggregate, self._hosts)
        self._dependencies.notifier.announce(self._context, notification)


def _with_hosts(conn: sa.Connection, number: int) -> tuple[AggregateRow, list[str]]:
    return aggregates.get(conn, number), aggregates.hosts(conn, [number]).get(number, [])
