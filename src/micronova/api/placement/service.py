"""The Placement API as an HTTP service: where it differs from the others in headers, checks and error bodies."""

import html
from email.utils import formatdate
from typing import Any, Final

import falcon.asgi
import msgspec

from micronova.api.placement import json_schema
from micronova.http.faults import TITLES, message_of
from micronova.http.request import Request, Response
from micronova.http.service import Route, Service
from micronova.http.versions import Versions
from micronova.objects.clock import Clock
from micronova.objects.errors import Invalid, NotAcceptable, UnsupportedMediaType

LEAST, NEWEST = 0, 39  # the minor numbers of the microversions
UNDEFINED_CODE: Final = "placement.undefined_code"
JSON: Final = "application/json"


class PlacementVersions(Versions):
    """The microversions of Placement, which words refusals in its own way."""

    __slots__ = ()

    def negotiate(self, modern: str | None, legacy: str | None) -> int:
        """Return the minor version that the header names, by default the least."""
        wanted = self._named(modern)
        known = {self.text(minor): minor for minor in range(self.least, self.newest + 1)}
        if wanted is None or wanted == "latest":
            return self.least if wanted is None else self.newest
        if wanted in known:
            return known[wanted]
        parts = wanted[:64].split(".")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
            raise Invalid(f"invalid version string: {wanted[:64]}")
        raise NotAcceptable(
            f"Unacceptable version header: {wanted[:64]}",
            min_version=self.text(self.least),
            max_version=self.text(self.newest),
        )


VERSIONS = PlacementVersions("placement", 1, LEAST, NEWEST)


class PlacementService(Service):
    """The service; the `body` and `query` of its routes are functions that return a schema for a microversion."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app.resp_options.default_media_type = None  # type: ignore[assignment] # an answer without a body has no type

    def decode_query(self, request: Request) -> dict[str, str]:
        """Return the last value of each query parameter; raise Invalid for what the schema does not allow."""
        values = {name: given[-1] for name, given in request.raw_query.items()}
        try:
            json_schema.check(values, request.route.query(request.minor))
        except Invalid as error:
            raise Invalid(f"Invalid query string parameters: {error.message}") from None
        return values

    def decode_body(self, request: Request, raw: bytes) -> Any:
        """Return the body; raise Invalid for what the schema does not allow."""
        kind = (request.falcon.content_type or "").partition(";")[0].strip()
        if kind != JSON:
            raise UnsupportedMediaType(f"The media type {kind[:64] or None} is not supported, use {JSON}")
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Invalid(f"Malformed JSON: {str(error)[:200]}") from None
        if b"\\u0000" in raw:
            raise Invalid("Malformed JSON: a text must not have the character U+0000.")
        try:
            json_schema.check(value, request.route.body(request.minor))
        except Invalid as error:
            raise Invalid(f"JSON does not validate: {error.message}") from None
        return value

    async def _run(
        self, routes: Any, request: Request, http: falcon.asgi.Request, answer: falcon.asgi.Response
    ) -> None:
        if (http.content_length or 0) > 0 and not http.content_type:
            raise Invalid("content-type header required when content-length > 0")
        if http.method == "GET" and routes and routes[0].path and not http.client_accepts(JSON):
            raise NotAcceptable(f"Only {JSON} is provided")
        await super()._run(routes, request, http, answer)

    def _negotiate(self, request: Request, http: falcon.asgi.Request, answer: falcon.asgi.Response) -> None:
        request.minor = -1  # until it is known
        super()._negotiate(request, http, answer)
        answer.set_header("vary", "openstack-api-version")

    def _answer(self, route: Route, http: falcon.asgi.Request, answer: falcon.asgi.Response, result: Any) -> None:
        super()._answer(route, http, answer, result)
        if answer.data is not None:
            answer.content_type = JSON

    def fault_of(self, request: Request, status: int, error: BaseException) -> dict[str, Any]:
        """Return the body of an error, which has a code from 1.23 on."""
        details = getattr(error, "details", {})
        fault: dict[str, Any] = {"status": status, "title": TITLES.get(status, "Error"), "detail": message_of(error)}
        if request.minor >= 23:
            fault["code"] = details.get("placement_code", UNDEFINED_CODE)
        fault["request_id"] = request.context.request_id
        if request.minor < 0:
            fault |= {name: details[name] for name in ("max_version", "min_version") if name in details}
        return {"errors": [fault]}

    def _fault(self, request: Request, answer: falcon.asgi.Response, error: Exception) -> None:
        super()._fault(request, answer, error)
        http = request.falcon
        if not http.client_accepts(JSON) and http.client_accepts("text/html"):
            title = TITLES.get(answer.status_code, "Error")
            text = html.escape(message_of(error))
            answer.content_type = "text/html; charset=utf-8"
            answer.data = f"<html><head><title>{title}</title></head><body><p>{text}</p></body></html>".encode()


def placement_fault(status: int, message: str, error: BaseException) -> dict[str, Any]:
    """Return the body of an error that is found before the request is read."""
    return {"errors": [{"status": status, "title": TITLES.get(status, "Error"), "detail": message}]}


class Answers:
    """Makes answers with the headers that they have from 1.15 on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def make(
        self,
        request: Request,
        body: Any,
        changed_at: int | None = None,
        *,
        since: int = 15,
        status: int | None = None,
        location: str = "",
    ) -> Response:
        """Return an answer; `changed_at` (microseconds) is when what it shows has changed, by default now."""
        headers = {"location": f"{request.base_url}{location}"} if location else {}
        if request.minor >= since:
            at = self._clock.now() if changed_at is None else changed_at / 1e6
            headers |= {"last-modified": formatdate(at, usegmt=True), "cache-control": "no-cache"}
        return Response(body=body, headers=headers, status=status)


def path_of(request: Request, path: str) -> str:
    """Return the path of a resource as links have it: from the root of the server."""
    return f"{request.service.mount}{path}"
