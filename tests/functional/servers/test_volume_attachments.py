"""The volumes of servers, from the table of block devices."""

import uuid
from typing import Any

import pytest

from micronova.db import instances
from micronova.db.tables import block_devices
from micronova.objects.block_device import BlockDevice
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.schemas.tempest import check, versions_of

CLOUD = CloudOptions(roles=("volume",))
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


async def _attach(cloud: Cloud, server: str, **fields: Any) -> BlockDevice:
    """Record a volume that the volume service does not know."""
    fields.setdefault("boot_index", None)
    device = BlockDevice(
        uuid=str(uuid.uuid4()), source_type="volume", destination_type="volume", volume_id=str(uuid.uuid4()), **fields
    )
    row = instances.device_row(server, device)
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


async def test_a_volume_that_does_not_exist(user: Caller) -> None:
    server, volume = (await user.boot())["id"], str(uuid.uuid4())
    path, body = f"/servers/{server}/os-volume_attachments", {"volumeAttachment": {"volumeId": volume}}
    assert await user.refused(404, "POST", path, body) == f"Volume {volume} could not be found."
    assert await user.refused(404, "GET", f"{path}/{volume}") == f"Instance {server} is not attached to volume {volume}"
    for minor in (1, 88):
        wrong = await user.at(minor).refused(404, "DELETE", f"{path}/{volume}")
        assert wrong == f"Instance {server} is not attached to volume {volume}"
    assert volume in await user.refused(404, "PUT", f"{path}/{volume}", body)
    await user.refused(404, "POST", f"/servers/{uuid.uuid4()}/os-volume_attachments", body)


@pytest.mark.parametrize(
    ("minor", "fields", "good"),
    [
        (1, {"device": "/dev/vdb"}, True),
        (1, {"device": None}, True),
        (1, {"device": "vdb"}, False),
        (1, {"volumeId": "x"}, False),
        (48, {"tag": "t"}, False),
        (49, {"tag": "t"}, True),
        (49, {"tag": "a,b"}, False),
        (78, {"delete_on_termination": True}, False),
        (79, {"delete_on_termination": "true"}, True),
        (79, {"zork": 1}, False),
    ],
)
async def test_bodies_of_an_attach(user: Caller, minor: int, fields: dict[str, Any], good: bool) -> None:
    server = (await user.boot())["id"]
    body = {"volumeAttachment": {"volumeId": str(uuid.uuid4()), **fields}}
    status = 404 if good else 400  # there is no such volume
    await user.at(minor).refused(status, "POST", f"/servers/{server}/os-volume_attachments", body)


async def test_an_update(cloud: Cloud, user: Caller) -> None:
    server, attachment = (await user.boot())["id"], str(uuid.uuid4())
    made = await _attach(cloud, server, device_name="/dev/vdb", tag="t", attachment_id=attachment)
    path = f"/servers/{server}/os-volume_attachments/{made.volume_id}"
    shown = (await user.at(85).get(path))["volumeAttachment"]
    assert shown["delete_on_termination"] is True
    changed = {"volumeAttachment": {**shown, "delete_on_termination": False}}
    assert (await user.at(85).request("PUT", path, changed)).status == 202
    assert (await user.at(85).get(path))["volumeAttachment"] == changed["volumeAttachment"]
    for name in ("id", "serverId"):
        wrong = {"volumeAttachment": {**shown, name: str(uuid.uuid4())}}
        assert name in await user.refused(400, "PUT", path, wrong)
    for fields in ({"device": "/dev/vdc"}, {"tag": "u"}, {"zork": 1}):
        await user.refused(400, "PUT", path, {"volumeAttachment": {**shown, **fields}})
    # Another volume is a swap, which a block storage service asks for; before 2.85 every update is one.
    swap = {"volumeAttachment": {"volumeId": str(uuid.uuid4())}}
    await user.refused(403, "PUT", path, swap)
    await user.at(84).refused(403, "PUT", path, swap)
    missing = f"/servers/{server}/os-volume_attachments/{uuid.uuid4()}"
    await user.admin.refused(404, "PUT", missing, swap)
    await user.admin.at(84).refused(404, "PUT", missing, swap)
    await user.admin.at(84).refused(400, "PUT", path, {"volumeAttachment": {**swap["volumeAttachment"], "tag": "t"}})
    await cloud.caller().refused(404, "PUT", path, changed)
    await user.delete(path, 202)  # a volume that was deleted by force can be detached

    async def gone() -> bool | None:
        return (await user.request("GET", path)).status == 404 or None

    await cloud.until(gone, "the volume to be detached")


async def test_servers_have_no_shares(cloud: Cloud, user: Caller) -> None:
    server, share = (await user.boot())["id"], str(uuid.uuid4())
    path, body = f"/servers/{server}/shares", {"share": {"share_id": share, "tag": "data-1"}}
    assert await user.at(97).get(path) == {"shares": []}
    await user.at(96).refused(404, "GET", path)
    await user.refused(400, "GET", f"{path}?zork=1")
    assert await user.refused(404, "GET", f"{path}/{share}") == f"Share {share} could not be found."
    await user.refused(409, "POST", path, body)  # only while it is stopped
    await user.refused(409, "DELETE", f"{path}/{share}")
    await user.act(server, "os-stop")
    await user.wait_for(server, "SHUTOFF")
    assert "no shared file system service" in await user.refused(501, "POST", path, body)
    await user.refused(404, "DELETE", f"{path}/{share}")
    for fields in ({"share_id": "x"}, {"tag": ""}, {"tag": "a b"}, {"zork": 1}):
        await user.refused(400, "POST", path, {"share": {"share_id": share, **fields}})
    await cloud.caller().refused(404, "GET", path)
    await cloud.caller().refused(404, "POST", path, body)


async def test_assisted_snapshots_are_for_volumes_of_servers(user: Caller) -> None:
    path, id = "/os-assisted-volume-snapshots", str(uuid.uuid4())
    info = {"snapshot_id": id, "type": "qcow2", "new_file": "x"}
    body = {"snapshot": {"volume_id": id, "create_info": info}}
    await user.refused(403, "POST", path, body)
    assert id in await user.admin.refused(400, "POST", path, body)
    wrong = {"snapshot": {"volume_id": id, "create_info": {**info, "type": "raw"}}}
    assert "type" in await user.admin.refused(400, "POST", path, wrong)
    for query in ("", "?delete_info=zork", "?delete_info=[]", "?delete_info={}", '?delete_info={"volume_id":1}'):
        assert "delete_info" in await user.admin.refused(400, "DELETE", f"{path}/{id}{query}")
    assert "zork" in await user.admin.refused(400, "DELETE", f'{path}/{id}?delete_info={{"volume_id":"zork"}}')
    await user.refused(403, "DELETE", f"{path}/{id}")
