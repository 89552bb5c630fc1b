"""Every declared route, called by users who may not use it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.service import Route
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, READER, SERVICE, World, world

SECRET = "kept-from-strangers"
NOBODY = "nick@p1/nothing"  # a token for the project, without a role

# Bodies of valid requests by the route's label; {x} stands for the id of a resource.
BODIES: dict[str, Any] = {
    "POST /v2.0/networks": {"network": {"name": "x"}},
    "PUT /v2.0/networks/{id}": {"network": {"name": "x"}},
    "POST /v2.0/subnets": {"subnet": {"network_id": "{network}", "cidr": "10.50.0.0/24", "ip_version": 4}},
    "PUT /v2.0/subnets/{id}": {"subnet": {"name": "x"}},
    "POST /v2.0/subnetpools": {"subnetpool": {"name": "x", "prefixes": ["10.0.0.0/8"]}},
    "PUT /v2.0/subnetpools/{id}": {"subnetpool": {"name": "x"}},
    "POST /v2.0/ports": {"port": {"network_id": "{network}"}},
    "PUT /v2.0/ports/{id}": {"port": {"name": "x"}},
    "POST /v2.0/security-groups": {"security_group": {"name": "x"}},
    "PUT /v2.0/security-groups/{id}": {"security_group": {"name": "x"}},
    "POST /v2.0/security-group-rules": {
        "security_group_rule": {"security_group_id": "{security_group}", "direction": "ingress", "protocol": "udp"}
    },
    "POST /v2.0/default-security-group-rules": {
        "default_security_group_rule": {"direction": "ingress", "protocol": "udp"}
    },
    "POST /v2.0/routers": {"router": {"name": "x"}},
    "PUT /v2.0/routers/{id}": {"router": {"name": "x"}},
    "PUT /v2.0/routers/{id}/add_router_interface": {"subnet_id": "{subnet}"},
    "PUT /v2.0/routers/{id}/remove_router_interface": {"subnet_id": "{subnet}"},
    "PUT /v2.0/routers/{id}/add_extraroutes": {"router": {"routes": []}},
    "PUT /v2.0/routers/{id}/remove_extraroutes": {"router": {"routes": []}},
    "PUT /v2.0/routers/{id}/add_external_gateways": {"router": {"external_gateways": [{"network_id": "{public}"}]}},
    "PUT /v2.0/routers/{id}/update_external_gateways": {"router": {"external_gateways": []}},
    "PUT /v2.0/routers/{id}/remove_external_gateways": {"router": {"external_gateways": {}}},
    "POST /v2.0/address-scopes": {"address_scope": {"ip_version": 4}},
    "PUT /v2.0/address-scopes/{id}": {"address_scope": {"name": "x"}},
    "POST /v2.0/trunks": {"trunk": {"port_id": "{port}"}},
    "PUT /v2.0/trunks/{id}": {"trunk": {"name": "x"}},
    "PUT /v2.0/trunks/{id}/add_subports": {
        "sub_ports": [{"port_id": "{port}", "segmentation_type": "vlan", "segmentation_id": 7}]
    },
    "PUT /v2.0/trunks/{id}/remove_subports": {"sub_ports": [{"port_id": "{port}"}]},
    "POST /v2.0/floatingips": {"floatingip": {"floating_network_id": "{public}", "port_id": "{port}"}},
    "PUT /v2.0/floatingips/{id}": {"floatingip": {"description": "x"}},
    "POST /v2.0/qos/policies": {"policy": {"name": "x"}},
    "PUT /v2.0/qos/policies/{id}": {"policy": {"name": "x"}},
    "POST /v2.0/qos/policies/{id}/bandwidth_limit_rules": {
        "bandwidth_limit_rule": {"max_kbps": 1, "direction": "ingress"}
    },
    "PUT /v2.0/qos/policies/{id}/bandwidth_limit_rules/{rule}": {"bandwidth_limit_rule": {"max_kbps": 1}},
    "POST /v2.0/qos/policies/{id}/dscp_marking_rules": {"dscp_marking_rule": {"dscp_mark": 8}},
    "PUT /v2.0/qos/policies/{id}/dscp_marking_rules/{rule}": {"dscp_marking_rule": {"dscp_mark": 8}},
    "POST /v2.0/qos/policies/{id}/minimum_bandwidth_rules": {
        "minimum_bandwidth_rule": {"min_kbps": 1, "direction": "ingress"}
    },
    "PUT /v2.0/qos/policies/{id}/minimum_bandwidth_rules/{rule}": {"minimum_bandwidth_rule": {"min_kbps": 1}},
    "POST /v2.0/rbac-policies": {
        "rbac_policy": {
            "object_type": "network",
            "object_id": "{network}",
            "action": "access_as_shared",
            "target_tenant": "p9",
        }
    },
    "PUT /v2.0/rbac-policies/{id}": {"rbac_policy": {"target_tenant": "p8"}},
    "PUT /v2.0/agents/{id}": {"agent": {"description": "x"}},
    "PUT /v2.0/quotas/{project}": {"quota": {"port": 1}},
    "POST /v2.0/agent-reports": {"host": "h"},
}
TAGS = {"tags": ["x"]}
RULES = ("bandwidth_limit_rule", "dscp_marking_rule", "minimum_bandwidth_rule")

# Statuses other than 404 for users of another project: nothing of ours is shown, or policy refuses.
STRANGER: dict[str, int] = {
    "GET /v2.0": 200,
    "GET /v2.0/extensions": 200,
    "GET /v2.0/extensions/{alias}": 200,
    "GET /v2.0/availability_zones": 200,
    "GET /v2.0/service-providers": 200,
    "POST /v2.0/networks": 201,
    "POST /v2.0/subnetpools": 201,
    "POST /v2.0/security-groups": 201,
    "POST /v2.0/routers": 201,
    "POST /v2.0/address-scopes": 201,
    "GET /v2.0/qos/rule-types": 200,
    "GET /v2.0/qos/rule-types/{type}": 200,
    "POST /v2.0/default-security-group-rules": 403,
    "GET /v2.0/default-security-group-rules/{id}": 200,
    "DELETE /v2.0/default-security-group-rules/{id}": 403,
    "POST /v2.0/qos/policies": 403,
    "GET /v2.0/network-ip-availabilities": 403,
    "GET /v2.0/network-ip-availabilities/{id}": 403,
    "GET /v2.0/quotas": 403,
    "GET /v2.0/agent-states/{id}": 403,
    "POST /v2.0/agent-reports": 403,
    "GET /v2.0/quotas/{project}": 403,
    "GET /v2.0/quotas/{project}/default": 403,
    "GET /v2.0/quotas/{project}/details": 403,
    "PUT /v2.0/quotas/{project}": 403,
    "DELETE /v2.0/quotas/{project}": 403,
    "GET /v2.0/auto-allocated-topology/{project}": 403,
    "DELETE /v2.0/auto-allocated-topology/{project}": 403,
}


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def resources(cloud: World) -> dict[str, str]:
    """Create one resource of each kind, with a secret in its name."""
    network, subnet = await cloud.network("10.1.0.0/24", name=SECRET)
    public, _ = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
    router = await cloud.make("router", name=SECRET, external_gateway_info={"network_id": public["id"]})
    path = f"/routers/{router['id']}/add_router_interface"
    assert (await cloud.call("PUT", path, {"subnet_id": subnet["id"]})).status == 200
    port = await cloud.make("port", network_id=network["id"], name=SECRET, tags=[SECRET])
    group = await cloud.make("security_group", name=SECRET)
    made = {
        "network": network,
        "subnet": subnet,
        "public": public,
        "router": router,
        "port": port,
        "security_group": group,
        "security_group_rule": group["security_group_rules"][0],
        "default_security_group_rule": (await cloud.list("default_security_group_rule"))[0],
        "floatingip": await cloud.make("floatingip", floating_network_id=public["id"], description=SECRET),
        "subnetpool": await cloud.make("subnetpool", name=SECRET, prefixes=["10.77.0.0/16"]),
        "policy": await cloud.make("policy", ADMIN, name=SECRET, project_id="p1"),
    }
    made["address_scope"] = await cloud.make("address_scope", ip_version=4, name=SECRET)
    parent = await cloud.make("port", network_id=network["id"], name=SECRET)
    made["trunk"] = await cloud.make("trunk", port_id=parent["id"], name=SECRET)
    made["rbac_policy"] = await cloud.make(
        "rbac_policy", object_type="network", object_id=network["id"], action="access_as_shared", target_tenant=SECRET
    )
    for kind, rule in (
        ("bandwidth_limit_rule", {"max_kbps": 1}), ("dscp_marking_rule", {"dscp_mark": 26}),
        ("minimum_bandwidth_rule", {"min_kbps": 1}),
    ):  # fmt: skip
        answer = await cloud.call("POST", f"/qos/policies/{made['policy']['id']}/{kind}s", {kind: rule}, token=ADMIN)
        made[kind] = answer.json()[kind]
    return {name: str(thing["id"]) for name, thing in made.items()}


def kind_of(route: Route) -> str:
    """Return the kind of resource that a route's {id} names."""
    name = [*route.path.removeprefix("/v2.0/qos").removeprefix("/v2.0").split("/"), ""][1].replace("-", "_")
    special = {"network_ip_availabilities": "network", "policies": "policy", "rbac_policies": "rbac_policy"}
    return special.get(name, name.removesuffix("s"))


def filled(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(item, known) for key, item in value.items()}
    return known.get(value[1:-1], value) if isinstance(value, str) and value.startswith("{") else value


async def send(cloud: World, route: Route, known: dict[str, str], token: str | None) -> tuple[int, bytes]:
    id = known.get(kind_of(route), "nothing")
    rule = known[next((each for each in RULES if each in route.path), RULES[0])]
    path = route.path.format(id=id, project="p1", tag="t", alias="router", rule=rule, type="bandwidth_limit")
    body = BODIES.get(route.label)
    if route.body is not None and body is None:
        body = TAGS
    answer = await cloud.call(
        route.method, f"/{path}", filled(body, known) if route.body is not None else None, token=token
    )
    return answer.status, answer.body


def guarded(cloud: World) -> list[Route]:
    return [route for route in cloud.role.service.routes if route.policy is not None]


async def test_without_a_token_nothing_is_told(cloud: World) -> None:
    known = await resources(cloud)
    for token in (None, "", "forged"):
        for route in guarded(cloud):
            status, body = await send(cloud, route, known, token)
            assert status == 401, route.label
            assert SECRET.encode() not in body


async def test_strangers_see_nothing_and_change_nothing(cloud: World) -> None:
    known = await resources(cloud)
    before = {kind: await cloud.list(kind) for kind in ("network", "subnet", "port", "router", "security_group")}
    for route in guarded(cloud):
        status, body = await send(cloud, route, known, BOB)
        assert SECRET.encode() not in body, route.label
        collection = route.method == "GET" and "{" not in route.path
        expected = STRANGER.get(route.label, 200 if collection else 404)
        assert status == expected, (route.label, status, body)
    assert before == {kind: await cloud.list(kind) for kind in before}


async def test_readers_change_nothing(cloud: World) -> None:
    known = await resources(cloud)
    for route in guarded(cloud):
        status, body = await send(cloud, route, known, READER)
        if route.method == "GET":
            admins = ("get_agent", "get_agent_state", "get_network_ip_availability")
            missing = route.path.endswith("/tags/{tag}")
            refused = route.label in ("GET /v2.0/quotas", "GET /v2.0/auto-allocated-topology/{project}")
            if route.policy in admins:
                assert status in (200, 403, 404), route.label
                assert SECRET.encode() not in body
            elif missing:
                assert status == 404, route.label
            elif refused:
                assert status in (403, 409), route.label
            else:
                assert status == 200, (route.label, status, body)
        else:
            expected = 404 if "/agents/" in route.path else 403
            assert status == expected, (route.label, status, body)


async def test_a_token_without_roles_sees_nothing(cloud: World) -> None:
    known = await resources(cloud)
    for route in guarded(cloud):
        status, body = await send(cloud, route, known, NOBODY)
        assert SECRET.encode() not in body, route.label
        assert route.method == "GET" or status in (403, 404), (route.label, status)


async def test_shared_and_external_networks_are_seen_but_not_changed(cloud: World) -> None:
    network, subnet = await cloud.network("10.1.0.0/24", ADMIN, shared=True)
    public, outer = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
    theirs = await cloud.make("port", ADMIN, network_id=network["id"], name=SECRET)
    for each in (network, public):
        shown = await cloud.show("network", each["id"], BOB)
        assert not [name for name in shown if name.startswith("provider:")]
        for method, body in (("PUT", {"network": {"name": "x"}}), ("DELETE", None)):
            assert (await cloud.call(method, f"/networks/{each['id']}", body, token=BOB)).status == 403
    for each in (subnet, outer):
        assert (await cloud.call("GET", f"/subnets/{each['id']}", token=BOB)).status == 200
        assert (await cloud.call("DELETE", f"/subnets/{each['id']}", token=BOB)).status == 403
    body = {"subnet": {"network_id": network["id"], "cidr": "10.2.0.0/24"}}
    assert (await cloud.call("POST", "/subnets", body, token=BOB)).status == 403
    mine = await cloud.make("port", BOB, network_id=network["id"])
    assert [port["id"] for port in await cloud.list("port", token=BOB)] == [mine["id"]]
    assert (await cloud.call("GET", f"/ports/{theirs['id']}", token=BOB)).status == 404
    for wanted in (
        {"fixed_ips": [{"ip_address": "10.1.0.9"}]},
        {"mac_address": "fa:16:3e:00:00:01"},
        {"port_security_enabled": False},
        {"allowed_address_pairs": [{"ip_address": "10.1.0.1"}]},
        {"device_owner": "network:dhcp"},
    ):
        port: dict[str, Any] = {"network_id": network["id"]} | wanted
        assert (await cloud.call("POST", "/ports", {"port": port}, token=BOB)).status == 403, wanted
    body = {"port": {"network_id": network["id"]}}
    assert (await cloud.call("POST", "/ports", body, token="rob@p2/reader")).status == 403
    body = {"port": {"network_id": public["id"]}}
    assert (await cloud.call("POST", "/ports", body, token=BOB)).status == 403
    # The owner of a network sees every port on it.
    assert mine["id"] in {port["id"] for port in await cloud.list("port", token=ADMIN)}


async def test_the_service_user_acts_for_projects(cloud: World) -> None:
    network, _ = await cloud.network()
    port = await cloud.make("port", SERVICE, network_id=network["id"], project_id="p1", binding__host_id="h")
    assert (await cloud.show("port", port["id"]))["project_id"] == "p1"
    assert len(await cloud.list("network", token=SERVICE)) == 1
    assert (await cloud.call("DELETE", f"/networks/{network['id']}", token=SERVICE)).status == 403
    body = {"port": {"network_id": network["id"], "project_id": "p2"}}
    assert (await cloud.call("POST", "/ports", body, token=ALICE)).status == 400
    await cloud.delete("port", port["id"], SERVICE)
