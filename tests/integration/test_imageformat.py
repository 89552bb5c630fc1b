"""Our inspector beside QEMU: what QEMU writes passes, and what QEMU would take for a format never passes for raw."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from micronova.imageformat.inspector import check, inspect
from micronova.testimage import qcow2
from tests.unit.imageformat.corpus import HONEST, HOSTILE, Sample, patched

pytestmark = pytest.mark.timeout(280)

OURS = {"vpc": "vhd"}  # by QEMU's name


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    script = Path(__file__).parents[2] / "scripts" / "ensure-packages"
    subprocess.run([script, "qemu-utils"], check=True, timeout=250)


def qemu_img(*arguments: str | Path) -> str:
    return subprocess.run(["qemu-img", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def qemu_takes_it_for(path: Path) -> str | None:
    """Let QEMU guess, as nothing in this project ever does; None if it cannot open the file."""
    done = subprocess.run(
        ["qemu-img", "info", "--output=json", "-U", path], capture_output=True, timeout=60, check=False
    )
    if done.returncode:
        # It often says which format it had chosen before it failed.
        formats = (b"qcow2", b"vmdk", b"vhdx", b"vpc", b"vdi")
        chosen = next((name.decode() for name in formats if name in done.stderr), None)
        return OURS.get(chosen, chosen) if chosen else None
    name: str = json.loads(done.stdout)["format"]
    return OURS.get(name, name)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("qcow2", []), ("qcow2", ["-o", "compat=0.10"]), ("qcow2", ["-o", "cluster_size=512"]),
        ("qcow2", ["-o", "cluster_size=2M,lazy_refcounts=on,refcount_bits=64"]),
        ("qcow2", ["-o", "extended_l2=on,compression_type=zstd"]), ("qcow2", ["-c"]),
        ("vmdk", []), ("vmdk", ["-o", "subformat=streamOptimized"]), ("vpc", []), ("vpc", ["-o", "subformat=fixed"]),
        ("vhdx", []), ("vhdx", ["-o", "subformat=fixed"]), ("vdi", []), ("vdi", ["-o", "static=on"]), ("raw", []),
    ],
)  # fmt: skip
def test_what_qemu_writes_passes(format: str, options: list[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes((b"data" * 50_000).ljust(3 << 20, b"\0"))
    image = tmp_path / "image"
    qemu_img("convert", "-f", "raw", "-O", format, *options, disk, image)
    info = check(image, OURS.get(format, format), max_virtual_size=4 << 20)
    assert info.virtual_size is not None and 3 << 20 <= info.virtual_size < (3 << 20) + (1 << 16)


@pytest.mark.parametrize("size", ["1M", "100G", "10T"])
@pytest.mark.parametrize("format", ["qcow2", "vmdk", "vhdx", "vdi", "vpc"])
def test_what_qemu_makes_empty_passes(format: str, size: str, tmp_path: Path) -> None:
    if (format, size) == ("vpc", "10T"):
        size = "2000G"
    image = tmp_path / "image"
    qemu_img("create", "-q", "-f", format, image, size)
    assert check(image, OURS.get(format, format)).virtual_size


def _create(*arguments: str, directory: Path) -> None:
    """Create an image of 1 MiB. For LUKS, qemu-img measures how fast it is, and fails if it was not on the CPU."""
    for _ in range(50):
        done = subprocess.run(
            ["qemu-img", "create", "-q", *arguments, "1M"], cwd=directory, capture_output=True, text=True
        )
        if "Unable to get accurate CPU usage" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("qcow2", ["-b", "base", "-F", "raw"]), ("qcow2", ["-o", "data_file=data"]),
        ("qcow2", ["-o", "data_file=data,data_file_raw=on"]), ("vmdk", ["-o", "subformat=monolithicFlat"]),
        ("vmdk", ["-o", "subformat=twoGbMaxExtentSparse"]), ("vmdk", ["-o", "subformat=twoGbMaxExtentFlat"]),
        ("qcow", []), ("qed", []), ("parallels", []),
        ("qcow2", ["--object", "secret,id=s,data=x", "-o",
                   "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"]),
        ("luks", ["--object", "secret,id=s,data=x", "-o", "key-secret=s,iter-time=10"]),
    ],
)  # fmt: skip
def test_what_qemu_makes_of_several_files_or_hidden_is_refused(format: str, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(bytes(1 << 20))
    image = tmp_path / "image"
    _create("-f", format, *options, str(image), directory=tmp_path)
    info = inspect(image)
    assert info.format != "raw"
    assert not info.safe


@pytest.mark.parametrize("sample", HONEST + HOSTILE, ids=str)
def test_nothing_that_qemu_knows_is_raw_to_us(sample: Sample, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(sample.content)
    info = inspect(image)
    guess = qemu_takes_it_for(image)
    if guess not in (None, "raw"):
        assert info.format == guess or any(finding.code == "polyglot" for finding in info.findings)


@st.composite
def damaged(draw: Any) -> bytes:
    content: bytes = draw(st.sampled_from([each.content for each in HONEST + HOSTILE if len(each.content) < 1 << 18]))
    for _ in range(draw(st.integers(1, 4))):
        content = patched(content, (draw(st.integers(0, 600)), draw(st.binary(min_size=1, max_size=8))))
    return content


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged())
def test_nothing_damaged_that_qemu_knows_is_raw_to_us(tmp_path: Path, content: bytes) -> None:
    image = tmp_path / "image"
    image.write_bytes(content)
    if qemu_takes_it_for(image) not in (None, "raw"):
        assert inspect(image).format != "raw"


def test_what_our_own_writer_writes_is_sound(tmp_path: Path) -> None:
    disk = bytes(100_000) + b"boot" * 40_000 + bytes(200_000) + bytes(range(256)) * 999
    qcow2.write(disk, tmp_path / "image")
    check(tmp_path / "image", "qcow2", max_virtual_size=1 << 20)
    qemu_img("check", "-f", "qcow2", tmp_path / "image")
    qemu_img("convert", "-f", "qcow2", "-O", "raw", tmp_path / "image", tmp_path / "disk")
    assert (tmp_path / "disk").read_bytes() == disk.ljust(-(-len(disk) // 65536) * 65536, b"\0")
