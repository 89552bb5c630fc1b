"""What a file is, and whether it is safe: honest images pass, hostile ones are refused with a reason."""

import io
import os
from pathlib import Path

import pytest

from micronova.imageformat.inspector import check, inspect
from micronova.imageformat.reader import LIMIT as READ_LIMIT
from micronova.imageformat.reader import Reader
from micronova.imageformat.report import Malformed
from micronova.objects.errors import Invalid
from tests.unit.imageformat import corpus
from tests.unit.imageformat.corpus import GIB, HONEST, HOSTILE, KIB, MIB, TIB, Sample

LIMIT = 16 * TIB


@pytest.mark.parametrize("sample", HONEST, ids=str)
def test_honest_images_pass(sample: Sample) -> None:
    info = check(io.BytesIO(sample.content), sample.declared, max_virtual_size=LIMIT)
    assert info.safe
    assert info.file_size == len(sample.content)
    assert info.virtual_size is not None


@pytest.mark.parametrize("sample", HOSTILE, ids=str)
def test_hostile_images_are_refused(sample: Sample) -> None:
    with pytest.raises(Invalid) as refusal:
        check(io.BytesIO(sample.content), sample.declared, max_virtual_size=LIMIT)
    assert sample.word in refusal.value.message
    assert len(refusal.value.message) < 400
    assert "passwd" not in refusal.value.message  # what a file names is not repeated


def test_samples_have_names_of_their_own() -> None:
    names = [sample.name for sample in HONEST + HOSTILE]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("content", "format", "size", "partitions"),
    [
        (corpus.GPT, "raw", 64 * KIB, "gpt"),
        (corpus.MBR, "raw", 64 * KIB, "mbr"),
        (bytes(100), "raw", 100, None),
        (corpus.QCOW2, "qcow2", 16 * MIB, None),
        (corpus.VMDK, "vmdk", MIB, None),
        (corpus.FIXED_VHD, "vhd", MIB, None),
        (corpus.DYNAMIC_VHD, "vhd", 8 * MIB, None),
        (corpus.VHDX, "vhdx", GIB, None),
        (corpus.VDI, "vdi", 8 * MIB, None),
        (corpus.HYBRID, "iso", len(corpus.HYBRID), "gpt"),
        (corpus.LUKS2, "luks", None, None),
        (corpus.FLAT, "vmdk", None, None),
    ],
)  # fmt: skip
def test_what_is_known_of_a_file(content: bytes, format: str, size: int | None, partitions: str | None) -> None:
    info = inspect(io.BytesIO(content))
    assert (info.format, info.virtual_size, info.partitions) == (format, size, partitions)


@pytest.mark.parametrize("name", corpus.FOREIGN)
def test_formats_without_a_use_here_are_known_and_not_safe(name: str) -> None:
    info = inspect(io.BytesIO(corpus.FOREIGN[name]))
    assert info.format == name.split()[0]
    assert [finding.code for finding in info.findings] == ["unsupported"]


def test_no_file_makes_us_read_more_than_a_bound() -> None:
    reader = Reader(io.BytesIO(bytes(2 * READ_LIMIT)))
    assert len(reader.some(READ_LIMIT, READ_LIMIT)) == READ_LIMIT
    assert reader.some(2 * READ_LIMIT, 1) == b""
    with pytest.raises(Malformed):
        reader.some(0, 1)


def test_the_virtual_size_has_a_limit_that_the_caller_sets() -> None:
    image = io.BytesIO(corpus.QCOW2)
    check(image, "qcow2", max_virtual_size=16 * MIB)
    check(image, "qcow2", max_virtual_size=None)
    with pytest.raises(Invalid, match=f"{16 * MIB} bytes: at most {16 * MIB - 1}"):
        check(image, "qcow2", max_virtual_size=16 * MIB - 1)
    with pytest.raises(Invalid, match="at most 10"):
        check(io.BytesIO(bytes(11)), "raw", max_virtual_size=10)


def test_a_stream_is_left_where_it_was() -> None:
    stream = io.BytesIO(corpus.QCOW2)
    stream.seek(7)
    inspect(stream)
    assert stream.tell() == 7


def test_a_path_is_opened_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(corpus.BACKED)
    before = len(os.listdir("/proc/self/fd"))
    assert [finding.code for finding in inspect(path).findings] == ["backing_file"]
    assert inspect(str(path)) == inspect(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(Invalid, match="not a regular file"):
            inspect(path)


def test_a_huge_file_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(8 * TIB)
    assert check(path, "raw", max_virtual_size=LIMIT).virtual_size == 8 * TIB
