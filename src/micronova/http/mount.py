"""One port for every service: a request goes to the service that the first segment of its path names."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from micronova.http import welcome
from micronova.http.asgi import App, Receive, Scope, Send
from micronova.http.cors import Cors
from micronova.http.proxies import TrustedProxies
from micronova.http.service import Route

_ID = re.compile(r"[0-9a-f-]+")  # of a project


class Mounts:
    """The ASGI application of a process: services by the first segment of the path, and CORS for all of them."""

    def __init__(
        self,
        services: Mapping[str, App],
        *,
        root: App | None = None,  # answers what no service is mounted for, instead of the welcome page and the 404
        origins: tuple[str, ...] = (),  # the web sites whose pages may call the services; "*": all
        websockets: frozenset[str] = frozenset(),  # the mounts that speak WebSocket too
        proxies: TrustedProxies | None = None,  # whose X-Forwarded-* headers are believed; None: those of no client
    ) -> None:
        self._services = dict(services)
        self._websockets = websockets
        self._root = root
        self._cors = Cors(origins)
        self._proxies = proxies or TrustedProxies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or a WebSocket; there are no other kinds of events that concern us."""
        if scope["type"] not in ("http", "websocket"):
            return
        scope = self._proxies.apply(scope)
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if self._cors:
            if scope["method"] == "OPTIONS":
                await _answer(send, 200, b"", self._cors.preflight(scope))
                return
            if allowed := self._cors.answer(scope):
                send = _with_headers(send, allowed)
        mount, inner = _below(scope)
        app = self._services.get(mount)
        if app is not None:
            await app(inner, receive, send)
        elif self._root is not None:
            await self._root(scope, receive, send)
        elif welcome.is_wanted(scope):
            await welcome.answer(scope, send, self._services)
        else:
            known = {"services": sorted(self._services)}
            body = msgspec.json.encode({"error": {"code": 404, "message": "No service is mounted here.", **known}})
            await _answer(send, 404, body, [(b"content-type", b"application/json")])

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        mount, inner = _below(scope)
        if mount in self._websockets:
            await self._services[mount](inner, receive, send)
        else:
            await send({"type": "websocket.close"})  # the client gets a 403, because it was not accepted before


def below_project(path: str, resources: Collection[str]) -> tuple[str, str]:
    """Return the project that a path below a version names, or "", and the path below the project.

    A first segment that begins no route is taken for a project if a resource follows it or if it looks like an id; the
    request's authentication compares it with the token's. `resources` are the first segments of routes.
    """
    first, _, rest = path.partition("/")
    if rest and first not in resources and (rest.partition("/")[0] in resources or _ID.fullmatch(first)):
        return first, rest
    return "", path


def below_versions(
    api: App, documents: App, routes: Collection[Route], *, version: str, relaxed: str | None = None
) -> App:
    """Return the application of an API whose resources are below /VERSION and /VERSION/PROJECT.

    `below_project` says what is taken for a project. Below `relaxed` are the same resources with relaxed validation
    and without microversions. Paths above the versions go to the version documents.
    """
    resources = frozenset(route.path.split("/")[1] for route in routes if route.path)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        first, _, rest = scope["path"].lstrip("/").partition("/")
        if first != version and (relaxed is None or first != relaxed):
            await documents(scope, receive, send)
            return
        inner = dict(scope)
        inner["micronova.path"] = scope["path"]  # as the client wrote it, which access rules are about
        if first == relaxed:
            inner["micronova.is_v2"] = True
        project, rest = below_project(rest, resources)
        if project:
            inner["micronova.project"] = project
        inner["path"] = f"/{version}/{rest}" if rest else f"/{version}"
        await api(inner, receive, send)

    return app


def _below(scope: Scope) -> tuple[str, Scope]:
    """Return the mount that a request is for, and the request with the path below it."""
    path: str = scope["path"]
    first, _, rest = path.lstrip("/").partition("/")
    inner = dict(scope)
    inner["path"] = "/" + rest
    inner.pop("raw_path", None)
    return f"/{first}", inner


def _with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    async def sending(event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": [*event.get("headers", ()), *headers]}
        await send(event)

    return sending


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})
