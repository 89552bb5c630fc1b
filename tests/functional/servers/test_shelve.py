"""Shelving servers that leave their hosts at once, and unshelving them."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.cli.audit import run_audit
from micronova.compute.host import DESTROY_ATTEMPTS
from micronova.conductor.operations import engine
from micronova.db.tables import allocations, instances
from micronova.http.client import Answer, ASGITransport
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image, network, ok, ports_of
from tests.functional.servers.test_server_images import image_gone, last_action

CLOUD = CloudOptions(hosts=3, roles=("network", "image"))
SHELVED = [("compute_shelve_offload_instance", "Success"), ("compute_shelve_instance", "Success")]


async def boot(user: Caller, **fields: Any) -> str:
    """Boot a server from an image of the user; return its id."""
    fields.setdefault("imageRef", await image(user))
    return str((await user.boot(**fields))["id"])


async def shelve(user: Caller, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Boot a server and shelve it; return its id and its image."""
    id = await boot(user, **fields)
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    [made] = await images_of(user, id)
    return id, made


async def images_of(user: Caller, id: str) -> list[dict[str, Any]]:
    """Return the images that were made of a server."""
    return list((await ok(user, "GET", f"/image/v2/images?instance_uuid={id}"))["images"])


async def row_of(cloud: Cloud, id: str) -> Any:
    [row] = await cloud.read(sa.select(instances).where(instances.c.uuid == id))
    return row


async def claims_of(cloud: Cloud, id: str) -> set[str]:
    """Return the nodes on which a server holds resources."""
    rows = await cloud.read(sa.select(allocations).where(allocations.c.consumer_uuid == id))
    return {row.node_uuid for row in rows}


async def used(user: Caller) -> tuple[int, int, int]:
    """Return the usage of the project's quota: servers, cores and memory."""
    limits = (await user.get("/limits"))["limits"]["absolute"]
    return limits["totalInstancesUsed"], limits["totalCoresUsed"], limits["totalRAMUsed"]


async def test_there_and_back(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    base = await image(user, hw_disk_bus="virtio")
    id = await boot(user, name="kept", imageRef=base, networks=[{"uuid": net["id"]}])
    before, usage = await user.admin.show(id), await used(user)
    host = before["OS-EXT-SRV-ATTR:host"]
    [port] = await ports_of(user, id)
    assert port["binding:host_id"] == host
    await user.act(id, "shelve")
    shown = await user.admin.wait_for(id, "SHELVED_OFFLOADED")
    assert (shown["OS-EXT-SRV-ATTR:host"], shown["OS-EXT-STS:task_state"], shown["hostId"]) == (None, None, "")
    assert (shown["image"], shown["addresses"]) == (before["image"], before["addresses"])
    assert await claims_of(cloud, id) == set()
    [made] = await images_of(user, id)
    assert (made["name"], made["status"], made["image_type"]) == ("kept-shelved", "active", "snapshot")
    assert (made["owner"], made["hw_disk_bus"], made["base_image_ref"]) == (user.project, "virtio", base)
    known = (await row_of(cloud, id)).system_metadata
    assert (known["shelved_image_id"], known["shelved_host"]) == (made["id"], host)
    assert known["shelved_at"].startswith("20") and len(known["shelved_at"]) == 26
    [unbound] = await ports_of(user, id)
    assert (unbound["id"], unbound["binding:host_id"], unbound["device_id"]) == (port["id"], "", id)
    assert unbound["fixed_ips"] == port["fixed_ips"]
    assert await last_action(user, id) == ("shelve", None, SHELVED)
    assert await used(user) == usage, "a shelved server keeps its quota"
    await cloud.assert_clean()
    await user.act(id, "unshelve")
    after = await user.admin.wait_for(id, "ACTIVE")
    assert after["OS-EXT-SRV-ATTR:host"] in cloud.hosts
    assert (after["image"], after["addresses"]) == (before["image"], before["addresses"])
    assert after["OS-SRV-USG:launched_at"] > before["OS-SRV-USG:launched_at"]
    assert "image kept-shelved" in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    [bound] = await ports_of(user, id)
    assert (bound["id"], bound["binding:host_id"]) == (port["id"], after["OS-EXT-SRV-ATTR:host"])
    await image_gone(user, made["id"])
    assert "shelved_image_id" not in (await row_of(cloud, id)).system_metadata
    assert await claims_of(cloud, id) == {(await row_of(cloud, id)).node_uuid}
    events = [(name, "Success") for name in ("compute_unshelve_instance", "schedule_instances", "get_image_info")]
    assert await last_action(user, id) == ("unshelve", None, events)
    await cloud.assert_clean()


async def test_the_task_states_that_users_see(cloud: Cloud, user: Caller) -> None:
    id = await boot(user, name=user.project)
    rules = [
        ("power_off", "ACTIVE", "shelving"),
        ("snapshot", "ACTIVE", "shelving_image_pending_upload"),
        ("upload", "ACTIVE", "shelving_image_uploading"),
    ]
    for operation, status, task in rules:
        async with cloud.faults({"operation": operation, "kind": "hang", "name": user.project}):
            await user.act(id, "shelve")
            await user.wait_for(id, status, task=task)
            await user.refused(409, "POST", f"/servers/{id}/action", {"os-stop": None})
            await user.admin.act(id, "os-resetState", {"state": "active"})
            await cloud.settled()
            assert await images_of(user, id) == []
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ACTIVE")
    async with cloud.faults({"operation": "destroy", "kind": "hang", "name": user.project, "count": 1}):
        await user.act(id, "shelve")
        await user.wait_for(id, "SHELVED", task="shelving_offloading")
        await cloud.fault_struck()
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()
    assert await images_of(user, id) == []


@pytest.mark.parametrize("before", ["os-stop", "pause", "suspend"])
async def test_a_server_can_be_shelved_in_each_state(cloud: Cloud, user: Caller, before: str) -> None:
    id = await boot(user)
    await user.act(id, before)
    await user.wait_for(id, {"os-stop": "SHUTOFF", "pause": "PAUSED", "suspend": "SUSPENDED"}[before])
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


@pytest.mark.parametrize(("step", "status"), [("power_off", "ACTIVE"), ("snapshot", "SHUTOFF"), ("upload", "SHUTOFF")])
async def test_a_failed_shelve_leaves_no_image(cloud: Cloud, user: Caller, step: str, status: str) -> None:
    id = await boot(user, name=user.project)
    async with cloud.faults({"operation": step, "kind": "fail", "name": user.project, "message": "no room"}):
        await user.act(id, "shelve")
        await cloud.settled()
    assert (await user.wait_for(id, status))["OS-EXT-STS:power_state"] == (1 if status == "ACTIVE" else 4)
    assert await images_of(user, id) == []
    assert await last_action(user, id) == ("shelve", "Error", [("compute_shelve_instance", "Error")])
    if status == "SHUTOFF":
        await user.act(id, "os-start")
        await user.wait_for(id, "ACTIVE")
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    await cloud.assert_clean()


async def test_an_offload_is_repeated_until_it_succeeds(cloud: Cloud, user: Caller) -> None:
    id = await boot(user, name=user.project)
    rule = {"operation": "destroy", "kind": "fail", "name": user.project, "count": DESTROY_ATTEMPTS}
    async with cloud.faults(rule):
        await user.act(id, "shelve")
        await user.wait_for(id, "SHELVED_OFFLOADED")
    assert await last_action(user, id) == ("shelve", None, SHELVED)
    await cloud.assert_clean()


@pytest.mark.parametrize("step", ["spawning", "shelved"])
async def test_a_delete_deletes_the_image(cloud: Cloud, user: Caller, step: str) -> None:
    net = await network(user)
    id, made = await shelve(user, name=user.project, networks=[{"uuid": net["id"]}])
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": user.project}):
        if step == "spawning":
            await user.act(id, "unshelve")
            await user.wait_for(id, "SHELVED_OFFLOADED", task="spawning")
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    assert await ports_of(user, id) == []
    assert await used(user) == (0, 0, 0)
    await image_gone(user, made["id"])
    await cloud.assert_clean()


# --- unshelving ------------------------------------------------------------------------------------------------------


@only_in_one_process("processes of hosts count the uses of a rule each for itself")
async def test_a_host_that_fails_is_replaced(cloud: Cloud, user: Caller) -> None:
    id, _ = await shelve(user, name=user.project)
    rule = {"operation": "spawn", "kind": "fail", "name": user.project, "count": 2, "message": "no luck"}
    async with cloud.faults(rule):
        await user.act(id, "unshelve")
        await user.wait_for(id, "ACTIVE")
    _, _, events = await last_action(user, id)
    results = [result for event, result in events if event == "compute_unshelve_instance"]
    assert results == ["Success", "Error", "Error"]
    await cloud.assert_clean()


@pytest.mark.parametrize("kind", ["fail", "abort"])
async def test_a_server_that_cannot_be_built_stays_shelved(cloud: Cloud, user: Caller, kind: str) -> None:
    net = await network(user)
    id, made = await shelve(user, name=user.project, networks=[{"uuid": net["id"]}])
    async with cloud.faults({"operation": "spawn", "kind": kind, "name": user.project, "message": "no luck"}):
        await user.act(id, "unshelve")
        await cloud.settled()
    shown = await user.admin.wait_for(id, "SHELVED_OFFLOADED")
    assert (shown["OS-EXT-SRV-ATTR:host"], await claims_of(cloud, id)) == (None, set())
    assert [port["binding:host_id"] for port in await ports_of(user, id)] == [""]
    assert (await last_action(user, id))[1] == "Error"
    assert [each["id"] for each in await images_of(user, id)] == [made["id"]]
    await cloud.assert_clean()
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_without_room_it_stays_shelved(cloud: Cloud, user: Caller) -> None:
    id, _ = await shelve(user)
    for host in cloud.hosts:
        await _switch(user, host, "disabled")
    try:
        await user.act(id, "unshelve")
        await cloud.settled()
        await user.wait_for(id, "SHELVED_OFFLOADED")
        assert await last_action(user, id) == (
            "unshelve",
            "Error",
            [("schedule_instances", "Error"), ("get_image_info", "Success")],
        )
        await cloud.assert_clean()
    finally:
        for host in cloud.hosts:
            await _switch(user, host, "enabled")
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")


async def _switch(user: Caller, host: str, status: str) -> None:
    services = (await user.admin.get(f"/os-services?binary=nova-compute&host={host}"))["services"]
    await user.admin.put(f"/os-services/{services[0]['id']}", {"status": status})


async def test_without_its_image_it_stays_shelved(cloud: Cloud, user: Caller) -> None:
    id, made = await shelve(user)
    await ok(user, "DELETE", f"/image/v2/images/{made['id']}")
    [finding] = await run_audit(cloud.process)
    assert (finding["kind"], finding["subject"]) == ("image", id)
    for _ in range(2):
        await user.act(id, "unshelve")
        await cloud.settled()
        await user.wait_for(id, "SHELVED_OFFLOADED")
        assert (await last_action(user, id))[1] == "Error"
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


@contextlib.asynccontextmanager
async def _proxy_without_image_service(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let a proxy answer conductors with 404 while the context is open; it ends when one has asked twice."""
    asked, send = 0, ASGITransport.request

    async def request(self: ASGITransport, method: str, url: str, headers: Any, body: Any) -> Answer:
        nonlocal asked
        if "/v2/images/" not in url or "ticket=" not in url:
            return await send(self, method, url, headers, body)
        asked += 1
        return Answer(404, {"server": "proxy"}, b"404 page not found")

    async def twice() -> bool | None:
        return True if asked > 1 else None

    with monkeypatch.context() as patched:
        patched.setattr(engine, "LONGEST_PAUSE", 0.1)
        patched.setattr(ASGITransport, "request", request)
        yield
        await cloud.until(twice, "a conductor to ask for the image twice")


@only_in_one_process("replaces the image service of the cloud's process")
async def test_an_unshelve_waits_if_a_proxy_answers(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, _ = await shelve(user)
    async with _proxy_without_image_service(cloud, monkeypatch):
        await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


@only_in_one_process("replaces the image service of the cloud's process")
async def test_the_image_of_a_deleted_server_is_deleted_when_the_service_is_back(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, made = await shelve(user)
    async with _proxy_without_image_service(cloud, monkeypatch):
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await image_gone(user, made["id"])
    await cloud.assert_clean()


async def test_an_image_that_is_withheld_is_not_lost(cloud: Cloud, user: Caller) -> None:
    id, made = await shelve(user)
    path = f"/image/v2/images/{made['id']}"
    await ok(user, "POST", f"{path}/actions/deactivate")
    await user.act(id, "unshelve")
    await cloud.settled()
    await user.wait_for(id, "SHELVED_OFFLOADED")
    assert (await last_action(user, id))[1] == "Error"
    await ok(user, "POST", f"{path}/actions/reactivate")
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


@pytest.mark.parametrize("has_image", [False, True])
async def test_a_root_disk_that_was_made_empty_keeps_its_content(cloud: Cloud, user: Caller, has_image: bool) -> None:
    empty = [{"source_type": "blank", "destination_type": "local", "boot_index": 0}]
    base = await image(user) if has_image else ""
    id, _ = await shelve(user, name="installed", imageRef=base, block_device_mapping_v2=empty)
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    assert "image installed-shelved" in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    await cloud.assert_clean()


async def test_to_a_zone_and_to_a_host(cloud: Cloud, user: Caller) -> None:
    one, two, *_ = cloud.hosts
    made = await user.admin.post("/os-aggregates", {"aggregate": {"name": "a", "availability_zone": "east"}}, 200)
    path = f"/os-aggregates/{made['aggregate']['id']}/action"
    await user.admin.post(path, {"add_host": {"host": one}}, 200)
    id, _ = await shelve(user)

    async def unshelved(caller: Caller, wanted: Any) -> str | None:
        """Unshelve the server; return where it is, and shelve it again."""
        await caller.act(id, "unshelve", wanted)
        await user.wait_for(id, "ACTIVE")
        host = await user.host_of(id)
        await cloud.settled()
        await user.act(id, "shelve")
        await user.wait_for(id, "SHELVED_OFFLOADED")
        return host

    async def refused(caller: Caller, status: int, wanted: Any) -> None:
        await caller.refused(status, "POST", f"/servers/{id}/action", {"unshelve": wanted})

    try:
        await unshelved(user.at(76), {"anything": 1})
        wrong: Any
        for wrong in ({}, {"availability_zone": None}, {"availability_zone": "east", "host": one}, "x"):
            await refused(user.at(77), 400, wrong)
        await refused(user.at(77), 400, {"availability_zone": "west"})
        await refused(user.at(77), 400, {"availability_zone": " east"})
        assert await unshelved(user.at(77), {"availability_zone": "east"}) == one
        shown = await user.at(96).show(id)
        assert shown["pinned_availability_zone"] == "east"
        assert await unshelved(user.at(77), None) == one, "it stays pinned"
        for wrong in ({"host": ""}, {"zone": "x"}, {"availability_zone": 1}):
            await refused(user.admin.at(91), 400, wrong)
        await refused(user.at(91), 403, {"host": one})
        await refused(user.admin.at(91), 400, {"host": "nowhere"})
        await refused(user.admin.at(91), 409, {"host": two})
        await refused(user.admin.at(91), 409, {"host": two, "availability_zone": "east"})
        assert await unshelved(user.admin.at(91), {"host": one}) == one
        assert await unshelved(user.admin.at(91), {"host": two, "availability_zone": None}) == two
        assert (await user.at(96).show(id))["pinned_availability_zone"] is None
        assert await unshelved(user.admin.at(91), {"host": one, "availability_zone": "east"}) == one
        await unshelved(user.at(91), {"availability_zone": None})
        await unshelved(user.at(91), {})
        async with cloud.faults({"operation": "spawn", "kind": "fail", "host": f"^{two}$"}):
            await user.admin.act(id, "unshelve", {"host": two})
            await cloud.settled()
            await user.wait_for(id, "SHELVED_OFFLOADED")
    finally:
        await user.admin.post(path, {"remove_host": {"host": one}}, 200)
        await user.admin.delete(f"/os-aggregates/{made['aggregate']['id']}", 200)
    await cloud.assert_clean()


async def test_a_lock_and_who_may(cloud: Cloud, user: Caller) -> None:
    id = await boot(user)
    await user.act(id, "lock")
    for action in ("shelve", "unshelve"):
        message = await user.refused(409, "POST", f"/servers/{id}/action", {action: None})
        assert "is locked" in message
    assert await images_of(user, id) == []
    await user.act(id, "unlock")
    admin = cloud.caller().admin
    await admin.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    [made] = await images_of(admin, id)
    assert (made["owner"], made["visibility"]) == (admin.project, "shared")
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    await image_gone(admin, made["id"])
    await cloud.assert_clean()


async def test_a_member_of_a_group_leaves_its_place(cloud: Cloud, user: Caller) -> None:
    group = {"server_group": {"name": "g", "policy": "anti-affinity"}}
    hints = {"group": (await user.post("/os-server-groups", group, 200))["server_group"]["id"]}
    ids = [(await user.boot(imageRef=await image(user), hints=hints))["id"] for _ in cloud.hosts]
    await user.act(ids[0], "shelve")
    await user.wait_for(ids[0], "SHELVED_OFFLOADED")
    ids.append((await user.boot(imageRef=await image(user), hints=hints))["id"])
    await user.act(ids[0], "unshelve")
    await cloud.settled()
    await user.wait_for(ids[0], "SHELVED_OFFLOADED")
    await user.delete(f"/servers/{ids[1]}")
    await user.gone(ids[1])
    await user.act(ids[0], "unshelve")
    await user.wait_for(ids[0], "ACTIVE")
    assert len({await user.host_of(id) for id in (ids[0], *ids[2:])}) == len(cloud.hosts)
    await cloud.assert_clean()
