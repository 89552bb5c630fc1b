"""Pause, unpause, suspend and resume."""

import uuid

import pytest

from tests.functional.cloud import Caller, Cloud

PAIRS = [("pause", "PAUSED", "unpause", 3), ("suspend", "SUSPENDED", "resume", 7)]


def _name() -> str:
    return f"p{uuid.uuid4().hex[:10]}"


async def _power(cloud: Cloud, user: Caller, id: str) -> int:
    return int((await cloud.guests(await user.host_of(id)))[id].power_state)


@pytest.mark.parametrize(("there", "status", "back", "power"), PAIRS)
async def test_the_action_and_its_reverse(
    cloud: Cloud, user: Caller, there: str, status: str, back: str, power: int
) -> None:
    id = (await user.boot())["id"]
    boots = (await user.act(id, "os-getConsoleOutput", {}, 200))["output"].count("Linux version")
    await user.act(id, there)
    server = await user.wait_for(id, status)
    assert (server["OS-EXT-STS:vm_state"], server["OS-EXT-STS:power_state"]) == (status.lower(), power)
    assert await _power(cloud, user, id) == power
    assert "task_state" not in await user.refused(409, "POST", f"/servers/{id}/action", {there: None})
    await user.refused(409, "POST", f"/servers/{id}/action", {"os-start": None})
    await user.refused(409, "POST", f"/servers/{id}/action", {"reboot": {"type": "SOFT"}})
    await user.act(id, back)
    server = await user.wait_for(id, "ACTIVE")
    assert (server["OS-EXT-STS:vm_state"], server["OS-EXT-STS:power_state"]) == ("active", 1)
    log = (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    assert log.count("Linux version") == boots, "it goes on where it was"
    listed = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in listed] == [back, there, "create"]
    path = f"/servers/{id}/os-instance-actions/{listed[1]['request_id']}"
    [event] = (await user.admin.get(path))["instanceAction"]["events"]
    assert (event["event"], event["result"]) == (f"compute_{there}_instance", "Success")
    await cloud.assert_clean()


@pytest.mark.parametrize(("there", "status", "back", "power"), PAIRS)
async def test_a_hard_reboot_and_a_delete_work_in_this_state(
    cloud: Cloud, user: Caller, there: str, status: str, back: str, power: int
) -> None:
    id, doomed = await user.boot_many(2)
    for each in (id, doomed):
        await user.act(each, there)
        await user.wait_for(each, status)
    await user.act(id, "reboot", {"type": "HARD"})
    assert (await user.wait_for(id, "ACTIVE"))["OS-EXT-STS:power_state"] == 1
    await user.delete(f"/servers/{doomed}")
    await user.gone(doomed)
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("operation", "before", "after"),
    [("pause", "ACTIVE", "ACTIVE"), ("unpause", "PAUSED", "PAUSED"), ("suspend", "ACTIVE", "ERROR"),
     ("resume", "SUSPENDED", "ERROR")],
)  # fmt: skip
async def test_a_failure(cloud: Cloud, user: Caller, operation: str, before: str, after: str) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    if before != "ACTIVE":
        await user.act(id, "pause" if before == "PAUSED" else "suspend")
        await user.wait_for(id, before)
    async with cloud.faults({"operation": operation, "kind": "fail", "name": name, "message": "it is jammed"}):
        await user.act(id, operation)
        server = await user.wait_for(id, after)
    if after == "ERROR":
        assert server["fault"]["message"] == "it is jammed"
    [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (last["action"], last["message"]) == (operation, "Error")
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


@pytest.mark.parametrize(("operation", "task"), [("pause", "pausing"), ("suspend", "suspending")])
async def test_a_hard_reboot_interrupts(cloud: Cloud, user: Caller, operation: str, task: str) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": operation, "kind": "hang", "name": name}):
        await user.act(id, operation)
        await user.wait_for(id, "ACTIVE", task=task)
        await cloud.fault_struck()
        await user.refused(409, "POST", f"/servers/{id}/action", {"os-stop": None})
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
