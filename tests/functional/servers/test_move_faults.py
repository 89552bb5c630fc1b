"""Moves that fail, are overtaken by other requests, or lose a host: the server is where it was, and nothing is left."""

from typing import Any

import pytest
import sqlalchemy as sa

from micronova.compute import host
from micronova.compute.manager import ComputeManager
from micronova.db.tables import departures, migrations, operations
from micronova.objects import power_state
from micronova.virt.fake.guests import FakeGuest
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

CLOUD = CloudOptions(hosts=3, settings={"default": {"allow_resize_to_same_host": False}})
SMALL, MEDIUM = "2", "3"


async def _booted(user: Caller, name: str) -> tuple[str, str]:
    id = (await user.boot(flavorRef=SMALL, name=name))["id"]
    return id, await user.host_of(id)


async def _statuses(cloud: Cloud, id: str) -> list[str]:
    rows = await cloud.read(sa.select(migrations).where(migrations.c.instance_uuid == id).order_by(migrations.c.id))
    return [row.status for row in rows]


async def _only_on(cloud: Cloud, id: str, *hosts: str) -> None:
    """Wait until exactly these hosts have a guest of the server."""

    async def probe() -> bool | None:
        found = [host for host in cloud.hosts if id in await cloud.guests(host)]
        return True if sorted(found) == sorted(hosts) else None

    await cloud.until(probe, f"{id} to be on {hosts} only")


@pytest.mark.parametrize("call", ["power_off", "export_disks", "import_guest", "power_on"])
async def test_a_move_that_fails_is_undone(cloud: Cloud, user: Caller, call: str) -> None:
    id, source = await _booted(user, f"fails-{call}")
    rule = {"operation": call, "kind": "fail", "name": f"fails-{call}", "count": 1, "message": "No way."}
    if call == "power_on":
        rule["host"] = f"^(?!{source}$)"  # where the guest arrives; each process of hosts counts for itself
    async with cloud.faults(rule):
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        await cloud.settled()
    shown = await user.wait_for(id, "ACTIVE")
    assert shown["flavor"]["original_name"] == "m1.small"
    assert await user.host_of(id) == source
    await _only_on(cloud, id, source)
    assert (await cloud.guests(source))[id].power_state == 1
    assert await _statuses(cloud, id) == ["error"]
    [action, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (action["action"], action["message"]) == ("resize", "Error")
    await cloud.assert_clean()
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_guest_that_cannot_return_puts_its_server_in_error(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user, "does-not-start")
    async with cloud.faults({"operation": "power_on", "kind": "fail", "name": "does-not-start", "message": "No way."}):
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        shown = await user.wait_for(id, "ERROR")
    assert "No way." in shown["fault"]["message"]
    assert await user.host_of(id) == source
    await _only_on(cloud, id, source)
    await cloud.assert_clean()
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")


@only_in_one_process("puts guests of another cloud on the hypervisors")
@pytest.mark.parametrize("full", [1, 2])
async def test_the_next_host_is_tried(cloud: Cloud, user: Caller, full: int) -> None:
    """A destination that has no room after all, which only its hypervisor knows, is not the last one."""
    id, source = await _booted(user, f"moves-on-{full}")
    others = [agent for name, agent in _agents(cloud).items() if name != source]
    try:
        for agent in others[:full]:
            agent.host.driver._store.put(FakeGuest(uuid="x", cloud="another", node="", epoch=1, memory_mb=1 << 30))
            await agent.host.update_available_resource()
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        await cloud.settled()
        free = [agent.host.name for agent in others[full:]]
        if free:
            await user.wait_for(id, "VERIFY_RESIZE")
            assert await user.host_of(id) in free
        else:
            await user.wait_for(id, "ACTIVE")
            assert await user.host_of(id) == source
            assert await _statuses(cloud, id) == ["error"]
    finally:
        for agent in others:
            agent.host.driver._store.remove("x")
            await agent.host.update_available_resource()
    await cloud.assert_clean()


def _agents(cloud: Cloud) -> dict[str, Any]:
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    return dict(manager._agents)


@pytest.mark.parametrize("call", ["power_off", "export_disks", "import_guest", "power_on"])
@pytest.mark.parametrize("how", ["delete", "reset"])
async def test_a_move_is_overtaken(cloud: Cloud, user: Caller, call: str, how: str) -> None:
    name = f"hangs-{call}-{how}"
    id, source = await _booted(user, name)
    # Each process of hosts counts for itself, and undoing the move calls the source, too.
    arrives = call in ("import_guest", "power_on")
    hosts = [host for host in cloud.hosts if (host != source) == arrives]
    rule = {"operation": call, "kind": "hang", "name": name, "host": "|".join(hosts), "count": 1}
    async with cloud.faults(rule):
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        await cloud.fault_struck()
        if how == "delete":
            await user.delete(f"/servers/{id}")
            await user.gone(id)
            await _only_on(cloud, id)
            assert await _statuses(cloud, id) == ["failed"]
        else:
            await user.admin.act(id, "os-resetState", {"state": "active"})
            await user.wait_for(id, "ACTIVE", "SHUTOFF")
            assert await user.host_of(id) == source
            await _only_on(cloud, id, source)
            assert await _statuses(cloud, id) == ["error"]
    await cloud.assert_clean()


@pytest.mark.parametrize("how", ["delete", "reset"])
async def test_a_resized_server_is_overtaken(cloud: Cloud, user: Caller, how: str) -> None:
    id, _ = await _booted(user, f"resized-{how}")
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    destination = await user.host_of(id)
    if how == "delete":
        await user.delete(f"/servers/{id}")
        await user.gone(id)
        await _only_on(cloud, id)
    else:
        await user.admin.act(id, "os-resetState", {"state": "active"})
        assert await user.host_of(id) == destination
        await _only_on(cloud, id, destination)
    assert await _statuses(cloud, id) == ["confirmed"]
    await cloud.assert_clean()


@pytest.mark.parametrize("end", ["confirmResize", "revertResize"])
@pytest.mark.parametrize("how", ["delete", "reset"])
async def test_the_end_of_a_resize_is_overtaken(cloud: Cloud, user: Caller, end: str, how: str) -> None:
    name = f"hangs-{end}-{how}"
    id, source = await _booted(user, name)
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    left = source if end == "confirmResize" else await user.host_of(id)
    async with cloud.faults({"operation": "destroy", "kind": "hang", "name": name, "host": f"^{left}$", "count": 1}):
        await user.act(id, end, status=204 if end == "confirmResize" else 202)
        await cloud.fault_struck()
        place = await user.host_of(id)
        if how == "delete":
            await user.delete(f"/servers/{id}")
            await user.gone(id)
            await _only_on(cloud, id)
        else:
            await user.admin.act(id, "os-resetState", {"state": "active"})
            assert await user.host_of(id) == place
            await _only_on(cloud, id, place)
    await cloud.assert_clean()


@pytest.mark.parametrize("kind", ["fail", "unavailable"])
async def test_no_confirmation_waits_for_the_place_that_is_left(
    cloud: Cloud, user: Caller, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that fails to remove its guest, or lacks something for the moment, removes it later."""
    monkeypatch.setattr(host, "FIRST_PAUSE", 0.05)
    name = f"sticks-{kind}"
    id, _ = await _booted(user, name)
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    async with cloud.faults({"operation": "destroy", "kind": kind, "name": name}):
        await user.act(id, "confirmResize", status=204)
        await user.wait_for(id, "ACTIVE")
    await _only_on(cloud, id, await user.host_of(id))
    await cloud.assert_clean()


async def test_a_revert_waits_for_the_guest_on_its_destination(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination cannot remove its guest, which runs: the source does not start its own before."""
    monkeypatch.setattr(host, "FIRST_PAUSE", 0.05)
    id, source = await _booted(user, "both")
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    removal = sa.select(departures).where(departures.c.instance_uuid == id)
    bound = sa.select(operations.c.leases).where(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))

    async def tried() -> bool | None:
        [found, *_] = [*(await cloud.read(bound)), None]
        return True if list(await cloud.read(removal)) and found is not None and found.leases > 2 else None

    async with cloud.faults({"operation": "destroy", "kind": "fail", "name": "both"}):
        await user.act(id, "revertResize")
        await cloud.until(tried, "the revert to wait")
        assert (await cloud.guests(source))[id].power_state == power_state.SHUTDOWN
        assert (await user.show(id))["status"] == "REVERT_RESIZE"
    await user.wait_for(id, "ACTIVE")
    await _only_on(cloud, id, source)
    await cloud.assert_clean()


async def test_a_revert_that_fails_leaves_the_server_on_its_source(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user, "no-way-back")
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    async with cloud.faults({"operation": "power_on", "kind": "fail", "name": "no-way-back"}):
        await user.act(id, "revertResize")
        shown = await user.wait_for(id, "ERROR")
    assert shown["flavor"]["original_name"] == "m1.small"
    assert await user.host_of(id) == source
    assert await _statuses(cloud, id) == ["error"]
    await cloud.assert_clean()
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
