"""The screen of a simulated guest: a VNC server (RFB 3.3 to 3.8) that draws a square for each key pressed."""

import asyncio
import struct
from typing import Final

from micronova.virt.fake.guests import FakeGuest

WIDTH: Final = 320
HEIGHT: Final = 200
BLOCK: Final = 16  # pixels of a square's side
_COLUMNS: Final = WIDTH // BLOCK
_ROWS: Final = 5  # of squares, at the bottom
_MOST_TEXT: Final = 65_536  # bytes of clipboard that are accepted

# Bits per pixel, depth, big-endian, true colour; the greatest red, green and blue; their shifts; padding.
_FORMAT: Final = struct.Struct(">BBBBHHHBBB3x")
_RAW: Final = 0

# The types of messages from clients, and the length of the rest of each.
_SET_FORMAT, _SET_ENCODINGS, _WANT_UPDATE, _KEY, _POINTER, _CUT_TEXT = 0, 2, 3, 4, 5, 6
_LENGTHS: Final = {_SET_FORMAT: 19, _SET_ENCODINGS: 3, _WANT_UPDATE: 9, _KEY: 7, _POINTER: 5, _CUT_TEXT: 7}

_SKY: Final = [(24, 40, 72), (32, 64, 112), (48, 96, 152), (64, 136, 176), (232, 176, 88)]
_KEY_COLOURS: Final = [(240, 240, 240), (240, 96, 80), (96, 208, 112), (96, 152, 240), (240, 208, 80)]


class Picture:
    """The pixels, as bands of colour with a square for each key."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._shifts = (16, 8, 0)
        self._order = "<I"

    def set_format(self, data: bytes) -> None:
        """Set the client's pixel format; only 32 bits with 8 bits per colour are supported."""
        bits, _, big, true_colour, red, green, blue, *shifts = _FORMAT.unpack(data)
        if bits != 32 or not true_colour or {red, green, blue} != {255} or len(set(shifts) & {0, 8, 16, 24}) != 3:
            raise EOFError("only true colours in 32 bits are shown")
        self._shifts = (shifts[0], shifts[1], shifts[2])
        self._order = ">I" if big else "<I"

    def press(self, key: int) -> None:
        """Add the square of a key; when the picture is full, remove the oldest row."""
        if len(self._keys) == _COLUMNS * _ROWS:
            del self._keys[:_COLUMNS]
        self._keys.append(key)

    def draw(self) -> bytes:
        """Return the whole picture as one rectangle."""
        return struct.pack(">HHHHi", 0, 0, WIDTH, HEIGHT, _RAW) + self.pixels()

    def pixels(self) -> bytes:
        """Return the pixels, line by line."""
        band = -(-HEIGHT // len(_SKY))
        return b"".join(self._line(y, self._pixel(_SKY[y // band])) for y in range(HEIGHT))

    def _line(self, y: int, background: bytes) -> bytes:
        row, within = divmod(y - (HEIGHT - _ROWS * BLOCK), BLOCK)
        if row < 0 or not within:
            return background * WIDTH
        shown = self._keys[row * _COLUMNS : (row + 1) * _COLUMNS]
        blocks = [background + self._pixel(_KEY_COLOURS[key % len(_KEY_COLOURS)]) * (BLOCK - 1) for key in shown]
        return b"".join(blocks) + background * (BLOCK * (_COLUMNS - len(shown)))

    def _pixel(self, colour: tuple[int, int, int]) -> bytes:
        red, green, blue = (value << shift for value, shift in zip(colour, self._shifts, strict=True))
        # The unused byte is set: noVNC 1.3 takes it for the opacity of some pixels.
        rest = 0xFFFFFFFF ^ sum(255 << shift for shift in self._shifts)
        return struct.pack(self._order, rest | red | green | blue)


async def show_screen(guest: FakeGuest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Show the picture to one viewer until the connection ends."""
    await _handshake(reader, writer)
    name = f"{guest.name} (simulated)".encode()
    writer.write(struct.pack(">HH", WIDTH, HEIGHT) + _FORMAT.pack(32, 24, 0, 1, 255, 255, 255, 16, 8, 0))
    writer.write(struct.pack(">I", len(name)) + name)
    picture = Picture()
    changed, wanted = True, False
    while True:
        kind = (await reader.readexactly(1))[0]
        length = _LENGTHS.get(kind)
        if length is None:
            return
        data = await reader.readexactly(length)
        if kind == _SET_FORMAT:
            picture.set_format(data[3:])
            changed = True
        elif kind == _SET_ENCODINGS:
            await reader.readexactly(4 * struct.unpack(">xH", data)[0])  # clients always support raw pixels
        elif kind == _CUT_TEXT:
            size = struct.unpack(">3xI", data)[0]
            if size > _MOST_TEXT:
                return
            await reader.readexactly(size)
        elif kind == _KEY and data[0]:
            picture.press(struct.unpack(">3xI", data)[0])
            changed = True
        elif kind == _WANT_UPDATE:
            wanted = True
            changed = changed or not data[0]  # otherwise it wants only changes
        if wanted and changed:
            writer.write(struct.pack(">BxH", 0, 1) + picture.draw())
            await writer.drain()
            changed = wanted = False


async def _handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Agree on a version and on no password: the console proxy checks who may connect."""
    writer.write(b"RFB 003.008\n")
    version = await reader.readexactly(12)
    if version < b"RFB 003.007\n":
        writer.write(struct.pack(">I", 1))
    else:
        writer.write(b"\x01\x01")
        if await reader.readexactly(1) != b"\x01":
            raise EOFError("there is only the security type None")
        if version >= b"RFB 003.008\n":
            writer.write(struct.pack(">I", 0))
    await reader.readexactly(1)  # whether to share the screen: it is shared
