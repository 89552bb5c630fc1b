"""Clients that are slow, endless or do not speak HTTP, over a real socket: refused in time, while others are served."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from micronova.http.server import HTTPServer, Limits
from micronova.http.sockets import listen
from tests.functional.full_cloud import FullCloud, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE = 1.0  # seconds that a body, or the head of a request, may take here


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(full_cloud: FullCloud) -> AsyncIterator[tuple[str, int]]:
    """Where the cloud listens; it has little patience."""
    sock = listen("127.0.0.1", 0)
    where = sock.getsockname()
    for service in full_cloud.process.services.values():
        service.body_timeout = PATIENCE
    server = HTTPServer(full_cloud.process.application(), sock, limits=Limits(timeout=PATIENCE))
    await server.start()
    yield where
    await server.stop()


class Connection:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def trickle(self, data: bytes, pause: float = 0.05) -> None:
        """Send byte by byte until the other side has had enough."""
        with contextlib.suppress(ConnectionError):
            for byte in data:
                await self.send(bytes([byte]))
                await asyncio.sleep(pause)

    async def status(self) -> int:
        """Read an answer; 0 when the connection was closed without one."""
        with contextlib.suppress(ConnectionError):
            line = await asyncio.wait_for(self.reader.readline(), 10)
            return int(line.split()[1]) if line else 0
        return 0

    async def closed(self) -> bool:
        """Wait until the other side closes."""
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), 10)
        return True


@contextlib.asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


def head(cloud: FullCloud, method: str = "POST", path: str = "/compute/v2.1/servers", **headers: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: cloud", f"x-auth-token: {cloud.admin.token}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def ask(cloud: FullCloud, address: tuple[str, int]) -> float:
    """Ask something as an ordinary client; return how long it took."""
    begin = time.monotonic()
    async with connected(address) as connection:
        await connection.send(head(cloud, "GET", "/compute/v2.1/servers?limit=1"))
        assert await connection.status() == 200
    return time.monotonic() - begin


async def others_are_served(
    cloud: FullCloud, address: tuple[str, int], until: "asyncio.Future[Any]", least: int = 1
) -> None:
    """Others are answered while the slow ones are still at it; by count, for machines differ in speed."""
    asked = 0
    while not until.done() or not asked:
        await ask(cloud, address)
        asked += 1
        await asyncio.sleep(0.02)
    assert asked >= least


PATHS = ["/compute/v2.1/servers", "/identity/v3/auth/tokens", "/image/v2/images", "/network/v2.0/ports"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_trickles(full_cloud: FullCloud, address: tuple[str, int], path: str) -> None:
    async def slow() -> int:
        async with connected(address) as connection:
            await connection.send(head(full_cloud, path=path, content_type="application/json", content_length=1000))
            sending = asyncio.create_task(connection.trickle(b'{"server": "' + b"x" * 988))
            status = await connection.status()
            assert await connection.closed()
            sending.cancel()
            return status

    begin = time.monotonic()
    clients = [asyncio.create_task(slow()) for _ in range(20)]
    everybody = asyncio.gather(*clients)
    await others_are_served(full_cloud, address, everybody, least=3)
    assert await everybody == [408] * 20
    assert time.monotonic() - begin < 60


async def test_a_head_that_trickles(full_cloud: FullCloud, address: tuple[str, int]) -> None:
    request = head(full_cloud, "GET", "/compute/v2.1/servers")[:-2] + b"x-slow: " + b"x" * 1000

    async def slow(at_once: int) -> int:
        async with connected(address) as connection:
            await connection.send(request[:at_once])
            sending = asyncio.create_task(connection.trickle(request[at_once:]))
            status = await connection.status()
            assert await connection.closed()
            sending.cancel()
            return status

    begin = time.monotonic()
    everybody = asyncio.gather(*(slow(at_once) for at_once in (0, 1, 10, 40, len(request) - 1000)))
    await others_are_served(full_cloud, address, everybody, least=3)
    assert await everybody == [408] * 5
    assert time.monotonic() - begin < 60


async def test_a_silent_client_is_let_go(address: tuple[str, int]) -> None:
    async with connected(address) as connection:
        assert await connection.status() == 408


async def test_the_second_request_of_a_connection_may_trickle_no_more_than_the_first(
    full_cloud: FullCloud, address: tuple[str, int]
) -> None:
    async with connected(address) as connection:
        await connection.send(head(full_cloud, "GET", "/compute/v2.1"))
        assert await connection.status() == 200
        length = 0
        while (line := await connection.reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        await connection.reader.readexactly(length)
        sending = asyncio.create_task(connection.trickle(head(full_cloud, "GET", "/compute/v2.1")))
        assert await connection.status() == 408
        assert await connection.closed()
        sending.cancel()


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_of_100_megabytes(full_cloud: FullCloud, address: tuple[str, int], path: str) -> None:
    async def large(**headers: Any) -> int:
        async with connected(address) as connection:
            await connection.send(head(full_cloud, path=path, content_type="application/json", **headers))

            async def send() -> None:
                with contextlib.suppress(ConnectionError):
                    for _ in range(100):
                        chunk = b" " * (1 << 20)
                        await connection.send(chunk if "content_length" in headers else b"100000\r\n" + chunk + b"\r\n")

            sending = asyncio.create_task(send())
            status = await connection.status()
            sending.cancel()
            return status

    both = asyncio.gather(large(content_length=100 << 20), large(transfer_encoding="chunked"))
    await others_are_served(full_cloud, address, both)
    assert list(await both) == [413, 413]


async def test_a_head_without_an_end(full_cloud: FullCloud, address: tuple[str, int]) -> None:
    async with connected(address) as connection:

        async def send() -> None:
            with contextlib.suppress(ConnectionError):
                await connection.send(head(full_cloud, "GET", "/compute/v2.1/servers")[:-2] + b"x-long: ")
                for _ in range(1000):
                    await connection.send(b"x" * 65536)

        sending = asyncio.create_task(send())
        assert await connection.status() == 431
        assert await connection.closed()
        sending.cancel()
    assert await ask(full_cloud, address) < 30


LOGIN = b"POST /identity/v3/auth/tokens HTTP/1.1\r\nhost: x\r\n"
GARBAGE = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "HTTP/9": b"GET / HTTP/9.9\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\nhost: x\r\n\r\n",
    "a space in the path": b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "a bad header": b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
    "a header of NUL": b"GET / HTTP/1.1\r\nhost: a\x00b\r\n\r\n",
    "two lengths": LOGIN + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
    "a negative length": LOGIN + b"content-length: -1\r\n\r\n",
    "a length of letters": LOGIN + b"content-length: abc\r\n\r\n",
    "a length and chunks": LOGIN + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunks": LOGIN + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "an unknown encoding": LOGIN + b"transfer-encoding: zip\r\n\r\n",
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_what_is_not_http(full_cloud: FullCloud, address: tuple[str, int], what: str) -> None:
    async with connected(address) as connection:
        await connection.send(GARBAGE[what])
        assert await connection.status() in (400, 404, 408, 411, 501)
    assert await ask(full_cloud, address) < 30


URLS = {
    "long": ("/compute/v2.1/servers/" + "x" * 20_000, (404, 414)),
    "a long query": ("/compute/v2.1/servers?name=" + "x" * 20_000, (200, 400, 414)),
    "many slashes": ("/compute/v2.1" + "/" * 5000, (404, 400)),
    "many dots": ("/compute/v2.1" + "/.." * 5000, (404, 400)),
    "dots out of it": ("/compute/../../../../etc/passwd", (300, 404, 400)),
    "half a percent": ("/compute/v2.1/servers/%", (404, 400)),
    "a bad percent": ("/compute/v2.1/servers/%zz", (404, 400)),
    "bytes": ("/compute/v2.1/servers/%ff%fe", (404, 400)),
    "U+0000": ("/compute/v2.1/servers/%00", (404, 400)),
    "a fragment": ("/compute/v2.1/servers#zork", (200, 400)),
    "a whole URL": ("http://elsewhere.example.org/compute/v2.1/servers?limit=1", (200, 400)),
    "a URL of nothing": ("*", (400, 404, 405)),
}


@pytest.mark.parametrize("what", URLS)
async def test_odd_urls(full_cloud: FullCloud, address: tuple[str, int], what: str) -> None:
    path, statuses = URLS[what]
    async with connected(address) as connection:
        await connection.send(head(full_cloud, "GET", path))
        assert await connection.status() in statuses


async def test_many_clients_that_go_away(full_cloud: FullCloud, address: tuple[str, int]) -> None:
    """Connections that are cut in the middle of a request leave nothing behind."""
    for cut in (b"", b"POST", head(full_cloud, content_length=1000), head(full_cloud, content_length=9) + b"{}"):
        for _ in range(50):
            async with connected(address) as connection:
                await connection.send(cut)
    assert await ask(full_cloud, address) < 30
