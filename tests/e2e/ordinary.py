"""A libvirt that runs already and is not ours: as distributions set it up, with a guest that somebody made by hand.

It has a mount namespace of its own, so that a libvirt of the machine is not touched, and a network namespace that plays
the machine's: its guests' taps come to be there, and clouds are started there.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from micronova.cli.image import default_cache
from micronova.privileged.kernel import inside
from micronova.testimage.builder import build
from micronova.virt.libvirt.library import load
from micronova.virt.libvirt.private import PrivateLibvirtd, find_qemu_user
from tests.e2e.cloud import RealCloud
from tests.services.process import free_port

# Its tap has a name that a port of a cloud might have given it.
BY_HAND = """
<domain type='qemu'><name>by-hand</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type></os>
<devices><interface type='ethernet'><mac address='52:54:00:00:00:01'/><target dev='{tap}'/></interface></devices>
</domain>
"""


class OrdinaryDaemon(PrivateLibvirtd):
    """Runs the distribution's libvirtd with what the distribution would have set: it gives files to its guests."""

    def _configuration(self) -> dict[str, str]:
        return {
            "libvirtd.conf": f'host_uuid = "{self._host_uuid}"\n'
            'unix_sock_group = "libvirt"\nunix_sock_rw_perms = "0770"\nauth_unix_rw = "none"\n'
            'log_outputs = "3:file:/var/log/libvirt/libvirtd.log"\n',
            # But for what it would leave in the machine's control groups, and for the device that is hidden from it.
            "qemu.conf": "cgroup_controllers = []\nnamespaces = []\n",
            "virtlogd.conf": "",
        }


class OrdinaryLibvirt:
    """That libvirt, its directory, and the guest made by hand. Methods block."""

    def __init__(self) -> None:
        # Guests have to reach their files under their own names, so it is not for root only.
        self.room = Path(tempfile.mkdtemp(prefix="mn-e2e-", dir="/var/tmp"))
        self.room.chmod(0o711)
        self.namespace = f"mnhost-{uuid4().hex[:8]}"
        self.daemon = OrdinaryDaemon(
            self.room / "d", host_uuid=str(uuid4()), user=find_qemu_user(), namespace=self.namespace
        )
        self.uri = self.daemon.uri
        self.foreign = str(uuid4())
        self.tap = f"tap{self.foreign[:11]}"

    def start(self) -> None:
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        self.daemon.ensure()
        self._ask(lambda connection: connection.defineXML(BY_HAND.format(uuid=self.foreign, tap=self.tap)).create())

    def restart(self) -> None:
        """Let it fall over and be started again, as an init system does; guests run on."""
        before = self.daemon._owner("libvirtd")
        assert before is not None
        os.kill(before, signal.SIGKILL)
        while self.daemon._owner("libvirtd") is not None:
            time.sleep(0.02)
        self.daemon.ensure()

    def stop(self) -> None:
        self.daemon.stop()
        _ip("netns", "delete", self.namespace)
        shutil.rmtree(self.room)

    def guests(self) -> dict[str, bool]:
        """List the guests that it knows besides that one, and whether they run."""
        found: dict[str, bool] = self._ask(
            lambda connection: {each.UUIDString(): bool(each.isActive()) for each in connection.listAllDomains()}
        )
        return {uuid: active for uuid, active in found.items() if uuid != self.foreign}

    def pools(self) -> list[str]:
        """List the storage pools that it knows."""
        return list(self._ask(lambda connection: [each.name() for each in connection.listAllStoragePools()]))

    def taps(self, namespace: str = "") -> set[str]:
        """List the taps in a namespace: by default the one that plays the machine's."""
        shown = _ip("-n", namespace or self.namespace, "-o", "link")
        return {name for line in shown.splitlines() if (name := line.split(":")[1].strip()).startswith("tap")}

    def foreign_life(self) -> tuple[int, str]:
        """Give what would change if somebody touched the guest made by hand: its process, and all devices."""
        number: int = self._ask(lambda connection: connection.lookupByUUIDString(self.foreign).ID())
        return number, _ip("-n", self.namespace, "-o", "link")

    def _ask(self, question: Any) -> Any:
        connection = load().open(self.uri)
        try:
            return question(connection)
        finally:
            connection.close()


class GuestCloud(RealCloud):
    """A cloud whose guests that libvirt runs."""

    def __init__(self, libvirt: OrdinaryLibvirt, settings: str = "") -> None:
        super().__init__(
            f'{settings}\n[libvirt]\nconnection_uri = "{libvirt.uri}"\n',
            inside=["nsenter", f"--net=/run/netns/{libvirt.namespace}", "--"],
            directory=libvirt.room / "c",
        )
        self._ordinary = libvirt
        self.port = free_port()

    async def up(self) -> None:
        # From a namespace without a way out nothing could be fetched that it is made of.
        await asyncio.to_thread(build, default_cache() / "testimage.qcow2", default_cache())
        await super().up()

    def definitions(self) -> list[str]:
        return sorted(self._ordinary.guests())

    @contextlib.asynccontextmanager
    async def reached(self) -> AsyncIterator[None]:
        """Let its address be reached from outside its namespace."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)
        try:
            yield
        finally:
            server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with inside(self._ordinary.namespace):
            there = socket.socket()  # it stays there
        there.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(there, ("127.0.0.1", self.port))
        except OSError:
            there.close()
            writer.close()
            return
        answers, questions = await asyncio.open_connection(sock=there)
        await asyncio.gather(_pipe(reader, questions), _pipe(answers, writer))


async def _pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
