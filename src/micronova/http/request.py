"""The request that a handler gets, and the response that it may return."""

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import falcon.asgi
import msgspec

from micronova.objects.context import RequestContext
from micronova.objects.errors import Forbidden

if TYPE_CHECKING:
    from micronova.http.service import Route, Service

T = TypeVar("T")


class Response(msgspec.Struct, kw_only=True):
    """A response with more than a body and the route's usual status."""

    body: Any = None  # encoded as JSON unless it is bytes
    status: int | None = None
    headers: dict[str, str] = {}
    content_type: str | None = None
    stream: AsyncIterator[bytes] | None = None  # for downloads


class Request:
    """One request; the pipeline fills it step by step."""

    __slots__ = (
        "authorized",
        "body",
        "context",
        "falcon",
        "is_v2",
        "minor",
        "params",
        "query",
        "raw_query",
        "refusal",
        "route",
        "service",
    )

    def __init__(self, service: "Service", http: falcon.asgi.Request, params: dict[str, str]) -> None:
        self.service = service
        self.falcon = http
        self.params = params  # from the path
        self.context = RequestContext(request_id="")
        self.minor = 0
        self.is_v2 = False  # the request came to /v2: no microversions, and unknown fields are ignored
        self.authorized = False
        self.route: Route
        self.body: Any = None  # the route's body struct, validated
        self.query: Any = None  # the route's query struct, validated
        self.raw_query: Mapping[str, list[str]] = {}
        self.refusal = ""  # why it is refused, for the log

    def header(self, name: str) -> str | None:
        """Return a request header."""
        return self.falcon.get_header(name)

    @property
    def media_type(self) -> str:
        """The type of the body as the header Content-Type names it, without parameters; "" without that header."""
        return (self.falcon.content_type or "").partition(";")[0].strip().lower()

    @property
    def rule(self) -> str:
        """The policy rule of the route, which has one."""
        if not self.route.policy:
            raise AssertionError(f"{self.route.label} has no policy rule")
        return self.route.policy

    def authorize(self, target: Mapping[str, Any] | None = None, rule: str | None = None) -> None:
        """Raise Forbidden unless policy allows the caller this on the target, by default on its own project."""
        self.service.policy.enforce(rule or self.rule, self.context, target)
        self.authorized = True

    def authorize_host(self, host: str) -> None:
        """Allow a host with a ticket to act for itself; check policy for all other callers."""
        if not self.context.host:
            self.authorize()
        elif self.context.host != host:
            raise Forbidden(f"This is the ticket of host {self.context.host}: it is not valid for host {host[:255]}.")
        self.authorized = True

    def allows(self, target: Mapping[str, Any] | None = None, rule: str | None = None) -> bool:
        """Return whether policy allows the caller this on the target, by default on its own project."""
        return self.service.policy.allows(rule or self.rule, self.context, target)

    @property
    def base_url(self) -> str:
        """The service's URL as the caller sees it, without a trailing slash."""
        return self.service.base_url(self.falcon)
