"""Limits of bandwidth and of connections, stateless security groups and moved floating IPs on a real kernel."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.privileged.names import tap_name
from tests.e2e.agent_world import NEEDS, AgentWorld, Guest, agent_world, arun, remains
from tests.functional.metadata_proxies import LIMITS
from tests.unit.embedded.network.world import ADMIN

pytestmark = NEEDS

SIZE = 1_000_000  # bytes; at 4 Mbit/s two seconds


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as made:
        yield made
    assert remains(made.prefix) == []


_RECEIVE = """
import socket, time
with socket.create_server(("", 5000)) as listening:
    print("listening", flush=True)
    made, _ = listening.accept()
    begun, count = time.monotonic(), 0
    while data := made.recv(1 << 16):
        count += len(data)
    print(count, time.monotonic() - begun)
"""
_SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))"


async def seconds(source: Guest, destination: Guest) -> float:
    """Return how long it takes to send some data from one guest to another."""
    receiver = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", destination.namespace, sys.executable, "-c", _RECEIVE, stdout=asyncio.subprocess.PIPE
    )
    assert receiver.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await receiver.stdout.readline() == b"listening\n"
            await source.do(sys.executable, "-c", _SEND, destination.address, str(SIZE))
            count, took = (await receiver.stdout.read()).split()
        assert int(count) == SIZE
        return float(took)
    finally:
        if receiver.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                receiver.kill()
        await receiver.wait()


async def limit(cloud: AgentWorld, policy: dict[str, Any], direction: str, kbps: int) -> dict[str, Any]:
    path = f"/qos/policies/{policy['id']}/bandwidth_limit_rules"
    body = {"bandwidth_limit_rule": {"max_kbps": kbps, "direction": direction}}
    answer = await cloud.network.call("POST", path, body, token=ADMIN)
    assert answer.status == 201, answer.body
    return answer.json()["bandwidth_limit_rule"]  # type: ignore[no-any-return]


async def test_a_policy_limits_a_running_guest_until_it_is_removed(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    a, b = await cloud.guest(network), await cloud.guest(network)
    await a.dhcp()
    await b.dhcp()
    await cloud.settled()
    assert await seconds(a, b) < 1
    policy = await cloud.network.make("policy", ADMIN, shared=True)
    sending = await limit(cloud, policy, "egress", 4000)
    await cloud.network.change("port", a.port["id"], qos_policy_id=policy["id"])
    await cloud.settled()
    assert 1.4 < await seconds(a, b) < 5
    assert await seconds(b, a) < 1, "only what it sends is limited"
    path = f"/qos/policies/{policy['id']}/bandwidth_limit_rules/{sending['id']}"
    changed = {"bandwidth_limit_rule": {"direction": "ingress"}}
    assert (await cloud.network.call("PUT", path, changed, token=ADMIN)).status == 200
    await cloud.settled()
    assert await seconds(a, b) < 1
    assert 1.4 < await seconds(b, a) < 5
    # The new tap of a restarted guest has the same limit.
    cloud.unplug(a)
    await cloud.until_active(a.port["id"], "DOWN")
    await cloud.plug(a)
    await cloud.until_active(a.port["id"])
    await a.dhcp()
    await cloud.settled()
    assert 1.4 < await seconds(b, a) < 5
    await cloud.network.change("port", a.port["id"], qos_policy_id=None)
    await cloud.settled()
    assert await seconds(b, a) < 1
    left = (await arun("tc", "-n", cloud.prefix, "qdisc")).stdout
    assert "tbf" not in left and "ifb" not in left


async def test_the_policy_of_a_network_limits_its_guests(cloud: AgentWorld) -> None:
    policy = await cloud.network.make("policy", ADMIN, shared=True)
    await limit(cloud, policy, "egress", 4000)
    network, _ = await cloud.network.network("10.1.0.0/24", qos_policy_id=policy["id"])
    a, b = await cloud.guest(network), await cloud.guest(network)
    await a.dhcp()
    await b.dhcp()
    await cloud.settled()
    assert 1.4 < await seconds(a, b) < 5
    ifb = "ifb" + tap_name(a.port["id"])[3:]
    assert ifb in (await arun("ip", "-n", cloud.prefix, "link")).stdout
    cloud.unplug(a)
    await cloud.until_active(a.port["id"], "DOWN")
    await cloud.network.delete("port", a.port["id"], ADMIN)
    await cloud.settled()
    assert ifb not in (await arun("ip", "-n", cloud.prefix, "link")).stdout


_RECEIVE_MARK = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
    made.bind(("", 5000))
    made.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
    print("listening", flush=True)
    _, [(_, _, tos)], _, _ = made.recvmsg(100, 100)
    print(tos[0] >> 2)
"""
_SEND_MARK = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
    made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 40 << 2)
    made.sendto(b"x", (sys.argv[1], 5000))
"""


async def mark(source: Guest, destination: Guest) -> int:
    """Return the DSCP mark with which a packet arrives that its sender has marked with 40."""
    receiver = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", destination.namespace, sys.executable, "-c", _RECEIVE_MARK,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert receiver.stdout is not None
    try:
        async with asyncio.timeout(20):
            assert await receiver.stdout.readline() == b"listening\n"
            await source.do(sys.executable, "-c", _SEND_MARK, destination.address)
            return int(await receiver.stdout.read())
    finally:
        if receiver.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                receiver.kill()
        await receiver.wait()


async def test_a_policy_marks_what_a_guest_sends(cloud: AgentWorld) -> None:
    policy = await cloud.network.make("policy", ADMIN, shared=True)
    path = f"/qos/policies/{policy['id']}/dscp_marking_rules"
    answer = await cloud.network.call("POST", path, {"dscp_marking_rule": {"dscp_mark": 26}}, token=ADMIN)
    assert answer.status == 201, answer.body
    network, _ = await cloud.network.network("10.1.0.0/24")
    a, b = await cloud.guest(network), await cloud.guest(network)
    await a.dhcp()
    await b.dhcp()
    await cloud.settled()
    assert await mark(a, b) == 40, "as the guest sets it"
    await cloud.network.change("port", a.port["id"], qos_policy_id=policy["id"])
    await cloud.settled()
    assert (await mark(a, b), await mark(b, a)) == (26, 40), "only what it sends is marked"
    # A port without port security, whose packets pass other chains, is marked as well.
    group = b.port["security_groups"][0]
    await cloud.network.make("security_group_rule", security_group_id=group, direction="ingress", protocol="udp")
    await cloud.network.change("port", a.port["id"], security_groups=[], port_security_enabled=False)
    await cloud.settled()
    assert await mark(a, b) == 26
    await cloud.network.change("port", a.port["id"], qos_policy_id=None)
    await cloud.settled()
    assert await mark(a, b) == 40


async def test_a_stateless_security_group_filters_replies(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    loose = await cloud.network.make("security_group", name="loose", stateful=False)
    a, b = await cloud.guest(network, security_groups=[loose["id"]]), await cloud.guest(network)
    group = b.port["security_groups"][0]
    everything = {"direction": "ingress", "ethertype": "IPv4", "protocol": "icmp"}
    await cloud.network.make("security_group_rule", security_group_id=group, **everything)
    await a.dhcp()
    await b.dhcp()
    await cloud.settled()
    assert not await a.pings(b.address), "no rule allows the reply"
    rule = await cloud.network.make(
        "security_group_rule", security_group_id=loose["id"], **everything, port_range_min=0, port_range_max=0
    )
    await cloud.settled()
    assert await a.pings(b.address)
    assert not await b.pings(a.address), "only replies are allowed"
    await cloud.network.delete("security_group_rule", rule["id"])
    await cloud.settled()
    assert not await a.pings(b.address)


async def test_a_moved_floating_ip_is_reachable_at_once(cloud: AgentWorld) -> None:
    public, _ = await cloud.network.network("203.0.113.0/24", ADMIN, router__external=True, shared=True)
    guests = []
    for cidr in ("10.1.0.0/24", "10.2.0.0/24"):
        network, subnet = await cloud.network.network(cidr)
        router = await cloud.network.make("router", external_gateway_info={"network_id": public["id"]})
        path = f"/routers/{router['id']}/add_router_interface"
        assert (await cloud.network.call("PUT", path, {"subnet_id": subnet["id"]})).status == 200
        guests.append(await cloud.guest(network))
        await guests[-1].dhcp()
    group = guests[0].port["security_groups"][0]
    await cloud.network.make(
        "security_group_rule", security_group_id=group, direction="ingress", ethertype="IPv4", protocol="icmp"
    )
    first, second = guests
    floating = await cloud.network.make("floatingip", floating_network_id=public["id"], port_id=first.port["id"])
    address = floating["floating_ip_address"]
    for guest in (first, second, first):
        await cloud.network.change("floatingip", floating["id"], port_id=guest.port["id"])
        await cloud.settled()
        done = await arun("ip", "netns", "exec", cloud.prefix, "ping", "-c", "1", "-W", "1", address, check=False)
        assert done.returncode == 0, "without an announcement the old MAC address stays cached"


_HOLD = """
import socket, sys
made = [socket.create_connection(("169.254.169.254", 80), 20) for _ in range(1000)]
print("open", flush=True)
sys.stdin.read()
refused = [each for each in made if b"503" in each.recv(100)]
print(len(refused))
"""


async def test_a_guest_with_a_thousand_connections_does_not_stop_the_metadata_of_others(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    greedy, other = await cloud.guest(network), await cloud.guest(network)
    for guest in (greedy, other):
        await guest.dhcp()
    await cloud.settled()
    before = len(os.listdir("/proc/self/fd"))
    holder = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", greedy.namespace, sys.executable, "-c", _HOLD, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            assert holder.stdout is not None
            assert await holder.stdout.readline() == b"open\n"
            answer = await other.do("busybox", "wget", "-q", "-O", "-", "http://169.254.169.254/")
            assert answer.stdout == other.port["device_id"]
            assert len(os.listdir("/proc/self/fd")) < before + LIMITS.per_guest + 20
            refused, _ = await holder.communicate(b"")
            assert int(refused) > 900
    finally:
        if holder.returncode is None:
            holder.kill()
            await holder.wait()


_FLOOD = """
import select, socket, struct, sys
query = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + b"\\5other\\0" + struct.pack("!2H", 1, 1)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
    made.connect((sys.argv[1], 53))
    answers = 0
    for _ in range(20000):
        made.send(query)
        while select.select([made], [], [], 0)[0]:
            made.recv(512)
            answers += 1
    print(answers)
"""


async def test_a_guest_that_floods_the_dns_server_gets_few_answers(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    greedy, other = await cloud.guest(network), await cloud.guest(network)
    dns = (await greedy.dhcp())["dns"]
    answers = int((await greedy.do(sys.executable, "-c", _FLOOD, dns, timeout=60)).stdout)
    assert 0 < answers < 10_000
    assert (await other.dhcp())["ip"] == other.address
