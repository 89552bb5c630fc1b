"""A cloud of `micronova up --driver libvirt` with real guests, used through HTTP, SSH and consoles.

It takes a few seconds to start, so modules share one; every test makes its own projects and deletes its servers.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from micronova.http.client import HTTPTransport
from micronova.privileged.client import runtime_directory
from micronova.privileged.names import prefix_of
from micronova.virt.libvirt.daemon.cgroups import DaemonGroup
from tests.command import micronova, ok
from tests.e2e.guests import Tenant, run, until
from tests.people import People

TINY: Mapping[str, Any] = {"ram": 128, "vcpus": 1, "disk": 1}


class RealCloud(People):
    """The cloud, with its own directory."""

    def __init__(
        self,
        settings: str = "",
        environment: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
        directory: Path | None = None,
        libvirt: Path | None = None,
    ) -> None:
        # Short: the paths of Unix sockets have a limit.
        self.folder = Path(tempfile.mkdtemp(prefix="mn-e2e-"))
        self.directory = directory or self.folder / "c"
        self.libvirt = libvirt or self.directory / "libvirt"
        self._settings = settings
        self._inside = inside
        self._environment = environment
        self.flavor = self.image = ""
        self.prefix = ""

    # --- starting and stopping -------------------------------------------------------------------------------------

    async def up(self) -> None:
        """Start it, log in, and make a flavor for small guests."""
        await asyncio.to_thread(self._up)
        self.prefix = prefix_of(json.loads((self.directory / "keys.json").read_text())["cloud_id"])
        auth = yaml.safe_load((self.directory / "clouds.yaml").read_text())["clouds"]["micronova"]["auth"]
        self.url = str(auth["auth_url"]).removesuffix("/identity/v3")
        self.transport = HTTPTransport(self.url)
        self.admin = await self.login(auth["username"], auth["password"], auth["project_name"])
        if not self.flavor:
            self.flavor = (await self.admin.make("/compute/v2.1/flavors", "flavor", name="e2e.tiny", **TINY))["id"]
        [image] = (await self.admin.do("GET", "/image/v2/images?name=test-image"))["images"]
        self.image = image["id"]

    def _up(self) -> None:
        command: list[str | Path] = ["up", "--driver", "libvirt", "--port", "0", "--detach", "--dir", self.directory]
        if self._settings:
            file = self.folder / "micronova.toml"
            file.write_text(self._settings)
            command += ["--config", file]
        ok(*command, env=self._environment, inside=self._inside)

    async def down(self) -> None:
        """Stop it."""
        await self.transport.close()
        await asyncio.to_thread(ok, "down", "--dir", self.directory, inside=self._inside)

    async def remove(self) -> None:
        """Stop it in whatever state it is, and remove its directory."""
        if hasattr(self, "transport"):
            await self.transport.close()
        if self.directory.exists():
            await asyncio.to_thread(micronova, "down", "--dir", self.directory, inside=self._inside)
        shutil.rmtree(self.folder)

    @property
    def log(self) -> str:
        return (self.directory / "micronova.log").read_text(errors="replace")

    def audit(self) -> list[dict[str, Any]]:
        """Return what `micronova audit` finds."""
        done = micronova("audit", "--dir", self.directory, "--json")
        assert done.stdout, done.stderr
        findings: list[dict[str, Any]] = json.loads(done.stdout)
        return findings

    async def wait_clean(self) -> None:
        """Wait until the audit finds nothing."""

        async def clean() -> bool:
            return await asyncio.to_thread(self.audit) == []

        await until(clean, lambda: f"a clean audit; it found {self.audit()}")

    # --- what it leaves on the machine -----------------------------------------------------------------------------

    def definitions(self) -> list[str]:
        """Return the guests that its libvirt knows."""
        folders = [self.libvirt / name for name in ("etc/qemu", "run/qemu")]
        return sorted({file.stem for folder in folders if folder.is_dir() for file in folder.glob("*.xml")})

    def guest_leftovers(self) -> list[str]:
        """Return what is left of guests while the cloud runs: disks, definitions, processes, devices."""
        links = _run(*self._inside, "ip", "-n", self.prefix, "-o", "link").splitlines()
        return [
            *(f"disk {path.name}" for path in (self.libvirt / "instances").iterdir()),
            *(f"definition {name}" for name in self.definitions()),
            *(line for line in processes(str(self.directory), self.prefix) if "qemu-system" in line),
            *(f"device {line.split(':')[1].strip()}" for line in links if ": tap" in line),
        ]

    def leftovers(self) -> list[str]:
        """Return what a stopped cloud has left on the machine; its files may stay."""
        mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.directory) in line]
        files = [str(runtime_directory(self.prefix))] if runtime_directory(self.prefix).exists() else []
        return [
            *(line for line in _run(*self._inside, "ip", "netns").splitlines() if line.startswith(self.prefix)),
            *processes(str(self.directory), self.prefix),
            *mounts,
            *files,
            *(["a control group"] if DaemonGroup(self.directory / "libvirt").exists() else []),
        ]

    # --- tenants ---------------------------------------------------------------------------------------------------

    async def tenant(self, cidr: str = "10.77.0.0/24", *, router: bool = True) -> Tenant:
        """Make a project with a network, a router, a key pair, and a security group that allows SSH and ping."""
        person = await self.person("member")
        key = self.folder / f"key-{person.project_id[:8]}"
        await run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        tenant = Tenant(self, person, key)
        await tenant.set_up(cidr, router=router)
        return tenant


@dataclass(frozen=True)
class MachineState:
    """Devices and firewall tables of the machine outside all clouds; tests must not change them."""

    links: tuple[str, ...]
    tables: tuple[str, ...]

    @classmethod
    def read(cls) -> "MachineState":
        links = tuple(line.split(":")[1].strip() for line in _run("ip", "-o", "link").splitlines())
        return cls(links, tuple(_run("nft", "list", "tables").splitlines()))


@contextlib.asynccontextmanager
async def real_cloud(cloud: RealCloud | None = None) -> AsyncIterator[RealCloud]:
    """Run a cloud, and check that it leaves nothing on the machine."""
    before = MachineState.read()
    cloud = cloud or RealCloud()
    try:
        await cloud.up()
        yield cloud
        await cloud.wait_clean()
        nothing("of guests", cloud.guest_leftovers())
        await cloud.down()
        nothing("of the cloud", cloud.leftovers())
        assert MachineState.read() == before, f"the machine was {before} and is {MachineState.read()}"
    finally:
        await cloud.remove()


def processes(*words: str) -> list[str]:
    """Return the processes that have one of the words in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if any(word in command for word in words):
                    found.append(f"{entry.name} {command}")
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def script(*lines: str) -> str:
    """Return a shell script as user data."""
    return base64.b64encode("\n".join(("#!/bin/sh", *lines, "")).encode()).decode()


def nothing(what: str, left: list[str]) -> None:
    """Fail with a list of what is left, if anything is."""
    assert not left, f"left {what}: {left}"
