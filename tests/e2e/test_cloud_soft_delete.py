"""A guest whose server is soft-deleted is off, keeps its disk and its address, and is back after a restore."""

import pytest

from tests.e2e.cloud import RealCloud, processes, real_cloud
from tests.e2e.guests import Guest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500), pytest.mark.asyncio(loop_scope="session")]

DEFERRED = """
[default]
reclaim_instance_interval = 3600.0
"""
SECTOR = 1 << 20  # behind the image, which is much smaller than 512 MiB


def _runs(guest: Guest) -> bool:
    return any("qemu-system" in line for line in processes(guest.id))


async def test_soft_delete_and_restore(can_run_guests: None) -> None:
    async with real_cloud(RealCloud(DEFERRED)) as cloud:
        tenant = await cloud.tenant("10.80.0.0/24")
        guest = await tenant.boot("sofia")
        first = await guest.ready()
        await guest.ssh(f"echo kept | dd of=/dev/vda bs=512 seek={SECTOR} conv=notrunc 2>/dev/null; sync")
        assert _runs(guest)

        await tenant.person.do("DELETE", guest.path)
        await guest.wait("SOFT_DELETED")
        assert not _runs(guest)
        assert (await tenant.person.do("GET", "/compute/v2.1/servers"))["servers"] == []
        await cloud.wait_clean()

        await guest.act("restore", status="ACTIVE")
        assert (await guest.ready(2))["ip"] == first["ip"]
        kept = await guest.ssh(f"dd if=/dev/vda bs=512 skip={SECTOR} count=1 2>/dev/null | tr -d '\\0'")
        assert kept == "kept\n"

        await tenant.person.do("DELETE", guest.path)
        await guest.wait("SOFT_DELETED")
        await guest.act("forceDelete")
        await guest.gone()
        assert cloud.guest_leftovers() == []
        await tenant.clear()
