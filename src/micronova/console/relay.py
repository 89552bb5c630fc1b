"""The relay of a compute host, through which console proxies on other machines reach guests' consoles.

Consoles of guests are Unix sockets, or listen on the loopback interface, without a password. The relay accepts a proxy
by a secret that is valid once and for a short time. The host sends the secret to the proxy with the console's address,
which is requested only for the bearer of a token.
"""

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from random import Random

from micronova.console.endpoints import Connector, Streams
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

TICKET_TIME = 60.0
SECRET_TIMEOUT = 10.0
SECRET_DIGITS = 64
CHUNK = 65_536
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, not listened on


class ConsoleRelay:
    """Connects console proxies to this host's consoles; without a listen address or a socket it does nothing."""

    def __init__(self, listen: str, clock: Clock, random: Random, listening: socket.socket | None = None) -> None:
        """`listening` is a Unix socket on which a proxy on this machine connects, instead of an address."""
        self._listening = listening
        address, _, port = listen.rpartition(":")
        self._address = address.strip("[]")
        self._port = int(port) if port else 0
        self._clock = clock
        self._random = random
        self._connector = Connector(Path("/"))
        self._tickets: dict[str, tuple[ConsoleEndpoint, float]] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, if there is where."""
        if self._listening is not None:
            self._server = await asyncio.start_unix_server(self._accept, sock=self._listening)
            return
        if not self._address:
            return
        try:
            self._server = await asyncio.start_server(self._accept, self._address, self._port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise MicronovaError(
                f"Cannot listen on {self._address}:{self._port} (console.relay_listen): {reason}."
            ) from None
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def offer(self, endpoint: ConsoleEndpoint) -> ConsoleEndpoint:
        """Return the relay's address for a console; without a relay, the console's own address."""
        if self._server is None:
            return endpoint
        now = self._clock.monotonic()
        self._tickets = {key: ticket for key, ticket in self._tickets.items() if ticket[1] > now}
        secret = f"{self._random.getrandbits(4 * SECRET_DIGITS):0{SECRET_DIGITS}x}"
        self._tickets[secret] = endpoint, now + TICKET_TIME
        if self._listening is not None:
            return ConsoleEndpoint(path=self._listening.getsockname(), secret=secret)
        host = socket.gethostname() if self._address in _EVERYWHERE else self._address
        return ConsoleEndpoint(host=host, port=self._port, secret=secret)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._handle((reader, writer)), name="console-relay")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _handle(self, proxy: Streams) -> None:
        reader, writer = proxy
        try:
            async with asyncio.timeout(SECRET_TIMEOUT):
                secret = (await reader.readexactly(SECRET_DIGITS)).decode("latin-1")
            endpoint, until = self._tickets.pop(secret, (None, 0.0))
            if endpoint is None or until <= self._clock.monotonic():
                log.warning(
                    "refused a console connection from %s: its secret is unknown or has expired",
                    writer.get_extra_info("peername"),
                )
                return
            guest = await self._connector.open(endpoint)
            try:
                await _carry(proxy, guest)
            finally:
                guest[1].close()
        except (OSError, EOFError, TimeoutError, MicronovaError) as error:
            log.info("a console connection was not relayed: %s", error)
        finally:
            writer.close()


async def _carry(one: Streams, other: Streams) -> None:
    """Copy bytes in both directions until one side disconnects."""
    tasks = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
