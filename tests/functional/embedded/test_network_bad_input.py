"""Bad input gets a 4xx with a message that says what is wrong, never a 5xx; on both databases."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.network.world import ADMIN, ALICE, World, world

NET, SUB, PORT, GROUP, ROUTER, FIP, POOL = "{network}", "{subnet}", "{port}", "{group}", "{router}", "{fip}", "{pool}"
LONG = "x" * 256
HUGE = 10**40


def these(*bodies: Any) -> tuple[Any, ...]:
    """Return the bodies, whatever their types are."""
    return bodies


# (method, path, body); names in braces stand for the ids of existing resources.
BODIES: list[tuple[str, str, Any]] = [
    # not a body
    *(("POST", f"/{kind}", body) for kind in (
        "networks", "subnets", "ports", "routers", "floatingips", "subnetpools", "security-groups",
        "security-group-rules", "rbac-policies", "default-security-group-rules",
    ) for body in these(b"", b"{", b"[]", b"null", b"{}", b"1", b'"x"', b"\xff\xfe", b"[" * 20_000,
                   {"nothing": {}}, {"network": None}, {"networks": []}, {"networks": {}}, {"ports": [1]},
                   {"network": [], "networks": []})),
    # networks
    *(("POST", "/networks", {"network": body}) for body in these(
        {"name": None}, {"name": 1}, {"name": LONG}, {"name": "a\x00b"}, {"colour": "blue"}, {"shared": "maybe"},
        {"shared": 2}, {"admin_state_up": []}, {"mtu": -1}, {"mtu": 67}, {"mtu": HUGE}, {"mtu": "many"},
        {"description": LONG}, {"tags": "t"}, {"tags": [""]}, {"tags": [LONG]}, {"tags": ["a,b"]}, {"tags": ["t"] * 51},
        {"project_id": "p1", "tenant_id": "p2"}, {"project_id": "p2"}, {"project_id": LONG}, {"dns_domain": 7},
        {"availability_zone_hints": "nova"}, {"id": "x"}, {"status": "DOWN"}, {"qos_policy_id": 7},
        {"provider:network_type": "pigeon"}, {"provider:segmentation_id": "x"},
    )),
    ("POST", "/networks", {"network": {}, "networks": [{}]}),
    *(("PUT", f"/networks/{NET}", {"network": body}) for body in these(
        {"name": None}, {"project_id": "p1"}, {"id": "x"}, {"subnets": []}, {"mtu": 0.5}, {"name": "\x00"},
    )),
    # subnets
    *(("POST", "/subnets", {"subnet": {"network_id": NET, **body}}) for body in these(
        {}, {"cidr": "x", "ip_version": 4}, {"cidr": "10.0.0.0/33", "ip_version": 4}, {"cidr": 7, "ip_version": 4},
        {"cidr": "10.0.0.0/24", "ip_version": 5}, {"cidr": "10.0.0.0/24", "ip_version": 6},
        {"cidr": "fd00::/64", "ip_version": 4}, {"cidr": "0.0.0.0/0", "ip_version": 4},
        {"cidr": "224.0.0.0/24", "ip_version": 4}, {"cidr": "127.0.0.0/24", "ip_version": 4},
        {"cidr": "fe80::/64", "ip_version": 6}, {"cidr": "fd00::%eth0/64", "ip_version": 6},
        {"cidr": "126.0.0.0/7", "ip_version": 4}, {"cidr": "0.0.0.0/1", "ip_version": 4},
        {"cidr": "192.0.0.0/2", "ip_version": 4}, {"cidr": "168.0.0.0/7", "ip_version": 4},
        {"cidr": "255.255.255.0/24", "ip_version": 4}, {"cidr": "::/64", "ip_version": 6},
        {"cidr": "fe00::/8", "ip_version": 6},
        {"cidr": "10.9.0.0/24", "gateway_ip": "127.0.0.1"}, {"cidr": "10.9.0.0/24", "gateway_ip": "224.0.0.1"},
        {"cidr": "10.9.0.0/24", "gateway_ip": "x"}, {"cidr": "10.9.0.0/24", "gateway_ip": "fd00::1"},
        {"cidr": "10.9.0.0/24", "gateway_ip": "10.9.0.0"}, {"cidr": "10.9.0.0/24", "gateway_ip": "10.9.0.255"},
        {"cidr": "10.9.0.0/24", "allocation_pools": [{}]},
        {"cidr": "10.9.0.0/24", "allocation_pools": [{"start": "10.9.0.2"}]},
        {"cidr": "10.9.0.0/24", "allocation_pools": [{"start": "10.9.0.9", "end": "10.9.0.2"}]},
        {"cidr": "10.9.0.0/24", "allocation_pools": [{"start": "10.8.0.2", "end": "10.9.0.2"}]},
        {"cidr": "10.9.0.0/24", "allocation_pools": [{"start": "fd00::1", "end": "fd00::2"}]},
        {"cidr": "10.9.0.0/24", "allocation_pools": [{"start": "x", "end": "y"}]},
        {"cidr": "10.9.0.0/24", "allocation_pools": [{"start": "10.9.0.1", "end": "10.9.0.9"}]},
        {"cidr": "10.9.0.0/24", "allocation_pools": [
            {"start": "10.9.0.2", "end": "10.9.0.9"}, {"start": "10.9.0.9", "end": "10.9.0.10"}]},
        {"cidr": "10.9.0.0/24", "dns_nameservers": ["x"]}, {"cidr": "10.9.0.0/24", "dns_nameservers": ["1.1.1.1"] * 2},
        {"cidr": "10.9.0.0/24", "dns_nameservers": [f"1.1.1.{n}" for n in range(6)]},
        {"cidr": "10.9.0.0/24", "host_routes": [{"destination": "x", "nexthop": "10.9.0.2"}]},
        {"cidr": "10.9.0.0/24", "host_routes": [{"destination": "10.0.0.0/8", "nexthop": "fd00::1"}]},
        {"cidr": "10.9.0.0/24", "host_routes": [{"destination": "10.0.0.0/8"}]},
        {"cidr": "10.9.0.0/24", "ipv6_ra_mode": "slaac"}, {"cidr": "fd00::/64", "ip_version": 6, "ipv6_ra_mode": "x"},
        {"cidr": "fd00::/48", "ip_version": 6, "ipv6_address_mode": "slaac"},
        {"cidr": "fd00::/64", "ip_version": 6, "ipv6_ra_mode": "slaac", "ipv6_address_mode": "dhcpv6-stateful"},
        {"cidr": "fd00::/64", "ip_version": 6, "ipv6_ra_mode": "slaac", "enable_dhcp": False},
        {"cidr": "10.1.0.128/25"}, {"prefixlen": 24}, {"subnetpool_id": "nothing"}, {"use_default_subnetpool": True},
        {"subnetpool_id": POOL, "prefixlen": 99}, {"subnetpool_id": POOL, "prefixlen": 7},
        {"subnetpool_id": POOL, "cidr": "10.77.0.0/24", "prefixlen": 24}, {"subnetpool_id": POOL, "ip_version": 6},
    )),
    ("POST", "/subnets", {"subnet": {"network_id": "nothing", "cidr": "10.0.0.0/24"}}),
    ("POST", "/subnets", {"subnet": {"cidr": "10.0.0.0/24"}}),
    *(("PUT", f"/subnets/{SUB}", {"subnet": body}) for body in these(
        {"cidr": "10.0.0.0/24"}, {"gateway_ip": "x"}, {"gateway_ip": "fd00::1"}, {"dns_nameservers": "x"},
        {"allocation_pools": [{"start": "10.2.0.1", "end": "10.2.0.2"}]}, {"network_id": NET},
    )),
    # subnet pools
    *(("POST", "/subnetpools", {"subnetpool": {"name": "p", **body}}) for body in these(
        {}, {"prefixes": []}, {"prefixes": ["x"]}, {"prefixes": ["10.0.0.0/8", "fd00::/8"]}, {"prefixes": "10.0.0.0/8"},
        {"prefixes": ["10.0.0.0/8"], "min_prefixlen": 40}, {"prefixes": ["10.0.0.0/8"], "min_prefixlen": -1},
        {"prefixes": ["10.0.0.0/8"], "default_prefixlen": 4},
        {"prefixes": ["10.0.0.0/8"], "max_prefixlen": 16, "min_prefixlen": 24},
        {"prefixes": ["10.0.0.0/8"], "name": ""},
        {"prefixes": ["10.0.0.0/8"], "address_scope_id": "x"},
    )),
    ("PUT", f"/subnetpools/{POOL}", {"subnetpool": {"prefixes": ["192.168.0.0/16"]}}),
    # ports
    *(("POST", "/ports", {"port": {"network_id": NET, **body}}) for body in these(
        {"fixed_ips": "10.1.0.9"}, {"fixed_ips": [{"ip_address": "x"}]}, {"fixed_ips": [{"ip_address": "fd00::1"}]},
        {"fixed_ips": [{"colour": "x"}]}, {"fixed_ips": [{"subnet_id": None}]}, {"fixed_ips": [{"ip_address": "::%1"}]},
        {"mac_address": "x"}, {"mac_address": "01:00:00:00:00:00"}, {"mac_address": "00:00:00:00:00:00"},
        {"security_groups": ["nothing"]}, {"security_groups": [7]}, {"security_groups": GROUP},
        {"allowed_address_pairs": [{}]}, {"allowed_address_pairs": [{"ip_address": "x"}]},
        {"allowed_address_pairs": [{"ip_address": "10.0.0.0/99"}]},
        {"allowed_address_pairs": [{"ip_address": "10.0.0.1", "mac_address": "x"}]},
        {"allowed_address_pairs": [{"ip_address": "10.0.0.1"}] * 2},
        {"allowed_address_pairs": [{"ip_address": f"10.0.0.{n}"} for n in range(11)]},
        {"extra_dhcp_opts": [{}]}, {"extra_dhcp_opts": [{"opt_name": "x", "opt_value": " "}]},
        {"extra_dhcp_opts": [{"opt_name": "x", "opt_value": "y", "ip_version": 5}]},
        {"extra_dhcp_opts": [{"opt_name": "x" * 65, "opt_value": "y"}]},
        {"binding:vnic_type": "strange"}, {"dns_name": "a b"}, {"dns_name": "-a"}, {"dns_name": LONG},
        {"device_id": LONG}, {"device_owner": 1}, {"name": "\x00"}, {"tags": [1]}, {"status": "ACTIVE"},
        {"qos_policy_id": 7}, {"propagate_uplink_status": "x"},
    )),
    ("POST", "/ports", {"port": {"network_id": "nothing"}}),
    ("POST", "/ports", {"port": {"network_id": NET + "\x00"}}),
    ("POST", "/ports", {"port": {}}),
    ("POST", "/ports", {"ports": [{"network_id": NET}] * 501}),
    *(("PUT", f"/ports/{PORT}", {"port": body}) for body in these(
        {"network_id": NET}, {"fixed_ips": [{"ip_address": "10.9.0.1"}]}, {"security_groups": ["nothing"]},
        {"mac_address": 1}, {"project_id": "p1"}, {"device_owner": None},
    )),
    # security groups and rules
    *(("POST", "/security-groups", {"security_group": body}) for body in these(
        {"name": 1}, {"name": LONG}, {"stateful": "x"}, {"security_group_rules": []}, {"name": "a\x00"},
    )),
    *(("POST", "/security-group-rules", {"security_group_rule": {"direction": "ingress", **body}}) for body in these(
        {}, {"security_group_id": "nothing"}, {"security_group_id": GROUP, "protocol": []},
        {"security_group_id": GROUP, "port_range_min": HUGE}, {"security_group_id": GROUP, "protocol": HUGE},
        {"security_group_id": GROUP, "remote_ip_prefix": "x"}, {"security_group_id": GROUP, "protocol": "tcp\x00"},
        {"security_group_id": GROUP, "remote_group_id": "nothing"}, {"security_group_id": GROUP, "direction": None},
    )),
    # routers
    *(("POST", "/routers", {"router": body}) for body in these(
        {"external_gateway_info": "x"}, {"external_gateway_info": {"network_id": "nothing"}},
        {"external_gateway_info": {"network_id": NET}}, {"external_gateway_info": {"enable_snat": True}},
        {"external_gateway_info": {"colour": 1}}, {"routes": [{"destination": "x", "nexthop": "y"}]},
        {"routes": [{"destination": "10.0.0.0/8", "nexthop": "10.0.0.1"}]}, {"name": 1}, {"flavor_id": "x"},
    )),
    *(("PUT", f"/routers/{ROUTER}/add_router_interface", body) for body in these(
        {}, {"subnet_id": None}, {"subnet_id": "nothing"}, {"port_id": "nothing"}, {"colour": 1}, [], b"",
        {"subnet_id": SUB, "port_id": PORT}, {"subnet_id": "\x00"},
    )),
    ("PUT", f"/routers/{ROUTER}/remove_router_interface", {"subnet_id": SUB}),
    ("PUT", f"/routers/{ROUTER}/remove_router_interface", {"port_id": PORT}),
    ("PUT", f"/routers/{ROUTER}/add_extraroutes", {"router": {"routes": [{"destination": "10.0.0.0/8"}]}}),
    ("PUT", f"/routers/{ROUTER}/add_extraroutes", {"router": {}}),
    ("PUT", f"/routers/{ROUTER}", {"router": {"distributed": True}}),
    # floating IPs
    *(("POST", "/floatingips", {"floatingip": body}) for body in these(
        {}, {"floating_network_id": NET}, {"floating_network_id": "nothing"}, {"floating_network_id": None},
        {"floating_network_id": "{public}", "port_id": "nothing"},
        {"floating_network_id": "{public}", "subnet_id": SUB},
        {"floating_network_id": "{public}", "fixed_ip_address": "x"},
        {"floating_network_id": "{public}", "port_id": PORT, "fixed_ip_address": "x"},
    )),
    ("PUT", f"/floatingips/{FIP}", {"floatingip": {"port_id": "nothing"}}),
    ("PUT", f"/floatingips/{FIP}", {"floatingip": {"port_id": 7}}),
    ("PUT", f"/floatingips/{FIP}", {"floatingip": {"floating_ip_address": "203.0.113.99"}}),
    # tags and quotas
    ("PUT", f"/networks/{NET}/tags", {"tags": 1}),
    ("PUT", f"/networks/{NET}/tags", {"tags": ["a/b"]}),
    ("PUT", f"/networks/{NET}/tags", {}),
    ("PUT", f"/networks/{NET}/tags/{'x' * 300}", None),
    ("DELETE", f"/networks/{NET}/tags/none", None),
]  # fmt: skip

ADMIN_BODIES: list[tuple[str, str, Any]] = [
    *(("POST", "/networks", {"network": body}) for body in these(
        {"provider:network_type": "vlan"}, {"provider:network_type": "flat"},
        {"provider:network_type": "vxlan", "provider:physical_network": "x"}, {"provider:segmentation_id": 5},
        {"provider:network_type": "vxlan", "provider:segmentation_id": 0},
        {"provider:network_type": "vlan", "provider:physical_network": "x", "provider:segmentation_id": 4095},
        {"provider:network_type": "local", "provider:segmentation_id": 5},
    )),
    *(("PUT", "/quotas/p1", body) for body in these(
        {}, {"quota": {"port": -2}}, {"quota": {"port": "many"}}, {"quota": {"pigeons": 1}}, {"quota": {"port": HUGE}},
        {"quota": []}, {"quota": {"port": None}},
    )),
    ("PUT", "/agents/nothing", {"agent": {"admin_state_up": False}}),
    ("PUT", f"/ports/{PORT}", {"port": {"binding:profile": []}}),
]  # fmt: skip

QUERIES = [
    "/networks?limit=x", "/networks?limit=-1", "/networks?limit=1.5", "/networks?sort_key=colour",
    "/networks?sort_key=name&sort_dir=up", "/networks?sort_key=name&sort_dir=asc&sort_dir=desc",
    "/networks?limit=1&marker=nothing", "/networks?colour=blue", "/networks?admin_state_up=maybe",
    "/networks?mtu=many", "/networks?name=%00", "/networks?%00=x", "/networks?name=%ff", "/networks?page_reverse=maybe",
    "/networks?limit=99999999999999999999&marker=x", "/networks?changed_since=yesterday",
    "/networks?" + "&".join(f"name={n}" for n in range(1100)), "/ports?fixed_ips=colour=blue", "/ports?fixed_ips=x",
    "/ports?fixed_ips=" + ",".join(f"ip_address_substr={n}" for n in range(1100)),
    "/ports?admin_state_up=", "/subnets?ip_version=four", "/subnets?ip_version=",
    "/security-group-rules?port_range_min=x",
    "/networks/%00", "/networks/" + "x" * 5000, "/networks/a%2Fb", "/networks/%ff%fe", "/networks/nothing",
    "/subnets/nothing", "/ports/nothing", "/routers/nothing", "/floatingips/nothing", "/security-groups/nothing",
    "/security-group-rules/nothing", "/subnetpools/nothing", "/quotas/%00", "/auto-allocated-topology/%00",
    "/security-groups?project_id=%00", "/extensions/%00", "/colours", "/networks/x/colours", "/networks/x/tags",
]  # fmt: skip


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def resources(cloud: World) -> dict[str, str]:
    network, subnet = await cloud.network("10.1.0.0/24")
    public, _ = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
    made = {
        "network": network,
        "subnet": subnet,
        "public": public,
        "port": await cloud.make("port", network_id=network["id"]),
        "group": await cloud.make("security_group", name="g"),
        "router": await cloud.make("router"),
        "fip": await cloud.make("floatingip", floating_network_id=public["id"]),
        "pool": await cloud.make("subnetpool", name="p", prefixes=["10.77.0.0/16"], min_prefixlen=20),
    }
    return {name: thing["id"] for name, thing in made.items()}


async def test_bad_bodies(cloud: World) -> None:
    known = await resources(cloud)
    wrong = []
    for token, table in ((ALICE, BODIES), (ADMIN, ADMIN_BODIES)):
        for method, path, body in table:
            for name, id in known.items():
                path = path.replace(f"{{{name}}}", id)
                if not isinstance(body, bytes):
                    body = json.loads(json.dumps(body).replace(f"{{{name}}}", id))
            answer = await cloud.call(method, path, body, token=token)
            if not 400 <= answer.status < 500:
                wrong.append((answer.status, method, path, body))
                continue
            fault = answer.json()["NeutronError"]
            assert fault["message"] and fault["type"]
            assert "Traceback" not in fault["message"] and "sqlalchemy" not in fault["message"]
    assert wrong == []
    assert len(BODIES) + len(ADMIN_BODIES) > 250


async def test_bad_queries_and_paths(cloud: World) -> None:
    wrong = []
    for url in QUERIES:
        answer = await cloud.call("GET", url)
        if not 400 <= answer.status < 500:
            wrong.append((answer.status, url[:100]))
    assert wrong == []


async def test_a_body_that_is_too_large(cloud: World) -> None:
    answer = await cloud.call("POST", "/networks", b'{"network": {"name": "' + b"x" * (1 << 20) + b'"}}')
    assert answer.status == 413
    assert (await cloud.call("GET", "/networks")).status == 200


async def test_wrong_methods(cloud: World) -> None:
    for method, path in (("POST", "/networks/x"), ("DELETE", "/networks"), ("PATCH", "/ports/x"), ("PUT", "/ports")):
        answer = await cloud.call(method, path, {})
        assert (answer.status, answer.json()["NeutronError"]["type"]) == (405, "HTTPMethodNotAllowed")
    answer = await cloud.call("POST", "/networks", b"<network/>", headers={"content-type": "application/xml"})
    assert answer.status == 415
