"""Volumes and snapshots through compute (until 2.35), and snapshots that a host makes for the volume service."""

import uuid
from typing import Any

import msgspec
import pytest

from micronova.objects.errors import Unavailable
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.test_volumes import Volumes, attachment
from tests.schemas.tempest import check

CLOUD = CloudOptions(roles=("volume",), hosts=2, settings={"api": {"max_limit": 3}})
pytestmark = only_in_one_process("the cluster of the tests has no volume service")

FIELDS = {
    "id", "status", "size", "availabilityZone", "createdAt", "attachments", "displayName", "displayDescription",
    "volumeType", "snapshotId", "metadata",
}  # fmt: skip


async def _asked(user: Caller, method: str, path: str, module: str, schema: str, body: Any = None) -> Any:
    """Send a request whose answer must have Tempest's form."""
    answer = await user.request(method, path, body)
    check(module, schema, user.minor, answer.status, answer.json() if answer.body else None)
    return answer.json() if answer.body else None


async def test_volumes(cloud: Cloud, user: Caller) -> None:
    old, volumes = user.at(35), Volumes(user)
    body = {
        "volume": {
            "size": "1", "display_name": "data", "display_description": "d", "metadata": {"a": "b"},
            "availability_zone": "nova",
        }
    }  # fmt: skip
    answer = await old.request("POST", "/os-volumes", body)
    check("volumes", "create_get_volume", 35, answer.status, answer.json())
    made = answer.json()["volume"]
    assert answer.headers["location"].endswith(f"/os-volumes/{made['id']}")
    assert set(made) == FIELDS and made["attachments"] == [{}] and made["size"] == 1
    assert (made["displayName"], made["displayDescription"], made["metadata"]) == ("data", "d", {"a": "b"})
    await volumes.until(made["id"], "available")
    path = f"/os-volumes/{made['id']}"
    shown = (await _asked(old, "GET", path, "volumes", "create_get_volume"))["volume"]
    assert shown == {**made, "status": "available"}
    for listing in ("/os-volumes", "/os-volumes/detail"):
        assert (await _asked(old, "GET", listing, "volumes", "list_volumes"))["volumes"] == [shown]
    server = (await user.boot())["id"]
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(made["id"]), 200)
    await volumes.until(made["id"], "in-use")
    used = (await _asked(old, "GET", path, "volumes", "create_get_volume"))["volume"]
    held = {"id": made["id"], "volumeId": made["id"], "serverId": server, "device": "/dev/vdb"}
    assert (used["status"], used["attachments"]) == ("in-use", [held])
    assert "in-use" in await old.refused(400, "DELETE", path)
    await user.delete(f"/servers/{server}/os-volume_attachments/{made['id']}", 202)
    await volumes.until(made["id"], "available")
    await _asked(old, "DELETE", path, "volumes", "delete_volume")

    async def gone() -> bool | None:
        return (await old.request("GET", path)).status == 404 or None

    await cloud.until(gone, "the volume to be deleted")
    assert await old.refused(404, "DELETE", path) == f"Volume {made['id']} could not be found."


async def test_pages(user: Caller) -> None:
    volumes, old = Volumes(user), user.at(35)
    made = [await volumes.create(name=str(number)) for number in range(5)]
    snapshots = [
        (await old.post("/os-snapshots", {"snapshot": {"volume_id": each}}, 200))["snapshot"]["id"] for each in made
    ]
    for noun, ids in (("volumes", made), ("snapshots", snapshots)):
        newest = ids[::-1]

        async def listed(query: str, noun: str = noun) -> list[str]:
            found = (await old.get(f"/os-{noun}{query}"))[noun]
            ids = [each["id"] for each in found]
            assert ids == [each["id"] for each in (await old.get(f"/os-{noun}/detail{query}"))[noun]]
            return ids

        assert await listed("?limit=2&zork=1") == newest[:2]
        assert await listed("?limit=2&offset=3") == newest[3:]
        assert await listed("") == await listed("?limit=0") == await listed("?limit=9") == newest[:3]  # api.max_limit
        assert await listed("?offset=5") == []
        await old.refused(400, "GET", f"/os-{noun}?limit=-1")


async def test_snapshots(cloud: Cloud, user: Caller) -> None:
    old, volumes = user.at(35), Volumes(user)
    volume = await volumes.create()
    body = {"snapshot": {"volume_id": volume, "display_name": "s", "display_description": "d", "force": "false"}}
    made = (await _asked(old, "POST", "/os-snapshots", "snapshots", "create_get_snapshot", body))["snapshot"]
    assert (made["volumeId"], made["displayName"], made["displayDescription"], made["size"]) == (volume, "s", "d", 1)
    path = f"/os-snapshots/{made['id']}"

    async def available() -> Any:
        shown = (await _asked(old, "GET", path, "snapshots", "create_get_snapshot"))["snapshot"]
        return shown if shown["status"] == "available" else None

    shown = await cloud.until(available, "the snapshot")
    listed = await _asked(old, "GET", "/os-snapshots/detail", "snapshots", "list_snapshots")
    assert listed["snapshots"] == [shown] == (await old.get("/os-snapshots"))["snapshots"]
    copy = await old.post("/os-volumes", {"volume": {"size": 1, "snapshot_id": made["id"]}}, 200)
    assert copy["volume"]["snapshotId"] == made["id"]
    server = (await user.boot())["id"]
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    await volumes.until(volume, "in-use")
    await old.refused(400, "POST", "/os-snapshots", body)  # it is in use
    body["snapshot"]["force"] = "true"
    await old.post("/os-snapshots", body, 200)
    await volumes.until(copy["volume"]["id"], "available")
    await _asked(old, "DELETE", path, "snapshots", "delete_snapshot")

    async def gone() -> bool | None:
        return (await old.request("GET", path)).status == 404 or None

    await cloud.until(gone, "the snapshot to be deleted")
    assert await old.refused(404, "DELETE", path) == f"Snapshot {made['id']} could not be found."


async def test_the_volume_service_decides_who_may_do_what(cloud: Cloud, user: Caller) -> None:
    old, volumes = user.at(35), Volumes(user)
    volume = await volumes.create()
    snapshot = (await old.post("/os-snapshots", {"snapshot": {"volume_id": volume}}, 200))["snapshot"]["id"]
    stranger = cloud.caller().at(35)
    for noun, id in (("volumes", volume), ("snapshots", snapshot)):
        assert (await stranger.get(f"/os-{noun}"))[noun] == []
        for method in ("GET", "DELETE"):
            await stranger.refused(404, method, f"/os-{noun}/{id}")
            await old.refused(404, method, f"/os-{noun}/..")
    await stranger.refused(404, "POST", "/os-snapshots", {"snapshot": {"volume_id": volume}})
    await stranger.refused(404, "POST", "/os-volumes", {"volume": {"size": 1, "snapshot_id": snapshot}})
    await old.refused(404, "POST", "/os-volumes", {"volume": {"size": 1, "volume_type": "none"}})
    path = f"/volume/v3/os-quota-sets/{user.project}"
    quotas = {"quota_set": {"volumes": 1, "snapshots": 1}}
    await volumes.request("PUT", path.removeprefix("/volume/v3"), quotas, user.admin)
    assert "quota 'volumes'" in await old.refused(403, "POST", "/os-volumes", {"volume": {"size": 1}})
    await old.refused(403, "POST", "/os-snapshots", {"snapshot": {"volume_id": volume}})


async def test_bad_requests_and_later_versions(user: Caller) -> None:
    old, id = user.at(35), str(uuid.uuid4())
    for noun, body in (("volumes", {"volume": {"size": 1}}), ("snapshots", {"snapshot": {"volume_id": id}})):
        for method, path, sent in (
            ("GET", f"/os-{noun}", None), ("GET", f"/os-{noun}/detail", None), ("GET", f"/os-{noun}/{id}", None),
            ("DELETE", f"/os-{noun}/{id}", None), ("POST", f"/os-{noun}", body),
        ):  # fmt: skip
            await user.at(36).refused(404, method, path, sent)
    for wrong in ({}, {"size": 0}, {"size": "0"}, {"size": "x"}, {"size": 1, "zork": 1}, {"size": -1}):
        await old.refused(400, "POST", "/os-volumes", {"volume": wrong})
    await old.refused(400, "POST", "/os-volumes", {"volume": {"size": 2**63}})
    await old.refused(400, "POST", "/os-snapshots", {"snapshot": {"volume_id": id, "force": "zork"}})
    await old.refused(404, "POST", "/os-snapshots", {"snapshot": {"volume_id": id}})


async def test_an_attach_since_2_101_is_accepted_before_it_is_done(cloud: Cloud, user: Caller) -> None:
    server, volumes = (await user.boot())["id"], Volumes(user)
    volume = await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    answer = await user.at(101).request("POST", path, attachment(volume, tag="t"))
    assert (answer.status, answer.body) == (202, b"")
    await volumes.until(volume, "in-use")
    [held] = (await user.get(path))["volumeAttachments"]
    assert (held["volumeId"], held["device"], held["tag"]) == (volume, "/dev/vdb", "t")
    other = await volumes.create()
    async with cloud.faults({"operation": "attach_volume", "kind": "fail", "count": 1}):
        await user.at(101).post(path, attachment(other), 202)
        await volumes.until(other, "available")  # the host refused it, and it was given back
    [action] = [
        each
        for each in (await user.get(f"/servers/{server}/os-instance-actions"))["instanceActions"]
        if each["action"] == "attach_volume" and each["message"]
    ]
    assert action["message"] == "Error"


# --- snapshots that a host makes for the volume service -------------------------------------------------------------


def _assisted(volume: str, snapshot: str, **info: Any) -> dict[str, Any]:
    return {
        "snapshot": {
            "volume_id": volume,
            "create_info": {"snapshot_id": snapshot, "type": "qcow2", "new_file": "x", **info},
        }
    }


async def test_an_assisted_snapshot_ends_in_error(cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """No host can make one: the volume service, which waits for it, is told so."""
    volumes, path = Volumes(user), "/os-assisted-volume-snapshots"
    volume, server = await volumes.create(), (await user.boot())["id"]
    told: list[tuple[str, str]] = []
    client = cloud.process.clients.volume_client()
    assert client is not None
    real = client.update_snapshot_status

    async def update(snapshot_id: str, status: str) -> None:
        told.append((snapshot_id, status))
        await real(snapshot_id, status)

    monkeypatch.setattr(client, "update_snapshot_status", update)
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    await volumes.until(volume, "in-use")
    snapshot = (await volumes.request("POST", "/snapshots", {"snapshot": {"volume_id": volume, "force": True}}))[
        "snapshot"
    ]["id"]
    id = str(uuid.uuid4())
    answer = await user.admin.post(path, _assisted(volume, snapshot, id=id), 200)
    assert answer == {"snapshot": {"id": id, "volumeId": volume}}
    assert (await user.admin.post(path, _assisted(volume, snapshot), 200))["snapshot"]["id"] is None
    query = msgspec.json.encode({"volume_id": volume}).decode()
    await user.admin.delete(f"{path}/{snapshot}?delete_info={query}", 204)
    assert told == [(snapshot, "error"), (snapshot, "error"), (snapshot, "error_deleting")]

    async def away(snapshot_id: str, status: str) -> None:
        raise Unavailable("away")

    monkeypatch.setattr(client, "update_snapshot_status", away)
    await user.refused(403, "POST", path, _assisted(volume, snapshot))
    await user.act(server, "os-stop")
    await user.wait_for(server, "SHUTOFF")
    merged = msgspec.json.encode({"volume_id": volume, "merge_target_file": "y"}).decode()
    refused = await user.admin.refused(400, "DELETE", f"{path}/{snapshot}?delete_info={merged}")
    assert "vm_state stopped" in refused


async def test_assisted_snapshots_of_shared_volumes_are_refused(user: Caller) -> None:
    volumes, servers = Volumes(user), [(await user.boot())["id"] for _ in range(2)]
    volume = await volumes.create(volume_type=await volumes.multiattach_type())
    for server in servers:
        await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    body = _assisted(volume, str(uuid.uuid4()))
    assert "several servers" in await user.admin.refused(400, "POST", "/os-assisted-volume-snapshots", body)
