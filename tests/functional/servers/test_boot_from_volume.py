"""Servers that boot from volumes made of images, on the embedded image and volume services."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from micronova.cli.volume_images import VolumeImages
from micronova.clients.volume.client import VolumeClient
from micronova.objects import block_device
from micronova.objects.errors import NotFound, Unavailable
from micronova.servers import volumes as server_volumes
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image, ok
from tests.functional.servers.test_volumes import Volumes

CLOUD = CloudOptions(roles=("volume", "image"))
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Volumes]:
    yield Volumes(user)


def device(id: str, **fields: Any) -> dict[str, Any]:
    return {
        "boot_index": 0, "uuid": id, "source_type": "image", "destination_type": "volume", "volume_size": 1,
        "delete_on_termination": True, **fields,
    }  # fmt: skip


async def test_a_server_has_a_limited_number_of_disks(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a row, a name that is looked for, and requests to the volume service, before any quota counts it."""
    monkeypatch.setattr(block_device, "MOST_DISKS", 3)
    source = await image(user)
    blank = {"source_type": "blank", "destination_type": "volume", "volume_size": 1, "delete_on_termination": True}
    many: dict[str, Any] = {"name": "many", "flavorRef": "1", "imageRef": "", "networks": "none"}
    many["block_device_mapping_v2"] = [device(source), *([blank] * 3)]
    assert "may have 3 disks" in await user.refused(400, "POST", "/servers", {"server": many})
    mapping = msgspec.json.encode([{**device(source), "image_id": source}, *([blank] * 3)]).decode()
    made = await image(user, block_device_mapping=mapping, bdm_v2="True")
    assert "may have 3 disks" in await user.refused(
        400, "POST", "/servers", {"server": {**many, "imageRef": made, "block_device_mapping_v2": []}}
    )
    assert await volumes.ids() == set()
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source), blank, blank]))["id"]
    wanted = {"volumeAttachment": {"volumeId": await volumes.create()}}
    said = await user.at(100).refused(403, "POST", f"/servers/{server}/os-volume_attachments", wanted)
    assert "number of disk devices (3)" in said


async def test_a_volume_is_made_of_an_image(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    source = await image(user, os_distro="zork")
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    shown = await user.admin.show(server)
    assert shown["image"] == "" and shown["OS-EXT-SRV-ATTR:root_device_name"] == "/dev/vda"
    [held] = (await user.get(f"/servers/{server}/os-volume_attachments"))["volumeAttachments"]
    assert held["device"] == "/dev/vda"
    volume = await volumes.show(held["volumeId"])
    assert volume["bootable"] == "true" and volume["volume_image_metadata"]["os_distro"] == "zork"
    for action, status in (
        ("os-stop", "SHUTOFF"),
        ("os-start", "ACTIVE"),
        ("suspend", "SUSPENDED"),
        ("resume", "ACTIVE"),
    ):
        await user.act(server, action)
        await user.wait_for(server, status)
    await user.act(server, "reboot", {"type": "HARD"})
    await user.wait_for(server, "ACTIVE")
    flavor = await user.admin.post(
        "/flavors", {"flavor": {"name": f"f-{server[:8]}", "ram": 1024, "vcpus": 1, "disk": 5}}, 200
    )
    await user.act(server, "resize", {"flavorRef": flavor["flavor"]["id"]})
    await user.wait_for(server, "VERIFY_RESIZE")
    await user.act(server, "confirmResize", None, 204)
    await user.wait_for(server, "ACTIVE")
    backup = {"createBackup": {"name": "b", "backup_type": "daily", "rotation": 1}}
    assert "volume-backed" in await user.refused(400, "POST", f"/servers/{server}/action", backup)
    await cloud.assert_clean()
    await user.delete(f"/servers/{server}")
    await user.gone(server)

    async def removed() -> bool | None:
        return held["volumeId"] not in await volumes.ids() or None

    await cloud.until(removed, "the volume to be deleted")


async def test_several_servers_have_volumes_of_their_own(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    source = await image(user)
    ids = await user.boot_many(3, imageRef=source, block_device_mapping_v2=[device(source)])
    made = {(await user.show(id))["os-extended-volumes:volumes_attached"][0]["id"] for id in ids}
    assert len(made) == 3 and (await user.show(ids[0]))["image"]["id"] == source
    await cloud.assert_clean()


async def test_images_of_a_server_with_data_volumes(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    """A server with a local root disk can be shelved, and its volumes wait for it."""
    source, volume = await image(user), await volumes.create()
    server = (await user.boot(imageRef=source))["id"]
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, {"volumeAttachment": {"volumeId": volume}}, 200)
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED", "SHELVED")
    if (await user.show(server))["status"] == "SHELVED":
        await user.act(server, "shelveOffload")
        await user.wait_for(server, "SHELVED_OFFLOADED")
    await volumes.until(volume, "reserved")
    more = await volumes.create()
    await user.at(100).post(path, {"volumeAttachment": {"volumeId": more}}, 200)
    assert (await volumes.show(more))["status"] == "in-use", "it is in use when the request is answered"
    assert len((await user.get(path))["volumeAttachments"]) == 2
    await cloud.assert_clean()
    passing = await volumes.create()
    assert (await user.at(101).request("POST", path, {"volumeAttachment": {"volumeId": passing}})).status == 202
    await volumes.until(passing, "in-use")
    assert (await user.request("DELETE", f"{path}/{passing}")).status == 202
    await volumes.until(passing, "available")
    for action in ("attach_volume", "detach_volume"):
        assert (await _events(user, server, action)).popitem() == (f"api_{action}", "Success")
    await user.act(server, "unshelve")
    await user.wait_for(server, "ACTIVE")
    for each in (volume, more):
        await volumes.until(each, "in-use")
    await cloud.assert_clean()
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED", "SHELVED")
    if (await user.show(server))["status"] == "SHELVED":
        await user.act(server, "shelveOffload")
        await user.wait_for(server, "SHELVED_OFFLOADED")
    assert (await user.request("DELETE", f"{path}/{more}")).status == 202
    await volumes.until(more, "available")
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(volume, "available")
    await cloud.assert_clean()


async def test_an_attach_to_a_shelved_server_while_the_volume_service_is_away(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the volume, and the volume service learns of it when it answers again."""
    source, data = await image(user), await volumes.create()
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED")

    async def complete(self: VolumeClient, attachment_id: str) -> None:
        raise Unavailable("The volume service does not answer.")

    path = f"/servers/{server}/os-volume_attachments"
    with monkeypatch.context() as patched:
        patched.setattr(VolumeClient, "complete", complete)
        patched.setattr(server_volumes, "COMPLETE_WAIT", 0.1)
        await user.at(100).post(path, {"volumeAttachment": {"volumeId": data}}, 200)
        assert (await volumes.show(data))["status"] == "reserved"
    await volumes.until(data, "in-use")
    await cloud.assert_clean()


@pytest.mark.parametrize(("size", "text"), [(0, "volume_size"), (-1, "volume_size"), (2**63, "volume_size")])
async def test_sizes_that_are_refused(user: Caller, size: int, text: str) -> None:
    source = await image(user)
    body = user.body(imageRef=None, block_device_mapping_v2=[device(source, volume_size=size)])
    answer = await user.request("POST", "/servers", body)
    assert answer.status == 400, answer.body


@pytest.mark.parametrize("state", ["ACTIVE", "SHUTOFF", "PAUSED", "SUSPENDED"])
async def test_shelve_and_unshelve(cloud: Cloud, user: Caller, volumes: Volumes, state: str) -> None:
    """A server that boots from a volume leaves its host at once, and no image is made; its volumes wait for it."""
    source, data = await image(user), await volumes.create()
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, {"volumeAttachment": {"volumeId": data}}, 200)
    held = [each["volumeId"] for each in (await user.get(path))["volumeAttachments"]]
    for action in {"SHUTOFF": ["os-stop"], "PAUSED": ["pause"], "SUSPENDED": ["suspend"]}.get(state, []):
        await user.act(server, action)
        await user.wait_for(server, state)
    before = await _image_ids(user)
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED")
    assert await _image_ids(user) == before
    for each in held:
        await volumes.until(each, "reserved")
    assert (await user.admin.show(server))["OS-EXT-SRV-ATTR:host"] is None
    assert await _events(user, server, "shelve") == {"compute_shelve_offload_instance": "Success"}
    await cloud.assert_clean()
    await user.act(server, "unshelve")
    await user.wait_for(server, "ACTIVE")
    for each in held:
        await volumes.until(each, "in-use")
    assert await _events(user, server, "unshelve") == {
        "schedule_instances": "Success", "compute_unshelve_instance": "Success"
    }  # fmt: skip
    assert [each["volumeId"] for each in (await user.get(path))["volumeAttachments"]] == held
    await cloud.assert_clean()
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED")
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(data, "available")
    await cloud.assert_clean()


async def test_a_shelve_that_fails(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    """A guest that its host cannot switch off goes on; a server that no host can take stays offloaded."""
    source = await image(user)
    server = (await user.boot(name="fails", imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    async with cloud.faults({"operation": "power_off", "kind": "fail", "name": "fails"}):
        await user.act(server, "shelve")
        shown = await user.wait_for(server, "ACTIVE")
    assert shown["OS-EXT-STS:task_state"] is None
    assert await _events(user, server, "shelve") == {"compute_shelve_offload_instance": "Error"}
    await cloud.assert_clean()
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED")
    [held] = (await user.get(f"/servers/{server}/os-volume_attachments"))["volumeAttachments"]
    async with cloud.faults({"operation": "spawn", "kind": "abort", "name": "fails"}):
        await user.act(server, "unshelve")
        await cloud.settled()
        await user.wait_for(server, "SHELVED_OFFLOADED")
    await volumes.until(held["volumeId"], "reserved")
    await user.act(server, "unshelve")
    await user.wait_for(server, "ACTIVE")
    await cloud.assert_clean()


async def _image_ids(user: Caller) -> set[str]:
    return {each["id"] for each in (await ok(user, "GET", "/image/v2/images"))["images"]}


async def _events(user: Caller, server: str, name: str) -> dict[str, str]:
    """Return the results of the events of the newest action of a server with this name."""
    listed = (await user.admin.get(f"/servers/{server}/os-instance-actions"))["instanceActions"]
    newest = next(each for each in listed if each["action"] == name)
    shown = await user.admin.get(f"/servers/{server}/os-instance-actions/{newest['request_id']}")
    return {each["event"]: each["result"] for each in shown["instanceAction"]["events"]}


async def _root(user: Caller, server: str) -> str:
    held = (await user.get(f"/servers/{server}/os-volume_attachments"))["volumeAttachments"]
    return str(next(each["volumeId"] for each in held if each["device"] == "/dev/vda"))


@pytest.mark.parametrize("state", ["ACTIVE", "SHUTOFF"])
async def test_rebuild_writes_the_image_to_the_volume(cloud: Cloud, user: Caller, volumes: Volumes, state: str) -> None:
    """Since 2.93 the root volume gets the image, be it another one or the same; it stays the same volume."""
    source, other, data = await image(user), await image(user, size=2048, os_distro="zork"), await volumes.create()
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", {"volumeAttachment": {"volumeId": data}}, 200)
    root = await _root(user, server)
    if state == "SHUTOFF":
        await user.act(server, "os-stop")
        await user.wait_for(server, "SHUTOFF")
    for wanted in (other, other, source):
        body = {"rebuild": {"imageRef": wanted, "name": "again"}}
        shown = (await user.post(f"/servers/{server}/action", body))["server"]
        assert shown["image"] == "" and shown["status"] == "REBUILD"
        await user.wait_for(server, state)
        volume = await volumes.until(root, "in-use")
        assert volume["volume_image_metadata"]["image_id"] == wanted
        assert await _events(user, server, "rebuild") == {
            "rebuild_server": "Success", "compute_rebuild_instance": "Success"
        }  # fmt: skip
    assert await _root(user, server) == root and (await volumes.show(data))["status"] == "in-use"
    await cloud.assert_clean()


async def test_rebuild_before_2_93(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    """The volume stays as it is, so that the image must be the one that it was made of."""
    source, other = await image(user), await image(user)
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    root, old = await _root(user, server), user.at(92)
    message = await old.refused(400, "POST", f"/servers/{server}/action", {"rebuild": {"imageRef": other}})
    assert "different image for a volume-backed" in message
    await old.post(f"/servers/{server}/action", {"rebuild": {"imageRef": source}})
    await user.wait_for(server, "ACTIVE")
    assert await _root(user, server) == root
    await cloud.assert_clean()


async def test_rebuilds_of_volumes_that_are_refused(user: Caller, volumes: Volumes) -> None:
    source = await image(user)
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    path = f"/servers/{server}/action"
    large = await image(user, min_disk=2)
    assert "does not fit" in await user.refused(400, "POST", path, {"rebuild": {"imageRef": large}})
    made = (await user.post(path, {"createImage": {"name": "safe"}}))["image_id"]
    assert "snapshot of volumes" in await user.refused(400, "POST", path, {"rebuild": {"imageRef": made}})
    certified = {"rebuild": {"imageRef": source, "trusted_image_certificates": ["c"]}}
    assert "certificate" in await user.refused(400, "POST", path, certified)
    stranger = await image(user.cloud.caller())
    assert "could not be found" in await user.refused(400, "POST", path, {"rebuild": {"imageRef": stranger}})


async def test_a_rebuild_whose_image_cannot_be_written(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is in ERROR; a rebuild with an image that is there mends it."""
    source, lost = await image(user), await image(user)
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    root = await _root(user, server)

    def gone(self: Any, image_id: str) -> AsyncIterator[bytes]:
        raise NotFound(f"There is no image {image_id}.")

    with monkeypatch.context() as patched:
        patched.setattr(VolumeImages, "download", gone)
        await user.post(f"/servers/{server}/action", {"rebuild": {"imageRef": lost}})
        shown = await user.wait_for(server, "ERROR")
    assert root in shown["fault"]["message"]
    await volumes.until(root, "error")
    await user.post(f"/servers/{server}/action", {"rebuild": {"imageRef": source}})
    await user.wait_for(server, "ACTIVE")
    await volumes.until(root, "in-use")
    await cloud.assert_clean()


async def test_a_hard_reboot_after_a_rebuild_that_failed(
    cloud: Cloud, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rebuild has taken the root volume from the host: the guest gets it back, or does not start without it."""
    source, lost = await image(user), await image(user)
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    root = await _root(user, server)

    def gone(self: Any, image_id: str) -> AsyncIterator[bytes]:
        raise NotFound(f"There is no image {image_id}.")

    with monkeypatch.context() as patched:
        patched.setattr(VolumeImages, "download", gone)
        await user.post(f"/servers/{server}/action", {"rebuild": {"imageRef": lost}})
        await user.wait_for(server, "ERROR")
    await volumes.until(root, "error")
    await user.act(server, "reboot", {"type": "HARD"})
    shown = await user.wait_for(server, "ERROR")
    assert f"Volume {root} cannot be used: its status is error" in shown["fault"]["message"]
    reset = {"os-reset_status": {"status": "reserved"}}
    await volumes.request("POST", f"/volumes/{root}/action", reset, user.admin)
    await user.act(server, "reboot", {"type": "HARD"})
    await user.wait_for(server, "ACTIVE")
    await volumes.until(root, "in-use")
    await cloud.assert_clean()


async def test_rescue(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    """Since 2.87 an image that says what the rescue disk is leaves the volumes in their places."""
    source, rescue = await image(user), await image(user, hw_rescue_device="disk", hw_rescue_bus="virtio")
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    root, path = await _root(user, server), f"/servers/{server}/action"
    body = {"rescue": {"rescue_image_ref": rescue}}
    assert "volume-backed" in await user.at(86).refused(400, "POST", path, body)
    half = await image(user, hw_rescue_bus="usb")
    for wrong in ({"rescue_image_ref": source}, {"rescue_image_ref": half}, None):
        assert "volume-backed" in await user.refused(400, "POST", path, {"rescue": wrong})
    await volumes.request("POST", f"/volumes/{root}/action", {"os-begin_detaching": {}})
    assert "in-use" in await user.refused(409, "POST", path, body)
    await volumes.request("POST", f"/volumes/{root}/action", {"os-roll_detaching": {}})
    await user.post(path, body, 200)
    await user.wait_for(server, "RESCUE")
    assert (await volumes.show(root))["status"] == "in-use"
    await user.act(server, "unrescue")
    await user.wait_for(server, "ACTIVE")
    assert await _root(user, server) == root
    await cloud.assert_clean()


async def test_a_volume_names_no_image_of_others_for_a_rescue(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    """Its owner may write of which image it was made; the rescue asks whether that image is the owner's to see."""
    other = cloud.caller()
    secret = await image(other, hw_rescue_device="disk", hw_rescue_bus="virtio")
    volume = await volumes.create()
    claims = {"image_id": secret, "hw_rescue_device": "disk", "hw_rescue_bus": "virtio"}
    for action in ({"os-set_bootable": {"bootable": True}}, {"os-set_image_metadata": {"metadata": claims}}):
        await volumes.request("POST", f"/volumes/{volume}/action", action)
    wanted = [{"boot_index": 0, "uuid": volume, "source_type": "volume", "destination_type": "volume"}]
    server = (await user.boot(imageRef=None, block_device_mapping_v2=wanted))["id"]
    refusal = await user.refused(400, "POST", f"/servers/{server}/action", {"rescue": None})
    assert "could not be found" in refusal
    await cloud.assert_clean()


@pytest.mark.parametrize("what", ["shelve", "rebuild"])
async def test_a_delete_while_the_guest_is_switched_off(
    cloud: Cloud, user: Caller, volumes: Volumes, what: str
) -> None:
    """A server that is deleted meanwhile gives its volumes back, and nothing goes on."""
    source, data = await image(user), await volumes.create()
    server = (await user.boot(name="goes", imageRef=None, block_device_mapping_v2=[device(source)]))["id"]
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", {"volumeAttachment": {"volumeId": data}}, 200)
    async with cloud.faults({"operation": "power_off", "kind": "hang", "name": "goes", "count": 1}):
        await user.act(server, what, {"imageRef": source} if what == "rebuild" else None)
        await cloud.fault_struck()
        await user.delete(f"/servers/{server}")
        await user.gone(server)

    async def only_data() -> bool | None:
        return await volumes.ids() == {data} or None

    await cloud.until(only_data, "the root volume to be deleted")
    await volumes.until(data, "available")
    await cloud.assert_clean()


async def _disk_used(user: Caller) -> int:
    """Return the GiB that servers claim of all hosts."""
    found = (await user.admin.at(87).get("/os-hypervisors/detail"))["hypervisors"]
    return sum(int(each["local_gb_used"]) for each in found)


async def test_a_root_disk_that_is_a_volume_takes_nothing_of_the_host(
    cloud: Cloud, user: Caller, volumes: Volumes
) -> None:
    """Flavors whose root disk no host has: only ephemeral and swap disks are claimed, wherever the server goes."""

    async def flavor(disk: int, ephemeral: int) -> str:
        size = {"ram": 64, "vcpus": 1, "disk": disk, "OS-FLV-EXT-DATA:ephemeral": ephemeral, "swap": 1024}
        body = {"flavor": {"name": f"large-{disk}-{user.project}", **size}}
        return str((await user.admin.post("/flavors", body, 200))["flavor"]["id"])

    first, second = await flavor(10**6, 2), await flavor(2 * 10**6, 3)
    source, before = await image(user), await _disk_used(user)
    wanted: dict[str, Any] = {"imageRef": None, "block_device_mapping_v2": [device(source)], "flavorRef": first}
    server = (await user.boot(**wanted))["id"]

    async def claims(amount: int) -> None:
        async def reached() -> bool | None:
            return await _disk_used(user) == before + amount or None

        await cloud.until(reached, f"a claim of {amount} GiB")
        await cloud.assert_clean()

    await claims(3)
    await user.act(server, "resize", {"flavorRef": second})
    await user.wait_for(server, "VERIFY_RESIZE")
    await user.act(server, "revertResize")
    await user.wait_for(server, "ACTIVE")
    await claims(3)
    await user.act(server, "resize", {"flavorRef": second})
    await user.wait_for(server, "VERIFY_RESIZE")
    await user.act(server, "confirmResize", None, 204)
    await user.wait_for(server, "ACTIVE")
    await claims(4)
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED")
    await claims(0)
    await user.act(server, "unshelve")
    await user.wait_for(server, "ACTIVE")
    await claims(4)
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await claims(0)
    of_image = await user.create(imageRef=source, flavorRef=first)
    await user.wait_for(of_image, "ERROR")
