"""Networks, floating IPs and security groups (until 2.35), addresses of servers (until 2.43)."""

import asyncio
import uuid
from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import make, network, ok, ports_of
from tests.schemas.tempest import check

CLOUD = CloudOptions(roles=("network",))


async def _asked(user: Caller, method: str, path: str, module: str, schema: str, body: Any = None) -> Any:
    """Send a request whose answer must have Tempest's form."""
    answer = await user.request(method, path, body)
    check(module, schema, user.minor, answer.status, answer.json() if answer.body else None)
    return answer.json() if answer.body else None


async def _pool(user: Caller) -> dict[str, Any]:
    """Create an external network, and a router between it and a new network of the user's."""
    name = f"pool-{uuid.uuid4().hex[:6]}"
    pool = await make(user.admin, "network", name=name, **{"router:external": True})
    subnet = {"network_id": pool["id"], "ip_version": 4, "cidr": "203.0.113.0/24", "enable_dhcp": False}
    await make(user.admin, "subnet", **subnet)
    return pool


async def _routed(user: Caller, pool: dict[str, Any]) -> dict[str, Any]:
    """Create a network of the user's with a router to the pool."""
    place = await network(user)
    router = await make(user, "router", external_gateway_info={"network_id": pool["id"]})
    [subnet] = (await ok(user, "GET", f"/network/v2.0/subnets?network_id={place['id']}"))["subnets"]
    path = f"/network/v2.0/routers/{router['id']}/add_router_interface"
    await ok(user, "PUT", path, {"subnet_id": subnet["id"]})
    return place


async def test_the_address_of_a_floating_ip_stays_with_its_server(cloud: Cloud, user: Caller) -> None:
    """Else another project's server on a shared network could get it, and what is sent to the floating IP."""
    pool = await _pool(user)
    place = await _routed(user, pool)
    server = await user.boot(networks=[{"uuid": place["id"]}])
    [port] = (await ok(user, "GET", f"/network/v2.0/ports?device_id={server['id']}"))["ports"]
    address = port["fixed_ips"][0]["ip_address"]
    floating = await make(user, "floatingip", floating_network_id=pool["id"], port_id=port["id"])
    action, remove = f"/servers/{server['id']}/action", {"removeFixedIp": {"address": address}}
    refusal = await user.at(43).refused(400, "POST", action, remove)
    assert floating["floating_ip_address"] in str(refusal)
    assert (await ok(user, "GET", f"/network/v2.0/ports/{port['id']}"))["port"]["fixed_ips"] == port["fixed_ips"]
    await user.at(43).post(action, {"removeFloatingIp": {"address": floating["floating_ip_address"]}}, 202)
    await user.at(43).post(action, remove, 202)
    assert (await ok(user, "GET", f"/network/v2.0/ports/{port['id']}"))["port"]["fixed_ips"] == []


# --- networks ------------------------------------------------------------------------------------------------------


@only_in_one_process("a client of a real server resolves dots in paths")
async def test_networks(cloud: Cloud, user: Caller) -> None:
    place = await network(user, name="mine")
    old, id = user.at(35), place["id"]
    [listed] = [each for each in (await old.get("/os-networks"))["networks"] if each["id"] == id]
    assert listed["label"] == "mine" and listed == (await old.get(f"/os-networks/{id}"))["network"]
    assert len(listed) == 11 and {listed[name] for name in listed if name not in ("id", "label")} == {None}
    assert len((await old.admin.get(f"/os-networks/{id}"))["network"]) == 32
    tenant = await _asked(user.at(1), "GET", f"/os-tenant-networks/{id}", "tenant_networks", "get_tenant_network")
    assert tenant == {"network": {"id": id, "cidr": "None", "label": "mine"}}
    found = await _asked(user.at(1), "GET", "/os-tenant-networks", "tenant_networks", "list_tenant_networks")
    assert tenant["network"] in found["networks"]
    stranger = cloud.caller().at(35)
    for path in ("/os-networks", "/os-tenant-networks"):
        assert id not in [each["id"] for each in (await stranger.get(path))["networks"]]
        await stranger.refused(404, "GET", f"{path}/{id}")
        await old.refused(404, "GET", f"{path}/..")


# --- security groups -----------------------------------------------------------------------------------------------


async def test_security_groups(cloud: Cloud, user: Caller) -> None:
    old, kind = user.at(35), "security_groups"
    body = {"security_group": {"name": "web", "description": "d", "unknown": 1}}
    made = (await _asked(old, "POST", "/os-security-groups", kind, "create_security_group", body))["security_group"]
    assert (made["name"], made["description"], made["tenant_id"], made["rules"]) == ("web", "d", user.project, [])
    path = f"/os-security-groups/{made['id']}"
    assert (await _asked(old, "GET", path, kind, "get_security_group"))["security_group"] == made
    change = {"security_group": {"name": "www", "description": ""}}
    changed = (await _asked(old, "PUT", path, kind, "update_security_group", change))["security_group"]
    assert changed == {**made, "name": "www", "description": ""}
    listed = (await _asked(old, "GET", "/os-security-groups", kind, "list_security_groups"))["security_groups"]
    assert [group["name"] for group in listed] == ["default", "www"]
    assert [group["name"] for group in (await old.get("/os-security-groups?limit=1"))["security_groups"]] != []
    assert len((await old.get("/os-security-groups?limit=1&offset=1"))["security_groups"]) == 1
    stranger = cloud.caller().at(35)
    for method, sent in (("GET", None), ("PUT", change), ("DELETE", None)):
        await stranger.refused(404, method, path, sent)
        await old.refused(400, method, "/os-security-groups/web", sent)
    assert made["id"] not in [each["id"] for each in (await stranger.get("/os-security-groups"))["security_groups"]]
    everywhere = (await old.admin.get("/os-security-groups?all_tenants=1"))["security_groups"]
    assert {user.project, stranger.project} <= {group["tenant_id"] for group in everywhere}
    assert len((await old.get("/os-security-groups?all_tenants=1"))["security_groups"]) == 2
    await _asked(old, "DELETE", path, kind, "delete_security_group")
    await old.refused(404, "GET", path)
    for bad in ({}, {"security_group": {"name": "x"}}, {"security_group": {"name": "x" * 256, "description": ""}}):
        await old.refused(400, "POST", "/os-security-groups", bad)


async def test_a_group_in_use_is_not_deleted(user: Caller) -> None:
    place, web = await network(user), await make(user, "security_group", name="web")
    await make(user, "port", network_id=place["id"], security_groups=[web["id"]])
    assert "in use" in await user.at(35).refused(400, "DELETE", f"/os-security-groups/{web['id']}")


async def test_quotas_of_groups_and_rules(user: Caller) -> None:
    web = await make(user, "security_group", name="web")
    used = (await ok(user, "GET", f"/network/v2.0/quotas/{user.project}/details"))["quota"]
    quota = {name: used[name]["used"] for name in ("security_group", "security_group_rule")}
    await ok(user.admin, "PUT", f"/network/v2.0/quotas/{user.project}", {"quota": quota})
    body = {"security_group": {"name": "x", "description": ""}}
    await user.at(35).refused(403, "POST", "/os-security-groups", body)
    await user.at(35).refused(403, "POST", "/os-security-group-rules", _rule(web["id"]))


def _rule(group: str, **fields: Any) -> dict[str, Any]:
    rule = {"parent_group_id": group, "ip_protocol": "tcp", "from_port": 80, "to_port": 81, **fields}
    return {"security_group_rule": rule}


async def test_rules(cloud: Cloud, user: Caller) -> None:
    old, kind, path = user.at(35), "security_groups", "/os-security-group-rules"
    web, db = [await make(user, "security_group", name=name) for name in ("web", "db")]

    async def rule(**fields: Any) -> Any:
        answer = await _asked(old, "POST", path, kind, "create_security_group_rule", _rule(web["id"], **fields))
        return answer["security_group_rule"]

    plain = await rule(cidr="10.0.0.0/8")
    assert {**plain, "id": ""} == {
        "id": "", "parent_group_id": web["id"], "ip_protocol": "tcp", "from_port": 80, "to_port": 81,
        "group": {}, "ip_range": {"cidr": "10.0.0.0/8"},
    }  # fmt: skip
    assert (await rule(ip_protocol="UDP", from_port="53", to_port="53"))["ip_range"] == {"cidr": "0.0.0.0/0"}
    ping = await rule(ip_protocol="icmp", from_port=-1, to_port=-1)
    assert (ping["from_port"], ping["to_port"]) == (-1, -1)
    for written in ("2001:db8::/32", "10.2.3.124/24"):
        assert (await rule(cidr=written))["ip_range"] == {"cidr": written}
    source = {"name": "db", "tenant_id": user.project}
    whole = await rule(group_id=db["id"], from_port=None, to_port=None)
    assert (whole["from_port"], whole["to_port"], whole["group"], whole["ip_range"]) == (1, 65535, source, {})
    anything = await rule(group_id=db["id"], ip_protocol=None, from_port=None, to_port=None)
    assert (anything["ip_protocol"], anything["from_port"], anything["group"]) == (None, None, source)
    shown = (await old.get(f"/os-security-groups/{web['id']}"))["security_group"]["rules"]
    assert len(shown) == 7 and plain in shown and whole in shown

    await cloud.caller().at(35).refused(404, "DELETE", f"{path}/{plain['id']}")
    await _asked(old, "DELETE", f"{path}/{plain['id']}", kind, "delete_security_group_rule")
    await old.refused(404, "DELETE", f"{path}/{plain['id']}")
    await old.refused(400, "DELETE", f"{path}/1")
    await cloud.caller().at(35).refused(404, "POST", path, _rule(web["id"]))
    await old.refused(404, "POST", path, _rule(str(uuid.uuid4())))
    await old.refused(404, "POST", path, _rule(web["id"], group_id=str(uuid.uuid4())))
    assert "exists" in await old.refused(400, "POST", path, _rule(web["id"], cidr="2001:db8::/32"))


@pytest.mark.parametrize(
    "fields",
    [
        {"parent_group_id": "web"},
        {"group_id": "db"},
        {"ip_protocol": "zork"},
        {"ip_protocol": None},
        {"from_port": None},
        {"from_port": "http"},
        {"from_port": 82},
        {"from_port": 0},
        {"to_port": 65536},
        {"from_port": []},
        {"ip_protocol": "icmp", "from_port": 256},
        {"cidr": "10.0.0.1"},
        {"cidr": "10.0.0.1/0"},
        {"cidr": "zork"},
        {"cidr": "10.0.0.0/33"},
        {"cidr": ["10.0.0.0/8"]},
    ],
)
async def test_bad_rules(user: Caller, fields: dict[str, Any]) -> None:
    web = await make(user, "security_group", name="web")
    await user.at(35).refused(400, "POST", "/os-security-group-rules", _rule(web["id"], **fields))


async def test_a_rule_whose_source_is_another_projects(cloud: Cloud, user: Caller) -> None:
    """A server shows the rules of its groups with the names of their sources."""
    place, web = await network(user), await make(user, "security_group", name="web")
    db = await make(user, "security_group", name="db")
    rule = {"security_group_id": web["id"], "direction": "ingress", "remote_group_id": db["id"]}
    await make(user, "security_group_rule", **rule)
    server = await user.boot(networks=[{"uuid": place["id"]}], security_groups=[{"name": "web"}])
    [shown] = (await user.get(f"/servers/{server['id']}/os-security-groups"))["security_groups"]
    assert [each["group"] for each in shown["rules"]] == [{"name": "db", "tenant_id": user.project}]


# --- floating IPs --------------------------------------------------------------------------------------------------


async def test_floating_ips(cloud: Cloud, user: Caller) -> None:
    pool, old, kind = await _pool(user), user.at(35), "floating_ips"
    pools = (await old.get("/os-floating-ip-pools"))["floating_ip_pools"]
    assert {"name": pool["name"]} in pools
    body = {"pool": pool["name"]}
    made = (await _asked(old, "POST", "/os-floating-ips", kind, "create_get_floating_ip", body))["floating_ip"]
    assert made["ip"].startswith("203.0.113.") and made["pool"] == pool["name"]
    assert (made["fixed_ip"], made["instance_id"]) == (None, None)
    path = f"/os-floating-ips/{made['id']}"
    assert (await _asked(old, "GET", path, kind, "create_get_floating_ip"))["floating_ip"] == made
    listed = await _asked(old, "GET", "/os-floating-ips", kind, "list_floating_ips")
    assert listed == {"floating_ips": [made]}
    stranger = cloud.caller().at(35)
    assert await stranger.get("/os-floating-ips") == {"floating_ips": []}
    for method in ("GET", "DELETE"):
        await stranger.refused(404, method, path)
    by_id = (await old.post("/os-floating-ips", {"pool": pool["id"]}, 200))["floating_ip"]
    assert by_id["pool"] == pool["name"]
    await old.refused(404, "POST", "/os-floating-ips", {"pool": "zork"})
    await old.refused(400, "POST", "/os-floating-ips", {"pool": 1})
    await ok(user.admin, "PUT", f"/network/v2.0/quotas/{user.project}", {"quota": {"floatingip": 2}})
    assert "over quota" in await old.refused(403, "POST", "/os-floating-ips", body)
    await old.delete(path, 202)
    await old.refused(404, "GET", path)


async def test_a_pool_without_addresses(user: Caller) -> None:
    pool = await make(user.admin, "network", name=f"pool-{uuid.uuid4().hex[:6]}", **{"router:external": True})
    full = {"network_id": pool["id"], "ip_version": 4, "cidr": "198.51.100.0/30", "enable_dhcp": False}
    await make(user.admin, "subnet", **full)
    body, path = {"pool": pool["id"]}, "/os-floating-ips"
    await user.at(35).post(path, body, 200)
    assert "No more floating IPs" in await user.at(35).refused(404, "POST", path, body)


async def _shown(user: Caller, server: str, kind: str) -> list[str]:
    addresses = (await user.show(server))["addresses"]
    return [each["addr"] for listed in addresses.values() for each in listed if each["OS-EXT-IPS:type"] == kind]


async def test_floating_ips_of_servers(cloud: Cloud, user: Caller) -> None:
    pool = await _pool(user)
    place = await _routed(user, pool)
    server, other = await asyncio.gather(*(user.boot(networks=[{"uuid": place["id"]}]) for _ in range(2)))
    old, path = user.at(43), f"/servers/{server['id']}/action"
    floating = (await user.at(35).post("/os-floating-ips", {"pool": pool["name"]}, 200))["floating_ip"]
    [fixed] = await _shown(user, server["id"], "fixed")
    asked = {"addFloatingIp": {"address": floating["ip"]}}
    remove = {"removeFloatingIp": {"address": floating["ip"]}}

    stranger = cloud.caller().at(43)
    for body in (asked, remove):
        await stranger.refused(404, "POST", path, body)
    assert "not associated" in await old.refused(409, "POST", path, remove)
    await _asked(old, "POST", path, "floating_ips", "add_remove_floating_ip", asked)
    assert await _shown(user, server["id"], "floating") == [floating["ip"]]
    shown = (await user.at(35).get(f"/os-floating-ips/{floating['id']}"))["floating_ip"]
    assert (shown["fixed_ip"], shown["instance_id"]) == (fixed, server["id"])
    await old.refused(409, "POST", f"/servers/{other['id']}/action", remove)
    await _asked(old, "POST", path, "floating_ips", "add_remove_floating_ip", remove)
    assert await _shown(user, server["id"], "floating") == []

    await old.post(path, {"addFloatingIp": {"address": floating["ip"], "fixed_address": fixed}})
    bad: list[tuple[dict[str, Any], int]] = [
        ({"addFloatingIp": {"address": floating["ip"], "fixed_address": "10.9.9.9"}}, 400),
        ({"addFloatingIp": {"address": "203.0.113.250"}}, 404),
        ({"removeFloatingIp": {"address": "203.0.113.250"}}, 404),
        ({"addFloatingIp": {"address": "zork"}}, 400),
        ({"addFloatingIp": {"address": floating["ip"], "fixed_address": None}}, 400),
        ({"addFloatingIp": {}}, 400),
    ]
    for wrong, status in bad:
        await old.refused(status, "POST", path, wrong)
    bare = await user.boot()
    assert "No fixed IPs" in await old.refused(400, "POST", f"/servers/{bare['id']}/action", asked)
    for body in (asked, remove):
        await user.at(44).refused(404, "POST", path, body)


async def test_nobody_gets_anothers_floating_ip(cloud: Cloud, user: Caller) -> None:
    """The user's rights count at the network service, not those of compute's service user."""
    pool, stranger = await _pool(user), cloud.caller()
    theirs = (await stranger.at(35).post("/os-floating-ips", {"pool": pool["name"]}, 200))["floating_ip"]
    place = await _routed(user, pool)
    server = await user.boot(networks=[{"uuid": place["id"]}])
    body = {"addFloatingIp": {"address": theirs["ip"]}}
    await user.at(43).refused(404, "POST", f"/servers/{server['id']}/action", body)


# --- fixed IPs -----------------------------------------------------------------------------------------------------


async def test_fixed_ips(cloud: Cloud, user: Caller) -> None:
    place = await network(user)
    server = await user.boot(networks=[{"uuid": place["id"]}])
    old, path = user.at(43), f"/servers/{server['id']}/action"
    await cloud.caller().at(43).refused(404, "POST", path, {"addFixedIp": {"networkId": place["id"]}})
    await old.post(path, {"addFixedIp": {"networkId": place["id"]}})
    first, second = await _shown(user, server["id"], "fixed")
    [port] = await ports_of(user, server["id"])
    assert {fixed["ip_address"] for fixed in port["fixed_ips"]} == {first, second}
    await old.post(path, {"removeFixedIp": {"address": first}})
    assert await _shown(user, server["id"], "fixed") == [second]
    elsewhere = await network(user, cidr="10.8.0.0/24")
    for body, status in (
        ({"removeFixedIp": {"address": first}}, 400),
        ({"removeFixedIp": {"address": "zork"}}, 400),
        ({"addFixedIp": {"networkId": elsewhere["id"]}}, 404),
        ({"addFixedIp": {"networkId": str(uuid.uuid4())}}, 404),
        ({"addFixedIp": {"networkId": 1}}, 404),
        ({"addFixedIp": {"networkId": ""}}, 400),
        ({"addFixedIp": {"networkId": None}}, 400),
    ):
        await old.refused(status, "POST", path, body)
    for body in ({"addFixedIp": {"networkId": place["id"]}}, {"removeFixedIp": {"address": second}}):
        await user.at(44).refused(404, "POST", path, body)
    await user.post(path, {"lock": None})
    await old.refused(409, "POST", path, {"addFixedIp": {"networkId": place["id"]}})
    await user.post(path, {"unlock": None})


async def test_a_shared_networks_addresses_are_its_owners_to_choose(cloud: Cloud, user: Caller) -> None:
    """What the network service refuses the user, compute does not do for them."""
    shared = await network(user.admin, cidr="10.33.0.0/24", shared=True)
    member = cloud.caller()
    server = await member.boot(networks=[{"uuid": shared["id"]}])
    body = {"addFixedIp": {"networkId": shared["id"]}}
    await member.at(43).refused(403, "POST", f"/servers/{server['id']}/action", body)
    assert len(await _shown(member, server["id"], "fixed")) == 1
    await member.delete(f"/servers/{server['id']}")
    await member.gone(server["id"])
    await ok(user.admin, "DELETE", f"/network/v2.0/networks/{shared['id']}")


# --- versions ------------------------------------------------------------------------------------------------------


async def test_where_they_end(user: Caller) -> None:
    for path in (
        "/os-networks",
        "/os-tenant-networks",
        "/os-security-groups",
        "/os-floating-ips",
        "/os-floating-ip-pools",
    ):
        await user.at(35).get(path)
        answer = await user.at(36).request("GET", path)
        assert answer.status == 404 and "itemNotFound" in answer.json()
        assert answer.headers["openstack-api-version"] == "compute 2.36"


async def test_bare_metal_nodes(user: Caller) -> None:
    path = "/os-baremetal-nodes"
    for where in (path, f"{path}/1"):
        await user.at(35).refused(403, "GET", where)
        assert "bare metal" in await user.admin.at(35).refused(501, "GET", where)
    for method, where in (("POST", path), ("DELETE", f"{path}/1"), ("POST", f"{path}/1/action")):
        await user.at(35).refused(400, method, where, {"add_interface": {}} if method == "POST" else None)
        await user.at(36).refused(404, method, where, {"add_interface": {}} if method == "POST" else None)
