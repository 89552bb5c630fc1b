"""The entrances of traces: where one begins, or comes in from another process. Imported only when tracing is on."""

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
    """Makes spans for one process and hands them to an exporter."""

    def __init__(self, exporter: SpanExporter, *, host: str, at_once: bool = False) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "micronova", "host.name": host}), shutdown_on_exit=False
        )
        processor = SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracers: dict[str, Tracer] = {}

    @contextmanager
    def entrance(self, role: str, name: str, parent: str, kind: SpanKind, **attributes: str | int) -> Iterator[Span]:
        """Make a span of a role below one that came from elsewhere, or a new trace; what happens within belongs to it.

        The role is the span's instrumentation scope, so that roles can be told apart in one process as well.
        """
        tracer = self._tracers.get(role)
        if tracer is None:
            tracer = self._tracers[role] = self._provider.get_tracer(f"micronova.{role}")
        # Never below whatever happens to be going on here: a new context, with the remote parent if there is one.
        context = _propagator.extract({"traceparent": parent}, Context()) if parent else Context()
        token = spans.tracer.set(tracer)
        try:
            with tracer.start_as_current_span(name, context=context, kind=kind, attributes=attributes) as span:
                yield span
        finally:
            spans.tracer.reset(token)

    def close(self) -> None:
        """Export what is left. This may take a moment: not for the event loop's thread."""
        self._provider.shutdown()


def goes_on_here(parent: str) -> str:
    """Return the span of now if it belongs to the same trace, else the one given: the nearer of two parents."""
    here = get_current_span().get_span_context()
    return spans.traceparent() if here.is_valid and f"{here.trace_id:032x}" == parent[3:35] else parent
