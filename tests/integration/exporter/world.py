"""An exporter in this process, with real storage daemons, and QEMU's tools as the guests that connect to them."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from micronova.exporter import daemon, wire
from micronova.exporter import messages as m
from micronova.exporter.client import ExporterClient, VolumeAccess
from micronova.exporter.server import Exporter, ExporterSetup
from micronova.virt.libvirt.storage import acl, sandbox

PREFIX = "mn-0123abcd"
GUESTS = range(2013265920, 2013265920 + 16)


class World:
    """The sockets of root, and an exporter that can be killed and started again."""

    def __init__(
        self, directory: Path, prefix: str = PREFIX, sockets: Path | None = None, guests: range = GUESTS
    ) -> None:
        self.directory = directory
        self.sockets = sockets or directory / "s"
        self.prefix = prefix
        self.guests = guests
        self.sockets.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:  # users of guests pass through
            for folder in (self.sockets, *self.sockets.parents):
                if folder.stat().st_uid == 0:
                    folder.chmod(folder.stat().st_mode | 0o011)
        self.copies = directory / "copies"
        self.copies.mkdir()
        self.service = wire.listen(directory / "service", os.geteuid())
        self.agent = wire.listen(directory / "agent", os.geteuid())
        self.client = ExporterClient(directory / "service")
        self.access = VolumeAccess(ExporterClient(directory / "agent"))
        self.exporter: Exporter | None = None

    def start(self) -> Exporter:
        """Return an exporter, not started."""
        program = shutil.which("qemu-storage-daemon")
        assert program is not None
        return Exporter(
            ExporterSetup(
                prefix=self.prefix,
                directory=self.sockets,
                sandbox=(sys.executable, "-I", "-S", sandbox.__file__),
                program=program,
                set_access=acl.share,
                users_of=acl.users,
                connect_right=acl.READ | acl.WRITE,
                guest_users=self.guests,
                service_user=os.geteuid(),
                agent_user=os.geteuid(),
            )
        )

    async def run(self) -> None:
        """Start an exporter, which finds the daemons of the one before."""
        self.exporter = self.start()
        await self.exporter.start(self.service, self.agent)

    async def die(self) -> None:
        """End the exporter as kill -9 does: its daemons stay."""
        assert self.exporter is not None
        tasks, volumes = list(self.exporter._tasks), self.exporter._volumes.values()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for volume in volumes:
            if volume.daemon is not None:
                await volume.daemon.lose()
            volume.close()
        self.exporter = None

    def file(self, volume_id: str, size: int = 64 << 20) -> Path:
        """Make the file of a volume."""
        path = self.directory / volume_id
        with path.open("wb") as stream:
            stream.truncate(size)
        return path

    async def serve(self, volume_id: str, *, readonly: bool = False) -> None:
        """Serve a volume."""
        with self.descriptors(volume_id) as passed:
            await self.client.ask(m.Serve(volume_id=volume_id, readonly=readonly), passed)

    @contextlib.contextmanager
    def descriptors(self, volume_id: str):  # type: ignore[no-untyped-def]
        """Open what a request for a volume passes."""
        opened = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (self.directory / volume_id, self.copies)]
        try:
            yield opened
        finally:
            wire.close(opened)

    async def copy(self, volume_id: str, name: str) -> Path:
        """Copy a volume."""
        target = self.copies / name
        with target.open("wb") as stream:
            stream.truncate((self.directory / volume_id).stat().st_size)
        with self.descriptors(volume_id) as passed:
            await self.client.copy(m.Copy(volume_id=volume_id, name=name), passed, lambda done: None)
        return target

    def url(self, volume_id: str) -> str:
        """Return the address of a volume, as QEMU's tools take it; a client that loses its connection waits."""
        return (
            f"driver=nbd,export={volume_id},server.type=unix,server.path={self.sockets / volume_id / 'nbd'},"
            "reconnect-delay=60"
        )

    async def io(self, volume_id: str, *commands: str, check: bool = True, readonly: bool = False) -> str:
        """Run commands of qemu-io on a volume, as a guest would read and write."""
        wanted = [part for command in commands for part in ("-c", command)]
        ran = await asyncio.create_subprocess_exec(
            "qemu-io", *(["-r"] if readonly else []), *wanted, "--image-opts", self.url(volume_id), stdout=-1, stderr=-2
        )
        said = (await ran.communicate())[0].decode()
        assert not check or ("failed" not in said and ran.returncode == 0), said
        return said

    async def daemon(self, volume_id: str) -> int:
        """Wait for the daemon of a volume; return its process id. One that just starts has no command line yet."""
        while (pid := self.daemons().get(volume_id)) is None:
            await asyncio.sleep(0.01)
        return pid

    def daemons(self) -> dict[str, int]:
        """Return the processes of the daemons by volume."""
        found = {}
        for volume_id, each in daemon.find(self.prefix, os.geteuid()):
            found[volume_id] = each.pid
            each.forget()
        return found


async def killed(pid: int) -> None:
    """Kill a process and wait for its end."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(handle, wire.done, future)
        await future
        asyncio.get_running_loop().remove_reader(handle)
    finally:
        os.close(handle)


@contextlib.asynccontextmanager
async def world(directory: Path, sockets: Path | None = None, guests: range = GUESTS) -> AsyncIterator[World]:
    """An exporter that runs. Nothing is left of it afterwards."""
    prefix = f"mn-{os.getpid() & 0xFFFFFFFF:08x}"
    short = Path(tempfile.mkdtemp(prefix="mn"))  # the path of a socket has at most 107 characters
    (directory / "here").symlink_to(short)
    made = World(short, prefix, sockets, guests)
    await made.run()
    try:
        yield made
    finally:
        if made.exporter is None:
            await made.run()
        assert made.exporter is not None
        await made.exporter.stop()
        made.service.close()
        made.agent.close()
    assert not made.daemons()
    assert not list(made.sockets.iterdir())
    shutil.rmtree(short)


def connected(path: Path, uid: int) -> bool:
    """Return whether a user can connect to a socket; for root."""
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(uid, uid, uid)
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
