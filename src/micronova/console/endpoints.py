"""Connecting to a guest's console, and to nothing else."""

import asyncio
import os
from pathlib import Path

from micronova.objects.console import ConsoleEndpoint
from micronova.objects.errors import Unavailable

CONNECT_TIMEOUT = 10.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Connector:
    """Opens connections to consoles.

    The address comes from the compute host. So that a host cannot make the proxy connect to other services of the
    proxy's machine, Unix sockets are accepted only below one directory.
    """

    def __init__(self, sockets: Path) -> None:
        self._sockets = sockets

    async def open(self, endpoint: ConsoleEndpoint) -> Streams:
        """Connect; raise Unavailable with a reason for the user if that fails."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if endpoint.path:
                    reader, writer = await self._open_socket(Path(endpoint.path))
                else:
                    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
                writer.write(endpoint.secret.encode())
                return reader, writer
        except TimeoutError:
            raise Unavailable("The console does not answer just now: try again later.") from None
        except OSError as error:
            raise Unavailable(f"The console cannot be reached from here ({error.strerror or 'no answer'}).") from None

    async def _open_socket(self, path: Path) -> Streams:
        folder = await asyncio.to_thread(self._open_folder, path)
        try:
            # By the directory's descriptor, because the path may be too long for a socket address.
            return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)

    def _open_folder(self, path: Path) -> int:
        parent = path.parent.resolve()
        if not parent.is_relative_to(self._sockets.resolve()):
            raise Unavailable("The console is a Unix socket on another machine: it can be reached only from there.")
        return os.open(parent, os.O_PATH | os.O_DIRECTORY)
