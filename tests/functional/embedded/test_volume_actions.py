"""Actions and attachments of volumes, on both databases."""

import asyncio
import errno
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.volume.backend.exports import Export, SimulatedExports
from micronova.objects.errors import TooLarge
from tests.unit.embedded.volume.world import ADMIN, BOB, READER, World, world

CONNECTOR = {"host": "fake-1", "mountpoint": "/dev/vdb"}
SERVICE = "nova@service/service"


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url, make_exports=lambda files: SimulatedExports(files.root)) as made:
        yield made


async def status(cloud: World, volume: dict[str, Any]) -> str:
    return str((await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"])


async def test_extend(cloud: World) -> None:
    volume = await cloud.create()
    assert (await cloud.act(volume["id"], "os-extend", new_size=3)).status == 202
    shown = await cloud.until(f"/volumes/{volume['id']}", "available")
    assert shown["size"] == 3
    assert (cloud.directory / "volumes" / volume["id"]).stat().st_size == 3 << 30
    for size in (3, 2, 0, -1, 2**63, "x"):
        assert (await cloud.act(volume["id"], "os-extend", new_size=size)).status == 400, size
    usage = (await cloud.do("GET", "/os-quota-sets/p1?usage=true"))["quota_set"]
    assert usage["gigabytes"]["in_use"] == usage["gigabytes___DEFAULT__"]["in_use"] == 3


async def test_what_a_status_does_not_allow_is_said_in_words(cloud: World) -> None:
    volume = await cloud.create()
    snapshot = await cloud.snapshot(volume["id"])
    backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]
    found = {"volume": volume, "snapshot": snapshot, "backup": backup}
    paths = {noun: f"/{noun}s/{each['id']}" for noun, each in found.items()}
    await cloud.until(paths["backup"], "available")
    for noun, wrong in (("volume", "maintenance"), ("snapshot", "error"), ("backup", "error")):
        await cloud.do("POST", f"{paths[noun]}/action", {"os-reset_status": {"status": wrong}}, token=ADMIN)

    async def refused(path: str, body: object) -> str:
        answer = await cloud.call("POST", path, body, token=ADMIN)
        assert answer.status == 400
        return str(answer.json()["badRequest"]["message"])

    is_maintained = f"Invalid volume: Volume {volume['id']} is maintenance; to"
    act = f"{paths['volume']}/action"
    assert [
        await refused(act, {"os-extend": {"new_size": 3}}),
        await refused(act, {"os-volume_upload_image": {"image_name": "an image", "force": True}}),
        await refused("/snapshots", {"snapshot": {"volume_id": volume["id"], "force": True}}),
        await refused("/backups", {"backup": {"volume_id": volume["id"], "force": True}}),
    ] == [
        f"{is_maintained} extend it, it must be available or in-use.",
        f"{is_maintained} make an image of it, it must be available or in-use.",
        f"{is_maintained} take a snapshot of it, it must be available or in-use.",
        f"{is_maintained} back it up, it must be available or in-use.",
    ]
    of_snapshot = {"backup": {"volume_id": volume["id"], "snapshot_id": snapshot["id"]}}
    said = f"Invalid snapshot: Snapshot {snapshot['id']} is error; to back it up, it must be available."
    assert await refused("/backups", of_snapshot) == said
    said = f"Invalid backup: Backup {backup['id']} is error; to restore it, it must be available."
    assert await refused(f"{paths['backup']}/restore", {"restore": {}}) == said


async def test_flags(cloud: World) -> None:
    volume = await cloud.create()
    assert (await cloud.act(volume["id"], "os-set_bootable", bootable=True)).status == 200
    assert (await cloud.act(volume["id"], "os-update_readonly_flag", readonly=True)).status == 202
    shown = (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]
    assert (shown["bootable"], shown["metadata"]) == ("true", {"readonly": "True"})
    body = {"attachment": {"volume_uuid": volume["id"], "mode": "rw"}}
    assert (await cloud.call("POST", "/attachments", body)).status == 400  # it is read-only
    assert (await cloud.act(volume["id"], "os-set_bootable", bootable="zork")).status == 400
    assert (await cloud.act(volume["id"], "os-set_bootable", bootable=True, token=READER)).status == 403
    assert (await cloud.act(volume["id"], "os-set_bootable", bootable=True, token=BOB)).status == 404


async def test_metadata(cloud: World) -> None:
    volume = await cloud.create(metadata={"a": "1"})
    for path in (
        f"/volumes/{volume['id']}/metadata",
        f"/snapshots/{(await cloud.snapshot(volume['id']))['id']}/metadata",
    ):
        await cloud.do("PUT", path, {"metadata": {"a": "1"}})
        assert (await cloud.do("POST", path, {"metadata": {"b": "2"}}))["metadata"] == {"a": "1", "b": "2"}
        assert (await cloud.do("PUT", f"{path}/a", {"meta": {"a": "3"}}))["meta"] == {"a": "3"}
        assert (await cloud.do("GET", f"{path}/a"))["meta"] == {"a": "3"}
        assert (await cloud.do("GET", path))["metadata"] == {"a": "3", "b": "2"}
        assert (await cloud.call("DELETE", f"{path}/a")).status == 200
        assert (await cloud.call("DELETE", f"{path}/a")).status == 404
        assert (await cloud.call("PUT", f"{path}/a", {"meta": {"b": "3"}})).status == 400
        many = {"metadata": {f"k{number}": "" for number in range(129)}}
        assert (await cloud.call("PUT", path, many)).status == 400
        assert (await cloud.call("GET", path, token=BOB)).status == 404
    act = "os-set_image_metadata"
    assert (await cloud.act(volume["id"], act, metadata={"x": "y"})).json() == {"metadata": {"x": "y"}}
    assert (await cloud.act(volume["id"], "os-show_image_metadata")).json() == {"metadata": {"x": "y"}}
    assert (await cloud.act(volume["id"], "os-unset_image_metadata", key="x")).status == 200
    assert (await cloud.act(volume["id"], "os-unset_image_metadata", key="x")).status == 404


async def test_attachments(cloud: World) -> None:
    """Reserved, connected, completed, deleted; the volume's status follows."""
    volume, server = await cloud.create(), str(uuid.uuid4())
    body = {"attachment": {"volume_uuid": volume["id"], "instance_uuid": server, "mode": "rw"}}
    made = (await cloud.do("POST", "/attachments", body))["attachment"]
    assert made == {
        "id": made["id"], "status": "reserved", "instance": server, "volume_id": volume["id"], "attached_at": "",
        "detached_at": "", "attach_mode": "rw", "connection_info": {},
    }  # fmt: skip
    assert await status(cloud, volume) == "reserved"
    other = {"attachment": {**body["attachment"], "instance_uuid": str(uuid.uuid4())}}
    assert (await cloud.call("POST", "/attachments", other)).status == 400
    path = f"/attachments/{made['id']}"
    update = {"attachment": {"connector": CONNECTOR}}
    connected = (await cloud.do("PUT", path, update, token=SERVICE))["attachment"]
    assert connected["status"] == "attaching"
    info = connected["connection_info"]
    assert (info["driver_volume_type"], info["volume_id"], info["access_mode"]) == ("nbd", volume["id"], "rw")
    assert (await cloud.do("GET", path))["attachment"]["connection_info"] == {}  # not for the project
    assert (await cloud.call("POST", f"{path}/action", {"os-complete": None}, minor=43)).status == 404
    assert (await cloud.call("POST", f"{path}/action", {"os-complete": None})).status == 204
    shown = (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]
    assert shown["status"] == "in-use"
    assert [(each["server_id"], each["device"], each["host_name"]) for each in shown["attachments"]] == [
        (server, "/dev/vdb", None)
    ]
    assert (await cloud.call("DELETE", f"/volumes/{volume['id']}")).status == 400
    assert (await cloud.call("DELETE", f"/volumes/{volume['id']}?force=true", token=ADMIN)).status == 400
    for query, number in (("", 1), (f"?instance_id={server}", 1), ("?status=reserved", 0), ("?volume_id=x", 0)):
        assert len((await cloud.do("GET", f"/attachments/detail{query}"))["attachments"]) == number, query
    assert (await cloud.do("GET", "/attachments", token=BOB))["attachments"] == []
    for method, given in (("GET", None), ("PUT", update), ("DELETE", None)):
        assert (await cloud.call(method, path, given, token=BOB)).status == 404
    assert (await cloud.call("DELETE", path, token=READER)).status == 403
    assert (await cloud.do("DELETE", path, token=SERVICE))["attachments"] == []
    assert await status(cloud, volume) == "available"
    assert (await cloud.call("GET", path)).status == 404
    assert (await cloud.call("GET", "/attachments", minor=26)).status == 404


async def test_an_attachment_with_a_connector_is_made_at_once_or_not_at_all(cloud: World) -> None:
    volume = await cloud.create()
    body: dict[str, Any] = {"attachment": {"volume_uuid": volume["id"], "connector": CONNECTOR}}
    made = (await cloud.do("POST", "/attachments", body))["attachment"]
    assert made["status"] == "attaching"
    await cloud.do("DELETE", f"/attachments/{made['id']}", token=SERVICE)
    body["attachment"]["connector"] = {"ip": "10.0.0.1"}
    assert (await cloud.call("POST", "/attachments", body)).status == 400
    assert await status(cloud, volume) == "available"
    assert (await cloud.do("GET", "/attachments"))["attachments"] == []


class BrokenExports(SimulatedExports):
    """Exports that cannot open the files of volumes."""

    async def serve(self, export: Export) -> None:
        raise OSError(errno.EIO, "Input/output error")


async def test_an_attachment_that_cannot_be_served_is_not_kept(tmp_path: Path) -> None:
    async with world(tmp_path, make_exports=lambda files: BrokenExports(files.root)) as cloud:
        volume = await cloud.create()
        body = {"attachment": {"volume_uuid": volume["id"], "connector": CONNECTOR}}
        assert (await cloud.call("POST", "/attachments", body)).status == 500
        assert await status(cloud, volume) == "available"
        assert (await cloud.do("GET", "/attachments"))["attachments"] == []


async def test_several_servers(cloud: World) -> None:
    spec = {"name": "multi", "extra_specs": {"multiattach": "<is> True"}}
    await cloud.do("POST", "/types", {"volume_type": spec}, token=ADMIN)
    volume = await cloud.create(volume_type="multi")
    assert volume["multiattach"] is True
    ids = []
    for _ in range(2):
        body = {"attachment": {"volume_uuid": volume["id"], "instance_uuid": str(uuid.uuid4()), "connector": CONNECTOR}}
        ids.append((await cloud.do("POST", "/attachments", body))["attachment"]["id"])
        await cloud.do("POST", f"/attachments/{ids[-1]}/action", {"os-complete": None})
    left = (await cloud.do("DELETE", f"/attachments/{ids[0]}", token=SERVICE))["attachments"]
    assert [each["id"] for each in left] == ids[1:]
    assert await status(cloud, volume) == "in-use"
    await cloud.do("DELETE", f"/attachments/{ids[1]}", token=SERVICE)
    assert await status(cloud, volume) == "available"


async def test_attaching_by_actions(cloud: World) -> None:
    volume = await cloud.create()
    id, server = volume["id"], str(uuid.uuid4())
    assert (await cloud.act(id, "os-reserve")).status == 202
    assert await status(cloud, volume) == "attaching"
    assert (await cloud.act(id, "os-reserve")).status == 400
    assert (await cloud.act(id, "os-unreserve")).status == 202
    assert await status(cloud, volume) == "available"
    info = (await cloud.act(id, "os-initialize_connection", connector=CONNECTOR)).json()["connection_info"]
    assert info["driver_volume_type"] == "nbd" and info["data"]["volume_id"] == id
    for wrong in ("rwx", 7):
        assert (await cloud.act(id, "os-initialize_connection", connector=CONNECTOR | {"mode": wrong})).status == 400
    assert (await cloud.act(id, "os-attach", instance_uuid=server, mountpoint="/dev/vdc")).status == 202
    assert await status(cloud, volume) == "in-use"
    assert (await cloud.act(id, "os-begin_detaching")).status == 202
    assert (await cloud.act(id, "os-roll_detaching")).status == 202
    assert await status(cloud, volume) == "in-use"
    assert (await cloud.act(id, "os-detach", attachment_id=str(uuid.uuid4()))).status == 400
    assert (await cloud.act(id, "os-terminate_connection", connector=CONNECTOR)).status == 202
    assert (await cloud.act(id, "os-detach")).status == 202
    assert await status(cloud, volume) == "available"
    assert (await cloud.act(id, "os-attach", mountpoint="/dev/vdc")).status == 400
    await cloud.act(id, "os-attach", host_name="h", mountpoint="/dev/vdc")
    assert (await cloud.act(id, "os-force_detach")).status == 403
    assert (await cloud.act(id, "os-force_detach", token=ADMIN)).status == 202
    assert await status(cloud, volume) == "available"


async def test_an_administrator_resets_and_deletes_by_force(cloud: World) -> None:
    volume = await cloud.create()
    assert (await cloud.act(volume["id"], "os-reset_status", status="error")).status == 403
    assert (await cloud.act(volume["id"], "os-reset_status", status="in-use", token=ADMIN)).status == 202
    assert (await cloud.act(volume["id"], "os-reset_status", status="zork", token=ADMIN)).status == 400
    assert (await cloud.act(volume["id"], "os-reset_status", token=ADMIN)).status == 400
    assert (await cloud.call("DELETE", f"/volumes/{volume['id']}")).status == 400
    assert (await cloud.act(volume["id"], "os-force_delete", token=ADMIN)).status == 202
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert cloud.files() == []


async def test_a_delete_by_force_waits_for_the_work_that_runs(cloud: World) -> None:
    """A download that nobody wants any more leaves no file."""
    cloud.images.hold = asyncio.Event()
    volume = await cloud.create(imageRef=cloud.images.add(b"x" * (3 << 20)), wait="downloading")
    assert (await cloud.act(volume["id"], "os-force_delete", token=ADMIN)).status == 202
    cloud.images.hold.set()
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert cloud.files() == []


async def test_retype(cloud: World) -> None:
    other = (await cloud.do("POST", "/types", {"volume_type": {"name": "other"}}, token=ADMIN))["volume_type"]
    volume = await cloud.create(size=2)
    assert (await cloud.act(volume["id"], "os-retype", new_type="other")).status == 202
    shown = (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]
    assert (shown["volume_type"], shown["volume_type_id"]) == ("other", other["id"])
    assert (await cloud.act(volume["id"], "os-retype", new_type="other")).status == 400
    assert (await cloud.act(volume["id"], "os-retype", new_type="none")).status == 400
    usage = (await cloud.do("GET", "/os-quota-sets/p1?usage=1"))["quota_set"]
    assert (usage["gigabytes_other"]["in_use"], usage["gigabytes___DEFAULT__"]["in_use"]) == (2, 0)


async def test_revert(cloud: World) -> None:
    volume = await cloud.create()
    file = cloud.directory / "volumes" / volume["id"]
    with file.open("r+b") as stream:
        stream.write(b"before")
    first = await cloud.snapshot(volume["id"])
    newest = await cloud.snapshot(volume["id"])
    with file.open("r+b") as stream:
        stream.write(b"after!")
    assert (await cloud.act(volume["id"], "revert", snapshot_id=first["id"])).status == 400
    assert (await cloud.act(volume["id"], "revert", snapshot_id=newest["id"])).status == 202
    await cloud.until(f"/volumes/{volume['id']}", "available")
    assert file.open("rb").read(6) == b"before"
    assert (await cloud.call("POST", f"/volumes/{volume['id']}/action", {"revert": {}}, minor=39)).status == 404


async def test_an_image_is_created_only_of_a_volume_that_can_be_read(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request that takes the volume meanwhile is refused, or leaves no image without data."""
    volume, create, reserved = await cloud.create(), cloud.images.create, 0

    async def late(document: Mapping[str, Any], token: str) -> Mapping[str, Any]:
        nonlocal reserved
        reserved = (await cloud.act(volume["id"], "os-reserve")).status
        return await create(document, token)

    monkeypatch.setattr(cloud.images, "create", late)
    answer = await cloud.act(volume["id"], "os-volume_upload_image", image_name="copy")
    assert (reserved, answer.status, len(cloud.images.documents)) in ((400, 202, 1), (202, 400, 0))


async def test_a_volume_whose_image_cannot_be_created_is_free_again(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(document: Mapping[str, Any], token: str) -> Mapping[str, Any]:
        raise TooLarge("The project has too many images.")

    volume = await cloud.create()
    monkeypatch.setattr(cloud.images, "create", refuse)
    assert (await cloud.act(volume["id"], "os-volume_upload_image", image_name="copy")).status == 413
    assert await status(cloud, volume) == "available"
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert (await cloud.do("GET", "/messages"))["messages"] == []


async def test_an_image_of_a_volume(cloud: World) -> None:
    volume = await cloud.create()
    answer = await cloud.act(volume["id"], "os-volume_upload_image", image_name="copy")
    assert answer.status == 202
    shown = answer.json()["os-volume_upload_image"]
    assert (shown["status"], shown["image_name"], shown["disk_format"]) == ("uploading", "copy", "raw")
    await cloud.until(f"/volumes/{volume['id']}", "available")
    assert len(cloud.images.data[shown["image_id"]]) == 1 << 30
    assert cloud.images.documents[shown["image_id"]]["status"] == "active"
    for wrong in ({"disk_format": "qcow2"}, {"disk_format": "zork"}, {"image_name": ""}):
        fields = {"image_name": "x", **wrong}
        assert (await cloud.act(volume["id"], "os-volume_upload_image", **fields)).status == 400
    public = await cloud.act(volume["id"], "os-volume_upload_image", image_name="x", visibility="public")
    assert public.status == 403
