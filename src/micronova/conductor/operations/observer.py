"""Observes operations: sets the request id for logs, counts and times each operation, records a span."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from micronova.telemetry.logs import request_id
from micronova.telemetry.metrics import Metrics
from micronova.telemetry.spans import tracer

if TYPE_CHECKING:
    from micronova.conductor.operations.engine import Operation
    from micronova.telemetry.tracing import Tracing


class OperationObserver:
    """Called by a conductor's engine when it runs an operation and when an operation ends."""

    def __init__(self, metrics: Metrics, tracing: "Tracing | None" = None) -> None:
        self._metrics = metrics
        self._tracing = tracing

    @contextmanager
    def running(self, operation: "Operation") -> Iterator[None]:
        """Run the code within as part of the request and the trace that started the operation."""
        token = request_id.set(operation.context.request_id)
        try:
            parent = operation.context.traceparent
            if self._tracing is None:
                yield
                return
            if not parent:  # then it must not join the trace of the message that made this conductor take it up
                untraced = tracer.set(None)
                try:
                    yield
                finally:
                    tracer.reset(untraced)
                return
            from opentelemetry.trace import SpanKind

            from micronova.telemetry.tracing import nearest_parent

            with self._tracing.enter(
                "conductor",
                f"operation {operation.kind}",
                nearest_parent(parent),
                SpanKind.INTERNAL,
                instance=operation.instance_uuid,
                step=operation.step,
                leases=operation.leases,
            ):
                yield
        finally:
            request_id.reset(token)

    def ended(self, kind: str, result: str, seconds: float) -> None:
        """Count an operation that has ended."""
        self._metrics.operation(kind, result, seconds)

    def retried(self, kind: str) -> None:
        """Count that an operation is tried again."""
        self._metrics.retry(kind)
