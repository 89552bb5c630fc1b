"""Failures of a build, and the outcome of each."""

import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import node_reports
from micronova.db.tables import allocations, compute_nodes, operations
from micronova.objects.orders import NodeResources
from tests.functional.cloud import Caller, Cloud

BUILD = "compute__do_build_and_run_instance"


def _name() -> str:
    return f"f{uuid.uuid4().hex[:10]}"


def _spawn(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"operation": "spawn", "kind": kind, "name": name, **more}


async def _events(user: Caller, id: str) -> list[dict[str, Any]]:
    """Return the events of a server's create action in their order, as an admin sees them."""
    actions = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    request = next(action["request_id"] for action in actions if action["action"] == "create")
    shown = (await user.admin.get(f"/servers/{id}/os-instance-actions/{request}"))["instanceAction"]
    return sorted(shown["events"], key=lambda event: event["start_time"])


async def _holds(cloud: Cloud, id: str) -> set[str]:
    """Return the hosts on which a server holds resources."""
    query = sa.select(compute_nodes.c.host).join(allocations, allocations.c.node_uuid == compute_nodes.c.uuid)
    return {row.host for row in await cloud.read(query.where(allocations.c.consumer_uuid == id))}


@pytest.mark.parametrize("kind", ["fail", "no_resources"])
async def test_a_host_that_fails_is_left_for_another(cloud: Cloud, user: Caller, kind: str) -> None:
    name = _name()
    bad = cloud.hosts[:2]
    async with cloud.faults(*(_spawn(name, kind, host=f"^{host}$", message=f"no luck on {host}") for host in bad)):
        server = await user.boot(name=name)
    host = await user.host_of(server["id"])
    assert host not in bad
    assert await _holds(cloud, server["id"]) == {host}
    for each in bad:
        assert server["id"] not in await cloud.guests(each)
    assert server["id"] in await cloud.guests(host)
    assert "fault" not in server
    events = await _events(user, server["id"])
    assert {event["event"] for event in events} == {BUILD}
    assert [event["result"] for event in events] == ["Error"] * (len(events) - 1) + ["Success"]
    assert set(_hosts(events[:-1])) <= set(bad)
    assert _hosts(events)[-1] == host
    for event in events[:-1]:
        assert event["details"].splitlines()[0] == f"no luck on {event['host']}"


def _hosts(events: list[dict[str, Any]]) -> list[str]:
    """Return the hosts that tried to build a server, in their order."""
    return [event["host"] for event in events if event["event"] == BUILD]


async def test_no_host_is_tried_twice_and_all_are_named_in_the_end(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults(_spawn(name, "fail", message="the hypervisor is unwell")):
        id = await user.create(name=name)
        server = await user.wait_for(id, "ERROR")
    events = await _events(user, id)
    hosts = _hosts(events)
    assert len(hosts) == len(set(hosts)) == 3, "three attempts, each on another host"
    message = server["fault"]["message"]
    assert "Exceeded maximum number of retries" in message
    assert not any(host in message for host in hosts), "the names of hosts are not for users"
    assert f"tried: {', '.join(hosts)}" in (await user.admin.show(id))["fault"]["details"]
    assert "the hypervisor is unwell" in message
    assert [event["result"] for event in events] == ["Error"] * 3
    assert server["hostId"] == "" and server["OS-EXT-STS:vm_state"] == "error"
    assert await _holds(cloud, id) == set()
    await cloud.assert_clean()


async def test_an_abort_is_not_tried_elsewhere(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults(_spawn(name, "abort", message="The image is unacceptable.")):
        id = await user.create(name=name)
        server = await user.wait_for(id, "ERROR")
    assert server["fault"]["message"] == "The image is unacceptable."
    assert server["fault"]["code"] == 500
    assert len(await _events(user, id)) == 1
    assert await _holds(cloud, id) == set()
    for host in cloud.hosts:
        assert id not in await cloud.guests(host)


@pytest.mark.parametrize("place", ["zone:host", "zone::node", "host"])
async def test_a_host_that_was_asked_for_is_not_replaced(cloud: Cloud, user: Caller, place: str) -> None:
    name, host = _name(), cloud.hosts[0]
    where: dict[str, Any] = {
        "zone:host": {"availability_zone": f"nova:{host}"},
        "zone::node": {"availability_zone": f"nova::{host}"},
        "host": {"host": host},
    }[place]
    async with cloud.faults(_spawn(name, "fail", message="no luck")):
        id = await user.admin.create(name=name, **where)
        server = await user.wait_for(id, "ERROR")
    assert "no luck" in server["fault"]["message"]
    assert _hosts(await _events(user, id)) == [host]


async def test_no_valid_host(cloud: Cloud, user: Caller) -> None:
    wanted = {"name": user.project, "ram": 1 << 30, "vcpus": 1, "disk": 1}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    id = await user.create(flavorRef=flavor)
    server = await user.wait_for(id, "ERROR")
    assert server["fault"]["message"] == (
        f"No valid host was found. There are not enough hosts available: no host is large enough for {1 << 20} GiB of "
        f"memory; {len(cloud.hosts)} hosts are too small."
    )
    assert "details" not in server["fault"]
    assert "MaxUnit(MEMORY_MB)" in (await user.admin.show(id))["fault"]["details"], "admins learn which filter it was"
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [(action["action"], action["message"]) for action in actions] == [("create", "Error")]
    said = await user.refused(409, "POST", f"/servers/{id}/action", {"os-getConsoleOutput": {}})
    assert "was never placed on a host" in said and "not ready" not in said
    assert [(event["event"], event["result"]) for event in await _events(user, id)] == [
        ("conductor_schedule_and_build_instances", "Error")
    ]


async def test_the_last_error_is_shown_when_there_are_no_more_hosts(cloud: Cloud, user: Caller) -> None:
    """Two hosts have enough resources and both fail: the fault is their error, not that there is no third host."""
    name = _name()
    admin = user.admin
    zone = f"z{user.project[:8]}"
    made = await admin.post("/os-aggregates", {"aggregate": {"name": zone, "availability_zone": zone}}, 200)
    path = f"/os-aggregates/{made['aggregate']['id']}"
    two = cloud.hosts[:2]
    for host in two:
        await admin.post(f"{path}/action", {"add_host": {"host": host}}, 200)
    try:
        async with cloud.faults(_spawn(name, "fail", message="the disk is full")):
            id = await user.create(name=name, availability_zone=zone)
            server = await user.wait_for(id, "ERROR")
        assert "the disk is full" in server["fault"]["message"]
        assert sorted(_hosts(await _events(user, id))) == sorted(two)
    finally:
        await cloud.delete_all()
        for host in two:
            await admin.post(f"{path}/action", {"remove_host": {"host": host}}, 200)
        await admin.delete(path, 200)


async def test_a_guest_that_crashes_right_after_its_start(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults(_spawn(name, "crash")):
        id = await user.create(name=name)
        server = await user.wait_for(id, "ERROR")
    assert server["OS-EXT-STS:power_state"] == 6
    assert "panicked" in server["fault"]["message"]
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")


async def test_deleted_while_its_host_fails(cloud: Cloud, user: Caller) -> None:
    """The delete takes precedence over the reschedule: nothing is built again."""
    name = _name()
    async with cloud.faults(_spawn(name, "fail", delay=0.3)):
        id = await user.create(name=name)
        await user.wait_for(id, "BUILD", task="spawning")
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


async def test_a_host_that_cannot_undo_does_so_later(cloud: Cloud, user: Caller) -> None:
    """The half-built guest cannot be removed at first: the record of the departure removes it later."""
    name = _name()
    bad = cloud.hosts[0]
    rules = (
        _spawn(name, "fail", host=f"^{bad}$"),
        {"operation": "destroy", "kind": "fail", "name": name, "host": f"^{bad}$", "count": 2},
    )
    async with cloud.faults(*rules):
        id = await user.admin.create(name=name, availability_zone=f"nova:{bad}")
        await user.wait_for(id, "ERROR")

        async def removed() -> bool | None:
            return None if id in await cloud.guests(bad) else True

        await cloud.until(removed, "the guest that was left behind to be removed")
    await cloud.assert_clean()


async def test_failed_builds_make_a_host_less_attractive_until_one_succeeds(cloud: Cloud, user: Caller) -> None:
    name = _name()
    bad = cloud.hosts[0]
    for host in cloud.hosts:  # without the failures of other tests
        await user.admin.boot(availability_zone=f"nova:{host}")
    async with cloud.faults(_spawn(name, "fail", host=f"^{bad}$")):
        id = await user.admin.create(name=name, availability_zone=f"nova:{bad}")
        await user.wait_for(id, "ERROR")
    others = [await user.host_of((await user.boot())["id"]) for _ in range(len(cloud.hosts))]
    assert bad not in others
    await user.admin.boot(availability_zone=f"nova:{bad}")
    again = [await user.host_of((await user.boot())["id"]) for _ in range(2 * len(cloud.hosts))]
    assert bad in again, "a host that builds again is as good as the others"


async def test_a_report_of_the_host_does_not_forget_failed_builds(cloud: Cloud, user: Caller) -> None:
    name, bad = _name(), cloud.hosts[0]
    async with cloud.faults(_spawn(name, "fail", host=f"^{bad}$")):
        id = await user.admin.create(name=name, availability_zone=f"nova:{bad}")
        await user.wait_for(id, "ERROR")
    query = sa.select(compute_nodes).where(compute_nodes.c.host == bad)
    [before] = await cloud.read(query)
    assert before.failed_builds > 0
    report = NodeResources(
        node=bad, node_uuid=before.uuid, hypervisor_type="fake", hypervisor_version=1_000, vcpus=64,
        memory_mb=262_144, local_gb=4_096,
    )  # fmt: skip
    assert cloud.process.database is not None
    await cloud.process.database.write(node_reports.record, {bad: [report]}, before.changed_at + 1)
    [after] = await cloud.read(query)
    assert (after.failed_builds, after.created_at, after.id) == (before.failed_builds, before.created_at, before.id)


async def test_the_decision_is_kept_for_admins(cloud: Cloud, user: Caller) -> None:
    server = await user.boot()
    [row] = await cloud.read(sa.select(operations).where(operations.c.instance_uuid == server["id"]))
    assert row.explanation["hosts"] >= len(cloud.hosts)
    assert row.explanation["winners"][0]["host"] == await user.host_of(server["id"])
