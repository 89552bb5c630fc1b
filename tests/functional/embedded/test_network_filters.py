"""Filters of lists: each has an effect or is refused, in every collection."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.embedded.network.listing import Attributes
from micronova.embedded.network.qos_rules import QOS_RULE_TYPES
from micronova.embedded.network.service import COLLECTIONS
from tests.unit.embedded.network.world import ADMIN, SERVICE, World, error, world

TAG = "red"
# Values that no resource of `made` has, of filters that are not columns.
OTHERS = {
    "tags": "blue",
    "tags-any": "blue",
    "not-tags": TAG,
    "not-tags-any": TAG,
    "changed_since": "2100-01-01T00:00:00",
    "fixed_ips": "ip_address=192.0.2.1",
    "ip_version": "6",
    "shared": "true",
}


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as found:
        yield found


RULES: tuple[dict[str, Any], ...] = ({"max_kbps": 1000}, {"dscp_mark": 26}, {"min_kbps": 10})


async def report(cloud: World, host: str) -> None:
    answer = await cloud.call("POST", "/agent-reports", {"host": host, "started": True}, token=SERVICE)
    assert answer.status == 200


async def made(cloud: World) -> dict[str, str]:
    """Create a resource of each collection; return their ids by path."""
    outside, _ = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
    network, subnet = await cloud.network(token=ADMIN)
    port = await cloud.make("port", ADMIN, network_id=network["id"])
    router = await cloud.make("router", ADMIN, external_gateway_info={"network_id": outside["id"]})
    path = f"/routers/{router['id']}/add_router_interface"
    assert (await cloud.call("PUT", path, {"subnet_id": subnet["id"]}, token=ADMIN)).status == 200
    floating = await cloud.make("floatingip", ADMIN, floating_network_id=outside["id"], port_id=port["id"])
    pool = await cloud.make("subnetpool", ADMIN, name="pool", prefixes=["10.9.0.0/16"])
    group = await cloud.make("security_group", ADMIN, name="group")
    policy = await cloud.make("policy", ADMIN, name="slow")
    entry = await cloud.make(
        "rbac_policy", ADMIN, object_type="network", object_id=network["id"], action="access_as_shared",
        target_tenant="p9",
    )  # fmt: skip
    await report(cloud, "h1")
    parent = await cloud.make("port", ADMIN, network_id=network["id"])
    scope = await cloud.make("address_scope", ADMIN, ip_version=4)
    trunk = await cloud.make("trunk", ADMIN, port_id=parent["id"])
    rule = (await cloud.list("default_security_group_rule", token=ADMIN))[0]
    [agent] = await cloud.list("agent", token=ADMIN)
    return {
        "networks": network["id"],
        "subnets": subnet["id"],
        "subnetpools": pool["id"],
        "ports": port["id"],
        "security-groups": group["id"],
        "security-group-rules": group["security_group_rules"][0]["id"],
        "default-security-group-rules": rule["id"],
        "routers": router["id"],
        "floatingips": floating["id"],
        "trunks": trunk["id"],
        "address-scopes": scope["id"],
        "qos/policies": policy["id"],
        "rbac-policies": entry["id"],
        "agents": agent["id"],
        "network-ip-availabilities": network["id"],
    }


def other_value(attributes: Attributes, name: str, shown: dict[str, Any]) -> str:
    """Return a value of a filter that a resource does not have."""
    column = attributes.columns.get(name)
    if name in OTHERS and column is None:
        return OTHERS[name]
    if isinstance(shown.get(name), bool):
        return str(not shown[name])
    return "77" if column is not None and isinstance(column.type, sa.Integer) else "no-such"


async def matches(cloud: World, path: str, plural: str, query: str) -> int:
    answer = await cloud.call("GET", f"/{path}?{query}", token=ADMIN)
    assert answer.status == 200, (path, query, answer.body)
    return len(answer.json()[plural])


async def test_every_filter_has_an_effect(cloud: World) -> None:
    ids = await made(cloud)
    assert set(ids) == {kind.slug for kind in COLLECTIONS}
    ignored = []
    for kind in COLLECTIONS:
        collection = kind(cloud.role.core)
        path, key = collection.slug, "network_id" if kind.slug == "network-ip-availabilities" else "id"
        if collection.attributes.taggable:
            assert (await cloud.call("PUT", f"/{path}/{ids[path]}/tags/{TAG}", token=ADMIN)).status == 201
        [shown] = (await cloud.call("GET", f"/{path}?{key}={ids[path]}", token=ADMIN)).json()[kind.plural]
        names = {*collection.attributes.columns, *collection.attributes.special} - {key}
        names |= {"shared"} if collection.object_type else set()
        for name in sorted(names):
            query = f"{key}={ids[path]}&{name}={other_value(collection.attributes, name, shown)}"
            if await matches(cloud, path, kind.plural, query):
                ignored.append(f"{path}?{name}")
    assert ignored == []


async def test_every_filter_of_qos_rules_has_an_effect(cloud: World) -> None:
    policy = await cloud.make("policy", ADMIN, name="slow")
    for kind, rule in zip(QOS_RULE_TYPES, RULES, strict=True):
        path = f"qos/policies/{policy['id']}/{kind.singular}s"
        assert (await cloud.call("POST", f"/{path}", {kind.singular: rule}, token=ADMIN)).status == 201
        for name in kind.attributes.columns:
            query = f"{name}={other_value(kind.attributes, name, {})}"
            assert await matches(cloud, path, f"{kind.singular}s", query) == 0, name


@pytest.mark.parametrize(
    "query",
    [
        "networks?availability_zone=nova",  # networks have no such attribute
        "security-group-rules?tags=red",
        "agents?tags=red",
        "agents?not-tags=red",
        "agents?changed_since=2026-01-01T00:00:00",
        "network-ip-availabilities?tags=red",
        "network-ip-availabilities?changed_since=2026-01-01T00:00:00",
        "network-ip-availabilities?ip_version=four",
        "availability_zones?colour=blue",
        "qos/rule-types?colour=blue",
    ],
)
async def test_a_filter_that_a_collection_does_not_have_is_refused(cloud: World, query: str) -> None:
    answer = await cloud.call("GET", f"/{query}", token=ADMIN)
    assert (answer.status, error(answer)) == (400, "HTTPBadRequest")


async def test_agents_that_are_alive(cloud: World) -> None:
    await report(cloud, "dead")
    await cloud.clock.jump(100)
    await report(cloud, "alive")

    async def hosts(query: str) -> list[str]:
        return sorted(each["host"] for each in await cloud.list("agent", query, ADMIN))

    assert await hosts("") == ["alive", "dead"]
    assert await hosts("alive=true") == await hosts("alive=1") == await hosts("alive=True") == ["alive"]
    assert await hosts("alive=false") == ["dead"]
    assert await hosts("alive=false&alive=true") == ["dead"]  # Neutron reads the first value
    assert await hosts("alive=true&host=dead") == []
    assert (await cloud.call("GET", "/agents?alive=perhaps", token=ADMIN)).status == 400


async def test_addresses_of_one_ip_version(cloud: World) -> None:
    network, four = await cloud.network()
    six = await cloud.make("subnet", network_id=network["id"], cidr="fd00::/64", ip_version=6)

    async def counted(query: str) -> list[str]:
        [found] = await cloud.list("network_ip_availability", f"network_id={network['id']}{query}", ADMIN)
        assert found["total_ips"] == sum(each["total_ips"] for each in found["subnet_ip_availability"])
        return sorted(each["subnet_id"] for each in found["subnet_ip_availability"])

    assert await counted("") == await counted("&ip_version=4&ip_version=6") == sorted([four["id"], six["id"]])
    assert await counted("&ip_version=4") == [four["id"]]
    assert await counted("&ip_version=6") == [six["id"]]
