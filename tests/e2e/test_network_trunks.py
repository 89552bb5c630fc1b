"""Trunks: a guest has ports of other networks in VLANs of its interface."""

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.privileged import verbs as v
from micronova.privileged.kernel import inside
from micronova.privileged.names import tap_name
from micronova.privileged.vlans import ensure_trunk, load, pop_program
from tests.e2e.agent_world import NEEDS, AgentWorld, Guest, agent_world, arun, remains
from tests.unit.embedded.network.world import ADMIN, ALICE, SERVICE

pytestmark = NEEDS

VLAN = 101


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as made:
        yield made
    assert remains(made.prefix) == []


async def subport_on(cloud: AgentWorld, network: Any, **fields: Any) -> Any:
    return await cloud.network.make("port", ALICE, network_id=network["id"], **fields)


def in_vlan(port: Any, vlan: int = VLAN) -> dict[str, Any]:
    return {"port_id": port["id"], "segmentation_type": "vlan", "segmentation_id": vlan}


async def use_vlan(guest: Guest, port: Any, vlan: int = VLAN) -> None:
    """Make the guest's interface in a VLAN: kernels without VLAN devices do it as the host does."""
    device = f"vlan{vlan}"
    subport = v.Subport(tap=device, vlan=vlan, mtu=1400)
    await asyncio.to_thread(ensure_trunk, v.EnsureTrunk(tap="eth0", subports=(subport,)), guest.namespace)
    address = port["fixed_ips"][0]["ip_address"]
    await guest.do("ip", "link", "set", device, "address", port["mac_address"], "mtu", "1400", "up")
    await guest.do("ip", "address", "replace", f"{address}/24", "dev", device)


async def trunk_status(cloud: AgentWorld, trunk: Any, status: str) -> None:
    async with asyncio.timeout(20):
        while (await cloud.network.show("trunk", trunk["id"]))["status"] != status:
            await asyncio.sleep(0.02)


async def allow_pings(cloud: AgentWorld, port: Any) -> None:
    rule = {"direction": "ingress", "ethertype": "IPv4", "protocol": "icmp"}
    await cloud.network.make("security_group_rule", security_group_id=port["security_groups"][0], **rule)
    await cloud.settled()


async def test_a_guest_has_networks_in_vlans(cloud: AgentWorld) -> None:
    outer, _ = await cloud.network.network("10.1.0.0/24")
    inner, _ = await cloud.network.network("10.2.0.0/24")
    group = await cloud.network.make("security_group", name="closed")
    guest, beside, friend = await cloud.guest(outer), await cloud.guest(outer), await cloud.guest(inner)
    port = await subport_on(cloud, inner, security_groups=[group["id"]])
    # The trunk comes to a guest that runs.
    trunk = await cloud.network.make("trunk", port_id=guest.port["id"], sub_ports=[in_vlan(port)])
    await trunk_status(cloud, trunk, "ACTIVE")
    await cloud.settled()
    for each in (guest, beside, friend):
        await each.dhcp()
    await use_vlan(guest, port)
    address = port["fixed_ips"][0]["ip_address"]
    await allow_pings(cloud, friend.port)
    # Untagged frames are those of the parent, and the security groups of the subport decide about the VLAN.
    assert await guest.pings(beside.address)
    assert await guest.pings(friend.address)
    assert not await friend.pings(address)
    await allow_pings(cloud, port)
    assert await friend.pings(address)
    # The subport's own server sees to the VLAN; in the other VLANs of the guest is nothing.
    await guest.do("busybox", "udhcpc", "-i", f"vlan{VLAN}", "-n", "-q", "-f", "-t", "8", "-T", "1", "-s", "/bin/true")
    # A guest sends from the addresses of the subport only.
    await guest.do("ip", "address", "replace", "10.2.0.99/24", "dev", f"vlan{VLAN}")
    done = await guest.do("ping", "-c", "1", "-W", "1", "-I", "10.2.0.99", friend.address, check=False)
    assert done.returncode != 0

    # A restarted guest has its VLANs again.
    cloud.unplug(guest)
    await trunk_status(cloud, trunk, "DOWN")
    await cloud.until_active(port["id"], "DOWN")
    await cloud.plug(guest)
    await trunk_status(cloud, trunk, "ACTIVE")
    await cloud.settled()
    await use_vlan(guest, port)
    assert await guest.pings(friend.address)

    # A limit of what the parent sends neither removes the VLAN nor goes with it.
    policy = await cloud.network.make("policy", ADMIN, shared=True)
    path = f"/qos/policies/{policy['id']}/bandwidth_limit_rules"
    limit = {"bandwidth_limit_rule": {"direction": "egress", "max_kbps": 4000}}
    assert (await cloud.network.call("POST", path, limit, token=ADMIN)).status == 201
    for chosen in (policy["id"], None):
        await cloud.network.change("port", guest.port["id"], qos_policy_id=chosen)
        await cloud.settled()
        assert await guest.pings(friend.address)
    answer = await cloud.network.call(
        "PUT", f"/trunks/{trunk['id']}/remove_subports", {"sub_ports": [{"port_id": port["id"]}]}
    )
    assert answer.status == 200
    await cloud.settled()
    assert not await guest.pings(friend.address)
    assert (await cloud.network.show("port", port["id"], SERVICE))["status"] == "DOWN"
    links = (await arun("ip", "-n", cloud.prefix, "link")).stdout
    assert tap_name(port["id"]) not in links and "vlp" not in links
    await cloud.network.delete("trunk", trunk["id"])


def open_tap(namespace: str, name: str) -> int:
    """Return a tap that this process holds, as QEMU does."""
    with inside(namespace):
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH", name.encode(), 0x1002))  # TUNSETIFF, a tap without headers
    return tap


def arp(mac: str, source: str, target: str) -> bytes:
    """Return the request for the MAC address of the target, without Ethernet header."""
    own = bytes.fromhex(mac.replace(":", ""))
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1)
    return head + own + socket.inet_aton(source) + bytes(6) + socket.inet_aton(target) + bytes(18)


async def answered(tap: int, frame: bytes, wanted: bytes, tries: int) -> bool:
    """Send a frame until one that begins with the wanted bytes arrives."""
    for _ in range(tries):
        os.write(tap, frame)
        end = asyncio.get_running_loop().time() + 0.5
        while asyncio.get_running_loop().time() < end:
            try:
                if os.read(tap, 4096).startswith(wanted):
                    return True
            except BlockingIOError:
                await asyncio.sleep(0.01)
    return False


async def test_frames_of_a_vlan_have_its_tag(cloud: AgentWorld) -> None:
    """What a hypervisor sees at the tap."""
    outer, _ = await cloud.network.network("10.1.0.0/24")
    inner, _ = await cloud.network.network("10.2.0.0/24")
    friend, bound = await cloud.guest(inner), await cloud.bound(outer)
    await friend.dhcp()
    port = await subport_on(cloud, inner)
    trunk = await cloud.network.make("trunk", port_id=bound.port["id"], sub_ports=[in_vlan(port)])
    tap = open_tap(cloud.prefix, tap_name(bound.port["id"]))
    try:
        await trunk_status(cloud, trunk, "ACTIVE")
        await cloud.settled()
        own, address = port["mac_address"], port["fixed_ips"][0]["ip_address"]
        everybody, mac = b"\xff" * 6, bytes.fromhex(own.replace(":", ""))
        theirs = bytes.fromhex(friend.port["mac_address"].replace(":", ""))

        def tagged(vlan: int, source: str) -> bytes:
            return everybody + mac + struct.pack("!HHH", 0x8100, vlan, 0x0806) + arp(own, source, friend.address)

        reply = mac + theirs + struct.pack("!HHH", 0x8100, VLAN, 0x0806)
        assert await answered(tap, tagged(VLAN, address), reply, 20)
        for wrong in (tagged(VLAN, "10.2.0.99"), tagged(VLAN + 1, address)):
            assert not await answered(tap, wrong, reply, 2)
    finally:
        os.close(tap)
    await cloud.until_active(port["id"], "DOWN")
    await trunk_status(cloud, trunk, "DOWN")


def test_the_kernel_takes_a_trunk_that_uses_every_vlan() -> None:
    os.close(load(pop_program([(vlan, 10_000 + vlan) for vlan in range(1, 4095)])))
