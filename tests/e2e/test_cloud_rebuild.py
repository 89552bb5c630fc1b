"""A guest of a whole cloud is rebuilt: a new disk, and the same place in the network."""

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud, processes
from tests.e2e.guest_view import process_of
from tests.e2e.guests import Guest, Tenant

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500), pytest.mark.asyncio(loop_scope="session")]

SECTOR = 512
OWN = 1 << 20  # the sector at which the guest writes: 512 MiB from the begin of its disk, far behind the image
MARK = b"this-is-the-other-image"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tenant(cloud: RealCloud) -> AsyncIterator[Tenant]:
    made = await cloud.tenant("10.79.0.0/24")
    try:
        yield made
    finally:
        await made.clear()
    assert cloud.guest_leftovers() == []


async def _other_image(tenant: Tenant, test_image: Path, folder: Path) -> tuple[str, int]:
    """Upload an image that boots and has a mark in its last sector; return its id and that sector."""
    raw = folder / "other.raw"
    subprocess.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(test_image), str(raw)], check=True)
    content = raw.read_bytes() + MARK.ljust(SECTOR, b"\0")
    wanted = {"name": "other", "disk_format": "raw", "container_format": "bare"}
    image = await tenant.person.do("POST", "/image/v2/images", wanted)
    kind = {"content-type": "application/octet-stream"}
    await tenant.person.do("PUT", f"/image/v2/images/{image['id']}/file", content, kind)
    return str(image["id"]), len(content) // SECTOR - 1


async def _sector(guest: Guest, number: int) -> str:
    """Return the text in a sector of the guest's disk."""
    return await guest.ssh(f"dd if=/dev/vda bs={SECTOR} skip={number} count=1 2>/dev/null | tr -d '\\0'")


async def test_rebuild(cloud: RealCloud, tenant: Tenant, test_image: Path, tmp_path: Path) -> None:
    image, last = await _other_image(tenant, test_image, tmp_path)
    guest = await tenant.boot("rita")
    first = await guest.ready()
    port, address = await guest.port(), await guest.floating_ip()
    user = process_of(guest.id).uid
    await guest.ssh(f"echo precious | dd of=/dev/vda bs={SECTOR} seek={OWN} conv=notrunc 2>/dev/null; sync")
    assert await _sector(guest, OWN) == "precious\n"
    await guest.act("reboot", {"type": "HARD"}, status="ACTIVE")
    await guest.ready(2)
    assert await _sector(guest, OWN) == "precious\n", "the disk survives a reboot"
    assert await _sector(guest, last) == ""

    await guest.act("rebuild", {"imageRef": image, "name": "rosa", "metadata": {"a": "b"}}, status="ACTIVE")
    said = await guest.ready()  # it has a new console log
    assert (said["uuid"], said["ip"]) == (guest.id, first["ip"])
    assert said["hostname"] == "rita", "a new name does not change the host name"
    assert await guest.port() == {**port, "revision_number": (await guest.port())["revision_number"]} | {
        "updated_at": (await guest.port())["updated_at"]
    }
    assert await guest.floating_ip() == address
    assert await _sector(guest, OWN) == "", "what was written before is gone"
    assert await _sector(guest, last) == MARK.decode(), "it has the other image"
    assert process_of(guest.id).uid == user
    shown = await guest.show()
    assert (shown["name"], shown["image"]["id"], shown["metadata"]) == ("rosa", image, {"a": "b"})

    await guest.act("os-stop", status="SHUTOFF")
    await guest.act("rebuild", {"imageRef": cloud.image}, status="SHUTOFF")
    assert not [line for line in processes(guest.id) if "qemu-system" in line], "it is not started"
    await guest.act("os-start", status="ACTIVE")
    assert (await guest.ready())["ip"] == first["ip"]
    assert await _sector(guest, last) == ""
    await cloud.wait_clean()
