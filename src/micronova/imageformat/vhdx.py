"""Microsoft's VHDX (Hyper-V): tables of regions, one of which holds tables of metadata."""

import uuid

from micronova.imageformat.reader import Header, Reader, little_endian
from micronova.imageformat.report import Malformed, Report

SIGNATURE = b"vhdxfile"

_KIB = 1 << 10
_HEADERS, _HEADER = (64 * _KIB, 128 * _KIB), 4 * _KIB
_REGIONS, _MAX_REGIONS = (192 * _KIB, 256 * _KIB), 64
_METADATA_TABLE, _MAX_ITEMS = 64 * _KIB, 64
_MAX_SIZE = 64 << 40
_HAS_PARENT = 2
_REQUIRED = 4


def _id(text: str) -> bytes:
    return uuid.UUID(text).bytes_le


_BAT = _id("2DC27766-F623-4200-9D64-115E9BFD4A08")
_METADATA = _id("8B7CA206-4790-4B9A-B8FE-575F050F886E")
_PARAMETERS = _id("CAA16737-FA36-4D43-B3B6-33F0AA44E76B")
_SIZE = _id("2FA54224-CD1B-4876-B211-5DBED83BF4B8")
_PAGE_83 = _id("BECA12AB-B2E6-4523-93EF-C309E000C746")
_LOGICAL_SECTOR = _id("8141BF1D-A96F-4709-BA47-F233A8FAAB5F")
_PHYSICAL_SECTOR = _id("CDA348C7-445D-4471-9CC9-E9885251C556")
_PARENT = _id("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C")
_KNOWN_ITEMS = (_PARAMETERS, _SIZE, _PAGE_83, _LOGICAL_SECTOR, _PHYSICAL_SECTOR, _PARENT)


def matches(reader: Reader) -> bool:
    """Recognise the file's identifier."""
    return reader.some(0, 8) == SIGNATURE


def examine(reader: Reader, report: Report) -> None:
    """Refuse parents, logs that were not replayed (replaying changes what we read), and unknown required parts."""
    _check_log(reader, report)
    regions = _regions(reader, report)
    for name, (_offset, _length, required) in regions.items():
        if required and name not in (_BAT, _METADATA):
            report.refuse("unknown_features", "It needs a region that is not known here.")
    if _METADATA not in regions or _BAT not in regions:
        raise Malformed("Its metadata or its table of blocks is missing.")
    bat, bat_length, _ = regions[_BAT]
    if not reader.holds(bat, bat_length, _KIB * _KIB):
        report.refuse("truncated", "Its table of blocks lies outside of the file.")
    _check_metadata(reader, regions[_METADATA][0], bat_length, report)


def _check_log(reader: Reader, report: Report) -> None:
    headers = [little_endian(reader.exactly(at, _HEADER, "header")) for at in _HEADERS]
    valid = [each for each in headers if each.data[:4] == b"head" and each.u32(4) == _crc32c(each.data, 4)]
    if not valid:
        raise Malformed("Neither of its headers is valid.")
    current = max(valid, key=lambda header: header.u64(8))
    if current.u16(66) != 1 or current.u16(64) != 0:
        report.refuse("unsupported", "It is of an unknown version.")
    if any(current.data[48:64]):
        report.refuse("log", "It was not closed cleanly: its log has not been replayed.")


def _regions(reader: Reader, report: Report) -> dict[bytes, tuple[int, int, bool]]:
    tables = []
    for at in _REGIONS:
        start = little_endian(reader.exactly(at, 16, "table of regions"))
        if start.data[:4] != b"regi":
            raise Malformed("Its table of regions is missing.")
        count = start.u32(8)
        if count > _MAX_REGIONS:
            raise Malformed("Its table of regions is oversized.", "oversized")
        tables.append(reader.exactly(at + 16, 32 * count, "table of regions"))
    if tables[0] != tables[1]:
        report.refuse("malformed", "Its two tables of regions contradict each other.")
    regions: dict[bytes, tuple[int, int, bool]] = {}
    for at in range(0, len(tables[0]), 32):
        entry = little_endian(tables[0][at : at + 32])
        name = entry.data[:16]
        if name in regions:
            report.refuse("malformed", "Its table of regions names one twice.")
        if entry.u64(16) < 1 << 20:  # where the headers are
            report.refuse("malformed", "A region lies where none can be.")
        regions[name] = (entry.u64(16), entry.u32(24), bool(entry.u32(28) & 1))
    return regions


def _check_metadata(reader: Reader, base: int, bat_length: int, report: Report) -> None:
    table = little_endian(reader.exactly(base, 32, "table of metadata"))
    if table.data[:8] != b"metadata":
        raise Malformed("Its table of metadata is missing.")
    count = table.u16(10)
    if count > _MAX_ITEMS:
        raise Malformed("Its table of metadata is oversized.", "oversized")
    entries = reader.exactly(base + 32, 32 * count, "table of metadata")
    items: dict[bytes, tuple[int, int]] = {}
    for at in range(0, len(entries), 32):
        entry = little_endian(entries[at : at + 32])
        name = entry.data[:16]
        if name in items:
            report.refuse("malformed", "Its table of metadata names an item twice.")
        if name not in _KNOWN_ITEMS and entry.u32(24) & _REQUIRED:
            report.refuse("unknown_features", "It needs metadata that are not known here.")
        items[name] = (entry.u32(16), entry.u32(20))
    if _PARENT in items:
        report.refuse("parent", "It names a parent.")
    parameters = _item(reader, base, items, _PARAMETERS, 8)
    block, flags = parameters.u32(0), parameters.u32(4)
    if flags & _HAS_PARENT:
        report.refuse("parent", "It is a differencing disk: it has a parent.")
    if not 1 << 20 <= block <= 256 << 20 or block & (block - 1):
        raise Malformed("Its blocks have an impossible size.")
    size = _item(reader, base, items, _SIZE, 8).u64(0)
    if size > _MAX_SIZE:
        report.refuse("oversized", "Its virtual size is absurd.")
        return
    report.virtual_size = size
    if bat_length // 8 < -(-size // block):
        report.refuse("malformed", "Its table of blocks does not cover its virtual size.")


def _item(reader: Reader, base: int, items: dict[bytes, tuple[int, int]], name: bytes, length: int) -> Header:
    offset, found = items.get(name, (0, 0))
    if offset < _METADATA_TABLE or found != length:
        raise Malformed("Its metadata are incomplete.")
    return little_endian(reader.exactly(base + offset, length, "metadata"))


def _crc32c(data: bytes, checksum_at: int) -> int:
    """Return the CRC-32C (Castagnoli) of the data with its own checksum field taken as zero."""
    crc = 0xFFFFFFFF
    for byte in data[:checksum_at] + bytes(4) + data[checksum_at + 4 :]:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(_crc_of(byte) for byte in range(256))
