"""What users do with the volumes of their servers in a simulation."""

from typing import Any

import msgspec

from tests.simulation.scenarios import OTHER_IMAGE, act, make_base_image, migrated, resized, settled
from tests.simulation.simulated_cloud import IMAGE, VOLUME, SimulatedCloud

AGENT_IMAGE = "44444444-4444-4444-8444-444444444444"
RESCUE_IMAGE = "33333333-3333-4333-8333-333333333333"


async def attach_and_detach_volumes(cloud: SimulatedCloud, name: str = "with-volumes") -> None:
    """Attach two volumes to a server, detach one, and delete the server; its other volume goes with it."""
    first, second = await volume(cloud, "first"), await volume(cloud, "second")
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await attached(cloud, id, first)
    await attached(cloud, id, second, delete_on_termination=True)
    await given_back(cloud, id, first)
    await has_status(cloud, first, "available")
    await deleted(cloud, id)
    await has_status(cloud, second, "gone")


async def swap_and_extend_volumes(cloud: SimulatedCloud, name: str = "swapped") -> None:
    """Replace a server's volume by another one, and make that one larger: the guest is told."""
    old, new = await volume(cloud, "old"), await volume(cloud, "new")
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    await attached(cloud, id, old)
    cloud.fault_plan.armed = True
    path, body = f"/servers/{id}/os-volume_attachments/{old}", {"volumeAttachment": {"volumeId": new}}
    # If the answer is lost, the user looks whether the server has the other one after the operation has ended.
    while not cloud.volumes.has(id, new):
        answer = await cloud.request("PUT", path, body)
        assert answer is None or answer.status in (202, 409, 503), answer
        await settled(cloud, id)
    await has_status(cloud, old, "available")
    await has_status(cloud, new, "in-use")
    await settled(cloud, id)
    # If the answer is lost, the volume has the size already.
    await cloud.insist("POST", f"/volumes/{new}/action", {"os-extend": {"new_size": 2}}, 202, 400, service=VOLUME)
    await cloud.until(lambda: [each.size_gb for each in cloud.volumes.of_server(id)] == [2], "the guest to be told")
    await settled(cloud, id)


async def boot_from_volumes(cloud: SimulatedCloud, name: str = "from-volumes") -> None:
    """Boot a server from a volume that exists, with a new one of an image and an empty one, and delete it."""
    await make_base_image(cloud)
    root = await volume(cloud, "root", imageRef=IMAGE)
    cloud.fault_plan.armed = True
    [id] = await cloud.create(
        name,
        imageRef="",
        block_device_mapping_v2=[
            {"source_type": "volume", "destination_type": "volume", "boot_index": 0, "uuid": root},
            new_volume("image", uuid=IMAGE, delete_on_termination=True),
            new_volume("blank"),
        ],
    )
    await cloud.becomes(id, "active")
    first, second, third = (str(each.volume_id) for each in cloud.volumes.of_server(id))
    assert first == root
    await deleted(cloud, id)
    for id, status in ((first, "available"), (second, "gone"), (third, "available")):
        await has_status(cloud, id, status)


async def image_volume_backed(cloud: SimulatedCloud, name: str = "imaged") -> None:
    """Make an image of a server that boots from a volume: a snapshot of it, for which its guest is frozen."""
    await image(cloud, AGENT_IMAGE, hw_qemu_guest_agent="yes")
    [id] = await booted(cloud, name, AGENT_IMAGE)
    cloud.fault_plan.armed = True
    # If the answer is lost, the user looks for the image after the operation has ended before asking again.
    while "available" not in cloud.volumes.snapshots().values():
        await cloud.request("POST", f"/servers/{id}/action", {"createImage": {"name": "snapshot"}})
        await settled(cloud, id)
    await cloud.until(lambda: set(cloud.volumes.snapshots().values()) == {"available"}, "the snapshots to be made")


async def shelve_volume_backed(cloud: SimulatedCloud, name: str = "shelved") -> None:
    """Shelve a server that boots from a volume, unshelve it and delete it."""
    [id] = await booted(cloud, name)
    [root] = (str(each.volume_id) for each in cloud.volumes.of_server(id))
    cloud.fault_plan.armed = True
    while await act(cloud, id, {"shelve": None}, "shelved_offloaded", "active", "stopped") != "shelved_offloaded":
        await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    await has_status(cloud, root, "reserved")
    while await act(cloud, id, {"unshelve": None}, "active", "shelved_offloaded") != "active":
        await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    await has_status(cloud, root, "in-use")
    await deleted(cloud, id)
    await has_status(cloud, root, "gone")


async def rebuild_volume_backed(cloud: SimulatedCloud, name: str = "rebuilt") -> None:
    """Write another image to the root volume of a server."""
    [id] = await booted(cloud, name)
    [root] = (str(each.volume_id) for each in cloud.volumes.of_server(id))
    await image(cloud, OTHER_IMAGE)
    cloud.fault_plan.armed = True
    await act(cloud, id, {"rebuild": {"imageRef": OTHER_IMAGE}}, "active")
    await has_status(cloud, root, "in-use")
    assert cloud.volumes.image_of(root) == OTHER_IMAGE
    await cloud.until(lambda: len(cloud.guest_powers(id)) == 1, "one guest of the server")


async def rescue_volume_backed(cloud: SimulatedCloud, name: str = "rescued") -> None:
    """Boot a server from a rescue image beside its root volume, and go back."""
    await image(cloud, RESCUE_IMAGE, hw_rescue_device="disk", hw_rescue_bus="virtio")
    [id] = await booted(cloud, name)
    cloud.fault_plan.armed = True
    body = {"rescue": {"adminPass": "first", "rescue_image_ref": RESCUE_IMAGE}}
    await cloud.insist("POST", f"/servers/{id}/action", body, 200, 409)
    await cloud.becomes(id, "rescued")
    await act(cloud, id, {"unrescue": None}, "active")


async def move_with_volumes(cloud: SimulatedCloud, name: str = "moved") -> None:
    """Resize a server with a volume and revert that, migrate it, and migrate it live: the volume follows."""
    held = await volume(cloud, "held")
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    await attached(cloud, id, held)
    cloud.fault_plan.armed = True
    await resized(cloud, id)
    await act(cloud, id, {"revertResize": None}, "active")
    await migrated(cloud, id)
    await cloud.insist("POST", f"/servers/{id}/action", {"confirmResize": None}, 204, 409)
    await cloud.becomes(id, "active")
    before = cloud.row(id)["host"]
    while cloud.row(id)["host"] == before:
        await act(cloud, id, {"os-migrateLive": {"host": None, "block_migration": "auto"}}, "active")
    await has_status(cloud, held, "in-use")
    assert {each.connected_host for each in cloud.volumes.of_server(id)} == {cloud.row(id)["host"]}


async def evacuate_with_volumes(cloud: SimulatedCloud, name: str = "evacuated") -> None:
    """Evacuate a server that boots from a volume, start it, and let its first host return."""
    lost = cloud.drivers()[-1].host
    [id] = await booted(cloud, name, host=lost)
    await cloud.lose_last_host()
    cloud.fault_plan.armed = True
    # If the answer is lost, the server may be on another host already, which is up: 400.
    await cloud.insist("POST", f"/servers/{id}/action", {"evacuate": {}}, 200, 400, 409)
    await cloud.becomes(id, "stopped")
    assert cloud.row(id)["host"] != lost
    await act(cloud, id, {"os-start": None}, "active")
    await cloud.return_last_host()


async def share_a_volume(cloud: SimulatedCloud, name: str = "sharing") -> None:
    """Attach a volume to two servers, detach it from one, and delete the other one."""
    kind = {"name": "shared", "extra_specs": {"multiattach": "<is> True"}}
    await cloud.request("POST", "/types", {"volume_type": kind}, service=VOLUME)
    held = await volume(cloud, "held", volume_type="shared")
    first, second = await cloud.create(name, 2)
    for id in (first, second):
        await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    for id in (first, second):
        await attached(cloud, id, held)
    await given_back(cloud, first, held)
    await cloud.until(lambda: not cloud.volumes.has(first, held), "the first server to have given the volume back")
    await has_status(cloud, held, "in-use")
    await deleted(cloud, second)
    await has_status(cloud, held, "available")


async def attach_at_rest(cloud: SimulatedCloud, name: str = "at-rest") -> None:
    """Attach a volume to a server that is off, extend it, start the server, and detach it when it is off again."""
    held = await volume(cloud, "held")
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await act(cloud, id, {"os-stop": None}, "stopped")
    await attached(cloud, id, held, "stopped")
    await cloud.insist("POST", f"/volumes/{held}/action", {"os-extend": {"new_size": 2}}, 202, 400, service=VOLUME)
    await cloud.until(lambda: [each.size_gb for each in cloud.volumes.of_server(id)] == [2], "compute to be told")
    await settled(cloud, id, "stopped")
    await act(cloud, id, {"os-start": None}, "active")
    await act(cloud, id, {"os-stop": None}, "stopped")
    await given_back(cloud, id, held)
    await has_status(cloud, held, "available")


async def attach_while_shelved(cloud: SimulatedCloud, name: str = "resting") -> None:
    """Attach two volumes to a server without a host, detach one, and unshelve it: it has the other one."""
    first, second = await volume(cloud, "first"), await volume(cloud, "second")
    [id] = await booted(cloud, name)
    [root] = (str(each.volume_id) for each in cloud.volumes.of_server(id))
    while await act(cloud, id, {"shelve": None}, "shelved_offloaded") != "shelved_offloaded":
        pass
    cloud.fault_plan.armed = True
    await attached(cloud, id, first, "shelved_offloaded")
    await attached(cloud, id, second, "shelved_offloaded")
    await given_back(cloud, id, first)
    await has_status(cloud, first, "available")
    while await act(cloud, id, {"unshelve": None}, "active", "shelved_offloaded") != "active":
        await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    assert [str(each.volume_id) for each in cloud.volumes.of_server(id)] == [root, second]
    await has_status(cloud, second, "in-use")


async def delete_during_work(cloud: SimulatedCloud, name: str = "brief") -> None:
    """Delete a server that is being built with new volumes, and servers that are given a volume or give one back."""
    await make_base_image(cloud)
    held, coming = await volume(cloud, "held"), await volume(cloud, "coming")
    giving, taking = await cloud.create(f"{name}-old", 2)
    for id in (giving, taking):
        await cloud.becomes(id, "active")
    await attached(cloud, giving, held)
    cloud.fault_plan.armed = True
    root = new_volume("image", uuid=IMAGE, boot_index=0, delete_on_termination=True)
    blank = new_volume("blank", delete_on_termination=True)
    [building] = await cloud.create(f"{name}-new", imageRef="", block_device_mapping_v2=[root, blank])
    await cloud.request("DELETE", f"/servers/{giving}/os-volume_attachments/{held}")
    body = {"volumeAttachment": {"volumeId": coming}}
    attaching = cloud.spawn(cloud.request("POST", f"/servers/{taking}/os-volume_attachments", body))
    # A crash ends the request.
    await cloud.until(
        lambda: attaching.done() or cloud.volumes.status(coming) != "available", "the volume to be reserved"
    )
    for id in (building, giving, taking):
        await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    for id in (building, giving, taking):
        await cloud.gone(id)
    await attaching
    for id in (held, coming):
        await has_status(cloud, id, "available")
    await cloud.until(lambda: cloud.volumes.all().keys() == {held, coming}, "the new volumes to be gone")


async def soft_delete_with_volumes(cloud: SimulatedCloud, name: str = "kept") -> None:
    """Delete a server where deletion is deferred, restore it, and delete it for good: its volume goes with it."""
    held = await volume(cloud, "held")
    [id] = await booted(cloud, name)
    [root] = (str(each.volume_id) for each in cloud.volumes.of_server(id))
    await attached(cloud, id, held)
    cloud.fault_plan.armed = True
    await cloud.insist("DELETE", f"/servers/{id}", None, 204)
    await cloud.becomes(id, "soft-delete")
    await act(cloud, id, {"restore": None}, "active")
    await has_status(cloud, held, "in-use")
    await cloud.insist("DELETE", f"/servers/{id}", None, 204)
    await cloud.becomes(id, "soft-delete")
    await cloud.insist("POST", f"/servers/{id}/action", {"forceDelete": None}, 202, 404)
    await cloud.gone(id)
    await has_status(cloud, held, "available")
    await has_status(cloud, root, "gone")


async def use_volumes_by_hand(cloud: SimulatedCloud) -> None:
    """Do with a volume what compute does otherwise, what changes its row only, and what administrators do."""
    id = await volume(cloud, "by-hand")
    cloud.fault_plan.armed = True
    connector = {"connector": {"host": "elsewhere"}}
    for action, body, status in (
        ("os-reserve", {}, "attaching"),
        ("os-unreserve", {}, "available"),
        ("os-reserve", {}, "attaching"),
        ("os-initialize_connection", connector, "attaching"),
        ("os-attach", {"instance_uuid": OTHER_IMAGE, "mountpoint": "/dev/vdb"}, "in-use"),
        ("os-begin_detaching", {}, "detaching"),
        ("os-roll_detaching", {}, "in-use"),
        ("os-begin_detaching", {}, "detaching"),
        ("os-terminate_connection", connector, "detaching"),
        ("os-detach", {}, "available"),
        ("os-update_readonly_flag", {"readonly": True}, "available"),
        ("os-set_bootable", {"bootable": True}, "available"),
        ("os-set_image_metadata", {"metadata": {"os_distro": "zork"}}, "available"),
        ("os-unset_image_metadata", {"key": "os_distro"}, "available"),
        ("os-reset_status", {"status": "error"}, "error"),
    ):
        # If the answer is lost, it may be done already.
        await cloud.insist("POST", f"/volumes/{id}/action", {action: body}, 200, 202, 400, 404, service=VOLUME)
        await has_status(cloud, id, status)
    await cloud.insist("POST", f"/volumes/{id}/action", {"os-force_delete": {}}, 202, 404, service=VOLUME)
    await has_status(cloud, id, "gone")


async def copy_volumes(cloud: SimulatedCloud) -> None:
    """Make volumes of nothing, of an image, a snapshot, a volume and a backup, and delete them all."""
    await make_base_image(cloud)
    cloud.fault_plan.armed = True
    blank = await made(cloud, "volume", "blank", size=1)
    of_image = await made(cloud, "volume", "of-image", size=1, imageRef=IMAGE)
    snapshot = await made(cloud, "snapshot", "snapshot", volume_id=of_image)
    of_snapshot = await made(cloud, "volume", "of-snapshot", snapshot_id=snapshot)
    of_volume = await made(cloud, "volume", "of-volume", source_volid=of_snapshot)
    backup = await made(cloud, "backup", "backup", volume_id=of_volume)
    of_backup = await made(cloud, "volume", "of-backup", size=1, backup_id=backup)
    await removed(cloud, "backup", backup)
    # A volume with a snapshot goes with it.
    for id in (blank, of_image, of_snapshot, of_volume, of_backup):
        await removed(cloud, "volume", id, "?cascade=true")
    assert cloud.volumes.snapshots() == {}


async def upload_a_volume(cloud: SimulatedCloud) -> None:
    """Make an image of a volume."""
    id = await volume(cloud, "uploaded")
    cloud.fault_plan.armed = True
    # If the answer is lost, the volume is being uploaded (400), or the service gives it back after a while.
    while "active" not in cloud.images("of-volume").values():
        body = {"os-volume_upload_image": {"image_name": "of-volume"}}
        answer = await cloud.request("POST", f"/volumes/{id}/action", body, service=VOLUME)
        assert answer is None or answer.status in (202, 400, 409, 503), answer
        await has_status(cloud, id, "available")
        await cloud.clock.sleep(1.0)
    # A request that fails may leave an image without data, which its user deletes.
    for id, status in cloud.images().items():
        if status == "queued":
            await cloud.insist("DELETE", f"/images/{id}", None, 204, 404, service="/image/v2")


async def change_volumes(cloud: SimulatedCloud) -> None:
    """Extend, retype, revert, restore and write an image to a volume, and give it away; delete it."""
    await make_base_image(cloud)
    await cloud.request("POST", "/types", {"volume_type": {"name": "other"}}, service=VOLUME)
    id = await volume(cloud, "changing")
    cloud.fault_plan.armed = True
    await changed(cloud, id, {"os-extend": {"new_size": 2}}, 400)
    await changed(cloud, id, {"os-retype": {"new_type": "other", "migration_policy": "never"}}, 400)
    backup = await made(cloud, "backup", "backup", volume_id=id)
    snapshot = await made(cloud, "snapshot", "snapshot", volume_id=id)
    await changed(cloud, id, {"revert": {"snapshot_id": snapshot}})
    await removed(cloud, "snapshot", snapshot)
    await cloud.insist("POST", f"/backups/{backup}/restore", {"restore": {"volume_id": id}}, 202, 400, service=VOLUME)
    await has_status(cloud, id, "available")
    await has_status(cloud, backup, "available", "backup")
    await changed(cloud, id, {"os-reimage": {"image_id": IMAGE}})
    assert cloud.volumes.image_of(id) == IMAGE
    # Without the answer nobody has the key of the offer, which is then taken back.
    while True:
        answer = await cloud.request("POST", "/volume-transfers", {"transfer": {"volume_id": id}}, service=VOLUME)
        if answer is not None and answer.status == 202:
            break
        for transfer in cloud.volumes.ids("transfer"):
            await cloud.insist("DELETE", f"/volume-transfers/{transfer}", None, 202, 404, service=VOLUME)
        await cloud.clock.sleep(1.0)
    offer = msgspec.json.decode(answer.body)["transfer"]
    accept = {"accept": {"auth_key": offer["auth_key"]}}
    await cloud.insist("POST", f"/volume-transfers/{offer['id']}/accept", accept, 202, 404, service=VOLUME)
    await has_status(cloud, id, "available")
    await removed(cloud, "volume", id)
    # The backup outlives it.
    await removed(cloud, "backup", backup)


# --- parts of them ---------------------------------------------------------------------------------------------------


async def volume(cloud: SimulatedCloud, name: str, **more: Any) -> str:
    """Make a volume of 1 GiB, before there are faults."""
    answer = await cloud.request("POST", "/volumes", {"volume": {"size": 1, "name": name, **more}}, service=VOLUME)
    assert answer is not None and answer.status == 202, answer
    made = str(msgspec.json.decode(answer.body)["volume"]["id"])
    await has_status(cloud, made, "available")
    return made


async def made(cloud: SimulatedCloud, noun: str, name: str, **values: Any) -> str:
    """Make something in the volume service: if the answer is lost, look for it before asking again."""
    while not (found := cloud.volumes.ids(noun, name)):
        body = {noun: {"name": name, **values}}
        answer = await cloud.request("POST", f"/{noun}s", body, service=VOLUME)
        assert answer is None or answer.status in (202, 409, 503), answer
        await cloud.clock.sleep(1.0)
    [id] = found
    await has_status(cloud, id, "available", noun)
    return id


async def changed(cloud: SimulatedCloud, volume_id: str, action: dict[str, Any], *done: int) -> None:
    """Change a volume. If the answer was lost, it is asked again, and may have `done` it already."""
    await cloud.insist("POST", f"/volumes/{volume_id}/action", action, 202, *done, service=VOLUME)
    await has_status(cloud, volume_id, "available")


async def removed(cloud: SimulatedCloud, noun: str, id: str, query: str = "") -> None:
    """Delete something in the volume service. If the answer was lost, it is being deleted (400) or gone."""
    await cloud.insist("DELETE", f"/{noun}s/{id}{query}", None, 202, 400, 404, service=VOLUME)
    await has_status(cloud, id, "gone", noun)


async def image(cloud: SimulatedCloud, id: str, **properties: str) -> None:
    """Make an image, before there are faults."""
    document = {"id": id, "name": id, "disk_format": "raw", "container_format": "bare", **properties}
    await cloud.request("POST", "/images", document, service="/image/v2")
    await cloud.request("PUT", f"/images/{id}/file", bytes(512), service="/image/v2")


def new_volume(source: str, **more: Any) -> dict[str, Any]:
    """Return the block device of a volume that is made for a server."""
    return {"source_type": source, "destination_type": "volume", "volume_size": 1, **more}


async def booted(cloud: SimulatedCloud, name: str, image_id: str = IMAGE, **more: Any) -> list[str]:
    """Boot a server from a new volume that goes with it, before there are faults."""
    await make_base_image(cloud)
    root = new_volume("image", uuid=image_id, boot_index=0, delete_on_termination=True)
    ids = await cloud.create(name, imageRef="", block_device_mapping_v2=[root], **more)
    for id in ids:
        await cloud.becomes(id, "active")
    await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    return ids


async def attached(cloud: SimulatedCloud, id: str, volume_id: str, state: str = "active", **more: Any) -> None:
    """Attach a volume to a server in a state; if an answer is lost, ask again only if the server does not have it."""
    while not cloud.volumes.has(id, volume_id):
        answer = await cloud.request(
            "POST", f"/servers/{id}/os-volume_attachments", {"volumeAttachment": {"volumeId": volume_id, **more}}
        )
        assert answer is None or answer.status in (200, 409, 500, 503), answer
        await settled(cloud, id, state)
    await has_status(cloud, volume_id, "in-use")


async def given_back(cloud: SimulatedCloud, id: str, volume_id: str) -> None:
    """Ask for a volume of a server. If the answer was lost, it is being detached (400) or the server has it no more."""
    await cloud.insist("DELETE", f"/servers/{id}/os-volume_attachments/{volume_id}", None, 202, 400, 404)


async def has_status(cloud: SimulatedCloud, id: str, status: str, noun: str = "volume") -> None:
    """Wait until a volume, a snapshot or a backup has a status."""
    await cloud.until(lambda: cloud.volumes.status(id, noun) == status, f"{noun} {id} to be {status}")


async def deleted(cloud: SimulatedCloud, id: str) -> None:
    """Delete a server."""
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)
