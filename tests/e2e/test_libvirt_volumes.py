"""Volumes of real guests: booted from, shared, copied and enlarged, while storage daemons are killed."""

import asyncio
import contextlib
import hashlib
import shutil
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from micronova.exporter import messages as m
from micronova.objects.errors import Invalid, NotSupported
from micronova.objects.volume import AttachedVolume, NBDConnection
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.driver import LibvirtDriver
from micronova.virt.libvirt.guests import reconnecting
from micronova.virt.libvirt.storage import acl, tools
from micronova.virt.libvirt.storage.guest_users import guest_ids
from tests.e2e.guests import run
from tests.e2e.host import TIMEOUT, Host, console
from tests.integration.exporter.world import World, killed, world

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

READY = "MICRONOVA-GUEST-READY"
MIB = 1 << 20
SEEN_AS = Path("/var/lib/libvirt/volumes")


@dataclass
class Storage:
    """Volumes of a host."""

    host: Host
    exporter: World

    async def volume(self, name: str, size: int = 64 * MIB, **more: Any) -> AttachedVolume:
        """Make a volume, serve it, and return how a guest gets it."""
        volume_id = str(uuid4())
        self.exporter.file(volume_id, size)
        await self.exporter.serve(volume_id)
        return describe(volume_id, name, **more)

    async def bootable(self) -> AttachedVolume:
        """Make a volume of the test image."""
        volume_id = str(uuid4())
        image = self.exporter.directory / "image"
        await asyncio.to_thread(_fetch, self.host.images.ticket, image)
        target = self.exporter.directory / volume_id
        done = await run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(image), str(target))
        assert done.returncode == 0, done.stderr
        await self.exporter.serve(volume_id)
        return describe(volume_id, "/dev/vda", boot_index=0)

    async def encrypted(self, name: str, size: int = 64 * MIB) -> AttachedVolume:
        """Make an encrypted volume, serve it, and return how a guest gets it."""
        volume_id, passphrase = str(uuid4()), uuid4().hex
        path = self.exporter.file(volume_id, 0)
        options = "cipher-alg=aes-256,cipher-mode=xts,ivgen-alg=plain64"
        await tools.create_luks(path, size, options, passphrase)
        await self.exporter.serve(volume_id)
        made = describe(volume_id, name, secret=passphrase)
        return msgspec.structs.replace(made, connection=msgspec.structs.replace(made.connection, encrypted=True))

    def content(self, volume: AttachedVolume, at: int, count: int) -> bytes:
        with (self.exporter.directory / volume.volume_id).open("rb") as stream:
            stream.seek(at)
            return stream.read(count)

    def digest(self, volume: AttachedVolume) -> str:
        return hashlib.md5(self.content(volume, 0, 4 * MIB)).hexdigest()


def describe(volume_id: str, name: str, mode: str = "rw", **more: Any) -> AttachedVolume:
    return AttachedVolume(
        volume_id=volume_id,
        attachment_id=str(uuid4()),
        device_uuid=str(uuid4()),
        device_name=name,
        connection=NBDConnection(
            export_name=volume_id, socket_path=str(SEEN_AS / volume_id / "nbd"), access_mode=mode, discard=True
        ),
        **more,
    )


def _fetch(url: str, target: Path) -> None:
    with urllib.request.urlopen(url) as source, target.open("wb") as stream:
        shutil.copyfileobj(source, stream)


@asynccontextmanager
async def storage(host: Host, directory: Path) -> AsyncIterator[tuple[LibvirtDriver, Storage]]:
    """An agent with an exporter."""
    users = guest_ids("2013265920-2147483647", "cloud-1")
    async with (
        world(directory, host.root / "volumes", users) as exporter,
        host.agent(volume_access=exporter.directory / "agent") as (driver, _),
    ):
        yield driver, Storage(host, exporter)
    (host.root / "volumes").rmdir()


async def shell(driver: LibvirtDriver, plan: GuestPlan, command: str, timeout: float = TIMEOUT) -> str:
    """Run a command in a guest by its serial console, and return what it prints."""
    mark = uuid4().hex[:12]
    serial = await driver.get_serial_console(plan.instance.uuid)
    reader, writer = await asyncio.open_unix_connection(serial.path)
    seen = ""
    try:
        async with asyncio.timeout(timeout):
            # The marks are put together by the shell, so that its echo does not have them.
            writer.write(f"\nprintf 'b\\145gin-{mark}\\n'; {command}; printf '\\145nd-{mark}\\n'\n".encode())
            await writer.drain()
            while f"end-{mark}" not in seen:
                part = await reader.read(4096)
                assert part, seen
                seen += part.decode(errors="replace")
    except TimeoutError:
        raise AssertionError(f"{command!r} did not end: {seen}") from None
    finally:
        writer.close()
    printed = seen.partition(f"begin-{mark}")[2].partition(f"end-{mark}")[0].strip()
    # The guest tells of its devices on the same console, at any moment.
    return "\n".join(line for line in printed.splitlines() if not line.startswith("MICRONOVA-GUEST-"))


def with_volumes(plan: GuestPlan, *volumes: AttachedVolume) -> GuestPlan:
    plan.volumes = volumes
    return plan


async def boot(driver: LibvirtDriver, plan: GuestPlan) -> GuestPlan:
    await driver.spawn(plan)
    await console(driver, plan.instance.uuid, READY)
    await listens(driver, plan)
    return plan


async def listens(driver: LibvirtDriver, plan: GuestPlan) -> None:
    """Wait for the shell of a guest: one that is just starting forgets what was typed before."""
    for _ in range(20):
        with contextlib.suppress(AssertionError):
            await shell(driver, plan, "echo", 4.0)
            return
    raise AssertionError("the guest has no shell")


@contextlib.contextmanager
def lost_answer(to: str) -> Iterator[list[str]]:
    """Let a call to libvirt happen once, and fail; yield the guests that it was about."""
    change, lost = Connection.change, list[str]()

    async def losing(self: Connection, guest: str, function: Any, what: str, **more: Any) -> Any:
        result = await change(self, guest, function, what, **more)
        if what == to and not lost:
            lost.append(guest)
            raise DriverFailed("the answer is lost")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "change", losing)
        yield lost


async def test_the_volumes_of_a_guest(host: Host, tmp_path: Path) -> None:
    async with storage(host, tmp_path) as (driver, made):
        root = await made.bootable()
        data, readonly = await made.volume("/dev/vdb"), await made.volume("/dev/vdc", mode="ro")
        first = await boot(driver, host.plan(image=None, volumes=(root, data, readonly)))
        assert await shell(driver, first, "cat /sys/block/vdb/serial") == data.volume_id[:20]
        assert await shell(driver, first, "cat /sys/block/vdb/ro /sys/block/vdc/ro | tr -d '\\n\\r'") == "01"

        # Its requests wait while the daemon is away.
        digest = await shell(driver, first, "head -c 4194304 /dev/urandom >/tmp/data; md5sum /tmp/data | cut -c 1-32")
        copy = "i=0; while [ $i -lt 6 ]; do dd if=/tmp/data of=/dev/vdb bs=64k 2>&1 && sync || break; i=$((i+1)); done"
        writing = asyncio.ensure_future(shell(driver, first, f"({copy}) >/tmp/said; tail -1 /tmp/said"))
        for _ in range(3):
            await asyncio.sleep(0.3)
            await killed(await made.exporter.daemon(data.volume_id))
        assert "64+0 records out" in await writing
        assert (await shell(driver, first, "grep -c 'records out' /tmp/said")) == "6"
        assert made.digest(data) == digest

        # A larger volume is seen without a restart.
        grown = 96 * MIB
        with (made.exporter.directory / data.volume_id).open("r+b") as stream:
            stream.truncate(grown)
        await made.exporter.client.ask(m.Resize(volume_id=data.volume_id, size=grown))
        await driver.extend_volume(first.instance.uuid, data, grown)
        await driver.extend_volume(first.instance.uuid, data, grown)
        assert await shell(driver, first, "cat /sys/block/vdb/size") == str(grown // 512)

        # Another one takes its place while it is written to.
        other = await made.volume("/dev/vdb", grown)
        writing = asyncio.ensure_future(
            shell(
                driver,
                first,
                "i=0; while [ $i -lt 40 ]; do echo mark-$i | dd of=/dev/vdb bs=4096 seek=$((20000+i)) "
                "conv=notrunc,sync oflag=direct 2>/dev/null; i=$((i+1)); done; sync",
            )
        )
        with lost_answer("change to the new volume") as lost:
            await driver.swap_volume(with_volumes(first, root, other, readonly), data, other)
        assert lost == [first.instance.uuid]
        await writing
        assert made.digest(other) == digest
        for number in range(40):
            at = (20000 + number) * 4096
            assert made.content(other, at, 10).startswith(f"mark-{number}".encode())
        await made.exporter.client.ask(m.StopServing(volume_id=data.volume_id))

        # It is detached under I/O; the next guest that gets it reads what was written.
        await shell(driver, first, "(while :; do dd if=/dev/vdb of=/dev/null bs=64k; done) >/dev/null 2>&1 & true")
        await driver.detach_volume(first.instance.uuid, other)
        await driver.detach_volume(first.instance.uuid, other)
        assert "vdb" not in await shell(driver, first, "ls /sys/block")
        plan = host.plan()
        second = await boot(driver, plan)
        for _ in range(2):
            await driver.attach_volume(with_volumes(plan, other), other)
        await shell(driver, second, "while [ ! -b /dev/vdb ]; do sleep 0.2; done")
        said = await shell(driver, second, "dd if=/dev/vdb bs=4096 skip=20007 count=1 2>/dev/null | head -c 6")
        assert said == "mark-7"

        # It boots from its volume again, with what the plan has then.
        await driver.reboot(with_volumes(first, root, readonly), "HARD")
        await console(driver, first.instance.uuid, READY, 2)
        for each in (first, second):
            await driver.destroy(each.instance.uuid)
    assert host.leftovers() == []


async def test_a_larger_volume_takes_the_place_of_another_one(host: Host, tmp_path: Path) -> None:
    async with storage(host, tmp_path) as (driver, made):
        small = await made.volume("/dev/vdb", 1 << 30, size_gb=1)
        large = await made.volume("/dev/vdb", 2 << 30, size_gb=2)
        plan = await boot(driver, with_volumes(host.plan(), small))
        uuid = plan.instance.uuid
        write = "printf {} | dd of=/dev/vdb bs=1048576 seek={} conv=notrunc,sync oflag=direct 2>/dev/null; echo $?"
        assert await shell(driver, plan, write.format("before", 1023)) == "0"
        for _ in range(2):  # the order may come twice
            await driver.swap_volume(with_volumes(plan, large), small, large)
        await made.exporter.client.ask(m.StopServing(volume_id=small.volume_id))
        assert await shell(driver, plan, "cat /sys/block/vdb/size") == str((2 << 30) // 512)
        assert await shell(driver, plan, write.format("behind", 1500)) == "0"
        assert made.content(large, 1023 * MIB, 6) == b"before" and made.content(large, 1500 * MIB, 6) == b"behind"
        await killed(await made.exporter.daemon(large.volume_id))  # its requests wait
        assert await shell(driver, plan, write.format("waited", 1600)) == "0"
        await driver.power_off(uuid, 0)
        await driver.power_on(plan)
        await listens(driver, plan)
        assert await shell(driver, plan, "cat /sys/block/vdb/size") == str((2 << 30) // 512)
        await driver.detach_volume(uuid, large)
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def secrets_of(driver: LibvirtDriver) -> list[str]:
    """The secrets that libvirt has."""
    found: list[str] = await driver._connection.read(lambda connection: connection.listSecrets())
    return found


async def test_an_encrypted_volume(host: Host, tmp_path: Path) -> None:
    """The guest sees it whole and in the clear; nobody else does, and libvirt keeps no key."""
    async with storage(host, tmp_path) as (driver, made):
        data = await made.encrypted("/dev/vdb")
        path, size = made.exporter.directory / data.volume_id, 64 * MIB
        header = path.stat().st_size - size
        plan = await boot(driver, host.plan())
        uuid = plan.instance.uuid
        lacking = msgspec.structs.replace(data, secret=None)
        with pytest.raises(Invalid, match="no key"):
            await driver.attach_volume(with_volumes(plan, lacking), lacking)
        for _ in range(2):
            await driver.attach_volume(with_volumes(plan, data), data)
        assert await secrets_of(driver) == []
        await shell(driver, plan, "while [ ! -b /dev/vdb ]; do sleep 0.2; done")
        assert await shell(driver, plan, "cat /sys/block/vdb/size") == str(size // 512)
        wrote = "yes in-the-clear | head -c 4194304 >/tmp/data; dd if=/tmp/data of=/dev/vdb bs=64k 2>/dev/null; sync"
        digest = await shell(driver, plan, f"{wrote}; md5sum /tmp/data | cut -c 1-32")
        assert b"in-the-clear" not in path.read_bytes()
        read = "dd if=/dev/vdb bs=64k count=64 2>/dev/null | md5sum | cut -c 1-32"

        # Its requests wait while the daemon is away, and a larger one is seen without a restart.
        await killed(await made.exporter.daemon(data.volume_id))
        assert await shell(driver, plan, f"echo 3 > /proc/sys/vm/drop_caches; {read}") == digest
        grown = 96 * MIB
        with path.open("r+b") as stream:
            stream.truncate(header + grown)
        await made.exporter.client.ask(m.Resize(volume_id=data.volume_id, size=header + grown))
        await driver.extend_volume(uuid, data, grown)
        assert await shell(driver, plan, "cat /sys/block/vdb/size") == str(grown // 512)
        assert await shell(driver, plan, f"echo 3 > /proc/sys/vm/drop_caches; {read}") == digest

        # It is there after a restart, after the guest was saved, and for the next guest that gets it.
        await driver.reboot(with_volumes(plan, data), "HARD")
        await console(driver, uuid, READY, 2)
        await listens(driver, plan)
        assert await shell(driver, plan, read) == digest
        await driver.suspend(uuid)
        await driver.resume(with_volumes(plan, data))
        await listens(driver, plan)
        assert await shell(driver, plan, f"echo 3 > /proc/sys/vm/drop_caches; {read}") == digest
        await driver.detach_volume(uuid, data)
        await driver.destroy(uuid)
        second = await boot(driver, host.plan(volumes=(data,)))
        assert await shell(driver, second, read) == digest
        assert await secrets_of(driver) == []
        with_secrets = 1  # VIR_DOMAIN_XML_SECURE
        shown = await driver._connection.read(
            lambda connection: connection.lookupByUUIDString(second.instance.uuid).XMLDesc(with_secrets)
        )
        assert data.secret is not None and data.secret not in shown
        await driver.destroy(second.instance.uuid)
    assert host.leftovers() == []


async def test_a_volume_that_cannot_be_attached(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest has no part of it, because another one gets it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("QEMU refused blockdev-reopen: no")

    async with storage(host, tmp_path) as (driver, made):
        data = await made.volume("/dev/vdb")
        plan = await boot(driver, host.plan())
        uuid = plan.instance.uuid
        with monkeypatch.context() as patch:
            patch.setattr(reconnecting, "wait_for", refuse)
            with pytest.raises(RuntimeError, match="refused"):
                await driver.attach_volume(with_volumes(plan, data), data)
        assert "vdb" not in await shell(driver, plan, "ls /sys/block")
        assert acl.users(made.exporter.sockets / data.volume_id / "nbd") == set()
        await driver.attach_volume(with_volumes(plan, data), data)
        await shell(driver, plan, "while [ ! -b /dev/vdb ]; do sleep 0.2; done")
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_a_volume_of_two_guests(host: Host, tmp_path: Path) -> None:
    async with storage(host, tmp_path) as (driver, made):
        shared = await made.volume("/dev/vdb", multiattach=True)
        alone = await made.volume("/dev/vdc")
        guests = [await boot(driver, host.plan(volumes=(shared,))) for _ in range(2)]
        await shell(driver, guests[0], "echo from-the-first | dd of=/dev/vdb bs=512 conv=sync oflag=direct 2>/dev/null")
        said = await shell(driver, guests[1], "dd if=/dev/vdb bs=512 count=1 iflag=direct 2>/dev/null | head -c 14")
        assert said == "from-the-first"
        # A guest that was not given a volume is not let in, whatever its definition says.
        users = [plan.instance.uuid for plan in guests]
        await driver.attach_volume(with_volumes(guests[0], shared, alone), alone)
        await driver.detach_volume(users[0], alone)
        stolen = msgspec.structs.replace(
            alone, connection=msgspec.structs.replace(alone.connection, socket_path=None, host="127.0.0.1", port=1)
        )
        with pytest.raises(Exception, match="could not attach the volume"):
            await driver.attach_volume(with_volumes(guests[1], shared, stolen), stolen)
        lun = msgspec.structs.replace(alone, device_type="lun")
        with pytest.raises(NotSupported, match="as lun"):
            await driver.attach_volume(with_volumes(guests[1], shared, lun), lun)
        for uuid in users:
            await driver.destroy(uuid)
    assert host.leftovers() == []
