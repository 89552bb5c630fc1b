"""Address scopes: which subnet pools are routed to each other; on both databases."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, SERVICE, World, error, quota_drift, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


async def pool(cloud: World, prefix: str, scope: Any = None, token: str = ALICE) -> Any:
    fields = {"address_scope_id": scope["id"]} if scope else {}
    return await cloud.make("subnetpool", token, name="p", prefixes=[prefix], default_prefixlen=26, **fields)


async def subnet(cloud: World, network: Any, pool: Any, token: str = ALICE) -> Any:
    version = pool["ip_version"]
    return await cloud.make("subnet", token, network_id=network["id"], subnetpool_id=pool["id"], ip_version=version)


async def refused(cloud: World, method: str, path: str, body: Any = None, token: str = ALICE) -> tuple[int, str]:
    answer = await cloud.call(method, path, body, token=token)
    return answer.status, error(answer)


async def test_a_scope_lives(cloud: World) -> None:
    scope = await cloud.make("address_scope", name="s", ip_version="4")
    assert scope == {
        "id": scope["id"], "name": "s", "project_id": "p1", "tenant_id": "p1", "ip_version": 4, "shared": False,
    }  # fmt: skip
    assert await cloud.show("address_scope", scope["id"]) == scope
    assert await cloud.list("address_scope", "ip_version=4&shared=false") == [scope]
    assert (await cloud.change("address_scope", scope["id"], name="t"))["name"] == "t"
    first = await pool(cloud, "10.5.0.0/16", scope)
    assert first["address_scope_id"] == scope["id"]
    assert [each["id"] for each in await cloud.list("subnetpool", f"address_scope_id={scope['id']}")] == [first["id"]]
    # The network of a subnet shows the scope.
    network = await cloud.make("network")
    assert (network["ipv4_address_scope"], network["ipv6_address_scope"]) == (None, None)
    await subnet(cloud, network, first)
    shown = await cloud.show("network", network["id"])
    assert (shown["ipv4_address_scope"], shown["ipv6_address_scope"]) == (scope["id"], None)
    path = f"/address-scopes/{scope['id']}"
    assert await refused(cloud, "DELETE", path) == (409, "AddressScopeInUse")
    assert (await cloud.change("subnetpool", first["id"], address_scope_id=None))["address_scope_id"] is None
    assert (await cloud.show("network", network["id"]))["ipv4_address_scope"] is None
    await cloud.delete("address_scope", scope["id"])
    assert await refused(cloud, "GET", path) == (404, "AddressScopeNotFound")
    six = await cloud.make("address_scope", ip_version=6)
    await subnet(cloud, network, await cloud.make("subnetpool", name="6", prefixes=["fd00::/48"],
                                                  address_scope_id=six["id"]))  # fmt: skip
    assert (await cloud.show("network", network["id"]))["ipv6_address_scope"] == six["id"]


async def test_what_is_in_a_scope(cloud: World) -> None:
    scope, other = [await cloud.make("address_scope", ip_version=4) for _ in range(2)]
    six = await cloud.make("address_scope", ip_version=6)
    inside, beside, outside = (
        await pool(cloud, "10.5.0.0/16", scope), await pool(cloud, "10.5.0.0/16", other),
        await pool(cloud, "10.5.0.0/16"),
    )  # fmt: skip
    # Pools of one scope do not overlap, whether they are created in it, come to it or grow.
    conflict = (400, "AddressScopePrefixConflict")
    body: dict[str, Any] = {"name": "p", "prefixes": ["10.5.7.0/24"], "address_scope_id": scope["id"]}
    assert await refused(cloud, "POST", "/subnetpools", {"subnetpool": body}) == conflict
    path = f"/subnetpools/{outside['id']}"
    moved = {"subnetpool": {"address_scope_id": scope["id"]}}
    assert await refused(cloud, "PUT", path, moved) == conflict
    more = await pool(cloud, "10.6.0.0/16", scope)
    grown = {"subnetpool": {"prefixes": ["10.6.0.0/16", "10.5.0.0/24"]}}
    assert await refused(cloud, "PUT", f"/subnetpools/{more['id']}", grown) == conflict
    version = "IllegalSubnetPoolIpVersionAssociationToAddressScope"
    assert await refused(cloud, "PUT", path, {"subnetpool": {"address_scope_id": six["id"]}}) == (400, version)
    nothing = {"subnetpool": {"address_scope_id": "nothing"}}
    assert await refused(cloud, "PUT", path, nothing) == (404, "AddressScopeNotFound")
    # A network is in one scope.
    network = await cloud.make("network")
    await subnet(cloud, network, inside)
    await subnet(cloud, network, more)
    affinity = (400, "NetworkAddressScopeAffinityError")
    for wanted in ({"subnetpool_id": beside["id"]}, {"subnetpool_id": outside["id"]}, {"cidr": "10.77.0.0/24"}):
        body = {"subnet": {"network_id": network["id"], "ip_version": 4, **wanted}}
        assert await refused(cloud, "POST", "/subnets", body) == affinity
    for target in (other["id"], None):
        leaving = {"subnetpool": {"address_scope_id": target}}
        assert await refused(cloud, "PUT", f"/subnetpools/{more['id']}", leaving) == affinity
    for stays in ({"name": "q"}, {"address_scope_id": scope["id"]}):
        assert (await cloud.change("subnetpool", more["id"], **stays))["address_scope_id"] == scope["id"]
    assert (await cloud.make("subnet", network_id=network["id"], cidr="fd01::/64", ip_version=6))["id"]
    for bad in ({}, {"ip_version": 5}, {"ip_version": "x"}, {"ip_version": 4, "description": "x"}):
        assert (await cloud.call("POST", "/address-scopes", {"address_scope": bad})).status == 400, bad
    assert (
        await cloud.call("PUT", f"/address-scopes/{scope['id']}", {"address_scope": {"ip_version": 6}})
    ).status == 400


async def test_scopes_are_shared(cloud: World) -> None:
    scope = await cloud.make("address_scope", ADMIN, ip_version=4, name="of the operator")
    path, body = f"/address-scopes/{scope['id']}", {"subnetpool": {"name": "p", "prefixes": ["10.5.0.0/16"],
                                                                   "address_scope_id": scope["id"]}}  # fmt: skip
    assert (await refused(cloud, "GET", path))[0] == 404
    assert (await refused(cloud, "POST", "/subnetpools", body)) == (404, "AddressScopeNotFound")
    shared = {"address_scope": {"ip_version": 4, "shared": True}}
    assert (await cloud.call("POST", "/address-scopes", shared)).status == 403
    assert (await cloud.change("address_scope", scope["id"], ADMIN, shared=True))["shared"] is True
    assert (await cloud.show("address_scope", scope["id"], BOB))["shared"] is True
    assert (await cloud.call("DELETE", path)).status == 403
    made = await pool(cloud, "10.5.0.0/16", scope)
    renamed = {"subnetpool": {"name": "q"}}
    assert await refused(cloud, "PUT", f"/subnetpools/{made['id']}", renamed) == (400, "IllegalSubnetPoolUpdate")
    unshared = {"address_scope": {"shared": False}}
    assert await refused(cloud, "PUT", path, unshared, ADMIN) == (400, "AddressScopeUpdateError")
    # Entries of RBAC policies share them with single projects.
    lent = await cloud.make("address_scope", ADMIN, ip_version=4)
    entry = await cloud.make("rbac_policy", ADMIN, object_type="address_scope", object_id=lent["id"],
                             action="access_as_shared", target_tenant="p1")  # fmt: skip
    used = await pool(cloud, "10.6.0.0/16", lent)
    assert (await cloud.call("GET", f"/address-scopes/{lent['id']}", token=BOB)).status == 404
    assert (await cloud.call("DELETE", f"/rbac-policies/{entry['id']}", token=ADMIN)).status == 409
    await cloud.delete("subnetpool", used["id"])
    await cloud.delete("rbac_policy", entry["id"], ADMIN)


async def test_agents_learn_the_scopes(cloud: World) -> None:
    async def scope_on_host() -> Any:
        state = (await cloud.call("GET", "/agent-states/h1", token=SERVICE)).json()["state"]
        [network] = state["networks"]
        [subnet] = network["subnets"]
        return subnet["address_scope"]

    scope = await cloud.make("address_scope", ip_version=4)
    made, network = await pool(cloud, "10.5.0.0/16", scope), await cloud.make("network")
    await subnet(cloud, network, made)
    await cloud.make("port", SERVICE, network_id=network["id"], project_id="p1", binding__host_id="h1")
    assert await scope_on_host() == scope["id"]
    await cloud.change("subnetpool", made["id"], address_scope_id=None)
    assert await scope_on_host() is None


async def test_many_prefixes_in_a_scope_are_compared_soon(cloud: World) -> None:
    """Each new prefix was compared with each in the scope: one request took as long as a project wanted."""
    scope = await cloud.make("address_scope", ip_version=6)
    wanted = [
        {
            "name": "p",
            "address_scope_id": scope["id"],
            "prefixes": [f"fd{number:02x}:{2 * part:x}::/48" for part in range(80)],
        }
        for number in range(60)
    ]
    begin = time.process_time()
    assert (await cloud.call("POST", "/subnetpools", {"subnetpools": wanted})).status == 201
    assert time.process_time() - begin < 3
    inside = {"name": "p", "address_scope_id": scope["id"], "prefixes": ["fd00:3::/48", "fd07:8:0:7::/64"]}
    assert (await refused(cloud, "POST", "/subnetpools", {"subnetpool": inside}))[1] == "AddressScopePrefixConflict"
    around = {**inside, "prefixes": ["fd3b::/16"]}
    assert (await refused(cloud, "POST", "/subnetpools", {"subnetpool": around}))[1] == "AddressScopePrefixConflict"
    beside = {**inside, "prefixes": ["fd00:3::/48", "fe00::/16"]}
    assert (await cloud.call("POST", "/subnetpools", {"subnetpool": beside})).status == 201
