"""Telemetry of HTTP requests: the request id in log lines, metrics, and a span."""

from contextlib import AbstractContextManager
from contextvars import Token
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from micronova.http.request import Request
from micronova.objects.clock import Clock
from micronova.telemetry.logs import request_id
from micronova.telemetry.metrics import Metrics
from micronova.telemetry.spans import traceparent

if TYPE_CHECKING:
    from micronova.telemetry.tracing import Tracing


class _Begun(NamedTuple):
    at: float
    request_id: Token[str]
    within: AbstractContextManager[Any] | None
    span: Any


class RequestObserver:
    """Observes the requests of all HTTP services of a process."""

    def __init__(self, metrics: Metrics, clock: Clock, tracing: "Tracing | None" = None) -> None:
        self._metrics = metrics
        self._now = clock.monotonic
        self._tracing = tracing

    def begin(self, request: Request) -> _Begun:
        """Begin a request: log lines of this task have its id from now on."""
        token = request_id.set(request.context.request_id)
        within = span = None
        if self._tracing is not None:
            from opentelemetry.trace import SpanKind

            method = request.falcon.method
            # The span gets its name at the end, when the route is known.
            within = self._tracing.enter("api", method, request.context.traceparent, SpanKind.SERVER)
            span = within.__enter__()
            # What is stored and sent for this request belongs to this span.
            request.context = msgspec.structs.replace(request.context, traceparent=traceparent())
        return _Begun(self._now(), token, within, span)

    def end(self, begun: _Begun, request: Request, status: int) -> None:
        """End a request; a request of the same process that made this one becomes the current one again."""
        route = getattr(request, "route", None)
        path = request.falcon.uri_template or "unknown path"
        label: str = route.label if route is not None else f"{request.falcon.method} {path}"
        service = request.service.name
        self._metrics.request(service, label, status, self._now() - begun.at)
        if begun.within is not None:
            begun.span.update_name(f"{service} {label}")
            begun.span.set_attribute("http.response.status_code", status)
            begun.span.set_attribute("micronova.request_id", request.context.request_id)
            begun.within.__exit__(None, None, None)
        request_id.reset(begun.request_id)
