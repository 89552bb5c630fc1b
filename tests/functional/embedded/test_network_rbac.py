"""RBAC policies: who may use what another project owns, and which of them cannot be removed; on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.client import Answer
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, SERVICE, World, error, quota_drift, world

CAROL = "carol@p3"


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


def policy_body(kind: str, thing: dict[str, Any], target: str, action: str = "access_as_shared") -> dict[str, Any]:
    return {"object_type": kind, "object_id": thing["id"], "action": action, "target_tenant": target}


async def refused(cloud: World, method: str, path: str, body: Any = None, token: str = ALICE) -> tuple[int, str]:
    answer = await cloud.call(method, path, body, token=token)
    return answer.status, error(answer)


async def create(cloud: World, wanted: dict[str, Any], token: str = ALICE) -> Answer:
    return await cloud.call("POST", "/rbac-policies", {"rbac_policy": wanted}, token=token)


async def test_a_network_is_shared_with_one_project(cloud: World) -> None:
    network, subnet = await cloud.network()
    made = await cloud.make("rbac_policy", **policy_body("network", network, "p2"))
    assert made == {
        "id": made["id"], "project_id": "p1", "tenant_id": "p1", "object_type": "network", "object_id": network["id"],
        "action": "access_as_shared", "target_tenant": "p2",
    }  # fmt: skip
    assert await cloud.show("rbac_policy", made["id"]) == made
    assert await cloud.list("rbac_policy", "target_tenant=p2") == [made]
    assert await cloud.list("rbac_policy", token=BOB) == []
    # `shared` says whether it is shared with who asks.
    assert (await cloud.show("network", network["id"]))["shared"] is False
    assert (await cloud.show("network", network["id"], BOB))["shared"] is True
    assert [each["id"] for each in await cloud.list("network", "shared=true", BOB)] == [network["id"]]
    assert await cloud.list("network", "shared=false", BOB) == []
    assert [each["id"] for each in await cloud.list("subnet", "shared=true", BOB)] == [subnet["id"]]
    assert await cloud.list("network", token=CAROL) == await cloud.list("subnet", token=CAROL) == []
    assert (await cloud.call("GET", f"/networks/{network['id']}", token=CAROL)).status == 404
    assert (await cloud.call("PUT", f"/networks/{network['id']}", {"network": {"name": "x"}}, token=BOB)).status == 403
    port = await cloud.make("port", BOB, network_id=network["id"])
    body = {"port": {"network_id": network["id"]}}
    assert await refused(cloud, "POST", "/ports", body, CAROL) == (404, "NetworkNotFound")
    # A router of the other project may have an interface there.
    router = await cloud.make("router", BOB)
    path = f"/routers/{router['id']}/add_router_interface"
    assert (await cloud.call("PUT", path, {"subnet_id": subnet["id"]}, token=BOB)).status == 200
    path = f"/routers/{router['id']}/remove_router_interface"
    assert (await cloud.call("PUT", path, {"subnet_id": subnet["id"]}, token=BOB)).status == 200
    # The RBAC policy is needed until the port is gone.
    path = f"/rbac-policies/{made['id']}"
    assert await refused(cloud, "DELETE", path) == (409, "RbacPolicyInUse")
    changed = {"rbac_policy": {"target_tenant": "p3"}}
    assert await refused(cloud, "PUT", path, changed) == (409, "RbacPolicyInUse")
    await cloud.delete("port", port["id"], BOB)
    assert (await cloud.change("rbac_policy", made["id"], target_tenant="p3"))["target_tenant"] == "p3"
    assert (await cloud.call("GET", f"/networks/{network['id']}", token=BOB)).status == 404
    await cloud.delete("rbac_policy", made["id"])
    assert await cloud.list("network", token=CAROL) == []


async def test_shared_with_all_is_an_rbac_policy(cloud: World) -> None:
    network, _ = await cloud.network(token=ADMIN, shared=True, project_id="p1")
    assert network["shared"] is True
    [found] = await cloud.list("rbac_policy")
    assert (found["object_id"], found["target_tenant"], found["project_id"]) == (network["id"], "*", "p1")
    port = await cloud.make("port", BOB, network_id=network["id"])
    path = f"/rbac-policies/{found['id']}"
    assert await refused(cloud, "DELETE", path) == (409, "RbacPolicyInUse")
    unshared = {"network": {"shared": False}}
    assert await refused(cloud, "PUT", f"/networks/{network['id']}", unshared, ADMIN) == (409, "InvalidSharedSetting")
    # With an RBAC policy of its own the project does not need the other one, and the other way round.
    own = await cloud.make("rbac_policy", **policy_body("network", network, "p2"))
    await cloud.delete("rbac_policy", own["id"])
    own = await cloud.make("rbac_policy", **policy_body("network", network, "p2"))
    assert (await cloud.change("network", network["id"], ADMIN, shared=False))["shared"] is False
    assert await cloud.list("rbac_policy") == [own]
    assert (await cloud.show("network", network["id"], BOB))["shared"] is True
    assert await cloud.list("network", token=CAROL) == []
    assert (await cloud.change("network", network["id"], ADMIN, shared=True))["shared"] is True
    assert len(await cloud.list("network", "shared=true", CAROL)) == 1
    await cloud.delete("port", port["id"], BOB)
    await cloud.delete("network", network["id"])
    assert await cloud.list("rbac_policy", token=ADMIN) == []


async def test_external_networks_can_be_for_some_projects(cloud: World) -> None:
    public, _ = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
    [everybody] = await cloud.list("rbac_policy", token=ADMIN)
    assert (everybody["action"], everybody["target_tenant"]) == ("access_as_external", "*")
    mine = await cloud.make("rbac_policy", ADMIN, **policy_body("network", public, "p1", "access_as_external"))
    gateway = {"network_id": public["id"]}
    router = await cloud.make("router", BOB, external_gateway_info=gateway)
    path = f"/rbac-policies/{everybody['id']}"
    assert await refused(cloud, "DELETE", path, token=ADMIN) == (409, "RbacPolicyInUse")
    await cloud.delete("router", router["id"], BOB)
    await cloud.delete("rbac_policy", everybody["id"], ADMIN)
    assert [each["id"] for each in await cloud.list("network", "router:external=true")] == [public["id"]]
    assert await cloud.list("network", "router:external=true", BOB) == await cloud.list("subnet", token=BOB) == []
    body = {"router": {"external_gateway_info": gateway}}
    assert await refused(cloud, "POST", "/routers", body, BOB) == (404, "NetworkNotFound")
    body = {"floatingip": {"floating_network_id": public["id"]}}
    assert await refused(cloud, "POST", "/floatingips", body, BOB) == (404, "NetworkNotFound")
    router = await cloud.make("router", external_gateway_info=gateway)
    assert await refused(cloud, "DELETE", f"/rbac-policies/{mine['id']}", token=ADMIN) == (409, "RbacPolicyInUse")
    await cloud.delete("router", router["id"])
    # A network that is not external any more has no such RBAC policies, and an RBAC policy makes one external.
    await cloud.change("network", public["id"], ADMIN, router__external=False)
    assert await cloud.list("rbac_policy", token=ADMIN) == []
    await cloud.make("rbac_policy", ADMIN, **policy_body("network", public, "p2", "access_as_external"))
    assert (await cloud.show("network", public["id"], BOB))["router:external"] is True
    own = await cloud.make("network")
    assert (await create(cloud, policy_body("network", own, "p2", "access_as_external"))).status == 403
    default = await cloud.make("network", ADMIN, router__external=True, is_default=True)
    [everybody] = await cloud.list("rbac_policy", f"object_id={default['id']}", ADMIN)
    assert await refused(cloud, "DELETE", f"/rbac-policies/{everybody['id']}", token=ADMIN) == (409, "RbacPolicyInUse")


async def test_security_groups_are_shared(cloud: World) -> None:
    group = await cloud.make("security_group", name="web")
    assert group["shared"] is False
    network, _ = await cloud.network(token=BOB)
    body: dict[str, Any] = {"port": {"network_id": network["id"], "security_groups": [group["id"]]}}
    assert await refused(cloud, "POST", "/ports", body, BOB) == (404, "SecurityGroupNotFound")
    made = await cloud.make("rbac_policy", **policy_body("security_group", group, "p2"))
    assert (await cloud.show("security_group", group["id"], BOB))["shared"] is True
    assert {each["name"] for each in await cloud.list("security_group", token=BOB)} == {"default", "web"}
    assert [each["name"] for each in await cloud.list("security_group", "shared=true", BOB)] == ["web"]
    assert {each["name"] for each in await cloud.list("security_group", token=CAROL)} == {"default"}
    assert (await cloud.call("DELETE", f"/security-groups/{group['id']}", token=BOB)).status == 403
    rule = {"security_group_id": group["id"], "direction": "ingress", "protocol": "tcp"}
    answer = await cloud.call("POST", "/security-group-rules", {"security_group_rule": rule}, token=BOB)
    assert answer.status == 403
    port = (await cloud.call("POST", "/ports", body, token=BOB)).json()["port"]
    assert port["security_groups"] == [group["id"]]
    assert await refused(cloud, "DELETE", f"/rbac-policies/{made['id']}") == (409, "RbacPolicyInUse")
    await cloud.change("port", port["id"], BOB, security_groups=[])
    await cloud.delete("rbac_policy", made["id"])
    again = {"port": {"security_groups": [group["id"]]}}
    assert (await cloud.call("PUT", f"/ports/{port['id']}", again, token=BOB)).status == 404


async def test_qos_policies_and_subnet_pools_are_shared(cloud: World) -> None:
    policy = await cloud.make("policy", ADMIN, name="slow")
    pool = await cloud.make("subnetpool", name="pool", prefixes=["10.77.0.0/16"], default_prefixlen=24)
    limit = await cloud.make("rbac_policy", ADMIN, **policy_body("qos_policy", policy, "p2"))
    ranges = await cloud.make("rbac_policy", **policy_body("subnetpool", pool, "p2"))
    for kind, thing in (("policy", policy), ("subnetpool", pool)):
        assert (await cloud.show(kind, thing["id"], BOB))["shared"] is True
        assert [each["id"] for each in await cloud.list(kind, "shared=true", BOB)] == [thing["id"]]
        assert await cloud.list(kind, token=CAROL) == []
    assert (await cloud.call("GET", f"/qos/policies/{policy['id']}/bandwidth_limit_rules", token=BOB)).status == 200
    network = await cloud.make("network", BOB, qos_policy_id=policy["id"])
    subnet = await cloud.make("subnet", BOB, network_id=network["id"], subnetpool_id=pool["id"])
    assert subnet["subnetpool_id"] == pool["id"]
    for made, token in ((limit, ADMIN), (ranges, ALICE)):
        path = f"/rbac-policies/{made['id']}"
        assert await refused(cloud, "DELETE", path, token=token) == (409, "RbacPolicyInUse")
    other = await cloud.make("network", CAROL)
    body = {"subnet": {"network_id": other["id"], "subnetpool_id": pool["id"]}}
    assert await refused(cloud, "POST", "/subnets", body, CAROL) == (404, "SubnetPoolNotFound")
    await cloud.delete("network", network["id"], BOB)
    await cloud.delete("policy", policy["id"], ADMIN)
    await cloud.delete("subnetpool", pool["id"])
    assert await cloud.list("rbac_policy", token=ADMIN) == []


async def test_only_the_owner_of_the_object_and_admins_change_its_rbac_policies(cloud: World) -> None:
    """An RBAC policy of an admin belongs to the admin's project; that makes its members no owners of the object."""
    network, _ = await cloud.network()
    made = await cloud.make("rbac_policy", ADMIN, **policy_body("network", network, "p2"))
    assert made["project_id"] == "p0"
    path, mallory = f"/rbac-policies/{made['id']}", "mallory@p0"
    changed = {"rbac_policy": {"target_tenant": "p3"}}
    assert await refused(cloud, "PUT", path, changed, mallory) == (400, "InvalidInput")
    assert await refused(cloud, "DELETE", path, token=mallory) == (400, "InvalidInput")
    assert await cloud.show("rbac_policy", made["id"], ADMIN) == made
    assert (await cloud.change("rbac_policy", made["id"], ADMIN, target_tenant="p3"))["target_tenant"] == "p3"
    await cloud.delete("rbac_policy", made["id"], ADMIN)


async def test_what_makes_no_sense_is_refused(cloud: World) -> None:
    network = await cloud.make("network")
    good = policy_body("network", network, "p2")
    for bad in (
        {"object_type": "port"}, {"object_type": 7}, {"action": "access_as_friend"}, {"target_tenant": ""},
        {"target_tenant": None}, {"target_tenant": "x" * 256}, {"object_id": ""}, {"id": "x"}, {"project_id": "p2"},
        {"object_type": "subnetpool", "action": "access_as_external"},
    ):  # fmt: skip
        assert (await create(cloud, good | bad)).status == 400, bad
    assert (await create(cloud, good | {"object_id": "nothing"})).status == 404
    assert (await create(cloud, good | {"target_tenant": "*"})).status == 403, "only admins share with all"
    assert (await create(cloud, good, BOB)).status == 404
    assert (await create(cloud, good, "rita@p1/reader")).status == 403
    made = (await create(cloud, good)).json()["rbac_policy"]
    again = await create(cloud, good)
    assert (again.status, error(again)) == (409, "DuplicateRbacPolicy")
    second = await cloud.make("rbac_policy", **policy_body("network", network, "p3"))
    path = f"/rbac-policies/{second['id']}"
    same = {"rbac_policy": {"target_tenant": "p2"}}
    assert await refused(cloud, "PUT", path, same) == (409, "DuplicateRbacPolicy")
    assert (await cloud.call("PUT", path, {"rbac_policy": {"target_tenant": "*"}})).status == 403
    assert (await cloud.call("PUT", path, {"rbac_policy": {"action": "x"}})).status == 400
    assert (await cloud.call("PUT", path, {"rbac_policy": {}})).json() == {"rbac_policy": second}
    seen = await create(cloud, good | {"target_tenant": "p4"}, BOB)
    assert (seen.status, error(seen)) == (400, "InvalidInput"), "whom it is shared with cannot share it on"
    assert await refused(cloud, "DELETE", f"/rbac-policies/{made['id']}", token=BOB) == (404, "RbacPolicyNotFound")
    await cloud.call("PUT", "/quotas/p1", {"quota": {"rbac_policy": 2}}, token=ADMIN)
    assert await refused(
        cloud, "POST", "/rbac-policies", {"rbac_policy": good | {"target_tenant": "p5"}}
    ) == (409, "OverQuota")  # fmt: skip
    # Compute's user sees what it needs, as before.
    assert len(await cloud.list("network", token=SERVICE)) == 1


async def _shared(cloud: World, kind: str) -> tuple[dict[str, Any], tuple[str, str, dict[str, Any]]]:
    """Let a project share something with another; return the RBAC policy, and a request of the other that uses it."""
    if kind == "gateway":
        network, _ = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
        [everybody] = await cloud.list("rbac_policy", f"object_id={network['id']}", ADMIN)
        gateway = {"external_gateway_info": {"network_id": network["id"]}}
        return everybody, ("POST", "/routers", {"router": gateway})
    own, _ = await cloud.network("10.9.0.0/24", BOB)
    if kind.startswith("network"):
        owned, subnet = await cloud.network()
        use = ("POST", "/ports", {"port": {"network_id": owned["id"]}})
        if kind.endswith("interface"):
            router = await cloud.make("router", BOB)
            use = ("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    elif kind.startswith("security_group"):
        owned = await cloud.make("security_group", name="owned")
        wanted = {"security_groups": [owned["id"]]}
        use = ("POST", "/ports", {"port": {"network_id": own["id"], **wanted}})
        if kind.endswith("update"):
            port = await cloud.make("port", BOB, network_id=own["id"])
            use = ("PUT", f"/ports/{port['id']}", {"port": wanted})
    else:
        owned = await cloud.make("policy", ADMIN, name="owned")
        use = ("PUT", f"/networks/{own['id']}", {"network": {"qos_policy_id": owned["id"]}})
        if kind.endswith("port"):
            use = ("POST", "/ports", {"port": {"network_id": own["id"], "qos_policy_id": owned["id"]}})
    token = ADMIN if kind.startswith("qos_policy") else ALICE
    object_type = "qos_policy" if kind.startswith("qos_policy") else kind.partition(" ")[0]
    return await cloud.make("rbac_policy", token, **policy_body(object_type, owned, "p2")), use


@pytest.mark.parametrize(
    "kind",
    [
        "network",
        "network interface",
        "security_group",
        "security_group update",
        "qos_policy network",
        "qos_policy port",
        "gateway",
    ],
)
async def test_what_is_taken_back_meanwhile_is_not_used(
    cloud: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The request has found that it may use the object, and has not written anything yet."""
    made, (method, path, body) = await _shared(cloud, kind)
    write, taken_back = cloud.database.write, False

    async def late(fn: Any, *args: Any, **named: Any) -> Any:
        nonlocal taken_back
        if not taken_back:
            taken_back = True
            owner = ADMIN if kind.startswith(("qos_policy", "gateway")) else ALICE
            await cloud.delete("rbac_policy", made["id"], owner)
        return await write(fn, *args, **named)

    monkeypatch.setattr(cloud.database, "write", late)
    answer = await cloud.call(method, path, body, token=BOB)
    assert taken_back and answer.status == 404
