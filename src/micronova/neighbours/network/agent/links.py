"""Devices that come and go: what the kernel tells, through sockets that the privileged helper opened."""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator

from micronova.privileged import verbs as v
from micronova.privileged.client import Privileged

_MESSAGE = struct.Struct("=IHHII")  # length, type, flags, sequence, sender
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_ABOUT_LINK = 16  # bytes between a message's header and its attributes
_NEW_LINK = 16  # RTM_NEWLINK
_NAME = 3  # IFLA_IFNAME


class LinkWatch:
    """Calls back when devices change, in the cloud's namespace or outside."""

    def __init__(self, privileged: Privileged, changed: Callable[[], None]) -> None:
        self._privileged = privileged
        self._changed = changed
        self._sockets: dict[bool, socket.socket] = {}

    async def ensure(self, *, outside: bool = False) -> bool:
        """Watch, unless that is done already; say whether it was begun just now."""
        if outside in self._sockets:
            return False
        made = await self._privileged.open(v.WatchLinks(outside=outside))
        made.setblocking(False)
        self._sockets[outside] = made
        asyncio.get_running_loop().add_reader(made, self._read, made, outside)
        return True

    def close(self) -> None:
        """Watch no more."""
        for each in self._sockets.values():
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        self._sockets.clear()

    def _read(self, sock: socket.socket, outside: bool) -> None:
        concerned = not outside
        try:
            while data := sock.recv(1 << 16):
                # Outside, the machine has devices of its own, which need not wake anybody.
                concerned = concerned or any(name.startswith("tap") for name in appeared(data))
        except BlockingIOError:
            pass
        except OSError:  # so many at once that some were lost: look
            concerned = True
        if concerned:
            self._changed()


def appeared(data: bytes) -> Iterator[str]:
    """Name the devices that are new, or changed, by the kernel's messages."""
    while len(data) >= _MESSAGE.size:
        length, kind, *_ = _MESSAGE.unpack_from(data)
        if length < _MESSAGE.size:
            return
        if kind == _NEW_LINK:
            yield from _names(data[_MESSAGE.size + _ABOUT_LINK : length])
        data = data[_aligned(length) :]


def _names(attributes: bytes) -> Iterator[str]:
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if length < _ATTRIBUTE.size:
            return
        if kind == _NAME:
            yield attributes[_ATTRIBUTE.size : length].rstrip(b"\0").decode(errors="replace")
        attributes = attributes[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
