"""What the builder writes itself: the archive that the kernel unpacks, and the disk's container."""

import random
import struct
import zlib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from micronova.imageformat.inspector import check
from micronova.testimage import qcow2
from micronova.testimage.cpio import Archive
from micronova.testimage.disk import _master_boot_record


def entries(archive: bytes) -> dict[str, tuple[int, bytes, tuple[int, int]]]:
    """Read an archive: mode, content and device by path, in the order of the archive."""
    found: dict[str, tuple[int, bytes, tuple[int, int]]] = {}
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701" and at % 4 == 0
        numbers = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = archive[at + 110 : at + 110 + numbers[11]].rstrip(b"\0").decode()
        begin = at + -(-(110 + numbers[11]) // 4) * 4
        if name == "TRAILER!!!":
            return found
        assert name not in found
        found[name] = (numbers[1], archive[begin : begin + numbers[6]], (numbers[9], numbers[10]))
        at = begin + -(-numbers[6] // 4) * 4


def test_an_archive_has_directories_before_what_is_in_them() -> None:
    archive = Archive()
    archive.file("a/b/c", b"12345", 0o755)
    archive.link("a/l", "b/c")
    archive.device("dev/console", 5, 1)
    archive.directory("a")
    archive.directory("secret", 0o700)
    found = entries(archive.content())
    assert list(found) == ["a", "a/b", "a/b/c", "a/l", "dev", "dev/console", "secret"]
    assert found["a/b/c"] == (0o100755, b"12345", (0, 0))
    assert found["a/l"][1] == b"b/c"
    assert found["dev/console"] == (0o20600, b"", (5, 1))
    assert found["secret"][0] == 0o40700


def unpacked(image: bytes) -> bytes:
    """Read a qcow2 as the format's description says."""
    (bits, size), (tables, first) = struct.unpack_from(">IQ", image, 20), struct.unpack_from(">IQ", image, 36)
    cluster, sectors_at = 1 << bits, 62 - (bits - 8)
    entries = [
        entry
        for table in struct.unpack_from(f">{tables}Q", image, first)
        for entry in struct.unpack_from(f">{cluster // 8}Q", image, table & ~(1 << 63))
    ]
    disk = bytearray()
    for entry in entries[: -(-size // cluster)]:
        if not entry:
            disk += bytes(cluster)
        elif entry >> 62 & 1:
            at, sectors = entry & (1 << sectors_at) - 1, entry >> sectors_at & (1 << 62 - sectors_at) - 1
            disk += zlib.decompressobj(-12).decompress(image[at : (at // 512 + sectors + 1) * 512])
        else:
            at = entry & ~(1 << 63)
            disk += image[at : at + cluster]
    return bytes(disk[:size])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 200_000), st.binary(min_size=1, max_size=500)), max_size=8))
def test_a_disk_is_kept(tmp_path: Path, pieces: list[tuple[int, bytes]]) -> None:
    disk = b"".join(bytes(gap) + piece for gap, piece in pieces) + b"."
    image = tmp_path / "image"
    qcow2.write(disk, image)
    check(image, "qcow2", max_virtual_size=len(disk) + 65536)
    assert unpacked(image.read_bytes()).rstrip(b"\0") == disk


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=0, max_size=512).map(lambda part: part.ljust(512, b"\0")), min_size=1, max_size=9))
def test_a_small_disk_makes_a_small_file(tmp_path: Path, sectors: list[bytes]) -> None:
    disk, image = b"".join(sectors), tmp_path / "image"
    image.write_bytes(qcow2.encode(disk, qcow2.SMALL))
    check(image, "qcow2", max_virtual_size=len(disk))
    assert unpacked(image.read_bytes()) == disk
    assert image.stat().st_size <= len(disk) + 5 * 512


def test_what_cannot_be_compressed_is_kept_as_it_is(tmp_path: Path) -> None:
    disk = random.Random(1).randbytes(200_000)
    qcow2.write(disk, tmp_path / "image")
    assert unpacked((tmp_path / "image").read_bytes())[: len(disk)] == disk


def test_the_boot_record_has_one_active_partition() -> None:
    record = _master_boot_record(b"\xfa" * 440, 30_720)
    assert len(record) == 512 and record[510:] == b"\x55\xaa"
    assert struct.unpack_from("<B3xB3xII", record, 446) == (0x80, 0x0E, 2048, 30_720)
    assert not any(record[462:510])
