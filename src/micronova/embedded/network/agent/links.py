"""Changes of network devices, from netlink sockets that the privileged helper opens."""

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
    """Calls back when devices change in the cloud's namespace or outside of it."""

    def __init__(self, privileged: Privileged, changed: Callable[[], None]) -> None:
        self._privileged = privileged
        self._changed = changed
        self._sockets: dict[bool, socket.socket] = {}

    async def ensure(self, *, outside: bool = False) -> bool:
        """Watch devices; return False if they were watched already."""
        if outside in self._sockets:
            return False
        made = await self._privileged.open(v.WatchLinks(outside=outside))
        made.setblocking(False)
        self._sockets[outside] = made
        asyncio.get_running_loop().add_reader(made, self._read, made, outside)
        return True

    def close(self) -> None:
        """Close the sockets."""
        for each in self._sockets.values():
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        self._sockets.clear()

    def _read(self, sock: socket.socket, outside: bool) -> None:
        relevant = not outside
        try:
            while data := sock.recv(1 << 16):
                # Outside the cloud's namespace only taps matter.
                relevant = relevant or any(name.startswith("tap") for name in appeared(data))
        except BlockingIOError:
            pass
        except OSError:  # messages were lost: look at the devices
            relevant = True
        if relevant:
            self._changed()


def appeared(data: bytes) -> Iterator[str]:
    """Yield the names of new and changed devices in netlink messages."""
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
