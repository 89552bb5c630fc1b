"""Guests are wired only where the kernel filters their packets."""

import asyncio
import contextlib
import ipaddress
import os
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from micronova.privileged import firewall_check, rulesets
from micronova.privileged import verbs as v
from micronova.privileged.client import HelperProcess, PrivilegedClient, PrivilegedError
from micronova.privileged.kernel import Failed
from micronova.privileged.names import tap_name
from tests.e2e.agent_world import NEEDS, AgentWorld, Guest, agent_world, arun, remains, run
from tests.unit.embedded.network.world import SERVICE

pytestmark = NEEDS

SYSCTLS = ("net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables")
# The helper sees another /proc/sys/net: `absent` as without the module, `fixed` as in a container.
HIDING = {
    "absent": "mount -t tmpfs none /proc/sys/net",
    "fixed": "mount --bind /proc/sys/net /proc/sys/net && mount -o remount,bind,ro /proc/sys/net",
}


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as made:
        yield made
    assert remains(made.prefix) == []


class HidingHelper(HelperProcess):
    """A helper in a mount namespace in which the kernel's parameters are absent or cannot be changed."""

    hiding = ""

    def _command(self) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", f'{self.hiding} && exec "$@"', "sh", *super()._command()]


@contextlib.contextmanager
def hiding_helper(cloud: AgentWorld, how: str) -> Iterator[None]:
    """Replace the helper of a cloud for a while."""
    cloud.helper.stop()
    made = HidingHelper(cloud.prefix, cloud.helper.path)
    made.hiding = HIDING[how]
    made.start()
    try:
        yield
    finally:
        made.stop()
        cloud.helper.start()


def switch(cloud: AgentWorld, value: int) -> None:
    for name in SYSCTLS:
        run("ip", "netns", "exec", cloud.prefix, "sysctl", "-q", "-w", f"{name}={value}")


@pytest.mark.parametrize("how", HIDING)
async def test_no_agent_starts_on_a_kernel_that_does_not_filter(cloud: AgentWorld, how: str) -> None:
    await cloud.agent.stop()
    switch(cloud, 0)
    with hiding_helper(cloud, how):
        with pytest.raises(PrivilegedError, match=r"Security groups need .*bridge-nf-call-iptables.*No guest is wired"):
            await cloud.start_agent()
    await cloud.start_agent()


async def test_the_check_of_the_kernel_passes_here_and_leaves_nothing(cloud: AgentWorld) -> None:
    client = PrivilegedClient(cloud.helper.path)

    def ours() -> list[str]:
        """Return the named namespaces of this cloud; other tests make and remove theirs meanwhile."""
        return sorted(name for name in os.listdir("/run/netns") if name.startswith(cloud.prefix))

    before = ours()
    try:
        await client.call(v.CheckFirewall())
    finally:
        await client.close()
    assert ours() == before


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (("return;\ndrop;\n}", "return;\n}"), "a closed port received IPv4"),  # the last rule of a port
        (("jump antispoof1", "accept"), "a forged IPv4 address passed"),
        (("dport 7001", "dport 7003"), "an open port received no IPv4 packet"),
    ],
)
def test_the_check_notices_a_firewall_that_does_not_work(
    fault: tuple[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(verb: v.LoadFirewall) -> str:
        right = rulesets.firewall(verb)
        assert fault[0] in right
        return right.replace(*fault)

    monkeypatch.setattr(firewall_check, "firewall", broken)
    if "no IPv4 packet" in told:
        monkeypatch.setattr(firewall_check, "TIMEOUT", firewall_check.RESEND)
    with pytest.raises(Failed, match=told):
        firewall_check.check_firewall()


async def test_a_guest_is_not_wired_while_the_kernel_does_not_filter(
    cloud: AgentWorld, caplog: pytest.LogCaptureFixture
) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    first, second = await cloud.guest(network), await cloud.bound(network)
    await cloud.settled(plugged=False)
    with hiding_helper(cloud, "absent"):
        await cloud.plug(second)
        async with asyncio.timeout(20):
            while "Security groups need the kernel module br_netfilter" not in caplog.text:
                await asyncio.sleep(0.02)
        tap = (await arun("ip", "-n", cloud.prefix, "link", "show", tap_name(second.port["id"]))).stdout
        assert "master" not in tap
        assert (await cloud.network.show("port", second.port["id"], SERVICE))["status"] == "DOWN"
        assert (await cloud.network.show("port", first.port["id"], SERVICE))["status"] == "ACTIVE", (
            "it is plugged and has its rules"
        )
    await cloud.until_active(second.port["id"])


async def test_nothing_passes_if_the_kernel_stops_to_filter(cloud: AgentWorld) -> None:
    network, _ = await cloud.network.network("10.1.0.0/24")
    a, b = await cloud.guest(network), await cloud.guest(network)
    for guest in (a, b):
        await guest.dhcp()
    rule = {"security_group_id": b.port["security_groups"][0], "direction": "ingress", "ethertype": "IPv4"}
    await cloud.network.make("security_group_rule", **rule, protocol="icmp")
    await cloud.settled()
    assert await a.pings(b.address)
    await asyncio.to_thread(switch, cloud, 0)
    assert not await a.pings(b.address)
    await asyncio.to_thread(switch, cloud, 1)
    assert await a.pings(b.address)


async def test_frames_with_a_vlan_tag_do_not_pass_the_security_groups(cloud: AgentWorld) -> None:
    """A guest takes a frame with the tag 0 as one without a tag, and the kernel does not filter such frames."""
    network, _ = await cloud.network.network("10.1.0.0/24")
    free = await cloud.guest(network, port_security_enabled=False, security_groups=[])
    other = await cloud.guest(network, port_security_enabled=False, security_groups=[])
    filtered = await cloud.guest(network)
    for guest in (free, other, filtered):
        await guest.dhcp()
    await cloud.settled()
    rule = {"security_group_id": filtered.port["security_groups"][0], "direction": "ingress", "ethertype": "IPv4"}
    await cloud.network.make("security_group_rule", **rule, protocol="udp", port_range_min=5001, port_range_max=5001)
    await cloud.settled()
    for guest, received in ((other, b"tagged"), (filtered, b"filtered")):
        listening = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", guest.namespace, sys.executable, "-c", _RECEIVE, stdout=asyncio.subprocess.PIPE
        )
        assert listening.stdout is not None
        async with asyncio.timeout(20):
            assert await listening.stdout.readline() == b"listening\n"
            await free.do(sys.executable, "-c", _SEND, *(_datagram(free, guest, port).hex() for port in (5000, 5001)))
            assert (await listening.stdout.read()).strip() == received
            await listening.wait()


_RECEIVE = """
import socket
tagged, plain = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
tagged.bind(("", 5000)), plain.bind(("", 5001))
print("listening", flush=True)
plain.recv(100)
tagged.setblocking(False)
try:
    tagged.recv(100)
    print("tagged")
except BlockingIOError:
    print("filtered")
"""
_SEND = """
import socket, sys
made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
made.bind(("eth0", 0))
for each in sys.argv[1:]:
    made.send(bytes.fromhex(each))
"""


def _datagram(source: Guest, destination: Guest, port: int) -> bytes:
    """Return a datagram, with the VLAN tag 0 if it goes to port 5000."""
    macs = b"".join(bytes.fromhex(each.port["mac_address"].replace(":", "")) for each in (destination, source))
    ends = ipaddress.ip_address(source.address).packed + ipaddress.ip_address(destination.address).packed
    head = struct.pack("!BBHHHBBH", 0x45, 0, 28, 0, 0, 64, 17, 0) + ends
    total = sum(struct.unpack("!10H", head))
    head = head[:10] + struct.pack("!H", ~(total % 0xFFFF) & 0xFFFF) + head[12:]
    tag = b"\x81\0\0\0" if port == 5000 else b""
    return macs + tag + b"\x08\0" + head + struct.pack("!4H", port, port, 8, 0)
