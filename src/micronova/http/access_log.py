"""The access log: a line for each HTTP request and WebSocket that a process answers, without tokens."""

import logging
import re
import urllib.parse
from typing import Any, Final

from micronova.http.asgi import App, Receive, Scope, Send
from micronova.http.proxies import TrustedProxies
from micronova.objects.clock import Clock

log = logging.getLogger("micronova.http.access")

HIDDEN: Final = "***"
_SECRET = re.compile("token|ticket|password|secret|signature|credential", re.IGNORECASE)
_PLAIN: Final = "/:@!$&'()*+,;=~"  # in a path, beside letters and digits
_SECRET_PATH = re.compile(r"(/os-console-auth-tokens/)[^/]+")
_REQUEST_IDS = (b"x-openstack-request-id", b"x-compute-request-id")


class AccessLog:
    """An ASGI application that logs what another one answers, while it is `on`."""

    def __init__(self, app: App, clock: Clock, proxies: TrustedProxies, *, on: bool) -> None:
        """`proxies` are believed when they say who a client is."""
        self._app = app
        self._proxies = proxies
        self._now = clock.monotonic
        self.on = on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it when it is answered."""
        if not self.on or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        began = self._now()
        status, size, id = 0, 0, ""

        async def sending(event: dict[str, Any]) -> None:
            nonlocal status, size, id
            match event["type"]:
                case "http.response.start":
                    status = event["status"]
                    id = next((value.decode() for name, value in event.get("headers", ()) if name in _REQUEST_IDS), "")
                case "http.response.body":
                    size += len(event.get("body", b""))
                case "websocket.accept":
                    status = 101
                case "websocket.close":
                    status = status or 403  # what its client gets that was not accepted
            await send(event)

        try:
            await self._app(scope, receive, sending)
        finally:
            client = self._proxies.apply(scope).get("client")
            log.info(
                "%s %s %s %s %d bytes %.1f ms%s",
                client[0] if client else "-",
                scope.get("method", "WEBSOCKET"),
                shown(scope["path"], scope.get("query_string", b"")),
                status or "unanswered",
                size,
                1000 * (self._now() - began),
                f" [{id}]" if id else "",
            )


def shown(path: str, query: bytes) -> str:
    """Return the path and the query of a request without what gives access to something.

    What is not printable, and spaces, are escaped: no path can look like another part of the line.
    """
    path = urllib.parse.quote(_SECRET_PATH.sub(rf"\1{HIDDEN}", path), safe=_PLAIN)
    if not query:
        return path
    return f"{path}?{'&'.join(map(_shown_parameter, query.decode('latin-1').split('&')))}"


def _shown_parameter(parameter: str) -> str:
    """Return a parameter; its value is hidden if it may be a secret, or a path with a secret, as noVNC's links have."""
    name, equals, value = parameter.partition("=")
    plain = urllib.parse.unquote(urllib.parse.unquote(parameter))
    return f"{name}={HIDDEN}" if equals and value and _SECRET.search(plain) else parameter
