"""Consoles of simulated guests: sockets on the loopback interface, opened when they are first requested."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.virt.fake.guests import FakeGuest
from micronova.virt.fake.screen import show_screen
from micronova.virt.fake.spice import SpiceScreen
from micronova.virt.fake.terminal import run_terminal

ADDRESS = "127.0.0.1"

Serve = Callable[[FakeGuest, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_SERVERS: dict[ConsoleProtocol, Callable[[], Serve]] = {
    "vnc": lambda: show_screen,
    "spice": lambda: SpiceScreen().serve,
    "serial": lambda: run_terminal,
}


class _Console:
    """One listening socket and its connections."""

    def __init__(self, guest: FakeGuest, serve: Serve) -> None:
        self._guest = guest
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        """Open the socket and return its port."""
        self._server = await asyncio.start_server(self._accept, ADDRESS, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def end(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()

    async def wait_closed(self) -> None:
        """Wait until all connections have ended."""
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._handle(reader, writer), name=f"console of {self._guest.uuid}")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):  # the client may disconnect at any moment
                await self._serve(self._guest, reader, writer)
        finally:
            writer.close()


class FakeConsoles:
    """The consoles of one simulated host."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, ConsoleProtocol], tuple[_Console, int]] = {}
        self._lock = asyncio.Lock()

    async def open(self, protocol: ConsoleProtocol, guest: FakeGuest) -> ConsoleEndpoint:
        """Return where a guest's console is, and open it if it is not open."""
        async with self._lock:
            found = self._open.get((guest.uuid, protocol))
            if found is None:
                console = _Console(guest, _SERVERS[protocol]())
                found = self._open[guest.uuid, protocol] = console, await console.listen()
        return ConsoleEndpoint(host=ADDRESS, port=found[1])

    def end(self, uuid: str) -> None:
        """Close the consoles of a guest that has stopped."""
        for protocol in _SERVERS:
            found = self._open.pop((uuid, protocol), None)
            if found is not None:
                found[0].end()

    async def close(self) -> None:
        """Close them all."""
        consoles = [console for console, _ in self._open.values()]
        for uuid, _ in list(self._open):
            self.end(uuid)
        for console in consoles:
            await console.wait_closed()
