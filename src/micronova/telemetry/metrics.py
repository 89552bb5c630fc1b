"""Metrics in the form that Prometheus reads.

Counting is plain arithmetic on dictionaries of the event loop's thread, a microsecond each; everything else is done
when somebody asks, and Prometheus' library is not even imported before.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LONG_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SHORT_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)


class Histogram:
    """How often something took how long."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def add_to(self, family: "HistogramMetricFamily", labels: list[str]) -> None:
        """Give it to Prometheus: each bucket has all that are smaller, too."""
        buckets, sum_ = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            sum_ += count
            buckets.append((bound, sum_))
        family.add_metric(labels, buckets, self.total)


class Metrics:
    """What one process counts."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}
        self.latencies: dict[tuple[str, str], Histogram] = {}
        self.operations: dict[tuple[str, str], Histogram] = {}
        self.decisions = Histogram(SHORT_BUCKETS)
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._counters: list[tuple[str, str, str, Callable[[], Mapping[str, int]]]] = []

    def request(self, service: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request."""
        answered = (service, route, status)
        self.requests[answered] = self.requests.get(answered, 0) + 1
        latency = self.latencies.get((service, route))
        if latency is None:
            latency = self.latencies[service, route] = Histogram(BUCKETS)
        latency.add(seconds)

    def operation(self, kind: str, result: str, seconds: float) -> None:
        """Count an operation that is over, and how long it took from the moment it was accepted."""
        times = self.operations.get((kind, result))
        if times is None:
            times = self.operations[kind, result] = Histogram(LONG_BUCKETS)
        times.add(seconds)

    def decision(self, seconds: float) -> None:
        """Count a decision of the scheduler, which does not include the claim."""
        self.decisions.add(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show a number that is read when somebody asks."""
        self._gauges.append((name, text, read))

    def counter(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Show numbers that somebody else counts, by label."""
        self._counters.append((name, text, label, read))

    def collect(self) -> Iterator[Any]:
        """Yield what Prometheus shows."""
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
        decisions = HistogramMetricFamily("micronova_scheduler_decision_seconds", "Time to choose hosts.", labels=[])
        self.decisions.add_to(decisions, [])
        yield decisions
        for name, text, read in self._gauges:
            yield GaugeMetricFamily(name, text, value=read())
        for name, text, label, count in self._counters:
            family = CounterMetricFamily(name, text, labels=[label])
            for value, number in count().items():
                family.add_metric([value], number)
            yield family


class _Now:
    """What is read off at the moment of asking: the database's and the bus's own counters."""

    def __init__(self, database: Any, bus: Any) -> None:
        self._database, self._bus = database, bus

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._database is not None:
            statistics = self._database.statistics
            yield CounterMetricFamily("micronova_db_writes", "Write transactions.", value=statistics.writes)
            yield CounterMetricFamily("micronova_db_reads", "Read transactions.", value=statistics.reads)
            yield CounterMetricFamily("micronova_db_retries", "Transactions tried again.", value=statistics.retries)
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
            yield GaugeMetricFamily("micronova_bus_connected", "1 while the bus is connected.", value=stats.connected)
            yield GaugeMetricFamily("micronova_dead_letters", "Messages nobody could handle.", value=stats.dead_letters)


def render(database: Any, bus: Any, metrics: Metrics | None = None) -> bytes:
    """Return all metrics of this process."""
    from prometheus_client import REGISTRY, generate_latest
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Now(database, bus))
    if metrics is not None:
        registry.register(metrics)
    return generate_latest(REGISTRY) + generate_latest(registry)
