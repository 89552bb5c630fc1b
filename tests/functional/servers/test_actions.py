"""The instance actions of a server, and its fault."""

import uuid
from typing import Any

from tests.functional.cloud import Caller, Cloud

BUILD = "compute__do_build_and_run_instance"


async def _actions(caller: Caller, id: str) -> list[dict[str, Any]]:
    return list((await caller.get(f"/servers/{id}/os-instance-actions"))["instanceActions"])


async def _action(caller: Caller, id: str, request_id: str) -> dict[str, Any]:
    return dict((await caller.get(f"/servers/{id}/os-instance-actions/{request_id}"))["instanceAction"])


async def test_every_action_is_recorded_with_its_request(user: Caller) -> None:
    answer = await user.request("POST", "/servers", user.body())
    id = answer.json()["server"]["id"]
    request = answer.headers["x-openstack-request-id"]
    await user.wait_for(id, "ACTIVE")
    [created] = await _actions(user, id)
    assert created["request_id"] == request
    assert (created["user_id"], created["project_id"]) == (user.user, user.project)
    assert (created["action"], created["message"], created["instance_uuid"]) == ("create", None, id)
    assert created["updated_at"] >= created["start_time"]

    stopping = (await user.request("POST", f"/servers/{id}/action", {"os-stop": None})).headers
    await user.wait_for(id, "SHUTOFF")
    await user.admin.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")
    started, stopped, _ = await _actions(user, id)
    assert stopped["request_id"] == stopping["x-openstack-request-id"]
    assert (started["action"], started["user_id"]) == ("start", "admin")


async def test_events_as_members_and_admins_see_them(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    [created] = await _actions(user, id)
    shown = await _action(user, id, created["request_id"])
    [event] = shown["events"]
    assert set(event) == {"event", "start_time", "finish_time", "result", "hostId"}
    assert (event["event"], event["result"]) == (BUILD, "Success")
    assert event["start_time"] <= event["finish_time"]
    assert event["hostId"] == (await user.show(id))["hostId"]
    [full] = (await _action(user.admin, id, created["request_id"]))["events"]
    assert full["host"] == await user.host_of(id)
    assert {"traceback", "details", "host"} <= set(full)
    assert "events" not in await _action(user.at(50), id, created["request_id"])
    assert "events" in await _action(user.admin.at(50), id, created["request_id"])


async def test_other_names_of_events(user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "reboot", {"type": "SOFT"})
    await user.wait_for(id, "ACTIVE")
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    names = []
    for action in await _actions(user, id):
        [event] = (await _action(user, id, action["request_id"]))["events"]
        names.append((action["action"], event["event"], event["result"]))
    assert names == [
        ("delete", "compute_terminate_instance", "Success"),
        ("reboot", "compute_reboot_instance", "Success"),
        ("start", "compute_start_instance", "Success"),
        ("stop", "compute_stop_instance", "Success"),
        ("create", BUILD, "Success"),
    ]


async def test_a_build_that_was_cut_short_by_a_delete_is_over(cloud: Cloud, user: Caller) -> None:
    """No action of a deleted server looks unfinished."""
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": user.project}):
        id = await user.create(name=user.project)
        await user.wait_for(id, "BUILD", task="spawning")
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    deleted, created = await _actions(user, id)
    assert (deleted["action"], created["action"]) == ("delete", "create")
    for action in (deleted, created):
        for event in (await _action(user, id, action["request_id"]))["events"]:
            assert event["finish_time"] and event["result"], event


async def test_refused_requests_leave_no_action(user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.refused(409, "POST", f"/servers/{id}/action", {"os-start": None})
    await user.refused(400, "POST", f"/servers/{id}/action", {"reboot": {"type": "GENTLE"}})
    assert len(await _actions(user, id)) == 1


async def test_each_server_of_a_request_has_its_own(user: Caller) -> None:
    ids = await user.boot_many(3)
    requests = {(await _actions(user, id))[0]["request_id"] for id in ids}
    assert len(requests) == 1
    for id in ids:
        assert len((await _action(user, id, *requests))["events"]) == 1


async def test_other_projects_and_unknown_requests(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    [created] = await _actions(user, id)
    stranger = cloud.caller()
    await stranger.refused(404, "GET", f"/servers/{id}/os-instance-actions")
    await stranger.refused(404, "GET", f"/servers/{id}/os-instance-actions/{created['request_id']}")
    await user.refused(404, "GET", f"/servers/{id}/os-instance-actions/req-{uuid.uuid4()}")
    await user.refused(404, "GET", f"/servers/{uuid.uuid4()}/os-instance-actions")


async def test_faults(cloud: Cloud, user: Caller) -> None:
    rule = {"operation": "spawn", "kind": "abort", "name": user.project, "message": "This image cannot boot."}
    async with cloud.faults(rule):
        id = await user.create(name=user.project)
        server = await user.wait_for(id, "ERROR")
    fault = server["fault"]
    assert set(fault) == {"code", "created", "message"}
    assert (fault["code"], fault["message"]) == (500, "This image cannot boot.")
    assert fault["created"] >= server["created"]
    [listed] = (await user.get("/servers/detail?status=ERROR"))["servers"]
    assert listed["fault"] == fault
    assert "fault" not in (await user.get("/servers"))["servers"][0]


async def test_no_fault_is_shown_while_all_is_well(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot(name=user.project))["id"]
    assert "fault" not in await user.show(id)
    async with cloud.faults({"operation": "power_off", "kind": "fail", "name": user.project}):
        await user.act(id, "os-stop")
        server = await user.wait_for(id, "ACTIVE")
    assert "fault" not in server, "the action failed; the server is well"


async def test_what_the_api_does_itself_is_recorded(user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.act(id, "lock")
    await user.act(id, "unlock")
    for state in ("error", "active"):
        await user.admin.act(id, "os-resetState", {"state": state})
    *recorded, _ = await _actions(user, id)
    assert [(each["action"], each["user_id"], each["project_id"]) for each in recorded] == [
        ("resetState", "admin", user.project),
        ("resetState", "admin", user.project),
        ("unlock", user.user, user.project),
        ("lock", user.user, user.project),
    ]
    for action, expected in zip(recorded, ([], [], ["api_unlock"], ["api_lock"]), strict=True):
        shown = await _action(user, id, action["request_id"])
        assert [each["event"] for each in shown["events"]] == expected
        assert {each["result"] for each in shown["events"]} <= {"Success"}
        assert shown["message"] is None
