"""Optical discs: ISO 9660 and UDF. They cannot name other files, so it is enough to recognise them."""

from micronova.imageformat.reader import Reader
from micronova.imageformat.report import Report

_SECTOR = 2048
_FIRST = 16  # the sectors before it may have any content
_IDENTIFIERS = (b"CD001", b"CDW02", b"BEA01", b"NSR02", b"NSR03")


def matches(reader: Reader) -> bool:
    """Recognise the first volume descriptors."""
    return any(reader.some((_FIRST + n) * _SECTOR + 1, 5) in _IDENTIFIERS for n in range(3))


def examine(reader: Reader, report: Report) -> None:
    """Accept it: a guest sees the bytes of the file."""
    report.virtual_size = reader.size
