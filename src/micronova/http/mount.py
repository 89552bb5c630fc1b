"""One port for every service: requests go by the first part of their path; and the server that listens."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from micronova.objects.errors import MicronovaError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Mounts:
    """An ASGI application that hands requests to the service mounted at their first path segment, or else to `root`."""

    def __init__(
        self,
        services: Mapping[str, App],
        *,
        root: App | None = None,
        origins: tuple[str, ...] = (),
        websockets: frozenset[str] = frozenset(),  # the mounts that speak WebSocket too
    ) -> None:
        self._services = dict(services)
        self._websockets = websockets
        self._root = root
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch; other kinds of ASGI events than requests are not ours."""
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        if self._origins:
            origin = _header(scope, b"origin")
            if origin in self._origins:
                if scope["method"] == "OPTIONS":
                    await _answer(send, 204, b"", _cors(origin))
                    return
                send = _with_headers(send, _cors(origin))
        first, inner = _below(scope)
        app = self._services.get(first)
        if app is not None:
            await app(inner, receive, send)
        elif self._root is not None:
            await self._root(scope, receive, send)
        else:
            known = {"services": sorted(self._services)}
            body = msgspec.json.encode({"error": {"code": 404, "message": "No service is mounted here.", **known}})
            await _answer(send, 404, body, [(b"content-type", b"application/json")])

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, inner = _below(scope)
        if first in self._websockets:
            await self._services[first](inner, receive, send)
        else:
            await send({"type": "websocket.close"})  # before it was accepted: the answer is 403


def _below(scope: Scope) -> tuple[str, Scope]:
    """Return the mount that a request is for, and the request as it looks from there."""
    path: str = scope["path"]
    first, _, rest = path.lstrip("/").partition("/")
    inner = dict(scope)
    inner["path"] = "/" + rest
    inner.pop("raw_path", None)
    return f"/{first}", inner


def compute_paths(app: App, above: App, roots: frozenset[str]) -> App:
    """Let the compute application be reached as /v2.1/…, /v2.1/PROJECT/…, /v2/… and /v2/PROJECT/….

    What is above a version's resources (the version documents) goes to an application of its own.
    /v2 has the same features with relaxed validation and without microversions. A project in the path is kept
    aside for authentication to compare; whatever does not name a resource is taken for one.
    """

    async def rewrite(scope: Scope, receive: Receive, send: Send) -> None:
        version, _, rest = scope["path"].lstrip("/").partition("/")
        if version in ("v2", "v2.1") and rest:
            first, _, more = rest.partition("/")
            inner = dict(scope)
            if version == "v2":
                inner["micronova.relaxed"] = True
            if first not in roots and more:
                inner["micronova.project"] = first
                rest = more
            inner["path"] = f"/v2.1/{rest}"
            await app(inner, receive, send)
            return
        await above(scope, receive, send)

    return rewrite


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _cors(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"),
        (b"access-control-allow-headers", b"content-type, x-auth-token, openstack-api-version"),
        (b"access-control-expose-headers", b"x-openstack-request-id, openstack-api-version, x-subject-token"),
        (b"vary", b"Origin"),
    ]


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


class _Protocol(HttpToolsProtocol):
    """HTTP, with limits on the head of a request: uvicorn would wait for its end for ever, and keep all of it."""

    head_timeout = 30.0  # seconds
    longest_head = 65_536  # bytes; some more, when they come with the end of it

    _waiting: asyncio.TimerHandle | None = None
    _in_head = False
    _read = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._waiting = self.loop.call_later(self.head_timeout, self._give_up, 408)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Go on waiting if this was not the end of the head; a whole one, which is usual, costs no timer."""
        super().data_received(data)
        if self._in_head:
            self._read += len(data)
            if self._read > self.longest_head:
                self._give_up(431)
            elif self._waiting is None:
                self._waiting = self.loop.call_later(self.head_timeout, self._give_up, 408)

    def on_message_begin(self) -> None:
        """Begin with a head."""
        super().on_message_begin()
        self._in_head, self._read = True, 0

    def on_headers_complete(self) -> None:
        """Stop waiting: the time of the body is the service's business."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self, status: int) -> None:
        self._stop_waiting()
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(b"HTTP/1.1 %d \r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status)
        self.transport.close()


class HTTPServer:
    """uvicorn in our event loop: no signal handlers, no access log, an orderly stop."""

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        *,
        certificate: str | None = None,
        key: str | None = None,
        head_timeout: float = _Protocol.head_timeout,
        websockets: bool = False,
    ) -> None:
        self._socket = sock
        _check_certificate(certificate, key)
        self._server = _Quiet(
            uvicorn.Config(
                app,
                http=type("_Protocol", (_Protocol,), {"head_timeout": head_timeout}),
                ws=_websocket_protocol if websockets else "none",  # type: ignore[arg-type]
                ws_max_size=_LARGEST_MESSAGE,
                ws_per_message_deflate=False,  # what is sent is compressed already, or a few keys
                log_level="warning",  # or it would log the queries of WebSockets, which have tokens
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
                ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; returns when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise MicronovaError("The HTTP server ended before it had started.")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop accepting, finish the requests under way, close."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
        self._socket.close()


_LARGEST_MESSAGE = 1_048_576  # bytes that a browser may send at once


def _websocket_protocol(*args: Any, **kwargs: Any) -> asyncio.BaseProtocol:
    """What speaks WebSocket, imported when somebody first does."""
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    return WebSocketsSansIOProtocol(*args, **kwargs)


def _check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise, in one line, what would otherwise come out of uvicorn's start."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise MicronovaError("TLS needs both: a certificate (api.tls_certificate) and its key (api.tls_key).")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise MicronovaError(f"Cannot use the certificate {certificate} with the key {key}: {reason}.") from None


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's business."""
        yield
