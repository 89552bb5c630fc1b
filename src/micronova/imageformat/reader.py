"""Reading here and there in a file that may lie about itself: short pieces, and only so many in all."""

import os
import struct
from typing import BinaryIO, Protocol

from micronova.imageformat.report import Malformed, Report

LIMIT = 1 << 20
"""The most bytes that one inspection reads, whatever the file says; honest headers need a tenth of it."""


class Reader:
    """Random access to a file's bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = stream.seek(0, os.SEEK_END)
        self.total = 0

    def some(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes: fewer where the file ends."""
        if offset < 0 or length < 0 or offset >= self.size:
            return b""
        length = min(length, self.size - offset)
        if self.total + length > LIMIT:
            raise Malformed("Its headers are larger than any honest image's.", "oversized")
        self.total += length
        self._stream.seek(offset)
        parts = []
        while length > 0 and (part := self._stream.read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def exactly(self, offset: int, length: int, what: str) -> bytes:
        """Read `length` bytes, all of which must be there."""
        data = self.some(offset, length)
        if len(data) != length:
            raise Malformed(f"Its {what} is cut off or lies outside of the file.", "truncated")
        return data

    def holds(self, offset: int, length: int, grain: int = 1) -> bool:
        """Say whether this stretch lies in the file; the last `grain` need not be written to its end."""
        return 0 <= offset < self.size and length >= 0 and offset + length <= -(-self.size // grain) * grain


class Header:
    """Named numbers out of one piece of a file."""

    def __init__(self, data: bytes, order: str) -> None:
        self.data = data
        self._order = order

    def u16(self, at: int) -> int:
        """Return an unsigned number of 16 bits."""
        return self._number("H", at)

    def u32(self, at: int) -> int:
        """Return an unsigned number of 32 bits."""
        return self._number("I", at)

    def u64(self, at: int) -> int:
        """Return an unsigned number of 64 bits."""
        return self._number("Q", at)

    def _number(self, kind: str, at: int) -> int:
        value: int = struct.unpack_from(self._order + kind, self.data, at)[0]
        return value


def big_endian(data: bytes) -> Header:
    """Read numbers with the most significant byte first."""
    return Header(data, ">")


def little_endian(data: bytes) -> Header:
    """Read numbers with the least significant byte first."""
    return Header(data, "<")


class Format(Protocol):
    """What each format's module has."""

    def matches(self, reader: Reader) -> bool:
        """Say whether some reader of this format would take the file for one of its own."""

    def examine(self, reader: Reader, report: Report) -> None:
        """Look at the headers; note what is wrong with them."""
