"""Spans within a trace: any package marks a step of its work with `span`.

A trace starts with an HTTP request and continues with each message and each operation that carries its id. There
`Tracing.enter` (telemetry/tracing.py) sets the tracer for the code that it runs. Without a tracer `span` does nothing
and OpenTelemetry is not imported.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

tracer: "ContextVar[Tracer | None]" = ContextVar("tracer", default=None)

_NO_SPAN: AbstractContextManager[object] = nullcontext()


def span(name: str, **attributes: str | int | float) -> AbstractContextManager[object]:
    """Return a context manager that records a step as a span, if the current work is traced."""
    active = tracer.get()
    if active is None:
        return _NO_SPAN
    return active.start_as_current_span(name, attributes=attributes)


def traceparent() -> str:
    """Return the current span as a W3C traceparent; empty if the current work is not traced."""
    if tracer.get() is None:
        return ""
    from opentelemetry.trace import get_current_span

    found = get_current_span().get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else ""
