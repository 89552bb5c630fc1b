"""Deferred deletion: a deleted server is kept, switched off, until it is restored or reclaimed."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.db.tables import instances
from micronova.rpc.bus import Bus
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, one_process, only_in_one_process
from tests.functional.servers.embedded_services import network, ports_of
from tests.functional.servers.killable_host import KillableHost
from tests.functional.servers.paused_bus import PausedBus

CLOUD = CloudOptions(hosts=2, roles=("network",), api={"default": {"reclaim_instance_interval": 3600.0}})


@pytest_asyncio.fixture(loop_scope="module")
async def owner(cloud: Cloud) -> AsyncIterator[Caller]:
    """A member of a new project; the servers that the test leaves are deleted for good."""
    caller = cloud.caller()
    yield caller
    await _delete_all(caller)


async def _delete_all(caller: Caller) -> None:
    for server in (await caller.admin.get("/servers?soft_deleted=true"))["servers"]:
        await caller.admin.act(server["id"], "forceDelete")
        await caller.gone(server["id"])


async def _soft_delete(owner: Caller, id: str) -> dict[str, Any]:
    await owner.delete(f"/servers/{id}")
    return await owner.wait_for(id, "SOFT_DELETED")


async def _quota(caller: Caller) -> tuple[int, int, int]:
    limits = (await caller.get("/limits"))["limits"]["absolute"]
    return limits["totalInstancesUsed"], limits["totalCoresUsed"], limits["totalRAMUsed"]


async def test_the_server_is_kept_and_can_be_restored(cloud: Cloud, owner: Caller) -> None:
    net = await network(owner)
    before = await owner.boot(networks=[{"uuid": net["id"]}], metadata={"a": "b"}, tags=["t"])
    id, home = before["id"], await owner.host_of(before["id"])
    used = await _quota(owner)
    shown = await _soft_delete(owner, id)
    assert (shown["OS-EXT-STS:vm_state"], shown["OS-EXT-STS:power_state"]) == ("soft-delete", 4)
    assert (await cloud.guests(home))[id].power_state == 4
    assert len(await ports_of(owner, id)) == 1
    assert await _quota(owner) == (0, 0, 0)
    await cloud.assert_clean()

    await owner.act(id, "restore")
    after = await owner.wait_for(id, "ACTIVE")
    kept = ("addresses", "metadata", "tags", "hostId", "image", "flavor", "created")
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert (await cloud.guests(home))[id].power_state == 1
    assert await _quota(owner) == used
    await cloud.assert_clean()


async def test_lists_leave_it_out(owner: Caller) -> None:
    kept, gone = (await owner.boot())["id"], (await owner.boot())["id"]
    await _soft_delete(owner, gone)

    async def listed(caller: Caller, query: str) -> set[str]:
        return {server["id"] for server in (await caller.get(f"/servers{query}"))["servers"]}

    assert await listed(owner, "") == {kept}
    assert await listed(owner, "?soft_deleted=true") == {kept}, "only for admins"
    assert await listed(owner, "?status=SOFT_DELETED") == set()
    assert await listed(owner, "?changes-since=2020-01-01T00:00:00Z") == {kept, gone}
    assert await listed(owner.at(66), "?changes-before=2100-01-01T00:00:00Z") == {kept, gone}
    assert await listed(owner.admin, "?deleted=true") == {gone}
    assert await listed(owner.admin, "?deleted=true&soft_deleted=false") == set()
    assert await listed(owner.admin, "?soft_deleted=true") == {kept, gone}
    assert await listed(owner.admin, "?soft_deleted=true&status=SOFT_DELETED") == {gone}
    assert await listed(owner.admin, "?deleted=true&status=SOFT_DELETED") == {gone}
    await owner.act(gone, "forceDelete")
    await owner.gone(gone)
    assert await listed(owner.admin, "?deleted=true") == {gone}
    assert await listed(owner.admin, "?deleted=true&soft_deleted=false") == {gone}


async def test_pages_of_both_kinds_of_deleted_servers(owner: Caller) -> None:
    ids = [(await owner.boot())["id"] for _ in range(4)]
    for id in ids:
        await _soft_delete(owner, id)
    for id in ids[::2]:
        await owner.act(id, "forceDelete")
        await owner.gone(id)
    found: list[str] = []
    while page := (await owner.admin.get("/servers?deleted=true&limit=1" + (f"&marker={found[-1]}" if found else "")))[
        "servers"
    ]:
        found += [server["id"] for server in page]
    assert found == ids[::-1]


async def test_what_a_soft_deleted_server_refuses(owner: Caller) -> None:
    id = (await owner.boot())["id"]
    await _soft_delete(owner, id)
    for action in ("os-start", "os-stop", "pause", "suspend"):
        assert "soft-delete" in await owner.refused(409, "POST", f"/servers/{id}/action", {action: None})
    assert "soft-delete" in await owner.refused(409, "PUT", f"/servers/{id}/metadata", {"metadata": {"a": "b"}})
    await owner.delete(f"/servers/{id}")  # it is deleted as asked
    assert (await owner.show(id))["status"] == "SOFT_DELETED"
    active = (await owner.boot())["id"]
    assert "active" in await owner.refused(409, "POST", f"/servers/{active}/action", {"restore": None})


async def test_force_delete(cloud: Cloud, owner: Caller) -> None:
    net = await network(owner)
    running, kept = [(await owner.boot(networks=[{"uuid": net["id"]}]))["id"] for _ in range(2)]
    await _soft_delete(owner, kept)
    for id in (running, kept):
        await owner.act(id, "forceDelete")
        await owner.gone(id)
        assert await ports_of(owner, id) == []
    assert await _quota(owner) == (0, 0, 0)
    await cloud.assert_clean()


async def test_what_cannot_be_kept_is_deleted(cloud: Cloud, owner: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "abort", "name": owner.project}):
        id = await owner.create(name=owner.project)
        await owner.wait_for(id, "ERROR")
    await owner.delete(f"/servers/{id}")
    await owner.gone(id)
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": owner.project}):
        id = await owner.create(name=owner.project)
        await owner.wait_for(id, "BUILD", task="spawning")
        await owner.delete(f"/servers/{id}")
        await owner.gone(id)
    await cloud.assert_clean()


async def test_a_server_in_error_can_be_restored(cloud: Cloud, owner: Caller) -> None:
    id = (await owner.boot())["id"]
    await owner.admin.act(id, "os-resetState", {"state": "error"})
    await _soft_delete(owner, id)
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")


@pytest.mark.parametrize("action", ["os-stop", "pause", "suspend"])
async def test_from_other_states(cloud: Cloud, owner: Caller, action: str) -> None:
    id = (await owner.boot())["id"]
    await owner.act(id, action)
    await owner.wait_for(id, "SHUTOFF", "PAUSED", "SUSPENDED")
    await _soft_delete(owner, id)
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_rescued_server_boots_from_its_own_disk(cloud: Cloud, owner: Caller) -> None:
    id = (await owner.boot())["id"]
    await owner.act(id, "rescue", None, 200)
    await owner.wait_for(id, "RESCUE")
    await _soft_delete(owner, id)
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_the_quota_limits_restores(cloud: Cloud, owner: Caller) -> None:
    id = (await owner.boot())["id"]
    await _soft_delete(owner, id)
    await owner.admin.put(f"/os-quota-sets/{owner.project}", {"quota_set": {"instances": 1}})
    other = (await owner.boot())["id"]
    assert "Quota exceeded" in await owner.refused(403, "POST", f"/servers/{id}/action", {"restore": None})
    assert (await owner.show(id))["status"] == "SOFT_DELETED"
    await _soft_delete(owner, other)
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")
    assert (await _quota(owner))[0] == 1
    await cloud.assert_clean()


async def test_a_restore_that_fails(cloud: Cloud, owner: Caller) -> None:
    id = (await owner.boot(name=owner.project))["id"]
    await _soft_delete(owner, id)
    async with cloud.faults({"operation": "power_on", "kind": "fail", "name": owner.project}):
        await owner.act(id, "restore")
        await owner.wait_for(id, "SOFT_DELETED")
    assert await _quota(owner) == (0, 0, 0)
    await cloud.assert_clean()
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")


async def test_a_soft_delete_is_repeated_until_the_guest_is_off(cloud: Cloud, owner: Caller) -> None:
    id = (await owner.boot(name=owner.project))["id"]
    async with cloud.faults({"operation": "power_off", "kind": "fail", "name": owner.project, "count": 2}):
        await _soft_delete(owner, id)
    await cloud.assert_clean()


async def test_reset_state_takes_it_back(cloud: Cloud, owner: Caller) -> None:
    id = (await owner.boot())["id"]
    used = await _quota(owner)
    await _soft_delete(owner, id)
    await owner.admin.act(id, "os-resetState", {"state": "active"})
    assert await _quota(owner) == used
    await cloud.assert_clean()


async def test_locks_and_groups(owner: Caller) -> None:
    group = {"name": "g", "policy": "affinity"}
    made = (await owner.post("/os-server-groups", {"server_group": group}, 200))["server_group"]["id"]
    id = (await owner.boot({"group": made}))["id"]
    await owner.act(id, "lock")
    await owner.refused(409, "DELETE", f"/servers/{id}")
    await owner.act(id, "unlock")
    await _soft_delete(owner, id)
    assert (await owner.get(f"/os-server-groups/{made}"))["server_group"]["members"] == []
    await owner.act(id, "lock")
    await owner.refused(409, "POST", f"/servers/{id}/action", {"restore": None})
    await owner.act(id, "unlock")
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")
    assert (await owner.get(f"/os-server-groups/{made}"))["server_group"]["members"] == [id]


async def test_actions(owner: Caller) -> None:
    id = (await owner.boot())["id"]
    await _soft_delete(owner, id)
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")
    found = []
    for action in (await owner.get(f"/servers/{id}/os-instance-actions"))["instanceActions"][:2]:
        shown = (await owner.get(f"/servers/{id}/os-instance-actions/{action['request_id']}"))["instanceAction"]
        found.append((shown["action"], [(event["event"], event["result"]) for event in shown["events"]]))
    assert found == [
        ("restore", [("compute_restore_instance", "Success")]),
        ("delete", [("compute_soft_delete_instance", "Success")]),
    ]


@only_in_one_process("watches the notifier of the cloud's process")
async def test_notifications(cloud: OneProcess, owner: Caller, notifications: list[tuple[str, Any, Any]]) -> None:
    id = (await owner.boot())["id"]
    await cloud.settled()
    notifications.clear()
    await _soft_delete(owner, id)
    await owner.act(id, "restore")
    await owner.wait_for(id, "ACTIVE")
    await cloud.settled()
    assert [(event, row["vm_state"], row["task_state"]) for event, row, _ in notifications] == [
        ("soft_delete.start", "active", "soft-deleting"),
        ("soft_delete.end", "soft-delete", None),
        ("restore.start", "soft-delete", "restoring"),
        ("restore.end", "active", None),
    ]
    assert [row["deleted_at"] is not None for _, row, _ in notifications] == [True, True, False, False]


@only_in_one_process("needs conductors that reclaim soon")
async def test_servers_are_reclaimed(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = CloudOptions(hosts=2, roles=("network",), settings={"default": {"reclaim_instance_interval": 2.0}})
    async with one_process(tmp_path_factory.mktemp("cloud"), options) as cloud:
        owner = cloud.caller()
        net = await network(owner)
        old, restored = [(await owner.boot(networks=[{"uuid": net["id"]}]))["id"] for _ in range(2)]
        for id in (old, restored):
            await _soft_delete(owner, id)
        await owner.act(restored, "restore")
        await owner.wait_for(restored, "ACTIVE")
        await owner.gone(old)
        assert await ports_of(owner, old) == []
        [action, *_] = (await owner.get(f"/servers/{old}/os-instance-actions"))["instanceActions"]
        assert (action["action"], action["user_id"], action["message"]) == ("delete", None, None)
        assert (await owner.show(restored))["status"] == "ACTIVE"
        await cloud.assert_clean()
        await owner.act(restored, "forceDelete")
        await owner.gone(restored)
        await cloud.assert_clean()


AWAY = {
    "default": {"report_interval": 0.1, "service_down_time": 1.0, "reclaim_instance_interval": 3600.0},
    "conductor": {"lease": 1.0, "sweep_interval": 0.1},
}


@only_in_one_process("stops the bus")
async def test_a_server_can_be_restored_that_was_deleted_during_an_outage(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    buses: list[PausedBus] = []

    def wrap(bus: Bus) -> Bus:
        buses[:] = [PausedBus(bus)]
        return buses[0]

    options = CloudOptions(hosts=2, settings=AWAY, wrap_bus=wrap)
    async with one_process(tmp_path_factory.mktemp("cloud"), options) as cloud:
        owner = cloud.caller()
        id = (await owner.boot())["id"]
        async with buses[0].outage(cloud, owner):
            await owner.delete(f"/servers/{id}")
        await owner.wait_for(id, "SOFT_DELETED")
        await owner.act(id, "restore")
        await owner.wait_for(id, "ACTIVE")
        await cloud.assert_clean()


@only_in_one_process("starts a host of its own")
@pytest.mark.parametrize("dies", [False, True])
async def test_a_soft_delete_waits_for_its_host(tmp_path_factory: pytest.TempPathFactory, dies: bool) -> None:
    """The agent is restarted, or the host is down: the server can be restored when it is back."""
    async with one_process(tmp_path_factory.mktemp("cloud"), CloudOptions(hosts=2, settings=AWAY)) as cloud:
        owner = cloud.caller()
        host = KillableHost(cloud, "away", tmp_path_factory.mktemp("host"))
        await host.start()
        kept, forced = [await owner.admin.create(host=host.name) for _ in range(2)]
        for id in (kept, forced):
            await owner.admin.wait_for(id, "ACTIVE")
        await (host.kill() if dies else host.stop())
        await host.wait_until_down()
        for id in (kept, forced):
            await owner.admin.delete(f"/servers/{id}")
            assert (await owner.admin.show(id))["OS-EXT-STS:task_state"] == "soft-deleting"
        await owner.admin.act(forced, "forceDelete")
        await owner.admin.gone(forced)
        await host.start()
        await host.guest_removed(forced)
        await owner.admin.wait_for(kept, "SOFT_DELETED")
        assert await host.has_guest(kept)
        await owner.admin.act(kept, "restore")
        await owner.admin.wait_for(kept, "ACTIVE")
        await owner.admin.act(kept, "forceDelete")
        await owner.admin.gone(kept)
        await cloud.assert_clean()
        await host.stop()


@only_in_one_process("starts a host of its own")
async def test_a_server_is_reclaimed_although_its_host_is_down(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {**AWAY, "default": {**AWAY["default"], "reclaim_instance_interval": 2.0}}
    async with one_process(tmp_path_factory.mktemp("cloud"), CloudOptions(hosts=2, settings=settings)) as cloud:
        owner = cloud.caller().admin
        host = KillableHost(cloud, "away", tmp_path_factory.mktemp("host"))
        await host.start()
        id = await owner.create(host=host.name)
        await owner.wait_for(id, "ACTIVE")
        await host.kill()
        await host.wait_until_down()
        await owner.delete(f"/servers/{id}")
        await owner.gone(id)
        await host.start()
        await host.guest_removed(id)
        assert list(await cloud.read(sa.select(instances.c.uuid))) == []
        await cloud.assert_clean()
        await host.stop()
