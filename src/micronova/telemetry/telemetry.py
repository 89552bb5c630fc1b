"""All telemetry of one process: what the composition root makes and hands to the roles."""

import asyncio
from typing import TYPE_CHECKING

from micronova.conf.settings import Settings
from micronova.objects.clock import Clock
from micronova.rpc.bus import Bus
from micronova.telemetry.metrics import Metrics
from micronova.telemetry.operations import OperationObserver
from micronova.telemetry.requests import RequestObserver

if TYPE_CHECKING:
    from micronova.telemetry.tracing import Tracing


class Telemetry:
    """Metrics always; traces if they are wanted."""

    def __init__(self, clock: Clock, tracing: "Tracing | None" = None) -> None:
        self.metrics = Metrics()
        self.tracing = tracing
        self.requests = RequestObserver(self.metrics, clock, tracing)
        self.operations = OperationObserver(self.metrics, tracing)

    def bus(self, bus: Bus) -> Bus:
        """Return a bus on which traces travel; the same one if there are none."""
        if self.tracing is None:
            return bus
        from micronova.telemetry.bus import TracedBus

        return TracedBus(bus, self.tracing)

    async def close(self) -> None:
        """Send what is left of the traces."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def make_telemetry(settings: Settings, clock: Clock, host: str) -> Telemetry:
    """Make what the settings ask for; OpenTelemetry's SDK is imported only if there is a collector."""
    endpoint = settings.telemetry.otlp_endpoint
    if not endpoint:
        return Telemetry(clock)
    from micronova.telemetry.otlp import OTLPExporter
    from micronova.telemetry.tracing import Tracing

    return Telemetry(clock, Tracing(OTLPExporter(endpoint), host=host))
