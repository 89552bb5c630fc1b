"""What a guest was before a resize: it is kept as a whole, and a revert that was interrupted continues."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.block_device import BlockDevice, resized
from micronova.objects.clock import SystemClock
from micronova.objects.errors import NotSupported, Unavailable
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage import sandbox, tools
from micronova.virt.libvirt.storage.disks import DiskMaker, plan_disks
from micronova.virt.libvirt.storage.image_cache import ImageCache
from micronova.virt.libvirt.storage.layout import Layout, base_link_name
from micronova.virt.libvirt.storage.previous import PreviousGuests
from micronova.virt.libvirt.storage.records import DiskRecord, GuestRecord, GuestRecords
from micronova.virt.libvirt.storage.tools import GIB
from tests.unit.virt.libvirt.world import UUID, flavor, guest_record, plan

TOOLS = ("qemu-img", "qemu-io", "mkswap", "mkfs.ext4")
MISSING = sandbox.obstacle() or next((f"{name} is missing" for name in TOOLS if shutil.which(name) is None), None)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SMALL = flavor(disk=1)
LARGE = flavor(disk=2, swap=8, ephemeral=1)
ROOT = BlockDevice(uuid="root", boot_index=0)
BASE_LINK = base_link_name("disk")


@pytest.fixture
def files() -> Iterator[ThreadPool]:
    pool = ThreadPool("test-files", 2)
    yield pool
    pool.close()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "root")
    made.prepare()
    return made


@pytest.fixture
def previous(layout: Layout, files: ThreadPool) -> PreviousGuests:
    return PreviousGuests(layout, GuestRecords(layout), files)


@pytest.fixture
def disks(layout: Layout, files: ThreadPool) -> DiskMaker:
    return DiskMaker(layout, ImageCache(layout, files, SystemClock()), files)


@pytest.fixture
def record(layout: Layout) -> GuestRecord:
    """A guest with an overlay of 1 GiB over an image of 1 MiB, whose first bytes are its own."""
    disk = DiskRecord(file="disk", format="qcow2", role="root", backing="base", boot_index=0)
    made = guest_record(disks=(disk,), complete=True, epoch=3)
    GuestRecords(layout).create(made)
    folder = layout.guest(UUID)
    (folder / BASE_LINK).write_bytes(bytes(1 << 20))
    _qemu_img(folder, "create", "-q", "-f", "qcow2", "-F", "raw", "-b", BASE_LINK, "disk", "1G")
    _write(folder, "old")
    return made


def _qemu_img(folder: Path, *command: str) -> str:
    return subprocess.run(["qemu-img", *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def _write(folder: Path, text: str) -> None:
    """Write the first letter to the beginning of the disk."""
    command = ["qemu-io", "-f", "qcow2", "-c", f"write -P {ord(text[0])} 0 512", "disk"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def _content(folder: Path) -> str:
    _qemu_img(folder, "convert", "-f", "qcow2", "-O", "raw", "disk", "all.raw")
    with (folder / "all.raw").open("rb") as stream:
        found = stream.read(1).decode()
    (folder / "all.raw").unlink()
    return found


def _gigabytes(folder: Path) -> int:
    told = json.loads(_qemu_img(folder, "info", "-f", "qcow2", "--output", "json", "disk"))
    return int(told["virtual-size"]) // GIB


def _larger(record: GuestRecord) -> tuple[GuestPlan, tuple[DiskRecord, ...]]:
    wanted = plan(flavor=LARGE, devices=resized((ROOT,), UUID, SMALL, LARGE))
    return wanted, (*record.disks, *plan_disks(wanted, LibvirtSettings())[1:])


async def test_disks_grow_and_a_revert_gives_them_back(
    layout: Layout, previous: PreviousGuests, disks: DiskMaker, record: GuestRecord
) -> None:
    folder, records = layout.guest(UUID), GuestRecords(layout)
    await previous.keep(record)
    wanted, grown = _larger(record)
    for _ in range(2):
        await disks.grow(wanted, grown)
    assert _gigabytes(folder) == 2 and _content(folder) == "o"
    assert (folder / "disk.swap").stat().st_size == 8 << 20
    assert (folder / "disk.eph0").stat().st_size == GIB
    resized_record = msgspec.structs.replace(record, epoch=5, vcpus=2, disks=grown)
    records.save(resized_record)
    _write(folder, "new")
    restored = await previous.restore(resized_record, 7)
    assert restored == msgspec.structs.replace(record, epoch=7) == records.load(UUID)
    assert _gigabytes(folder) == 1 and _content(folder) == "o"
    assert sorted(path.name for path in folder.iterdir()) == ["disk", BASE_LINK, "guest.json"]
    assert await previous.restore(restored, 9) == restored, "there is nothing to return to"


async def test_what_was_kept_goes_with_the_confirmation(
    layout: Layout, previous: PreviousGuests, disks: DiskMaker, record: GuestRecord
) -> None:
    folder = layout.guest(UUID)
    wanted, grown = _larger(record)
    await previous.keep(record)
    await disks.grow(wanted, grown)
    larger = msgspec.structs.replace(record, epoch=5, disks=grown)
    for _ in range(2):
        await previous.forget(larger)
    names = ["disk", BASE_LINK, "disk.eph0", "disk.swap", "guest.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


async def test_a_copy_is_made_once_for_a_guest(layout: Layout, previous: PreviousGuests, record: GuestRecord) -> None:
    folder = layout.guest(UUID)
    await previous.keep(record)
    _write(folder, "new")
    await previous.keep(record)  # the order came again, after the disk has grown
    await previous.restore(record, 5)
    assert _content(folder) == "o"


async def test_a_copy_of_an_earlier_resize_is_replaced(
    layout: Layout, previous: PreviousGuests, record: GuestRecord
) -> None:
    folder = layout.guest(UUID)
    await previous.keep(record)
    _write(folder, "new")
    later = msgspec.structs.replace(record, epoch=9)
    await previous.keep(later)
    _write(folder, "last")
    await previous.restore(later, 11)
    assert _content(folder) == "n"


async def test_a_revert_that_was_interrupted_continues(
    layout: Layout, previous: PreviousGuests, record: GuestRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, records = layout.guest(UUID), GuestRecords(layout)
    await previous.keep(record)
    larger = msgspec.structs.replace(record, epoch=5, vcpus=2)
    records.save(larger)
    _write(folder, "new")

    def fail(_store: GuestRecords, _record: GuestRecord) -> None:
        raise OSError("the power is gone")

    with monkeypatch.context() as broken:
        broken.setattr(GuestRecords, "save", fail)
        with pytest.raises(OSError, match="power"):
            await previous.restore(larger, 7)
    assert records.load(UUID) == larger
    assert (await previous.restore(larger, 7)).vcpus == record.vcpus
    assert _content(folder) == "o"


async def test_copies_survive_a_loss_of_power(
    layout: Layout, previous: PreviousGuests, record: GuestRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are synced before they have their name: after it, the guest changes its disks."""
    folder = layout.guest(UUID)
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(folder).as_posix())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    await previous.keep(record)
    assert synced[0] == ".previous.new/disk"
    assert synced[-2:] == [".previous.new", "."]


async def test_a_copy_that_fails_takes_no_room(
    layout: Layout, previous: PreviousGuests, record: GuestRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_source: Path, target: Path, _size: int) -> None:
        target.write_bytes(b"a part of it")
        raise Unavailable("The host's disk is full.")

    with monkeypatch.context() as broken:
        broken.setattr(tools, "copy", full)
        with pytest.raises(Unavailable):
            await previous.keep(record)
    names = sorted(["disk", BASE_LINK, "guest.json"])
    assert sorted(path.name for path in layout.guest(UUID).iterdir()) == names
    (layout.guest(UUID) / ".previous.new").mkdir()  # the agent was killed
    await previous.restore(record, 7)
    assert sorted(path.name for path in layout.guest(UUID).iterdir()) == names


@pytest.mark.parametrize("file", ["disk.swap", "disk.eph0"])
async def test_a_disk_that_was_not_formatted_is_made_again(
    layout: Layout, previous: PreviousGuests, disks: DiskMaker, record: GuestRecord,
    monkeypatch: pytest.MonkeyPatch, file: str,
) -> None:  # fmt: skip
    """The agent died while it made the disk of a larger flavor."""
    folder = layout.guest(UUID)
    wanted, grown = _larger(record)
    make = tools.make_file_system

    async def dies(path: Path, kind: str, label: str, size: int) -> None:
        if file in path.name:
            raise OSError("the agent is gone")
        await make(path, kind, label, size)

    with monkeypatch.context() as broken:
        broken.setattr(tools, "make_file_system", dies)
        with pytest.raises(OSError, match="gone"):
            await disks.grow(wanted, grown)
    await disks.grow(wanted, grown)
    with (folder / file).open("rb") as stream:
        begin = stream.read(8192)
    assert begin[4086:4096] == b"SWAPSPACE2" if file == "disk.swap" else begin[1080:1082] == b"\x53\xef"
    await previous.restore(record, 7)
    await previous.forget(record)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["disk", BASE_LINK, "guest.json"])


async def test_nothing_is_made_smaller(
    layout: Layout, previous: PreviousGuests, disks: DiskMaker, record: GuestRecord
) -> None:
    folder = layout.guest(UUID)
    wanted, grown = _larger(record)
    await disks.grow(wanted, grown)
    smaller = plan(flavor=SMALL, devices=(ROOT,))
    with pytest.raises(DriverFailed):
        await disks.grow(smaller, record.disks)
    assert _gigabytes(folder) == 2
    raw = DiskRecord(file="disk.eph0", format="raw", role="blank", boot_index=0)
    (folder / "disk.eph0").unlink()
    (folder / "disk.eph0").touch()
    with (folder / "disk.eph0").open("r+b") as stream:
        stream.truncate(2 * GIB)
    with pytest.raises(NotSupported):
        await disks.grow(smaller, (raw,))
