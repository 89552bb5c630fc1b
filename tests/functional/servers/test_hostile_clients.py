"""Malicious clients, over a real socket: they are refused or ignored, and other clients are served meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from micronova.http.server import HTTPServer
from micronova.http.sockets import listen
from tests.functional.cloud import ON_CLUSTER, Cloud, CloudOptions, SeparateProcesses

CLOUD = CloudOptions(
    hosts=2,
    settings={"default": {"report_interval": 5.0, "service_down_time": 60.0}},
    # In one process it is only for bodies; elsewhere it is for headers too, and the machine may be slow.
    api={"api": {"client_timeout": 5.0 if ON_CLUSTER else 1.0}},
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(cloud: Cloud) -> AsyncIterator[int]:
    """The port of the API; a cloud in one process gets one."""
    if isinstance(cloud, SeparateProcesses):
        yield int(cloud.url.rpartition(":")[2])
        return
    sock = listen("127.0.0.1", 0)
    number = sock.getsockname()[1]
    server = HTTPServer(cloud.process.application(), sock)
    await server.start()
    yield number
    await server.stop()


def _head(method: str, path: str, **headers: str) -> bytes:
    lines = [f"{method} /compute/v2.1{path} HTTP/1.1", "Host: cloud", "X-Auth-Token: user:project"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _status(reader: asyncio.StreamReader) -> int:
    """Return the status of a response that comes in time; 0 if the connection was closed instead."""
    line = await asyncio.wait_for(reader.readline(), 20)
    return int(line.split()[1]) if line else 0


async def _is_served(port: int) -> None:
    """Assert that another client gets its answer meanwhile."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_head("GET", "/servers", Connection="close"))
    assert await _status(reader) == 200
    writer.close()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # the server may have closed the connection
        await writer.wait_closed()


async def test_a_body_of_100_megabytes_that_is_announced(port: int) -> None:
    """It is refused by its length before it is read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_head("POST", "/servers", Content_Type="application/json", Content_Length=str(100 << 20)) + b"{")
    assert await _status(reader) == 413
    await _is_served(port)
    await _closed(writer)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_100_megabytes_that_is_sent(port: int, chunked: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = {"Transfer_Encoding": "chunked"} if chunked else {"Content_Length": str(100 << 20)}
    writer.write(_head("POST", "/servers", Content_Type="application/json", **headers))
    piece = b" " * (1 << 20)

    async def send() -> None:
        with contextlib.suppress(OSError):  # the server may close the connection before it has read everything
            for _ in range(100):
                writer.write(b"100000\r\n" + piece + b"\r\n" if chunked else piece)
                await writer.drain()

    sending = asyncio.create_task(send())
    await _is_served(port)
    assert await _status(reader) == 413
    await _is_served(port)
    sending.cancel()
    await _closed(writer)


async def test_slow_bodies_are_given_up(port: int) -> None:
    """Fifty clients announce a body and send it byte by byte."""
    slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    for _, writer in slow:
        writer.write(_head("POST", "/servers", Content_Type="application/json", Content_Length="100000"))
        writer.write(b"{")
    for _ in range(5):
        await _is_served(port)
        for _, writer in slow:
            writer.write(b" ")
    statuses = await asyncio.gather(*(_status(reader) for reader, _ in slow))
    assert set(statuses) == {408}
    for _, writer in slow:
        await _closed(writer)


async def test_clients_that_say_nothing(port: int) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    for _, writer in half:
        writer.write(b"GET /compute/v2.1/servers HTTP/1.1\r\nHost: c")
    await _is_served(port)
    for _, writer in silent + half:
        await _closed(writer)
    await _is_served(port)


async def test_clients_that_hang_up_in_the_middle(port: int) -> None:
    for length in (1, 10, 1000):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_head("POST", "/servers", Content_Type="application/json", Content_Length="5000"))
        writer.write(b"{" * length)
        await writer.drain()
        writer.transport.abort()
    await _is_served(port)


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"GET /compute/v2.1/servers HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nHost: c\r\n\r\n",
        b"GET /compute/v2.1/servers HTTP/1.1\r\nHost: c\r\n" + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
        b"POST /compute/v2.1/servers HTTP/1.1\r\nHost: c\r\nContent-Length: -5\r\n\r\n",
        b"POST /compute/v2.1/servers HTTP/1.1\r\nHost: c\r\nContent-Length: many\r\n\r\n",
        b"POST /compute/v2.1/servers HTTP/1.1\r\nHost: c\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /compute/v2.1/servers/%ff%fe HTTP/1.1\r\nHost: c\r\nX-Auth-Token: a:b\r\nConnection: close\r\n\r\n",
        b"GET /compute/v2.1/servers HTTP/1.1\r\nHost: c\r\nX-Auth-Token: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET /compute/v2.1/servers?name=\xff HTTP/1.1\r\nHost: c\r\nX-Auth-Token: a:b\r\nConnection: close\r\n\r\n",
    ],
)
async def test_malformed_http(port: int, raw: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    try:
        writer.write_eof()
        status = await _status(reader)
    except (OSError, TimeoutError):
        status = 0
    assert status < 500, status
    await _closed(writer)
    await _is_served(port)


async def test_deep_nesting_and_bad_encodings_do_not_stop_others(port: int) -> None:
    bodies = [b"[" * 100_000, b'{"a":' * 15_000, b"\xff" * 100_000, b'"' + b"\\u0000" * 15_000 + b'"']
    for body in bodies:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_head("POST", "/servers", Content_Type="application/json", Content_Length=str(len(body))) + body)
        await _is_served(port)
        assert await _status(reader) == 400
        await _closed(writer)


async def test_an_expensive_pattern_does_not_stop_others(port: int) -> None:
    """An expensive regular expression is refused, or does not delay other requests."""
    asked = "/servers?name=%28a%7Ca%29%2A%28a%7Ca%29%2A%28a%7Ca%29%2A%24"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_head("GET", asked, Connection="close"))
    await _is_served(port)
    assert await _status(reader) in (200, 400)
    await _closed(writer)
