"""Looking at servers as browsers do: a cloud with a real port, and somebody who opens WebSockets."""

import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest_asyncio

from micronova.http.mount import HTTPServer
from micronova.http.sockets import listen
from tests.functional.cloud import Caller, Cloud


class Viewer:
    """Somebody with a browser, or with something like one."""

    def __init__(self, base: str, client: aiohttp.ClientSession) -> None:
        self.base = base  # scheme://host:port
        self._client = client

    async def page(self, path: str) -> tuple[int, str, Mapping[str, str]]:
        """Load a page; return its status, content and headers."""
        async with self._client.get(f"{self.base}/console/{path}") as answer:
            return answer.status, await answer.text(), answer.headers

    async def session(self, token: str) -> tuple[int, Any]:
        """Ask as a page does what a token stands for."""
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
        """Expect that there is no WebSocket; return the status."""
        try:
            async with self.socket(token, path, **headers):
                raise AssertionError("it was let in")
        except aiohttp.WSServerHandshakeError as error:
            return error.status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def viewer(cloud: Cloud) -> AsyncIterator[Viewer]:
    """Give the cloud a port, and somebody who uses it."""
    sock = listen("127.0.0.1", 0)
    server = HTTPServer(cloud.process.application(), sock, websockets=True)
    port = sock.getsockname()[1]
    await server.start()
    async with aiohttp.ClientSession() as client:
        yield Viewer(f"http://127.0.0.1:{port}", client)
    await server.stop()


async def link(caller: Caller, id: str, protocol: str = "serial", type: str = "") -> str:
    """Ask for a console and return the URL."""
    body = {"remote_console": {"protocol": protocol, "type": type or {"vnc": "novnc"}.get(protocol, protocol)}}
    console = (await caller.post(f"/servers/{id}/remote-consoles", body, 200))["remote_console"]
    assert (console["protocol"], console["type"]) == (protocol, body["remote_console"]["type"])
    return str(console["url"])


def token_of(url: str) -> str:
    """Return the token in a link of either form."""
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)
    if "path" in query:
        query = urllib.parse.parse_qs(query["path"][0].partition("?")[2])
    [token] = query["token"]
    return token


async def read_until(socket: aiohttp.ClientWebSocketResponse, wanted: bytes) -> bytes:
    """Read until some bytes have come."""
    seen = b""
    while wanted not in seen:
        seen += await socket.receive_bytes(timeout=10)
    return seen


async def closed(socket: aiohttp.ClientWebSocketResponse) -> str:
    """Wait until the other side hangs up; return its reason."""
    while True:
        message = await socket.receive(timeout=30)
        if message.type is aiohttp.WSMsgType.CLOSE:
            return str(message.extra)
        if message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING):
            return ""
