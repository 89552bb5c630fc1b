"""Microsoft's VHD (Virtual PC): fixed and dynamic; a differencing disk has a parent."""

from micronova.imageformat.reader import Header, Reader, big_endian
from micronova.imageformat.report import Malformed, Report

COOKIE, SPARSE_COOKIE = b"conectix", b"cxsparse"

_FOOTER, _SPARSE_HEADER = 512, 1024
_FIXED, _DYNAMIC, _DIFFERENCING = 2, 3, 4
_MAX_SIZE = 2040 << 30
_MAX_BLOCK = 256 << 20
_SAME = ((12, 24), (40, 56), (60, 64))  # version and offset of the sparse header; sizes; type


def matches(reader: Reader) -> bool:
    """Recognise the footer at the end, or its copy at the beginning."""
    return reader.some(0, 8) == COOKIE or _find_footer(reader) is not None


def _find_footer(reader: Reader) -> bytes | None:
    for length in (_FOOTER, _FOOTER - 1):  # some old programs wrote one byte too few
        if reader.size >= length and reader.some(reader.size - length, 8) == COOKIE:
            return reader.some(reader.size - length, length).ljust(_FOOTER, b"\0")
    return None


def examine(reader: Reader, report: Report) -> None:
    """Refuse parents, and files whose header and footer differ."""
    data = _find_footer(reader)
    if data is None:
        raise Malformed("Its footer is missing.", "truncated")
    footer = big_endian(data)
    kind, size = footer.u32(60), footer.u64(48)
    if kind == _DIFFERENCING:
        report.refuse("parent", "It is a differencing disk: it has a parent.")
    elif kind not in (_FIXED, _DYNAMIC):
        raise Malformed("It is of an unknown type.", "unsupported")
    if footer.u32(12) >> 16 != 1:
        report.refuse("unsupported", "It is of an unknown version.")
    if footer.u32(64) != _checksum(data, 64):
        report.refuse("malformed", "Its footer's checksum is wrong.")
    if size > _MAX_SIZE:
        report.refuse("oversized", "Its virtual size is absurd.")
    else:
        report.virtual_size = size
    copied = reader.some(0, _FOOTER)
    if kind == _FIXED:
        if copied[:8] == COOKIE:
            report.refuse("malformed", "Its header and its footer contradict each other.")
        if size > reader.size - _FOOTER + 1:
            report.refuse("truncated", "It is shorter than the disk inside.")
        return
    if copied[:8] != COOKIE or any(copied[a:b] != data[a:b] for a, b in _SAME):
        report.refuse("malformed", "Its header and its footer contradict each other.")
    _check_sparse(big_endian(reader.exactly(footer.u64(16), _SPARSE_HEADER, "header")), size, reader, report)


def _check_sparse(header: Header, size: int, reader: Reader, report: Report) -> None:
    if header.data[:8] != SPARSE_COOKIE:
        raise Malformed("Its header is missing.")
    if header.u32(36) != _checksum(header.data, 36):
        report.refuse("malformed", "Its header's checksum is wrong.")
    if any(header.data[40:56]) or any(header.data[64:768]):  # the parent's id; its name, and where to look for it
        report.refuse("parent", "It names a parent.")
    table, entries, block = header.u64(16), header.u32(28), header.u32(32)
    if not 512 <= block <= _MAX_BLOCK or block & (block - 1):
        report.refuse("malformed", "Its blocks have an impossible size.")
    elif entries * block < size or entries * 4 > _MAX_SIZE // 512:
        report.refuse("malformed", "Its table of blocks does not fit its virtual size.")
    elif not reader.holds(table, entries * 4, 512):
        report.refuse("truncated", "Its table of blocks lies outside of the file.")


def _checksum(data: bytes, at: int) -> int:
    """Return the ones' complement of the sum of all bytes but the checksum's own four."""
    return ~(sum(data) - sum(data[at : at + 4])) & 0xFFFFFFFF
