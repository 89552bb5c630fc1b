"""The network agent on a real kernel; namespaces simulate guests."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from micronova.http.host_keys import sign_metadata
from micronova.privileged.names import bridge_name
from tests.e2e.agent_world import HOST, NEEDS, AgentWorld, Guest, agent_world, arun, remains
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, KEYRING, SERVICE

pytestmark = NEEDS


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as made:
        yield made
    assert remains(made.prefix) == []


async def test_a_guest_gets_its_address_by_dhcp(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    guest = await cloud.guest(network)
    lease = await guest.dhcp()
    assert lease["ip"] == guest.address
    assert lease["mtu"] == "1450"
    assert lease["domain"] == "openstacklocal"
    [server] = await cloud.network.list("port", "device_owner=network:dhcp", SERVICE)
    own = server["fixed_ips"][0]["ip_address"]
    assert f"169.254.169.254/32 {own}" in lease["staticroutes"]
    assert await guest.pings(own)
    await cloud.until_active(server["id"])


_QUERY = """
import socket, struct, sys
server, *names = sys.argv[1:]
for name in names:
    for kind in (1, 28):
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.settimeout(20)
            made.connect((server, 53))
            made.send(struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack("!2H", kind, 1))
            _, flags, _, answers, _, _ = struct.unpack("!6H", made.recv(512)[:12])
        print(flags & 15, answers)
"""


async def test_the_dns_server_knows_guests_and_that_they_have_no_ipv6_address(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    guest = await cloud.guest(network, dns_name="web")
    lease = await guest.dhcp()
    names = ("web", "web.openstacklocal", "other", "other.openstacklocal", "77.0.1.10.in-addr.arpa")
    told = (await guest.do(sys.executable, "-c", _QUERY, lease["dns"], *names, timeout=60)).stdout.split("\n")
    found, no_such_type, no_such_name, refused = "0 1", "0 0", "3 0", "5 0"
    assert told[:8] == [found, no_such_type] * 2 + [no_such_name] * 4
    assert told[8:10] == [refused] * 2, "it has no other server to ask"


async def test_tenants_with_the_same_range_do_not_see_each_other(cloud: AgentWorld) -> None:
    ours, _ = await cloud.network.network("10.1.0.0/24", ALICE)
    theirs, _ = await cloud.network.network("10.1.0.0/24", BOB)
    # Addresses that were chosen are nobody else's; the DHCP server takes the next free one, whenever it starts.
    a1, a2 = await cloud.guest(ours), await cloud.guest(ours, fixed_ips=[{"ip_address": "10.1.0.98"}])
    b1 = await cloud.guest(theirs, BOB)
    for guest in (a1, a2, b1):
        await guest.dhcp()
    assert a1.address == b1.address
    assert await a1.pings(a2.address), "the default security group allows its members"
    b2 = await cloud.guest(theirs, BOB, fixed_ips=[{"ip_address": "10.1.0.99"}])
    await b2.dhcp()
    assert await b2.pings(b1.address)
    assert not await b2.pings(a2.address)
    assert not await a1.pings(b2.address)


async def test_a_rule_opens_and_closes_a_port_of_a_running_guest(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    web = await cloud.network.make("security_group", name="web")
    other = await cloud.network.make("security_group", name="other")
    server = await cloud.guest(network, security_groups=[web["id"]])
    client = await cloud.guest(network, security_groups=[other["id"]])
    await server.dhcp()
    await client.dhcp()
    listening = server.listens(80)
    try:
        assert not await client.reaches(server.address, 80)
        assert not await client.pings(server.address)
        rule = await cloud.network.make(
            "security_group_rule", security_group_id=web["id"], direction="ingress", ethertype="IPv4",
            protocol="tcp", port_range_min=80, port_range_max=80, remote_group_id=other["id"],
        )  # fmt: skip
        await cloud.settled()
        assert await client.reaches(server.address, 80)
        assert not await client.pings(server.address)
        held = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", client.namespace, "busybox", "nc", server.address, "80",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert held.stdin is not None and held.stdout is not None
        held.stdin.write(b"one\n")
        assert await asyncio.wait_for(held.stdout.readline(), 5) == b"one\n"
        await cloud.network.delete("security_group_rule", rule["id"])
        await cloud.settled()
        assert not await client.reaches(server.address, 80)
        held.stdin.write(b"two\n")
        with pytest.raises(TimeoutError):  # the connection ends with the rule that allowed it
            await asyncio.wait_for(held.stdout.readline(), 1.5)
        held.kill()
        await held.wait()
    finally:
        listening.kill()
        listening.wait()


async def test_a_guest_cannot_spoof_addresses(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    bad, good = await cloud.guest(network), await cloud.guest(network)
    await bad.dhcp()
    await good.dhcp()
    assert await bad.pings(good.address)
    await bad.do("ip", "address", "add", "10.1.0.77/24", "dev", "eth0")
    spoofed = await bad.do("ping", "-c", "1", "-W", "1", "-I", "10.1.0.77", good.address, check=False)
    assert spoofed.returncode != 0
    await good.do("ip", "neigh", "flush", "all")
    assert not await good.pings("10.1.0.77")
    await bad.do("ip", "link", "set", "eth0", "address", "fa:16:3e:99:99:99")
    assert not await bad.pings(good.address)
    await bad.do("ip", "link", "set", "eth0", "address", bad.port["mac_address"])
    await cloud.network.change("port", bad.port["id"], allowed_address_pairs=[{"ip_address": "10.1.0.77"}])
    await cloud.settled()
    for guest in (bad, good):  # drop the cached MAC addresses
        await guest.do("ip", "neigh", "flush", "all")
    allowed = await bad.do("ping", "-c", "3", "-W", "2", "-I", "10.1.0.77", good.address, check=False)
    assert allowed.returncode == 0


async def test_a_guest_without_a_port_reaches_nothing(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    lost, other = await cloud.guest(network), await cloud.guest(network)
    await lost.dhcp()
    await other.dhcp()
    await cloud.settled()

    async def asks(guest: Guest, address: str) -> bool:
        command = ("busybox", "arping", "-c", "2", "-w", "2", "-f", "-I", "eth0", address)
        return (await guest.do(*command, check=False)).returncode == 0

    assert await asks(lost, other.address)
    await cloud.network.delete("port", lost.port["id"], SERVICE)  # the tap stays
    await cloud.settled()
    assert not await asks(lost, other.address)
    assert not await asks(other, lost.address)


async def test_a_floating_ip_reaches_a_guest_through_a_router(cloud: AgentWorld) -> None:
    public, outside = await cloud.network.network("203.0.113.0/24", ADMIN, router__external=True, shared=True)
    network, subnet = await cloud.network.network("10.1.0.0/24")
    router = await cloud.network.make("router", external_gateway_info={"network_id": public["id"]})
    joined = await cloud.network.call(
        "PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]}
    )
    assert joined.status == 200
    guest = await cloud.guest(network)
    await guest.dhcp()
    await cloud.settled()
    assert await guest.pings(subnet["gateway_ip"])
    assert await guest.pings(outside["gateway_ip"]), "through the router, with source NAT"
    floating = await cloud.network.make("floatingip", floating_network_id=public["id"], port_id=guest.port["id"])
    group = guest.port["security_groups"][0]
    await cloud.network.make(
        "security_group_rule", security_group_id=group, direction="ingress", ethertype="IPv4", protocol="icmp"
    )
    await cloud.settled()
    address = floating["floating_ip_address"]
    await arun("ip", "netns", "exec", cloud.prefix, "ping", "-c", "1", "-W", "2", address)
    await cloud.network.change("floatingip", floating["id"], port_id=None)
    await cloud.settled()
    gone = await arun("ip", "netns", "exec", cloud.prefix, "ping", "-c", "1", "-W", "1", address, check=False)
    assert gone.returncode != 0


async def test_a_restart_of_the_agent_loses_no_packet(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    a, b = await cloud.guest(network), await cloud.guest(network)
    await a.dhcp()
    await b.dhcp()
    await cloud.settled()
    pings = asyncio.create_task(a.do("ping", "-q", "-c", "100", "-i", "0.05", "-W", "1", b.address))
    await cloud.agent.stop()
    await asyncio.to_thread(cloud.helper.stop)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(cloud.helper.start)
    await cloud.start_agent()
    await cloud.settled()
    done = await pings
    assert "100 received" in done.stdout, done.stdout


async def test_unused_devices_are_removed(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    guest = await cloud.guest(network)
    await cloud.settled()
    assert any("-n-" in each for each in remains(cloud.prefix))
    cloud.unplug(guest)
    await cloud.until_active(guest.port["id"], "DOWN")
    await cloud.network.delete("port", guest.port["id"], SERVICE)
    await cloud.settled()
    assert [each for each in remains(cloud.prefix) if "-n-" in each] == []
    devices = (await arun("ip", "-n", cloud.prefix, "link")).stdout
    assert bridge_name(network["id"]) not in devices
    assert await cloud.network.list("port", f"network_id={network['id']}", SERVICE) == []
    await cloud.network.delete("network", network["id"])


async def test_a_guest_that_is_plugged_again_is_reported(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    guest = await cloud.guest(network)
    compute = cloud.network.compute
    assert compute is not None
    await compute.wait_for(1)
    cloud.unplug(guest)
    await cloud.plug(guest)
    await compute.wait_for(3)
    names = [name for name, _, tag in compute.events if tag == guest.port["id"]]
    assert names == ["network-vif-plugged", "network-vif-unplugged", "network-vif-plugged"]
    [agent] = await cloud.network.list("agent", "", ADMIN)
    assert (agent["host"], agent["alive"], agent["agent_type"]) == ("h1", True, "Linux bridge agent")


async def test_a_guest_gets_its_own_metadata_whatever_its_headers_say(cloud: AgentWorld) -> None:
    ours, _ = await cloud.network.network("10.1.0.0/24", ALICE)
    theirs, _ = await cloud.network.network("10.1.0.0/24", BOB)
    a, b = await cloud.guest(ours), await cloud.guest(theirs, BOB)
    assert a.address == b.address
    for guest, project in ((a, "p1"), (b, "p2")):
        await guest.dhcp()
        server = guest.port["device_id"]
        forged = [f"--header={name}: forged" for name in ("X-Instance-ID", "X-Tenant-ID", "X-Forwarded-For")]
        url = "http://169.254.169.254/openstack/latest/meta_data.json"
        shown = await guest.do("timeout", "5", "busybox", "wget", "-q", "-O", "-", *forged, url)
        assert shown.stdout == server
        asked = cloud.asked[-1]
        key = KEYRING.metadata_key(HOST, int(asked["x-metadata-key-expires"]))
        assert asked["x-metadata-host"] == HOST
        assert asked["x-instance-id-signature"] == sign_metadata(key, HOST, server, project, guest.address)
        assert (asked["x-tenant-id"], asked["x-forwarded-for"]) == (project, guest.address)
        assert asked["path"] == "/openstack/latest/meta_data.json"
