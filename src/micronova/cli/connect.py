"""`micronova connect`: to a floating IP from this machine, outside of the cloud's network namespace."""

import asyncio
import os
import select
import socket
from pathlib import Path

from micronova.cli.machine import helper_socket
from micronova.cli.state import StateDirectory, default_directory
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.privileged.client import PrivilegedClient, PrivilegedError
from micronova.privileged.verbs import Connect

_BLOCK = 1 << 16


def connect(address: str, port: int, directory: Path | None) -> None:
    """Join standard input and output to a TCP connection: what ssh expects of a ProxyCommand."""
    place = StateDirectory((directory or default_directory()).absolute())
    try:
        connection = asyncio.run(_open(place, address, port))
    except Unavailable:
        raise MicronovaError(
            f"No cloud with real guests runs in {place.path}, or it is not yours: name its --dir, or use sudo."
        ) from None
    except PrivilegedError as error:
        reason = str(error).removeprefix("Connect: ")
        raise MicronovaError(f"{address} port {port} cannot be reached: {reason}.") from None
    with connection:
        _relay(connection)


async def _open(place: StateDirectory, address: str, port: int) -> socket.socket:
    client = PrivilegedClient(helper_socket(place))
    try:
        return await client.open(Connect(address=address, port=port))
    finally:
        await client.close()


def _relay(connection: socket.socket) -> None:
    """Copy both ways until the other end has no more to say."""
    sources: list[int | socket.socket] = [0, connection]
    while connection in sources:
        ready, _, _ = select.select(sources, [], [])
        if 0 in ready:
            data = os.read(0, _BLOCK)
            if data:
                connection.sendall(data)
            else:
                sources.remove(0)
                connection.shutdown(socket.SHUT_WR)
        if connection in ready:
            data = connection.recv(_BLOCK)
            if not data:
                return
            while data:
                data = data[os.write(1, data) :]
