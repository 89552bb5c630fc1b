"""Rescue and unrescue."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.tables import operations
from micronova.virt.driver import GuestPlan
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import ON_CLUSTER, Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image
from tests.functional.servers.killable_host import KillableHost

CLOUD = CloudOptions(hosts=2, roles=("image",))
STABLE: dict[str, Any] = {"hw_rescue_device": "disk", "hw_rescue_bus": "virtio"}


@pytest.fixture
def rescued(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GuestPlan]]:
    """The plans with which hosts were asked to rescue guests."""
    if ON_CLUSTER:
        pytest.skip("reads the plans of guests in the process of their hosts")
    plans: list[GuestPlan] = []
    rescue = FakeDriver.rescue

    async def noted(driver: FakeDriver, plan: GuestPlan, timeout: float, **more: Any) -> None:
        plans.append(plan)
        await rescue(driver, plan, timeout, **more)

    monkeypatch.setattr(FakeDriver, "rescue", noted)
    yield plans


async def _boot(user: Caller, **fields: Any) -> dict[str, Any]:
    return await user.boot(imageRef=await image(user, name="own"), **fields)


async def _log(user: Caller, id: str) -> str:
    return str((await user.act(id, "os-getConsoleOutput", {}, 200))["output"])


async def _disks(user: Caller, id: str) -> list[str]:
    """Return the disks that the last boot has found."""
    last = (await _log(user, id)).rpartition("Linux version")[2]
    return [line.partition("virtio_blk ")[2] for line in last.splitlines() if "virtio_blk" in line]


async def _rescue(user: Caller, id: str, **fields: Any) -> str:
    answer = await user.act(id, "rescue", fields or None, 200)
    await user.wait_for(id, "RESCUE")
    return str(answer["adminPass"])


async def test_a_rescue_and_its_reverse(cloud: Cloud, user: Caller) -> None:
    booted = await _boot(user)
    id = booted["id"]
    [own] = await _disks(user, id)
    password = await _rescue(user, id)
    assert len(password) == 12
    server = await user.show(id)
    assert (server["OS-EXT-STS:vm_state"], server["OS-EXT-STS:power_state"]) == ("rescued", 1)
    assert server["OS-SRV-USG:launched_at"] > booted["OS-SRV-USG:launched_at"]
    assert "fault" not in server and "adminPass" not in server
    first, second = await _disks(user, id)
    assert first == "vda: image own" and second == own.replace("vda", "vdb")
    await user.act(id, "unrescue")
    assert (await user.wait_for(id, "ACTIVE"))["OS-EXT-STS:power_state"] == 1
    assert await _disks(user, id) == [own]
    listed = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in listed] == ["unrescue", "rescue", "create"]
    for action in listed[:2]:
        path = f"/servers/{id}/os-instance-actions/{action['request_id']}"
        [event] = (await user.admin.get(path))["instanceAction"]["events"]
        assert (event["event"], event["result"]) == (f"compute_{action['action']}_instance", "Success")
    await cloud.assert_clean()


async def test_the_image_and_the_password_of_the_request(cloud: Cloud, user: Caller, rescued: list[GuestPlan]) -> None:
    id = (await _boot(user))["id"]
    other = await image(user, name="tools", **STABLE)
    assert await _rescue(user, id, rescue_image_ref=other, adminPass="first-aid") == "first-aid"
    [plan] = rescued
    assert plan.rescue_image is not None and plan.rescue_image.id == other
    assert plan.rescue_image.properties.items() >= STABLE.items()
    assert plan.instance.image is not None and plan.instance.image.id != other
    assert plan.admin_password == "first-aid"
    assert plan.image_url is not None
    path = "/image" + plan.image_url.partition("/image")[2]
    answer = await cloud.transport.request("GET", path, {}, None)
    assert (answer.status, len(answer.body)) == (200, 1024)
    assert (await _disks(user, id))[0] == "vda: image tools"
    query = sa.select(operations).where(operations.c.instance_uuid == id, operations.c.kind == "rescue")
    [row] = await cloud.read(query)
    assert row.secrets is None and b"first-aid" not in row.payload + row.context


async def test_images_that_cannot_be_used(cloud: Cloud, user: Caller) -> None:
    id = (await _boot(user))["id"]
    foreign = await image(cloud.caller(), visibility="private")
    for picture, words in (
        (str(uuid.uuid4()), "could not be found"),
        (foreign, "could not be found"),
        (await image(user, upload=False), "it is queued, not active"),
        (await image(user, block_device_mapping='[{"source_type": "snapshot"}]'), "snapshot of volumes"),
        (await image(user, hw_rescue_device="fs"), "hw_rescue_device is fs"),
        (await image(user, hw_rescue_bus="carrier-pigeon"), "hw_rescue_bus"),
        (await image(user, min_ram=4096), "4096 MB of memory"),
        (await image(user, min_disk=20), "larger than the flavor's disk"),
    ):
        body = {"rescue": {"rescue_image_ref": picture}}
        assert words in await user.refused(400, "POST", f"/servers/{id}/action", body), words
    wrong_one = (await user.boot(imageRef=await image(user, hw_rescue_device="fs")))["id"]
    message = await user.refused(400, "POST", f"/servers/{wrong_one}/action", {"rescue": None})
    assert "hw_rescue_device is fs" in message, "its own image is no better"
    for wrong in ({"rescue_image_ref": "tools"}, {"adminPass": 7}, {"unknown": 1}, "text"):
        await user.refused(400, "POST", f"/servers/{id}/action", {"rescue": wrong})
    assert (await user.show(id))["status"] == "ACTIVE"


async def test_a_rescue_disk_as_a_lun(cloud: Cloud, user: Caller) -> None:
    picture = await image(user, hw_rescue_device="lun")
    id = (await _boot(user))["id"]
    await user.act(id, "rescue", {"rescue_image_ref": picture}, 200)
    await user.wait_for(id, "RESCUE")
    await user.act(id, "unrescue")
    await user.wait_for(id, "ACTIVE")


@only_in_one_process("changes what its host can do")
async def test_a_rescue_disk_as_a_lun_on_a_host_that_has_none(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    able = FakeDriver.capabilities
    monkeypatch.setattr(FakeDriver, "capabilities", lambda driver: able(driver) - {"rescue_lun"})
    host = KillableHost(cloud, "without-luns", tmp_path)
    await host.start()
    try:
        body = {"rescue": {"rescue_image_ref": await image(user, hw_rescue_device="lun")}}
        id = (await user.admin.boot(availability_zone="nova:without-luns", imageRef=await image(user)))["id"]
        assert "cannot be LUNs" in await user.refused(400, "POST", f"/servers/{id}/action", body)
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    finally:
        await host.stop()


async def test_a_server_that_is_stopped_or_has_failed(cloud: Cloud, user: Caller) -> None:
    id = (await _boot(user))["id"]
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await _rescue(user, id)
    await user.act(id, "unrescue")
    await user.wait_for(id, "ACTIVE")
    await user.admin.act(id, "os-resetState", {"state": "error"})
    await _rescue(user, id)
    # An admin calls it active: a hard reboot boots it from its own disk.
    await user.admin.act(id, "os-resetState", {"state": "active"})
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    assert len(await _disks(user, id)) == 1
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("operation", "leads_out"), [("rescue", "reboot"), ("rescue", "rescue"), ("unrescue", "reboot")]
)
async def test_a_failure(cloud: Cloud, user: Caller, operation: str, leads_out: str) -> None:
    name = f"r{uuid.uuid4().hex[:10]}"
    id = (await _boot(user, name=name))["id"]
    if operation == "unrescue":
        await _rescue(user, id)
    async with cloud.faults({"operation": operation, "kind": "fail", "name": name, "message": "it is jammed"}):
        await user.act(id, operation, None, 200 if operation == "rescue" else 202)
        assert (await user.wait_for(id, "ERROR"))["fault"]["message"] == "it is jammed"
    await user.refused(409, "POST", f"/servers/{id}/action", {"unrescue": None})
    [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (last["action"], last["message"]) == (operation, "Error")
    if leads_out == "rescue":
        await _rescue(user, id)
        await user.act(id, "unrescue")
    else:
        await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    assert len(await _disks(user, id)) == 1
    await cloud.assert_clean()


async def test_a_host_that_lacks_something_tries_again(cloud: Cloud, user: Caller) -> None:
    name = f"r{uuid.uuid4().hex[:10]}"
    id = (await _boot(user, name=name))["id"]
    async with cloud.faults(
        {"operation": "rescue", "kind": "unavailable", "name": name, "count": 1},
        {"operation": "unrescue", "kind": "unavailable", "name": name, "count": 1},
    ):
        await _rescue(user, id)
        await user.act(id, "unrescue")
        await user.wait_for(id, "ACTIVE")


async def test_what_a_rescued_server_does_not_do(cloud: Cloud, user: Caller) -> None:
    id = (await _boot(user))["id"]
    await _rescue(user, id)
    for body in (
        {"os-start": None}, {"os-stop": None}, {"reboot": {"type": "SOFT"}}, {"reboot": {"type": "HARD"}},
        {"pause": None}, {"suspend": None}, {"rescue": None}, {"changePassword": {"adminPass": "x"}},
    ):  # fmt: skip
        message = await user.refused(409, "POST", f"/servers/{id}/action", body)
        assert "vm_state rescued" in message
    listed = (await user.get("/servers?status=RESCUE"))["servers"]
    assert [server["id"] for server in listed] == [id]
    await user.act(id, "lock")
    await user.refused(409, "POST", f"/servers/{id}/action", {"unrescue": None})
    await user.act(id, "unlock")
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


async def test_a_locked_server_is_not_rescued(cloud: Cloud, user: Caller) -> None:
    id = (await _boot(user))["id"]
    await user.act(id, "lock")
    assert "locked" in await user.refused(409, "POST", f"/servers/{id}/action", {"rescue": None})
    await user.admin.act(id, "rescue", None, 200)
    await user.wait_for(id, "RESCUE")
    await user.act(id, "unlock")


async def test_a_guest_that_stops_stays_rescued(cloud: Cloud, user: Caller) -> None:
    """As in Nova, only the power state changes."""
    name = f"r{uuid.uuid4().hex[:10]}"
    id = (await _boot(user, name=name))["id"]
    async with cloud.faults({"operation": "rescue", "kind": "crash", "name": name}):
        await user.act(id, "rescue", None, 200)

        async def crashed() -> dict[str, Any] | None:
            server = await user.show(id)
            return server if (server["status"], server["OS-EXT-STS:power_state"]) == ("RESCUE", 6) else None

        await cloud.until(crashed, "the guest to panic")
    await user.act(id, "unrescue")
    await user.wait_for(id, "ACTIVE")


@only_in_one_process("watches the notifier of the cloud's process")
async def test_notifications_name_the_image(cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    id = (await _boot(user))["id"]
    tools = await image(user, name="tools")
    sent: list[tuple[str, str, Any]] = []

    def note(event: str, row: Any, *, context: Any, fault: Any = None, details: Any = None, sender: Any = None) -> None:
        if row["uuid"] == id:
            sent.append((event, row["vm_state"], dict(details or {})))

    monkeypatch.setattr(cloud.process.notifier, "instance", note)
    await _rescue(user, id, rescue_image_ref=tools)
    await user.act(id, "trigger_crash_dump")
    await cloud.settled()
    await user.act(id, "unrescue")
    await user.wait_for(id, "ACTIVE")

    async def all_sent() -> bool | None:
        return True if len(sent) == 6 else None

    await cloud.until(all_sent, lambda: f"six notifications: {sent}")
    named = {"rescue_image_ref": tools, "rescue_image_name": "tools"}
    assert sent == [
        ("rescue.start", "active", named), ("rescue.end", "rescued", named),
        ("trigger_crash_dump.start", "rescued", {}), ("trigger_crash_dump.end", "rescued", {}),
        ("unrescue.start", "rescued", {}), ("unrescue.end", "active", {}),
    ]  # fmt: skip
