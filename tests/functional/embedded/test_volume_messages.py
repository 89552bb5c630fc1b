"""What users are told about operations that failed: the cause, and not another one."""

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.volume.backend.exports import SimulatedExports
from micronova.embedded.volume.backend.keys import KeyBox
from micronova.exporter.client import ExportFailed
from tests.unit.embedded.volume.world import ADMIN, SECRET_KEY, SERVICE, World, world

ENCRYPTION = {"provider": "luks", "control_location": "front-end"}


class RefusingExports(SimulatedExports):
    """Exports whose storage daemons refuse a new size."""

    async def resize(self, volume_id: str, size: int) -> None:
        raise ExportFailed("The volume cannot be served: it is broken.")


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, make_exports=lambda files: RefusingExports(tmp_path)) as made:
        yield made


async def told(cloud: World, volume_id: str) -> str:
    """Wait for the message about a volume; return its text."""
    async with asyncio.timeout(20):
        while True:
            for each in (await cloud.do("GET", "/messages"))["messages"]:
                if each["resource_uuid"] == volume_id:
                    return str(each["user_message"])
            await asyncio.sleep(0.005)


async def encrypted_type(cloud: World) -> None:
    made = (await cloud.do("POST", "/types", {"volume_type": {"name": "LUKS"}}, token=ADMIN))["volume_type"]["id"]
    await cloud.do("POST", f"/types/{made}/encryption", {"encryption": ENCRYPTION}, token=ADMIN)


async def test_a_storage_daemon_that_refuses(cloud: World) -> None:
    volume = (await cloud.create())["id"]
    body = {"attachment": {"volume_uuid": volume, "instance_uuid": str(uuid.uuid4()), "connector": {"host": "h"}}}
    made = (await cloud.do("POST", "/attachments", body, token=SERVICE))["attachment"]["id"]
    await cloud.do("POST", f"/attachments/{made}/action", {"os-complete": None}, token=SERVICE)
    assert (await cloud.act(volume, "os-extend", new_size=2)).status == 202
    assert "storage daemon" in await told(cloud, volume)


async def test_a_file_that_is_gone(cloud: World) -> None:
    volume = (await cloud.create())["id"]
    (cloud.directory / "volumes" / volume).unlink()
    assert (await cloud.act(volume, "os-extend", new_size=2)).status == 202
    assert "its file is gone" in await told(cloud, volume)
    other = (await cloud.create())["id"]
    snapshot = (await cloud.snapshot(other))["id"]
    (cloud.directory / "snapshots" / snapshot).unlink()
    copy = await cloud.create(snapshot_id=snapshot, wait=None)
    assert "made of is gone" in await told(cloud, copy["id"])


async def test_an_image_that_the_image_service_does_not_give_out(cloud: World) -> None:
    image = cloud.images.add(b"x")
    del cloud.images.data[image]
    volume = await cloud.create(imageRef=image, wait=None)
    assert "the image service" in await told(cloud, volume["id"])


async def test_a_key_that_another_secret_key_has_encrypted(tmp_path: Path) -> None:
    async with world(tmp_path) as cloud:
        await encrypted_type(cloud)
        volume = (await cloud.create(volume_type="LUKS"))["id"]
        snapshot = (await cloud.snapshot(volume))["id"]
    async with world(tmp_path, keys=KeyBox(bytes(len(SECRET_KEY)))) as cloud:
        assert (await cloud.act(volume, "revert", snapshot_id=snapshot)).status == 202
        assert "cannot read its key" in await told(cloud, volume)


@pytest.mark.parametrize("volume_type", [None, "LUKS"])
async def test_an_image_whose_data_is_damaged(cloud: World, tmp_path: Path, volume_type: str | None) -> None:
    if volume_type is not None:
        await encrypted_type(cloud)
    path = tmp_path / "image"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"], check=True)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 7 0 1M", str(path)], check=True, capture_output=True)
    data = bytearray(path.read_bytes())
    first_table = int.from_bytes(data[40:48], "big")
    data[first_table : first_table + 8] = (1 << 63 | 0x1_0200).to_bytes(8, "big")  # names no second table
    image = cloud.images.add(bytes(data), disk_format="qcow2")
    volume = await cloud.create(imageRef=image, wait=None, volume_type=volume_type)
    assert "not of the format" in await told(cloud, volume["id"])
    assert cloud.files() == []


@pytest.mark.parametrize("volume_type", [None, "LUKS"])
async def test_a_disk_that_is_full_while_an_image_is_converted(
    cloud: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, volume_type: str | None
) -> None:
    """It fails and leaves nothing, so that the user can delete something; it does not repeat for ever."""
    if volume_type is not None:
        await encrypted_type(cloud)
    path = tmp_path / "image"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"], check=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    full: Any = programs / "qemu-img"
    full.write_text("#!/bin/sh\necho 'qemu-img: error while writing: No space left on device'\nexit 1\n")
    full.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    volume = await cloud.create(
        imageRef=cloud.images.add(path.read_bytes(), disk_format="qcow2"), wait=None, volume_type=volume_type
    )
    assert "no space left" in await told(cloud, volume["id"])
    assert cloud.files() == []
