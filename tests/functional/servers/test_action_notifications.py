"""Notifications of actions: one at the start, and one at the end or at the failure."""

from collections.abc import Callable
from typing import Any

import pytest

from micronova.compute.host import DESTROY_ATTEMPTS
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import network

pytestmark = only_in_one_process("watches the notifier of the cloud's process")
CLOUD = CloudOptions(hosts=2, roles=("network",))


def _events(notifications: list[tuple[str, Any, Any]], count: int) -> Callable[[], Any]:
    async def probe() -> list[str] | None:
        return [event for event, _, _ in notifications] if len(notifications) >= count else None

    return probe


@pytest.mark.parametrize(
    ("action", "back", "status"), [("pause", "unpause", "PAUSED"), ("suspend", "resume", "SUSPENDED")]
)
async def test_the_action_and_its_reverse(
    cloud: OneProcess, user: Caller, notifications: Any, action: str, back: str, status: str
) -> None:
    id = (await user.boot())["id"]
    await cloud.until(_events(notifications, 2), "the end of the build")
    notifications.clear()
    await user.act(id, action)
    await user.wait_for(id, status)
    await user.act(id, back)
    await user.wait_for(id, "ACTIVE")
    events = await cloud.until(_events(notifications, 4), "the notifications")
    assert events == [f"{action}.start", f"{action}.end", f"{back}.start", f"{back}.end"]
    assert [row["vm_state"] for _, row, _ in notifications] == ["active", status.lower(), status.lower(), "active"]


async def test_failures(cloud: OneProcess, user: Caller, notifications: Any) -> None:
    id = (await user.boot(name=user.project))["id"]
    await cloud.until(_events(notifications, 2), "the end of the build")
    notifications.clear()
    async with cloud.faults({"operation": "suspend", "kind": "fail", "name": user.project, "message": "no room"}):
        await user.act(id, "suspend")
        await user.wait_for(id, "ERROR")
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    async with cloud.faults({"operation": "reboot", "kind": "fail", "name": user.project, "message": "no way"}):
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ERROR")
    assert await cloud.until(_events(notifications, 5), "the notifications") == [
        "suspend.start", "reboot.start", "reboot.end", "reboot.start", "reboot.error",
    ]  # fmt: skip
    assert notifications[-1][2]["message"] == "no way"


async def test_a_delete_reports_the_end_of_the_guest(cloud: OneProcess, user: Caller, notifications: Any) -> None:
    net = await network(user)
    for networks in ("none", [{"uuid": net["id"]}]):
        id = (await user.boot(networks=networks))["id"]
        await cloud.until(_events(notifications, 2), "the end of the build")
        notifications.clear()
        await user.delete(f"/servers/{id}")
        await user.gone(id)
        events = await cloud.until(_events(notifications, 4), "the notifications")
        assert events == ["delete.start", "shutdown.start", "shutdown.end", "delete.end"]
        for _, row, _ in notifications[:3]:
            assert (row["vm_state"], row["task_state"], row["power_state"]) == ("active", "deleting", 1)
            assert len(row["network_info"]) == (networks != "none")
        notifications.clear()


async def test_a_delete_without_its_host_reports_no_end_of_the_guest(
    cloud: OneProcess, user: Caller, notifications: Any
) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "no_resources", "name": user.project}):
        id = await user.create(name=user.project)
        await user.wait_for(id, "ERROR")
    notifications.clear()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    assert await cloud.until(_events(notifications, 2), "the notifications") == ["delete.start", "delete.end"]


async def test_locks(cloud: OneProcess, user: Caller, notifications: Any) -> None:
    id = (await user.boot())["id"]
    await cloud.until(_events(notifications, 2), "the end of the build")
    notifications.clear()
    await user.act(id, "lock", {"locked_reason": "why not"})
    await user.act(id, "lock")  # changes nothing
    await user.act(id, "unlock")
    assert [(event, row["locked_by"], row["locked_reason"]) for event, row, _ in notifications] == [
        ("lock", "owner", "why not"),
        ("unlock", None, None),
    ]


async def test_interfaces(cloud: OneProcess, user: Caller, notifications: Any) -> None:
    net = await network(user)
    id = (await user.boot(name=user.project))["id"]
    await cloud.until(_events(notifications, 2), "the end of the build")
    notifications.clear()
    path, body = f"/servers/{id}/os-interface", {"interfaceAttachment": {"net_id": net["id"]}}
    port = (await user.post(path, body, 200))["interfaceAttachment"]["port_id"]
    await user.delete(f"{path}/{port}", 202)
    await user.wait_for(id, "ACTIVE")
    async with cloud.faults({"operation": "attach_interface", "kind": "fail", "name": user.project}):
        await user.refused(500, "POST", path, body)
    events = await cloud.until(_events(notifications, 6), "the notifications")
    assert events == [
        "interface_attach.start", "interface_attach.end", "interface_detach.start", "interface_detach.end",
        "interface_attach.start", "interface_attach.error",
    ]  # fmt: skip
    assert [len(row["network_info"]) for _, row, _ in notifications] == [0, 1, 1, 0, 0, 0]
    await cloud.assert_clean()


async def test_a_delete_that_is_tried_again_begins_once(cloud: OneProcess, user: Caller, notifications: Any) -> None:
    id = (await user.boot(name=user.project))["id"]
    await cloud.until(_events(notifications, 2), "the end of the build")
    notifications.clear()
    async with cloud.faults({"operation": "destroy", "kind": "fail", "name": user.project, "count": DESTROY_ATTEMPTS}):
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    events = await cloud.until(_events(notifications, 4), "the notifications")
    assert events == ["delete.start", "shutdown.start", "shutdown.end", "delete.end"]
