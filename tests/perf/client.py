"""An HTTP/1.1 client that costs little: it shares the CPUs with the cloud that it measures."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools


class BenchError(Exception):
    """The cloud answered something that makes the measurement worthless."""


class Endpoint:
    """A service by its URL, and the headers that every request to it carries."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise BenchError(f"{url} is not an http:// URL")
        self.url = url.rstrip("/")
        self.host, self.port, self.prefix = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        always = {"Host": parts.netloc, "Accept": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in always.items())

    def encode(self, method: str, path: str, document: Any = None) -> bytes:
        """Return a request's bytes; `path` goes below the endpoint's."""
        body = b"" if document is None else json.dumps(document).encode()
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode("latin-1") + body


class _Wire(asyncio.Protocol):
    """One connection with at most one request under way."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser = httptools.HttpResponseParser(self)

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def exchange(self, data: bytes) -> tuple[int, bytes]:
        assert self.transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self._answer

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed before the answer was complete"))

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._body.clear()
        self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        status, parser = self._parser.get_status_code(), self._parser
        if not parser.should_keep_alive() and self.transport is not None:
            self.transport.close()
        self._parser = httptools.HttpResponseParser(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, b"".join(self._body)))


class Client:
    """One client of the cloud: a connection that is kept alive, and opened again when the server closed it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._wire: _Wire | None = None

    async def send(self, data: bytes) -> tuple[int, bytes]:
        """Send an encoded request and return status and body."""
        kept = self._wire is not None and self._wire.usable
        if not kept:
            await self._connect()
        assert self._wire is not None
        try:
            return await self._wire.exchange(data)
        except ConnectionError:
            if not kept:
                raise
        # The server closed an idle connection just when we used it: once more on a new one.
        await self._connect()
        return await self._wire.exchange(data)

    async def json(self, method: str, path: str, document: Any = None) -> Any:
        """Send a request that has to succeed, and return what it answers."""
        status, body = await self.send(self.endpoint.encode(method, path, document))
        if not 200 <= status < 300:
            raise BenchError(f"{method} {path}: {status} {body[:300].decode('utf-8', 'replace')}")
        return json.loads(body) if body else None

    def header(self, name: str) -> str:
        """Return a header of the last answer."""
        assert self._wire is not None
        return self._wire.headers[name.lower().encode()].decode("latin-1")

    def close(self) -> None:
        """Close the connection."""
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.close()
        self._wire = None

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self._wire = await loop.create_connection(_Wire, self.endpoint.host, self.endpoint.port)
