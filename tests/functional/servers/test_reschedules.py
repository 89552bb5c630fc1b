"""Builds that failed are placed anew: with the load that was placed meanwhile, and with a reason for each attempt."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.cli.timeline import find_timeline
from micronova.db.tables import resource_providers
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.scheduling import RequestSpec
from micronova.rpc.errors import CallTimeout
from micronova.scheduler.rpcapi import SchedulerAPI
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process

HOSTS, SERVERS = 60, 40
CLOUD = CloudOptions(hosts=HOSTS, settings={"quota": {"server_group_members": -1}})
pytestmark = only_in_one_process("the hosts are many, and the database is read")


async def test_a_batch_whose_builds_fail_spreads(cloud: OneProcess, user: Caller) -> None:
    """The servers of a request have the same alternates: what fails must not gather on these."""
    async with cloud.faults({"operation": "spawn", "kind": "fail", "count": 12}):
        body = user.body(min_count=SERVERS, max_count=SERVERS)
        await user.post("/servers", body)
        ids = [each["id"] for each in (await user.get("/servers"))["servers"]]
        assert len(ids) == SERVERS
        for id in ids:
            await user.wait_for(id, "ACTIVE")
    hosts = Counter([await user.host_of(id) for id in ids])
    assert max(hosts.values()) == 1, "there are more hosts than servers"


async def test_the_timeline_has_every_attempt(cloud: OneProcess, user: Caller) -> None:
    fails = {"operation": "spawn", "kind": "fail", "name": user.project, "message": "no luck"}
    async with cloud.faults(fails):
        id = await user.create(name=user.project)
        server = await user.wait_for(id, "ERROR")
    assert "no luck" in server["fault"]["message"]
    assert cloud.process.database is not None
    found = await cloud.process.database.read(find_timeline, id)
    [operation] = found["operations"]
    last = operation["explanation"]
    hosts = [each["host"] for each in operation["dispatches"]]
    assert len(set(hosts)) == 3
    assert [each["winners"][0]["host"] for each in (*last["earlier"], last)] == hosts
    tried = [
        next(step["removed"] for step in each["filters"] if step["name"] == "RetryFilter")
        for each in (*last["earlier"], last)
    ]
    assert tried == [0, 1, 2]


async def test_a_member_reads_why_there_is_no_host(cloud: OneProcess, user: Caller) -> None:
    wanted = {"name": user.project, "ram": 64, "vcpus": 10_000, "disk": 1}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    large = await user.wait_for(await user.create(flavorRef=flavor), "ERROR")
    assert f"no host has 10000 free vCPUs; {HOSTS} hosts have too little room." in large["fault"]["message"]
    group = await user.at(64).post("/os-server-groups", {"server_group": {"name": "g", "policy": "anti-affinity"}}, 200)
    body = user.body(min_count=HOSTS + 3, max_count=HOSTS + 3)
    body["os:scheduler_hints"] = {"group": group["server_group"]["id"]}
    await user.post("/servers", body)
    listed = (await user.get("/servers"))["servers"]
    [*servers] = [each["id"] for each in listed if each["id"] != large["id"]]
    for id in servers[:3]:
        message = (await user.wait_for(id, "ERROR"))["fault"]["message"]
        refused = f"no host is without a member of the anti-affinity group; {HOSTS} hosts have members of the group."
        assert refused in message
        assert f"There is room for {HOSTS} of {HOSTS + 3} servers." in message
        assert not [host for host in cloud.hosts if host in message]


@pytest.mark.parametrize("change", ["aggregate", "left aggregate", "trait"])
async def test_alternates_wait_for_the_scheduler_if_hosts_may_be_reserved(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A host that was reserved for another project after the first decision got the server nevertheless."""
    asked = SchedulerAPI.select_destinations
    answers, away, back = 0, asyncio.Event(), asyncio.Event()

    async def once(self: SchedulerAPI, context: Context, spec: RequestSpec, uuids: Sequence[str], **more: Any) -> Any:
        nonlocal answers
        if answers and not back.is_set():
            away.set()
            raise CallTimeout("the scheduler is away")
        decision = await asked(self, context, spec, uuids, **more)
        if not answers:
            await reserve([each.host for each in decision.destinations[0].alternates])
        answers += 1
        return decision

    async def reserve(hosts: Sequence[str]) -> None:
        if change == "left aggregate":  # which is gone with its times
            made = await user.admin.post("/os-aggregates", {"aggregate": {"name": f"left-{uuid.uuid4()}"}}, status=200)
            path = f"/os-aggregates/{made['aggregate']['id']}"
            for action in ("add_host", "remove_host"):
                for host in hosts:
                    await user.admin.post(f"{path}/action", {action: {"host": host}}, status=200)
            await user.admin.delete(path, status=200)
            return
        if change == "aggregate":
            made = await user.admin.post(
                "/os-aggregates", {"aggregate": {"name": f"reserved-{uuid.uuid4()}"}}, status=200
            )
            added.append(made["aggregate"]["id"])
            return

        def touch(conn: sa.Connection) -> None:
            conn.execute(resource_providers.update().values(updated_at=micros(cloud.process.clock.now())))

        assert cloud.process.database is not None
        await cloud.process.database.write(touch)

    added: list[int] = []
    monkeypatch.setattr(SchedulerAPI, "select_destinations", once)
    async with cloud.faults({"operation": "spawn", "kind": "fail", "name": user.project, "count": 1}):
        server = await user.create(name=user.project)
        await asyncio.wait_for(away.wait(), 30)
        assert cloud.process.database is not None
        found = await cloud.process.database.read(find_timeline, server)
        assert len(found["operations"][0]["dispatches"]) == 1
        back.set()
        await user.wait_for(server, "ACTIVE")
    assert answers == 2
    for number in added:
        await user.admin.delete(f"/os-aggregates/{number}", status=200)


async def test_alternates_serve_while_the_scheduler_does_not_answer(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SchedulerAPI.select_destinations
    calls: list[tuple[str, ...]] = []

    async def once(self: SchedulerAPI, context: Context, spec: RequestSpec, uuids: Sequence[str], **more: Any) -> Any:
        calls.append(tuple(uuids))
        if len(calls) > 1:
            raise CallTimeout("the scheduler is away")
        return await asked(self, context, spec, uuids, **more)

    monkeypatch.setattr(SchedulerAPI, "select_destinations", once)
    async with cloud.faults({"operation": "spawn", "kind": "fail", "name": user.project, "count": 2}):
        server = await user.boot(name=user.project)
    assert len(calls) == 3, "each attempt asks the scheduler first"
    assert cloud.process.database is not None
    found = await cloud.process.database.read(find_timeline, server["id"])
    [operation] = found["operations"]
    hosts = [each["host"] for each in operation["dispatches"]]
    assert len(set(hosts)) == 3
    assert await user.host_of(server["id"]) == hosts[-1]
