"""The kernel and the initial file system of the test image, read from the FAT file system of its disk."""

import struct
import subprocess
from pathlib import Path

_SECTOR = 512
_ENTRY = 32


def boot_files(image: Path, work: Path) -> dict[str, bytes]:
    """Return the files in the first partition of a disk, by their names; they were written to it one after another."""
    raw = work / "testimage.raw"
    command = ("qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(image), str(raw))
    subprocess.run(command, check=True, capture_output=True)
    disk = raw.read_bytes()
    raw.unlink()
    (first,) = struct.unpack_from("<I", disk, 446 + 8)
    partition = memoryview(disk)[first * _SECTOR :]
    per_cluster, reserved, tables, entries = struct.unpack_from("<BHBH", partition, 13)
    (table_size,) = struct.unpack_from("<H", partition, 22)
    root = (reserved + tables * table_size) * _SECTOR
    data = root + entries * _ENTRY
    found = {}
    for place in range(root, data, _ENTRY):
        entry = bytes(partition[place : place + _ENTRY])
        if not entry[0]:
            break
        if entry[11] & 0x18 or entry[0] == 0xE5:  # a label, a directory, a part of a long name, or removed
            continue
        cluster, size = struct.unpack_from("<HI", entry, 26)
        begin = data + (cluster - 2) * per_cluster * _SECTOR
        found[entry[:11].decode().rstrip().lower()] = bytes(partition[begin : begin + size])
    return found
