"""Live migration on simulated hosts: the guest goes on elsewhere, or stays where it is."""

from typing import Any

import pytest
import sqlalchemy as sa

from micronova.compute.manager import ComputeManager
from micronova.conductor.rpcapi import HostConductorAPI
from micronova.db.tables import migrations, operations
from micronova.objects import power_state
from micronova.servers.live_migrations import FORCE_COMPLETE
from micronova.virt.driver import DriverFailed
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import network, ports_of

CLOUD = CloudOptions(hosts=3, roles=("network",), settings={"default": {"report_interval": 0.1}})
pytestmark = only_in_one_process("reads the guests' disks, and has the network service in the same process")
LIVE = {"host": None, "block_migration": "auto"}


async def _booted(user: Caller, name: str = "live", **fields: Any) -> tuple[str, str]:
    id = (await user.boot(name=name, **fields))["id"]
    return id, await user.host_of(id)


async def _status(cloud: Cloud, id: str) -> str:
    rows = await cloud.read(sa.select(migrations).where(migrations.c.instance_uuid == id).order_by(migrations.c.id))
    return str(rows[-1].status)


async def _running(user: Caller, id: str) -> dict[str, Any]:
    """Wait until the live migration runs; return it as the API shows it."""

    async def probe() -> dict[str, Any] | None:
        found = (await user.admin.get(f"/servers/{id}/migrations"))["migrations"]
        return found[0] if found and found[0]["status"] == "running" else None

    return await user.cloud.until(probe, "the live migration to run")


async def _only_on(cloud: Cloud, id: str, *hosts: str) -> None:
    async def probe() -> bool | None:
        found = [host for host in cloud.hosts if id in await cloud.guests(host)]
        return True if sorted(found) == sorted(hosts) else None

    await cloud.until(probe, f"{id} to be on {hosts} only")


def _host(cloud: Cloud, host: str) -> Any:
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    return manager._agents[host].host


def _guest(cloud: Cloud, host: str, id: str) -> Any:
    return _host(cloud, host).driver._store.get(id)


@pytest.mark.parametrize("state", ["ACTIVE", "PAUSED"])
async def test_a_guest_goes_on_elsewhere(cloud: Cloud, user: Caller, state: str, notifications: Any) -> None:
    net = await network(user)
    id, source = await _booted(user, networks=[{"uuid": net["id"]}])
    if state == "PAUSED":
        await user.act(id, "pause")
        await user.wait_for(id, "PAUSED")
    before = _guest(cloud, source, id)
    boots, booted_at = before.boots, before.booted_at
    notifications.clear()
    await user.refused(403, "POST", f"/servers/{id}/action", {"os-migrateLive": LIVE})
    await user.admin.act(id, "os-migrateLive", LIVE)
    await user.wait_for(id, state)
    destination = await user.host_of(id)
    assert destination != source
    await _only_on(cloud, id, destination)
    after = _guest(cloud, destination, id)
    assert (after.boots, after.booted_at, after.power_state) == (boots, booted_at, 1 if state == "ACTIVE" else 3)
    assert {port["binding:host_id"] for port in await ports_of(user, id)} == {destination}
    assert await _status(cloud, id) == "completed"
    [action, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert action["action"] == "live-migration"
    assert [event for event, _, _ in notifications] == [
        "live_migration_pre.start", "live_migration_pre.end", "live_migration_post.start",
        "live_migration_post_dest.start", "live_migration_post_dest.end", "live_migration_post.end",
    ]  # fmt: skip
    assert [row["host"] for _, row, _ in notifications[-2:]] == [destination, destination]
    await cloud.assert_clean()


async def test_versions_and_refusals(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user)
    admin, path = user.admin, f"/servers/{id}/action"
    other, another = [host for host in cloud.hosts if host != source]
    for minor, body in (
        (24, {"host": None, "block_migration": True}),
        (24, {"host": None, "block_migration": "auto", "disk_over_commit": False}),
        (24, {"host": None, "block_migration": True, "disk_over_commit": "true"}),
        (25, {"host": None, "block_migration": True, "disk_over_commit": False}),
        (25, {"block_migration": "auto"}),
        (25, {"host": None}),
        (29, {"host": other, "block_migration": "auto", "force": True}),
        (67, {"host": None, "block_migration": "auto", "force": True}),
        (68, {"host": other, "block_migration": "auto", "force": True}),
        (104, {"host": "nowhere", "block_migration": "auto"}),
        (104, {"host": None, "block_migration": False}),
    ):
        await admin.at(minor).refused(400, "POST", path, {"os-migrateLive": body})
    await admin.at(1).act(id, "os-migrateLive", {"host": other, "block_migration": True, "disk_over_commit": False})
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == other
    await admin.at(30).act(id, "os-migrateLive", {"host": another, "block_migration": "auto", "force": True})
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == another
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await admin.refused(409, "POST", path, {"os-migrateLive": LIVE})
    await cloud.assert_clean()


async def test_a_host_sends_its_guests_one_after_the_other(cloud: Cloud, user: Caller) -> None:
    """default.max_concurrent_live_migrations is 1: the others wait, and can be aborted."""
    admin, source = user.admin, cloud.hosts[0]
    first, aborted, last = [
        (await _booted(admin, f"drained-{name}", availability_zone=f"nova:{source}"))[0] for name in "abc"
    ]

    async def shown(id: str, status: str) -> int:
        async def probe() -> int | None:
            found = (await admin.get(f"/servers/{id}/migrations"))["migrations"]
            return int(found[0]["id"]) if found and found[0]["status"] == status else None

        return await cloud.until(probe, f"the migration to be {status}")

    async with cloud.faults({"operation": "live_migrate", "kind": "hang", "name": "drained-a", "count": 1}):
        await admin.act(first, "os-migrateLive", LIVE)
        await cloud.fault_struck()
        running = await shown(first, "running")
        for id in (aborted, last):
            await admin.act(id, "os-migrateLive", LIVE)
        queued, waiting = [await shown(id, "queued") for id in (aborted, last)]
        path = f"/servers/{last}/migrations/{waiting}/action"
        await admin.refused(400, "POST", path, {"force_complete": None})
        await admin.delete(f"/servers/{aborted}/migrations/{queued}", 202)
        await admin.wait_for(aborted, "ACTIVE")
        assert await _status(cloud, last) == "queued"
        await admin.delete(f"/servers/{first}/migrations/{running}", 202)
        await admin.wait_for(last, "ACTIVE")
    assert [await _status(cloud, id) for id in (first, aborted, last)] == ["cancelled", "cancelled", "completed"]
    assert [await user.host_of(id) == source for id in (first, aborted, last)] == [True, True, False]
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["check_live_migration", "live_migrate", "receive_live_guest"])
async def test_a_migration_that_fails_leaves_the_guest_where_it_is(cloud: Cloud, user: Caller, call: str) -> None:
    net = await network(user)
    id, source = await _booted(user, f"fails-{call}", networks=[{"uuid": net["id"]}])
    async with cloud.faults({"operation": call, "kind": "fail", "name": f"fails-{call}"}):
        await user.admin.act(id, "os-migrateLive", LIVE)
        await cloud.settled()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source
    await _only_on(cloud, id, source)
    guest = _guest(cloud, source, id)
    assert (guest.power_state, guest.sent, guest.boots) == (1, None, 1)
    assert {port["binding:host_id"] for port in await ports_of(user, id)} == {source}
    assert await _status(cloud, id) == ("error" if call == "check_live_migration" else "failed")
    await cloud.assert_clean()


async def test_a_guest_that_cannot_continue_puts_its_server_in_error(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user, "stuck")
    rules = [{"operation": call, "name": "stuck"} for call in ("receive_live_guest", "rollback_live_migration")]
    async with cloud.faults(*rules):
        await user.admin.act(id, "os-migrateLive", LIVE)
        await user.wait_for(id, "ERROR")
    assert await user.host_of(id) == source
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_migration_is_aborted(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user, "aborted")
    async with cloud.faults({"operation": "live_migrate", "kind": "hang", "name": "aborted", "count": 1}):
        await user.admin.act(id, "os-migrateLive", LIVE)
        running = await _running(user, id)
        shown = (await user.admin.get(f"/servers/{id}/migrations/{running['id']}"))["migration"]
        assert (shown["source_compute"], shown["server_uuid"]) == (source, id)
        assert (await user.show(id))["status"] == "MIGRATING"
        path = f"/servers/{id}/migrations/{running['id']}"
        await user.refused(403, "DELETE", path)
        await user.admin.refused(404, "DELETE", f"/servers/{id}/migrations/999999")
        await user.admin.at(24).delete(path, 202)
        await user.wait_for(id, "ACTIVE")
    assert await _status(cloud, id) == "cancelled"
    assert await user.host_of(id) == source
    await user.act(id, "reboot", {"type": "SOFT"})
    await user.wait_for(id, "ACTIVE")
    assert _guest(cloud, source, id).sent is None
    await user.admin.refused(409, "DELETE", path)
    [_, action, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert action["action"] == "live_migration_cancel"
    await cloud.assert_clean()


async def test_a_migration_that_is_being_undone_cannot_be_aborted(cloud: Cloud, user: Caller) -> None:
    """The guest would stay paused on its source."""
    id, source = await _booted(user, "undone")
    fails = {"operation": "live_migrate", "kind": "fail", "name": "undone"}
    slow = {"operation": "rollback_live_migration", "kind": "delay", "name": "undone", "delay": 1.0}
    async with cloud.faults(fails, slow):
        await user.admin.act(id, "os-migrateLive", LIVE)

        async def undone() -> int | None:
            [row] = await cloud.read(sa.select(migrations).where(migrations.c.instance_uuid == id))
            found = await cloud.read(sa.select(operations).where(operations.c.instance_uuid == id))
            return row.id if any(each.step == "undo" for each in found) else None

        number = await cloud.until(undone, "the migration to be undone")
        said = await user.admin.refused(400, "DELETE", f"/servers/{id}/migrations/{number}")
        assert "is being undone" in said
    await user.wait_for(id, "ACTIVE")
    assert _guest(cloud, source, id).power_state == power_state.RUNNING
    await cloud.assert_clean()


async def _fails(*_: Any) -> None:
    raise DriverFailed("The hypervisor failed.")


async def test_the_end_of_a_migration_is_forced(cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    id, source = await _booted(user, "forced")
    async with cloud.faults({"operation": "live_migrate", "kind": "hang", "name": "forced", "count": 1}):
        await user.admin.act(id, "os-migrateLive", LIVE)
        await cloud.fault_struck()
        running = await _running(user, id)
        path = f"/servers/{id}/migrations/{running['id']}/action"
        await user.admin.refused(400, "POST", path, {"force_complete": {}})
        await user.admin.refused(400, "POST", f"/servers/{id}/migrations/999999/action", {"force_complete": None})
        with monkeypatch.context() as patch:
            [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
            patch.setattr(manager._agents[source].host.driver, "force_complete_live_migration", _fails)
            said = await user.admin.refused(500, "POST", path, {"force_complete": None})
            assert "The hypervisor failed" in said
        actions = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        assert [each["message"] for each in actions if each["action"] == FORCE_COMPLETE] == ["Error"]
        await user.admin.post(path, {"force_complete": None})
        await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) != source
    assert await _status(cloud, id) == "completed"
    await user.admin.refused(409, "POST", path, {"force_complete": None})
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["check_live_migration", "live_migrate", "receive_live_guest"])
@pytest.mark.parametrize("how", ["delete", "reset"])
async def test_a_migration_is_overtaken(cloud: Cloud, user: Caller, call: str, how: str) -> None:
    name = f"hangs-{call}-{how}"
    id, source = await _booted(user, name)
    async with cloud.faults({"operation": call, "kind": "hang", "name": name, "count": 1}):
        await user.admin.act(id, "os-migrateLive", LIVE)
        await cloud.fault_struck()
        if how == "delete":
            await user.delete(f"/servers/{id}")
            await user.gone(id)
            await _only_on(cloud, id)
        else:
            await user.admin.act(id, "os-resetState", {"state": "active"})
            await _only_on(cloud, id, source)
            await user.wait_for(id, "ACTIVE")
            await user.act(id, "reboot", {"type": "HARD"})
            await user.wait_for(id, "ACTIVE")
            assert await user.host_of(id) == source
    await cloud.assert_clean()


async def test_a_guest_that_was_sent_does_not_go_on_if_the_answer_to_its_report_is_lost(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source repeats its report. The guest must not run on two hosts."""
    id, source = await _booted(user, "sent")
    report = HostConductorAPI.report

    async def first_answer_is_lost(self: HostConductorAPI, *args: Any) -> Any:
        await report(self, *args)
        return await report(self, *args)

    async def reported() -> bool | None:
        return None if _host(cloud, source).work_registry.of_instance(id) else True

    monkeypatch.setattr(HostConductorAPI, "report", first_answer_is_lost)
    async with cloud.faults({"operation": "receive_live_guest", "kind": "hang", "name": "sent"}):
        await user.admin.act(id, "os-migrateLive", LIVE)
        await cloud.fault_struck()
        await cloud.until(reported, "the source to have reported")
        assert _guest(cloud, source, id).power_state == power_state.PAUSED
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()
