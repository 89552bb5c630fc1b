"""Random access to a file that may be malicious, with a limit on the bytes that are read in total."""

import os
import struct
from typing import BinaryIO, Protocol

from micronova.imageformat.report import Malformed, Report

LIMIT = 1 << 20
"""Bytes that one inspection reads at most, whatever the file says; valid headers need a tenth of it."""


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
        """Read exactly `length` bytes; raise Malformed if the file is shorter."""
        data = self.some(offset, length)
        if len(data) != length:
            raise Malformed(f"Its {what} is cut off or lies outside of the file.", "truncated")
        return data

    def holds(self, offset: int, length: int, grain: int = 1) -> bool:
        """Return whether a range lies in the file; the last `grain` may be incomplete."""
        return 0 <= offset < self.size and length >= 0 and offset + length <= -(-self.size // grain) * grain


class Header:
    """Numbers at offsets of a part of a file."""

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
    """The functions of each format's module."""

    def matches(self, reader: Reader) -> bool:
        """Return whether a program may take the file for one of this format."""

    def examine(self, reader: Reader, report: Report) -> None:
        """Check the headers, and add what is wrong to the report."""
