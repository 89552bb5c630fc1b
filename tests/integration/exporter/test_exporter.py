"""The exporter with real storage daemons: serving, copying, resizing, and what happens when processes are killed."""

import asyncio
import os
import resource
import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from micronova.cli.volume_tools import QemuLuks
from micronova.embedded.volume.backend.luks import cipher_of
from micronova.exporter import messages as m
from micronova.exporter import wire
from micronova.exporter.client import ExportFailed
from micronova.exporter.daemon import Daemon
from micronova.objects.errors import Unavailable
from tests.integration.exporter.world import GUESTS, connected, killed, world

MIB = 1 << 20


def page_faults(pid: int) -> int:
    """Return how often a process was given a page of memory."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


@pytest.fixture
def volume_id() -> str:
    return str(uuid4())


async def test_a_guest_reads_what_another_wrote(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        file = cloud.file(volume_id)
        await cloud.serve(volume_id)
        await cloud.serve(volume_id)  # again: nothing changes
        await cloud.io(volume_id, "write -P 7 1M 1M", "flush")
        assert "pattern" not in (await cloud.io(volume_id, "read -P 7 1M 1M")).lower()
        with file.open("rb") as stream:
            stream.seek(MIB)
            assert stream.read(2 * MIB) == b"\7" * MIB + b"\0" * MIB
        assert (await cloud.client.ask(m.Served())).volumes == (volume_id,)
        await cloud.client.ask(m.StopServing(volume_id=volume_id))
        assert not cloud.daemons()
        assert (await cloud.client.ask(m.Served())).volumes == ()


async def test_a_readonly_volume_cannot_be_written(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        await cloud.serve(volume_id, readonly=True)
        said = await cloud.io(volume_id, "write -P 7 0 4k", check=False)
        assert "Permission denied" in said


async def test_large_requests_take_no_new_memory_each(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        await cloud.serve(volume_id)
        pid = cloud.daemons()[volume_id]

        async def faults(rounds: int) -> int:
            before = page_faults(pid)
            await cloud.io(
                volume_id,
                *(f"{what} {at}M 1M" for _ in range(rounds) for what in ("write", "read") for at in range(40)),
            )
            return page_faults(pid) - before

        await faults(1)  # has its buffers since
        assert await faults(2) < 2 * 80 * 20  # pages; a buffer has 256


async def test_a_killed_daemon_comes_back_and_io_goes_on(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        file = cloud.file(volume_id)
        await cloud.serve(volume_id)
        commands = [f"write -P {number + 1} {number}M 1M" for number in range(60)]
        writing = asyncio.ensure_future(
            cloud.io(volume_id, *(part for each in commands for part in (each, "sleep 20")))
        )
        while not writing.done() and file.read_bytes()[:1] != b"\1":  # who has not connected yet does not wait
            await asyncio.sleep(0.01)
        for _ in range(3):
            await killed(await cloud.daemon(volume_id))
        await writing
        with file.open("rb") as stream:
            for number in range(60):
                assert stream.read(MIB) == bytes([number + 1]) * MIB


async def test_daemons_outlive_the_exporter(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        await cloud.serve(volume_id)
        await cloud.access.allow(volume_id, GUESTS[1])
        before = cloud.daemons()
        await cloud.die()
        await cloud.io(volume_id, "write -P 3 0 1M")
        await cloud.run()
        assert cloud.daemons() == before
        await cloud.serve(volume_id)
        assert cloud.daemons() == before
        await killed(before[volume_id])
        while volume_id not in cloud.daemons():  # the new exporter has no socket that waits for the next daemon
            await asyncio.sleep(0.01)
        await cloud.io(volume_id, "read -P 3 0 1M")
        if os.geteuid() == 0:
            assert connected(cloud.sockets / volume_id / "nbd", GUESTS[1])


async def test_a_daemon_that_died_with_the_exporter_is_replaced(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        await cloud.serve(volume_id)
        await cloud.access.allow(volume_id, GUESTS[1])
        before = cloud.daemons()
        await cloud.die()
        await killed(before[volume_id])
        await cloud.run()
        assert (await cloud.client.ask(m.Served())).volumes == (volume_id,)
        await cloud.serve(volume_id)
        await cloud.io(volume_id, "read 0 1M")
        if os.geteuid() == 0:
            assert connected(cloud.sockets / volume_id / "nbd", GUESTS[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
async def test_a_volume_that_is_served_again_while_it_ends(
    tmp_path: Path, volume_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends it does not take the socket of what serves it again: a guest could never connect."""
    ended, go_on = asyncio.Event(), asyncio.Event()
    original = Daemon.stop

    async def stop(self: Daemon) -> None:
        await original(self)
        ended.set()
        await go_on.wait()

    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        await cloud.serve(volume_id)
        with monkeypatch.context() as patch:
            patch.setattr(Daemon, "stop", stop)
            ending = asyncio.ensure_future(cloud.client.ask(m.StopServing(volume_id=volume_id)))
            await ended.wait()
            serving = asyncio.ensure_future(cloud.serve(volume_id))
            await asyncio.wait({serving}, timeout=2)  # it waits, or is faster
            go_on.set()
            await ending
            await serving
        await cloud.access.allow(volume_id, GUESTS[0])
        await cloud.io(volume_id, "write -P 7 0 4k")
        assert list(cloud.daemons()) == [volume_id]


async def test_a_volume_that_ends_while_it_is_copied_has_no_clients(
    tmp_path: Path, volume_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is connected does not go on to write beside the next who gets the volume."""
    copying, go_on = asyncio.Event(), asyncio.Event()
    original = Daemon.copy

    async def copy(self: Daemon, *arguments: Any) -> None:
        copying.set()
        await go_on.wait()
        await original(self, *arguments)

    monkeypatch.setattr(Daemon, "copy", copy)
    async with world(tmp_path) as cloud:
        file = cloud.file(volume_id)
        await cloud.serve(volume_id)
        url = cloud.url(volume_id).replace(",reconnect-delay=60", "")
        client = await asyncio.create_subprocess_exec("qemu-io", "--image-opts", url, stdin=-1, stdout=-1, stderr=-2)
        assert client.stdin is not None
        client.stdin.write(b"write -P 1 0 4k\n")
        async with asyncio.timeout(60):
            while file.read_bytes()[:1] != b"\1":
                await asyncio.sleep(0.01)
        copied = asyncio.ensure_future(cloud.copy(volume_id, "0"))
        await copying.wait()
        await cloud.client.ask(m.StopServing(volume_id=volume_id))
        await cloud.serve(volume_id)  # for another
        said = (await client.communicate(b"write -P 2 0 4k\n"))[0].decode()
        assert "write failed" in said, said
        await cloud.io(volume_id, "write -P 3 4k 4k", "flush")
        go_on.set()
        assert (await copied).read_bytes()[: 3 << 12] == b"\1" * 4096 + b"\3" * 4096 + b"\0" * 4096


async def test_a_daemon_that_breaks_off_is_replaced(
    tmp_path: Path, volume_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter that takes over a daemon in the moment of its death starts all the same."""
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        await cloud.serve(volume_id)
        await cloud.die()

        async def reset(self: asyncio.StreamReader) -> bytes:
            raise ConnectionResetError(104, "Connection reset by peer")

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.StreamReader, "readline", reset)
            await cloud.run()
        await cloud.serve(volume_id)
        await cloud.io(volume_id, "write -P 7 0 4k")


async def test_only_the_users_that_the_agent_names_connect(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        with pytest.raises(Unavailable, match="not served"):
            await cloud.access.allow(volume_id, GUESTS[0])
        await cloud.serve(volume_id)
        socket = cloud.sockets / volume_id / "nbd"
        assert not connected(socket, GUESTS[0])
        with pytest.raises(ExportFailed, match="not the user of a guest"):
            await cloud.access.allow(volume_id, 65534)
        await cloud.access.allow(volume_id, GUESTS[0])
        assert connected(socket, GUESTS[0])
        assert not connected(socket, GUESTS[1])
        assert not connected(cloud.sockets / volume_id / "qmp", GUESTS[0])
        await cloud.access.revoke(GUESTS[0])
        assert not connected(socket, GUESTS[0])


async def test_no_guest_gets_a_volume_whose_key_takes_hours_to_derive(tmp_path: Path, volume_id: str) -> None:
    """A guest that has taken over its QEMU can write the header, and each start with the volume would hang."""
    async with world(tmp_path) as cloud:
        file = cloud.directory / volume_id
        await QemuLuks().format(file, 16 * MIB, cipher_of(None, None), "secret")
        await cloud.serve(volume_id)
        await cloud.access.allow(volume_id, GUESTS[0], encrypted=True)
        await cloud.access.revoke(GUESTS[0])
        with file.open("r+b") as stream:
            stream.seek(208 + 4)  # the rounds of the first place
            stream.write(b"\xff\xff\xff\xff")
        with pytest.raises(ExportFailed, match="rounds"):
            await cloud.access.allow(volume_id, GUESTS[0], encrypted=True)
        assert not connected(cloud.sockets / volume_id / "nbd", GUESTS[0])
        await cloud.access.allow(volume_id, GUESTS[0])  # what a guest writes to a volume in the clear is its own affair
        await cloud.die()
        await cloud.run()
        with pytest.raises(Unavailable, match="not passed"):
            await cloud.access.allow(volume_id, GUESTS[1], encrypted=True)
        await cloud.serve(volume_id)
        with pytest.raises(ExportFailed, match="rounds"):
            await cloud.access.allow(volume_id, GUESTS[1], encrypted=True)


async def test_descriptors_that_nothing_asked_for_are_closed(tmp_path: Path, volume_id: str) -> None:
    """Else a service that was taken over could leave the exporter without any, and all guests without volumes."""
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            watching = await wire.connect(cloud.directory / "service")
            with cloud.descriptors(volume_id) as passed:
                await wire.send(watching, msgspec.msgpack.encode(m.Watch()))
                await wire.send(watching, b"x", passed)
            await wire.receive(watching)
            watching.close()
        async with asyncio.timeout(10):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)


async def test_a_copy_is_of_one_moment(tmp_path: Path, volume_id: str) -> None:
    """A writer writes the same number everywhere, then the next one: a copy has one number, or two that follow."""
    async with world(tmp_path) as cloud:
        cloud.file(volume_id, 32 * MIB)
        await cloud.serve(volume_id)
        rounds = [f"write -P {number} {at}M 1M" for number in range(1, 40) for at in range(32)]
        await cloud.io(volume_id, *(f"write -P 0 {at}M 1M" for at in range(32)))
        writing = asyncio.ensure_future(cloud.io(volume_id, *rounds))
        await asyncio.sleep(0)
        for name in ("aa", "ab", "ac"):
            found = (await cloud.copy(volume_id, name)).read_bytes()
            numbers = [found[at * MIB] for at in range(32)]
            assert all(found[at * MIB : (at + 1) * MIB] == bytes([numbers[at]]) * MIB for at in range(32))
            assert numbers == sorted(numbers, reverse=True) and numbers[0] - numbers[-1] <= 1
        await writing


async def test_a_copy_keeps_holes_and_needs_no_export(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        file = cloud.file(volume_id, 1 << 30)
        with file.open("r+b") as stream:
            stream.seek(512 * MIB)
            stream.write(b"here")
        made = await cloud.copy(volume_id, "aa")
        assert not cloud.daemons()
        assert made.stat().st_blocks * 512 < 2 * MIB
        with made.open("rb") as stream:
            stream.seek(512 * MIB)
            assert stream.read(5) == b"here\0"


async def test_a_guest_sees_a_larger_volume_when_it_connects_again(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        file = cloud.file(volume_id)
        await cloud.serve(volume_id)
        writing = asyncio.ensure_future(
            cloud.io(volume_id, *(part for at in range(60) for part in (f"write -P 5 {at}M 1M", "sleep 10")))
        )
        while file.read_bytes()[:1] != b"\5":  # qemu-io waits only for an export that it has found before
            await asyncio.sleep(0.01)
        os.truncate(file, 128 * MIB)
        for _ in range(2):
            await cloud.client.ask(m.Resize(volume_id=volume_id, size=128 * MIB))
        await writing
        await cloud.io(volume_id, "write -P 6 127M 1M", "read -P 5 59M 1M")


async def test_a_readonly_volume_grows(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        file = cloud.file(volume_id)
        await cloud.serve(volume_id, readonly=True)
        os.truncate(file, 128 * MIB)
        await cloud.client.ask(m.Resize(volume_id=volume_id, size=128 * MIB))
        await cloud.io(volume_id, "read 127M 1M", readonly=True)
        assert "Permission denied" in await cloud.io(volume_id, "write -P 7 0 4k", check=False)


async def test_a_new_exporter_resizes_what_it_was_given_again(
    tmp_path: Path, volume_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as cloud:
        file = cloud.file(volume_id)
        await cloud.serve(volume_id, readonly=True)
        await cloud.die()
        await cloud.run()
        os.truncate(file, 128 * MIB)
        with pytest.raises(Unavailable, match="not passed"):
            await cloud.client.ask(m.Resize(volume_id=volume_id, size=128 * MIB))
        assert f"the request Resize of the volume service for volume {volume_id} failed" in caplog.text
        await cloud.serve(volume_id, readonly=True)
        await cloud.client.ask(m.Resize(volume_id=volume_id, size=128 * MIB))
        await cloud.io(volume_id, "read 127M 1M", readonly=True)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a b", "-x", ""])
async def test_names_that_are_no_copies_are_refused(tmp_path: Path, volume_id: str, name: str) -> None:
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        with pytest.raises(ExportFailed, match="not the name"), cloud.descriptors(volume_id) as passed:
            await cloud.client.copy(m.Copy(volume_id=volume_id, name=name), passed, lambda done: None)


async def test_a_volume_of_a_wrong_id_or_without_a_file_is_refused(tmp_path: Path, volume_id: str) -> None:
    async with world(tmp_path) as cloud:
        cloud.file(volume_id)
        with cloud.descriptors(volume_id) as passed:
            with pytest.raises(ExportFailed, match="not the id"):
                await cloud.client.ask(m.Serve(volume_id="../x", readonly=False), passed)
            with pytest.raises(ExportFailed, match="descriptors"):
                await cloud.client.ask(m.Serve(volume_id=volume_id, readonly=False), [passed[1], passed[0]])
            with pytest.raises(ExportFailed, match="descriptors"):
                await cloud.client.ask(m.Serve(volume_id=volume_id, readonly=False))


async def test_a_lack_of_descriptors_does_not_end_the_service(tmp_path: Path) -> None:
    """Idle connections take all that the process may have; it answers when they have gone."""
    async with world(tmp_path) as cloud:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        for room in (9, 10):  # each connection takes two here; with one of these numbers the exporter lacks the last
            idle: list[socket.socket] = []
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + room, before[1]))
                with pytest.raises(OSError, match="Too many open files"):
                    while True:
                        idle.append(await wire.connect(cloud.directory / "service"))
                        for _ in range(5):
                            await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for connection in idle:
                connection.close()
            assert (await cloud.client.ask(m.Served())).volumes == ()
