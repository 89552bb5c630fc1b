"""The client of OpenStack services, with two transports: a direct ASGI call in one process, aiohttp otherwise.

Callers do not know which one they use. So the same client code talks to a real OpenStack service and to an embedded
one, and every use of an embedded service shows that it is compatible.
"""

import asyncio
import contextlib
import json
import math
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from micronova.objects.errors import (
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    MicronovaError,
    NotFound,
    Unauthorized,
    Unavailable,
)
from micronova.telemetry.spans import traceparent

MAX_ANSWER = 64 << 20
"""Bytes of one answer that are read at most: the ports of a large region fit, endless data does not."""

READS = 3
"""Attempts at a request that only reads, if connections are closed before the answer."""

REQUEST_ID = "x-openstack-request-id"
"""The header with the id of a request, which services send back."""

UNIX = "http+unix://"
"""Begins the URL of a service that listens on a Unix socket; the socket's path follows, quoted as a host name."""

ASGIApp = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

RequestBody = bytes | AsyncGenerator[bytes, None] | None
"""The body of a request: whole, in parts, or none."""


def unix_url(path: Path) -> str:
    """Return the URL of what listens on a Unix socket."""
    return UNIX + urllib.parse.quote(str(path), safe="")


def split_unix_url(url: str) -> tuple[str | None, str]:
    """Return the path of the Unix socket that a URL names, or None, and the URL to send to what listens there."""
    if not url.startswith(UNIX):
        return None, url
    quoted, slash, rest = url.removeprefix(UNIX).partition("/")
    return urllib.parse.unquote(quoted), f"http://localhost{slash}{rest}"


def tls_context(ca_file: str) -> ssl.SSLContext | bool:
    """Return how aiohttp verifies certificates: by the authorities in a file, or by the system's."""
    return ssl.create_default_context(cafile=ca_file) if ca_file else True


def host_connector(url: str, service: str, ca_file: str = "") -> tuple[Any, str]:
    """Return the connector with which a host reaches a URL of its order, and the URL to send; None: aiohttp's own.

    `service` is the URL of the image service. If `url` names a Unix socket, it must be that of `service`; else
    LookupError is raised.
    """
    socket, address = split_unix_url(url)
    if socket is None and not ca_file:
        return None, address
    if socket is not None and not url.startswith(f"{service}/"):
        raise LookupError("this host does not know its image service")
    import aiohttp

    if socket is None:
        return aiohttp.TCPConnector(ssl=tls_context(ca_file)), address
    return aiohttp.UnixConnector(socket), address


class Answer(msgspec.Struct):
    """A service's answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return msgspec.json.decode(self.body) if self.body else None


class Transport(Protocol):
    """How a request reaches a service."""

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Send one request and read the whole answer."""

    async def close(self) -> None:
        """Close all connections."""


class ASGITransport:
    """Calls an ASGI application of this process directly, without a socket."""

    def __init__(self, app: ASGIApp, host: str = "in-process") -> None:
        self._app = app
        self._host = host

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: RequestBody) -> Answer:
        """Run the application for one request.

        The headers say the length of a body that comes in parts. If the body raises an error, the application sees a
        client that has gone.
        """
        path, _, query = url.partition("?")
        raw = [(b"host", self._host.encode())] + [(k.lower().encode(), v.encode()) for k, v in headers.items()]
        if isinstance(body, bytes):
            raw.append((b"content-length", str(len(body)).encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": urllib.parse.unquote(path),  # as an HTTP server passes it on
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": raw,
            "client": ("in-process", 0),
            "server": (self._host, 0),
        }
        parts = body if isinstance(body, AsyncGenerator) else None
        sent = False
        status = 0
        answered: dict[str, str] = {}
        answer: list[bytes] = []

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            if parts is None:
                sent = True
                return {"type": "http.request", "body": body or b"", "more_body": False}
            try:
                part = await anext(parts, None)
            except Exception:  # noqa: BLE001 - the caller, whose body it is, knows of it
                sent = True
                return {"type": "http.disconnect"}
            sent = part is None
            return {"type": "http.request", "body": part or b"", "more_body": not sent}

        async def send(event: dict[str, Any]) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                answered.update((k.decode().lower(), v.decode()) for k, v in event.get("headers", ()))
            elif event["type"] == "http.response.body":
                answer.append(event.get("body", b""))

        await self._app(scope, receive, send)
        return Answer(status, answered, b"".join(answer))

    async def close(self) -> None:
        """Do nothing: there are no connections."""


class HTTPTransport:
    """aiohttp with kept-alive connections; imported when it is first needed."""

    def __init__(
        self,
        base: str,
        *,
        timeout: float = 60.0,
        connections: int = 50,
        max_answer: int = MAX_ANSWER,
        ca_file: str = "",
    ) -> None:
        """`ca_file` is a PEM file of the authorities that verify the service's certificate; empty: the system's."""
        self._ca_file = ca_file
        self._name = base.rstrip("/")
        self._socket, self._base = split_unix_url(self._name)
        self._timeout = timeout
        self._connections = connections
        self._max_answer = max_answer
        self._session: Any = None
        self._former: list[tuple[float, Any]] = []  # since when; requests of theirs may be open
        self._lock = asyncio.Lock()

    async def _open(self) -> Any:
        async with self._lock:
            if self._session is None:
                import aiohttp

                limit = self._connections
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(self._socket, limit=limit)
                    if self._socket
                    else aiohttp.TCPConnector(limit=limit, ssl=tls_context(self._ca_file)),
                    timeout=aiohttp.ClientTimeout(total=self._timeout),
                )
                await self._close_former(asyncio.get_running_loop().time() - self._timeout)
            return self._session

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Send one request; raise Unavailable if the service cannot be reached or its answer is too large.

        A process that is replaced behind a proxy closes all kept connections. A request that only reads is repeated
        then: each attempt may meet another one of them.
        """
        import aiohttp

        attempts = READS if method in ("GET", "HEAD") else 1
        try:
            session = self._session or await self._open()
            for _ in range(attempts - 1):
                with contextlib.suppress(aiohttp.ServerDisconnectedError):
                    return await self._send(session, method, url, headers, body)
            return await self._send(session, method, url, headers, body)
        except aiohttp.ClientConnectorCertificateError as error:
            raise Unavailable(
                f"The certificate of {self._name} is not valid: {error.certificate_error}. If a private authority has "
                "signed it, name that in ssl.ca_file."
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None)
            raise Unavailable(f"{self._name} does not answer: {reason or type(error).__name__}.") from error

    async def _send(
        self, session: Any, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Answer:
        async with session.request(
            method, self._base + url, headers=dict(headers), data=body, allow_redirects=False
        ) as answer:
            parts, size = [], 0
            async for part in answer.content.iter_any():  # unpacked, if the service packed it
                size += len(part)
                if size > self._max_answer:
                    limit = f"{self._max_answer:,} bytes"
                    raise Unavailable(f"{self._name} sent more than {limit} in answer to one request.")
                parts.append(part)
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, b"".join(parts))

    def renew(self) -> None:
        """Read the certificates of authorities again for requests from now on; those that are open end as they are."""
        session, self._session = self._session, None
        if session is not None:
            self._former.append((asyncio.get_running_loop().time(), session))

    async def _close_former(self, until: float = math.inf) -> None:
        """Close the sessions that were replaced until a time."""
        ended = [each for each in self._former if each[0] <= until]
        self._former = [each for each in self._former if each not in ended]
        for _, session in ended:
            await session.close()

    async def close(self) -> None:
        """Close the sessions."""
        await self._close_former()
        if self._session is not None:
            await self._session.close()
            self._session = None


_ERRORS: dict[int, type[MicronovaError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    408: Unavailable,
    409: Conflict,
    410: Gone,
    413: Forbidden,
    425: Unavailable,
    429: Unavailable,
    503: Unavailable,
}


def error_message(answer: Answer) -> str:
    """Return the message in the error body of any OpenStack service."""
    try:
        document = json.loads(answer.body)
    except (ValueError, UnicodeDecodeError):
        return answer.body.decode("utf-8", "replace")[:300]
    while isinstance(document, dict):
        if isinstance(document.get("message"), str):
            return str(document["message"])
        inner = [value for value in document.values() if isinstance(value, dict)]
        if not inner:
            break
        document = inner[0]
    return str(document)[:300]


def error_type(answer: Answer) -> str:
    """Return the network service's name of an error, "" for other services; one status has several errors."""
    try:
        return str(json.loads(answer.body)["NeutronError"]["type"])
    except (ValueError, UnicodeDecodeError, KeyError, TypeError):
        return ""


def raise_for(answer: Answer, method: str, url: str) -> None:
    """Raise the domain error for the answer's status, unless it is a success.

    Every OpenStack service gives its answers a request id. A 404 without one is of a proxy, or of another program at a
    wrong endpoint: it does not say that something is gone.
    """
    if answer.status < 400:
        return
    kind = _ERRORS.get(answer.status, MicronovaError if answer.status < 500 else Unavailable)
    request = f"{method} {url.partition('?')[0]}"
    if answer.status == 404 and not answer.headers.get(REQUEST_ID):
        raise _not_of_a_service(answer, request)
    raise kind(error_message(answer), status=answer.status, request=request, type=error_type(answer))


def _not_of_a_service(answer: Answer, request: str) -> Unavailable:
    message = f"{request}: the answer {answer.status} is not of an OpenStack service. Check endpoint and proxy."
    return Unavailable(message, status=answer.status, request=request)


class ServiceClient:
    """The client of one service, with a function that returns the token to use."""

    def __init__(
        self,
        transport: Transport,
        token: Callable[[], Awaitable[str]],
        *,
        prefix: str = "",
        renew: Callable[[], None] | None = None,
    ) -> None:
        self.transport = transport
        self._token = token
        self._renew = renew
        self._prefix = prefix

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        ok: tuple[int, ...] = (),
        proves_service: bool = False,
    ) -> Any:
        """Send a request and return the decoded body.

        `token` is a user's token; without it the service user's is used. The statuses in `ok` are no errors. With
        `proves_service` the service user's token is sent as X-Service-Token, too.
        """
        answer = await self._send(method, path, body, token, headers, proves_service=proves_service)
        if answer.status not in ok:
            raise_for(answer, method, path)
        try:
            if answer.status not in (301, 302, 303, 307, 308):
                return answer.json()
        except msgspec.DecodeError:
            pass
        raise _not_of_a_service(answer, f"{method} {path.partition('?')[0]}")

    async def content(self, path: str, *, accept: str, token: str | None = None) -> bytes:
        """Return the content of what is not JSON."""
        answer = await self._send("GET", path, None, token, {"accept": accept})
        raise_for(answer, "GET", path)
        return answer.body

    async def upload(self, path: str, data: bytes, *, token: str | None = None) -> None:
        """Send what is not JSON."""
        headers = {"content-type": "application/octet-stream"}
        raise_for(await self._send("PUT", path, data, token, headers), "PUT", path)

    async def _send(
        self,
        method: str,
        path: str,
        body: Any,
        token: str | None,
        headers: Mapping[str, str] | None,
        *,
        proves_service: bool = False,
    ) -> Answer:
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        proof: dict[str, str] = {}
        for attempt in (1, 2):
            if proves_service:
                proof = {"x-service-token": await self._token()}
            sent = {
                "accept": "application/json",
                "x-auth-token": await self._token() if token is None else token,
                **proof,
                **_trace(),
                **(headers or {}),
            }
            if data is not None:
                sent.setdefault("content-type", "application/json")
            answer = await self.transport.request(method, self._prefix + path, sent, data)
            if answer.status == 401 and token is None and attempt == 1 and self._renew is not None:
                self._renew()  # the service user's token has expired or was revoked: get a new one, once
                continue
            if answer.status == 401 and token and attempt == 1:
                # The user's token may have access rules. They are about what the user asks for, not about what we ask
                # for in the user's name.
                proof = {"x-service-token": await self._token()}
                continue
            break
        if answer.status == 401 and token is None:
            # A 401 would tell our caller that its own token is not valid, and would end what waits for the service.
            request = f"{method} {self._prefix}{path.partition('?')[0]}"
            said = error_message(answer)
            raise Unavailable(f"{request}: the service does not accept who we are: {said}", status=401, request=request)
        return answer


def _trace() -> dict[str, str]:
    """Return the header with which the service continues the current trace, if there is one."""
    parent = traceparent()
    return {"traceparent": parent} if parent else {}
