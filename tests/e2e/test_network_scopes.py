"""Routers pass nothing between address scopes but what is translated."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.agent_world import NEEDS, AgentWorld, Guest, agent_world, arun, remains
from tests.unit.embedded.network.world import ADMIN

pytestmark = NEEDS


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as made:
        yield made
    assert remains(made.prefix) == []


async def outside_pings(cloud: AgentWorld, address: str) -> bool:
    done = await arun("ip", "netns", "exec", cloud.prefix, "ping", "-c", "1", "-W", "1", address, check=False)
    return done.returncode == 0


async def test_scopes_of_a_router(cloud: AgentWorld) -> None:
    net = cloud.network
    scope = await net.make("address_scope", ADMIN, ip_version=4, shared=True)

    async def pool(prefix: str, **fields: Any) -> Any:
        return await net.make("subnetpool", ADMIN, name="p", prefixes=[prefix], shared=True, **fields)

    inside = await pool("10.1.0.0/16", address_scope_id=scope["id"], default_prefixlen=24)
    beyond = await pool("203.0.113.0/24", address_scope_id=scope["id"], min_prefixlen=24)
    public = await net.make("network", ADMIN, router__external=True, shared=True)
    outer = await net.make("subnet", ADMIN, network_id=public["id"], subnetpool_id=beyond["id"], ip_version=4)
    router = await net.make("router", external_gateway_info={"network_id": public["id"]})

    async def guest(**of: Any) -> tuple[Guest, Any]:
        network = await net.make("network")
        subnet = await net.make("subnet", network_id=network["id"], ip_version=4, **of)
        path = f"/routers/{router['id']}/add_router_interface"
        assert (await net.call("PUT", path, {"subnet_id": subnet["id"]})).status == 200
        made = await cloud.guest(network)
        await made.dhcp()
        return made, subnet

    (a, range_), (b, _) = await guest(subnetpool_id=inside["id"]), await guest(subnetpool_id=inside["id"])
    c, elsewhere = await guest(cidr="10.9.0.0/24")
    rule = {"direction": "ingress", "ethertype": "IPv4", "protocol": "icmp"}
    await net.make("security_group_rule", security_group_id=a.port["security_groups"][0], **rule)
    await cloud.settled()
    assert await a.pings(b.address)
    assert not await a.pings(c.address)
    assert not await c.pings(a.address)
    # At the gateway the other scope is translated, and the gateway's own is not: others need a route to it.
    assert await c.pings(outer["gateway_ip"])
    assert not await a.pings(outer["gateway_ip"])
    via = router["external_gateway_info"]["external_fixed_ips"][0]["ip_address"]
    for each in (range_, elsewhere):
        await arun("ip", "-n", cloud.prefix, "route", "replace", each["cidr"], "via", via)
    assert await a.pings(outer["gateway_ip"])
    assert await outside_pings(cloud, a.address)
    assert not await outside_pings(cloud, c.address)
    # A floating IP reaches the other scope, from within, too.
    floating = await net.make("floatingip", floating_network_id=public["id"], port_id=c.port["id"])
    await cloud.settled()
    assert await outside_pings(cloud, floating["floating_ip_address"])
    assert await a.pings(floating["floating_ip_address"])
    # Without scopes all is as before.
    for each in (inside, beyond):
        await net.change("subnetpool", each["id"], ADMIN, address_scope_id=None)
    await cloud.settled()
    assert await a.pings(c.address)
    assert not await outside_pings(cloud, a.address)


async def test_scopes_of_ipv6(cloud: AgentWorld) -> None:
    net = cloud.network
    scope = await net.make("address_scope", ip_version=6)
    inside = await net.make("subnetpool", name="p", prefixes=["fd05::/48"], address_scope_id=scope["id"])
    router, guests = await net.make("router"), []
    for of in ({"subnetpool_id": inside["id"]}, {"subnetpool_id": inside["id"]}, {"cidr": "fd06::/64"}):
        network = await net.make("network")
        subnet = await net.make("subnet", network_id=network["id"], ip_version=6, enable_dhcp=False, **of)
        path = f"/routers/{router['id']}/add_router_interface"
        assert (await net.call("PUT", path, {"subnet_id": subnet["id"]})).status == 200
        made = await cloud.guest(network)
        await made.do("ip", "address", "add", f"{made.address}/64", "dev", "eth0", "nodad")
        await made.do("ip", "-6", "route", "add", "default", "via", subnet["gateway_ip"])
        guests.append(made)
    a, b, c = guests
    rule = {"direction": "ingress", "ethertype": "IPv6", "protocol": "ipv6-icmp"}
    await net.make("security_group_rule", security_group_id=a.port["security_groups"][0], **rule)
    async with asyncio.timeout(30):
        while not await a.pings(b.address):
            pass
    assert not await a.pings(c.address)
    assert not await c.pings(a.address)
    await net.change("subnetpool", inside["id"], address_scope_id=None)
    async with asyncio.timeout(30):
        while not await a.pings(c.address):
            pass
