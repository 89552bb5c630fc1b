"""Copies of disks: they leave room on the host's disk, together, and no guest frozen."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from micronova.objects import power_state
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Unavailable
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.guests import snapshots as snapshots_module
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.snapshots import COPY, SPARE, Snapshots
from micronova.virt.libvirt.storage import acl, tools
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import DiskRecord, GuestRecord, GuestRecords
from tests.unit.virt.libvirt.world import IMAGE, OTHER_UUID, UUID, guest_record, plan

MIB = 1024**2


async def test_two_copies_at_once_do_not_take_the_same_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, files = Layout(tmp_path), ThreadPool("files", 2)
    layout.prepare()
    known = {uuid: _guest_with_disk(layout, uuid) for uuid in (UUID, OTHER_UUID)}
    snapshots = Snapshots(cast(GuestAccess, _GuestsOff(known)), GuestRecords(layout), layout, files, SystemClock())
    free = SPARE + 3 * MIB
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    begun = asyncio.Event()

    async def flatten(*_: Any) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(tools, "flatten", flatten)
    copying = asyncio.create_task(snapshots.take(plan()))
    await asyncio.wait_for(begun.wait(), 5)
    with pytest.raises(Unavailable, match="no room"):
        await asyncio.wait_for(snapshots.take(plan(uuid=OTHER_UUID)), 5)
    copying.cancel()
    await asyncio.gather(copying, return_exceptions=True)
    begun.clear()
    copying = asyncio.create_task(snapshots.take(plan(uuid=OTHER_UUID)))
    await asyncio.wait_for(begun.wait(), 5)
    copying.cancel()
    await asyncio.gather(copying, return_exceptions=True)
    files.close()


async def test_a_guest_is_thawed_when_libvirt_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nobody asks for the copy again, because a later request has overtaken the first one."""
    monkeypatch.setattr(snapshots_module, "CLEAR_PAUSE", 0.01)
    layout, files = Layout(tmp_path), ThreadPool("files", 2)
    layout.prepare()
    record = msgspec.structs.replace(_guest_with_disk(layout, UUID), uid=os.getuid())
    guests = _FrozenGuest(record)
    snapshots = Snapshots(cast(GuestAccess, guests), GuestRecords(layout), layout, files, SystemClock())
    copy = layout.guest(UUID) / COPY

    async def create_qcow2(path: Path, _: int) -> None:
        path.touch()

    monkeypatch.setattr(tools, "create_qcow2", create_qcow2)
    monkeypatch.setattr(acl, "share", lambda *_: None)
    with_agent = msgspec.structs.replace(IMAGE, properties={"hw_qemu_guest_agent": "yes"})
    with pytest.raises(Unavailable):
        await snapshots.take(plan(image=with_agent))
    assert guests.is_frozen() and copy.exists()
    guests.away = False
    async with asyncio.timeout(60):
        while guests.is_frozen() or copy.exists():
            await asyncio.sleep(0.01)
    await snapshots.close()
    files.close()


class _FrozenGuest:
    """A guest whose libvirtd goes away while its file systems are frozen."""

    def __init__(self, record: GuestRecord) -> None:
        self._record = record
        self._frozen = self.away = False

    def is_frozen(self) -> bool:
        return self._frozen

    async def require(self, uuid: str) -> tuple[GuestRecord, int]:
        return self._record, power_state.RUNNING

    async def read(self, uuid: str, function: Any, what: str) -> Any:
        return "vda", MIB

    async def change(self, uuid: str, function: Any, what: str, **_: Any) -> None:
        if self.away:
            raise Unavailable("The connection to libvirt was lost.")
        if "freeze" in what:
            self._frozen = True
        elif "thaw" in what:
            self._frozen = False
        elif what == "copy the guest's disk":
            self.away = True
            raise Unavailable("The connection to libvirt was lost.")

    change_if_there = change


class _GuestsOff:
    """Guests that are off, of which libvirt knows nothing."""

    def __init__(self, records: dict[str, GuestRecord]) -> None:
        self._records = records

    async def require(self, uuid: str) -> tuple[GuestRecord, int]:
        return self._records[uuid], power_state.SHUTDOWN


def _guest_with_disk(layout: Layout, uuid: str) -> GuestRecord:
    folder = layout.guest(uuid)
    folder.mkdir()
    (folder / "disk").write_bytes(os.urandom(2 * MIB))
    return guest_record(uuid, disks=(DiskRecord(file="disk", format="raw", role="root", boot_index=0),))
