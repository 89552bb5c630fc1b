"""A real guest that is resized on its host: its disk grows, its data stay, and a revert gives the old disk back."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud
from tests.e2e.guests import READY, Guest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

LARGER = {"ram": 160, "vcpus": 2, "disk": 2, "swap": 16}
WHERE = 900 << 10  # KiB from the begin of the disk, behind all that the image has


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(cloud: RealCloud) -> AsyncIterator[Guest]:
    tenant = await cloud.tenant("10.83.0.0/24")
    try:
        made = await tenant.boot("grower")
        await made.ready()
        yield made
    finally:
        await tenant.clear()
    assert cloud.guest_leftovers() == []


async def _write(guest: Guest, text: str) -> None:
    """Write to the guest's disk, not to its files: the disk is what a resize copies."""
    await guest.ssh(f"echo {text} | dd of=/dev/vda bs=1024 seek={WHERE} conv=notrunc && sync")


async def _read(guest: Guest) -> tuple[str, int, int]:
    """Return what is written on the disk, its size in GiB, and the number of CPUs."""
    said = await guest.ssh(
        f"dd if=/dev/vda bs=1024 skip={WHERE} count=1 2>/dev/null | head -n 1; cat /sys/class/block/vda/size; nproc"
    )
    text, sectors, cpus = said.splitlines()
    return text, int(sectors) * 512 >> 30, int(cpus)


async def test_a_disk_grows_and_its_data_stay(guest: Guest, cloud: RealCloud) -> None:
    larger = (await cloud.admin.make("/compute/v2.1/flavors", "flavor", name="e2e.larger", **LARGER))["id"]
    boots = (await guest.log()).count(READY)
    await _write(guest, "old")
    await guest.act("resize", {"flavorRef": larger}, "VERIFY_RESIZE")
    await guest.shows(READY, boots + 1)
    assert await _read(guest) == ("old", 2, 2)
    assert cloud.audit() == []
    await _write(guest, "new")

    await guest.act("revertResize", status="ACTIVE")
    await guest.ready(boots + 2)
    assert await _read(guest) == ("old", 1, 1)
    folder = cloud.libvirt / "instances" / guest.id
    assert not (folder / "previous").exists() and not (folder / "disk.swap").exists()

    await guest.act("resize", {"flavorRef": larger}, "VERIFY_RESIZE")
    assert (folder / "previous").exists()
    await guest.shows(READY, boots + 3)
    await _write(guest, "new")
    await guest.act("confirmResize", status="ACTIVE")
    assert not (folder / "previous").exists() and (folder / "disk.swap").exists()
    await guest.act("reboot", {"type": "HARD"}, "ACTIVE")
    await guest.ready(boots + 4)
    assert await _read(guest) == ("new", 2, 2)
    await cloud.wait_clean()


async def test_a_host_without_others_cannot_migrate(guest: Guest, cloud: RealCloud) -> None:
    answer = await cloud.admin.request("POST", f"{guest.path}/action", {"migrate": None})
    assert answer.status == 400, answer.body
    assert b"cannot send servers to other hosts" in answer.body
