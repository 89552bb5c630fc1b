"""A client of consoles, as a browser is: it loads pages and opens WebSockets at a cloud with a real port."""

import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest_asyncio

from micronova.http.server import HTTPServer
from micronova.http.sockets import listen
from tests.functional.cloud import ON_CLUSTER, Caller, Cloud


class ConsoleClient:
    """Loads the pages of consoles and opens their WebSockets."""

    def __init__(self, base: str, client: aiohttp.ClientSession) -> None:
        self.base = base  # scheme://host:port
        self._client = client

    async def page(self, path: str) -> tuple[int, str, Mapping[str, str]]:
        """Load a page; return its status, content and headers."""
        async with self._client.get(f"{self.base}/console/{path}") as answer:
            return answer.status, await answer.text(), answer.headers

    async def session(self, token: str) -> tuple[int, Any]:
        """Ask for the console of a token, as the page does."""
        async with self._client.get(f"{self.base}/console/session", params={"token": token}) as answer:
            return answer.status, await answer.json()

    @contextlib.asynccontextmanager
    async def socket(
        self, token: str = "", path: str = "console/websockify", **headers: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket."""
        url = f"{self.base}/{path}" + (f"{'&' if '?' in path else '?'}token={token}" if token else "")
        async with self._client.ws_connect(url, protocols=["binary"], headers=headers) as opened:
            yield opened

    async def refused(self, token: str = "", path: str = "console/websockify", **headers: str) -> int:
        """Expect that the WebSocket is refused; return the status."""
        try:
            async with self.socket(token, path, **headers):
                raise AssertionError("the WebSocket was accepted")
        except aiohttp.WSServerHandshakeError as error:
            return error.status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def console_client(cloud: Cloud) -> AsyncIterator[ConsoleClient]:
    """A client of the console proxy; a cloud in one process gets a port for it."""
    if ON_CLUSTER:
        async with aiohttp.ClientSession() as client:
            yield ConsoleClient(cloud.console_url, client)
        return
    sock = listen("127.0.0.1", 0)
    server = HTTPServer(cloud.process.application(), sock, websockets=True)
    port = sock.getsockname()[1]
    await server.start()
    async with aiohttp.ClientSession() as client:
        yield ConsoleClient(f"http://127.0.0.1:{port}", client)
    await server.stop()


async def link(caller: Caller, id: str, protocol: str = "serial", type: str = "") -> str:
    """Request a console and return its URL."""
    body = {"remote_console": {"protocol": protocol, "type": type or {"vnc": "novnc"}.get(protocol, protocol)}}
    console = (await caller.post(f"/servers/{id}/remote-consoles", body, 200))["remote_console"]
    assert (console["protocol"], console["type"]) == (protocol, body["remote_console"]["type"])
    return str(console["url"])


def token_of(url: str) -> str:
    """Return the token in the URL of a console of either form."""
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)
    if "path" in query:
        query = urllib.parse.parse_qs(query["path"][0].partition("?")[2])
    [token] = query["token"]
    return token


async def read_until(socket: aiohttp.ClientWebSocketResponse, wanted: bytes) -> bytes:
    """Read until these bytes have arrived; return everything that was read."""
    seen = b""
    while wanted not in seen:
        seen += await socket.receive_bytes(timeout=10)
    return seen


async def closed(socket: aiohttp.ClientWebSocketResponse) -> str:
    """Wait until the server closes the connection; return its reason."""
    while True:
        message = await socket.receive(timeout=30)
        if message.type is aiohttp.WSMsgType.CLOSE:
            return str(message.extra)
        if message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING):
            return ""
