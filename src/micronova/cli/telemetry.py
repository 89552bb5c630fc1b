"""The telemetry of one process: metrics, and traces if the settings name a collector."""

import asyncio
from typing import TYPE_CHECKING

from micronova.conductor.operations.observer import OperationObserver
from micronova.conf.settings import Settings
from micronova.http.observer import RequestObserver
from micronova.objects.clock import Clock
from micronova.rpc.bus import Bus
from micronova.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from micronova.telemetry.tracing import Tracing


class Telemetry:
    """The metrics, traces and observers that the roles of a process use."""

    def __init__(self, clock: Clock, tracing: "Tracing | None" = None) -> None:
        self.metrics = Metrics()
        self.tracing = tracing
        self.requests = RequestObserver(self.metrics, clock, tracing)
        self.operations = OperationObserver(self.metrics, tracing)

    def bus(self, bus: Bus) -> Bus:
        """Return a bus that carries trace context in its messages; without tracing, the bus itself."""
        if self.tracing is None:
            return bus
        from micronova.rpc.traced import TracedBus

        return TracedBus(bus, self.tracing)

    async def close(self) -> None:
        """Send the remaining traces."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def make_telemetry(settings: Settings, clock: Clock, host: str) -> Telemetry:
    """Return the telemetry that the settings ask for; OpenTelemetry's SDK is imported only if there is a collector."""
    endpoint = settings.telemetry.otlp_endpoint
    if not endpoint:
        return Telemetry(clock)
    from micronova.telemetry.otlp import OTLPExporter
    from micronova.telemetry.tracing import Tracing

    return Telemetry(clock, Tracing(OTLPExporter(endpoint), host=host))
