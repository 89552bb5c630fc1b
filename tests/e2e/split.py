"""A cloud in two processes over RabbitMQ: the roles with state, and the agents of one host, which tests kill."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from micronova.http.client import HTTPTransport
from micronova.objects.errors import Unavailable
from micronova.privileged.client import runtime_directory
from micronova.privileged.names import prefix_of
from tests.cluster import toml
from tests.command import micronova, ok
from tests.e2e.cloud import TINY, processes
from tests.e2e.guests import until
from tests.people import People
from tests.services.process import free_port
from tests.services.rabbitmq import RabbitMQ

CONTROL = ("api", "conductor", "scheduler", "metadata", "identity", "image", "network")
HOST = ("compute", "network-agent")
TIMES = {"MICRONOVA__DEFAULT__REPORT_INTERVAL": "1", "MICRONOVA__DEFAULT__SERVICE_DOWN_TIME": "15"}


class SplitCloud(People):
    """The cloud; `host` is the directory of the process with guests."""

    def __init__(self, bus: str, broker: RabbitMQ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mn-e2e-"))
        self.control, self.host = self.folder / "control", self.folder / "host"
        self._bus, self._broker = bus, broker
        self.name = f"host-{secrets.token_hex(3)}"  # also that of its broker user
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.flavor = self.image = ""

    async def up(self) -> None:
        """Start both, log in, and have a flavor and an image for small guests that do nothing."""
        self._write(
            "control",
            default={"transport_url": self._bus, "host": "control", "control_users": ["guest"]},
            api={"port": self._port, "public_url": self.url},
            conductor={"lease": 10.0, "sweep_interval": 1.0, "require_host_users": True},
            quota={"instances": -1, "cores": -1, "ram": -1},
        )
        self.start("control", *CONTROL, **TIMES)
        self.transport = HTTPTransport(self.url)
        await until(self._answers, lambda: f"the cloud to answer: {self.log('control')[-2000:]}")
        keys = json.loads((self.control / "keys.json").read_text())
        self.admin = await self.login("admin", keys["admin_password"], "admin")
        self._add_host()
        self.start_host()
        await until(self.host_is_up, lambda: f"the host to be up: {self.log('host')[-2000:]}")
        self.prefix = prefix_of(json.loads((self.host / "keys.json").read_text())["cloud_id"])
        self.flavor = (await self.admin.make("/compute/v2.1/flavors", "flavor", name="e2e.tiny", **TINY))["id"]

    def _add_host(self) -> None:
        """Do what `host add` says: the host gets the settings that it prints, and no other secret."""
        place = ("--config", self.folder / "control.toml", "--dir", self.control)
        lines = ok("host", "add", self.name, *place).splitlines()
        commands = [line for line in lines if "rabbitmqctl " in line]
        self._broker.do(*commands)
        file = self.folder / "host.toml"
        file.write_text("\n".join(line for line in lines if line not in commands))
        file.chmod(0o600)

    async def _answers(self) -> bool:
        with contextlib.suppress(Unavailable):
            return (await self.transport.request("GET", "/identity/v3", {}, None)).status == 200
        return False

    async def host_is_up(self) -> bool:
        """Return whether the compute service is up."""
        found = (await self.admin.do("GET", "/compute/v2.1/os-services?binary=nova-compute"))["services"]
        return any(service["state"] == "up" for service in found)

    def _write(self, name: str, **sections: Mapping[str, Any]) -> None:
        file = self.folder / f"{name}.toml"
        file.write_text(toml(sections))
        file.chmod(0o600)

    def start(self, name: str, *roles: str, **environment: str) -> None:
        command = [sys.executable, "-m", "micronova.cli.main", "run", *roles]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, "--config", str(self.folder / f"{name}.toml"), "--dir", str(self.folder / name)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip

    def start_host(self) -> None:
        """Start the agents of the host."""
        self.start("host", *HOST, **TIMES, MICRONOVA__DEFAULT__CPU_ALLOCATION_RATIO="20")

    async def restart_host(self) -> None:
        """Start the agents of the host, and wait until they work."""
        before = self._readies()
        self.start_host()

        async def ready() -> bool:
            assert self.processes["host"].poll() is None, self.log("host")[-2000:]
            return self._readies() > before

        await until(ready, lambda: f"the host to come back: {self.log('host')[-2000:]}")

    def _readies(self) -> int:
        return self.log("host").count("network-agent: ready")

    def agent(self) -> int | None:
        """Return the agent's process, a child of root's process."""
        root = self.processes["host"].pid
        children = Path(f"/proc/{root}/task/{root}/children")
        with contextlib.suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if os.stat(f"/proc/{pid}").st_uid != 0:
                    return pid
        return None

    def kill_host(self, *, whole: bool) -> None:
        """Kill the agent as the kernel does when memory runs out; `whole`: root's process, too."""
        pid = self.agent()
        process = self.processes["host"]
        if whole or pid is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def audit(self) -> list[dict[str, Any]]:
        """Return what `micronova audit` finds."""
        done = micronova("audit", "--json", "--config", self.folder / "control.toml", "--dir", self.control)
        assert done.stdout, done.stderr
        findings: list[dict[str, Any]] = json.loads(done.stdout)
        return findings

    async def stop(self) -> None:
        """Stop both: first the host, and remove what it made on the machine."""
        for name in ("host", "control"):
            if name in self.processes:
                await self.terminate(name)
        await asyncio.to_thread(ok, "down", "--dir", self.host)

    async def terminate(self, name: str) -> None:
        """Stop a process as systemd does, and wait for its end."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.to_thread(process.wait, 60)

    def leftovers(self) -> list[str]:
        """Return what is left on the machine, also of guests."""
        spaces = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout.splitlines()
        runtime = runtime_directory(self.prefix)
        return [
            *(line for line in spaces if line.startswith(self.prefix)),
            *processes(str(self.folder), self.prefix),
            *([str(runtime)] if runtime.exists() else []),
            *map(str, (self.host / "libvirt" / "instances").iterdir()),
            *map(str, (self.host / "libvirt" / "etc" / "qemu").glob("*.xml")),
        ]

    async def remove(self) -> None:
        """Stop it in whatever state it is, and remove its directories."""
        if hasattr(self, "transport"):
            await self.transport.close()
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for place in (self.control, self.host):
            if place.exists():
                await asyncio.to_thread(micronova, "down", "--dir", place)
        shutil.rmtree(self.folder)


@contextlib.asynccontextmanager
async def split_cloud(bus: str, broker: RabbitMQ) -> AsyncIterator[SplitCloud]:
    """Run such a cloud, and check that it leaves nothing on the machine."""
    cloud = SplitCloud(bus, broker)
    try:
        await cloud.up()
        yield cloud
        await cloud.stop()
        left = cloud.leftovers()
        assert not left, f"left of the cloud: {left}"
    finally:
        await cloud.remove()
