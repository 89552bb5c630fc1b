"""VMware's VMDK: a sparse extent that carries its own description, and nothing else.

A VMDK is described by a text (the descriptor) that lists extents: files of any name, or devices. The only types
that are one self-contained file are monolithicSparse and streamOptimized, whose descriptor is embedded. Programs differ
in how they parse it: some search for words anywhere in it, some use the first of several values, some the last. So it
must have each value once.
"""

import re

from micronova.imageformat.reader import Header, Reader, little_endian
from micronova.imageformat.report import Malformed, Report

SPARSE, ESX_SPARSE, SE_SPARSE = b"KDMV", b"COWD", b"\xbe\xba\xfe\xca\0\0\0\0"
ALLOWED_TYPES = ("monolithicSparse", "streamOptimized")

_SECTOR = 512
_AT_END = (1 << 64) - 1  # the directory's offset is in the footer
_MAX_DESCRIPTOR = 64 << 10
_MAX_DIRECTORY = 32 << 20  # QEMU's limit, in bytes
_FOOTER_MARKER, _END_MARKER = 3, 0
_PROBE = 4096

_COMMENT_OR_BLANK = rb"(?:[ \t]*(?:#[^\n]*)?\r?\n)*"
_DESCRIPTOR = re.compile(_COMMENT_OR_BLANK + rb"[ \t]*version[ \t]*=[ \t]*\d", re.IGNORECASE)
_TITLE = re.compile(rb"\s*#\s*Disk\s*DescriptorFile", re.IGNORECASE)
_CREATE_TYPE = re.compile(r'createType[ \t]*=[ \t]*"([^"\n]*)"[ \t]*')
_PARENT_ID = re.compile(r"parentCID[ \t]*=[ \t]*ffffffff[ \t]*", re.IGNORECASE)
_EXTENT = re.compile(
    r'(RW|RDONLY|NOACCESS)[ \t]+(\d+)[ \t]+(\w+)(?:[ \t]+"([^"]*)")?(?:[ \t]+\d+)?[ \t]*', re.IGNORECASE
)
_ACCESS = re.compile(r"\s*(RW|RDONLY|NOACCESS)\b", re.IGNORECASE)


def matches(reader: Reader) -> bool:
    """Recognise extents by their magic, and bare descriptors by what programs search for."""
    start = reader.some(0, _PROBE)
    return start.startswith((SPARSE, ESX_SPARSE, SE_SPARSE)) or _is_text(start)


def _is_text(start: bytes) -> bool:
    return bool(_TITLE.match(start) or _DESCRIPTOR.match(start))


def examine(reader: Reader, report: Report) -> None:
    """Refuse whatever names another file, or could be read as if it did."""
    start = reader.some(0, 8)
    if not start.startswith(SPARSE):
        extent = start.startswith((ESX_SPARSE, SE_SPARSE))
        kind = "an extent of ESX" if extent else "a descriptor, which names other files"
        raise Malformed(f"It is {kind}: only {' and '.join(ALLOWED_TYPES)} are self-contained.", "descriptor")
    header = little_endian(reader.exactly(0, _SECTOR, "VMDK header"))
    _check_header(header, reader, report)
    if header.u64(56) == _AT_END:
        _check_footer(header, reader, report)
    capacity = header.u64(12)
    if 0 < capacity < 1 << 54:
        report.virtual_size = capacity * _SECTOR
    else:  # without a capacity, programs use the embedded descriptor for other files
        report.refuse("descriptor" if not capacity else "oversized", "Its capacity is absurd.")
    offset, length = header.u64(28) * _SECTOR, header.u64(36) * _SECTOR
    if not offset or not length:
        raise Malformed("It carries no description of itself: it is a part of another disk.", "descriptor")
    if length > _MAX_DESCRIPTOR:
        raise Malformed("Its descriptor is oversized.", "oversized")
    _check_descriptor(reader.exactly(offset, length, "descriptor"), capacity, report)


def _check_header(header: Header, reader: Reader, report: Report) -> None:
    if header.u32(4) not in (1, 2, 3):
        report.refuse("unsupported", "It is of an unknown version.")
    if header.u16(77) > 1:
        report.refuse("unknown_features", "It is compressed in a way that is not known here.")
    grain, entries = header.u64(20), header.u32(44)
    if not 1 <= grain <= 1 << 21 or grain & (grain - 1) or not 1 <= entries <= 512:
        report.refuse("malformed", "Its grains have an impossible size.")
        return
    directory = -(-header.u64(12) // (grain * entries)) * 4
    if directory > _MAX_DIRECTORY:
        report.refuse("oversized", "Its directory of grains is oversized.")
    elif header.u64(56) != _AT_END and not reader.holds(header.u64(56) * _SECTOR, directory, _SECTOR):
        report.refuse("truncated", "Its directory of grains lies outside of the file.")


def _check_footer(header: Header, reader: Reader, report: Report) -> None:
    """Compare the footer with the header; programs that find the footer use it instead."""
    if reader.size < 4 * _SECTOR or reader.size % _SECTOR:
        raise Malformed("Its footer is missing.", "truncated")
    tail = reader.exactly(reader.size - 3 * _SECTOR, 3 * _SECTOR, "footer")
    marker, footer, end = (little_endian(tail[at : at + _SECTOR]) for at in (0, _SECTOR, 2 * _SECTOR))
    if marker.u32(12) != _FOOTER_MARKER or footer.data[:4] != SPARSE or any(end.data[:16]):
        raise Malformed("Its footer is missing.", "truncated")
    if footer.data[4:56] != header.data[4:56] or footer.data[77:79] != header.data[77:79]:
        report.refuse("malformed", "Its header and its footer contradict each other.")
    if footer.u64(56) == _AT_END:
        report.refuse("malformed", "Its footer names no directory of grains.")
    else:
        _check_header(footer, reader, report)


def _check_descriptor(data: bytes, capacity: int, report: Report) -> None:
    text, end, rest = data.partition(b"\0")
    if not end or rest.strip(b"\0"):  # some programs read to a zero byte, some to the stated length
        report.refuse("descriptor", "Its descriptor goes on after its end.")
    lines = text.decode("latin-1").splitlines()  # at everything that a program may take for the end of a line
    if not _is_text(text[:_PROBE]):
        report.refuse("descriptor", "Its descriptor is none.")
    _check_type([line for line in lines if "createtype" in line.lower()], report)
    if any("parentfilenamehint" in line.lower() for line in lines):
        report.refuse("parent", "It names a parent.")
    if not all(_PARENT_ID.fullmatch(line) for line in lines if "parentcid" in line.lower()):
        report.refuse("parent", "It has a parent.")
    _check_extents([line for line in lines if _ACCESS.match(line)], capacity, report)


def _check_type(lines: list[str], report: Report) -> None:
    found = [match[1] for line in lines if (match := _CREATE_TYPE.fullmatch(line))]
    if len(lines) != 1 or len(found) != 1:
        report.refuse("create_type", "Its descriptor does not say exactly once what type it is of.")
    elif found[0] not in ALLOWED_TYPES:
        report.refuse("create_type", f"It is of type {found[0][:32]!r}: use {' or '.join(ALLOWED_TYPES)}.")


def _check_extents(lines: list[str], capacity: int, report: Report) -> None:
    if len(lines) != 1:
        report.refuse("extents", "Its descriptor does not name exactly one extent, itself.")
        return
    extent = _EXTENT.fullmatch(lines[0])
    if not extent or extent[3].upper() != "SPARSE" or not extent[4]:
        report.refuse("extents", "Its extent is not a sparse one.")
    elif re.search(r"[/\\:]|\.\.", extent[4]):
        report.refuse("extents", "Its extent names a path.")
    elif int(extent[2][:24]) != capacity:
        report.refuse("extents", "Its extent is not as large as the disk.")
