"""Volumes of images whose format is not raw: qemu-img converts them in its sandbox."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.embedded.volume.world import world


@pytest.mark.parametrize("format", ["qcow2", "vmdk", "vdi", "vhdx"])
async def test_an_image_becomes_a_raw_volume(tmp_path: Path, format: str) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    with disk.open("wb") as stream:
        stream.truncate(16 << 20)
        stream.seek(1 << 20)
        stream.write(b"here")
    options = ("-o", "subformat=monolithicSparse") if format == "vmdk" else ()
    command = ("qemu-img", "convert", "-f", "raw", "-O", format, *options, str(disk), str(image))
    subprocess.run(command, check=True, capture_output=True)
    async with world(tmp_path) as cloud:
        volume = await cloud.create(imageRef=cloud.images.add(image.read_bytes(), disk_format=format))
        [name] = cloud.files()
        assert name == volume["id"]
        with (cloud.directory / "volumes" / name).open("rb") as stream:
            stream.seek(1 << 20)
            assert stream.read(5) == b"here\0"
            assert stream.seek(0, 2) == 1 << 30
