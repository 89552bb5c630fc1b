"""Resizing a server on its own host: its disk grows, and a revert gives back the disk as it was."""

import asyncio
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.compute.manager import ComputeManager
from micronova.db.tables import migrations
from micronova.virt.fake.guests import FakeDisk
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

pytestmark = only_in_one_process("all hosts but one are disabled, and the disks of its guests are read")

CLOUD = CloudOptions(hosts=2, settings={"default": {"allow_resize_to_same_host": True, "max_concurrent_builds": 3}})
SMALL, MEDIUM = "2", "3"
HOST = "fake-1"


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def no_other_host(cloud: Cloud, user: Caller) -> None:
    """Disable all hosts but one."""
    for service in (await user.admin.get("/os-services?binary=nova-compute"))["services"]:
        if service["host"] != HOST:
            await user.admin.put(f"/os-services/{service['id']}", {"status": "disabled"})


def _driver(cloud: Cloud) -> Any:
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    return manager._agents[HOST].host.driver


def _disks(cloud: Cloud, id: str) -> tuple[FakeDisk, ...]:
    guest = _driver(cloud)._store.get(id)
    return tuple(guest.disks)


async def _statuses(cloud: Cloud, id: str) -> list[str]:
    rows = await cloud.read(sa.select(migrations).where(migrations.c.instance_uuid == id).order_by(migrations.c.id))
    return [row.status for row in rows]


async def test_the_disk_grows_and_a_revert_gives_the_old_one_back(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot(flavorRef=SMALL))["id"]
    host = await user.host_of(id)
    _driver(cloud).guest_writes(id, "old")
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) == host
    assert _disks(cloud, id) == (FakeDisk(name="root", size_gb=40, boots=2, text="old"),)
    await cloud.assert_clean()
    _driver(cloud).guest_writes(id, "new")
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert _disks(cloud, id) == (FakeDisk(name="root", size_gb=20, boots=2, text="old"),)
    guest = (await cloud.guests(host))[id]
    assert (guest.vcpus, guest.memory_mb) == (1, 2048)
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    _driver(cloud).guest_writes(id, "new")
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    assert _disks(cloud, id) == (FakeDisk(name="root", size_gb=40, boots=3, text="new"),)
    assert _driver(cloud)._store.get(id).previous is None
    assert await _statuses(cloud, id) == ["reverted", "confirmed"]
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["power_off", "resize", "power_on"])
async def test_a_resize_that_fails_is_undone(cloud: Cloud, user: Caller, call: str) -> None:
    name = f"fails-here-{call}"
    id = (await user.boot(flavorRef=SMALL, name=name))["id"]
    _driver(cloud).guest_writes(id, "old")
    async with cloud.faults({"operation": call, "kind": "fail", "name": name, "count": 1}):
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        await cloud.settled()
    await user.wait_for(id, "ACTIVE")
    [disk] = _disks(cloud, id)
    assert (disk.size_gb, disk.text) == (20, "old")
    assert await _statuses(cloud, id) == ["error"]
    await cloud.assert_clean()


async def test_a_resize_that_fails_early_does_not_restore_an_older_disk(cloud: Cloud, user: Caller) -> None:
    """What a resize has kept, and its confirmation could not remove, is not what the next one reverts to."""
    name = "keeps-too-much"
    id = (await user.boot(flavorRef=SMALL, name=name))["id"]
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")
    async with cloud.faults({"operation": "confirm_resize", "kind": "fail", "name": name}):
        await user.act(id, "confirmResize", status=204)
        await user.wait_for(id, "ERROR")
        assert await _statuses(cloud, id) == ["error"]
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ACTIVE")
        _driver(cloud).guest_writes(id, "new")
        await user.act(id, "resize", {"flavorRef": "4"})
        await cloud.settled()
        await user.wait_for(id, "ACTIVE")
        [disk] = _disks(cloud, id)
        assert (disk.size_gb, disk.text) == (40, "new")
    await cloud.assert_clean()


@pytest.mark.parametrize("how", ["delete", "reset"])
@pytest.mark.parametrize("call", ["resize", "revert_resize", "confirm_resize"])
async def test_a_resize_is_overtaken(cloud: Cloud, user: Caller, call: str, how: str) -> None:
    name = f"hangs-here-{call}-{how}"
    id = (await user.boot(flavorRef=SMALL, name=name))["id"]
    if call != "resize":
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        await user.wait_for(id, "VERIFY_RESIZE")
    async with cloud.faults({"operation": call, "kind": "hang", "name": name, "count": 1}):
        action = {"resize": "resize", "revert_resize": "revertResize", "confirm_resize": "confirmResize"}[call]
        value = {"flavorRef": MEDIUM} if call == "resize" else None
        await user.act(id, action, value, 204 if call == "confirm_resize" else 202)
        await cloud.fault_struck()
        if how == "delete":
            await user.delete(f"/servers/{id}")
            await user.gone(id)
        else:
            await user.admin.act(id, "os-resetState", {"state": "active"})
            await user.wait_for(id, "ACTIVE")
            await user.act(id, "reboot", {"type": "HARD"})
            await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_resizes_of_one_project_leave_room_for_builds_of_others(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resize copies disks, which may take very long."""
    ids = [(await user.boot(flavorRef=SMALL))["id"] for _ in range(3)]
    driver, begun, may_end = _driver(cloud), asyncio.Semaphore(0), asyncio.Event()
    resize = driver.resize

    async def copies_disks(*args: Any, **kwargs: Any) -> Any:
        begun.release()
        await may_end.wait()
        return await resize(*args, **kwargs)

    monkeypatch.setattr(driver, "resize", copies_disks)
    for id in ids:
        await user.act(id, "resize", {"flavorRef": MEDIUM})
    for _ in range(2):
        await asyncio.wait_for(begun.acquire(), 60)
    await cloud.caller().boot()
    may_end.set()
    for id in ids:
        await user.wait_for(id, "VERIFY_RESIZE")
