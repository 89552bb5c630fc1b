"""Metrics in the form that Prometheus reads."""

from typing import Any

from prometheus_client import REGISTRY, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import CollectorRegistry

REQUESTS = Counter("micronova_http_requests_total", "Requests answered.", ["service", "route", "status"])
LATENCY = Histogram(
    "micronova_http_request_seconds", "Time to answer a request.", ["service", "route"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)  # fmt: skip


class _Now:
    """What is read off at the moment of asking: the database's and the bus's own counters."""

    def __init__(self, database: Any, bus: Any) -> None:
        self._database, self._bus = database, bus

    def collect(self) -> Any:
        """Yield the metrics."""
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
            yield GaugeMetricFamily("micronova_bus_connected", "1 while the bus is connected.", value=stats.connected)
            yield GaugeMetricFamily("micronova_dead_letters", "Messages nobody could handle.", value=stats.dead_letters)


def render(database: Any, bus: Any) -> bytes:
    """Return all metrics of this process."""
    registry = CollectorRegistry()
    registry.register(_Now(database, bus))
    return generate_latest(REGISTRY) + generate_latest(registry)
