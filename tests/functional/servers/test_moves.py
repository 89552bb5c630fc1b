"""Resize, cold migration, their confirmation and their revert, on simulated hosts."""

import uuid
from typing import Any

from micronova.db.tables import flavors
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process

CLOUD = CloudOptions(hosts=3, settings={"default": {"allow_resize_to_same_host": False}})
SMALL, MEDIUM = "2", "3"  # flavors: 2 has 1 vCPU, 2048 MB and 20 GB; 3 has 2 vCPUs, 4096 MB and 40 GB


async def _booted(user: Caller, **fields: Any) -> tuple[str, str]:
    id = (await user.boot(**{"flavorRef": SMALL, **fields}))["id"]
    return id, await user.host_of(id)


async def _migrations(user: Caller, id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await user.admin.get(f"/os-migrations?instance_uuid={id}"))["migrations"]
    return found


async def _guest_hosts(cloud: Cloud, id: str) -> list[str]:
    return [host for host in cloud.hosts if id in await cloud.guests(host)]


async def test_a_server_is_resized_to_another_host_and_confirmed(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user)
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    shown = await user.wait_for(id, "VERIFY_RESIZE")
    assert shown["flavor"]["original_name"] == "m1.medium"
    destination = await user.host_of(id)
    assert destination != source
    assert sorted(await _guest_hosts(cloud, id)) == sorted([source, destination])
    guest = (await cloud.guests(destination))[id]
    assert (guest.vcpus, guest.memory_mb, guest.local_gb, guest.power_state) == (2, 4096, 40, 1)
    assert (await cloud.guests(source))[id].power_state == 4
    [migration] = await _migrations(user, id)
    assert (migration["status"], migration["migration_type"]) == ("finished", "resize")
    assert (migration["source_compute"], migration["dest_compute"]) == (source, destination)
    await cloud.assert_clean()
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    assert await _guest_hosts(cloud, id) == [destination]
    [migration] = await _migrations(user, id)
    assert migration["status"] == "confirmed"
    await cloud.assert_clean()


async def test_hints_that_name_servers_hold_for_builds_and_moves(cloud: Cloud, user: Caller) -> None:
    first, host = await _booted(user)

    async def booted(**hints: Any) -> tuple[str, str]:
        body = {**user.body(flavorRef=SMALL), "os:scheduler_hints": hints}
        id = (await user.post("/servers", body))["server"]["id"]
        await user.wait_for(id, "ACTIVE")
        return id, await user.host_of(id)

    _, beside = await booted(same_host=first)
    assert beside == host
    placed = {first: host}
    while len(placed) < len(cloud.hosts):
        moving, last = await booted(different_host=list(placed))
        assert last not in placed.values()
        placed[moving] = last
    await user.admin.act(moving, "migrate")  # every other host has one of the servers that it names
    await user.wait_for(moving, "ACTIVE")
    assert await user.host_of(moving) == last
    [migration] = await _migrations(user, moving)
    assert migration["status"] == "error"
    stranger = {**user.body(flavorRef=SMALL), "os:scheduler_hints": {"same_host": str(uuid.uuid4())}}
    assert "could not be found" in await user.refused(400, "POST", "/servers", stranger)


async def test_a_resize_is_reverted(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user)
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "revertResize")
    shown = await user.wait_for(id, "ACTIVE")
    assert shown["flavor"]["original_name"] == "m1.small"
    assert await user.host_of(id) == source
    assert await _guest_hosts(cloud, id) == [source]
    [migration] = await _migrations(user, id)
    assert migration["status"] == "reverted"
    await cloud.assert_clean()


async def test_a_stopped_server_is_stopped_after_a_move(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user)
    for end, host in (("revertResize", source), ("confirmResize", None)):
        if (await user.show(id))["status"] == "ACTIVE":
            await user.act(id, "os-stop")
            await user.wait_for(id, "SHUTOFF")
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        await user.wait_for(id, "VERIFY_RESIZE")
        where = await user.host_of(id)
        assert (await cloud.guests(where))[id].power_state == 4
        await user.act(id, end, status=204 if end == "confirmResize" else 202)
        await user.wait_for(id, "SHUTOFF")
        assert await user.host_of(id) == (host or where)
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_server_migrates_to_the_host_that_an_admin_names(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user)
    first, second, *_ = [host for host in cloud.hosts if host != source]
    path = f"/servers/{id}/action"
    assert "could not be found" in await user.admin.refused(400, "POST", path, {"migrate": {"host": "nowhere"}})
    same = await user.admin.refused(400, "POST", path, {"migrate": {"host": source}})
    assert same == "Cannot migrate to the host where the server exists."
    await user.refused(403, "POST", path, {"migrate": {"host": first}})
    await user.refused(403, "POST", path, {"migrate": None})
    await user.admin.at(55).refused(400, "POST", path, {"migrate": None, "host": first})
    await user.admin.refused(400, "POST", path, {"migrate": {"host": first, "force": True}})
    await user.admin.act(id, "migrate", {"host": second})
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) == second
    [migration] = await _migrations(user, id)
    assert (migration["migration_type"], migration["dest_compute"]) == ("migration", second)
    assert migration["old_instance_type_id"] == migration["new_instance_type_id"]
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    await user.admin.at(1).act(id, "migrate", None)
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) != second
    await cloud.assert_clean()


async def test_wrong_resizes_are_refused(cloud: Cloud, user: Caller) -> None:
    id, _ = await _booted(user)
    path = f"/servers/{id}/action"
    for flavor in ("nonsense", SMALL):
        await user.refused(400, "POST", path, {"resize": {"flavorRef": flavor}})
    for body in ({}, {"flavorRef": MEDIUM, "more": 1}, {"flavorRef": MEDIUM, "OS-DCF:diskConfig": "SOMETIMES"}, None):
        await user.refused(400, "POST", path, {"resize": body})
    made = {"name": f"zero-{id}", "ram": 4096, "vcpus": 1, "disk": 0}
    zero = (await user.admin.post("/flavors", {"flavor": made}, 200))["flavor"]["id"]
    assert "zero disk" in await user.refused(400, "POST", path, {"resize": {"flavorRef": zero}})
    assert "vm_state active" in await user.refused(409, "POST", path, {"confirmResize": None})
    assert (await _migrations(user, id)) == []
    assert (await user.show(id))["OS-EXT-STS:task_state"] is None


async def test_a_smaller_disk_is_refused_by_the_host(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user, flavorRef=MEDIUM)
    await user.act(id, "resize", {"flavorRef": SMALL})
    await cloud.settled()
    shown = await user.wait_for(id, "ACTIVE")
    assert shown["flavor"]["original_name"] == "m1.medium"
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (actions[0]["action"], actions[0]["message"]) == ("resize", "Error")
    assert await user.host_of(id) == source
    [migration] = await _migrations(user, id)
    assert migration["status"] == "error"
    await cloud.assert_clean()


async def test_the_quota_holds_the_larger_flavor_until_the_end(cloud: Cloud, user: Caller) -> None:
    id, _ = await _booted(user)

    async def used() -> tuple[int, int]:
        shown = (await user.get("/limits"))["limits"]["absolute"]
        return shown["totalCoresUsed"], shown["totalRAMUsed"]

    await user.admin.put(f"/os-quota-sets/{user.project}", {"quota_set": {"cores": 1, "ram": 8192}})
    message = await user.refused(403, "POST", f"/servers/{id}/action", {"resize": {"flavorRef": MEDIUM}})
    assert "cores" in message
    assert await used() == (1, 2048)
    await user.admin.put(f"/os-quota-sets/{user.project}", {"quota_set": {"cores": 2}})
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    assert await used() == (2, 4096)
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert await used() == (1, 2048)
    await cloud.assert_clean()


@only_in_one_process("reads the notifications that the process sends")
async def test_actions_events_and_notifications(cloud: Cloud, user: Caller, notifications: Any) -> None:
    id, source = await _booted(user)
    notifications.clear()
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    destination = await user.host_of(id)
    path = f"/servers/{id}/os-instance-actions"
    [action, _] = (await user.get(path))["instanceActions"]
    shown = (await user.admin.get(f"{path}/{action['request_id']}"))["instanceAction"]
    assert [(event["event"], event["result"], event["host"]) for event in reversed(shown["events"])] == [
        ("conductor_migrate_server", "Success", None),
        ("cold_migrate", "Success", None),
        ("compute_prep_resize", "Success", destination),
        ("compute_resize_instance", "Success", source),
        ("compute_finish_resize", "Success", destination),
    ]
    assert [event for event, _, _ in notifications] == [
        "resize_prep.start", "resize_prep.end", "resize.start", "resize.end", "resize_finish.start",
        "resize_finish.end",
    ]  # fmt: skip
    notifications.clear()
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    [action, *_] = (await user.get(path))["instanceActions"]
    assert action["action"] == "revertResize"
    shown = (await user.admin.get(f"{path}/{action['request_id']}"))["instanceAction"]
    assert [(event["event"], event["result"], event["host"]) for event in reversed(shown["events"])] == [
        ("compute_revert_resize", "Success", destination),
        ("compute_finish_revert_resize", "Success", source),
    ]
    assert [event for event, _, _ in notifications] == ["resize_revert.start", "resize_revert.end"]
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    notifications.clear()
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    actions = (await user.get(path))["instanceActions"]
    assert [each["action"] for each in actions] == ["confirmResize", "migrate", "revertResize", "resize", "create"]
    assert [event for event, _, _ in notifications] == ["resize_confirm.start", "resize_confirm.end"]


@only_in_one_process("three members fill all hosts")
async def test_a_group_keeps_its_policy_while_a_member_moves(cloud: Cloud, user: Caller) -> None:
    """The place that a member leaves is kept for its revert, and is its own if it stays."""
    made = {"server_group": {"name": "apart", "policy": "anti-affinity"}}
    group = (await user.post("/os-server-groups", made, 200))["server_group"]["id"]
    ids = [(await user.boot(hints={"group": group}, flavorRef=SMALL))["id"] for _ in range(2)]
    await user.act(ids[0], "resize", {"flavorRef": MEDIUM})
    await user.wait_for(ids[0], "VERIFY_RESIZE")
    assert len({await user.host_of(id) for id in ids}) == 2
    third = await user.create(hints={"group": group})
    await user.wait_for(third, "ERROR")  # the third host is the one that the first may return to
    await user.act(ids[0], "revertResize")
    await user.wait_for(ids[0], "ACTIVE")
    await user.delete(f"/servers/{third}")
    await user.gone(third)
    fourth = (await user.boot(hints={"group": group}))["id"]
    assert len({await user.host_of(id) for id in (*ids, fourth)}) == 3
    await user.admin.act(ids[0], "migrate")
    await cloud.settled()
    assert (await user.show(ids[0]))["status"] == "ACTIVE", "no other host is free of members"
    await cloud.assert_clean()


async def test_an_affinity_group_of_one_can_move(cloud: Cloud, user: Caller) -> None:
    made = {"server_group": {"name": "together", "policy": "affinity"}}
    group = (await user.post("/os-server-groups", made, 200))["server_group"]["id"]
    id = (await user.boot(hints={"group": group}, flavorRef=SMALL))["id"]
    source = await user.host_of(id)
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) != source
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_server_stays_in_its_zone(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user)
    name = f"zone-{id[:8]}"
    zone = {"aggregate": {"name": name, "availability_zone": name}}
    aggregate = (await user.admin.post("/os-aggregates", zone, 200))["aggregate"]["id"]
    free = next(host for host in cloud.hosts if host != source)
    await user.admin.post(f"/os-aggregates/{aggregate}/action", {"add_host": {"host": free}}, 200)
    try:
        pinned = (await user.boot(availability_zone=name, flavorRef=SMALL))["id"]
        await user.admin.act(pinned, "migrate")
        await cloud.settled()
        assert await user.host_of(pinned) == free
        assert (await user.show(pinned))["status"] == "ACTIVE"
        await user.admin.act(id, "migrate", {"host": free})
        shown = await user.wait_for(id, "VERIFY_RESIZE")
        assert shown["OS-EXT-AZ:availability_zone"] == name
        await user.act(id, "revertResize")
        assert (await user.wait_for(id, "ACTIVE"))["OS-EXT-AZ:availability_zone"] == "nova"
        await user.delete(f"/servers/{pinned}")
        await user.gone(pinned)
    finally:
        await user.admin.post(f"/os-aggregates/{aggregate}/action", {"remove_host": {"host": free}}, 200)


@only_in_one_process("the API cannot disable a flavor: the test changes the database")
async def test_a_disabled_flavor_counts_as_none_for_new_servers_and_resizes(cloud: OneProcess, user: Caller) -> None:
    names = (f"own-{uuid.uuid4()}", f"other-{uuid.uuid4()}")
    own, other = [(await user.admin.post("/flavors", _flavor(name), 200))["flavor"]["id"] for name in names]
    id, _ = await _booted(user, flavorRef=own)
    assert cloud.process.database is not None
    disabled = flavors.update().where(flavors.c.flavorid.in_([own, other])).values(disabled=True)
    await cloud.process.database.write(lambda conn: conn.execute(disabled))
    missing = f"Flavor {other} could not be found."
    assert missing in await user.refused(400, "POST", "/servers", user.body(flavorRef=other))
    action = f"/servers/{id}/action"
    assert missing in await user.refused(400, "POST", action, {"resize": {"flavorRef": other}})
    same = await user.refused(400, "POST", action, {"resize": {"flavorRef": own}})
    assert "must change flavor" in same


def _flavor(name: str) -> dict[str, Any]:
    return {"flavor": {"name": name, "vcpus": 1, "ram": 256, "disk": 1}}
