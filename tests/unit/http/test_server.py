"""The limits of the HTTP server, over real sockets: connections per client and in all, and clients that do not read."""

import asyncio
import contextlib
import resource
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from micronova.http.asgi import Receive, Scope, Send
from micronova.http.proxies import TrustedProxies
from micronova.http.server import Connections, HTTPServer, Limits
from micronova.http.sockets import listen

PATIENCE = 60.0  # seconds after which a test fails
REQUEST = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADE = (
    b"GET /socket HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


class App:
    """Answers at once; at /large with more than the buffers of a connection can take."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            while (await receive())["type"] != "websocket.disconnect":
                pass
            return
        try:
            large = scope["path"] == "/large"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(100 if large else 1):
                await send({"type": "http.response.body", "body": bytes(1 << 20 if large else 1), "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            self.ended.set()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def status(self, request: bytes = REQUEST % b"small") -> int:
        """Send a request and return the status of the answer; 0 if the connection was closed without one."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(request)
            line = await asyncio.wait_for(self.reader.readline(), PATIENCE)
            return int(line.split()[1]) if line else 0
        return 0

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Server:
    def __init__(self, limits: Limits, certificate: Path | None = None) -> None:
        self.app = App()
        self._sock = listen("127.0.0.1", 0)
        self._port = self._sock.getsockname()[1]
        pem = str(certificate) if certificate else None
        self._tls = ssl.create_default_context(cafile=pem) if pem else None
        self.http = HTTPServer(self.app, self._sock, certificate=pem, key=pem, limits=limits, websockets=True)

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls))

    async def connect_silently(self) -> Client:
        """Connect without a TLS handshake."""
        return Client(*await asyncio.open_connection("127.0.0.1", self._port))

    async def until_served(self, request: bytes = REQUEST % b"small", status: int = 200) -> Client:
        """Connect until the server has noticed that a connection was closed; return the client, still connected."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(OSError):
                    client = await self.connect()
                    if await client.status(request) == status:
                        return client
                    await client.close()


@contextlib.asynccontextmanager
async def serving(limits: Limits, certificate: Path | None = None) -> AsyncIterator[Server]:
    server = Server(limits, certificate)
    await server.http.start()
    try:
        yield server
    finally:
        await server.http.stop()


async def test_a_client_has_so_many_connections() -> None:
    async with serving(Limits(per_client=2)) as server:
        held = [await server.connect() for _ in range(2)]
        assert [await each.status() for each in held] == [200, 200]
        third = await server.connect()
        assert await third.status() == 429
        assert b"retry-after" in (await asyncio.wait_for(third.reader.read(), PATIENCE)).lower()
        await held[0].close()
        await (await server.until_served()).close()
        await held[1].close()


async def test_a_trusted_proxy_has_more() -> None:
    async with serving(Limits(per_client=1, proxies=TrustedProxies(["127.0.0.0/8"]))) as server:
        clients = [await server.connect() for _ in range(5)]
        assert [await each.status() for each in clients] == [200] * 5
        for each in clients:
            await each.close()


def test_an_ipv6_client_is_its_network() -> None:
    connections = Connections(Limits(per_client=2))
    assert [connections.open(f"2001:db8:0:1::{number}") for number in (1, 2, 3)] == [0, 0, 429]
    assert connections.open("2001:db8:0:2::1") == 0
    connections.close("2001:db8:0:1::1")
    assert [connections.open(f"2001:db8:0:1:2::{number}") for number in (1, 2)] == [0, 429]


def test_an_ipv4_client_within_ipv6_is_its_address() -> None:
    connections = Connections(Limits(per_client=1))
    assert [connections.open(f"::ffff:192.0.2.{number}") for number in (1, 1, 2)] == [0, 429, 0]
    assert connections.open("192.0.2.2") == 429


async def test_all_clients_together_have_so_many() -> None:
    async with serving(Limits(connections=2, proxies=TrustedProxies(["127.0.0.0/8"]))) as server:
        held = [await server.connect() for _ in range(2)]
        assert [await each.status() for each in held] == [200, 200]
        assert await (await server.connect()).status() == 503
        for each in held:
            await each.close()
        await (await server.until_served()).close()


async def test_a_websocket_counts_as_long_as_it_is_open() -> None:
    async with serving(Limits(per_client=1)) as server:
        socket = await server.connect()
        assert await socket.status(UPGRADE) == 101
        assert await (await server.connect()).status() == 429
        await socket.close()
        await (await server.until_served()).close()
        await (await server.until_served()).close()


async def test_an_answer_that_nobody_reads_is_abandoned() -> None:
    async with serving(Limits(timeout=0.2)) as server:
        client = await server.connect()
        client.writer.write(REQUEST % b"large")
        await asyncio.wait_for(server.app.ended.wait(), PATIENCE)
        await client.close()


async def test_a_client_that_reads_gets_all_of_a_long_answer() -> None:
    async with serving(Limits(timeout=5.0)) as server:
        client = await server.connect()
        client.writer.write(REQUEST % b"large")
        await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), PATIENCE)
        got = 0
        async with asyncio.timeout(10 * PATIENCE):
            while got < 100 << 20:
                got += len(await client.reader.read(1 << 20))
        await client.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pem = tmp_path_factory.mktemp("tls") / "server.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    done = subprocess.run([*command.split(), "-keyout", "-", "-out", "-"], check=True, capture_output=True)
    pem.write_bytes(done.stdout)
    return pem


Run = Callable[[Coroutine[Any, Any, None]], None]
event_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def _end(client: Client) -> bytes:
    """Return what the server sends until it closes the connection."""
    try:
        return await asyncio.wait_for(client.reader.read(), PATIENCE)
    except ConnectionError:
        return b""


@event_loops
def test_a_connection_counts_before_its_tls_handshake(run: Run, certificate: Path) -> None:
    async def check() -> None:
        async with serving(Limits(per_client=3), certificate) as server:
            silent = [await server.connect_silently() for _ in range(3)]
            assert await _end(await server.connect_silently()) == b""
            with pytest.raises(OSError):
                await server.connect()
            for each in silent:
                await each.close()
            await (await server.until_served()).close()

    run(check())


@event_loops
def test_a_tls_handshake_has_a_time_limit(run: Run, certificate: Path) -> None:
    async def check() -> None:
        async with serving(Limits(connections=2, timeout=1.0), certificate) as server:
            for _ in range(2):
                for each in [await server.connect_silently() for _ in range(2)]:
                    assert await _end(each) == b""
                    await each.close()
            await (await server.until_served()).close()

    run(check())


@event_loops
def test_a_connection_counts_until_it_ends_however_its_tls_handshake_ends(run: Run, certificate: Path) -> None:
    async def check() -> None:
        async with serving(Limits(connections=1), certificate) as server:
            for _ in range(3):
                plain = await server.connect_silently()
                plain.writer.write(b"GET / HTTP/1.1\r\n\r\n")
                await _end(plain)
                await plain.close()
                await (await server.until_served()).close()
                socket = await server.until_served(UPGRADE, 101)
                with pytest.raises(OSError):
                    await server.connect()
                await socket.close()
                reset = await server.connect_silently()
                reset.writer.transport.abort()
            await (await server.until_served()).close()

    run(check())


@event_loops
def test_the_server_stops_during_tls_handshakes(run: Run, certificate: Path) -> None:
    async def check() -> None:
        async with serving(Limits(), certificate) as server:
            silent = await server.connect_silently()
            client = await server.connect()
            assert await client.status() == 200
        assert await _end(silent) == b""
        await client.close()

    run(check())


def test_the_process_may_open_as_many_files_as_the_system_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}));"
        "from micronova.cli.run import run_until_stopped\n"
        "async def main(stopped): print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "run_until_stopped(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) == hard
