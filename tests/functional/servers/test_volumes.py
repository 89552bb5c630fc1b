"""Servers with volumes: attach, detach, boot from volume, delete; on the embedded volume service."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from micronova.cli.audit import run_audit, run_repair
from micronova.clients.volume.client import VolumeClient
from micronova.db import instances
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Unavailable
from micronova.servers import create, create_volumes
from tests.functional.cloud import IMAGE, Caller, Cloud, CloudOptions, OneProcess, only_in_one_process

CLOUD = CloudOptions(roles=("volume",), hosts=4)
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


class Volumes:
    """The volume service as a user of compute has it."""

    def __init__(self, user: Caller) -> None:
        self._user = user

    async def request(self, method: str, path: str, body: Any = None, user: Caller | None = None) -> Any:
        caller = user or self._user
        headers = {
            "x-auth-token": caller.token,
            "openstack-api-version": "volume 3.71",
            "content-type": "application/json",
        }
        data = None if body is None else msgspec.json.encode(body)
        answer = await caller.cloud.transport.request(method, f"/volume/v3{path}", headers, data)
        assert answer.status < 400, (method, path, answer.status, answer.body)
        return answer.json()

    async def create(self, **fields: Any) -> str:
        """Create a volume, and wait until it is available."""
        made = (await self.request("POST", "/volumes", {"volume": {"size": 1, **fields}}))["volume"]["id"]
        await self.until(made, "available")
        return str(made)

    async def show(self, id: str) -> Any:
        return (await self.request("GET", f"/volumes/{id}"))["volume"]

    async def ids(self) -> set[str]:
        return {each["id"] for each in (await self.request("GET", "/volumes"))["volumes"]}

    async def until(self, id: str, status: str) -> Any:
        async def probe() -> Any:
            found = await self.show(id)
            return found if found["status"] == status else None

        return await self._user.cloud.until(probe, f"volume {id} to be {status}")

    async def attachments(self) -> list[Any]:
        return list((await self.request("GET", "/attachments"))["attachments"])

    async def multiattach_type(self) -> str:
        """Create a type of volumes that several servers may have."""
        body = {"volume_type": {"name": f"t-{uuid.uuid4()}", "extra_specs": {"multiattach": "<is> True"}}}
        made = await self.request("POST", "/types", body, self._user.admin)
        return str(made["volume_type"]["name"])


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Volumes]:
    yield Volumes(user)


def attachment(volume: str, **fields: Any) -> dict[str, Any]:
    return {"volumeAttachment": {"volumeId": volume, **fields}}


async def test_attach_and_detach(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    server, volume = (await user.boot())["id"], await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    answer = await user.at(100).request("POST", path, attachment(volume))
    assert answer.status == 200, answer.body
    assert answer.json()["volumeAttachment"]["device"] == "/dev/vdb"
    shown = await volumes.until(volume, "in-use")
    [held] = shown["attachments"]
    assert (held["server_id"], held["device"]) == (server, "/dev/vdb")
    [listed] = (await user.get(path))["volumeAttachments"]
    assert listed["volumeId"] == volume and listed["attachment_id"] == held["attachment_id"]
    assert (await user.show(server))["os-extended-volumes:volumes_attached"] == [
        {"id": volume, "delete_on_termination": False}
    ]
    listed = (await user.get("/servers/detail"))["servers"]
    assert [each["os-extended-volumes:volumes_attached"][0]["id"] for each in listed if each["id"] == server] == [
        volume
    ]
    assert "already attached" in await user.refused(400, "POST", path, attachment(volume))
    assert (await user.request("DELETE", f"{path}/{volume}")).status == 202
    await volumes.until(volume, "available")
    assert (await user.get(path))["volumeAttachments"] == []
    await user.refused(404, "DELETE", f"{path}/{volume}")
    await cloud.assert_clean()


async def test_a_deleted_server_gives_its_volumes_back(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    server = (await user.boot())["id"]
    kept, leaving = await volumes.create(), await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    await asyncio.gather(
        user.at(100).post(path, attachment(kept), 200),
        user.at(100).post(path, attachment(leaving, delete_on_termination=True), 200),
    )
    devices = {each["device"] for each in (await user.get(path))["volumeAttachments"]}
    assert devices == {"/dev/vdb", "/dev/vdc"}
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(kept, "available")

    async def removed() -> bool | None:
        return leaving not in await volumes.ids() or None

    await cloud.until(removed, "the volume to be deleted")
    assert await volumes.attachments() == []


async def test_boot_from_an_existing_volume(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    volume = await volumes.create()
    body = user.body(
        imageRef=None,
        block_device_mapping_v2=[
            {"boot_index": 0, "uuid": volume, "source_type": "volume", "destination_type": "volume"}
        ],
    )
    assert "not bootable" in await user.refused(400, "POST", "/servers", body)
    await volumes.request("POST", f"/volumes/{volume}/action", {"os-set_bootable": {"bootable": True}})
    server = (await user.post("/servers", body))["server"]["id"]
    shown = await user.wait_for(server, "ACTIVE")
    assert shown["image"] == "" and shown["os-extended-volumes:volumes_attached"][0]["id"] == volume
    await volumes.until(volume, "in-use")
    path = f"/servers/{server}/os-volume_attachments"
    assert "root device" in await user.refused(400, "DELETE", f"{path}/{volume}")
    assert "Invalid volume" in await user.refused(400, "POST", "/servers", body)
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(volume, "available")
    await cloud.assert_clean()


async def test_new_volumes_of_a_server(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    origin = await volumes.create()
    snapshot = (await volumes.request("POST", "/snapshots", {"snapshot": {"volume_id": origin}}))["snapshot"]["id"]

    async def made() -> Any:
        found = (await volumes.request("GET", f"/snapshots/{snapshot}"))["snapshot"]
        return found if found["status"] == "available" else None

    await cloud.until(made, "the snapshot")
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {"source_type": "blank", "destination_type": "volume", "volume_size": 1, "delete_on_termination": True},
        {"source_type": "snapshot", "destination_type": "volume", "uuid": snapshot, "tag": "copy"},
    ]
    server = (await user.boot(block_device_mapping_v2=devices))["id"]
    listed = (await user.get(f"/servers/{server}/os-volume_attachments"))["volumeAttachments"]
    assert [each["device"] for each in listed] == ["/dev/vdb", "/dev/vdc"]
    blank, copy = (each["volumeId"] for each in listed)
    assert (await volumes.show(blank))["name"] == f"{server}-blank-vol"
    assert (await volumes.show(copy))["snapshot_id"] == snapshot
    assert {(await volumes.show(each))["status"] for each in (blank, copy)} == {"in-use"}
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(copy, "available")

    async def removed() -> bool | None:
        return blank not in await volumes.ids() or None

    await cloud.until(removed, "the blank volume to be deleted")
    await cloud.assert_clean()


async def test_volumes_follow_a_server_that_moves(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    volume = await volumes.create()
    server = (await user.boot())["id"]
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(volume), 200)
    await volumes.until(volume, "in-use")

    async def place() -> tuple[str, str]:
        host = (await user.admin.show(server))["OS-EXT-SRV-ATTR:host"]
        [held] = await volumes.attachments()
        info = (await volumes.request("GET", f"/attachments/{held['id']}", user=user.admin))["attachment"]
        assert held["id"] == (await user.get(path))["volumeAttachments"][0]["attachment_id"]
        assert info["status"] == "attached"
        return host, (await volumes.request("GET", f"/volumes/{volume}", user=user.admin))["volume"]["attachments"][0][
            "host_name"
        ]

    first = await place()
    assert first[0] == first[1]
    await user.admin.act(server, "migrate")
    await user.wait_for(server, "VERIFY_RESIZE")
    await cloud.assert_clean()
    moved = await place()
    assert moved[0] == moved[1] != first[0]
    await user.act(server, "revertResize")
    await user.wait_for(server, "ACTIVE")
    await cloud.assert_clean()
    assert await place() == first
    await user.admin.act(server, "os-migrateLive", {"host": None, "block_migration": "auto"})
    await user.wait_for(server, "ACTIVE")
    await cloud.assert_clean()
    there = await place()
    assert there[0] == there[1] != first[0]
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(volume, "available")


async def test_what_cannot_be_attached(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    server, volume = (await user.boot())["id"], await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    stranger = cloud.caller()
    theirs = await Volumes(stranger).create()
    missing = str(uuid.uuid4())
    for wrong in (theirs, missing):
        assert wrong in await user.refused(404, "POST", path, attachment(wrong))
    await stranger.refused(404, "POST", path, attachment(theirs))
    await stranger.refused(404, "DELETE", f"{path}/{theirs}")
    await user.refused(400, "POST", path, attachment("zork"))
    await user.at(100).post(path, attachment(volume, device="/dev/vdf"), 200)
    more = await volumes.create()
    assert "/dev/vdf" in await user.refused(409, "POST", path, attachment(more, device="/dev/vdf"))
    assert (await volumes.show(more))["status"] == "available"  # the reservation was given back
    second = (await user.boot())["id"]
    refused = await user.refused(400, "POST", f"/servers/{second}/os-volume_attachments", attachment(volume))
    assert "Invalid volume" in refused
    await user.admin.act(server, "lock")
    await user.refused(409, "POST", path, attachment(more))
    await user.refused(409, "DELETE", f"{path}/{volume}")
    await user.admin.act(server, "unlock")
    await user.act(server, "suspend")
    await user.wait_for(server, "SUSPENDED")
    await user.refused(409, "POST", path, attachment(more))
    await cloud.assert_clean()


async def test_several_servers_have_one_volume(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    volume = await volumes.create(volume_type=await volumes.multiattach_type())
    servers = await user.boot_many(2)
    path = "/servers/{}/os-volume_attachments"
    old = await user.at(59).refused(400, "POST", path.format(servers[0]), attachment(volume))
    assert "2.60" in old
    for server in servers:
        await user.at(100).post(path.format(server), attachment(volume), 200)

    async def both() -> bool | None:
        return len((await volumes.show(volume))["attachments"]) == 2 or None

    await cloud.until(both, "both attachments")
    await user.request("DELETE", path.format(servers[0]) + f"/{volume}")

    async def one() -> bool | None:
        return len((await volumes.show(volume))["attachments"]) == 1 or None

    await cloud.until(one, "one attachment to be left")
    await user.delete(f"/servers/{servers[1]}")
    await volumes.until(volume, "available")


async def test_an_attachment_that_fails_is_undone(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    name = f"vm-{uuid.uuid4().hex[:8]}"
    server, volume = (await user.boot(name=name))["id"], await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    async with cloud.faults({"operation": "attach_volume", "name": name, "kind": "fail", "message": "no more slots"}):
        assert "no more slots" in await user.at(100).refused(500, "POST", path, attachment(volume))
    await volumes.until(volume, "available")
    assert (await user.get(path))["volumeAttachments"] == []
    await user.at(100).post(path, attachment(volume), 200)
    await volumes.until(volume, "in-use")
    async with cloud.faults({"operation": "detach_volume", "name": name, "kind": "fail"}):
        await user.request("DELETE", f"{path}/{volume}")
        await user.wait_for(server, "ACTIVE")
        await volumes.until(volume, "in-use")
    await user.request("DELETE", f"{path}/{volume}")
    await volumes.until(volume, "available")
    await cloud.assert_clean()


async def test_a_volume_that_cannot_be_made(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    body = {"quota_set": {"volumes": 0}}
    await volumes.request("PUT", f"/os-quota-sets/{user.project}", body, user.admin)
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {"source_type": "blank", "destination_type": "volume", "volume_size": 1},
    ]
    server = await user.create(block_device_mapping_v2=devices)
    failed = await user.wait_for(server, "ERROR")
    assert "olume" in failed["fault"]["message"] and "quota" in failed["fault"]["message"].lower()
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await cloud.assert_clean()


async def test_a_volume_that_grows(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    server, volume = (await user.boot())["id"], await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(volume), 200)
    await volumes.until(volume, "in-use")
    await volumes.request("POST", f"/volumes/{volume}/action", {"os-extend": {"new_size": 2}})
    assert (await volumes.until(volume, "in-use"))["size"] == 2
    event = {"name": "volume-extended", "server_uuid": server, "tag": volume}
    await cloud.until(lambda: extended(user, server), "the guest to see the new size")
    answer = await user.admin.post("/os-server-external-events", {"events": [event]}, 200)
    assert answer["events"][0]["code"] == 200
    await user.wait_for(server, "ACTIVE")
    wrong = {**event, "tag": str(uuid.uuid4())}
    answer = await user.admin.post("/os-server-external-events", {"events": [wrong]}, 207)
    assert answer["events"][0]["code"] == 422
    actions = (await user.get(f"/servers/{server}/os-instance-actions"))["instanceActions"]
    assert [each["action"] for each in actions[:3]] == ["extend_volume", "extend_volume", "attach_volume"]
    await cloud.assert_clean()


async def extended(user: Caller, server: str) -> Any:
    """Return the event of the newest instance action, if that is an extend that is done."""
    actions = f"/servers/{server}/os-instance-actions"
    newest = (await user.get(actions))["instanceActions"][0]
    if newest["action"] != "extend_volume":
        return None
    events = (await user.get(f"{actions}/{newest['request_id']}"))["instanceAction"]["events"]
    return events[0] if events and events[0]["finish_time"] else None


async def test_a_guest_that_cannot_see_that_its_volume_has_grown(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    name = f"vm-{uuid.uuid4().hex[:8]}"
    server, volume = (await user.boot(name=name))["id"], await volumes.create()
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    await volumes.until(volume, "in-use")
    async with cloud.faults({"operation": "extend_volume", "name": name, "kind": "fail"}):
        await volumes.request("POST", f"/volumes/{volume}/action", {"os-extend": {"new_size": 2}})
        event = await cloud.until(lambda: extended(user, server), "the end of the attempt")
    assert event["result"] == "Error"
    assert (await volumes.until(volume, "in-use"))["size"] == 2
    await user.wait_for(server, "ACTIVE")
    await cloud.assert_clean()


async def test_a_suspended_guest_is_told_when_it_is_resumed(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    server, volume = (await user.boot())["id"], await volumes.create()
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    await volumes.until(volume, "in-use")
    await user.act(server, "suspend")
    await user.wait_for(server, "SUSPENDED")
    await volumes.request("POST", f"/volumes/{volume}/action", {"os-extend": {"new_size": 2}})
    assert (await volumes.until(volume, "in-use"))["size"] == 2
    await user.act(server, "resume")
    assert (await cloud.until(lambda: extended(user, server), "the guest to be told"))["result"] == "Success"
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([{"boot_index": 0, "source_type": "image", "destination_type": "volume", "uuid": IMAGE}], "non-zero size"),
        ([{"boot_index": 0, "source_type": "volume", "destination_type": "local", "uuid": IMAGE}], "destination_type"),
        ([{"boot_index": 0, "source_type": "volume", "uuid": IMAGE}], "failed to get volume"),
        ([{"boot_index": 0, "source_type": "snapshot", "uuid": IMAGE}], "failed to get snapshot"),
        ([{"boot_index": 1, "source_type": "volume", "uuid": IMAGE}], "bootable volume"),
        (
            [
                {"boot_index": 0, "source_type": "volume", "uuid": IMAGE},
                {"boot_index": 2, "source_type": "volume", "uuid": IMAGE},
            ],
            "Boot sequence",
        ),
        (
            [
                {
                    "boot_index": 0,
                    "source_type": "image",
                    "destination_type": "volume",
                    "volume_size": 1,
                    "uuid": IMAGE,
                    "volume_type": "zork",
                }
            ],
            "Volume type zork",
        ),
    ],
)
async def test_block_devices_that_are_refused(user: Caller, devices: list[dict[str, Any]], text: str) -> None:
    body = user.body(imageRef=None, block_device_mapping_v2=devices)
    assert text in await user.refused(400, "POST", "/servers", body)


async def test_the_audit_finds_contradictions(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = (await user.boot())["id"]
    leaked, lost, unseen = [await volumes.create() for _ in range(3)]
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(lost), 200)
    await volumes.until(lost, "in-use")
    stranger = (await user.boot())["id"]
    await user.delete(f"/servers/{stranger}")
    await user.gone(stranger)
    for nobody in (str(uuid.uuid4()), str(uuid.uuid4())):  # never a server: that is the affair of who wrote it
        body = {"attachment": {"volume_uuid": await volumes.create(), "instance_uuid": nobody}}
        await volumes.request("POST", "/attachments", body)
    body = {"attachment": {"volume_uuid": leaked, "instance_uuid": stranger}}
    made = (await volumes.request("POST", "/attachments", body))["attachment"]["id"]
    held = {each["volumeId"]: each["attachment_id"] for each in (await user.get(path))["volumeAttachments"]}
    await volumes.request("DELETE", f"/attachments/{held[lost]}", user=user.admin)
    body = {"attachment": {"volume_uuid": unseen, "instance_uuid": server}}
    device = BlockDevice(
        uuid=str(uuid.uuid4()),
        source_type="volume",
        destination_type="volume",
        volume_id=unseen,
        attachment_id=(await volumes.request("POST", "/attachments", body))["attachment"]["id"],
        connected_host=await user.host_of(server),
        device_name="/dev/vdx",
        boot_index=None,
        delete_on_termination=False,
    )
    assert cloud.process.database is not None
    await cloud.process.database.write(instances.add_device, server, device)
    findings = [each for each in await run_audit(cloud.process) if each["kind"] == "volume"]
    found = {each["subject"]: each["message"] for each in findings}
    assert set(found) == {leaked, lost, unseen}
    assert stranger in found[leaked] and "gone" in found[leaked]
    assert "no such attachment" in found[lost] and "does not have the volume" in found[unseen]
    [repair] = [repair for each in findings for repair in each.get("repairs", ())]
    with monkeypatch.context() as patched:  # a region has a hundred thousand, and thousands of repairs after a restore
        patched.delattr(VolumeClient, "server_attachments")
        assert made in await run_repair(cloud.process, repair)
        assert await run_repair(cloud.process, repair) == ""
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await cloud.assert_clean()


async def test_an_attachment_that_a_restored_database_does_not_know_is_left(
    cloud: Cloud, user: Caller, volumes: Volumes
) -> None:
    """Its guest uses the volume: only who asks for just this repair takes it away."""
    server, volume = (await user.boot())["id"], await volumes.create()
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    await volumes.until(volume, "in-use")
    assert cloud.process.database is not None
    device, *_ = await cloud.process.database.read(instances.volumes_of, server)
    await cloud.process.database.write(instances.remove_device, device.uuid)
    try:
        host = await user.host_of(server)
        [found] = [each for each in await run_audit(cloud.process) if each["kind"] == "volume"]
        [repair] = found["repairs"]
        assert found["subject"] == volume and repair["destroys"]
        assert f"The guest on {host} uses it" in repair["text"]
        async with cloud.forced_down(host):
            [found] = [each for each in await run_audit(cloud.process) if each["kind"] == "volume"]
            assert found["repairs"][0]["destroys"] and f"host {host} has not said" in found["repairs"][0]["text"]
    finally:
        await cloud.process.database.write(instances.add_device, server, device)
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(volume, "available")
    await cloud.assert_clean()


async def test_volumes_follow_a_server_that_is_evacuated(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    volume, server = await volumes.create(), (await user.boot())["id"]
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    lost = await user.host_of(server)
    async with cloud.forced_down(lost):
        await user.admin.act(server, "evacuate", {}, 200)
        await user.wait_for(server, "SHUTOFF", "ACTIVE")
        assert await user.host_of(server) != lost

        async def followed() -> bool | None:
            held = (await volumes.request("GET", f"/volumes/{volume}", user=user.admin))["volume"]["attachments"]
            hosts = {each["host_name"] for each in held}
            return hosts == {await user.host_of(server)} or None

        await cloud.until(followed, "the volume to be on the new host")
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(volume, "available")
    await cloud.assert_clean()


@pytest.mark.parametrize("turns", [0, 3, 10, 30, 100])
async def test_a_server_with_volumes_is_deleted_while_it_is_built(
    cloud: Cloud, user: Caller, volumes: Volumes, turns: int
) -> None:
    volume = await volumes.create()
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {"source_type": "volume", "destination_type": "volume", "uuid": volume},
        {"source_type": "blank", "destination_type": "volume", "volume_size": 1, "delete_on_termination": True},
    ]
    server = await user.create(block_device_mapping_v2=devices)
    for _ in range(turns):
        await asyncio.sleep(0)
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(volume, "available")

    async def alone() -> bool | None:
        return await volumes.ids() == {volume} or None

    await cloud.until(alone, "the blank volume to be deleted")
    assert await volumes.attachments() == []
    await cloud.assert_clean()


async def test_a_server_is_deleted_while_its_volumes_are_made(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volumes that go with their server do, also if it is gone before they are recorded."""
    made, go_on = asyncio.Event(), asyncio.Event()
    original = VolumeClient.create_for

    async def create(self: VolumeClient, uuid: str, device: BlockDevice, token: str) -> Any:
        volume = await original(self, uuid, device, token)
        made.set()
        await go_on.wait()
        return volume

    monkeypatch.setattr(VolumeClient, "create_for", create)
    blank = {"source_type": "blank", "destination_type": "volume", "volume_size": 1}
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {**blank, "delete_on_termination": True},
        {**blank, "delete_on_termination": False},
    ]
    booting = asyncio.ensure_future(user.post("/servers", user.body(block_device_mapping_v2=devices)))
    await asyncio.wait_for(made.wait(), 20)
    [server] = [each["id"] for each in (await user.get("/servers"))["servers"]]
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    go_on.set()
    await booting

    async def one_left() -> bool | None:
        return len(await volumes.ids()) == 1 or None

    await cloud.until(one_left, "the volume that goes with its server to be deleted")
    assert await volumes.attachments() == []
    await cloud.assert_clean()


@pytest.mark.parametrize("made", [True, False])
async def test_the_volume_service_does_not_answer_when_a_volume_is_made(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """A conductor goes on, and the volume is made once."""
    original, failed = VolumeClient.create_for, False

    async def create(self: VolumeClient, uuid: str, device: BlockDevice, token: str) -> Any:
        nonlocal failed
        if failed:
            return await original(self, uuid, device, token)
        failed = True
        if made:
            await original(self, uuid, device, token)
        raise Unavailable("The volume service does not answer.")

    monkeypatch.setattr(VolumeClient, "create_for", create)
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {"source_type": "blank", "destination_type": "volume", "volume_size": 1, "delete_on_termination": True},
    ]
    server = (await user.boot(block_device_mapping_v2=devices))["id"]
    assert len(await volumes.ids()) == 1
    await user.delete(f"/servers/{server}")
    await user.gone(server)

    async def none_left() -> bool | None:
        return await volumes.ids() == set() or None

    await cloud.until(none_left, "the volume to be deleted")
    await cloud.assert_clean()


async def test_the_database_does_not_answer_when_a_volume_is_recorded(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is accepted, so its user is not told to try again; a conductor finds the volume."""
    start, failed = create_volumes._start, list[str]()

    def away(conn: Any, uuid: str, *args: Any) -> bool:
        if failed:
            return start(conn, uuid, *args)
        failed.append(uuid)
        raise Unavailable("The database does not answer.")

    monkeypatch.setattr(create_volumes, "_start", away)
    monkeypatch.setattr(create, "CREATION_TIME", 2.0)
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {"source_type": "blank", "destination_type": "volume", "volume_size": 1, "delete_on_termination": True},
    ]
    server = (await user.boot(block_device_mapping_v2=devices))["id"]
    assert failed == [server] and len(await volumes.ids()) == 1
    await user.delete(f"/servers/{server}")
    await user.gone(server)

    async def none_left() -> bool | None:
        return await volumes.ids() == set() or None

    await cloud.until(none_left, "the volume to be deleted")
    await cloud.assert_clean()


async def test_a_volume_whose_status_was_reset_goes_to_no_second_server(
    cloud: Cloud, user: Caller, volumes: Volumes
) -> None:
    """Two guests would write to it. The volume service gives it away, because an administrator says that it is free."""
    [first, second], volume = await user.boot_many(2), await volumes.create()
    path = "/servers/{}/os-volume_attachments"
    await user.at(100).post(path.format(first), attachment(volume), 200)
    await volumes.until(volume, "in-use")
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {"source_type": "volume", "destination_type": "volume", "uuid": volume},
    ]
    reset = {"os-reset_status": {"status": "available"}}
    told = f"Invalid volume: volume {volume} is already attached to instances: {first}"
    for where, body in (
        (path.format(second), attachment(volume)),
        (path.format(first), attachment(volume)),
        ("/servers", user.body(block_device_mapping_v2=devices)),
    ):
        await volumes.request("POST", f"/volumes/{volume}/action", reset, user.admin)
        assert await user.refused(400, "POST", where, body) == told
    await volumes.until(volume, "in-use")  # what was reserved for the create is given back
    await user.delete(f"{path.format(first)}/{volume}", 202)
    await volumes.until(volume, "available")
    await user.at(100).post(path.format(second), attachment(volume), 200)
    await cloud.assert_clean()


async def test_the_answer_to_a_reservation_is_lost(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation is given back, and the volume can be attached to another server."""
    servers, volume = await user.boot_many(2), await volumes.create()
    original = VolumeClient.reserve

    async def reserve(self: VolumeClient, *args: Any) -> str:
        await original(self, *args)
        raise Unavailable("The volume service does not answer.")

    path = "/servers/{}/os-volume_attachments"
    with monkeypatch.context() as patched:
        patched.setattr(VolumeClient, "reserve", reserve)
        await user.refused(503, "POST", path.format(servers[0]), attachment(volume))
    await volumes.until(volume, "available")
    await user.at(100).post(path.format(servers[1]), attachment(volume), 200)
    await cloud.assert_clean()


async def test_the_answer_to_the_beginning_of_a_detach_is_lost(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps the volume, also for the volume service, which took it for one that is being detached."""
    server, volume = (await user.boot())["id"], await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(volume), 200)
    await volumes.until(volume, "in-use")
    original = VolumeClient.begin_detaching

    async def begin_detaching(self: VolumeClient, *args: Any) -> None:
        await original(self, *args)
        raise Unavailable("The volume service does not answer.")

    with monkeypatch.context() as patched:
        patched.setattr(VolumeClient, "begin_detaching", begin_detaching)
        await user.refused(503, "DELETE", f"{path}/{volume}")
    await volumes.until(volume, "in-use")
    await user.delete(f"{path}/{volume}", 202)
    await volumes.until(volume, "available")
    await cloud.assert_clean()


async def test_a_detach_that_is_not_recorded_while_the_volume_service_is_away(
    cloud: OneProcess, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, volume = (await user.boot())["id"], await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(volume), 200)
    await volumes.until(volume, "in-use")
    database, roll_detaching = cloud.process.database, VolumeClient.roll_detaching
    assert database is not None
    original, away = database.write, True

    async def write(fn: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__qualname__", "") == "ServerVolumes.detach.<locals>.record":
            raise Unavailable("The database does not answer.")
        return await original(fn, *args, **kwargs)

    async def refuse_once(self: VolumeClient, volume_id: str) -> None:
        nonlocal away
        was_away, away = away, False
        if was_away:
            raise Unavailable("The volume service does not answer.")
        await roll_detaching(self, volume_id)

    with monkeypatch.context() as patched:
        patched.setattr(database, "write", write)
        patched.setattr(VolumeClient, "roll_detaching", refuse_once)
        assert await user.refused(503, "DELETE", f"{path}/{volume}") == "The database does not answer."
        await volumes.until(volume, "in-use")
    await user.delete(f"{path}/{volume}", 202)
    await volumes.until(volume, "available")
    await cloud.assert_clean()


@pytest.mark.parametrize("committed", [True, False])
async def test_the_answer_to_the_record_of_a_server_is_lost(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """A server that is recorded keeps the volumes that are reserved for it; else they are given back."""
    volume = await volumes.create()
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": IMAGE},
        {"source_type": "volume", "destination_type": "volume", "uuid": volume},
    ]
    database = cloud.process.database
    assert database is not None
    original = database.write

    async def write(fn: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__qualname__", "") != "ServerCreator._record":
            return await original(fn, *args, **kwargs)
        if committed:
            await original(fn, *args, **kwargs)
        raise Unavailable("The database does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(database, "write", write)
        answer = await user.request("POST", "/servers", user.body(block_device_mapping_v2=devices))
        assert answer.status == 503, answer.body
    if not committed:
        await volumes.until(volume, "available")
        return
    [server] = [each["id"] for each in (await user.get("/servers"))["servers"]]
    await user.wait_for(server, "ACTIVE")
    await volumes.until(volume, "in-use")
    await cloud.assert_clean()


async def test_a_server_whose_root_volume_is_blank_moves_without_its_disks(cloud: Cloud, user: Caller) -> None:
    """It has no disk on its host, so a live migration need not copy any."""
    blank = {"boot_index": 0, "source_type": "blank", "destination_type": "volume", "volume_size": 1}
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[{**blank, "delete_on_termination": True}]))["id"]
    host = (await user.admin.show(server))["OS-EXT-SRV-ATTR:host"]
    move = {"host": None, "block_migration": False}
    await user.admin.act(server, "os-migrateLive", move)
    await user.wait_for(server, "ACTIVE")
    assert (await user.admin.show(server))["OS-EXT-SRV-ATTR:host"] != host
    await cloud.assert_clean()
    local = (await user.boot())["id"]
    refused = await user.admin.refused(400, "POST", f"/servers/{local}/action", {"os-migrateLive": move})
    assert "share no storage" in refused
