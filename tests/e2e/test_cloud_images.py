"""Images of a real guest in a whole cloud: its files are in them, and a guest that boots from one has them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.certificates import Signer
from tests.e2e.boot_files import boot_files
from tests.e2e.cloud import RealCloud
from tests.e2e.guests import Guest, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

OCTETS = {"content-type": "application/octet-stream"}
MOUNT = "mkdir -p /tmp/disk && mount -t vfat /dev/vda1 /tmp/disk"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(cloud: RealCloud) -> AsyncIterator[Guest]:
    tenant = await cloud.tenant("10.81.0.0/24")
    try:
        made = await tenant.boot("dora")
        await made.ready()
        yield made
    finally:
        for image in (await tenant.person.do("GET", "/image/v2/images?visibility=private"))["images"]:
            await tenant.person.do("DELETE", f"/image/v2/images/{image['id']}")
        await tenant.clear()
    assert cloud.guest_leftovers() == []


async def _write(guest: Guest, text: str) -> None:
    await guest.ssh(f"{MOUNT} && echo {text} >/tmp/disk/{text}.txt && umount /tmp/disk && sync")


async def _image(guest: Guest, action: str, status: str, **fields: Any) -> dict[str, Any]:
    """Make an image of a guest, and wait until it is complete."""
    person = guest.tenant.person
    made = (await person.do("POST", f"{guest.path}/action", {action: {"name": action, **fields}}))["image_id"]
    seen: list[str] = []

    async def complete() -> bool:
        task = (await guest.show())["OS-EXT-STS:task_state"]
        if task not in seen:
            seen.append(task)
        return task is None

    await until(complete, lambda: f"the image to be made: {seen}", 240)
    assert (await guest.show())["status"] == status
    image: dict[str, Any] = await person.do("GET", f"/image/v2/images/{made}")
    assert (image["status"], image["disk_format"], image["instance_uuid"]) == ("active", "qcow2", guest.id), seen
    return image


async def _files(guest: Guest, image: str, name: str) -> list[str]:
    """Boot a guest from an image, and return the files that ours has written."""
    other = await guest.tenant.boot(name, imageRef=image)
    await other.ready()
    found = (await other.ssh(f"{MOUNT} && cat /tmp/disk/*.txt")).split()
    await other.release_floating_ip()
    await other.delete()
    return found


async def test_a_running_guest_is_in_its_image(guest: Guest) -> None:
    life = await guest.ssh("cat /proc/sys/kernel/random/boot_id")
    await _write(guest, "running")
    image = await _image(guest, "createImage", "ACTIVE", metadata={"purpose": "e2e"})
    assert (image["image_type"], image["purpose"], image["min_disk"]) == ("snapshot", "e2e", 1)
    assert await guest.ssh("cat /proc/sys/kernel/random/boot_id") == life, "it went on"
    assert await _files(guest, image["id"], "dora-live") == ["running"]


async def test_a_stopped_guest_is_in_its_image(guest: Guest) -> None:
    await _write(guest, "stopped")
    await guest.act("os-stop", status="SHUTOFF")
    image = await _image(guest, "createImage", "SHUTOFF")
    await guest.act("os-start", status="ACTIVE")
    assert await _files(guest, image["id"], "dora-cold") == ["running", "stopped"]


async def test_old_backups_are_deleted(guest: Guest, cloud: RealCloud) -> None:
    made = [(await _image(guest, "createBackup", "ACTIVE", backup_type="daily", rotation=2))["id"] for _ in range(3)]
    query = f"instance_uuid={guest.id}&image_type=backup"
    left = (await guest.tenant.person.do("GET", f"/image/v2/images?{query}"))["images"]
    assert [image["id"] for image in left] == made[:0:-1]
    await cloud.wait_clean()


async def test_a_shelved_guest_comes_back_with_its_files(guest: Guest, cloud: RealCloud) -> None:
    await _write(guest, "shelved")
    before = await guest.show()
    await guest.act("shelve", status="SHELVED_OFFLOADED")
    assert cloud.guest_leftovers() == [], "nothing of it is on the host"
    await guest.act("unshelve", status="ACTIVE")
    await guest.ready()
    assert "shelved" in (await guest.ssh(f"{MOUNT} && cat /tmp/disk/*.txt && umount /tmp/disk")).split()
    assert (await guest.show())["addresses"] == before["addresses"]
    await cloud.wait_clean()
    made = (await guest.tenant.person.do("GET", f"/image/v2/images?instance_uuid={guest.id}"))["images"]
    assert [image["name"] for image in made if image["name"].endswith("-shelved")] == []


async def test_a_host_verifies_a_signed_image(guest: Guest, cloud: RealCloud) -> None:
    """A guest boots from the data that was signed; from other data none does, and nothing of it is cached."""
    person = guest.tenant.person
    data = await person.do("GET", f"/image/v2/images/{cloud.image}/file")
    signer = Signer("RSA-PSS")
    certificates = cloud.directory / "certificates"
    certificates.mkdir()
    (certificates / "images.pem").write_bytes(signer.pem)
    wanted = {"name": "signed", "disk_format": "qcow2", "container_format": "bare", **signer.properties(data, "images")}
    image = (await person.do("POST", "/image/v2/images", wanted))["id"]
    answer = await person.request("PUT", f"/image/v2/images/{image}/file", data[:-1], OCTETS)
    assert answer.status == 400 and b"Signature verification failed" in answer.body
    await person.do("PUT", f"/image/v2/images/{image}/file", data, OCTETS)
    trusting = {"imageRef": image, "trusted_image_certificates": ["images"]}
    right = await guest.tenant.boot("dora-signed", **trusting)
    await right.ready()
    assert (await right.show())["trusted_image_certificates"] == ["images"]

    cached = _cached(cloud)
    other = signer.properties(b"other data", "images")
    changes = [{"op": "replace", "path": f"/{name}", "value": value} for name, value in other.items()]
    kind = {"content-type": "application/openstack-images-v2.1-json-patch"}
    await person.do("PATCH", f"/image/v2/images/{image}", changes, kind)
    wrong = await guest.tenant.boot("dora-forged", **trusting)
    fault = (await wrong.wait("ERROR"))["fault"]["message"]
    assert fault == f"The image {image} is refused: its signature is not that of its data."
    assert _cached(cloud) <= cached
    await wrong.delete()
    await right.delete()
    await cloud.wait_clean()


async def test_a_guest_is_booted_by_a_kernel_of_its_own(
    guest: Guest, cloud: RealCloud, test_image: Path, tmp_path: Path
) -> None:
    """From three images: the kernel and the initial file system of the test image, and a disk without a boot sector."""
    person, files = guest.tenant.person, boot_files(test_image, tmp_path)

    async def upload(name: str, format: str, data: bytes, **properties: str) -> str:
        wanted = {"name": name, "disk_format": format, "container_format": format, **properties}
        made = (await person.do("POST", "/image/v2/images", wanted))["id"]
        await person.do("PUT", f"/image/v2/images/{made}/file", data, OCTETS)
        return str(made)

    kernel = await upload("kernel", "aki", files["vmlinuz"])
    ramdisk = await upload("ramdisk", "ari", files["initrd"])
    disk = await upload("disk", "ami", bytes(1 << 20), kernel_id=kernel, ramdisk_id=ramdisk)
    direct = await guest.tenant.boot("dora-direct", imageRef=disk)
    await direct.ready()
    assert "root=/dev/vda console=tty0 console=ttyS0" in await direct.ssh("cat /proc/cmdline")
    await direct.act("reboot", {"type": "HARD"}, "ACTIVE")
    await direct.ready(2)
    await direct.release_floating_ip()
    await direct.delete()
    await cloud.wait_clean()


def _cached(cloud: RealCloud) -> set[str]:
    return {path.name for path in (cloud.libvirt / "base").iterdir()}
