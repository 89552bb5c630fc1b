"""QoS policies: who creates them, who may use them, and the limits that agents get."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.client import Answer
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, MANAGER, SERVICE, World, error, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def limit(cloud: World, policy: dict[str, Any], kbps: int, direction: str = "egress", **more: Any) -> Answer:
    body = {"bandwidth_limit_rule": {"max_kbps": kbps, "direction": direction, **more}}
    return await cloud.call("POST", f"/qos/policies/{policy['id']}/bandwidth_limit_rules", body, token=ADMIN)


async def limits(cloud: World, port: dict[str, Any]) -> tuple[Any, Any]:
    """Return the limits of a port that the agent of host h gets: ingress, egress."""
    state = (await cloud.call("GET", "/agent-states/h", token=SERVICE)).json()["state"]
    [found] = [each for each in state["ports"] if each["id"] == port["id"]]
    return found.get("ingress", {}).get("max_kbps"), found.get("egress", {}).get("max_kbps")


async def plugged(cloud: World, network: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return await cloud.make(
        "port", SERVICE, network_id=network["id"], project_id="p1", device_id="s", device_owner="compute:nova",
        binding__host_id="h", **fields,
    )  # fmt: skip


async def test_a_policy_shows_what_clients_expect(cloud: World) -> None:
    made = await cloud.make("policy", ADMIN, name="slow", description="d", project_id="p1", tags=["b", "a"])
    assert made == {
        "id": made["id"], "name": "slow", "description": "d", "project_id": "p1", "tenant_id": "p1", "shared": False,
        "is_default": False, "rules": [], "tags": ["a", "b"], "revision_number": 0,
        "created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    answer = await limit(cloud, made, 1000, max_burst_kbps="800")
    assert answer.status == 201
    rule = answer.json()["bandwidth_limit_rule"]
    assert rule == {"id": rule["id"], "max_kbps": 1000, "max_burst_kbps": 800, "direction": "egress"}
    shown = await cloud.show("policy", made["id"])
    assert shown["rules"] == [{**rule, "qos_policy_id": made["id"], "type": "bandwidth_limit"}]
    assert shown["revision_number"] == 1
    path = f"/qos/policies/{made['id']}/bandwidth_limit_rules"
    assert (await cloud.call("GET", path)).json() == {"bandwidth_limit_rules": [rule]}
    assert (await cloud.call("GET", f"{path}?direction=ingress")).json() == {"bandwidth_limit_rules": []}
    assert (await cloud.call("GET", f"{path}/{rule['id']}")).json() == {"bandwidth_limit_rule": rule}
    changed = await cloud.call(
        "PUT", f"{path}/{rule['id']}", {"bandwidth_limit_rule": {"max_kbps": 5, "direction": "ingress"}}, token=ADMIN
    )
    assert changed.json() == {"bandwidth_limit_rule": {**rule, "max_kbps": 5, "direction": "ingress"}}
    assert (await cloud.call("DELETE", f"{path}/{rule['id']}", token=ADMIN)).status == 204
    gone = await cloud.call("GET", f"{path}/{rule['id']}")
    assert (gone.status, error(gone)) == (404, "QosRuleNotFound")


async def test_tags_of_policies_are_also_where_neutron_has_them(cloud: World) -> None:
    made = await cloud.make("policy", ADMIN, project_id="p1", tags=["a"])
    assert (await cloud.call("PUT", f"/policies/{made['id']}/tags/b", token=ADMIN)).status == 201
    for path in ("policies", "qos/policies"):
        assert (await cloud.call("GET", f"/{path}/{made['id']}/tags")).json() == {"tags": ["a", "b"]}
        assert (await cloud.call("GET", f"/{path}/{made['id']}/tags", token=BOB)).status == 404


async def test_rule_types(cloud: World) -> None:
    kinds = [{"type": "bandwidth_limit"}, {"type": "dscp_marking"}, {"type": "minimum_bandwidth"}]
    assert (await cloud.call("GET", "/qos/rule-types")).json() == {"rule_types": kinds}
    assert (await cloud.call("GET", "/qos/rule-types?type=dscp_marking")).json() == {"rule_types": kinds[1:2]}
    for (token, told), kind in itertools.product(((ALICE, False), (ADMIN, True)), kinds):
        shown = (await cloud.call("GET", f"/qos/rule-types/{kind['type']}", token=token)).json()["rule_type"]
        assert ("drivers" in shown) is told
    assert (await cloud.call("GET", "/qos/rule-types/minimum_packet_rate")).status == 404
    assert (await cloud.call("GET", "/qos/rule-types?all_rules=true")).json()["rule_types"] == kinds


async def test_rules_for_a_minimum_bandwidth(cloud: World) -> None:
    policy = await cloud.make("policy", ADMIN, shared=True)
    path, kind = f"/qos/policies/{policy['id']}/minimum_bandwidth_rules", "minimum_bandwidth_rule"
    for bad in ({}, {"min_kbps": -1}, {"min_kbps": "x"}, {"min_kbps": 1, "direction": "any"}, {"max_kbps": 1}):
        assert (await cloud.call("POST", path, {kind: bad}, token=ADMIN)).status == 400, bad
    assert (await cloud.call("POST", path, {kind: {"min_kbps": 1}})).status == 403
    rule = (await cloud.call("POST", path, {kind: {"min_kbps": "1000"}}, token=ADMIN)).json()[kind]
    assert rule == {"id": rule["id"], "min_kbps": 1000, "direction": "egress"}
    assert (await cloud.call("GET", path)).json() == {f"{kind}s": [rule]}
    second = await cloud.call("POST", path, {kind: {"min_kbps": 5}}, token=ADMIN)
    assert (second.status, error(second)) == (409, "QoSRulesConflict")
    # A limit is not below the minimum in the same direction.
    limits, parameter = f"/qos/policies/{policy['id']}/bandwidth_limit_rules", (409, "QoSRuleParameterConflict")
    low = await cloud.call("POST", limits, {"bandwidth_limit_rule": {"max_kbps": 999}}, token=ADMIN)
    assert (low.status, error(low)) == parameter
    inward = {"bandwidth_limit_rule": {"max_kbps": 999, "direction": "ingress"}}
    assert (await cloud.call("POST", limits, inward, token=ADMIN)).status == 201
    assert (await cloud.call("POST", limits, {"bandwidth_limit_rule": {"max_kbps": 1000}}, token=ADMIN)).status == 201
    high = await cloud.call("PUT", f"{path}/{rule['id']}", {kind: {"min_kbps": 1001}}, token=ADMIN)
    assert (high.status, error(high)) == parameter
    assert (await cloud.call("DELETE", f"{path}/{rule['id']}", token=ADMIN)).status == 204


BANDWIDTH = {"egress": "NET_BW_EGR_KILOBIT_PER_SEC", "ingress": "NET_BW_IGR_KILOBIT_PER_SEC"}


async def _minimum(cloud: World, policy: str, kbps: int, direction: str = "egress", status: int = 201) -> Answer:
    rule = {"minimum_bandwidth_rule": {"min_kbps": kbps, "direction": direction}}
    answer = await cloud.call("POST", f"/qos/policies/{policy}/minimum_bandwidth_rules", rule, token=ADMIN)
    assert answer.status == status, answer.body
    return answer


async def test_ports_tell_services_which_bandwidth_they_ask_for(cloud: World) -> None:
    of_network, own = [(await cloud.make("policy", ADMIN, shared=True))["id"] for _ in range(2)]
    network, _ = await cloud.network(qos_policy_id=of_network)
    plain = await cloud.make("port", network_id=network["id"])
    assert (await cloud.show("port", plain["id"], ADMIN))["resource_request"] is None
    await _minimum(cloud, of_network, 10)
    for direction, kbps in (("egress", 600), ("ingress", 100)):
        await _minimum(cloud, own, kbps, direction)
    asking = await cloud.make("port", network_id=network["id"], qos_policy_id=own)
    assert "resource_request" not in asking
    requests = {}
    for port, resources in ((plain, {"egress": 10}), (asking, {"egress": 600, "ingress": 100})):
        for token in (ADMIN, SERVICE):
            shown = (await cloud.show("port", port["id"], token))["resource_request"]
            [group] = shown["request_groups"]
            assert group["resources"] == {BANDWIDTH[name]: kbps for name, kbps in resources.items()}
            assert group["required"] == ["CUSTOM_NETWORK_TUNNEL_PROVIDER", "CUSTOM_VNIC_TYPE_NORMAL"]
            assert shown["same_subtree"] == [group["id"]]
            requests[port["id"]] = shown
    listed = await cloud.list("port", "fields=id&fields=resource_request", token=SERVICE)
    assert {each["id"]: each["resource_request"] for each in listed} == requests
    assert all("resource_request" not in each for each in await cloud.list("port"))
    # As in Neutron, it does not depend on the device owner, which users may change.
    owned = await cloud.change("port", plain["id"], ADMIN, device_owner="network:x")
    assert owned["resource_request"] == requests[plain["id"]]


async def test_what_a_bound_port_asks_for_does_not_change(cloud: World) -> None:
    policy, other, plain = [(await cloud.make("policy", ADMIN, shared=True))["id"] for _ in range(3)]
    rule = (await _minimum(cloud, policy, 10)).json()["minimum_bandwidth_rule"]["id"]
    await _minimum(cloud, other, 20)
    network, _ = await cloud.network(qos_policy_id=policy)
    inherits = await cloud.make("port", network_id=network["id"])
    own = await cloud.make("port", network_id=network["id"], qos_policy_id=policy)
    bound = {"binding:host_id": "h1", "device_id": "s1", "device_owner": "compute:nova"}
    path = f"/qos/policies/{policy}/minimum_bandwidth_rules"
    changes: list[tuple[str, str, Any]] = [
        ("POST", path, {"minimum_bandwidth_rule": {"min_kbps": 1, "direction": "ingress"}}),
        ("PUT", f"{path}/{rule}", {"minimum_bandwidth_rule": {"min_kbps": 11}}),
        ("DELETE", f"{path}/{rule}", None),
    ]
    for port in (inherits, own):
        await cloud.change("port", port["id"], SERVICE, **bound)
        of_port = [("PUT", f"/ports/{port['id']}", {"port": {"qos_policy_id": each}}) for each in (other, plain)]
        of_network = [("PUT", f"/networks/{network['id']}", {"network": {"qos_policy_id": other}})]
        for method, where, body in (*changes, *of_port):
            answer = await cloud.call(method, where, body, token=ADMIN)
            assert (answer.status, error(answer)) == (409, "QosRuleNotSupported"), (method, where, body)
        for method, where, body in of_network:
            answer = await cloud.call(method, where, body, token=ADMIN)
            assert answer.status == (409 if port is inherits else 200), (method, where)
        await cloud.change("network", network["id"], ADMIN, qos_policy_id=policy) if port is own else None
        await cloud.change("port", port["id"], SERVICE, **{"binding:host_id": "", "device_id": "", "device_owner": ""})
    for method, where, body in (*changes[:1], *of_port, *of_network):
        assert (await cloud.call(method, where, body, token=ADMIN)).status < 300, where


BOUND = {"binding:host_id": "h1", "device_id": "s1", "device_owner": "compute:nova"}


async def _asks(cloud: World, port: dict[str, Any]) -> dict[str, int]:
    shown = (await cloud.show("port", port["id"], SERVICE))["resource_request"]
    return {} if shown is None else dict(shown["request_groups"][0]["resources"])


async def test_a_policy_of_a_bound_port_and_that_of_its_network_are_not_exchanged(cloud: World) -> None:
    gold, plain = [(await cloud.make("policy", ADMIN, shared=True))["id"] for _ in range(2)]
    await _minimum(cloud, gold, 600)
    network, _ = await cloud.network(qos_policy_id=gold)
    own = await cloud.make("port", network_id=network["id"], qos_policy_id=plain)
    inherits = await cloud.make("port", network_id=network["id"])
    for port, wanted, asks in ((own, None, {}), (inherits, plain, {BANDWIDTH["egress"]: 600})):
        await cloud.change("port", port["id"], SERVICE, **BOUND)
        answer = await cloud.call("PUT", f"/ports/{port['id']}", {"port": {"qos_policy_id": wanted}})
        assert (answer.status, error(answer)) == (409, "QosRuleNotSupported")
        assert await _asks(cloud, port) == asks
        # What it asks for stays the same: that policy is its network's, too.
    assert (await cloud.call("PUT", f"/ports/{inherits['id']}", {"port": {"qos_policy_id": gold}})).status == 200
    assert await _asks(cloud, inherits) == {BANDWIDTH["egress"]: 600}


@pytest.mark.parametrize("changes", [{"device_owner": "network:x"}, {"device_owner": ""}, {"device_id": ""}])
async def test_no_attribute_that_users_may_change_sets_a_guarantee_free(cloud: World, changes: dict[str, str]) -> None:
    gold, plain = [(await cloud.make("policy", ADMIN, shared=True))["id"] for _ in range(2)]
    rule = (await _minimum(cloud, gold, 600)).json()["minimum_bandwidth_rule"]["id"]
    network, _ = await cloud.network(qos_policy_id=gold)
    port = await cloud.make("port", network_id=network["id"])
    await cloud.change("port", port["id"], SERVICE, **BOUND)
    await cloud.change("port", port["id"], **changes)
    assert await _asks(cloud, port) == {BANDWIDTH["egress"]: 600}
    for path, body, token in (
        (f"/ports/{port['id']}", {"port": {"qos_policy_id": plain}}, ALICE),
        (f"/networks/{network['id']}", {"network": {"qos_policy_id": plain}}, ALICE),
        (f"/qos/policies/{gold}/minimum_bandwidth_rules/{rule}", {"minimum_bandwidth_rule": {"min_kbps": 1}}, ADMIN),
    ):
        answer = await cloud.call("PUT", path, body, token=token)
        assert (answer.status, error(answer)) == (409, "QosRuleNotSupported"), path
    back = await cloud.change("port", port["id"], SERVICE, **BOUND)
    assert back["resource_request"]["request_groups"][0]["resources"] == {BANDWIDTH["egress"]: 600}


async def test_the_type_of_a_bound_port_does_not_change(cloud: World) -> None:
    """It is a trait that the port asks for."""
    gold = (await cloud.make("policy", ADMIN, shared=True))["id"]
    await _minimum(cloud, gold, 600)
    network, _ = await cloud.network()
    port = await cloud.make("port", network_id=network["id"], qos_policy_id=gold)
    await cloud.change("port", port["id"], SERVICE, **BOUND)
    answer = await cloud.call("PUT", f"/ports/{port['id']}", {"port": {"binding:vnic_type": "direct"}})
    assert (answer.status, error(answer)) == (409, "PortInUse")
    await cloud.change("port", port["id"], SERVICE, **{**BOUND, "binding:host_id": ""})
    changed = await cloud.change("port", port["id"], SERVICE, **{"binding:vnic_type": "direct"})
    assert changed["resource_request"]["request_groups"][0]["required"][1] == "CUSTOM_VNIC_TYPE_DIRECT"


async def test_nothing_is_claimed_for_subports_so_their_policy_changes(cloud: World) -> None:
    gold = (await cloud.make("policy", ADMIN, shared=True))["id"]
    await _minimum(cloud, gold, 600)
    network, _ = await cloud.network()
    other, _ = await cloud.network("10.2.0.0/24", qos_policy_id=gold)
    parent = await cloud.make("port", network_id=network["id"])
    child = await cloud.make("port", network_id=other["id"])
    below = {"port_id": child["id"], "segmentation_type": "vlan", "segmentation_id": 7}
    await cloud.make("trunk", port_id=parent["id"], sub_ports=[below])
    await cloud.change("port", parent["id"], SERVICE, **BOUND)
    assert (await cloud.show("port", child["id"], SERVICE))["binding:host_id"] == "h1"
    await cloud.change("port", child["id"], qos_policy_id=gold)
    await cloud.change("network", other["id"], qos_policy_id=None)


async def test_agents_are_told_the_dscp_mark_of_a_policy(cloud: World) -> None:
    policy = await cloud.make("policy", ADMIN, shared=True)
    path = f"/qos/policies/{policy['id']}/dscp_marking_rules"
    for bad in ({}, {"dscp_mark": 1}, {"dscp_mark": -8}, {"dscp_mark": "high"}, {"dscp_mark": None}, {"max_kbps": 1}):
        answer = await cloud.call("POST", path, {"dscp_marking_rule": bad}, token=ADMIN)
        assert answer.status == 400, bad
    assert (await cloud.call("POST", path, {"dscp_marking_rule": {"dscp_mark": 26}})).status == 403
    answer = await cloud.call("POST", path, {"dscp_marking_rule": {"dscp_mark": "26"}}, token=ADMIN)
    rule = answer.json()["dscp_marking_rule"]
    assert (answer.status, rule) == (201, {"id": rule["id"], "dscp_mark": 26})
    second = await cloud.call("POST", path, {"dscp_marking_rule": {"dscp_mark": 8}}, token=ADMIN)
    assert (second.status, error(second)) == (409, "QoSRulesConflict")
    shown = {**rule, "qos_policy_id": policy["id"], "type": "dscp_marking"}
    assert (await cloud.show("policy", policy["id"]))["rules"] == [shown]
    assert (await cloud.call("GET", path)).json() == {"dscp_marking_rules": [rule]}
    network, subnet = await cloud.network(qos_policy_id=policy["id"])
    await cloud.call("POST", "/agent-reports", {"host": "h", "started": True}, token=SERVICE)
    router = await cloud.make("router")
    joined = await cloud.call("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    port = await plugged(cloud, network)

    async def marks() -> list[Any]:
        state = (await cloud.call("GET", "/agent-states/h", token=SERVICE)).json()["state"]
        found = {each["id"]: each.get("dscp_mark") for each in state["ports"]}
        return [found[port["id"]], found[joined.json()["port_id"]]]

    assert await marks() == [26, None], "routers do not mark"
    one = f"{path}/{rule['id']}"
    changed = await cloud.call("PUT", one, {"dscp_marking_rule": {"dscp_mark": 0}}, token=ADMIN)
    assert changed.json() == {"dscp_marking_rule": {**rule, "dscp_mark": 0}}
    assert await marks() == [0, None]
    assert (await cloud.call("DELETE", one, token=ADMIN)).status == 204
    assert await marks() == [None, None]


async def test_what_makes_no_sense_is_refused(cloud: World) -> None:
    policy = await cloud.make("policy", ADMIN, name="p")
    path = f"/qos/policies/{policy['id']}/bandwidth_limit_rules"
    for rule in (
        {}, {"max_kbps": -1}, {"max_kbps": 2**31}, {"max_kbps": "fast"}, {"max_kbps": None}, {"max_kbps": 1.5},
        {"max_kbps": 1, "direction": "any"}, {"max_kbps": 1, "max_burst_kbps": -1}, {"max_kbps": 1, "id": "x"},
    ):  # fmt: skip
        answer = await cloud.call("POST", path, {"bandwidth_limit_rule": rule}, token=ADMIN)
        assert answer.status == 400, rule
    assert (await limit(cloud, policy, 7)).status == 201
    second = await limit(cloud, policy, 8)
    assert (second.status, error(second)) == (409, "QoSRulesConflict")
    other = (await limit(cloud, policy, 9, "ingress")).json()["bandwidth_limit_rule"]
    turned = {"bandwidth_limit_rule": {"direction": "egress"}}
    assert (await cloud.call("PUT", f"{path}/{other['id']}", turned, token=ADMIN)).status == 409
    assert (await cloud.call("GET", f"{path}/%00", token=ADMIN)).status == 404
    for kind in ("networks", "ports"):
        answer = await cloud.call("POST", f"/{kind}", {kind[:-1]: {"network_id": "x", "qos_policy_id": 7}})
        assert answer.status == 400
    answer = await cloud.call("POST", "/networks", {"network": {"qos_policy_id": "no-such"}})
    assert (answer.status, error(answer)) == (404, "QosPolicyNotFound")


async def test_a_manager_makes_policies_of_the_own_project(cloud: World) -> None:
    mine = await cloud.make("policy", MANAGER, name="mine", tags=["t"])
    theirs = await cloud.make("policy", ADMIN, name="theirs", project_id="p2", shared=True)
    rule = {"bandwidth_limit_rule": {"max_kbps": 100}}
    for policy, made in ((mine, 201), (theirs, 403)):
        path = f"/qos/policies/{policy['id']}"
        answer = await cloud.call("POST", f"{path}/bandwidth_limit_rules", rule, token=MANAGER)
        assert answer.status == made
        answer = await cloud.call("PUT", path, {"policy": {"name": "new"}}, token=MANAGER)
        assert answer.status == (200 if made == 201 else 403)
        answer = await cloud.call("DELETE", path, token=MANAGER)
        assert answer.status == (204 if made == 201 else 403)
    other = {"policy": {"name": "x", "project_id": "p2"}}
    assert (await cloud.call("POST", "/qos/policies", other, token=MANAGER)).status in (400, 403)


async def test_users_use_what_they_see_and_make_no_policies(cloud: World) -> None:
    mine = await cloud.make("policy", ADMIN, name="mine", project_id="p1")
    theirs = await cloud.make("policy", ADMIN, name="theirs", project_id="p2")
    shared = await cloud.make("policy", ADMIN, name="shared", shared=True)
    assert {each["name"] for each in await cloud.list("policy")} == {"mine", "shared"}
    assert {each["name"] for each in await cloud.list("policy", "shared=true")} == {"shared"}
    body = {"policy": {"name": "own"}}
    assert (await cloud.call("POST", "/qos/policies", body)).status == 403
    assert (await cloud.call("PUT", f"/qos/policies/{mine['id']}", body)).status == 403
    assert (await cloud.call("GET", f"/qos/policies/{theirs['id']}")).status == 404
    network, _ = await cloud.network(qos_policy_id=shared["id"])
    port = await cloud.make("port", network_id=network["id"], qos_policy_id=mine["id"])
    assert (port["qos_policy_id"], port["qos_network_policy_id"]) == (mine["id"], shared["id"])
    assert await cloud.show("port", port["id"]) == port
    assert [each["id"] for each in await cloud.list("port", f"qos_policy_id={mine['id']}")] == [port["id"]]
    for path, kind in ((f"/ports/{port['id']}", "port"), (f"/networks/{network['id']}", "network")):
        answer = await cloud.call("PUT", path, {kind: {"qos_policy_id": theirs["id"]}})
        assert (answer.status, error(answer)) == (404, "QosPolicyNotFound")
    for policy in (mine, shared):
        busy = await cloud.call("DELETE", f"/qos/policies/{policy['id']}", token=ADMIN)
        assert (busy.status, error(busy)) == (409, "QosPolicyInUse")
    unshared = await cloud.call("PUT", f"/qos/policies/{shared['id']}", {"policy": {"shared": False}}, token=ADMIN)
    assert unshared.status == 409, "another project uses it"
    # A user may not remove a policy that the user may not see.
    await cloud.change("port", port["id"], ADMIN, qos_policy_id=theirs["id"])
    refused = await cloud.call("PUT", f"/ports/{port['id']}", {"port": {"qos_policy_id": None}})
    assert (refused.status, error(refused)) == (403, "PolicyRemoveAuthorizationError")
    assert (await cloud.call("PUT", f"/ports/{port['id']}", {"port": {"name": "x"}})).status == 200
    await cloud.change("port", port["id"], ADMIN, qos_policy_id=None)
    await cloud.delete("policy", theirs["id"], ADMIN)
    assert await cloud.list("policy", token=BOB) == [await cloud.show("policy", shared["id"], BOB)]


async def test_new_networks_get_the_default_policy_of_their_project(cloud: World) -> None:
    default = await cloud.make("policy", ADMIN, name="usual", project_id="p1", is_default=True)
    second = {"policy": {"name": "second", "project_id": "p1", "is_default": True}}
    answer = await cloud.call("POST", "/qos/policies", second, token=ADMIN)
    assert (answer.status, error(answer)) == (409, "QoSPolicyDefaultAlreadyExists")
    other = await cloud.make("policy", ADMIN, name="other", project_id="p1")
    answer = await cloud.call("PUT", f"/qos/policies/{other['id']}", {"policy": {"is_default": True}}, token=ADMIN)
    assert (answer.status, error(answer)) == (409, "QoSPolicyDefaultAlreadyExists")
    assert (await cloud.make("network"))["qos_policy_id"] == default["id"]
    assert (await cloud.make("network", qos_policy_id=None))["qos_policy_id"] is None
    assert (await cloud.make("network", BOB))["qos_policy_id"] is None
    await cloud.change("policy", default["id"], ADMIN, is_default=False)
    assert (await cloud.change("policy", other["id"], ADMIN, is_default=True))["is_default"] is True
    assert [each["id"] for each in await cloud.list("policy", "is_default=true")] == [other["id"]]
    assert (await cloud.make("network"))["qos_policy_id"] == other["id"]


async def test_agents_are_told_the_limits_of_guests_ports(cloud: World) -> None:
    slow = await cloud.make("policy", ADMIN, shared=True)
    fast = await cloud.make("policy", ADMIN, shared=True)
    network, subnet = await cloud.network(qos_policy_id=slow["id"])
    await cloud.call("POST", "/agent-reports", {"host": "h", "started": True}, token=SERVICE)
    router = await cloud.make("router")
    joined = await cloud.call("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    port = await plugged(cloud, network)
    assert await limits(cloud, port) == (None, None)
    rule = (await limit(cloud, slow, 100)).json()["bandwidth_limit_rule"]
    assert await limits(cloud, port) == (None, 100), "of the network"
    assert await limits(cloud, {"id": joined.json()["port_id"]}) == (None, None), "routers are not limited"
    await limit(cloud, fast, 900, "ingress")
    await cloud.change("port", port["id"], qos_policy_id=fast["id"])
    assert await limits(cloud, port) == (900, None), "the port's policy overrides the network's"
    await cloud.change("port", port["id"], qos_policy_id=None)
    path = f"/qos/policies/{slow['id']}/bandwidth_limit_rules/{rule['id']}"
    await cloud.call("PUT", path, {"bandwidth_limit_rule": {"max_kbps": 50}}, token=ADMIN)
    assert await limits(cloud, port) == (None, 50)
    await cloud.change("network", network["id"], qos_policy_id=None)
    assert await limits(cloud, port) == (None, None)


async def test_a_port_is_stateless_if_all_its_groups_are(cloud: World) -> None:
    network, _ = await cloud.network()
    loose = await cloud.make("security_group", name="loose", stateful=False)
    strict = await cloud.make("security_group", name="strict")
    for groups, stateful in (([loose], False), ([loose, strict], True), ([strict], True), ([], True)):
        port = await plugged(cloud, network, security_groups=[group["id"] for group in groups])
        state = (await cloud.call("GET", "/agent-states/h", token=SERVICE)).json()["state"]
        assert [each["stateful"] for each in state["ports"] if each["id"] == port["id"]] == [stateful]
