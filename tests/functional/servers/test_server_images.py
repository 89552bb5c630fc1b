"""Images of servers: createImage and createBackup."""

from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud, CloudOptions
from tests.functional.servers.embedded_services import call, image, ok

CLOUD = CloudOptions(hosts=2, roles=("image",))
STATES = [None, "os-stop", "pause", "suspend"]


async def boot(user: Caller, **fields: Any) -> str:
    """Boot a server from an image of the user; return its id."""
    fields.setdefault("imageRef", await image(user))
    return str((await user.boot(**fields))["id"])


async def snapshot(user: Caller, server: str, name: str = "snap", **fields: Any) -> str:
    """Ask for an image of a server; return its id."""
    return str((await user.act(server, "createImage", {"name": name, **fields}))["image_id"])


async def backup(user: Caller, server: str, rotation: int, kind: str = "daily", name: str = "b") -> str:
    """Make a backup of a server and wait for its end; return the image's id."""
    wanted = {"name": name, "backup_type": kind, "rotation": rotation}
    made = str((await user.act(server, "createBackup", wanted))["image_id"])
    await user.wait_for(server, "ACTIVE")
    return made


async def shown(user: Caller, id: str) -> dict[str, Any]:
    return dict(await ok(user, "GET", f"/image/v2/images/{id}"))


async def becomes(user: Caller, id: str, status: str) -> dict[str, Any]:
    """Wait until an image has this status."""
    last: dict[str, Any] = {}

    async def probe() -> dict[str, Any] | None:
        nonlocal last
        last = await shown(user, id)
        return last if last["status"] == status else None

    return await user.cloud.until(probe, lambda: f"{id} to be {status}; it is {last}")


async def image_gone(user: Caller, id: str) -> None:
    """Wait until there is no such image."""

    async def probe() -> bool | None:
        return True if (await call(user, "GET", f"/image/v2/images/{id}")).status == 404 else None

    await user.cloud.until(probe, f"image {id} to be gone")


async def last_action(user: Caller, server: str) -> tuple[str, str | None, list[tuple[str, str | None]]]:
    """Return the name and the message of a server's last action, and its events with their results."""
    listed = (await user.admin.get(f"/servers/{server}/os-instance-actions"))["instanceActions"][0]
    path = f"/servers/{server}/os-instance-actions/{listed['request_id']}"
    events = (await user.admin.get(path))["instanceAction"]["events"]
    return listed["action"], listed["message"], [(event["event"], event["result"]) for event in events]


@pytest.mark.parametrize("before", STATES)
async def test_an_image_can_be_made_in_each_state_and_booted(cloud: Cloud, user: Caller, before: str | None) -> None:
    base = await image(user, hw_disk_bus="virtio", img_signature="x", cache_in_nova="true", min_ram=64)
    server = await boot(user, imageRef=base)
    status = "ACTIVE"
    if before is not None:
        await user.act(server, before)
        status = {"os-stop": "SHUTOFF", "pause": "PAUSED", "suspend": "SUSPENDED"}[before]
        await user.wait_for(server, status)
    made = await snapshot(user, server, "one", metadata={"purpose": "test", "hw_disk_bus": "scsi"})
    found = await becomes(user, made, "active")
    assert (await user.wait_for(server, status))["OS-EXT-STS:task_state"] is None
    assert {key: found[key] for key in ("name", "visibility", "disk_format", "container_format", "owner")} == {
        "name": "one", "visibility": "private", "disk_format": "qcow2", "container_format": "bare",
        "owner": user.project,
    }  # fmt: skip
    assert found["image_type"] == "snapshot" and found["instance_uuid"] == server
    assert found["base_image_ref"] == base and found["user_id"] == user.user
    assert found["purpose"] == "test" and found["hw_disk_bus"] == "scsi", "what is asked for wins"
    assert "img_signature" not in found and "cache_in_nova" not in found
    assert (found["min_disk"], found["min_ram"]) == (1, 64)
    assert await last_action(user, server) == ("createImage", None, [("compute_snapshot_instance", "Success")])
    again = await boot(user, imageRef=made)
    second = await becomes(user, await snapshot(user, again), "active")
    assert second["base_image_ref"] == base, "the image that all began with"
    data = (await call(user, "GET", f"/image/v2/images/{made}/file")).body
    assert data.startswith(b"QFI\xfb") and found["size"] == len(data)
    await cloud.assert_clean()


async def test_the_task_states_that_users_see(cloud: Cloud, user: Caller) -> None:
    server = await boot(user, name=user.project)
    rules = [{"operation": operation, "kind": "hang", "name": user.project} for operation in ("snapshot", "upload")]
    async with cloud.faults(rules[0]):
        made = await snapshot(user, server)
        await user.wait_for(server, "ACTIVE", task="image_pending_upload")
        assert (await shown(user, made))["status"] == "queued"
        await user.refused(409, "POST", f"/servers/{server}/action", {"os-stop": None})
        await user.refused(409, "POST", f"/servers/{server}/action", {"createImage": {"name": "other"}})
    await user.admin.act(server, "os-resetState", {"state": "active"})
    await image_gone(user, made)
    async with cloud.faults(rules[1]):
        wanted = {"name": "b", "backup_type": "t", "rotation": 1}
        made = (await user.act(server, "createBackup", wanted))["image_id"]
        await user.wait_for(server, "ACTIVE", task="image_uploading")
        await becomes(user, made, "saving")
    await user.admin.act(server, "os-resetState", {"state": "active"})
    await image_gone(user, made)
    await cloud.assert_clean()


@pytest.mark.parametrize("step", ["snapshot", "upload"])
async def test_a_failure_deletes_the_image(cloud: Cloud, user: Caller, step: str) -> None:
    server = await boot(user, name=user.project)
    async with cloud.faults({"operation": step, "kind": "fail", "name": user.project, "message": "no room"}):
        made = await snapshot(user, server)
        await image_gone(user, made)
    await user.wait_for(server, "ACTIVE")
    await cloud.settled()
    assert await last_action(user, server) == ("createImage", "Error", [("compute_snapshot_instance", "Error")])
    await cloud.assert_clean()


@pytest.mark.parametrize("step", ["snapshot", "upload"])
async def test_what_is_lacking_for_the_moment_only_delays(cloud: Cloud, user: Caller, step: str) -> None:
    server = await boot(user, name=user.project)
    async with cloud.faults({"operation": step, "kind": "unavailable", "name": user.project, "count": 1}):
        made = await snapshot(user, server)
        await becomes(user, made, "active")
    await user.wait_for(server, "ACTIVE")
    await cloud.assert_clean()


@pytest.mark.parametrize("step", ["snapshot", "upload"])
async def test_a_delete_of_the_server_deletes_an_incomplete_image(cloud: Cloud, user: Caller, step: str) -> None:
    server = await boot(user, name=user.project)
    async with cloud.faults({"operation": step, "kind": "hang", "name": user.project}):
        made = await snapshot(user, server)
        task = "image_pending_upload" if step == "snapshot" else "image_uploading"
        await user.wait_for(server, "ACTIVE", task=task)
        await user.delete(f"/servers/{server}")
        await user.gone(server)
    await image_gone(user, made)
    await cloud.assert_clean()


async def test_a_delete_of_the_server_leaves_a_complete_image(user: Caller) -> None:
    server = await boot(user)
    made = await snapshot(user, server)
    await becomes(user, made, "active")
    await user.wait_for(server, "ACTIVE")
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    assert (await shown(user, made))["status"] == "active"


async def test_a_user_may_delete_the_image_meanwhile(cloud: Cloud, user: Caller) -> None:
    server = await boot(user, name=user.project)
    async with cloud.faults({"operation": "snapshot", "kind": "delay", "delay": 0.3, "name": user.project}):
        made = await snapshot(user, server)
        await ok(user, "DELETE", f"/image/v2/images/{made}")
        await user.wait_for(server, "ACTIVE")
    await cloud.settled()
    assert (await last_action(user, server))[1] == "Error"
    await cloud.assert_clean()


async def test_a_lock_does_not_matter(user: Caller) -> None:
    server = await boot(user)
    await user.act(server, "lock")
    await becomes(user, await snapshot(user, server), "active")
    await user.wait_for(server, "ACTIVE")
    await backup(user, server, 1)
    await user.act(server, "unlock")


async def test_an_image_by_another_project_is_shared_with_that_of_the_server(cloud: Cloud, user: Caller) -> None:
    server = await boot(user)
    admin = cloud.caller().admin
    made = await snapshot(admin, server)
    found = await becomes(admin, made, "active")
    assert (found["visibility"], found["owner"]) == ("shared", admin.project)
    members = (await ok(admin, "GET", f"/image/v2/images/{made}/members"))["members"]
    assert [(member["member_id"], member["status"]) for member in members] == [(user.project, "pending")]
    assert (await shown(user, made))["id"] == made
    await user.wait_for(server, "ACTIVE")


async def test_backups_rotate(cloud: Cloud, user: Caller) -> None:
    server = await boot(user)
    weekly = await backup(user, server, 1, "weekly")
    foreign = await image(cloud.caller(), instance_uuid=server, image_type="backup", backup_type="daily")
    made = [await backup(user, server, 2) for _ in range(4)]
    found = await ok(user, "GET", f"/image/v2/images?instance_uuid={server}&image_type=backup&backup_type=daily")
    assert [each["id"] for each in found["images"] if each["owner"] == user.project] == made[:1:-1]
    newest = await shown(user, made[-1])
    assert (newest["backup_type"], newest["image_type"], newest["disk_format"]) == ("daily", "backup", "qcow2")
    assert (await shown(user, weekly))["status"] == "active"
    assert await last_action(user, server) == ("createBackup", None, [("compute_backup_instance", "Success")])
    await backup(user, server, 0)
    found = (await ok(user, "GET", f"/image/v2/images?instance_uuid={server}&backup_type=daily"))["images"]
    assert found == []
    assert (await ok(cloud.caller().admin, "GET", f"/image/v2/images/{foreign}"))["status"] == "active"
    await cloud.assert_clean()


async def test_a_protected_backup_is_left(user: Caller) -> None:
    server = await boot(user)
    first = await backup(user, server, 1)
    patch = [{"op": "replace", "path": "/protected", "value": True}]
    kind = {"content-type": "application/openstack-images-v2.1-json-patch"}
    assert (await call(user, "PATCH", f"/image/v2/images/{first}", patch, kind)).status == 200
    second = await backup(user, server, 1)
    assert (await shown(user, first))["status"] == (await shown(user, second))["status"] == "active"


# --- the API -------------------------------------------------------------------------------------------------------


async def test_where_the_answer_names_the_image(user: Caller) -> None:
    server = await boot(user)
    for minor, action, fields in (
        (44, "createImage", {}),
        (45, "createImage", {}),
        (44, "createBackup", {"backup_type": "x", "rotation": 1}),
        (44, "createBackup", {"backup_type": "x", "rotation": "0"}),
        (45, "createBackup", {"backup_type": "x", "rotation": 0}),
    ):
        answer = await user.at(minor).request("POST", f"/servers/{server}/action", {action: {"name": "i", **fields}})
        assert answer.status == 202
        if minor < 45:
            assert answer.body == b""
            link = answer.headers.get("location")
            assert (link is None) == (fields.get("rotation") == "0")
            assert link is None or "/compute/v2.1/images/" in link
        else:
            assert list(answer.json()) == ["image_id"] and "location" not in answer.headers
        await user.wait_for(server, "ACTIVE")


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        ("createImage", {}),
        ("createImage", {"name": ""}),
        ("createImage", {"name": " x "}),
        ("createImage", {"name": "x" * 256}),
        ("createImage", {"name": "x", "metadata": {"a/b": "c"}}),
        ("createImage", {"name": "x", "metadata": {"a": 1}}),
        ("createImage", {"name": "x", "more": 1}),
        ("createImage", {"name": "x", "metadata": {"status": "active"}}),
        ("createBackup", {"name": "x"}),
        ("createBackup", {"name": "x", "backup_type": "d", "rotation": -1}),
        ("createBackup", {"name": "x", "backup_type": 1, "rotation": 1}),
        ("createBackup", {"name": "x", "backup_type": "d", "rotation": "many"}),
    ],
)
async def test_bad_requests(cloud: Cloud, user: Caller, action: str, wrong: dict[str, Any]) -> None:
    server = await boot(user)
    await user.refused(400, "POST", f"/servers/{server}/action", {action: wrong})
    assert not await cloud.open_operations()


async def test_metadata_has_a_quota_until_2_38(user: Caller) -> None:
    server = await boot(user)
    body = {"createImage": {"name": "x", "metadata": {f"k{number}": "v" for number in range(129)}}}
    message = await user.at(38).refused(403, "POST", f"/servers/{server}/action", body)
    assert "128" in message


async def test_what_the_image_service_refuses_changes_nothing(cloud: Cloud, user: Caller) -> None:
    server = await boot(user)
    body = {"createImage": {"name": "x", "metadata": {f"k{number}": "v" for number in range(129)}}}
    await user.refused(403, "POST", f"/servers/{server}/action", body)
    assert (await user.show(server))["OS-EXT-STS:task_state"] is None
    await cloud.assert_clean()
    assert (await last_action(user, server))[:2] == ("createImage", "Error")
    assert (await ok(user, "GET", f"/image/v2/images?instance_uuid={server}"))["images"] == []
