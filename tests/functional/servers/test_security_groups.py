"""The security groups of existing servers."""

from typing import Any

from tests.functional.cloud import Caller, Cloud, CloudOptions
from tests.functional.servers.embedded_services import make, network, ok, ports_of
from tests.schemas.tempest import check

CLOUD = CloudOptions(roles=("network",))


async def _names(user: Caller, id: str) -> list[str]:
    return [group["name"] for group in (await user.get(f"/servers/{id}"))["server"].get("security_groups", [])]


async def _change(user: Caller, id: str, action: str, name: str) -> None:
    await user.act(id, action, {"name": name}, 202)


async def _groups_of_ports(user: Caller, id: str) -> list[set[str]]:
    return [set(port["security_groups"]) for port in await ports_of(user, id)]


async def _server(user: Caller, **wanted: Any) -> str:
    first, second = await network(user), await network(user, cidr="10.8.0.0/24")
    networks = [{"uuid": first["id"]}, {"uuid": second["id"]}]
    return str((await user.boot(networks=networks, **wanted))["id"])


async def test_groups_come_and_go_on_every_port(user: Caller) -> None:
    id = await _server(user)
    web = await make(user, "security_group", name="web", description="open")
    [default] = (await ok(user, "GET", "/network/v2.0/security-groups?name=default"))["security_groups"]
    assert await _names(user, id) == ["default"]

    await _change(user, id, "addSecurityGroup", "web")
    assert await _groups_of_ports(user, id) == [{default["id"], web["id"]}] * 2
    assert await _names(user, id) == ["default", "web"]
    await _change(user, id, "addSecurityGroup", web["id"])  # has it already

    for group in ("default", web["id"]):
        await _change(user, id, "removeSecurityGroup", group)
    assert await _groups_of_ports(user, id) == [set(), set()]
    assert await _names(user, id) == []
    assert "not associated" in await user.refused(
        404, "POST", f"/servers/{id}/action", {"removeSecurityGroup": {"name": "web"}}
    )


async def test_they_are_shown_with_their_rules(user: Caller) -> None:
    id = await _server(user)
    group = await make(user, "security_group", name="web", description="open")
    for more in (
        {"protocol": "tcp", "port_range_min": 80, "port_range_max": 81, "remote_ip_prefix": "192.0.2.0/24"},
        {"protocol": "icmp"},
        {"remote_group_id": group["id"]},
    ):
        await make(user, "security_group_rule", security_group_id=group["id"], direction="ingress", **more)
    await _change(user, id, "addSecurityGroup", "web")
    answer = await user.request("GET", f"/servers/{id}/os-security-groups")
    check("security_groups", "list_security_groups", 1, answer.status, answer.json())
    default, web = answer.json()["security_groups"]
    assert (default["name"], web["name"], web["description"], web["tenant_id"]) == (
        "default", "web", "open", user.project,
    )  # fmt: skip
    rules = {(r["ip_protocol"], r["from_port"], r["to_port"], *r["ip_range"].values()) for r in web["rules"]}
    assert rules == {("tcp", 80, 81, "192.0.2.0/24"), ("icmp", -1, -1, "0.0.0.0/0"), (None, None, None)}
    assert [r["group"] for r in web["rules"] if r["group"]] == [{"name": "web", "tenant_id": user.project}]


async def test_a_group_and_a_network_that_another_project_shares(user: Caller, cloud: Cloud) -> None:
    other = cloud.caller()
    lent, where = await make(other, "security_group", name="lent"), await network(other)
    for kind, thing in (("security_group", lent), ("network", where)):
        entry = {
            "object_type": kind, "object_id": thing["id"], "action": "access_as_shared", "target_tenant": user.project,
        }  # fmt: skip
        await ok(other, "POST", "/network/v2.0/rbac-policies", {"rbac_policy": entry})
    server = await user.boot(networks=[{"uuid": where["id"]}], security_groups=[{"name": lent["id"]}])
    assert await _groups_of_ports(user, server["id"]) == [{lent["id"]}]
    assert await _names(user, server["id"]) == ["lent"]
    await _change(user, server["id"], "removeSecurityGroup", lent["id"])
    await _change(user, server["id"], "addSecurityGroup", lent["id"])


async def test_the_groups_of_a_network_that_is_made_for_the_server(user: Caller, cloud: Cloud) -> None:
    """They are found again by name when the server is built, so they can only be groups of its own project."""
    listed = (await ok(user.admin, "GET", "/network/v2.0/networks?shared=true"))["networks"]
    for each in listed:  # else the server is on one of them
        await ok(user.admin, "PUT", f"/network/v2.0/networks/{each['id']}", {"network": {"shared": False}})
    try:
        own, other = await make(user, "security_group", name="own"), cloud.caller()
        strangers = await make(cloud.caller(), "security_group", name="strangers'")
        [default] = (await ok(other, "GET", "/network/v2.0/security-groups?name=default"))["security_groups"]
        for lent in (await make(other, "security_group", name=strangers["id"]), default):
            entry = {
                "object_type": "security_group", "object_id": lent["id"], "action": "access_as_shared",
                "target_tenant": user.project,
            }  # fmt: skip
            await ok(other, "POST", "/network/v2.0/rbac-policies", {"rbac_policy": entry})
            body = user.body(networks="auto", security_groups=[{"name": lent["id"]}])
            assert "security group" in await user.refused(400, "POST", "/servers", body)
        server = await user.boot(networks="auto", security_groups=[{"name": own["id"]}])
        assert await _groups_of_ports(user, server["id"]) == [{own["id"]}]
    finally:
        for each in listed:
            await ok(user.admin, "PUT", f"/network/v2.0/networks/{each['id']}", {"network": {"shared": True}})


async def test_the_name_of_a_lent_group_means_nothing(user: Caller, cloud: Cloud) -> None:
    other, where = cloud.caller(), await network(user)
    own, lent = await make(user, "security_group", name="web"), await make(other, "security_group", name="web")
    entry = {
        "object_type": "security_group", "object_id": lent["id"], "action": "access_as_shared",
        "target_tenant": user.project,
    }  # fmt: skip
    await ok(other, "POST", "/network/v2.0/rbac-policies", {"rbac_policy": entry})
    server = await user.boot(
        networks=[{"uuid": where["id"]}], security_groups=[{"name": "web"}, {"name": lent["id"]}]
    )  # fmt: skip
    assert await _groups_of_ports(user, server["id"]) == [{own["id"], lent["id"]}]


async def test_what_is_refused(user: Caller, cloud: Cloud) -> None:
    id = await _server(user)
    path = f"/servers/{id}/action"
    foreign = await make(cloud.caller(), "security_group", name="theirs")
    for name in ("no-such", foreign["id"], "theirs"):
        assert name in await user.refused(404, "POST", path, {"addSecurityGroup": {"name": name}})
    for _ in range(2):
        await make(user, "security_group", name="twice")
    assert "use an ID" in await user.refused(409, "POST", path, {"addSecurityGroup": {"name": "twice"}})
    for bad in ({}, {"name": ""}, {"name": 5}, {"name": "x" * 256}, {"name": "x", "id": "y"}, None):
        assert await user.refused(400, "POST", path, {"addSecurityGroup": bad})
    open_port = await make(user, "port", network_id=(await network(user))["id"], port_security_enabled=False)
    bare = (await user.boot(networks=[{"port": open_port["id"]}]))["id"]
    said = await user.refused(400, "POST", f"/servers/{bare}/action", {"addSecurityGroup": {"name": "default"}})
    assert "cannot be applied" in said
    assert await _names(user, id) == ["default"]
