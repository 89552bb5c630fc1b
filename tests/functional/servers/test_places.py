"""Placement of servers: forced and requested hosts, availability zones, server groups."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.tables import compute_nodes
from tests.functional.cloud import Caller, Cloud


async def _group(user: Caller, policy: str, rules: dict[str, int] | None = None) -> str:
    body: dict[str, Any] = {"name": "g", "policy": policy}
    if rules:
        body["rules"] = rules
    return str((await user.post("/os-server-groups", {"server_group": body}, 200))["server_group"]["id"])


@contextlib.asynccontextmanager
async def _zone(user: Caller, name: str, *hosts: str) -> AsyncIterator[None]:
    """Make an availability zone of some hosts while the context is open."""
    admin = user.admin
    made = await admin.post("/os-aggregates", {"aggregate": {"name": name, "availability_zone": name}}, 200)
    path = f"/os-aggregates/{made['aggregate']['id']}"
    for host in hosts:
        await admin.post(f"{path}/action", {"add_host": {"host": host}}, 200)
    try:
        yield
    finally:
        for host in hosts:
            await admin.post(f"{path}/action", {"remove_host": {"host": host}}, 200)
        await admin.delete(path, 200)


# --- hosts ---------------------------------------------------------------------------------------------------------


async def test_an_admin_forces_a_host(cloud: Cloud, user: Caller) -> None:
    for host in cloud.hosts:
        server = await user.admin.boot(availability_zone=f"nova:{host}")
        assert server["OS-EXT-SRV-ATTR:host"] == host
        server = await user.admin.boot(availability_zone=f":{host}:{host}")
        assert server["OS-EXT-SRV-ATTR:hypervisor_hostname"] == host


async def _refusal(user: Caller, hints: dict[str, Any] | None = None, **fields: Any) -> str:
    """Ask for a server as an admin; return the fault, because there is no host."""
    return str((await user.wait_for(await user.admin.create(hints, **fields), "ERROR"))["fault"]["message"])


async def test_a_disabled_host_gets_no_server_though_it_is_forced(cloud: Cloud, user: Caller) -> None:
    admin, host = user.admin, cloud.hosts[0]
    service = (await admin.get(f"/os-services?binary=nova-compute&host={host}"))["services"][0]["id"]
    moved = (await admin.boot(availability_zone=f"nova:{cloud.hosts[1]}"))["id"]
    await admin.put(f"/os-services/{service}", {"status": "disabled"})
    try:
        assert "the only possible host is disabled" in await _refusal(user, availability_zone=f"nova:{host}")
        assert "the only possible host is disabled" in await _refusal(user, host=host)
        others = [(await admin.boot())["OS-EXT-SRV-ATTR:host"] for _ in range(4)]
        assert host not in others
        await admin.at(60).act(moved, "os-migrateLive", {"host": host, "block_migration": "auto", "force": True})
        await user.wait_for(moved, "ACTIVE")
        assert await user.host_of(moved) == host, "moves by force are not asked about"
    finally:
        await admin.put(f"/os-services/{service}", {"status": "enabled"})


async def test_a_forced_host_is_in_the_zone_that_is_named(cloud: Cloud, user: Caller) -> None:
    """Names that no aggregate has are no zones here, as in Nova: `nova:HOST` is any host."""
    inside, outside, *_ = cloud.hosts
    name = f"z{user.project[:8]}"
    async with _zone(user, name, inside):
        assert (await user.admin.boot(availability_zone=f"{name}:{inside}"))["OS-EXT-SRV-ATTR:host"] == inside
        message = await _refusal(user, availability_zone=f"{name}:{outside}")
        assert f"in another availability zone: the server needs one that is in the availability zone {name}." in message
        for zone in ("nova", "no-such"):
            server = await user.admin.boot(availability_zone=f"{zone}:{inside}")
            assert server["OS-EXT-AZ:availability_zone"] == name
            await user.admin.act(server["id"], "migrate")
            await user.wait_for(server["id"], "VERIFY_RESIZE")
        words = await user.admin.refused(400, "POST", "/servers", user.body(availability_zone=f"no-such::{inside}"))
        assert "no-such" in words
        pinned = (await user.admin.boot(availability_zone=name))["id"]
        by_force = {"host": outside, "block_migration": "auto", "force": True}
        await user.admin.at(60).act(pinned, "os-migrateLive", by_force)
        await user.wait_for(pinned, "ACTIVE")
        assert await user.host_of(pinned) == outside, "moves by force are not asked about"
        await cloud.delete_all()


async def test_a_requested_host_is_filtered(cloud: Cloud, user: Caller) -> None:
    host = cloud.hosts[1]
    assert (await user.admin.boot(host=host))["OS-EXT-SRV-ATTR:host"] == host
    assert (await user.admin.boot(hypervisor_hostname=host))["OS-EXT-SRV-ATTR:host"] == host
    both = await user.admin.boot(host=host, hypervisor_hostname=host)
    assert both["OS-EXT-SRV-ATTR:host"] == host


@pytest.mark.parametrize(
    "fields",
    [{"availability_zone": "nova:fake-1"}, {"availability_zone": "::fake-1"}, {"host": "x"},
     {"hypervisor_hostname": "x"}],
)  # fmt: skip
async def test_members_may_not_choose_hosts(user: Caller, fields: dict[str, Any]) -> None:
    message = await user.refused(403, "POST", "/servers", user.body(**fields))
    assert "Policy doesn't allow" in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"availability_zone": "nova:no-such"}, "host no-such could not be found"),
        ({"host": "no-such"}, "host no-such could not be found"),
        ({"hypervisor_hostname": "no-such"}, "no-such could not be found"),
        ({"availability_zone": "nova::no-such"}, "no-such could not be found"),
        ({"availability_zone": "a:b:c:d"}, "availability_zone"),
        ({"availability_zone": "nova:{host}", "host": "{host}"}, "exclude each other"),
    ],
)
async def test_wrong_hosts(cloud: Cloud, user: Caller, fields: dict[str, str], words: str) -> None:
    named: dict[str, Any] = {key: value.replace("{host}", cloud.hosts[0]) for key, value in fields.items()}
    assert words in await user.admin.refused(400, "POST", "/servers", user.body(**named))


# --- zones ---------------------------------------------------------------------------------------------------------


async def test_a_zone_limits_the_hosts(cloud: Cloud, user: Caller) -> None:
    one, two, *_ = cloud.hosts
    name = f"z{user.project[:8]}"
    async with _zone(user, name, one, two):
        ids = await user.boot_many(4, availability_zone=name)
        assert {await user.host_of(id) for id in ids} == {one, two}
        server = await user.show(ids[0])
        assert server["OS-EXT-AZ:availability_zone"] == name
        assert server["pinned_availability_zone"] == name
        anywhere = await user.boot()
        assert anywhere["pinned_availability_zone"] is None
        assert anywhere["OS-EXT-AZ:availability_zone"] in ("nova", name)
        outside = await user.boot(availability_zone="nova")
        assert await user.host_of(outside["id"]) not in (one, two)
        await cloud.delete_all()


async def test_a_build_follows_a_change_of_its_pinned_zone(cloud: Cloud, user: Caller) -> None:
    one, *others = cloud.hosts
    rule = {"operation": "spawn", "kind": "unavailable", "name": user.project, "host": "|".join(others)}
    async with _zone(user, f"z{user.project[:8]}", one), cloud.faults(rule):
        id = await user.create(name=user.project, availability_zone="nova")  # where no host can build it

        async def tried() -> bool | None:
            return True if (await user.show(id))["OS-EXT-AZ:availability_zone"] else None

        await cloud.until(tried, "the first attempt")
        await user.put(f"/servers/{id}", {"server": {"pinned_availability_zone": None}})
        await user.wait_for(id, "ACTIVE")
        assert await user.host_of(id) == one
        await cloud.delete_all()


async def test_a_change_of_a_zone_counts_at_once(cloud: Cloud, user: Caller) -> None:
    """Also for a scheduler that has just read all hosts because it refused a request."""
    first, *others = cloud.hosts
    name = f"z{user.project[:8]}"
    async with _zone(user, name, first):
        group = await _group(user, "anti-affinity")
        await user.boot({"group": group}, availability_zone=name)
        aggregates = (await user.admin.get("/os-aggregates"))["aggregates"]
        path = next(f"/os-aggregates/{each['id']}/action" for each in aggregates if each["name"] == name)
        for host in others:
            refused = await user.create({"group": group}, availability_zone=name)
            await user.wait_for(refused, "ERROR")
            before = await _changed_at(cloud, host)
            await user.admin.post(path, {"add_host": {"host": host}}, 200)
            assert await _changed_at(cloud, host) > before, "schedulers read what has changed"
            accepted = await user.boot({"group": group}, availability_zone=name)
            assert await user.host_of(accepted["id"]) == host
        await cloud.delete_all()
        for host in others:
            await user.admin.post(path, {"remove_host": {"host": host}}, 200)


async def _changed_at(cloud: Cloud, host: str) -> int:
    [row] = await cloud.read(sa.select(compute_nodes.c.changed_at).where(compute_nodes.c.host == host))
    return int(row.changed_at)


async def test_a_zone_without_living_hosts_is_not_available(user: Caller) -> None:
    name = f"z{user.project[:8]}"
    async with _zone(user, name):
        assert name in await user.refused(400, "POST", "/servers", user.body(availability_zone=name))


# --- groups --------------------------------------------------------------------------------------------------------


async def test_affinity_keeps_together(user: Caller) -> None:
    group = await _group(user, "affinity")
    ids = [(await user.boot(hints={"group": group}))["id"] for _ in range(3)]
    ids += await user.boot_many(2, hints={"group": group})
    assert len({await user.host_of(id) for id in ids}) == 1
    shown = await user.show(ids[0])
    assert shown["server_groups"] == [group]
    members = (await user.get(f"/os-server-groups/{group}"))["server_group"]["members"]
    assert sorted(members) == sorted(ids)


async def test_anti_affinity_keeps_apart_until_there_are_no_more_hosts(cloud: Cloud, user: Caller) -> None:
    group = await _group(user, "anti-affinity")
    count = len(cloud.hosts)
    ids = await user.boot_many(count, hints={"group": group})
    assert sorted([await user.host_of(id) for id in ids]) == sorted(cloud.hosts)
    late = await user.create(hints={"group": group})
    assert "not enough hosts" in (await user.wait_for(late, "ERROR"))["fault"]["message"]
    freed = await user.host_of(ids[0])
    await user.delete(f"/servers/{ids[0]}")
    await user.gone(ids[0])
    again = await user.boot(hints={"group": group})
    assert await user.host_of(again["id"]) == freed
    await cloud.assert_clean()


@pytest.mark.parametrize("policy", ["anti-affinity", "affinity"])
async def test_a_forced_host_that_the_group_forbids_is_refused(cloud: Cloud, user: Caller, policy: str) -> None:
    """Of a build and of a live migration."""
    admin, (first, second, *_) = user.admin, cloud.hosts
    group = await _group(admin, policy)
    member = (await admin.boot({"group": group}, availability_zone=f"nova:{first}"))["id"]
    forbidden = first if policy == "anti-affinity" else second
    message = await _refusal(user, {"group": group}, availability_zone=f"nova:{forbidden}")
    assert f"{policy} group" in message and not [host for host in cloud.hosts if host in message]
    moving = member
    if policy == "anti-affinity":
        moving = (await admin.boot({"group": group}, availability_zone=f"nova:{second}"))["id"]
    else:
        await admin.boot({"group": group})
    by_force = {"host": forbidden, "block_migration": "auto", "force": True}
    await admin.at(60).act(moving, "os-migrateLive", by_force)
    await user.wait_for(moving, "ACTIVE")
    assert await user.host_of(moving) == (second if policy == "anti-affinity" else first)
    [migration] = (await admin.get(f"/os-migrations?instance_uuid={moving}"))["migrations"]
    assert migration["status"] == "error"
    await cloud.assert_clean()


async def test_several_at_once_into_a_group_that_has_too_few_hosts(cloud: Cloud, user: Caller) -> None:
    group = await _group(user, "anti-affinity")
    count = len(cloud.hosts) + 1
    answer = await user.post(
        "/servers", user.body({"group": group}, min_count=count, max_count=count, return_reservation_id=True)
    )
    servers = (await user.admin.get(f"/servers?reservation_id={answer['reservation_id']}"))["servers"]
    assert len(servers) == count
    for server in servers:
        await user.wait_for(server["id"], "ERROR")
    await cloud.assert_clean()


async def test_the_limit_of_group_members_per_host(cloud: Cloud, user: Caller) -> None:
    group = await _group(user, "anti-affinity", {"max_server_per_host": 2})
    ids = await user.boot_many(2 * len(cloud.hosts), hints={"group": group})
    hosts = [await user.host_of(id) for id in ids]
    assert {hosts.count(host) for host in cloud.hosts} == {2}
    late = await user.create(hints={"group": group})
    await user.wait_for(late, "ERROR")


async def test_racing_into_an_anti_affinity_group(cloud: Cloud, user: Caller) -> None:
    """Each request is scheduled on its own; the claim counts the members of the group."""
    group = await _group(user, "anti-affinity")
    ids = await asyncio.gather(*(user.create(hints={"group": group}) for _ in range(2 * len(cloud.hosts))))
    ends = await asyncio.gather(*(user.wait_for(id, "ACTIVE", "ERROR") for id in ids))
    active = [server["id"] for server in ends if server["status"] == "ACTIVE"]
    assert sorted([await user.host_of(id) for id in active]) == sorted(cloud.hosts)
    await cloud.assert_clean()


@pytest.mark.parametrize("policy", ["soft-affinity", "soft-anti-affinity"])
async def test_soft_policies_prefer(cloud: Cloud, user: Caller, policy: str) -> None:
    group = await _group(user, policy)
    ids = [(await user.boot(hints={"group": group}))["id"] for _ in range(len(cloud.hosts) + 1)]
    hosts = {await user.host_of(id) for id in ids}
    assert len(hosts) == (1 if policy == "soft-affinity" else len(cloud.hosts))


async def test_a_full_group(user: Caller) -> None:
    await user.admin.put(f"/os-quota-sets/{user.project}", {"quota_set": {"server_group_members": 2}})
    group = await _group(user, "soft-anti-affinity")
    await user.boot_many(2, hints={"group": group})
    message = await user.refused(403, "POST", "/servers", user.body({"group": group}))
    assert "too many servers in group" in message
    other = await _group(user, "soft-anti-affinity")
    await user.refused(403, "POST", "/servers", user.body({"group": other}, min_count=3))
    await user.boot(hints={"group": other})


async def test_groups_of_others_do_not_exist(cloud: Cloud, user: Caller) -> None:
    foreign = await _group(cloud.caller(), "affinity")
    message = await user.refused(400, "POST", "/servers", user.body({"group": foreign}))
    assert f"Instance group {foreign} could not be found" in message
    unknown = "99999999-9999-4999-8999-999999999999"
    await user.refused(400, "POST", "/servers", user.body({"group": unknown}))
    await user.refused(400, "POST", "/servers", user.body({"group": "by-name"}))


async def test_hints_are_shown(user: Caller) -> None:
    group = await _group(user, "affinity")
    first = await user.boot()
    assert first["scheduler_hints"] == {}
    hints = {"group": group, "different_host": [first["id"]], "custom": ["a", "b"], "_nova_check_type": "rebuild"}
    server = await user.boot(hints=hints)
    shown = {"group": [group], "different_host": [first["id"]], "custom": ["a", "b"]}
    assert server["scheduler_hints"] == shown
    listed = (await user.get("/servers/detail"))["servers"]
    assert {each["id"]: each["scheduler_hints"] for each in listed} == {first["id"]: {}, server["id"]: shown}
