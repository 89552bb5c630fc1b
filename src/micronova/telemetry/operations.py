"""Telemetry's view of operations: the request they belong to, what is counted and timed, and a span."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from micronova.conductor.operations import Operation
from micronova.telemetry.logs import request_id
from micronova.telemetry.metrics import Metrics
from micronova.telemetry.spans import tracer

if TYPE_CHECKING:
    from micronova.telemetry.tracing import Tracing


class OperationObserver:
    """Given to a conductor's engine."""

    def __init__(self, metrics: Metrics, tracing: "Tracing | None" = None) -> None:
        self._metrics = metrics
        self._tracing = tracing

    @contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """A conductor works on an operation: within the trace it was asked for in, whoever worked on it before."""
        token = request_id.set(operation.context.request_id)
        try:
            parent = operation.context.traceparent
            if self._tracing is None:
                yield
                return
            if not parent:  # and not within the trace of whoever happened to take it up, either
                untraced = tracer.set(None)
                try:
                    yield
                finally:
                    tracer.reset(untraced)
                return
            from opentelemetry.trace import SpanKind

            from micronova.telemetry.tracing import goes_on_here

            with self._tracing.entrance(
                "conductor",
                f"operation {operation.kind}",
                goes_on_here(parent),
                SpanKind.INTERNAL,
                instance=operation.instance_uuid,
                step=operation.step,
                attempt=operation.attempts,
            ):
                yield
        finally:
            request_id.reset(token)

    def ended(self, kind: str, result: str, seconds: float) -> None:
        """An operation is over."""
        self._metrics.operation(kind, result, seconds)
