"""The volumes of servers, from the table of block devices."""

import uuid
from typing import Any

import msgspec
import pytest

from micronova.db.tables import block_devices
from micronova.objects.block_device import BlockDevice
from tests.functional.cloud import Caller, Cloud
from tests.schemas.tempest import check, versions_of


async def _attach(cloud: Cloud, server: str, **fields: Any) -> BlockDevice:
    """Record a volume, as the conductor will."""
    device = BlockDevice(
        uuid=str(uuid.uuid4()), source_type="volume", destination_type="volume", volume_id=str(uuid.uuid4()), **fields
    )
    row = {"uuid": device.uuid, "instance_uuid": server, "device": msgspec.to_builtins(device)}
    assert cloud.process.database is not None
    await cloud.process.database.write(lambda conn: conn.execute(block_devices.insert().values(row)))
    return device


@pytest.mark.parametrize("minor", versions_of("servers"))
async def test_the_forms(cloud: Cloud, user: Caller, minor: int) -> None:
    server = (await user.boot())["id"]
    path = f"/servers/{server}/os-volume_attachments"
    old = user.at(minor)
    assert await old.get(path) == {"volumeAttachments": []}  # the image's disk is no volume
    made = await _attach(cloud, server, device_name="/dev/vdb", tag="t", attachment_id=str(uuid.uuid4()))
    answer = await old.request("GET", path)
    check("servers", "list_volume_attachments", minor, answer.status, answer.json())
    [listed] = answer.json()["volumeAttachments"]
    answer = await old.request("GET", f"{path}/{made.volume_id}")
    check("servers", "show_volume_attachment", minor, answer.status, answer.json())
    assert answer.json()["volumeAttachment"] == listed
    assert (listed["volumeId"], listed["serverId"], listed["device"]) == (made.volume_id, server, "/dev/vdb")
    assert listed.get("id") == (made.volume_id if minor < 89 else None)
    assert listed.get("bdm_uuid") == (made.uuid if minor >= 89 else None)


async def test_pages_and_strangers(cloud: Cloud, user: Caller) -> None:
    server = (await user.boot())["id"]
    path = f"/servers/{server}/os-volume_attachments"
    made = {(await _attach(cloud, server)).volume_id for _ in range(3)}
    old = user.at(88)
    seen = [
        (await old.get(f"{path}?limit=1&offset={number}"))["volumeAttachments"][0]["volumeId"] for number in range(3)
    ]
    assert set(seen) == made and (await old.get(f"{path}?offset=3"))["volumeAttachments"] == []
    assert len((await old.get(f"{path}?limit=0"))["volumeAttachments"]) == 3
    assert await user.get(path) == {"volumeAttachments": []}  # since 2.89 only those with an attachment
    await old.refused(404, "GET", f"{path}/{uuid.uuid4()}")
    await user.refused(404, "GET", f"{path}/{seen[0]}")
    await cloud.caller().refused(404, "GET", path)
    await cloud.caller().at(88).refused(404, "GET", f"{path}/{seen[0]}")
    await old.refused(400, "GET", f"{path}?limit=-1")
    await user.at(74).get(f"{path}?zork=1")
    await user.at(75).refused(400, "GET", f"{path}?zork=1")
