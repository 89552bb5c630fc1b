"""Metrics of the whole region, which one conductor at a time counts in the database and at the broker.

A conductor takes part while somebody asks for its metrics. The one that has the job keeps it as long as it works, so
that the figures stay with one process; another takes the job over when that one has been silent for LEASE seconds.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from micronova.conductor.rpcapi import CONSOLE, HOSTS, KEYS, TASKS
from micronova.db import periodic_jobs, region_counts
from micronova.db.engine import Database
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Unavailable
from micronova.objects.states import STATUSES
from micronova.rpc.bus import Bus
from micronova.rpc.contract import queue_name
from micronova.scheduler.rpcapi import SCHEDULER_INTERFACE
from micronova.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

NAME: Final = "region_metrics"
INTERVAL: Final = 15.0  # seconds between two counts
LEASE: Final = 60.0  # seconds after which another conductor takes the job over
WANTED_FOR: Final = 300.0  # seconds since Prometheus has asked last
TIMEOUT: Final = 10.0  # seconds that the database may take for one count
BROKER_TIMEOUT: Final = 5.0  # seconds that the broker may take; without it there are no lengths of queues
SHARE: Final = 20  # a count that took a second is not repeated before 20 seconds: 5 % of the time at most
QUEUES: Final = tuple(
    queue_name(each.topic, each.namespace) for each in (TASKS, HOSTS, CONSOLE, KEYS, SCHEDULER_INTERFACE)
)
"""The shared queues, whose messages wait if conductors or schedulers are too few or away."""


class RegionMetrics:
    """Counts a region for /metrics, on the conductor that has the job."""

    def __init__(
        self, database: Database, bus: Bus, clock: Clock, metrics: Metrics, *, owner: str, service_down_time: float
    ) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._owner = owner
        self._down_time = service_down_time
        self._counts: region_counts.RegionCounts | None = None
        self._lengths: dict[str, int] = {}
        self._took = 0.0
        self._due_at = 0.0  # the next count
        self._asked_at: float | None = None
        self._woken = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        metrics.collector(self.collect)

    def start(self) -> None:
        """Start to count, as soon as somebody asks."""
        self._loop = keep_running(self._forever, name="conductor-region-metrics", clock=self._clock)

    async def stop(self) -> None:
        """Stop; another conductor takes over."""
        await end_tasks(self._loop)

    async def _forever(self) -> None:
        while True:
            if not self._is_wanted():
                self._counts = None
                self._woken.clear()
                await self._woken.wait()
            try:
                await self.keep_or_count()
            except (Unavailable, TimeoutError) as error:
                self._counts = None
                if isinstance(error, TimeoutError):
                    self._due_at = self._clock.monotonic() + SHARE * TIMEOUT
                log.warning("the region cannot be counted for metrics, which is repeated: %s", error or "it takes long")
            await self._clock.sleep(INTERVAL)

    async def keep_or_count(self) -> None:
        """Count if it is time for that; else keep the job, so that no other conductor shows its figures, too."""
        if self._clock.monotonic() >= self._due_at:
            await self.count()
        elif self._counts is not None:
            async with asyncio.timeout(TIMEOUT):
                await self._has_job()

    def _is_wanted(self) -> bool:
        return self._asked_at is not None and self._clock.monotonic() - self._asked_at < WANTED_FOR

    async def count(self) -> None:
        """Count, if this conductor has the job or gets it."""
        async with asyncio.timeout(TIMEOUT):
            if not await self._has_job():
                return
            began = self._clock.monotonic()
            counts = await self._database.read(region_counts.read, micros(self._clock.now()), self._down_time)
        self._took = self._clock.monotonic() - began
        self._counts = counts
        self._lengths, took = await self._queue_lengths()
        self._took += took
        self._due_at = self._clock.monotonic() + SHARE * self._took

    async def _queue_lengths(self) -> tuple[dict[str, int], float]:
        """Return the lengths of the queues, and how long the broker took; nothing if it does not answer."""
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(BROKER_TIMEOUT):
                return await self._bus.queue_lengths(QUEUES), self._clock.monotonic() - began
        except (Unavailable, TimeoutError) as error:
            log.warning("the broker does not tell how many messages wait: %s", error or "it does not answer")
            return {}, 0.0  # to wait costs nothing: the next count is not put off

    async def _has_job(self) -> bool:
        """Keep the job, or get it; without it, there are no figures to show."""
        now = micros(self._clock.now())
        if await self._database.write(periodic_jobs.keep_or_claim, NAME, self._owner, now, micros(LEASE)):
            return True
        self._counts = None
        return False

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics of the region, if this conductor counts it, when Prometheus asks."""
        from prometheus_client.core import GaugeMetricFamily

        self._asked_at = self._clock.monotonic()
        self._woken.set()
        counts = self._counts
        yield GaugeMetricFamily(
            "micronova_region_counted",
            "1 on the conductor that counts the region, on others 0.",
            value=counts is not None,
        )
        if counts is None:
            return
        yield GaugeMetricFamily("micronova_region_count_seconds", "Time of the last count.", value=self._took)
        labels = ["kind", "step"]
        open_ = GaugeMetricFamily("micronova_operations_open", "Operations that have not ended.", labels=labels)
        oldest = GaugeMetricFamily(
            "micronova_operations_oldest_seconds", "Age of the oldest operation that has not ended.", labels=labels
        )
        late = GaugeMetricFamily("micronova_operations_late", "Open operations after their deadline.", labels=labels)
        unleased = GaugeMetricFamily(
            "micronova_operations_waiting", "Open operations that nobody works on at the moment.", labels=labels
        )
        leases = GaugeMetricFamily(
            "micronova_operations_most_leases", "How often one of the open operations was begun.", labels=labels
        )
        for each in counts.operations:
            of = [each.kind, each.step]
            open_.add_metric(of, each.number)
            oldest.add_metric(of, each.oldest_seconds)
            late.add_metric(of, each.late)
            unleased.add_metric(of, each.unleased)
            leases.add_metric(of, each.most_leases)
        yield from (open_, oldest, late, unleased, leases)
        services = GaugeMetricFamily(
            "micronova_services",
            "Services by state: up, down, disabled; nova-compute are hosts.",
            labels=["binary", "state"],
        )
        for found in counts.services:
            services.add_metric([found.binary, found.state], found.number)
        yield services
        servers = GaugeMetricFamily("micronova_servers", "Servers by status.", labels=["status"])
        # Those of no server, too: a series that begins with the first one has not grown, as far as Prometheus knows.
        for status in sorted(STATUSES | counts.servers.keys()):
            servers.add_metric([status], counts.servers.get(status, 0))
        yield servers
        queues = GaugeMetricFamily("micronova_queue_messages", "Messages that wait in a queue.", labels=["queue"])
        for queue, number in sorted(self._lengths.items()):
            queues.add_metric([queue], number)
        yield queues
