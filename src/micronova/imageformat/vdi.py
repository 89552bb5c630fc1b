"""VirtualBox's VDI: one header, fixed or dynamic; undo and differencing disks have a parent."""

from micronova.imageformat.reader import Reader, little_endian
from micronova.imageformat.report import Malformed, Report

SIGNATURE = b"\x7f\x10\xda\xbe"

_AT, _LENGTH = 64, 512
_DYNAMIC, _FIXED = 1, 2


def matches(reader: Reader) -> bool:
    """Recognise the signature, which comes after a text of any content."""
    return reader.some(_AT, 4) == SIGNATURE


def examine(reader: Reader, report: Report) -> None:
    """Refuse parents and impossible tables."""
    header = little_endian(reader.exactly(0, _LENGTH, "VDI header"))
    if header.u32(68) != 0x00010001:
        raise Malformed("It is of an unknown version.", "unsupported")
    if header.u32(76) not in (_DYNAMIC, _FIXED) or any(header.data[424:456]):
        report.refuse("parent", "It has a parent.")
    block, blocks, size = header.u32(376), header.u32(384), header.u64(368)
    if header.u32(360) != 512 or not 1 << 16 <= block <= 256 << 20 or block & (block - 1) or header.u32(380):
        raise Malformed("Its blocks have an impossible size.")
    if size > blocks * block:
        report.refuse("malformed", "Its table of blocks does not cover its virtual size.")
        return
    report.virtual_size = size
    if header.u32(340) < _LENGTH or not reader.holds(header.u32(340), blocks * 4, 512):
        report.refuse("truncated", "Its table of blocks lies outside of the file.")
