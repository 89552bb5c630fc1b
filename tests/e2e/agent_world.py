"""A network service with a real agent and helper; namespaces simulate guests."""

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.network.agent.agent import NetworkAgent
from micronova.embedded.network.agent.client import NetworkServiceClient
from micronova.embedded.network.agent.metadata import MetadataProxy
from micronova.http.client import ASGITransport, ServiceClient
from micronova.objects.clock import SystemClock
from micronova.privileged.client import HelperProcess, PrivilegedClient, runtime_directory
from micronova.privileged.names import prefix_of, tap_name
from tests.functional.metadata_proxies import LIMITS, keys_of
from tests.unit.embedded.network.world import ALICE, KEYRING, SERVICE, Compute, World, world

HOST = "h1"
GUESTS = ("compute:nova", "trunk:subport")
NEEDS = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(
        not all(shutil.which(name) for name in ("ip", "tc", "nft", "dnsmasq", "busybox", "ping")),
        reason="needs iproute2 nftables dnsmasq-base busybox iputils-ping",
    ),
]

_LEASE = """#!/bin/sh
[ "$1" = bound ] || [ "$1" = renew ] || exit 0
ip address replace "$ip/$mask" dev "$interface"
[ -n "$mtu" ] && ip link set "$interface" mtu "$mtu"
[ -n "$router" ] && ip route replace default via "${router%% *}"
set -- $staticroutes
while [ $# -ge 2 ]; do ip route replace "$1" via "$2"; shift 2; done
env > "$LEASE"
"""


def run(*command: str, check: bool = True, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
    return done


async def arun(*command: str, check: bool = True, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run, *command, check=check, timeout=timeout)


@dataclass
class Guest:
    """A namespace that simulates a guest."""

    namespace: str
    port: dict[str, Any]
    directory: Path

    @property
    def address(self) -> str:
        return str(self.port["fixed_ips"][0]["ip_address"])

    async def do(self, *command: str, check: bool = True, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        return await arun("ip", "netns", "exec", self.namespace, *command, check=check, timeout=timeout)

    async def dhcp(self) -> dict[str, str]:
        """Get an address by DHCP, and return the lease."""
        script, lease = self.directory / "lease.sh", self.directory / f"{self.namespace}.lease"
        script.write_text(_LEASE)
        script.chmod(0o755)
        lease.unlink(missing_ok=True)
        await self.do(
            "env", f"LEASE={lease}", "busybox", "udhcpc", "-i", "eth0", "-n", "-q", "-f", "-t", "8", "-T", "1",
            "-O", "staticroutes", "-O", "mtu", "-O", "dns", "-s", str(script),
        )  # fmt: skip
        return dict(line.split("=", 1) for line in lease.read_text().splitlines() if "=" in line)

    async def pings(self, address: str) -> bool:
        return (await self.do("ping", "-c", "1", "-W", "1", address, check=False)).returncode == 0

    async def reaches(self, address: str, port: int) -> bool:
        done = await self.do("busybox", "nc", "-w", "1", address, str(port), "-e", "true", check=False, timeout=10)
        return done.returncode == 0

    def listens(self, port: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "busybox", "nc", "-ll", "-p", str(port), "-e", "cat"]
        )


class AgentWorld:
    """A cloud of one host."""

    def __init__(self, network: World, directory: Path, connections: int = 0) -> None:
        self.network = network
        self._connections = connections
        self.directory = directory
        self.prefix = prefix_of(str(uuid.uuid4()))
        self._guests: list[Guest] = []
        self._mark = secrets.token_hex(3)
        self.helper = HelperProcess(self.prefix, directory / "helper.sock")
        self.agent: NetworkAgent

    async def start_agent(self) -> None:
        keys = keys_of(KEYRING, HOST)
        client = ServiceClient(ASGITransport(self.network.role.service.app), keys.ticket, renew=keys.forget)
        privileged = PrivilegedClient(self.directory / "helper.sock")
        self.asked: list[dict[str, str]] = []
        self.agent = NetworkAgent(
            NetworkServiceClient(client, HOST), privileged, SystemClock(), prefix=self.prefix, domain="openstacklocal",
            connections=self._connections,
            metadata=MetadataProxy(privileged, ASGITransport(self._metadata), keys, LIMITS),
        )  # fmt: skip
        await self.agent.start()

    async def _metadata(self, scope: Any, receive: Any, send: Any) -> None:
        """Stands for the metadata service: remembers what it was asked."""
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append({**headers, "path": scope["path"]})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": headers["x-instance-id"].encode()})

    async def guest(self, network: dict[str, Any], token: str = ALICE, **fields: Any) -> Guest:
        """Bind a port and plug a namespace into it, as a hypervisor does with a guest."""
        guest = await self.bound(network, token, **fields)
        await self.plug(guest)
        await self.until_active(guest.port["id"])
        return guest

    async def bound(self, network: dict[str, Any], token: str = ALICE, **fields: Any) -> Guest:
        """Bind a port for a guest that is not there yet."""
        project = token.partition("@")[2].partition("/")[0]
        port = await self.network.make("port", token, network_id=network["id"], **fields)
        port = await self.network.change(
            "port", port["id"], SERVICE, binding__host_id=HOST, device_id=str(uuid.uuid4()),
            device_owner="compute:nova",
        )  # fmt: skip
        assert port["project_id"] == project
        guest = Guest(f"mnguest-{self._mark}-{len(self._guests)}", port, self.directory)
        self._guests.append(guest)
        assert port["status"] == "DOWN", "the agent says when a port is wired"
        return guest

    async def plug(self, guest: Guest) -> None:
        port = guest.port
        await arun("ip", "netns", "add", guest.namespace)
        pair = ["type", "veth", "peer", "name", "eth0", "netns", guest.namespace, "address", port["mac_address"]]
        await arun("ip", "-n", self.prefix, "link", "add", tap_name(port["id"]), *pair)
        await guest.do("ip", "link", "set", "lo", "up")
        await guest.do("ip", "link", "set", "eth0", "up")

    def unplug(self, guest: Guest) -> None:
        run("ip", "netns", "delete", guest.namespace, check=False)
        run("ip", "-n", self.prefix, "link", "delete", tap_name(guest.port["id"]), check=False)

    async def until_active(self, port_id: str, status: str = "ACTIVE") -> None:
        async with asyncio.timeout(20):
            while (await self.network.show("port", port_id, SERVICE))["status"] != status:
                await asyncio.sleep(0.02)

    async def settled(self, plugged: bool = True) -> None:
        """Wait until the host is as the service says now, and all guests are plugged in."""
        async with asyncio.timeout(20):
            while True:
                answer = await self.network.call("GET", f"/agent-states/{HOST}", token=SERVICE)
                state = answer.json()["state"]
                waiting = [p for p in state["ports"] if p["host"] == HOST and p["status"] != "ACTIVE"]
                served = {p["network_id"] for p in state["ports"] if p["device_owner"] == "network:dhcp"}
                guests = {p["network_id"] for p in state["ports"] if p["device_owner"] in GUESTS}
                ready = served == guests and not (plugged and waiting)
                if ready and self.agent.reached == answer.json()["fingerprint"]:
                    return
                await asyncio.sleep(0.02)

    def close(self) -> None:
        """Take everything away; once more does nothing."""
        for guest in self._guests:
            self.unplug(guest)
        self.helper.stop(cleanup=True)


@contextlib.asynccontextmanager
async def agent_world(directory: Path, connections: int = 0) -> AsyncIterator[AgentWorld]:
    assert os.geteuid() == 0
    async with world(directory, compute=Compute(), clock=SystemClock()) as network:
        made = AgentWorld(network, directory, connections)
        await asyncio.to_thread(made.helper.start)
        try:
            await made.start_agent()
            yield made
            await made.agent.stop()
        finally:
            await asyncio.to_thread(made.close)


def remains(prefix: str) -> list[str]:
    """List what there is of a cloud."""
    spaces = [line.split()[0] for line in run("ip", "netns").stdout.splitlines() if line.startswith(prefix)]
    processes = [line for line in run("ps", "ax", "-o", "args").stdout.splitlines() if prefix in line]
    files = [str(runtime_directory(prefix))] if runtime_directory(prefix).exists() else []
    return spaces + processes + files
