"""A request as handlers see it, and what they may answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import falcon.asgi
import msgspec

from micronova.http.context import RequestContext
from micronova.objects.errors import Forbidden

if TYPE_CHECKING:
    from micronova.http.service import Route, Service

T = TypeVar("T")


class Response(msgspec.Struct, kw_only=True):
    """An answer that is more than a body with the route's usual status."""

    body: Any = None  # encoded as JSON unless it is bytes
    status: int | None = None
    headers: dict[str, str] = {}
    content_type: str | None = None
    stream: Any = None  # an async iterator of bytes, for downloads


class Request:
    """One request on its way through the pipeline."""

    __slots__ = (
        "authorized",
        "body",
        "context",
        "falcon",
        "minor",
        "params",
        "query",
        "raw_query",
        "relaxed",
        "route",
        "service",
    )

    def __init__(self, service: "Service", request: falcon.asgi.Request, params: dict[str, str]) -> None:
        self.service = service
        self.falcon = request
        self.params = params  # from the path
        self.context = RequestContext(request_id="")
        self.minor = 0
        self.relaxed = False
        self.authorized = False
        self.route: Route
        self.body: Any = None  # the route's body struct, validated
        self.query: Any = None  # the route's query struct, validated
        self.raw_query: Mapping[str, list[str]] = {}

    def header(self, name: str) -> str | None:
        """Return a request header."""
        return self.falcon.get_header(name)

    def authorize(self, target: Mapping[str, Any] | None = None, rule: str | None = None) -> None:
        """Refuse (403) unless policy lets the caller do this to the target; without one, to its own project."""
        self.service.policy.enforce(rule or self.route.policy or "", self.context, target)
        self.authorized = True

    def authorize_host(self, host: str) -> None:
        """Let a host, known by its ticket, act for itself; of everybody else policy is asked."""
        if not self.context.host:
            self.authorize()
        elif self.context.host != host:
            raise Forbidden(f"This is the ticket of host {self.context.host}: it is not good for host {host[:255]}.")
        self.authorized = True

    def allows(self, rule: str, target: Mapping[str, Any] | None = None) -> bool:
        """Say whether policy would let the caller do this."""
        return self.service.policy.allows(rule, self.context, target)

    @property
    def base_url(self) -> str:
        """The service's URL as the caller sees it, without a trailing slash: what links begin with."""
        return self.service.base_url(self.falcon)
