"""The client of OpenStack services: against a server on a socket, and an application of this process."""

import asyncio
import contextlib
import gzip
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from micronova.http.client import (
    MAX_ANSWER,
    Answer,
    ASGITransport,
    HTTPTransport,
    ServiceClient,
    host_connector,
    raise_for,
    unix_url,
)
from micronova.objects.errors import NotFound, Unauthorized, Unavailable

HEAD = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
async def packed() -> AsyncIterator[tuple[str, list[bytes]]]:
    """The URL of a server that answers with the gzip data in a list."""
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        [body] = bodies
        writer.write((HEAD % len(body)).encode() + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield f"http://{host}:{port}", bodies


@pytest.mark.parametrize("size", [MAX_ANSWER, MAX_ANSWER + 1])
async def test_an_answer_has_a_largest_size(packed: tuple[str, list[bytes]], size: int) -> None:
    url, bodies = packed
    bodies.append(gzip.compress(bytes(size), 1))  # little on the wire: what counts is what it unpacks to
    transport = HTTPTransport(url)
    try:
        if size <= MAX_ANSWER:
            assert len((await transport.request("GET", "/", {}, None)).body) == size
        else:
            with pytest.raises(Unavailable, match=r"sent more than 67,108,864 bytes"):
                await transport.request("GET", "/", {}, None)
    finally:
        await transport.close()


async def test_a_read_outlives_the_connections_of_a_process_that_was_replaced() -> None:
    """Behind a proxy: the kept connections lead to the old process, new ones to the new process."""
    together = asyncio.Barrier(4)
    replaced = asyncio.Event()
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun_after = replaced.is_set()
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                asked.append(head.decode().partition(" ")[0])
                if replaced.is_set() and not begun_after:
                    break
                if not begun_after:
                    await together.wait()  # so that each of the first requests has a connection
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    transport = HTTPTransport(f"http://{host}:{port}", timeout=30.0)
    async with server:
        await asyncio.gather(*(transport.request("GET", "/", {}, None) for _ in range(4)))
        replaced.set()
        with pytest.raises(Unavailable):
            await transport.request("POST", "/", {}, b"{}")
        assert asked.count("POST") == 1  # it may have been carried out
        assert (await transport.request("GET", "/", {}, None)).status == 200
        await transport.close()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_status_that_passes_is_unavailable(status: int) -> None:
    """Whoever gets Unavailable tries again later."""
    with pytest.raises(Unavailable) as raised:
        raise_for(Answer(status, {}, b"{}"), "GET", "/v2.0/ports?limit=1")
    assert raised.value.details["status"] == status


def test_a_404_counts_only_if_a_service_says_it() -> None:
    with pytest.raises(Unavailable, match="not of an OpenStack service"):
        raise_for(Answer(404, {"server": "nginx"}, b"<h1>404 Not Found</h1>"), "GET", "/v2/images/1")
    with pytest.raises(NotFound):
        raise_for(Answer(404, {"x-openstack-request-id": "req-1"}, b"{}"), "GET", "/v2/images/1")


async def test_a_service_that_refuses_the_token_of_the_service_user_is_unavailable() -> None:
    """It may not reach the identity service, or its settings are wrong. Nothing that a user asked for ends by that."""
    made: list[str] = []

    class Refusing:
        async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
            body = b'{"error": {"message": "The clocks differ."}}'
            return Answer(401, {"x-openstack-request-id": "req-1"}, body)

        async def close(self) -> None:
            """There is nothing to close."""

    async def token() -> str:
        made.append("token")
        return f"token {len(made)}"

    client = ServiceClient(Refusing(), token, prefix="/network", renew=lambda: None)
    with pytest.raises(
        Unavailable, match=r"GET /network/v2.0/ports: .* does not accept who we are: The clocks differ."
    ):
        await client.request("GET", "/v2.0/ports?limit=1")
    assert len(made) == 2, "a new token was tried"
    with pytest.raises(Unauthorized):  # the user has to get another token
        await client.request("GET", "/v2.0/ports", token="of a user")


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {"content-type": "text/html"}, b"<h1>We are back soon</h1>"),
        Answer(200, {}, b'{"ports": [{"id": "'),
        Answer(302, {"location": "https://elsewhere/"}, b""),
    ],
    ids=["page", "part", "redirect"],
)
async def test_an_answer_that_is_none_of_the_service_ends_nothing(answer: Answer) -> None:
    """It is a proxy's, whose servers are being maintained, for example."""

    class Proxy:
        async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
            return answer

        async def close(self) -> None:
            """There is nothing to close."""

    async def token() -> str:
        return "token"

    with pytest.raises(Unavailable, match=r"GET /v2\.0/ports: the answer .* is not of an OpenStack service"):
        await ServiceClient(Proxy(), token).request("GET", "/v2.0/ports?limit=1")


async def test_a_service_on_a_unix_socket(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    place = tmp_path / "a socket/with%odd name"
    place.parent.mkdir()
    async with await asyncio.start_unix_server(answer, place):
        transport = HTTPTransport(f"{unix_url(place)}/network/")
        assert (await transport.request("GET", "/v2.0/ports?limit=1", {}, None)).json() == {}
        await transport.close()
    assert asked == [b"GET /network/v2.0/ports?limit=1 HTTP/1.1"]
    with pytest.raises(Unavailable, match="does not answer"):
        await HTTPTransport(unix_url(tmp_path / "none")).request("GET", "/", {}, None)


async def test_a_body_in_parts_reaches_an_application_of_this_process() -> None:
    received: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while not received or received[-1].get("more_body"):
            received.append(await receive())
        await send({"type": "http.response.start", "status": 204})

    async def parts(error: Exception | None) -> AsyncGenerator[bytes, None]:
        yield b"a"
        if error is not None:
            raise error
        yield b"b"

    answer = await ASGITransport(app).request("PUT", "/x", {"content-length": "2"}, parts(None))
    assert answer.status == 204
    assert b"".join(event["body"] for event in received) == b"ab"
    received.clear()
    await ASGITransport(app).request("PUT", "/x", {"content-length": "2"}, parts(ValueError("the disk fails")))
    assert [event["type"] for event in received] == ["http.request", "http.disconnect"]


def test_a_host_connects_only_to_the_socket_of_its_image_service() -> None:
    service = unix_url(Path("/run/image"))
    assert host_connector("http://image/v2?ticket=t", service) == (None, "http://image/v2?ticket=t")
    with pytest.raises(LookupError):
        host_connector(f"{unix_url(Path('/run/other'))}/v2", service)
