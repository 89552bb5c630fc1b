"""The connections of clients whose certificates of authorities are read again."""

import asyncio
import contextlib

from micronova.http.client import HTTPTransport


async def test_connections_from_before_are_closed_when_no_request_can_be_open() -> None:
    """Otherwise each SIGHUP, such as that of logrotate, would leave connections and a context of TLS."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    [port] = [each.getsockname()[1] for each in server.sockets]
    transport = HTTPTransport(f"http://127.0.0.1:{port}", timeout=4.0)  # also how long former connections are kept
    assert (await transport.request("GET", "/", {}, None)).status == 204  # the first one imports the HTTP client
    async with asyncio.timeout(14):  # idle connections are closed after 15 seconds in any case
        while not ended.is_set():
            assert (await transport.request("GET", "/", {}, None)).status == 204
            transport.renew()
            with contextlib.suppress(TimeoutError):  # each round has a connection of its own: descriptors are few
                await asyncio.wait_for(ended.wait(), 0.05)
    await transport.close()
    server.close()
