"""Metrics in the format of Prometheus.

Counting is arithmetic on dictionaries in the event loop's thread and takes about a microsecond. Everything else
happens when Prometheus asks; its library is not imported before.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from micronova.telemetry.threads import ThreadUse

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily, Metric

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LONG_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SHORT_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)


class Histogram:
    """Counts durations by buckets."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def add_to(self, family: "HistogramMetricFamily", labels: list[str]) -> None:
        """Add this histogram to a metric; there each bucket includes all smaller ones."""
        buckets, sum_ = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            sum_ += count
            buckets.append((bound, sum_))
        family.add_metric(labels, buckets, self.total)


class Metrics:
    """The metrics that one process counts itself."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}
        self.latencies: dict[tuple[str, str], Histogram] = {}
        self.operations: dict[tuple[str, str], Histogram] = {}
        self.decisions = Histogram(SHORT_BUCKETS)
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._counters: list[tuple[str, str, str, Callable[[], Mapping[str, int]]]] = []
        self._collectors: list[Callable[[], Iterator[Metric]]] = []
        self.retries: dict[str, int] = {}
        self._threads: list[tuple[str, Callable[[], ThreadUse]]] = []

    def request(self, service: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request."""
        answered = (service, route, status)
        self.requests[answered] = self.requests.get(answered, 0) + 1
        latency = self.latencies.get((service, route))
        if latency is None:
            latency = self.latencies[service, route] = Histogram(BUCKETS)
        latency.add(seconds)

    def operation(self, kind: str, result: str, seconds: float) -> None:
        """Count an operation that has ended, with the seconds since it was accepted."""
        times = self.operations.get((kind, result))
        if times is None:
            times = self.operations[kind, result] = Histogram(LONG_BUCKETS)
        times.add(seconds)

    def retry(self, kind: str) -> None:
        """Count that an operation is tried again after a pause."""
        self.retries[kind] = self.retries.get(kind, 0) + 1

    def decision(self, seconds: float) -> None:
        """Count a decision of the scheduler; its time does not include the claim."""
        self.decisions.add(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a number that is read when Prometheus asks."""
        self._gauges.append((name, text, read))

    def counter(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Add numbers by label that other code counts; they are read when Prometheus asks."""
        self._counters.append((name, text, label, read))

    def threads(self, pool: str, read: Callable[[], ThreadUse]) -> None:
        """Add the use of a pool of threads, which is read when Prometheus asks."""
        self._threads.append((pool, read))

    def collector(self, collect: "Callable[[], Iterator[Metric]]") -> None:
        """Add metrics that other code yields when Prometheus asks."""
        self._collectors.append(collect)

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics, when Prometheus asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        answered = CounterMetricFamily(
            "micronova_http_requests", "Requests answered.", labels=["service", "route", "status"]
        )
        for (service, route, status), number in self.requests.items():
            answered.add_metric([service, route, str(status)], number)
        yield answered
        latencies = HistogramMetricFamily(
            "micronova_http_request_seconds", "Time to answer a request.", labels=["service", "route"]
        )
        for (service, route), latency in self.latencies.items():
            latency.add_to(latencies, [service, route])
        yield latencies
        operations = HistogramMetricFamily(
            "micronova_operation_seconds", "Time from acceptance to the end.", labels=["kind", "result"]
        )
        for (kind, result), times in self.operations.items():
            times.add_to(operations, [kind, result])
        yield operations
        retried = CounterMetricFamily(
            "micronova_operation_retries", "Operations that are tried again after a pause.", labels=["kind"]
        )
        for kind, number in self.retries.items():
            retried.add_metric([kind], number)
        yield retried
        decisions = HistogramMetricFamily("micronova_scheduler_decision_seconds", "Time to choose hosts.", labels=[])
        self.decisions.add_to(decisions, [])
        yield decisions
        yield GaugeMetricFamily("micronova_tasks", "Tasks of the event loop.", value=_tasks())
        for name, text, read in self._gauges:
            yield GaugeMetricFamily(name, text, value=read())
        if self._threads:
            yield from self._uses_of_threads()
        for name, text, label, count in self._counters:
            family = CounterMetricFamily(name, text, labels=[label])
            for value, number in count().items():
                family.add_metric([value], number)
            yield family
        for collect in self._collectors:
            yield from collect()

    def _uses_of_threads(self) -> "Iterator[Metric]":
        from prometheus_client.core import GaugeMetricFamily

        used = GaugeMetricFamily("micronova_threads_used", "Threads of the pool in use.", labels=["pool"])
        size = GaugeMetricFamily("micronova_threads_size", "Threads that the pool may have.", labels=["pool"])
        waiting = GaugeMetricFamily("micronova_threads_waiting", "Calls that wait for a thread.", labels=["pool"])
        for pool, read in self._threads:
            use = read()
            used.add_metric([pool], min(use.calls, use.threads))
            size.add_metric([pool], use.threads)
            waiting.add_metric([pool], max(0, use.calls - use.threads))
        yield from (used, size, waiting)


class DatabaseStatistics(Protocol):
    """The counters of a database that metrics show."""

    writes: int
    reads: int
    retries: int


class MeasuredDatabase(Protocol):
    """A database with counters."""

    @property
    def statistics(self) -> DatabaseStatistics: ...

    def pool(self) -> tuple[int, int] | None: ...


class BrokerState(Protocol):
    """What metrics show of a broker."""

    @property
    def connected(self) -> bool: ...
    @property
    def blocked(self) -> bool: ...
    @property
    def dead_letters(self) -> int: ...


class BusStats(Protocol):
    """The counters of a bus that metrics show."""

    @property
    def sent(self) -> Mapping[tuple[str, str], int]: ...
    @property
    def handled(self) -> Mapping[str, int]: ...
    @property
    def failed(self) -> Mapping[str, int]: ...
    @property
    def expired(self) -> Mapping[str, int]: ...
    @property
    def pending_calls(self) -> int: ...
    @property
    def broker(self) -> BrokerState: ...


class MeasuredBus(Protocol):
    """A bus with counters."""

    def stats(self) -> BusStats: ...


class _SharedMetrics:
    """The counters that the databases and the bus keep themselves."""

    def __init__(self, databases: Mapping[str, MeasuredDatabase], bus: MeasuredBus | None) -> None:
        self._databases, self._bus = databases, bus

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics, when Prometheus asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        writes = CounterMetricFamily("micronova_db_writes", "Write transactions.", labels=["service"])
        reads = CounterMetricFamily("micronova_db_reads", "Read transactions.", labels=["service"])
        retries = CounterMetricFamily("micronova_db_retries", "Transactions tried again.", labels=["service"])
        used = GaugeMetricFamily("micronova_db_pool_used", "Connections of the pool in use.", labels=["service"])
        size = GaugeMetricFamily("micronova_db_pool_size", "Connections that the pool may have.", labels=["service"])
        for service, database in self._databases.items():
            statistics = database.statistics
            writes.add_metric([service], statistics.writes)
            reads.add_metric([service], statistics.reads)
            retries.add_metric([service], statistics.retries)
            if (pool := database.pool()) is not None:
                used.add_metric([service], pool[0])
                size.add_metric([service], pool[1])
        yield from (writes, reads, retries, used, size)
        if self._bus is not None:
            stats = self._bus.stats()
            sent = CounterMetricFamily("micronova_messages", "Messages sent.", labels=["kind", "method"])
            for (kind, method), number in stats.sent.items():
                sent.add_metric([kind, method], number)
            yield sent
            for name, counted in (("handled", stats.handled), ("failed", stats.failed), ("expired", stats.expired)):
                family = CounterMetricFamily(f"micronova_messages_{name}", f"Messages {name}.", labels=["method"])
                for method, number in counted.items():
                    family.add_metric([method], number)
                yield family
            broker = stats.broker
            yield GaugeMetricFamily("micronova_bus_connected", "1 while the bus is connected.", value=broker.connected)
            yield GaugeMetricFamily(
                "micronova_bus_blocked",
                "1 while the broker accepts no messages from this process (short of memory or disk space).",
                value=broker.blocked,
            )
            yield GaugeMetricFamily(
                "micronova_bus_pending_calls", "Calls that wait for their answers.", value=stats.pending_calls
            )
            yield GaugeMetricFamily(
                "micronova_dead_letters", "Messages that no handler could process.", value=broker.dead_letters
            )


def render(databases: Mapping[str, MeasuredDatabase], bus: MeasuredBus | None, metrics: Metrics | None = None) -> bytes:
    """Return all metrics of this process in the text format of Prometheus; databases by their service."""
    from prometheus_client import REGISTRY, generate_latest
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_SharedMetrics(databases, bus))
    if metrics is not None:
        registry.register(metrics)
    return generate_latest(REGISTRY) + generate_latest(registry)


def _tasks() -> int:
    """Return the number of tasks of the event loop, 0 if none runs in this thread."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
