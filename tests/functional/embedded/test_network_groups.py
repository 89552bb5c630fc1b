"""Security groups and rules, on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, READER, World, error, quota_drift, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


async def rule(cloud: World, group: str, token: str = ALICE, **fields: Any) -> Any:
    body = {"security_group_rule": {"security_group_id": group, "direction": "ingress", **fields}}
    return await cloud.call("POST", "/security-group-rules", body, token=token)


async def test_every_project_has_a_default_group(cloud: World) -> None:
    [group] = await cloud.list("security_group", token=READER)
    assert (group["name"], group["description"], group["stateful"]) == ("default", "Default security group", True)
    rules = {(r["direction"], r["ethertype"], r["remote_group_id"]) for r in group["security_group_rules"]}
    assert rules == {
        ("egress", "IPv4", None), ("egress", "IPv6", None),
        ("ingress", "IPv4", group["id"]), ("ingress", "IPv6", group["id"]),
    }  # fmt: skip
    assert [each["id"] for each in await cloud.list("security_group")] == [group["id"]]
    [other] = await cloud.list("security_group", token=BOB)
    assert other["id"] != group["id"]
    # An admin may delete a project's default security group; it is created again when needed.
    [found] = await cloud.list("security_group", "tenant_id=p9&name=default", ADMIN)
    assert found["project_id"] == "p9"
    await cloud.delete("security_group", found["id"], ADMIN)
    mine = await cloud.call("DELETE", f"/security-groups/{group['id']}")
    assert (mine.status, error(mine)) == (409, "SecurityGroupCannotRemoveDefault")
    renamed = await cloud.call("PUT", f"/security-groups/{group['id']}", {"security_group": {"name": "x"}})
    assert (renamed.status, error(renamed)) == (409, "SecurityGroupCannotUpdateDefault")
    again = await cloud.call("POST", "/security-groups", {"security_group": {"name": "default"}})
    assert (again.status, error(again)) == (409, "SecurityGroupDefaultAlreadyExists")


async def test_a_group_lives(cloud: World) -> None:
    group = await cloud.make("security_group", name="web", description="d", stateful=False, tags=["t"])
    assert sorted((r["direction"], r["ethertype"]) for r in group["security_group_rules"]) == [
        ("egress", "IPv4"), ("egress", "IPv6"),
    ]  # fmt: skip
    assert (group["stateful"], group["tags"], group["shared"]) == (False, ["t"], False)
    assert (await cloud.change("security_group", group["id"], name="www"))["name"] == "www"
    network, _ = await cloud.network()
    port = await cloud.make("port", network_id=network["id"], security_groups=[group["id"]])
    for method, body in (("DELETE", None), ("PUT", {"security_group": {"stateful": True}})):
        answer = await cloud.call(method, f"/security-groups/{group['id']}", body)
        assert (answer.status, error(answer)) == (409, "SecurityGroupInUse")
    await cloud.delete("port", port["id"])
    await cloud.delete("security_group", group["id"])


async def test_a_rule_shows_what_clients_expect(cloud: World) -> None:
    group = await cloud.make("security_group", name="g")
    answer = await rule(cloud, group["id"], protocol="tcp", port_range_min="22", port_range_max=22,
                        remote_ip_prefix="10.0.0.7/24", description="ssh")  # fmt: skip
    made = answer.json()["security_group_rule"]
    assert answer.status == 201
    assert made == {
        "id": made["id"], "project_id": "p1", "tenant_id": "p1", "security_group_id": group["id"],
        "direction": "ingress", "ethertype": "IPv4", "protocol": "tcp", "port_range_min": 22, "port_range_max": 22,
        "remote_ip_prefix": "10.0.0.7/24", "normalized_cidr": "10.0.0.0/24", "remote_group_id": None,
        "remote_address_group_id": None, "belongs_to_default_sg": False, "description": "ssh", "tags": [],
        "revision_number": 0, "created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    assert await cloud.show("security_group_rule", made["id"]) == made
    assert (await cloud.show("security_group", group["id"]))["revision_number"] == 2
    listed = await cloud.list("security_group_rule", f"security_group_id={group['id']}&direction=ingress")
    assert [each["id"] for each in listed] == [made["id"]]
    await cloud.delete("security_group_rule", made["id"])
    assert (await cloud.call("PUT", f"/security-group-rules/{made['id']}", {})).status == 405


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({}, {}),
        ({"protocol": "tcp"}, {"protocol": 6}),
        ({"protocol": "tcp"}, {"protocol": "6"}),
        ({"protocol": "any"}, {"protocol": None}),
        ({}, {"remote_ip_prefix": "0.0.0.0/0"}),
        ({"remote_ip_prefix": "10.0.0.1/24"}, {"remote_ip_prefix": "10.0.0.2/24"}),
        ({"ethertype": "IPv6", "protocol": "icmpv6"}, {"ethertype": "ipv6", "protocol": "ipv6-icmp"}),
        ({"ethertype": "IPv6", "protocol": "icmp"}, {"ethertype": "IPv6", "protocol": "58"}),
    ],
)
async def test_the_same_rule_twice(cloud: World, one: dict[str, Any], two: dict[str, Any]) -> None:
    group = await cloud.make("security_group", name="g")
    first = (await rule(cloud, group["id"], **one)).json()["security_group_rule"]
    answer = await rule(cloud, group["id"], **two)
    assert (answer.status, error(answer)) == (409, "SecurityGroupRuleExists")
    assert first["id"] in answer.json()["NeutronError"]["message"]
    bodies = [{"security_group_id": group["id"], "direction": "egress", "protocol": "udp"}] * 2
    answer = await cloud.call("POST", "/security-group-rules", {"security_group_rules": bodies})
    assert (answer.status, error(answer)) == (409, "DuplicateSecurityGroupRuleInPost")


@pytest.mark.parametrize(
    ("fields", "type_"),
    [
        ({"direction": "sideways"}, "HTTPBadRequest"),
        ({"ethertype": "IPv5"}, "SecurityGroupRuleInvalidEtherType"),
        ({"protocol": "tpc"}, "SecurityGroupRuleInvalidProtocol"),
        ({"protocol": 256}, "SecurityGroupRuleInvalidProtocol"),
        ({"protocol": -1}, "SecurityGroupRuleInvalidProtocol"),
        ({"protocol": "tcp", "port_range_min": 5}, "SecurityGroupInvalidPortRange"),
        ({"protocol": "tcp", "port_range_max": 5}, "SecurityGroupInvalidPortRange"),
        ({"protocol": "tcp", "port_range_min": 9, "port_range_max": 5}, "SecurityGroupInvalidPortRange"),
        ({"protocol": "tcp", "port_range_min": 0, "port_range_max": 5}, "SecurityGroupInvalidPortValue"),
        ({"protocol": "udp", "port_range_min": 5, "port_range_max": 65536}, "SecurityGroupInvalidPortValue"),
        ({"protocol": "gre", "port_range_min": 5, "port_range_max": 5}, "SecurityGroupInvalidProtocolForPort"),
        ({"port_range_min": 5, "port_range_max": 5}, "SecurityGroupProtocolRequiredWithPorts"),
        ({"protocol": "icmp", "port_range_min": 256}, "SecurityGroupInvalidIcmpValue"),
        ({"protocol": "icmp", "port_range_min": 8, "port_range_max": 300}, "SecurityGroupInvalidIcmpValue"),
        ({"protocol": "icmp", "port_range_max": 0}, "SecurityGroupMissingIcmpType"),
        ({"protocol": "icmpv6"}, "SecurityGroupEthertypeConflictWithProtocol"),
        ({"protocol": "ipv6-frag"}, "SecurityGroupEthertypeConflictWithProtocol"),
        ({"remote_ip_prefix": "10.0.0.0/33"}, "InvalidCIDR"),
        ({"remote_ip_prefix": "fd00::/8"}, "SecurityGroupRuleParameterConflict"),
        ({"remote_ip_prefix": "10.0.0.0/8", "remote_group_id": "SELF"}, "SecurityGroupMultipleRemoteEntites"),
        ({"port_range_min": "x"}, "HTTPBadRequest"),
        ({"remote_address_group_id": "x"}, "HTTPBadRequest"),
    ],
)
async def test_rules_that_no_firewall_could_have(cloud: World, fields: dict[str, Any], type_: str) -> None:
    group = await cloud.make("security_group", name="g")
    fields = {name: group["id"] if value == "SELF" else value for name, value in fields.items()}
    answer = await rule(cloud, group["id"], **fields)
    assert (answer.status, error(answer)) == (400, type_), answer.body


async def test_rules_between_groups(cloud: World) -> None:
    web, database = [await cloud.make("security_group", name=name) for name in ("web", "db")]
    made = await rule(cloud, database["id"], remote_group_id=web["id"], protocol="tcp",
                      port_range_min=5432, port_range_max=5432)  # fmt: skip
    assert made.json()["security_group_rule"]["remote_group_id"] == web["id"]
    foreign = await cloud.make("security_group", BOB, name="web")
    for fields in ({"remote_group_id": foreign["id"]}, {"remote_group_id": "nothing"}):
        answer = await rule(cloud, database["id"], **fields)
        assert (answer.status, error(answer)) == (404, "SecurityGroupNotFound")
    answer = await rule(cloud, foreign["id"])
    assert (answer.status, error(answer)) == (404, "SecurityGroupNotFound")
    untouched = await cloud.make("security_group", name="untouched")
    before = (await cloud.show("security_group", database["id"]))["revision_number"]
    await cloud.delete("security_group", web["id"])
    after = await cloud.show("security_group", database["id"])
    assert len(after["security_group_rules"]) == 2
    assert after["revision_number"] == before + 1, "it has lost a rule"
    assert await cloud.show("security_group", untouched["id"]) == untouched


async def test_a_group_that_is_not_deleted_changes_no_other(cloud: World) -> None:
    net, _ = await cloud.network()
    web, database = [await cloud.make("security_group", name=name) for name in ("web", "db")]
    assert (await rule(cloud, database["id"], remote_group_id=web["id"])).status == 201
    await cloud.make("port", network_id=net["id"], security_groups=[web["id"]])
    groups = [await cloud.show("security_group", each["id"]) for each in (web, database)]
    answer = await cloud.call("DELETE", f"/security-groups/{web['id']}")
    assert (answer.status, error(answer)) == (409, "SecurityGroupInUse")
    assert [await cloud.show("security_group", each["id"]) for each in (web, database)] == groups


async def test_quota_of_groups_and_rules(cloud: World) -> None:
    await cloud.list("security_group")
    await cloud.call("PUT", "/quotas/p1", {"quota": {"security_group": 2, "security_group_rule": 7}}, token=ADMIN)
    group = await cloud.make("security_group", name="a")
    full = await cloud.call("POST", "/security-groups", {"security_group": {"name": "b"}})
    assert (full.status, error(full)) == (409, "OverQuota")
    assert (await rule(cloud, group["id"], protocol="tcp")).status == 201
    full = await rule(cloud, group["id"], protocol="udp")
    assert (full.status, error(full)) == (409, "OverQuota")
