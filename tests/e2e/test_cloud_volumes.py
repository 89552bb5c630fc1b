"""Volumes of servers in a whole cloud: attached by the API, seen inside the guest, and given back."""

import pytest

from tests.e2e.cloud import RealCloud, real_cloud
from tests.e2e.guests import until
from tests.people import Person

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

VOLUMES = "/volume/v3/volumes"


async def status_is(person: Person, volume_id: str, wanted: str) -> None:
    async def reached() -> bool:
        found = (await person.do("GET", f"{VOLUMES}/{volume_id}"))["volume"]["status"]
        return bool(found == wanted)

    await until(reached, f"the volume to be {wanted}")


async def test_a_volume_is_attached_extended_and_detached(can_run_guests: None) -> None:
    async with real_cloud(RealCloud()) as cloud:
        tenant = await cloud.tenant("10.86.0.0/24")
        person = tenant.person
        volume_id = (await person.do("POST", VOLUMES, {"volume": {"size": 1}}))["volume"]["id"]
        guest = await tenant.boot("vera")
        await guest.ready()
        await status_is(person, volume_id, "available")
        attachments = f"{guest.path}/os-volume_attachments"
        await person.do("POST", attachments, {"volumeAttachment": {"volumeId": volume_id}})
        await status_is(person, volume_id, "in-use")
        await guest.ssh(
            "while [ ! -b /dev/vdb ]; do sleep 0.2; done; echo kept | dd of=/dev/vdb bs=512 conv=sync; sync"
        )
        assert (await guest.ssh("cat /sys/block/vdb/serial")).strip() == volume_id[:20]
        newest = {"openstack-api-version": "volume 3.71"}
        await person.do("POST", f"{VOLUMES}/{volume_id}/action", {"os-extend": {"new_size": 2}}, newest)
        await guest.ssh("while [ $(cat /sys/block/vdb/size) != 4194304 ]; do sleep 0.2; done")
        await guest.ssh("echo late | dd of=/dev/vdb bs=512 seek=4194303 conv=sync; sync")
        await status_is(person, volume_id, "in-use")
        await person.do("DELETE", f"{attachments}/{volume_id}")
        await status_is(person, volume_id, "available")
        with (cloud.directory / "volumes" / "volumes" / volume_id).open("rb") as stream:
            assert stream.read(4) == b"kept"
            stream.seek(-512, 2)
            assert stream.read(4) == b"late"
        await guest.delete()
        await person.do("DELETE", f"{VOLUMES}/{volume_id}")
        await tenant.clear()
