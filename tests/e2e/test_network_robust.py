"""The network agent when processes around it fail."""

import asyncio
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from micronova.privileged.client import runtime_directory
from micronova.privileged.names import network_namespace, tap_name
from tests.e2e.agent_world import NEEDS, AgentWorld, agent_world, arun, remains
from tests.unit.embedded.network.world import ADMIN, SERVICE

pytestmark = NEEDS


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as made:
        yield made
    assert remains(made.prefix) == []


async def test_a_dead_dhcp_server_is_started_again_at_once(cloud: AgentWorld, caplog: pytest.LogCaptureFixture) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    guest = await cloud.guest(network)
    await guest.dhcp()
    await cloud.settled()
    namespace = network_namespace(cloud.prefix, network["id"])
    file = runtime_directory(cloud.prefix) / namespace / "pid"
    for _ in range(2):
        caplog.clear()
        dead = int(file.read_text())
        os.kill(dead, signal.SIGKILL)
        async with asyncio.timeout(20):  # less than the time after which the agent looks at everything
            while int(file.read_text() or dead) == dead:
                await asyncio.sleep(0.02)
        assert f"the dnsmasq process {dead} of {namespace} has ended" in caplog.text
        assert (await guest.dhcp())["ip"] == guest.address


async def test_a_server_that_is_replaced_or_stopped_is_not_missed(
    cloud: AgentWorld, caplog: pytest.LogCaptureFixture
) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    guest = await cloud.guest(network)
    await guest.dhcp()
    await cloud.settled()
    await cloud.network.make("subnet", network_id=network["id"], ip_version=4, cidr="10.2.0.0/24")
    await cloud.settled()  # another range needs another command line
    await cloud.network.delete("port", guest.port["id"], SERVICE)
    cloud.unplug(guest)
    await cloud.settled()
    assert "has ended" not in caplog.text


@pytest.mark.parametrize("options", [[], [{"opt_name": "tftp-server", "opt_value": "10.1.0.7"}]], ids=["plain", "own"])
async def test_a_server_that_has_given_addresses_survives_changes_of_its_guests(
    cloud: AgentWorld, caplog: pytest.LogCaptureFixture, options: list[dict[str, str]]
) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    first = await cloud.guest(network, extra_dhcp_opts=options)
    for _ in range(4):
        await first.dhcp()
        another = await cloud.guest(network)
        await another.dhcp()
        await cloud.network.delete("port", another.port["id"], SERVICE)
        cloud.unplug(another)
        await cloud.settled(plugged=False)
    assert (await first.dhcp())["ip"] == first.address
    assert "has ended" not in caplog.text


def helper_pid(cloud: AgentWorld) -> int:
    """Return the process id of the helper."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.connect(str(cloud.helper.path))
        pid, _, _ = struct.unpack("3i", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


async def test_the_agent_continues_when_a_dead_helper_is_back(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    a = await cloud.guest(network)
    await a.dhcp()
    await cloud.settled()
    os.kill(helper_pid(cloud), signal.SIGKILL)
    port = await cloud.network.make("port", network_id=network["id"])  # without a helper it cannot be wired
    await asyncio.to_thread(cloud.helper.start)
    b = await cloud.guest(network)
    assert (await b.dhcp())["ip"] == b.address
    assert await a.pings(b.address)
    await cloud.network.delete("port", port["id"])


async def test_a_network_that_is_deleted_and_created_again_works(cloud: AgentWorld) -> None:
    for _ in range(3):
        network, _ = await cloud.network.network("10.1.0.0/24")
        guest = await cloud.guest(network)
        assert (await guest.dhcp())["ip"] == guest.address
        cloud.unplug(guest)
        await cloud.network.delete("port", guest.port["id"], SERVICE)
        await cloud.network.delete("network", network["id"])
    await cloud.settled()
    assert [each for each in remains(cloud.prefix) if "-n-" in each] == []


async def test_two_clouds_with_the_same_addresses_run_side_by_side(cloud: AgentWorld, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with agent_world(tmp_path / "other") as other:
        guests = []
        for each in (cloud, other):
            network, _ = await each.network.network("10.1.0.0/24")
            guests += [await each.guest(network), await each.guest(network, fixed_ips=[{"ip_address": "10.1.0.50"}])]
        for guest in guests:
            assert (await guest.dhcp())["ip"] == guest.address
        assert guests[0].address == guests[2].address
        for guest in (guests[0], guests[2]):
            assert await guest.pings("10.1.0.50")
        await other.agent.stop()
        await asyncio.to_thread(other.close)
        assert remains(other.prefix) == []
        assert await guests[0].pings("10.1.0.50"), "stopping one does not affect the other"


async def test_a_restart_loses_no_packet_through_a_router(cloud: AgentWorld) -> None:
    public, _ = await cloud.network.network("203.0.113.0/24", ADMIN, router__external=True, shared=True)
    network, subnet = await cloud.network.network("10.1.0.0/24")
    router = await cloud.network.make("router", external_gateway_info={"network_id": public["id"]})
    path = f"/routers/{router['id']}/add_router_interface"
    assert (await cloud.network.call("PUT", path, {"subnet_id": subnet["id"]})).status == 200
    guest = await cloud.guest(network)
    await guest.dhcp()
    await cloud.network.make(
        "security_group_rule", security_group_id=guest.port["security_groups"][0], direction="ingress",
        ethertype="IPv4", protocol="icmp",
    )  # fmt: skip
    floating = await cloud.network.make("floatingip", floating_network_id=public["id"], port_id=guest.port["id"])
    await cloud.settled()
    ping = ("ping", "-q", "-c", "100", "-i", "0.05", "-W", "1", floating["floating_ip_address"])
    pings = asyncio.create_task(arun("ip", "netns", "exec", cloud.prefix, *ping))
    await cloud.agent.stop()
    await asyncio.to_thread(cloud.helper.stop)
    await asyncio.to_thread(cloud.helper.start)
    await cloud.start_agent()
    await cloud.settled()
    assert "100 received" in (await pings).stdout


async def test_rules_of_deleted_ports_are_removed(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    a, b = await cloud.guest(network), await cloud.guest(network)
    await cloud.settled()
    cloud.unplug(a)
    await cloud.until_active(a.port["id"], "DOWN")
    await cloud.network.delete("port", a.port["id"], SERVICE)
    await cloud.settled()
    rules = (await arun("ip", "netns", "exec", cloud.prefix, "nft", "list", "ruleset")).stdout
    assert a.port["mac_address"] not in rules and tap_name(a.port["id"]) not in rules
    assert tap_name(b.port["id"]) in rules


async def test_many_ports_at_once_are_wired(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    await cloud.guest(network)
    await cloud.settled()
    guests = [await cloud.bound(network) for _ in range(20)]
    await cloud.settled(plugged=False)
    await asyncio.gather(*(cloud.plug(guest) for guest in guests))
    for guest in guests:
        await cloud.until_active(guest.port["id"])
