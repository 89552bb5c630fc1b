"""Ports: addresses, security groups, binding to hosts; on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.network.tables import agents
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, MANAGER, SERVICE, World, error, quota_drift, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


async def refused(
    cloud: World, method: str, path: str, body: dict[str, Any], status: int, type_: str, token: str = ALICE
) -> None:
    answer = await cloud.call(method, path, body, token=token)
    assert (answer.status, error(answer)) == (status, type_), answer.body


async def test_a_port_shows_what_clients_expect(cloud: World) -> None:
    network, subnet = await cloud.network()
    port = await cloud.make("port", network_id=network["id"], name="eth", tags=["t"], dns_name="web")
    [default] = await cloud.list("security_group", "name=default")
    assert port == {
        "id": port["id"], "name": "eth", "description": "", "project_id": "p1", "tenant_id": "p1",
        "network_id": network["id"], "mac_address": port["mac_address"], "admin_state_up": True, "status": "DOWN",
        "device_id": "", "device_owner": "", "security_groups": [default["id"]], "allowed_address_pairs": [],
        "fixed_ips": [{"subnet_id": subnet["id"], "ip_address": "10.1.0.2"}], "extra_dhcp_opts": [],
        "port_security_enabled": True, "binding:vnic_type": "normal", "dns_name": "web", "dns_domain": "",
        "dns_assignment": [{"ip_address": "10.1.0.2", "hostname": "web", "fqdn": "web.openstacklocal."}],
        "ip_allocation": "immediate", "qos_policy_id": None, "qos_network_policy_id": None,
        "tags": ["t"], "revision_number": 1,
        "created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    assert port["mac_address"].startswith("fa:16:3e:")
    assert await cloud.show("port", port["id"]) == port
    seen = await cloud.show("port", port["id"], ADMIN)
    assert (seen["binding:host_id"], seen["binding:vif_type"], seen["binding:profile"]) == ("", "unbound", {})


async def test_addresses_that_are_asked_for(cloud: World) -> None:
    network, subnet = await cloud.network("10.1.0.0/24")
    other = await cloud.make("subnet", network_id=network["id"], cidr="10.2.0.0/24", ip_version=4)

    async def addresses(**fields: Any) -> list[str]:
        port = await cloud.make("port", network_id=network["id"], **fields)
        return [each["ip_address"] for each in port["fixed_ips"]]

    assert await addresses(fixed_ips=[{"ip_address": "10.1.0.77"}]) == ["10.1.0.77"]
    assert await addresses(fixed_ips=[{"subnet_id": other["id"]}]) == ["10.2.0.2"]
    assert await addresses(fixed_ips=[{"subnet_id": other["id"], "ip_address": "10.2.0.9"}]) == ["10.2.0.9"]
    assert await addresses(fixed_ips=[{"subnet_id": subnet["id"]}, {"subnet_id": other["id"]}]) == [
        "10.1.0.2", "10.2.0.3",
    ]  # fmt: skip
    assert await addresses(fixed_ips=[]) == []
    body = {"port": {"network_id": network["id"]}}
    for fixed, status, type_ in (
        ([{"ip_address": "10.1.0.77"}], 409, "IpAddressInUse"),
        ([{"ip_address": "10.9.0.1"}], 400, "InvalidIpForNetwork"),
        ([{"ip_address": "10.1.0.255"}], 400, "InvalidIpForSubnet"),
        ([{"ip_address": "10.1.0.0", "subnet_id": subnet["id"]}], 400, "InvalidIpForSubnet"),
        ([{"ip_address": "10.2.0.77", "subnet_id": subnet["id"]}], 400, "InvalidIpForSubnet"),
        ([{"subnet_id": "no-such-subnet"}], 400, "InvalidInput"),
        ([{}], 400, "InvalidInput"),
        ([{"ip_address": "10.1.0.5"}, {"ip_address": "10.1.0.5"}], 400, "HTTPBadRequest"),
        ([{"subnet_id": subnet["id"]}] * 6, 400, "InvalidInput"),
    ):
        await refused(cloud, "POST", "/ports", {"port": {**body["port"], "fixed_ips": fixed}}, status, type_)


async def test_a_full_network_says_so_and_has_room_again(cloud: World) -> None:
    network, _ = await cloud.network("10.1.0.0/29")
    made = [await cloud.make("port", network_id=network["id"]) for _ in range(5)]
    assert sorted(each["fixed_ips"][0]["ip_address"] for each in made) == [f"10.1.0.{n}" for n in range(2, 7)]
    await refused(cloud, "POST", "/ports", {"port": {"network_id": network["id"]}}, 409, "IpAddressGenerationFailure")
    await cloud.delete("port", made[2]["id"])
    again = await cloud.make("port", network_id=network["id"])
    assert again["fixed_ips"] == made[2]["fixed_ips"]


async def test_an_address_that_was_given_back_rests(cloud: World) -> None:
    network, _ = await cloud.network("10.1.0.0/24")
    first = await cloud.make("port", network_id=network["id"])
    await cloud.delete("port", first["id"])
    second = await cloud.make("port", network_id=network["id"])
    assert second["fixed_ips"][0]["ip_address"] == "10.1.0.3"


async def test_addresses_change(cloud: World) -> None:
    network, subnet = await cloud.network("10.1.0.0/24")
    port = await cloud.make("port", network_id=network["id"])
    keep, add = {"ip_address": "10.1.0.2"}, {"ip_address": "10.1.0.50", "subnet_id": subnet["id"]}
    changed = await cloud.change("port", port["id"], fixed_ips=[keep, add])
    assert [each["ip_address"] for each in changed["fixed_ips"]] == ["10.1.0.2", "10.1.0.50"]
    changed = await cloud.change("port", port["id"], fixed_ips=[add])
    assert [each["ip_address"] for each in changed["fixed_ips"]] == ["10.1.0.50"]
    changed = await cloud.change("port", port["id"], fixed_ips=[{"subnet_id": subnet["id"]}])
    assert [each["ip_address"] for each in changed["fixed_ips"]] == ["10.1.0.50"]
    other = await cloud.make("port", network_id=network["id"], fixed_ips=[keep])
    body = {"port": {"fixed_ips": [{"ip_address": "10.1.0.50"}]}}
    await refused(cloud, "PUT", f"/ports/{other['id']}", body, 409, "IpAddressInUse")
    assert (await cloud.change("port", port["id"], fixed_ips=[]))["fixed_ips"] == []
    await cloud.change("port", other["id"], fixed_ips=body["port"]["fixed_ips"])


async def test_mac_addresses_are_unique_on_a_network(cloud: World) -> None:
    network, _ = await cloud.network()
    elsewhere, _ = await cloud.network()
    mac = "fa:16:3e:00:00:01"
    port = await cloud.make("port", network_id=network["id"], mac_address=mac)
    await cloud.make("port", network_id=elsewhere["id"], mac_address=mac)
    body = {"port": {"network_id": network["id"], "mac_address": mac}}
    await refused(cloud, "POST", "/ports", body, 409, "MacAddressInUse")
    other = await cloud.make("port", network_id=network["id"])
    body = {"port": {"mac_address": mac}}
    await refused(cloud, "PUT", f"/ports/{other['id']}", body, 409, "MacAddressInUse", MANAGER)
    changed = await cloud.change("port", other["id"], MANAGER, mac_address="fa:16:3e:00:00:02")
    assert changed["mac_address"] == "fa:16:3e:00:00:02"
    await cloud.change("port", port["id"], SERVICE, binding__host_id="h")
    body = {"port": {"mac_address": "fa:16:3e:00:00:03"}}
    await refused(cloud, "PUT", f"/ports/{port['id']}", body, 409, "PortBound", ADMIN)


async def test_groups_and_port_security(cloud: World) -> None:
    network, _ = await cloud.network()
    group = await cloud.make("security_group", name="web")
    foreign = await cloud.make("security_group", BOB, name="web")
    port = await cloud.make("port", network_id=network["id"], security_groups=[group["id"]])
    assert port["security_groups"] == [group["id"]]
    assert [p["id"] for p in await cloud.list("port", f"security_groups={group['id']}")] == [port["id"]]
    assert (await cloud.change("port", port["id"], security_groups=[]))["security_groups"] == []
    body = {"port": {"security_groups": [foreign["id"]]}}
    await refused(cloud, "PUT", f"/ports/{port['id']}", body, 404, "SecurityGroupNotFound")
    body = {"port": {"network_id": network["id"], "security_groups": ["nothing"]}}
    await refused(cloud, "POST", "/ports", body, 404, "SecurityGroupNotFound")
    bare = await cloud.make("port", network_id=network["id"], port_security_enabled=False)
    assert bare["security_groups"] == []
    body = {"port": {"security_groups": [group["id"]]}}
    await refused(cloud, "PUT", f"/ports/{bare['id']}", body, 409, "PortSecurityPortHasSecurityGroup")
    pairs: dict[str, dict[str, Any]] = {"port": {"allowed_address_pairs": [{"ip_address": "10.1.0.200"}]}}
    await refused(cloud, "PUT", f"/ports/{bare['id']}", pairs, 409, "AddressPairAndPortSecurityRequired")
    changed = await cloud.change("port", port["id"], **pairs["port"])
    assert changed["allowed_address_pairs"] == [{"ip_address": "10.1.0.200", "mac_address": port["mac_address"]}]
    made = await cloud.make("port", network_id=network["id"], allowed_address_pairs=[{"ip_address": "10.1.0.0/25"}])
    assert made["allowed_address_pairs"] == [{"ip_address": "10.1.0.0/25", "mac_address": made["mac_address"]}]
    open_network, _ = await cloud.network(port_security_enabled=False)
    assert (await cloud.make("port", network_id=open_network["id"]))["security_groups"] == []


async def test_dhcp_options_merge(cloud: World) -> None:
    network, _ = await cloud.network()
    options = [{"opt_name": "bootfile-name", "opt_value": "x"}, {"opt_name": "server-ip-address", "opt_value": "y"}]
    port = await cloud.make("port", network_id=network["id"], extra_dhcp_opts=options)
    assert len(port["extra_dhcp_opts"]) == 2
    changes = [{"opt_name": "bootfile-name", "opt_value": None}, {"opt_name": "mtu", "opt_value": "9", "ip_version": 6}]
    changed = await cloud.change("port", port["id"], extra_dhcp_opts=changes)
    assert changed["extra_dhcp_opts"] == [
        {"opt_name": "server-ip-address", "opt_value": "y", "ip_version": 4},
        {"opt_name": "mtu", "opt_value": "9", "ip_version": 6},
    ]


# --- binding ---


async def test_one_request_makes_and_binds_a_port(cloud: World) -> None:
    network, _ = await cloud.network()
    group = await cloud.make("security_group", name="g")
    port = await cloud.make(
        "port", SERVICE, network_id=network["id"], project_id="p1", device_id="server", device_owner="compute:nova",
        binding__host_id="host1", security_groups=[group["id"]], binding__profile={"a": [1, {"b": None}]},
    )  # fmt: skip
    assert (port["status"], port["project_id"], port["binding:host_id"]) == ("ACTIVE", "p1", "host1")
    assert port["binding:vif_type"] == "bridge"
    assert port["binding:vif_details"]["bridge_name"] == f"brq{network['id'][:11]}"
    assert port["binding:profile"] == {"a": [1, {"b": None}]}
    seen = await cloud.show("port", port["id"])
    assert not [name for name in seen if name.startswith("binding:") and name != "binding:vnic_type"]
    unbound = await cloud.change("port", port["id"], SERVICE, binding__host_id=None, device_id="", device_owner="")
    assert (unbound["status"], unbound["binding:vif_type"], unbound["device_id"]) == ("DOWN", "unbound", "")
    moved = await cloud.change("port", port["id"], SERVICE, binding__host_id="host2")
    assert (moved["status"], moved["binding:host_id"]) == ("ACTIVE", "host2")
    down = await cloud.change("port", port["id"], SERVICE, admin_state_up=False)
    assert down["status"] == "DOWN"


async def test_a_host_with_an_agent_keeps_the_port_down_until_it_is_wired(cloud: World) -> None:
    now = cloud.role.core.now()

    def report(conn: object) -> None:
        conn.execute(  # type: ignore[attr-defined]
            agents.insert(),
            {"id": "a", "agent_type": "L2", "binary": "micronova", "host": "wired", "topic": "N/A", "description": "",
             "availability_zone": "nova", "admin_state_up": True, "configurations": {}, "created_at": now,
             "started_at": now, "heartbeat_at": now},
        )  # fmt: skip

    await cloud.database.write(report)
    network, _ = await cloud.network()
    port = await cloud.make("port", SERVICE, network_id=network["id"], project_id="p1", binding__host_id="wired")
    assert port["status"] == "DOWN"
    [agent] = await cloud.list("agent", token=ADMIN)
    assert (agent["host"], agent["alive"]) == ("wired", True)
    assert await cloud.list("agent") == []
    assert (await cloud.change("agent", "a", ADMIN, description="d"))["description"] == "d"
    await cloud.clock.jump(100)
    other = await cloud.make("port", SERVICE, network_id=network["id"], project_id="p1", binding__host_id="wired")
    assert other["status"] == "DOWN", "a silent agent may return"
    await cloud.delete("agent", "a", ADMIN)
    last = await cloud.make("port", SERVICE, network_id=network["id"], project_id="p1", binding__host_id="wired")
    assert last["status"] == "ACTIVE"  # the host has no agent to report it


async def test_members_may_not_bind(cloud: World) -> None:
    network, _ = await cloud.network()
    body = {"port": {"network_id": network["id"], "binding:host_id": "h"}}
    await refused(cloud, "POST", "/ports", body, 403, "PolicyNotAuthorized")
    port = await cloud.make("port", network_id=network["id"])
    forbidden: list[dict[str, Any]] = [
        {"binding:host_id": "h"}, {"binding:profile": {}}, {"mac_address": "fa:16:3e:00:00:01"}
    ]  # fmt: skip
    for changes in forbidden:
        await refused(cloud, "PUT", f"/ports/{port['id']}", {"port": changes}, 403, "PolicyNotAuthorized")
    assert await cloud.list("port", "binding:host_id=") == []


async def test_ports_of_servers_are_not_for_members_to_delete(cloud: World) -> None:
    network, _ = await cloud.network()
    port = await cloud.make("port", network_id=network["id"], device_id="s", device_owner="compute:nova")
    assert (await cloud.call("DELETE", f"/ports/{port['id']}")).status == 403
    await cloud.delete("port", port["id"], SERVICE)


async def test_filters_of_ports(cloud: World) -> None:
    network, subnet = await cloud.network()
    one = await cloud.make("port", network_id=network["id"], device_id="d1", name="one")
    two = await cloud.make("port", network_id=network["id"], device_id="d2", device_owner="x:y")

    async def ids(query: str, token: str = ALICE) -> set[str]:
        return {each["id"] for each in await cloud.list("port", query, token)}

    both = {one["id"], two["id"]}
    assert await ids("device_id=d1") == {one["id"]}
    assert await ids("device_id=d1&device_id=d2") == both
    assert await ids("device_owner=x:y") == {two["id"]}
    assert await ids("fixed_ips=ip_address=10.1.0.2") == {one["id"]}
    assert await ids("fixed_ips=ip_address%3D10.1.0.2&fixed_ips=ip_address%3D10.1.0.3") == both
    assert await ids(f"fixed_ips=subnet_id={subnet['id']}") == both
    assert await ids(f"fixed_ips=subnet_id={subnet['id']},ip_address=10.1.0.3") == {two["id"]}
    assert await ids("fixed_ips=ip_address_substr=1.0.3") == {two["id"]}
    assert await ids(f"mac_address={one['mac_address']}") == {one["id"]}
    assert await ids(f"network_id={network['id']}&status=DOWN") == both
    assert await ids("name=one&admin_state_up=true") == {one["id"]}
    assert await ids("binding:host_id=", ADMIN) == both
    assert (await cloud.call("GET", "/ports?fixed_ips=nonsense")).status == 400


async def test_many_ports_in_one_request(cloud: World) -> None:
    network, _ = await cloud.network("10.1.0.0/28")
    await cloud.call("PUT", "/quotas/p1", {"quota": {"port": 5}}, token=ADMIN)
    body = {"ports": [{"network_id": network["id"], "name": str(number)} for number in range(4)]}
    answer = await cloud.call("POST", "/ports", body)
    assert answer.status == 201
    addresses = [port["fixed_ips"][0]["ip_address"] for port in answer.json()["ports"]]
    assert len(set(addresses)) == 4
    await refused(cloud, "POST", "/ports", body, 409, "OverQuota")
    assert len(await cloud.list("port")) == 4
    used = (await cloud.call("GET", "/quotas/p1/details")).json()["quota"]["port"]["used"]
    assert used == 4
