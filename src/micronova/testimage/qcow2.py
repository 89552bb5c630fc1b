"""Writes a disk as a compressed qcow2 (version 3), without qemu-img."""

import struct
import zlib
from pathlib import Path

BITS = 16  # of an offset in a cluster, as qemu-img chooses them
SMALL = 9  # the fewest that there may be
_COMPRESSED = 1 << 62
_COPIED = 1 << 63  # referenced once: may be written in place


def write(disk: bytes, path: Path) -> None:
    """Write a disk to a file."""
    path.write_bytes(encode(disk))


def encode(disk: bytes, bits: int = BITS) -> bytes:
    """Return the file: header, table of reference counts, their block, first- and second-level tables, data.

    With small clusters a small disk makes a small file; it may have as many clusters as one block has counts.
    """
    cluster_size = 1 << bits
    table_size = cluster_size // 8
    sectors_at = 62 - (bits - 8)  # where an entry of a compressed cluster says how many sectors it has
    clusters = -(-len(disk) // cluster_size)
    tables = -(-clusters // table_size)
    data_at = (4 + tables) * cluster_size
    entries = [0] * (tables * table_size)
    counts = [0] * (cluster_size // 2)
    data = bytearray()
    for n in range(clusters):
        cluster = disk[n * cluster_size : (n + 1) * cluster_size].ljust(cluster_size, b"\0")
        if not any(cluster):
            continue
        packer = zlib.compressobj(9, zlib.DEFLATED, -12)
        packed = packer.compress(cluster) + packer.flush()
        if len(packed) >= cluster_size:
            data += bytes(-len(data) % cluster_size)
            at = data_at + len(data)
            data += cluster
            entries[n] = at | _COPIED
            counts[at // cluster_size] += 1
            continue
        at = data_at + len(data)
        data += packed
        last = at + len(packed) - 1
        entries[n] = at | (last // 512 - at // 512) << sectors_at | _COMPRESSED
        for touched in range(at // cluster_size, last // cluster_size + 1):
            counts[touched] += 1
    for n in range(data_at // cluster_size):
        counts[n] = 1
    firsts = [(4 + n) * cluster_size | _COPIED for n in range(tables)]
    return b"".join(
        (
            _header(clusters * cluster_size, tables, bits).ljust(cluster_size, b"\0"),
            struct.pack(">Q", 2 * cluster_size).ljust(cluster_size, b"\0"),
            struct.pack(f">{len(counts)}H", *counts),
            struct.pack(f">{tables}Q", *firsts).ljust(cluster_size, b"\0"),
            struct.pack(f">{len(entries)}Q", *entries),
            data + bytes(-len(data) % cluster_size),
        )
    )


def _header(size: int, tables: int, bits: int) -> bytes:
    cluster_size = 1 << bits
    return struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        *(b"QFI\xfb", 3, 0, 0),  # no backing file
        *(bits, size, 0),  # not encrypted
        *(tables, 3 * cluster_size),
        *(cluster_size, 1),  # reference counts
        *(0, 0),  # no snapshots
        *(0, 0, 0),  # no features
        *(4, 104),  # reference counts of 16 bits; length of the header
    )
