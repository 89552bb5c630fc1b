"""Telemetry of HTTP requests: the request id in log lines, a line for each change, metrics, and a span."""

import logging
from contextlib import AbstractContextManager
from contextvars import Token
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from micronova.objects.clock import Clock
from micronova.telemetry.logs import request_id
from micronova.telemetry.metrics import Metrics
from micronova.telemetry.spans import traceparent

if TYPE_CHECKING:
    from micronova.http.request import Request
    from micronova.telemetry.tracing import Tracing


log = logging.getLogger(__name__)

CHANGES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
REFUSALS: Final = frozenset({401, 403, 409, 413, 429})
"""Statuses of refusals that are logged: for want of a right, because of a state, by a limit."""
MOST_ANONYMOUS: Final = 10
"""Lines in a second about refusals of callers without a token: everyone can send these, and must not fill the disk."""


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
        self._second = -1  # in which requests without a caller were counted last
        self._anonymous = 0

    def begin(self, request: "Request") -> _Begun:
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

    def end(self, begun: _Begun, request: "Request", status: int) -> None:
        """End a request; a request of the same process that made this one becomes the current one again."""
        route = getattr(request, "route", None)
        path = request.falcon.uri_template or "unknown path"
        label: str = route.label if route is not None else f"{request.falcon.method} {path}"
        service = request.service.name
        seconds = self._now() - begun.at
        self._metrics.request(service, label, status, seconds)
        if request.falcon.method in CHANGES:
            self._log_change(request, label, status, seconds)
        if begun.within is not None:
            begun.span.update_name(f"{service} {label}")
            begun.span.set_attribute("http.response.status_code", status)
            begun.span.set_attribute("micronova.request_id", request.context.request_id)
            begun.within.__exit__(None, None, None)
        request_id.reset(begun.request_id)

    def _log_change(self, request: "Request", label: str, status: int, seconds: float) -> None:
        """Log that a request that changes something is accepted, or why it is refused.

        A request that was not understood has no line here, nor has an error of ours, which `Service` logs.
        """
        if status >= 400 and status not in REFUSALS:
            return
        context = request.context
        if status >= 400 and not (context.user_id or context.host) and not self._may_log_anonymous():
            return
        route = getattr(request, "route", None)
        # Hosts report every few seconds.
        often = bool(context.host) or (route is not None and route.for_hosts)
        log.log(
            logging.DEBUG if often else logging.INFO,
            "%s: %s is %s with %d after %.0f ms; user %s, project %s%s",
            request.service.name,
            label,
            "accepted" if status < 400 else "refused",
            status,
            1000 * seconds,
            context.user_id or "none",
            context.project_id or "none",
            f": {request.refusal}" if status >= 400 else "",
        )

    def _may_log_anonymous(self) -> bool:
        """Return whether a request without a caller may have a line; say once in a second that others have none."""
        second = int(self._now())
        if second != self._second:
            self._second, self._anonymous = second, 0
        self._anonymous += 1
        if self._anonymous == MOST_ANONYMOUS + 1:
            log.warning(
                "more than %d requests without a token are refused in a second; the others have no line",
                MOST_ANONYMOUS,
            )
        return self._anonymous <= MOST_ANONYMOUS
