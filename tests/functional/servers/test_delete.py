"""Deleting servers in every state; a delete always succeeds in the end."""

import asyncio
import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.tables import departures, quota_usages
from micronova.scheduler.manager import SchedulerManager
from tests.functional.cloud import Caller, Cloud, only_in_one_process


def _name() -> str:
    return f"d{uuid.uuid4().hex[:10]}"


async def _delete(user: Caller, id: str) -> None:
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_a_deleted_server_leaves_nothing_but_its_history(cloud: Cloud, user: Caller) -> None:
    server = await user.boot()
    host = await user.host_of(server["id"])
    assert server["id"] in await cloud.guests(host)
    await _delete(user, server["id"])
    assert server["id"] not in await cloud.guests(host)
    used = await cloud.read(sa.select(quota_usages).where(quota_usages.c.project_id == user.project))
    assert {row.in_use for row in used} == {0}
    for method, path, body in (
        ("DELETE", "", None),
        ("PUT", "", {"server": {"name": "x"}}),
        ("POST", "/action", {"os-stop": None}),
        ("GET", "/metadata", None),
    ):
        await user.refused(404, method, f"/servers/{server['id']}{path}", body)
    await cloud.assert_clean()


async def test_the_server_shows_that_it_is_being_deleted(cloud: Cloud, user: Caller) -> None:
    name = _name()
    server = await user.boot(name=name)
    async with cloud.faults({"operation": "destroy", "kind": "delay", "delay": 0.3, "name": name}):
        await user.delete(f"/servers/{server['id']}")
        shown = await user.show(server["id"])
        assert shown["OS-EXT-STS:task_state"] == "deleting"
        assert shown["status"] == "ACTIVE"
        await user.refused(409, "POST", f"/servers/{server['id']}/action", {"os-stop": None})
        # As in Nova, metadata and tags depend on the vm state alone.
        await user.put(f"/servers/{server['id']}/metadata", {"metadata": {"a": "b"}})
        await user.delete(f"/servers/{server['id']}")  # repeated: it is deleted already
        await user.gone(server["id"])


async def test_a_server_is_deleted_by_force(cloud: Cloud, user: Caller) -> None:
    server = await user.boot()
    await user.post(f"/servers/{server['id']}/action", {"lock": None})
    force = {"forceDelete": None}
    await user.refused(409, "POST", f"/servers/{server['id']}/action", force)
    await user.post(f"/servers/{server['id']}/action", {"unlock": None})
    await user.post(f"/servers/{server['id']}/action", force)
    await user.gone(server["id"])
    await user.refused(404, "POST", f"/servers/{server['id']}/action", force)


async def test_many_deletes_of_one_server_at_once(cloud: Cloud, user: Caller) -> None:
    server = await user.boot()
    answers = await asyncio.gather(*(user.request("DELETE", f"/servers/{server['id']}") for _ in range(8)))
    assert {answer.status for answer in answers} <= {204, 404}
    assert answers[0].status == 204
    await user.gone(server["id"])
    actions = (await user.admin.get(f"/servers/{server['id']}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in actions] == ["delete", "create"], "it was done once"


async def test_while_it_is_built(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": name}):
        id = await user.create(name=name)
        await user.wait_for(id, "BUILD", task="spawning")
        await _delete(user, id)
    for host in cloud.hosts:
        assert id not in await cloud.guests(host)
    await cloud.assert_clean()


@pytest.mark.parametrize("turn", range(6))
async def test_right_after_the_create_request(cloud: Cloud, user: Caller, turn: int) -> None:
    """At various times: before, while and after it is placed."""
    id = await user.create()
    for _ in range(turn * 3):
        await asyncio.sleep(0)
    await _delete(user, id)
    await cloud.assert_clean()


@only_in_one_process("holds the scheduler")
async def test_while_it_is_being_placed(cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    place = SchedulerManager._place

    async def held(*args: Any) -> Any:
        chosen = await place(*args)
        asked.set()
        await answer.wait()
        return chosen

    monkeypatch.setattr(SchedulerManager, "_place", held)
    id = await user.create()
    await asyncio.wait_for(asked.wait(), 10)
    assert (await user.show(id))["OS-EXT-STS:task_state"] == "scheduling"
    await user.delete(f"/servers/{id}")
    assert (await user.show(id))["OS-EXT-STS:task_state"] == "deleting"
    answer.set()
    await user.gone(id)
    await cloud.assert_clean()


async def test_in_error(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults({"operation": "spawn", "kind": "abort", "name": name}):
        id = await user.create(name=name)
        await user.wait_for(id, "ERROR")
    await _delete(user, id)
    await cloud.assert_clean()


async def test_stopped(cloud: Cloud, user: Caller) -> None:
    server = await user.boot()
    await user.act(server["id"], "os-stop")
    await user.wait_for(server["id"], "SHUTOFF")
    await _delete(user, server["id"])


@pytest.mark.parametrize(
    ("operation", "action", "value", "task"),
    [
        ("power_off", "os-stop", None, "powering-off"),
        ("reboot", "reboot", {"type": "HARD"}, "rebooting_hard"),
        ("reboot", "reboot", {"type": "SOFT"}, "rebooting"),
    ],
)
async def test_while_something_else_is_done_to_it(
    cloud: Cloud, user: Caller, operation: str, action: str, value: Any, task: str
) -> None:
    name = _name()
    server = await user.boot(name=name)
    async with cloud.faults({"operation": operation, "kind": "hang", "name": name}):
        await user.act(server["id"], action, value)
        assert (await user.show(server["id"]))["OS-EXT-STS:task_state"] == task
        await _delete(user, server["id"])
    await cloud.assert_clean()


async def test_a_host_that_cannot_destroy_tries_again(cloud: Cloud, user: Caller) -> None:
    name = _name()
    server = await user.boot(name=name)
    async with cloud.faults({"operation": "destroy", "kind": "fail", "name": name, "count": 1}):
        await user.delete(f"/servers/{server['id']}")
        await user.gone(server["id"])
    await cloud.assert_clean()


async def test_the_history(cloud: Cloud, user: Caller) -> None:
    server = await user.boot(name="was-here", metadata={"a": "b"})
    id = server["id"]
    await _delete(user, id)
    deleted = (await user.admin.get(f"/servers/detail?deleted=true&uuid={id}"))["servers"]
    assert [each["id"] for each in deleted] == [id]
    assert (deleted[0]["status"], deleted[0]["name"]) == ("DELETED", "was-here")
    assert deleted[0]["OS-SRV-USG:terminated_at"]
    assert deleted[0]["OS-EXT-STS:vm_state"] == "deleted"
    assert deleted[0]["metadata"] == {"a": "b"}
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in actions] == ["delete", "create"]
    for action in actions:
        shown = (await user.get(f"/servers/{id}/os-instance-actions/{action['request_id']}"))["instanceAction"]
        assert [event["result"] for event in shown["events"]] == ["Success"]
        assert shown["events"][0]["finish_time"]
    await user.at(20).refused(404, "GET", f"/servers/{id}/os-instance-actions")
    assert not await cloud.read(sa.select(departures).where(departures.c.instance_uuid == id))


async def test_many_at_once(cloud: Cloud, user: Caller) -> None:
    ids = await user.boot_many(30)
    await asyncio.gather(*(user.delete(f"/servers/{id}") for id in ids))
    await asyncio.gather(*(user.gone(id) for id in ids))
    await cloud.assert_clean()
