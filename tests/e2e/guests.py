"""Tenants of a real cloud, and their guests: made and shown by the API, inspected by SSH and console."""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.people import Person

TIMEOUT = 120.0
"""Seconds that a guest may take for anything on a busy machine."""
POLL_INTERVAL = 0.2
"""Seconds between probes."""
READY = "MICRONOVA-GUEST-READY"
SERVERS = "/compute/v2.1/servers"

# A bootable disk with a program of one instruction, an endless loop.
IDLE_DISK = b"\xeb\xfe" + bytes(508) + b"\x55\xaa" + bytes(1 << 20)


def whole_lines(log: str) -> str:
    """Return a console log without its last, incomplete line."""
    return log[: log.rfind("\n") + 1]


class TenantCloud(Protocol):
    """What a tenant needs of its cloud."""

    prefix: str
    image: str
    flavor: str
    admin: Person


async def until(probe: Callable[[], Awaitable[Any]], what: str | Callable[[], str], timeout: float = TIMEOUT) -> Any:
    """Call a probe until its result is true, and return the result."""
    try:
        async with asyncio.timeout(timeout):
            while not (found := await probe()):
                await asyncio.sleep(POLL_INTERVAL)
            return found
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what if isinstance(what, str) else what()}") from None


async def run(*command: str, timeout: float = TIMEOUT) -> "subprocess.CompletedProcess[str]":
    """Run a program and return its result, also if it fails."""
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


@dataclass
class Guest:
    """A server."""

    tenant: "Tenant"
    id: str
    name: str
    floating: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{SERVERS}/{self.id}"

    async def show(self) -> dict[str, Any]:
        server: dict[str, Any] = (await self.tenant.person.do("GET", self.path))["server"]
        return server

    async def wait(self, status: str, timeout: float = TIMEOUT) -> dict[str, Any]:
        """Wait for a status without a task state; fail at once on an unexpected ERROR."""
        seen: dict[str, Any] = {}

        async def reached() -> bool:
            seen.update(await self.show())
            at_rest = seen["OS-EXT-STS:task_state"] is None
            if seen["status"] == "ERROR" != status and at_rest:
                raise AssertionError(f"{self.name} is in ERROR: {seen.get('fault')}")
            return seen["status"] == status and at_rest

        await until(reached, lambda: f"{self.name} to be {status}; it is {seen}", timeout)
        return seen

    async def act(self, action: str, argument: Any = None, status: str = "") -> None:
        """Start a server action, and wait for a status if one is given."""
        await self.tenant.person.do("POST", f"{self.path}/action", {action: argument})
        if status:
            await self.wait(status)

    async def delete(self) -> None:
        """Delete it, and wait until it is gone."""
        await self.tenant.person.do("DELETE", self.path)
        await self.gone()

    async def gone(self) -> None:
        async def unknown() -> bool:
            return (await self.tenant.person.request("GET", self.path)).status == 404

        await until(unknown, f"{self.name} to be gone")

    # --- consoles --------------------------------------------------------------------------------------------------

    async def log(self) -> str:
        """Return its console log; empty as long as it has no host."""
        answer = await self.tenant.person.request("POST", f"{self.path}/action", {"os-getConsoleOutput": {}})
        assert answer.status in (200, 409), answer.body
        return str(answer.json()["output"]) if answer.status == 200 else ""

    async def shows(self, text: str, count: int = 1) -> str:
        """Wait until the text is on its console so many times, and return the log."""
        seen = ""

        async def there() -> bool:
            nonlocal seen
            seen = whole_lines(await self.log())
            return seen.count(text) >= count

        await until(there, lambda: f"{text!r} {count} times on the console of {self.name}:\n{seen[-3000:]}")
        return seen

    async def console(self, protocol: str, kind: str) -> str:
        """Return a link to one of its consoles."""
        body = {"remote_console": {"protocol": protocol, "type": kind}}
        made = await self.tenant.person.do("POST", f"{self.path}/remote-consoles", body)
        return str(made["remote_console"]["url"])

    async def ready(self, count: int = 1) -> dict[str, str]:
        """Wait until it has booted so many times; return the fields of its last READY line."""
        await self.wait("ACTIVE")
        log = await self.shows(READY, count)
        line = [line for line in log.splitlines() if READY in line][-1]
        return dict(re.findall(r"(\w+)=(\S*)", line))

    # --- its network ---------------------------------------------------------------------------------------------

    async def port(self, network: str = "") -> dict[str, Any]:
        """Return its port (on a network)."""
        query = f"?device_id={self.id}" + (f"&network_id={network}" if network else "")
        [port] = (await self.tenant.person.do("GET", f"/network/v2.0/ports{query}"))["ports"]
        return dict(port)

    async def floating_ip(self) -> str:
        """Return its floating IP; make one if it has none."""
        if not self.floating:
            port = await self.port(self.tenant.network["id"])
            self.floating = await self.tenant.person.make(
                "/network/v2.0/floatingips", "floatingip",
                floating_network_id=self.tenant.public, port_id=port["id"],
            )  # fmt: skip
        return str(self.floating["floating_ip_address"])

    async def release_floating_ip(self) -> None:
        """Delete its floating IP."""
        await self.tenant.person.do("DELETE", f"/network/v2.0/floatingips/{self.floating['id']}")
        self.floating = {}

    async def outside(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a program in the namespace that reaches floating IPs."""
        return await run("ip", "netns", "exec", self.tenant.cloud.prefix, *command)

    async def ssh(self, command: str, *, check: bool = True) -> str:
        """Run a command in the guest as root, and return its output; repeat while SSH does not answer."""
        address = await self.floating_ip()
        seen: list[subprocess.CompletedProcess[str]] = []

        async def answered() -> bool:
            seen[:] = [await self.outside("ssh", *self.tenant.ssh_options, f"root@{address}", command)]
            return seen[0].returncode != 255

        await until(answered, lambda: f"{self.name} at {address} to let us in: {seen}")
        assert not check or seen[0].returncode == 0, seen
        return seen[0].stdout

    async def answers_ping(self) -> bool:
        return (await self.outside("ping", "-c", "1", "-W", "2", await self.floating_ip())).returncode == 0

    async def answers_http(self) -> str:
        """Return the answer of its web server; empty if it does not answer."""
        done = await self.outside("busybox", "nc", "-w", "2", await self.floating_ip(), "80", "-e", "sh", "-c",
                                  r"printf 'GET / HTTP/1.0\r\n\r\n'; cat >&2")  # fmt: skip
        return done.stderr if done.stderr.startswith("HTTP/") else ""


@dataclass
class Tenant:
    """A project with a person in it, a network and a key pair."""

    cloud: TenantCloud
    person: Person
    key: Path
    network: dict[str, Any] = field(default_factory=dict)
    subnet: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    public: str = ""
    router: str = ""

    @property
    def ssh_options(self) -> tuple[str, ...]:
        return (
            "-i", str(self.key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=5",
        )  # fmt: skip

    async def set_up(self, cidr: str, *, router: bool = True) -> None:
        person = self.person
        public = self.key.with_suffix(".pub").read_text()
        await person.make("/compute/v2.1/os-keypairs", "keypair", name="key", public_key=public, type="ssh")
        self.network = await person.make("/network/v2.0/networks", "network", name="net")
        self.subnet = await person.make(
            "/network/v2.0/subnets", "subnet", network_id=self.network["id"], ip_version=4, cidr=cidr
        )
        [group] = (await person.do("GET", f"/network/v2.0/security-groups?project_id={person.project_id}"))[
            "security_groups"
        ]
        self.group = group["id"]
        await self.allow(protocol="icmp")
        await self.allow(protocol="tcp", port_range_min=22, port_range_max=22)
        [outer] = (await person.do("GET", "/network/v2.0/networks?router:external=true"))["networks"]
        self.public = outer["id"]
        if router:
            made = await person.make(
                "/network/v2.0/routers", "router", name="router", external_gateway_info={"network_id": self.public}
            )
            self.router = made["id"]
            await self._route(self.subnet["id"])

    async def _route(self, subnet: str) -> None:
        path = f"/network/v2.0/routers/{self.router}/add_router_interface"
        await self.person.do("PUT", path, {"subnet_id": subnet})

    async def add_ipv6(self, cidr: str) -> None:
        """Add a SLAAC subnet to the network."""
        made = await self.person.make(
            "/network/v2.0/subnets", "subnet", network_id=self.network["id"], ip_version=6, cidr=cidr,
            ipv6_ra_mode="slaac", ipv6_address_mode="slaac",
        )  # fmt: skip
        await self._route(made["id"])

    async def allow(self, **rule: Any) -> str:
        """Add a rule to the default security group; return its id."""
        made = await self.person.make(
            "/network/v2.0/security-group-rules", "security_group_rule",
            security_group_id=self.group, direction="ingress", ethertype="IPv4", **rule,
        )  # fmt: skip
        return str(made["id"])

    async def forbid(self, rule: str) -> None:
        """Delete a rule."""
        await self.person.do("DELETE", f"/network/v2.0/security-group-rules/{rule}")

    async def boot(self, name: str, **fields: Any) -> Guest:
        """Create a server."""
        wanted = {
            "name": name, "imageRef": self.cloud.image, "flavorRef": self.cloud.flavor, "key_name": "key",
            "networks": [{"uuid": self.network["id"]}],
        } | fields  # fmt: skip
        made = await self.person.make(SERVERS, "server", **wanted)
        return Guest(self, made["id"], name)

    async def clear(self) -> None:
        """Delete all its servers, and wait until they are gone."""
        servers = (await self.person.do("GET", SERVERS))["servers"]
        for guest in [Guest(self, server["id"], server["name"]) for server in servers]:
            await guest.delete()
