"""Spans: the steps of a request that is being traced. Any room may mark its steps with `span`.

A trace begins with an HTTP request and goes on with each message and each operation that carries its id; only those
entrances (`telemetry.tracing`) know the tracer. Whoever works within finds it here, or finds that there is none:
then a step costs next to nothing, and OpenTelemetry is not even imported.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

tracer: ContextVar[Any] = ContextVar("tracer", default=None)

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str, **attributes: str | int | float) -> AbstractContextManager[Any]:
    """Mark a step of what is being traced, if it is."""
    active = tracer.get()
    if active is None:
        return _NOTHING
    traced: AbstractContextManager[Any] = active.start_as_current_span(name, attributes=attributes)
    return traced


def traceparent() -> str:
    """Return the step of now in the form in which it travels (W3C trace context); empty if nothing is traced."""
    if tracer.get() is None:
        return ""
    from opentelemetry.trace import get_current_span

    found = get_current_span().get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else ""
