"""Start, stop and reboot."""

import uuid
from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud


def _name() -> str:
    return f"p{uuid.uuid4().hex[:10]}"


async def _guest(cloud: Cloud, user: Caller, id: str) -> Any:
    return (await cloud.guests(await user.host_of(id)))[id]


async def test_stop_and_start(cloud: Cloud, user: Caller) -> None:
    server = await user.boot()
    id = server["id"]
    await user.act(id, "os-stop")
    stopped = await user.wait_for(id, "SHUTOFF")
    assert (stopped["OS-EXT-STS:vm_state"], stopped["OS-EXT-STS:power_state"]) == ("stopped", 4)
    assert "progress" not in stopped
    assert (await _guest(cloud, user, id)).power_state == 4
    await user.act(id, "os-start")
    started = await user.wait_for(id, "ACTIVE")
    assert (started["OS-EXT-STS:vm_state"], started["OS-EXT-STS:power_state"]) == ("active", 1)
    assert started["OS-SRV-USG:launched_at"] == server["OS-SRV-USG:launched_at"]
    assert (await _guest(cloud, user, id)).power_state == 1
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in actions] == ["start", "stop", "create"]
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("kind", "status", "task"), [("SOFT", "REBOOT", "rebooting"), ("HARD", "HARD_REBOOT", "rebooting_hard")]
)
async def test_reboot(cloud: Cloud, user: Caller, kind: str, status: str, task: str) -> None:
    name = _name()
    server = await user.boot(name=name)
    boots = (await user.act(server["id"], "os-getConsoleOutput", {}, 200))["output"].count("Linux version")
    async with cloud.faults({"operation": "reboot", "kind": "delay", "delay": 0.2, "name": name}):
        await user.act(server["id"], "reboot", {"type": kind})
        await user.wait_for(server["id"], status, task=task)
        await user.wait_for(server["id"], "ACTIVE")
    log = (await user.act(server["id"], "os-getConsoleOutput", {}, 200))["output"]
    assert log.count("Linux version") == boots + 1


async def test_console_logs_have_no_control_characters(user: Caller) -> None:
    """As in Nova: a terminal would obey them, and a script would not find the ends of lines."""
    id = (await user.boot())["id"]
    output = (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    assert "Linux version" in output and output.count("\n") > 5
    assert not [each for each in output if each < " " and each not in "\t\n"]
    last = (await user.act(id, "os-getConsoleOutput", {"length": 2}, 200))["output"]
    assert last.splitlines() == output.splitlines()[-2:]


async def test_a_hard_reboot_starts_a_stopped_server(user: Caller) -> None:
    server = await user.boot()
    await user.act(server["id"], "os-stop")
    await user.wait_for(server["id"], "SHUTOFF")
    await user.refused(409, "POST", f"/servers/{server['id']}/action", {"reboot": {"type": "SOFT"}})
    await user.act(server["id"], "reboot", {"type": "HARD"})
    await user.wait_for(server["id"], "ACTIVE")


async def test_a_hard_reboot_interrupts_a_reboot(cloud: Cloud, user: Caller) -> None:
    name = _name()
    server = await user.boot(name=name)
    async with cloud.faults({"operation": "reboot", "kind": "hang", "name": name, "count": 1}):
        await user.act(server["id"], "reboot", {"type": "SOFT"})
        await user.wait_for(server["id"], "REBOOT", task="rebooting")
        await cloud.fault_struck()  # otherwise the hard reboot might reach the host first and hang
        await user.refused(409, "POST", f"/servers/{server['id']}/action", {"reboot": {"type": "SOFT"}})
        await user.act(server["id"], "reboot", {"type": "HARD"})
        await user.wait_for(server["id"], "ACTIVE")
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("operation", "action", "value", "before", "after"),
    [
        ("power_off", "os-stop", None, "ACTIVE", "ACTIVE"),
        ("power_on", "os-start", None, "SHUTOFF", "SHUTOFF"),
        ("reboot", "reboot", {"type": "SOFT"}, "ACTIVE", "ACTIVE"),
        ("reboot", "reboot", {"type": "HARD"}, "ACTIVE", "ERROR"),
    ],
)
async def test_a_failure_reverts_and_is_shown(
    cloud: Cloud, user: Caller, operation: str, action: str, value: Any, before: str, after: str
) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    if before == "SHUTOFF":
        await user.act(id, "os-stop")
        await user.wait_for(id, "SHUTOFF")
    async with cloud.faults({"operation": operation, "kind": "fail", "name": name, "message": "it is jammed"}):
        await user.act(id, action, value)
        server = await user.wait_for(id, after)
    if after == "ERROR":
        assert server["fault"]["message"] == "it is jammed"
    [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert last["message"] == "Error"
    shown = (await user.admin.get(f"/servers/{id}/os-instance-actions/{last['request_id']}"))["instanceAction"]
    assert [(event["result"], event["details"]) for event in shown["events"]] == [("Error", "it is jammed")]
    if after == "ERROR":
        await user.act(id, "reboot", {"type": "HARD"})  # a hard reboot works in this state
        mended = await user.wait_for(id, "ACTIVE")
        assert "fault" not in mended
    await cloud.assert_clean()


async def test_a_guest_that_ignores_the_request_is_switched_off(cloud: Cloud, user: Caller) -> None:
    name = _name()
    server = await user.boot(name=name)
    async with cloud.faults({"operation": "shutdown", "kind": "delay", "delay": 0.2, "name": name}):
        await user.act(server["id"], "os-stop")
        shown = await user.show(server["id"])
        assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("ACTIVE", "powering-off")
        await user.wait_for(server["id"], "SHUTOFF")


async def test_actions_of_one_server_one_after_the_other(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    for _ in range(3):
        await user.act(id, "os-stop")
        await user.wait_for(id, "SHUTOFF")
        await user.act(id, "os-start")
        await user.wait_for(id, "ACTIVE")
        await user.act(id, "reboot", {"type": "SOFT"})
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
