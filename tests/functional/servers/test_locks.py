"""Locking servers, and resetting their state."""

from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud

STRANGER = "0" * 32


def _foreign_admin(user: Caller) -> Caller:
    """Return an admin of another project."""
    return Caller(user.cloud, "admin", STRANGER, user.minor)


async def test_a_lock_holds_for_everybody_but_admins(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    assert (await user.show(id))["locked"] is False
    await user.act(id, "lock", {"locked_reason": "do not touch"})
    shown = await user.show(id)
    assert (shown["locked"], shown["locked_reason"]) == (True, "do not touch")
    refused: list[tuple[str, str, Any]] = [
        ("POST", "/action", {"os-stop": None}), ("POST", "/action", {"pause": None}), ("DELETE", "", None),
        ("POST", "/action", {"rescue": None}), ("POST", "/action", {"changePassword": {"adminPass": "x"}}),
        ("POST", "/action", {"trigger_crash_dump": None}),
        ("POST", "/action", {"reboot": {"type": "HARD"}}), ("POST", "/metadata", {"metadata": {"a": "b"}}),
        ("PUT", "/metadata", {"metadata": {}}), ("PUT", "/metadata/a", {"meta": {"a": "b"}}),
    ]  # fmt: skip
    for method, path, body in refused:
        assert "locked" in await user.refused(409, method, f"/servers/{id}{path}", body)
    await user.admin.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await user.act(id, "unlock")
    shown = await user.show(id)
    assert (shown["locked"], shown["locked_reason"]) == (False, None)
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in actions] == ["start", "unlock", "stop", "lock", "create"]
    await cloud.assert_clean()


async def test_what_a_lock_does_not_stop(user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.act(id, "lock")
    await user.put(f"/servers/{id}", {"server": {"name": "renamed"}})
    await user.put(f"/servers/{id}/tags", {"tags": ["a"]})
    await user.post(f"/servers/{id}/remote-consoles", {"remote_console": {"protocol": "vnc", "type": "novnc"}}, 200)
    await user.act(id, "os-getConsoleOutput", {}, 200)
    shown = await user.show(id)
    assert (shown["name"], shown["tags"], shown["locked"]) == ("renamed", ["a"], True)
    await user.act(id, "unlock")


async def test_what_an_admin_locked_only_admins_unlock(user: Caller) -> None:
    id = (await user.boot())["id"]
    await _foreign_admin(user).act(id, "lock", {"locked_reason": "abuse"})
    await user.act(id, "lock", {"locked_reason": "mine now"})
    assert (await user.show(id))["locked_reason"] == "abuse"
    await user.refused(403, "POST", f"/servers/{id}/action", {"unlock": None})
    assert (await user.show(id))["locked"] is True
    await _foreign_admin(user).act(id, "unlock")
    assert (await user.show(id))["locked"] is False
    await user.act(id, "lock")
    await _foreign_admin(user).act(id, "unlock")
    await user.act(id, "unlock")  # unlocking an unlocked server succeeds


@pytest.mark.parametrize("value", [{"locked_reason": ""}, {"locked_reason": "x" * 256}, {"reason": "x"}, [], "x",
                                   {"locked_reason": None}, {"locked_reason": 1}])  # fmt: skip
async def test_bad_locks(user: Caller, value: Any) -> None:
    id = (await user.boot())["id"]
    await user.refused(400, "POST", f"/servers/{id}/action", {"lock": value})
    assert (await user.show(id))["locked"] is False
    await user.at(72).act(id, "lock", value)  # this microversion has no reasons and ignores the body
    assert (await user.show(id))["locked_reason"] is None
    await user.act(id, "unlock")


async def test_the_state_set_by_hand(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot(name=f"r{user.project}"))["id"]
    await user.refused(403, "POST", f"/servers/{id}/action", {"os-resetState": {"state": "error"}})
    await user.admin.act(id, "os-resetState", {"state": "error"})
    assert (await user.show(id))["OS-EXT-STS:vm_state"] == "error"
    await user.admin.act(id, "os-resetState", {"state": "active"})
    assert (await user.show(id))["status"] == "ACTIVE"
    for value in (None, {}, {"state": "paused"}, {"state": "active", "x": 1}):
        await user.admin.refused(400, "POST", f"/servers/{id}/action", {"os-resetState": value})
    async with cloud.faults({"operation": "power_off", "kind": "hang", "name": f"r{user.project}"}):
        await user.act(id, "os-stop")
        await user.wait_for(id, "ACTIVE", task="powering-off")
        await cloud.fault_struck()
        await user.admin.act(id, "os-resetState", {"state": "active"})
        shown = await user.show(id)
        assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("ACTIVE", None)
        await user.act(id, "reboot", {"type": "SOFT"})
        await user.wait_for(id, "ACTIVE")
    stopping = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"][2]
    assert (stopping["action"], stopping["message"]) == ("stop", "Error")
    await cloud.assert_clean()


async def test_a_delete_is_not_stopped_by_resetting_the_state(cloud: Cloud, user: Caller) -> None:
    name = f"d{user.project}"
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": "destroy", "kind": "delay", "delay": 0.3, "name": name}):
        await user.delete(f"/servers/{id}")
        message = await user.admin.refused(409, "POST", f"/servers/{id}/action", {"os-resetState": {"state": "error"}})
        assert "deleted" in message
        await user.gone(id)
    await cloud.assert_clean()
