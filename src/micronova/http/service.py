"""An HTTP service made from declarations: routes as data in, an ASGI application out.

Each of our OpenStack services is a list of `Route`s. Routing, microversion negotiation, validation, policy, error
bodies and the isolation tests follow from the list. `Service.handle` and `Service._run` are the
pipeline of a request.
"""

import asyncio
import logging
import secrets
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import falcon
import falcon.asgi
import msgspec

from micronova.http import access_rules, validation
from micronova.http.faults import FaultBody, html_fault, message_of, prefers_html, status_of
from micronova.http.request import Request, Response
from micronova.http.versions import Range, Versions
from micronova.objects.context import RequestContext
from micronova.objects.errors import (
    Forbidden,
    Invalid,
    MethodNotAllowed,
    MicronovaError,
    NotFound,
    RequestTimeout,
    TooLarge,
    Unauthorized,
    UnsupportedMediaType,
    resource_exhausted,
)
from micronova.objects.ids import UUID
from micronova.telemetry.logs import server_id

log = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[Any]]

SERVICE_ROLE: Final = "service"  # of the users that services of the cloud have
AUTHENTICATED: Final = ""  # instead of a policy rule: everybody with a valid token


@dataclass(frozen=True, kw_only=True)
class Route:
    """The declaration of one route: a method, a path, and for actions the key of the body."""

    method: str
    path: str  # below the service's version prefix, e.g. /servers/{id}
    handler: Handler  # async def handler(request, **path parameters) -> body | Response
    policy: str | None  # the rule's name, or AUTHENTICATED; None if no token is needed (version documents, log-in)
    status: int = 200
    versions: Range = Range()
    body: Any = None  # the type of the request's body
    query: Any = None  # the type of the query string
    strict_query: Range | None = None  # versions at which unknown query parameters are refused
    action: str | None = None  # the body's only key, where several actions share one path
    checks_policy: bool = False  # the handler authorises, after it has loaded what the request is about
    raw_body: bool = False  # the handler reads the stream itself (uploads)
    takes_ticket: bool = False  # a signed ?ticket= may replace the token; the handler verifies it
    about_own_token: bool = False  # open to a token with access rules, if X-Subject-Token is that token
    for_hosts: bool = False  # a compute host's ticket may replace the token; the handler calls `authorize_host`
    name: str = ""  # a stable name for metrics and documents; "" = method and path
    same_as: str = ""  # the label of the route that this is under an old path: what changes that one changes this one
    # The answer's body, for the OpenAPI document (api/openapi.py says how it is written); None: there is none.
    answer: Any = field(default=None, compare=False)
    also: Mapping[int, Any] = field(default_factory=dict, compare=False)  # further statuses of success, with bodies
    errors: tuple[int, ...] = ()  # statuses of errors besides the usual ones
    has_location: bool = False  # an answer with 201 or 202 has the header Location

    def __post_init__(self) -> None:
        if self.checks_policy and self.policy is None:
            raise ValueError(f"{self.label} needs no token: its handler cannot check policy")

    @property
    def label(self) -> str:
        """The route's name in logs, metrics and tests."""
        return self.name or f"{self.method} {self.path}" + (f" {self.action}" if self.action else "")


class Policy(Protocol):
    """Decides who may do what."""

    def is_admin(self, context: RequestContext) -> bool:
        """Return whether the caller is an administrator."""

    def enforce(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None) -> None:
        """Raise Forbidden unless the caller may."""

    def allows(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None) -> bool:
        """Return whether the caller may."""

    def check_scope(self, rule: str, context: RequestContext) -> None:
        """Raise Forbidden if the rule takes no tokens with the scope of the caller's."""


class Authenticator(Protocol):
    """Turns a token into a caller."""

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Return the context with the caller filled in; raise Unauthorized."""


class Observer(Protocol):
    """Telemetry's view of requests: one span and some metrics each."""

    def begin(self, request: Request) -> Any: ...

    def end(self, token: Any, request: Request, status: int) -> None: ...


class Service:
    """Routes and what they have in common; `app` is the ASGI application."""

    def __init__(
        self,
        name: str,
        routes: Sequence[Route],
        *,
        policy: Policy,
        authenticator: Authenticator,
        fault_body: FaultBody,
        html_errors: bool = False,  # for clients that do not ask for JSON
        prefix: str = "",  # the version prefix, e.g. /v2.1
        versions: Versions | None = None,
        mount: str = "",  # where the service is mounted, e.g. /compute; part of links
        public_url: str | None = None,  # scheme://host:port as clients see it; default: what they sent
        max_body: int = 114_688,
        body_timeout: float = 30.0,
        observer: Observer | None = None,
        request_id_headers: Sequence[str] = ("x-openstack-request-id",),
        vendor_type: str | None = None,  # another name of application/json, in requests and answers
        media_types: Sequence[str] = (),  # of bodies that are JSON, besides the usual ones
        ignores_slash: bool = True,  # a path with a slash at its end means the same as without
        knows_methods: bool = False,  # a known path answers 405 to other methods, OPTIONS too
        checks_policy_first: bool = False,  # before the input, where the handler does not check it
        types: Sequence[str] = (),  # of the service in a catalog, for access rules; default: its name
    ) -> None:
        self.name = name
        self.routes = list(routes)
        self.policy = policy
        self.authenticator = authenticator
        self.fault_body = fault_body
        self.html_errors = html_errors
        self.prefix = prefix
        self.versions = versions
        self.mount = mount
        self.public_url = public_url
        self.max_body = max_body
        self.body_timeout = body_timeout
        self.observer = observer
        self.request_id_headers = request_id_headers
        self.vendor_type = vendor_type
        self._media_types = {*_MEDIA_TYPES, *media_types, *([vendor_type] if vendor_type else [])}
        self.knows_methods = knows_methods
        self.checks_policy_first = checks_policy_first
        self.types = tuple(types) or (name,)
        self.app = falcon.asgi.App(media_type="application/json")
        # To Nova a path with a slash at its end is another path, which it does not have.
        self.app.req_options.strip_url_path_trailing_slash = ignores_slash and versions is None
        self.app.resp_options.default_media_type = "application/json"
        self.app.add_error_handler(Exception, self._unrouted)
        self.app.add_error_handler(falcon.HTTPError, self._unrouted)
        self.app.add_sink(self._no_route, "/")
        for path in dict.fromkeys(route.path for route in self.routes):
            self.app.add_route(prefix + path or "/", _Resource(self, [r for r in self.routes if r.path == path]))

    async def handle(
        self, routes: Sequence[Route], http: falcon.asgi.Request, answer: falcon.asgi.Response, params: dict[str, str]
    ) -> None:
        """Answer a request: request id, microversion, authentication, route, input, policy, handler, faults.

        `routes` are those of the path and the method; there are none for an unknown path.
        """
        request = Request(self, http, params)
        request_id = f"req-{_request_uuid()}"
        for name in self.request_id_headers:
            answer.set_header(name, request_id)
        request.context = RequestContext(
            request_id=request_id,
            remote_address=http.remote_addr,
            traceparent=_traceparent(http),
        )
        seen = self.observer.begin(request) if self.observer else None
        about = server_id.set(_server_in(routes, params))
        try:
            request.is_v2 = http.scope.get("micronova.is_v2", False)
            if self.versions is not None:
                self._negotiate(request, http, answer)
            ticket = bool(routes) and routes[0].takes_ticket and http.get_param("ticket") is not None
            if not ticket and (not routes or any(route.policy is not None for route in routes)):
                caller = await self.authenticator.authenticate(http.get_header("x-auth-token"), request.context)
                request.context = (
                    msgspec.structs.replace(caller, is_admin=True) if self.policy.is_admin(caller) else caller
                )
                await self._check_access_rules(routes, request, http)
                self._check_project(request, http)
                if request.context.host and not all(route.for_hosts for route in routes):
                    raise Forbidden("A host's ticket is not valid for this request.")
            await self._run(routes, request, http, answer)
        except Exception as error:
            self._fault(request, answer, resource_exhausted(error) or error)
        finally:
            if self.observer:
                self.observer.end(seen, request, answer.status_code)
            server_id.reset(about)

    def _negotiate(self, request: Request, http: falcon.asgi.Request, answer: falcon.asgi.Response) -> None:
        versions = self.versions
        assert versions is not None
        if request.is_v2:  # /v2: no microversions
            request.minor = versions.least
            return
        legacy = http.get_header(versions.legacy_header) if versions.legacy_header else None
        request.minor = versions.negotiate(http.get_header("openstack-api-version"), legacy)
        text = versions.text(request.minor)
        answer.set_header("openstack-api-version", f"{versions.service} {text}")
        vary = "OpenStack-API-Version"
        if versions.legacy_header:
            answer.set_header(versions.legacy_header, text)
            vary += f", {versions.legacy_header}"
        answer.set_header("vary", vary)

    async def _check_access_rules(self, routes: Sequence[Route], request: Request, http: falcon.asgi.Request) -> None:
        """Raise Unauthorized if the token has access rules, and none of them allows the request.

        What a service asks for while it handles a user's request does not have to be allowed: such requests carry the
        token of a service user, too.
        """
        caller = request.context
        if caller.access_rules is None:
            return
        path = http.scope.get("micronova.path", http.path)
        if any(access_rules.allow(caller.access_rules, kind, self.mount, http.method, path) for kind in self.types):
            return
        if routes and routes[0].about_own_token and http.get_header("x-subject-token") == caller.token:
            return
        if await self.is_from_service(request):
            return
        raise Unauthorized("The access rules of the application credential do not allow this request.")

    async def is_from_service(self, request: Request) -> bool:
        """Return whether a request carries the token of a service user beside that of its caller."""
        token = request.header("x-service-token")
        if not token:
            return False
        service = await self.authenticator.authenticate(token, RequestContext(request_id=request.context.request_id))
        return SERVICE_ROLE in service.roles and service.access_rules is None

    def _check_project(self, request: Request, http: falcon.asgi.Request) -> None:
        named = http.scope.get("micronova.project")
        if named and named != request.context.project_id:
            raise Invalid(f"Malformed request url: the project in the path ({named}) is not the token's project.")

    async def _run(
        self, routes: Sequence[Route], request: Request, http: falcon.asgi.Request, answer: falcon.asgi.Response
    ) -> None:
        if not routes and (allowed := getattr(http.context, "methods", None)):
            answer.set_header("allow", ", ".join(allowed))
            raise MethodNotAllowed(f"The method {http.method[:16]} is not allowed for this resource.")
        candidates = [r for r in routes if r.versions.since <= request.minor <= r.versions.until]
        if not candidates or any(not value or "\x00" in value for value in request.params.values()):
            raise NotFound("The resource could not be found.")
        route = candidates[0]
        raw = b""
        if not route.raw_body and http.method in ("POST", "PUT", "PATCH"):
            raw = await self._read(http)
        if route.action is not None:
            route = self._choose_action(routes, candidates, raw)
        request.route = route
        request.raw_query = parse_query(http)
        if self.checks_policy_first:
            self._check_policy(request)
        if route.query is not None:
            request.query = self.decode_query(request)
        if route.body is not None:
            request.body = self.decode_body(request, raw)
        if not self.checks_policy_first:
            self._check_policy(request)
        result = await route.handler(request, **request.params)
        if not request.authorized:
            raise AssertionError(f"The handler of {route.label} did not check policy")
        self._answer(route, http, answer, result)

    def _check_policy(self, request: Request) -> None:
        """Raise Forbidden unless the caller may; a handler that checks policy itself does it later."""
        route = request.route
        if route.policy is None or route.policy == AUTHENTICATED:
            request.authorized = True
            return
        self.policy.check_scope(route.policy, request.context)
        if not route.checks_policy:
            request.authorize()

    def decode_query(self, request: Request) -> Any:
        """Return the query string as its route declares it; raise Invalid."""
        route = request.route
        strict = route.strict_query is not None and request.minor in route.strict_query
        return validation.query(request.raw_query, route.query, strict, request.minor)

    def decode_body(self, request: Request, raw: bytes) -> Any:
        """Return the body as its route declares it; raise Invalid."""
        if raw:
            self._check_media_type(request)
        return validation.body(raw, request.route.body, request.minor, request.is_v2)

    def _choose_action(self, all_versions: Sequence[Route], routes: Sequence[Route], raw: bytes) -> Route:
        try:
            body = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]) if raw else {}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Invalid(validation.malformed(error)) from None
        if len(body) != 1:
            raise Invalid("The body must have exactly one key: the name of the action.")
        [key] = body
        for route in routes:
            if route.action == key:
                return route
        if any(route.action == key for route in all_versions):
            raise NotFound(f"There is no action {key[:64]} at this version.")
        known = ", ".join(sorted(r.action for r in routes if r.action))
        raise Invalid(f"There is no such action: {key[:64]}. At this version there are: {known}.")

    def _check_media_type(self, request: Request) -> None:
        if request.falcon.content_type and request.media_type not in self._media_types:
            raise UnsupportedMediaType(f"Unsupported Content-Type {request.media_type[:64]}: use application/json.")

    async def _read(self, http: falcon.asgi.Request) -> bytes:
        length = http.content_length
        if length is not None and length > self.max_body:
            raise TooLarge(f"Request is too large: a body may have {self.max_body} bytes.")
        if length == 0:
            return b""
        try:
            async with asyncio.timeout(self.body_timeout):
                data = (
                    await http.bounded_stream.read(self.max_body + 1)
                    if length is not None
                    else (await http.stream.read(self.max_body + 1))
                )
        except TimeoutError:
            raise RequestTimeout(f"The body did not arrive within {self.body_timeout:g} seconds.") from None
        if len(data) > self.max_body:
            raise TooLarge(f"Request is too large: a body may have {self.max_body} bytes.")
        return bytes(data)

    def _answer(self, route: Route, http: falcon.asgi.Request, answer: falcon.asgi.Response, result: Any) -> None:
        answer.status = _STATUS_LINES.get(route.status) or route.status
        if isinstance(result, Response):
            if result.status is not None:
                answer.status = result.status
            for key, value in result.headers.items():
                answer.set_header(key, value)
            if result.content_type:
                answer.content_type = result.content_type
            if result.stream is not None:
                answer.stream = result.stream
                return
            result = result.body
        if result is None:
            return
        if self.vendor_type and self.vendor_type in http.accept:
            answer.content_type = http.client_prefers(("application/json", self.vendor_type)) or "application/json"
        answer.data = result if isinstance(result, bytes) else _encode(result)

    def _fault(self, request: Request, answer: falcon.asgi.Response, error: Exception) -> None:
        status = status_of(error)
        request.refusal = message_of(error)
        cause = error if status == 500 else error.__cause__ if status == 503 else None
        if cause is not None:
            log.error(
                "%s %s failed (%s)",
                request.falcon.method,
                request.falcon.path,
                request.context.request_id,
                exc_info=cause,
            )
        if status == 408:
            answer.set_header("connection", "close")  # the client may still be sending the body
        if isinstance(error, Unauthorized):
            answer.set_header("www-authenticate", f'Keystone uri="{self.identity_url(request.falcon)}"')
        if isinstance(error, TooLarge) and "retry_after" in error.details:
            answer.set_header("retry-after", str(error.details["retry_after"]))
        self._write_fault(request.falcon, answer, status, self.fault_of(request, status, error), error)

    def fault_of(self, request: Request, status: int, error: BaseException) -> dict[str, Any]:
        """Return the body of an error of a request; a service whose body depends on the version overrides it."""
        return self.fault_body(status, message_of(error), error)

    async def _no_route(
        self, req: falcon.asgi.Request, resp: falcon.asgi.Response | None, **_: Any
    ) -> None:  # Falcon's names
        raise falcon.HTTPNotFound

    async def _unrouted(
        self, http: falcon.asgi.Request, answer: falcon.asgi.Response, error: Any, params: dict[str, str]
    ) -> None:
        """Answer a request that reached no route: unknown path, wrong method, broken encoding.

        A service with microversions answers an unknown path as Nova does: only to callers with a token, 404 for an
        unknown method as well, unless it `knows_methods`.
        """
        if self.versions is not None and isinstance(error, _NO_ROUTE):
            if self.knows_methods and isinstance(error, falcon.HTTPMethodNotAllowed):
                http.context.methods = self._methods_of(http.uri_template)
            await self.handle((), http, answer, {})
            return
        if "x-openstack-request-id" not in answer.headers:
            answer.set_header("x-openstack-request-id", f"req-{_request_uuid()}")
        if isinstance(error, falcon.HTTPMethodNotAllowed):
            answer.set_headers(error.headers or {})  # `Allow`
            error = MethodNotAllowed(f"The resource does not take {http.method[:16]}.")
        elif isinstance(error, falcon.HTTPNotFound):
            error = NotFound("The resource could not be found.")
        elif isinstance(error, falcon.HTTPError):
            wrong = error.description or error.title or "Bad request"
            error = MicronovaError(wrong) if int(error.status_code) == 500 else Invalid(wrong)
        elif not isinstance(error, MicronovaError):
            log.error("%s %s failed", http.method, http.path, exc_info=error)
        status = status_of(error)
        self._write_fault(http, answer, status, self.fault_body(status, message_of(error), error), error)

    def _write_fault(
        self,
        http: falcon.asgi.Request,
        answer: falcon.asgi.Response,
        status: int,
        body: dict[str, Any],
        error: BaseException,
    ) -> None:
        answer.status = status
        answer.stream = None
        if self.html_errors and prefers_html(http.get_header("accept")):
            answer.content_type = "text/html; charset=UTF-8"
            answer.data = html_fault(status, message_of(error))
            return
        answer.content_type = "application/json"
        answer.data = _encode(body)

    def _methods_of(self, template: str | None) -> list[str]:
        return list(dict.fromkeys(each.method for each in self.routes if (self.prefix + each.path or "/") == template))

    def base_url(self, http: falcon.asgi.Request) -> str:
        """Return the URL of this service as the caller sees it, version prefix included."""
        if self.public_url:
            return f"{self.public_url}{self.mount}{self.prefix}"
        return f"{http.scheme}://{http.get_header('host') or 'localhost'}{self.mount}{self.prefix}"

    def identity_url(self, http: falcon.asgi.Request) -> str:
        """Return where to get a token, for the WWW-Authenticate header."""
        base = self.base_url(http)
        return base[: len(base) - len(self.mount + self.prefix)] + "/identity"


_STATUS_LINES = {
    code: f"{code} {falcon.util.code_to_http_status(code).partition(' ')[2]}" for code in (200, 201, 202, 204, 300)
}
_NO_ROUTE = (falcon.HTTPNotFound, falcon.HTTPMethodNotAllowed)
_MEDIA_TYPES = ("application/json", "text/plain")
_encode = msgspec.json.Encoder(enc_hook=str).encode


def _server_in(routes: Sequence[Route], params: Mapping[str, str]) -> str:
    """Return the id of the server that the path of a request names, for lines of the log; "" if it names none."""
    if not routes or not routes[0].path.startswith("/servers/{"):
        return ""
    named = next(iter(params.values()), "")
    return named if UUID.fullmatch(named) else ""


def _traceparent(http: falcon.asgi.Request) -> str:
    """Return the caller's span (W3C trace context) if it has the right length; it is stored and sent on."""
    given = http.get_header("traceparent") or ""
    return given if len(given) == 55 else ""


_random_bytes = b""


def _request_uuid() -> str:
    """Return a random uuid from a buffer of random bytes, because a system call per request costs thread switches."""
    global _random_bytes
    if len(_random_bytes) < 16:
        _random_bytes = secrets.token_bytes(4096)
    text, _random_bytes = _random_bytes[:16].hex(), _random_bytes[16:]
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def parse_query(http: falcon.asgi.Request) -> Mapping[str, list[str]]:
    """Return all values of each name in the query string, empty ones too."""
    text = http.query_string
    if not text:
        return {}
    if "%00" in text or "\x00" in text:
        raise Invalid("The query string is not valid: it must not have the character U+0000.")
    try:
        return urllib.parse.parse_qs(
            text, keep_blank_values=True, strict_parsing=False, errors="strict", max_num_fields=1000
        )
    except (ValueError, UnicodeDecodeError):
        raise Invalid("The query string is not valid: it must be UTF-8 with at most 1000 parameters.") from None


class _Resource:
    """One path of a service with its methods, as Falcon wants it."""

    def __init__(self, service: Service, routes: list[Route]) -> None:
        for method in dict.fromkeys(route.method for route in routes):
            chosen = [route for route in routes if route.method == method]
            setattr(self, f"on_{method.lower()}", self._responder(service, chosen))
        if service.knows_methods:
            self.on_options = self._refuse

    @staticmethod
    async def _refuse(http: falcon.asgi.Request, answer: falcon.asgi.Response, **params: str) -> None:
        raise falcon.HTTPMethodNotAllowed([])

    @staticmethod
    def _responder(service: Service, routes: list[Route]) -> Handler:
        async def respond(http: falcon.asgi.Request, answer: falcon.asgi.Response, **params: str) -> None:
            await service.handle(routes, http, answer, params)

        return respond
