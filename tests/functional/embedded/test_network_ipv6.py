"""SLAAC: every port on such a subnet has the address that is derived from its MAC address."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.objects.clock import SystemClock
from tests.unit.embedded.network.world import SERVICE, Compute, World, error, world

MAC = "fa:16:3e:12:34:56"
OWN = "f816:3eff:fe12:3456"


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url, compute=Compute(), clock=SystemClock()) as made:
        yield made


async def six(cloud: World, network: dict[str, Any], cidr: str = "fd00:1::/64", **modes: str) -> dict[str, Any]:
    modes = modes or {"ipv6_ra_mode": "slaac", "ipv6_address_mode": "slaac"}
    return await cloud.make("subnet", network_id=network["id"], cidr=cidr, ip_version=6, **modes)


def addresses(port: dict[str, Any]) -> list[str]:
    return [each["ip_address"] for each in port["fixed_ips"]]


async def test_a_port_has_its_own_address_whatever_else_it_asks_for(cloud: World) -> None:
    network, subnet = await cloud.network("10.1.0.0/24")
    slaac = await six(cloud, network)
    chosen = [{"subnet_id": subnet["id"], "ip_address": "10.1.0.9"}]
    port = await cloud.make("port", network_id=network["id"], mac_address=MAC, fixed_ips=chosen)
    assert addresses(port) == ["10.1.0.9", f"fd00:1::{OWN}"]
    port = await cloud.change("port", port["id"], fixed_ips=[{"subnet_id": subnet["id"], "ip_address": "10.1.0.10"}])
    assert sorted(addresses(port)) == ["10.1.0.10", f"fd00:1::{OWN}"]
    port = await cloud.change("port", port["id"], fixed_ips=port["fixed_ips"])
    assert sorted(addresses(port)) == ["10.1.0.10", f"fd00:1::{OWN}"]
    for fixed in ({"subnet_id": slaac["id"], "ip_address": "fd00:1::9"}, {"ip_address": "fd00:1::9"}):
        answer = await cloud.call("POST", "/ports", {"port": {"network_id": network["id"], "fixed_ips": [fixed]}})
        assert (answer.status, error(answer)) == (400, "AllocationOnAutoAddressSubnet")


@pytest.mark.parametrize("mode", ["slaac", "dhcpv6-stateless"])
async def test_who_advertises_the_prefix_says_how_addresses_are_made(cloud: World, mode: str) -> None:
    network = await cloud.make("network")
    await six(cloud, network, ipv6_ra_mode=mode)
    await six(cloud, network, "fd00:2::/64", ipv6_ra_mode="dhcpv6-stateful", ipv6_address_mode="dhcpv6-stateful")
    port = await cloud.make("port", network_id=network["id"], mac_address=MAC)
    assert addresses(port) == ["fd00:2::2", f"fd00:1::{OWN}"]


async def test_ports_get_and_lose_addresses_with_the_subnet_and_compute_hears_of_it(cloud: World) -> None:
    compute = cloud.compute
    assert compute is not None
    network, subnet = await cloud.network("10.1.0.0/24")
    router = await cloud.make("router")
    joined = await cloud.call("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    port = await cloud.make("port", network_id=network["id"], mac_address=MAC)
    await cloud.change(
        "port", port["id"], SERVICE, device_id="server", device_owner="compute:nova", binding__host_id="h"
    )
    await compute.wait_for(1)
    slaac = await six(cloud, network)
    shown = await cloud.show("port", port["id"])
    assert sorted(addresses(shown)) == ["10.1.0.2", f"fd00:1::{OWN}"]
    assert shown["revision_number"] > port["revision_number"]
    of_router = await cloud.show("port", joined.json()["port_id"])
    assert addresses(of_router) == ["10.1.0.1"], "a router interface has the gateway address"
    await compute.wait_for(2)
    await cloud.delete("subnet", slaac["id"])
    assert addresses(await cloud.show("port", port["id"])) == ["10.1.0.2"]
    await compute.wait_for(3)
    assert [name for name, _, _ in compute.events] == ["network-vif-plugged", "network-changed", "network-changed"]


async def test_the_address_follows_the_mac_address(cloud: World) -> None:
    network, _ = await cloud.network("10.1.0.0/24")
    await six(cloud, network)
    port = await cloud.make("port", network_id=network["id"], mac_address=MAC)
    port = await cloud.change("port", port["id"], SERVICE, mac_address="fa:16:3e:aa:bb:cc")
    assert addresses(port) == ["10.1.0.2", "fd00:1::f816:3eff:feaa:bbcc"]


async def test_a_router_is_at_the_gateway_of_such_a_subnet(cloud: World) -> None:
    network = await cloud.make("network")
    subnet = await six(cloud, network)
    router = await cloud.make("router")
    answer = await cloud.call("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    port = await cloud.show("port", answer.json()["port_id"])
    assert addresses(port) == [subnet["gateway_ip"]] == ["fd00:1::1"]
    await cloud.call("POST", "/agent-reports", {"host": "h", "started": True}, token=SERVICE)
    state = (await cloud.call("GET", "/agent-states/h", token=SERVICE)).json()["state"]
    assert [each["routed"] for each in state["networks"][0]["subnets"]] == [True]
