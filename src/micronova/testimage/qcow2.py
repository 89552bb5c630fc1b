"""Writes a disk as a compressed qcow2 (version 3), without qemu-img."""

import struct
import zlib
from pathlib import Path

_BITS = 16
_CLUSTER = 1 << _BITS
_ENTRIES = _CLUSTER // 8  # of a second-level table
_COMPRESSED = 1 << 62
_COPIED = 1 << 63  # referenced once: may be written in place
_SECTORS_AT = 62 - (_BITS - 8)  # where an entry of a compressed cluster says how many sectors it has


def write(disk: bytes, path: Path) -> None:
    """Write the file: header, table of reference counts, their block, first- and second-level tables, data."""
    clusters = -(-len(disk) // _CLUSTER)
    tables = -(-clusters // _ENTRIES)
    data_at = (4 + tables) * _CLUSTER
    entries = [0] * (tables * _ENTRIES)
    counts = [0] * (_CLUSTER // 2)
    data = bytearray()
    for n in range(clusters):
        cluster = disk[n * _CLUSTER : (n + 1) * _CLUSTER].ljust(_CLUSTER, b"\0")
        if not any(cluster):
            continue
        packer = zlib.compressobj(9, zlib.DEFLATED, -12)
        packed = packer.compress(cluster) + packer.flush()
        if len(packed) >= _CLUSTER:
            data += bytes(-len(data) % _CLUSTER)
            at = data_at + len(data)
            data += cluster
            entries[n] = at | _COPIED
            counts[at // _CLUSTER] += 1
            continue
        at = data_at + len(data)
        data += packed
        last = at + len(packed) - 1
        entries[n] = at | (last // 512 - at // 512) << _SECTORS_AT | _COMPRESSED
        for touched in range(at // _CLUSTER, last // _CLUSTER + 1):
            counts[touched] += 1
    for n in range(data_at // _CLUSTER):
        counts[n] = 1
    firsts = [(4 + n) * _CLUSTER | _COPIED for n in range(tables)]
    with path.open("wb") as file:
        file.write(_header(clusters * _CLUSTER, tables).ljust(_CLUSTER, b"\0"))
        file.write(struct.pack(">Q", 2 * _CLUSTER).ljust(_CLUSTER, b"\0"))
        file.write(struct.pack(f">{len(counts)}H", *counts))
        file.write(struct.pack(f">{tables}Q", *firsts).ljust(_CLUSTER, b"\0"))
        file.write(struct.pack(f">{len(entries)}Q", *entries))
        file.write(data + bytes(-len(data) % _CLUSTER))


def _header(size: int, tables: int) -> bytes:
    return struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        *(b"QFI\xfb", 3, 0, 0),  # no backing file
        *(_BITS, size, 0),  # not encrypted
        *(tables, 3 * _CLUSTER),
        *(_CLUSTER, 1),  # reference counts
        *(0, 0),  # no snapshots
        *(0, 0, 0),  # no features
        *(4, 104),  # reference counts of 16 bits; length of the header
    )
