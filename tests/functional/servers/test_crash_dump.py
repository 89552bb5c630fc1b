"""trigger_crash_dump: the guest gets a non-maskable interrupt."""

import uuid

from tests.functional.cloud import Caller, Cloud, CloudOptions

CLOUD = CloudOptions(hosts=2)
DUMP = {"trigger_crash_dump": None}
NMI = "NMI received"


async def _interrupts(user: Caller, id: str) -> int:
    return int((await user.act(id, "os-getConsoleOutput", {}, 200))["output"].count(NMI))


async def test_the_interrupt_arrives(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.act(id, "trigger_crash_dump")
    await user.wait_for(id, "ACTIVE")
    assert await _interrupts(user, id) == 1
    await user.act(id, "pause")
    await user.wait_for(id, "PAUSED")
    await user.act(id, "trigger_crash_dump")
    await user.wait_for(id, "PAUSED")
    assert await _interrupts(user, id) == 2
    listed = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in listed] == ["trigger_crash_dump", "pause", "trigger_crash_dump", "create"]
    path = f"/servers/{id}/os-instance-actions/{listed[0]['request_id']}"
    [event] = (await user.admin.get(path))["instanceAction"]["events"]
    assert (event["event"], event["result"]) == ("compute_trigger_crash_dump", "Success")
    await cloud.assert_clean()


async def test_a_guest_that_panics_puts_its_server_in_error(cloud: Cloud, user: Caller) -> None:
    name = f"d{uuid.uuid4().hex[:10]}"
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": "trigger_crash_dump", "kind": "crash", "name": name}):
        await user.act(id, "trigger_crash_dump")
        assert "panicked" in (await user.wait_for(id, "ERROR"))["fault"]["message"]
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    assert await _interrupts(user, id) == 0
    await cloud.assert_clean()


async def test_a_failure_leaves_the_server_as_it_is(cloud: Cloud, user: Caller) -> None:
    name = f"d{uuid.uuid4().hex[:10]}"
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": "trigger_crash_dump", "kind": "fail", "name": name}):
        await user.act(id, "trigger_crash_dump")
        await user.wait_for(id, "ACTIVE")
    [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (last["action"], last["message"]) == ("trigger_crash_dump", "Error")
    async with cloud.faults({"operation": "trigger_crash_dump", "kind": "hang", "name": name}):
        await user.act(id, "trigger_crash_dump")
        await user.wait_for(id, "ACTIVE", task="triggering_crash_dump")
        await user.act(id, "reboot", {"type": "HARD"})  # a guest that hangs is not kept from a reboot
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_requests(user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.at(16).refused(404, "POST", f"/servers/{id}/action", DUMP)
    await user.at(17).post(f"/servers/{id}/action", DUMP)
    await user.wait_for(id, "ACTIVE")
    wrong: tuple[object, ...] = ({}, "now", False)
    for value in wrong:
        await user.refused(400, "POST", f"/servers/{id}/action", {"trigger_crash_dump": value})
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    assert "vm_state stopped" in await user.refused(409, "POST", f"/servers/{id}/action", DUMP)
