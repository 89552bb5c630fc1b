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
