"""IPv6 of guests on a real kernel: addresses, router advertisements and filtering."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.network.ipv6 import link_local
from micronova.privileged.names import router_namespace
from tests.e2e import advertisement, dhcp6
from tests.e2e.agent_world import NEEDS, AgentWorld, Guest, agent_world, arun, remains
from tests.unit.embedded.network.world import ADMIN

pytestmark = NEEDS


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as made:
        yield made
    assert remains(made.prefix) == []


async def network_of(cloud: AgentWorld, cidr: str, mode: str, **more: Any) -> tuple[Any, Any]:
    network = await cloud.network.make("network", name=mode)
    subnet = await cloud.network.make(
        "subnet", network_id=network["id"], cidr=cidr, ip_version=6, ipv6_ra_mode=mode, ipv6_address_mode=mode, **more
    )
    return network, subnet


async def joined(cloud: AgentWorld, *subnets: dict[str, Any]) -> list[dict[str, Any]]:
    """Connect subnets by a router and return its ports."""
    router = await cloud.network.make("router")
    ports = []
    for subnet in subnets:
        path = f"/routers/{router['id']}/add_router_interface"
        answer = await cloud.network.call("PUT", path, {"subnet_id": subnet["id"]})
        assert answer.status == 200, answer.body
        ports.append(await cloud.network.show("port", answer.json()["port_id"]))
    return ports


async def until_shown(guest: Guest, text: str, *command: str) -> str:
    """Wait until the output of a command contains the text."""
    async with asyncio.timeout(30):
        while text not in (shown := (await guest.do(*command)).stdout):
            await asyncio.sleep(0.1)
    return shown


async def until_addressed(guest: Guest) -> None:
    """Wait until the guest has derived its address and duplicate address detection has ended."""
    show = ("ip", "-6", "address", "show", "dev", "eth0")
    await until_shown(guest, f"{guest.address}/64", *show)
    async with asyncio.timeout(10):
        while "tentative" in (await guest.do(*show)).stdout:
            await asyncio.sleep(0.1)


async def asks(guest: Guest, what: str) -> dict[str, Any]:
    done = await guest.do(sys.executable, dhcp6.__file__, "eth0", what)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


async def solicits(guest: Guest) -> list[dict[str, Any]]:
    done = await guest.do(sys.executable, advertisement.__file__, "eth0")
    return [json.loads(line) for line in done.stdout.splitlines()]


async def reaches(guest: Guest, address: str) -> bool:
    return (await guest.do("ping", "-c", "3", "-i", "0.3", "-W", "1", address, check=False)).returncode == 0


async def test_slaac_without_a_router_sets_no_default_route(cloud: AgentWorld) -> None:
    network, _ = await network_of(cloud, "fd00:3::/64", "slaac")
    a, b = await cloud.guest(network), await cloud.guest(network)
    await until_addressed(a)
    await until_addressed(b)
    await cloud.settled()
    assert await reaches(a, b.address)
    assert "default" not in (await a.do("ip", "-6", "route")).stdout


async def test_a_router_advertises_itself_and_forwards_what_security_groups_allow(cloud: AgentWorld) -> None:
    left, one = await network_of(cloud, "fd00:1::/64", "slaac", dns_nameservers=["fd00:99::53"])
    right, two = await network_of(cloud, "fd00:2::/64", "slaac")
    ports = await joined(cloud, one, two)
    other = await cloud.network.make("security_group", name="other")
    a, b = await cloud.guest(left), await cloud.guest(right, security_groups=[other["id"]])
    for guest, port in ((a, ports[0]), (b, ports[1])):
        await until_addressed(guest)
        routes = await until_shown(guest, "default", "ip", "-6", "route")
        assert f"default via {link_local(port['mac_address'])} " in routes
        assert routes.count("default") == 1, "the DHCP server is not a router"
    await cloud.settled()
    assert "mtu 1450" in (await a.do("ip", "-6", "route", "show", "default")).stdout
    assert await reaches(a, "fd00:1::1")
    assert not await reaches(a, b.address), "no rule allows it"
    await cloud.network.make(
        "security_group_rule", security_group_id=other["id"], direction="ingress", ethertype="IPv6",
        protocol="ipv6-icmp", port_range_min=128, port_range_max=0, remote_ip_prefix="fd00:1::/64",
    )  # fmt: skip
    await cloud.settled()
    assert await reaches(a, b.address)
    path = f"/routers/{ports[0]['device_id']}/remove_router_interface"
    for subnet, guest in ((one, a), (two, b)):
        assert (await cloud.network.call("PUT", path, {"subnet_id": subnet["id"]})).status == 200
        async with asyncio.timeout(10):
            while "default" in (await guest.do("ip", "-6", "route")).stdout:
                await asyncio.sleep(0.1)


async def test_a_router_reaches_the_external_network(cloud: AgentWorld) -> None:
    public = await cloud.network.make("network", ADMIN, router__external=True, shared=True)
    outside = await cloud.network.make("subnet", ADMIN, network_id=public["id"], cidr="fd00:8::/64", ip_version=6)
    router = await cloud.network.make("router", external_gateway_info={"network_id": public["id"]})
    await cloud.settled()
    namespace = router_namespace(cloud.prefix, router["id"])
    ping = ("ping", "-c", "3", "-i", "0.3", "-W", "1", outside["gateway_ip"])
    assert (await arun("ip", "netns", "exec", namespace, *ping, check=False)).returncode == 0
    assert "default via fd00:8::1" in (await arun("ip", "-n", namespace, "-6", "route")).stdout


async def test_a_router_advertises_that_dhcp_gives_addresses(cloud: AgentWorld) -> None:
    network, subnet = await network_of(cloud, "fd00:4::/64", "dhcpv6-stateful", dns_nameservers=["fd00:99::53"])
    [port] = await joined(cloud, subnet)
    a, b = await cloud.guest(network), await cloud.guest(network)
    await cloud.settled()
    for guest in (a, b):
        lease = await asks(guest, "address")
        assert lease == {"address": guest.address, "dns": ["fd00:99::53"]}
        await guest.do("ip", "address", "add", f"{guest.address}/64", "dev", "eth0", "nodad")
        routes = await until_shown(guest, "default", "ip", "-6", "route")
        assert f"default via {link_local(port['mac_address'])} " in routes
        shown = (await guest.do("ip", "-6", "address", "show", "dev", "eth0", "scope", "global")).stdout
        assert "dynamic" not in shown, "no SLAAC address"
    assert await reaches(a, b.address)
    assert await reaches(a, "fd00:4::1")


async def test_a_guest_uses_slaac_and_gets_options_by_dhcp(cloud: AgentWorld) -> None:
    guests = []
    for cidr, routed in (("fd00:5::/64", True), ("fd00:6::/64", False)):
        network, subnet = await network_of(cloud, cidr, "dhcpv6-stateless", dns_nameservers=["fd00:99::53"])
        if routed:
            await joined(cloud, subnet)
        guests.append(await cloud.guest(network))
    for guest in guests:
        await until_addressed(guest)
        assert await asks(guest, "options") == {"address": None, "dns": ["fd00:99::53"]}


async def test_a_guest_cannot_send_advertisements_for_others(cloud: AgentWorld) -> None:
    network, _ = await network_of(cloud, "fd00:6::/64", "slaac")
    bad, good = await cloud.guest(network), await cloud.guest(network)
    await until_addressed(bad)
    await until_addressed(good)
    await cloud.settled()
    assert await reaches(good, bad.address)
    await bad.do("ip", "address", "add", "fd00:6::bad/64", "dev", "eth0", "nodad")
    assert not await reaches(good, "fd00:6::bad")
    spoofed = await bad.do("ping", "-c", "1", "-W", "1", "-I", "fd00:6::bad", good.address, check=False)
    assert spoofed.returncode != 0


async def test_the_contents_of_advertisements(cloud: AgentWorld) -> None:
    guests, subnets, expected = [], [], []
    for number, (mode, (managed, other, own)) in enumerate(
        {
            "slaac": (False, False, True),
            "dhcpv6-stateless": (False, True, True),
            "dhcpv6-stateful": (True, True, False),
        }.items()
    ):
        cidr = f"fd00:7:{number + 1}::/64"
        network, subnet = await network_of(cloud, cidr, mode, dns_nameservers=["fd00:99::53"])
        guests.append(await cloud.guest(network))
        subnets.append(subnet)
        said = {"managed": managed, "other": other, "mtu": 1450, "dns": ["fd00:99::53"], "prefixes": {cidr: own}}
        expected.append(said)
    await cloud.settled()
    for told, said in zip(await asyncio.gather(*map(solicits, guests)), expected, strict=True):
        [alone] = told
        assert {name: alone[name] for name in said} == said
        assert alone["lifetime"] == 0, "the DHCP server is not a router"
    ports = await joined(cloud, *subnets)
    await cloud.settled()
    answers = await asyncio.gather(*map(solicits, guests))
    for told, said, port in zip(answers, expected, ports, strict=True):
        [routed] = told
        assert {name: routed[name] for name in said} == said
        assert (routed["lifetime"], routed["source"]) == (1800, str(link_local(port["mac_address"])))
