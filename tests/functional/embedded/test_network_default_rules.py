"""Default security group rules: what new security groups begin with; on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, World, error, quota_drift, world

KIND = "default_security_group_rule"
PATH = "/default-security-group-rules"


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


def shown(rules: Any) -> set[tuple[Any, ...]]:
    names = ("direction", "ethertype", "protocol", "port_range_min", "port_range_max", "remote_ip_prefix")
    return {tuple(rule[name] for name in (*names, "remote_group_id")) for rule in rules}


def anything(direction: str, remote: str | None = None) -> set[tuple[Any, ...]]:
    return {(direction, ethertype, None, None, None, None, remote) for ethertype in ("IPv4", "IPv6")}


async def default_group(cloud: World, token: str = ALICE) -> Any:
    [found] = await cloud.list("security_group", "name=default", token)
    return found


async def test_a_cloud_begins_with_the_rules_that_neutron_has(cloud: World) -> None:
    rules = await cloud.list(KIND)
    assert shown(rules) == anything("egress") | anything("ingress", "PARENT")
    assert {(r["direction"], r["used_in_default_sg"], r["used_in_non_default_sg"]) for r in rules} == {
        ("egress", True, True), ("ingress", True, False),
    }  # fmt: skip
    first = await default_group(cloud)
    assert shown(first["security_group_rules"]) == anything("egress") | anything("ingress", first["id"])
    made = await cloud.make("security_group", name="g")
    assert shown(made["security_group_rules"]) == anything("egress")
    # A restart does not bring back what an admin has deleted.
    for rule in rules:
        await cloud.delete(KIND, rule["id"], ADMIN)
    await cloud.role.stop()
    await cloud.role.start()
    assert await cloud.list(KIND) == []
    assert (await cloud.make("security_group", name="h"))["security_group_rules"] == []


async def test_new_groups_get_the_rules(cloud: World) -> None:
    ssh = {"direction": "ingress", "protocol": "tcp", "port_range_min": "22", "port_range_max": 22}
    made = await cloud.make(KIND, ADMIN, **ssh, remote_ip_prefix="192.0.2.0/24", description="ssh")
    assert made == {
        "id": made["id"], "description": "ssh", "direction": "ingress", "ethertype": "IPv4", "protocol": "tcp",
        "port_range_min": 22, "port_range_max": 22, "remote_ip_prefix": "192.0.2.0/24", "remote_group_id": None,
        "remote_address_group_id": None, "used_in_default_sg": False, "used_in_non_default_sg": True,
    }  # fmt: skip
    assert await cloud.show(KIND, made["id"]) == made
    assert await cloud.list(KIND, "protocol=tcp&used_in_default_sg=false") == [made]
    bastion = await cloud.make("security_group", ADMIN, name="bastion")
    flags = {"used_in_default_sg": True, "used_in_non_default_sg": False}
    udp = await cloud.make(KIND, ADMIN, direction="ingress", protocol="udp", remote_group_id=bastion["id"], **flags)
    assert await cloud.list(KIND, f"remote_group_id={bastion['id']}") == [udp]
    assert len(await cloud.list(KIND, "remote_group_id=PARENT")) == 2
    first = await default_group(cloud)
    found = shown(first["security_group_rules"])
    assert ("ingress", "IPv4", "udp", None, None, None, bastion["id"]) in found and len(found) == 5
    group = await cloud.make("security_group", name="g")
    found = shown(group["security_group_rules"])
    assert found == anything("egress") | {("ingress", "IPv4", "tcp", 22, 22, "192.0.2.0/24", None)}
    assert [r["description"] for r in group["security_group_rules"] if r["protocol"] == "tcp"] == ["ssh"]
    # They belong to the new group: who may change it may delete them, and quotas count them.
    await cloud.delete("security_group_rule", group["security_group_rules"][0]["id"])
    quota = {"quota": {"security_group_rule": 9}}
    assert (await cloud.call("PUT", "/quotas/p1", quota, token=ADMIN)).status == 200
    over = await cloud.call("POST", "/security-groups", {"security_group": {"name": "h"}})
    assert (over.status, error(over)) == (409, "OverQuota")
    # A rule goes with the group that it names; groups that exist do not change with the defaults.
    await cloud.delete("security_group", bastion["id"], ADMIN)
    assert await cloud.list(KIND, "protocol=udp") == []
    await cloud.delete(KIND, made["id"], ADMIN)
    assert len((await cloud.show("security_group", group["id"]))["security_group_rules"]) == 2


async def test_only_admins_change_them(cloud: World) -> None:
    rule = (await cloud.list(KIND, token=BOB))[0]
    body = {KIND: {"direction": "ingress", "protocol": "tcp"}}
    assert (await cloud.call("POST", PATH, body)).status == 403
    assert (await cloud.call("DELETE", f"{PATH}/{rule['id']}")).status == 403
    assert (await cloud.call("PUT", f"{PATH}/{rule['id']}", body, token=ADMIN)).status == 405
    gone = await cloud.call("GET", f"{PATH}/nothing", token=ADMIN)
    assert (gone.status, error(gone)) == (404, "DefaultSecurityGroupRuleNotFound")


async def test_what_makes_no_sense_is_refused(cloud: World) -> None:
    for bad in (
        {}, {"direction": "up"}, {"direction": "ingress", "protocol": "pigeon"}, {"direction": 1},
        {"direction": "ingress", "port_range_min": 1}, {"direction": "ingress", "ethertype": "IPX"},
        {"direction": "ingress", "remote_ip_prefix": "x"}, {"direction": "ingress", "used_in_default_sg": "maybe"},
        {"direction": "ingress", "remote_ip_prefix": "10.0.0.0/8", "remote_group_id": "PARENT"},
        {"direction": "ingress", "project_id": "p1"}, {"direction": "ingress", "description": "x" * 256},
    ):  # fmt: skip
        assert (await cloud.call("POST", PATH, {KIND: bad}, token=ADMIN)).status == 400, bad
    for same in ({"direction": "egress"}, {"direction": "ingress", "remote_group_id": "PARENT"}):
        answer = await cloud.call("POST", PATH, {KIND: same}, token=ADMIN)
        assert (answer.status, error(answer)) == (409, "DefaultSecurityGroupRuleExists")
    twice = [{"direction": "ingress", "protocol": "tcp"}] * 2
    answer = await cloud.call("POST", PATH, {f"{KIND}s": twice}, token=ADMIN)
    assert (answer.status, error(answer)) == (409, "DuplicateDefaultSgRuleInPost")
    answer = await cloud.call("POST", PATH, {KIND: {"direction": "ingress", "remote_group_id": "nothing"}}, token=ADMIN)
    assert (answer.status, error(answer)) == (404, "SecurityGroupNotFound")
