"""Packets on Unix sockets (SOCK_SEQPACKET), with descriptors, in an event loop."""

import array
import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from micronova.exporter.messages import LIMIT

MOST_DESCRIPTORS: Final = 4
_CREDENTIALS: Final = struct.Struct("3i")  # pid, user and group of the other end


def listen(path: Path, owner: int) -> socket.socket:
    """Make a socket that only its owner can connect to; for root."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(str(path))
    path.chmod(0o600)
    os.chown(path, owner, -1)
    made.listen(128)
    made.setblocking(False)
    return made


def peer(connection: socket.socket) -> int:
    """Return the user at the other end, as the kernel names it."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


async def connect(path: Path) -> socket.socket:
    """Connect to a socket."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    try:
        while True:
            try:
                made.connect(str(path))
            except BlockingIOError:  # the queue of connections is full
                await asyncio.sleep(0.05)
            else:
                return made
    except BaseException:
        made.close()
        raise


async def send(connection: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a packet."""
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection.sendmsg([packet], passed)
        except BlockingIOError:
            await _ready(loop.add_writer, loop.remove_writer, connection)
        else:
            return


async def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet with its descriptors; an empty one at the end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            packet, descriptors, flags, _ = socket.recv_fds(connection, LIMIT, MOST_DESCRIPTORS)
        except BlockingIOError:
            await _ready(loop.add_reader, loop.remove_reader, connection)
            continue
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            close(descriptors)
            raise OSError("a packet was too large")
        return packet, descriptors


def close(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for each in descriptors:
        os.close(each)


def done(future: "asyncio.Future[None]") -> None:
    """Set the result of a future that has none."""
    if not future.done():
        future.set_result(None)


async def _ready(add: Callable[..., Any], remove: Callable[..., Any], connection: socket.socket) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(connection, done, future)
    try:
        await future
    finally:
        remove(connection)
