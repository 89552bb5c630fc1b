"""The screen of a simulated guest by SPICE: the picture that VNC shows too, with a square for each key pressed.

A viewer opens a connection for each channel: the main one, which names the others, the display and the inputs. No
password is wanted: the console proxy checks who may connect.
"""

import asyncio
import struct
from typing import Final

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from micronova.virt.fake.guests import FakeGuest
from micronova.virt.fake.screen import HEIGHT, WIDTH, Picture

_MAGIC: Final = b"REDQ"
_VERSION: Final = (2, 2)
_LINK: Final = struct.Struct("<4sIII")  # magic, major and minor version, size of the rest
_LINK_MESSAGE: Final = struct.Struct("<IBBIII")  # session, channel, its number, counts of capabilities, their offset
_LONGEST_LINK: Final = 4096
_LONGEST_MESSAGE: Final = 65_536
_KEY_BITS: Final = 1024  # the protocol has no other
_TICKET: Final = _KEY_BITS // 8

_OK, _INVALID, _WRONG_VERSION, _NO_CHANNEL = 0, 3, 4, 9
_CHOOSES_LOGIN, _LOGIN_BY_TICKET, _SHORT_HEADERS = 1 << 0, 1 << 1, 1 << 3
_SHORT: Final = struct.Struct("<HI")  # type and size of a message
_LONG: Final = struct.Struct("<QHII")  # serial number, type, size, list of parts

_MAIN, _DISPLAY, _INPUTS = 1, 2, 3
_INIT, _CHANNELS = 103, 104  # of the main channel
_ATTACH_CHANNELS: Final = 104
_SURFACE, _COPY, _MARK = 314, 304, 102  # of the display
_KEY_DOWN: Final = 101
_MODIFIERS: Final = 101

_MOUSE_OF_SERVER: Final = 1
_XRGB, _PRIMARY = 32, 1
_PUT, _BITMAP, _BITMAP_32, _TOP_DOWN = 8, 0, 8, 4


class SpiceScreen:
    """The SPICE server of one guest."""

    def __init__(self) -> None:
        self._picture = Picture()
        self._displays: set[_Channel] = set()
        self._key = rsa.generate_private_key(public_exponent=65_537, key_size=_KEY_BITS)

    async def serve(self, guest: FakeGuest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one channel until the connection ends."""
        channel = await self._link(reader, writer)
        if channel.kind == _MAIN:
            # Session, displays, mouse modes (supported, now), agent (none), its tokens, time, a hint about memory.
            channel.send(_INIT, struct.pack("<8I", 1, 1, _MOUSE_OF_SERVER, _MOUSE_OF_SERVER, 0, 0, 0, 0))
        elif channel.kind == _INPUTS:
            channel.send(_MODIFIERS, struct.pack("<H", 0))
        else:
            channel.send(_SURFACE, struct.pack("<5I", 0, WIDTH, HEIGHT, _XRGB, _PRIMARY))
            channel.send(_COPY, _copy(self._picture.pixels()))
            channel.send(_MARK)
            self._displays.add(channel)
        try:
            while True:
                self._received(channel, *await channel.receive())
                await writer.drain()
        finally:
            self._displays.discard(channel)

    def _received(self, channel: "_Channel", kind: int, data: bytes) -> None:
        if channel.kind == _MAIN and kind == _ATTACH_CHANNELS:
            channel.send(_CHANNELS, struct.pack("<IBBBB", 2, _DISPLAY, 0, _INPUTS, 0))
        elif channel.kind == _INPUTS and kind == _KEY_DOWN and len(data) == 4:
            self._picture.press(struct.unpack("<I", data)[0])
            for display in self._displays:
                display.send(_COPY, _copy(self._picture.pixels()))

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> "_Channel":
        """Agree on the version and on what both sides can do, and take the ticket."""
        magic, major, _, size = _LINK.unpack(await reader.readexactly(_LINK.size))
        if magic != _MAGIC or not _LINK_MESSAGE.size <= size <= _LONGEST_LINK:
            raise EOFError("this is not SPICE")
        message = await reader.readexactly(size)
        _, kind, _, common, _, offset = _LINK_MESSAGE.unpack_from(message)
        if offset + 4 * common > size:
            self._reply(writer, _INVALID)
            raise EOFError("the list of capabilities is cut off")
        able = struct.unpack_from("<I", message, offset)[0] if common else 0
        error = _WRONG_VERSION if major != _VERSION[0] else _OK if kind in (_MAIN, _DISPLAY, _INPUTS) else _NO_CHANNEL
        self._reply(writer, error)
        if error:
            raise EOFError(f"the channel was refused with error {error}")
        await reader.readexactly((4 if able & _CHOOSES_LOGIN else 0) + _TICKET)
        writer.write(struct.pack("<I", _OK))
        return _Channel(kind, reader, writer, short=bool(able & _SHORT_HEADERS))

    def _reply(self, writer: asyncio.StreamWriter, error: int) -> None:
        key = self._key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        able = _CHOOSES_LOGIN | _LOGIN_BY_TICKET | _SHORT_HEADERS
        offset = 4 + len(key) + 12
        reply = struct.pack("<I", error) + key + struct.pack("<IIII", 1, 0, offset, able)
        writer.write(_LINK.pack(_MAGIC, *_VERSION, len(reply)) + reply)


class _Channel:
    """One connection, after the link."""

    def __init__(self, kind: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, short: bool) -> None:
        self.kind = kind
        self._reader = reader
        self._writer = writer
        self._short = short
        self._sent = 0

    def send(self, kind: int, data: bytes = b"") -> None:
        self._sent += 1
        header = _SHORT.pack(kind, len(data)) if self._short else _LONG.pack(self._sent, kind, len(data), 0)
        self._writer.write(header + data)

    async def receive(self) -> tuple[int, bytes]:
        """Return the type and the content of the next message."""
        if self._short:
            kind, size = _SHORT.unpack(await self._reader.readexactly(_SHORT.size))
        else:
            _, kind, size, _ = _LONG.unpack(await self._reader.readexactly(_LONG.size))
        if size > _LONGEST_MESSAGE:
            raise EOFError("the message is too long")
        return kind, await self._reader.readexactly(size)


def _copy(pixels: bytes) -> bytes:
    """Return the message that draws the whole picture."""
    area = struct.pack("<4I", 0, 0, HEIGHT, WIDTH)
    base = struct.pack("<I", 0) + area + b"\0"  # the surface, and no clipping
    rest = area + struct.pack("<HBB3I", _PUT, 0, 0, 0, 0, 0)  # no scaling and no mask
    descriptor = struct.pack("<QBBII", 0, _BITMAP, 0, WIDTH, HEIGHT)
    bitmap = struct.pack("<BBIIII", _BITMAP_32, _TOP_DOWN, WIDTH, HEIGHT, 4 * WIDTH, 0)
    return base + struct.pack("<I", len(base) + 4 + len(rest)) + rest + descriptor + bitmap + pixels
