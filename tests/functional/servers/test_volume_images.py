"""Images of servers whose root disk is a volume: snapshots of their volumes, and servers that boot from such images."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from micronova.servers import images as server_images
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import call, image, ok
from tests.functional.servers.test_boot_from_volume import device
from tests.functional.servers.test_volumes import Volumes

CLOUD = CloudOptions(roles=("volume", "image"), settings={"conductor": {"lease": 1.0, "sweep_interval": 0.1}}, hosts=2)
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Volumes]:
    yield Volumes(user)


async def _server(user: Caller, **fields: Any) -> str:
    """Boot a server from a volume that is made of an image, with a data volume and an ephemeral disk."""
    source = await image(user, os_distro="zork", min_ram=1)
    blank = {"source_type": "blank", "destination_type": "volume", "volume_size": 2, "delete_on_termination": True}
    mapping = [device(source), blank]
    return str((await user.boot(imageRef=None, block_device_mapping_v2=mapping, **fields))["id"])


async def _image(user: Caller, id: str) -> Any:
    return await ok(user, "GET", f"/image/v2/images/{id}")


async def _snapshots(volumes: Volumes) -> list[Any]:
    return list((await volumes.request("GET", "/snapshots/detail"))["snapshots"])


async def _make(user: Caller, server: str, **fields: Any) -> str:
    made = await user.post(f"/servers/{server}/action", {"createImage": {"name": "safe", **fields}}, 202)
    return str(made["image_id"])


async def test_an_image_of_volumes_and_a_server_of_it(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    server = await _server(user)
    made = await _image(user, await _make(user, server, metadata={"colour": "blue"}))
    assert (await user.show(server))["OS-EXT-STS:task_state"] is None
    assert (made["status"], made["size"], made["bdm_v2"], made["colour"]) == ("active", 0, "True", "blue")
    assert made["os_distro"] == "zork" and made["root_device_name"] == "/dev/vda" and "instance_uuid" not in made
    mapping = msgspec.json.decode(made["block_device_mapping"])
    root, data = (each for each in mapping if each["destination_type"] == "volume")
    assert (root["source_type"], root["boot_index"], root["device_name"]) == ("snapshot", 0, "/dev/vda")
    assert (data["source_type"], data["volume_size"], data["delete_on_termination"]) == ("snapshot", 2, True)
    snapshots = {each["id"]: each for each in await _snapshots(volumes)}
    assert snapshots.keys() == {root["snapshot_id"], data["snapshot_id"]}
    assert {each["name"] for each in snapshots.values()} == {"snapshot for safe"}
    [action] = [
        each
        for each in (await user.get(f"/servers/{server}/os-instance-actions"))["instanceActions"]
        if each["action"] == "createImage"
    ]
    shown = await user.admin.get(f"/servers/{server}/os-instance-actions/{action['request_id']}")
    [event] = shown["instanceAction"]["events"]
    assert (event["event"], event["result"]) == ("api_snapshot_instance", "Success")
    await user.delete(f"/servers/{server}")
    await user.gone(server)

    booted = (await user.boot(imageRef=made["id"]))["id"]
    shown = await user.show(booted)
    assert shown["image"]["id"] == made["id"]
    held = {each["device"]: each["volumeId"] for each in await _held(user, booted)}
    assert held.keys() == {"/dev/vda", "/dev/vdb"}
    assert (await volumes.show(held["/dev/vda"]))["snapshot_id"] == root["snapshot_id"]
    assert (await volumes.show(held["/dev/vdb"]))["size"] == 2
    await cloud.assert_clean()
    again = await _image(user, await _make(user, booted))  # the image's own devices are not inherited
    assert msgspec.json.decode(again["block_device_mapping"])[0]["snapshot_id"] != root["snapshot_id"]


async def _held(user: Caller, server: str) -> list[Any]:
    return list((await user.get(f"/servers/{server}/os-volume_attachments"))["volumeAttachments"])


async def test_devices_of_the_request_win(user: Caller, volumes: Volumes) -> None:
    server = await _server(user)
    made = await _make(user, server)
    own = await volumes.create()
    mapping = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": made},  # as clients do
        {"source_type": "volume", "destination_type": "volume", "uuid": own, "device_name": "/dev/vdb"},
    ]
    booted = (await user.boot(imageRef=made, block_device_mapping_v2=mapping))["id"]
    held = {each["device"]: each["volumeId"] for each in await _held(user, booted)}
    assert held.keys() == {"/dev/vda", "/dev/vdb"} and held["/dev/vdb"] == own
    # A volume of such an image is one of its snapshot.
    booted = (await user.boot(imageRef=None, block_device_mapping_v2=[device(made)]))["id"]
    root = next(each["volumeId"] for each in await _held(user, booted) if each["device"] == "/dev/vda")
    assert (await volumes.show(root))["snapshot_id"] is not None


@pytest.mark.parametrize(
    "mapping",
    [
        "{", "7", '[{"source_type": "zork"}]', '[{"source_type": "snapshot", "boot_index": 0}]',
        '[{"source_type": "blank", "destination_type": "volume", "volume_size": -1}]', '[{"boot_index": "x"}]',
    ],
)  # fmt: skip
async def test_malformed_devices_of_images_are_refused(user: Caller, mapping: str) -> None:
    source = await image(user, block_device_mapping=mapping, bdm_v2="True")
    message = await user.refused(400, "POST", "/servers", user.body(imageRef=source))
    assert "block_device_mapping" in message


async def test_the_oldest_form_of_devices(user: Caller, volumes: Volumes) -> None:
    server = await _server(user)
    made = await _image(user, await _make(user, server))
    snapshot = msgspec.json.decode(made["block_device_mapping"])[0]["snapshot_id"]
    old = msgspec.json.encode([{"device_name": "vda", "snapshot_id": snapshot, "delete_on_termination": True}]).decode()
    source = await image(user, block_device_mapping=old)
    booted = (await user.boot(imageRef=source))["id"]
    [held] = await _held(user, booted)
    assert held["device"] == "/dev/vda"


async def test_snapshots_of_another_project_are_refused(cloud: Cloud, user: Caller) -> None:
    made = await _image(user, await _make(user, await _server(user)))
    stranger = cloud.caller()
    source = await image(stranger, block_device_mapping=made["block_device_mapping"], bdm_v2="True")
    message = await stranger.refused(400, "POST", "/servers", stranger.body(imageRef=source))
    assert "failed to get snapshot" in message


async def _set_quota(user: Caller, snapshots: int) -> None:
    await ok(user.admin, "PUT", f"/volume/v3/os-quota-sets/{user.project}", {"quota_set": {"snapshots": snapshots}})


async def test_the_quota_of_snapshots(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    server = await _server(user)
    await _set_quota(user, 1)
    body = {"createImage": {"name": "i"}}
    assert "snapshots" in await user.refused(403, "POST", f"/servers/{server}/action", body)
    assert await _snapshots(volumes) == []
    assert (await user.show(server))["OS-EXT-STS:task_state"] is None


async def test_a_failure_in_the_middle_leaves_nothing(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota is used up by others after it was looked at: the second snapshot is refused."""
    server = await _server(user)
    await _set_quota(user, 1)
    monkeypatch.setattr("micronova.clients.volume.client.VolumeClient.snapshots_left", _unlimited)
    await user.refused(403, "POST", f"/servers/{server}/action", {"createImage": {"name": "i"}})
    await _nothing_left(cloud, user, server, volumes)


async def test_an_interrupted_request_leaves_nothing(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API dies between two snapshots; a conductor deletes the one that it has made."""
    monkeypatch.setattr(server_images, "IMAGE_CREATION_TIME", 2.0)
    monkeypatch.setattr("micronova.conductor.operations.create_image.IMAGE_CREATION_TIME", 2.0)
    server = await _server(user)
    begun = asyncio.Event()

    def die(*args: Any) -> Any:
        begun.set()
        raise asyncio.CancelledError

    with monkeypatch.context() as patched, pytest.raises(asyncio.CancelledError):
        patched.setattr(server_images, "mapping_of", die)
        await user.request("POST", f"/servers/{server}/action", {"createImage": {"name": "i"}})
    assert begun.is_set() and len(await _snapshots(volumes)) == 1
    await _nothing_left(cloud, user, server, volumes)
    await _make(user, server)


async def _unlimited(*_: Any) -> None:
    return None


async def _nothing_left(cloud: Cloud, user: Caller, server: str, volumes: Volumes) -> None:
    async def cleaned() -> bool | None:
        return (await _snapshots(volumes) == [] and (await user.show(server))["OS-EXT-STS:task_state"] is None) or None

    await cloud.until(cleaned, "the snapshots to be deleted")
    listed = (await call(user, "GET", "/image/v2/images?visibility=private")).json()["images"]
    assert [each for each in listed if "bdm_v2" in each] == []
    await cloud.assert_clean()


async def test_a_delete_overtakes_the_request(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is deleted while its image is made leaves neither image nor snapshots."""
    monkeypatch.setattr("micronova.conductor.operations.create_image.IMAGE_CREATION_TIME", 2.0)
    server = await _server(user)
    whole = server_images.ServerImages._answered

    async def slow(self: Any, *args: Any) -> None:
        await whole(self, *args)
        await user.delete(f"/servers/{server}")
        await user.gone(server)

    monkeypatch.setattr(server_images.ServerImages, "_answered", slow)
    message = await user.refused(409, "POST", f"/servers/{server}/action", {"createImage": {"name": "i"}})
    assert "another request" in message

    async def cleaned() -> bool | None:
        return await _snapshots(volumes) == [] or None

    await cloud.until(cleaned, "the snapshots to be deleted")
    await cloud.assert_clean()
