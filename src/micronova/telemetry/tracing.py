"""Starts traces, or continues those of other processes. This module is imported only when tracing is on."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from micronova.telemetry import spans

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Records the spans of one process and gives them to an exporter."""

    def __init__(self, exporter: SpanExporter, *, host: str, at_once: bool = False) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "micronova", "host.name": host}), shutdown_on_exit=False
        )
        processor = SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracers: dict[str, Tracer] = {}

    @contextmanager
    def enter(self, role: str, name: str, parent: str, kind: SpanKind, **attributes: str | int) -> Iterator[Span]:
        """Record a span of a role as child of a traceparent, or as a new trace if that is empty.

        Spans of the code within are its children. The role is the span's instrumentation scope, so roles that share a
        process differ in the trace.
        """
        tracer = self._tracers.get(role)
        if tracer is None:
            tracer = self._tracers[role] = self._provider.get_tracer(f"micronova.{role}")
        # A new context: the span must not become a child of whatever span is current here.
        context = _propagator.extract({"traceparent": parent}, Context()) if parent else Context()
        token = spans.tracer.set(tracer)
        try:
            with tracer.start_as_current_span(name, context=context, kind=kind, attributes=attributes) as span:
                yield span
        finally:
            spans.tracer.reset(token)

    def close(self) -> None:
        """Export the remaining spans. This blocks, so do not call it in the event loop's thread."""
        self._provider.shutdown()


def nearest_parent(parent: str) -> str:
    """Return the current span's traceparent if it belongs to the same trace as the given one, else the given one."""
    current = get_current_span().get_span_context()
    return spans.traceparent() if current.is_valid and f"{current.trace_id:032x}" == parent[3:35] else parent
