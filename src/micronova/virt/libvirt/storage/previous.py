"""What a guest was before it was resized: copies of its record and its disks in its directory, kept for a revert.

The copies get their name by a rename when they are complete and a loss of power cannot damage them. They are moved back
one by one, and the record last, so that a revert that was interrupted continues where it stopped.
"""

import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage import tools
from micronova.virt.libvirt.storage.layout import Layout, remove, sync_directory, sync_file, unfinished
from micronova.virt.libvirt.storage.records import RECORD, GuestRecord, GuestRecords, read_record, write_record

FOLDER: Final = "previous"
_FRESH: Final = unfinished(FOLDER)
"""The directory of copies that are not complete."""


class PreviousGuests:
    """The copies of the guests of a host."""

    def __init__(self, layout: Layout, records: GuestRecords, files: ThreadPool) -> None:
        self._layout = layout
        self._records = records
        self._files = files

    async def keep(self, record: GuestRecord) -> None:
        """Copy a guest that is off, unless that was done for this record before."""
        folder = self._layout.guest(record.uuid) / FOLDER
        known = await self._files.run(read_record, folder / RECORD)
        if known is not None and known.epoch == record.epoch:
            return
        fresh = folder.parent / _FRESH
        await self._files.run(_make_empty, fresh)
        try:
            for disk in record.disks:
                if disk.role != "config":
                    source = folder.parent / disk.file
                    size = (await self._files.run(os.stat, source)).st_size
                    await tools.copy(source, fresh / disk.file, size)
            await self._files.run(_complete, fresh, folder, record)
        except BaseException:  # the disk may be full: others need the room
            await self._files.run(remove, fresh)
            raise

    async def restore(self, record: GuestRecord, epoch: int) -> GuestRecord:
        """Make a guest, which is off, what it was, at this epoch; return its record. Without copies it stays so."""
        return await self._files.run(self._restore, record, epoch)

    async def forget(self, record: GuestRecord) -> None:
        """Remove the copies, and disks that the guest has no more."""
        await self._files.run(self._forget, record)

    def _restore(self, record: GuestRecord, epoch: int) -> GuestRecord:
        folder = self._layout.guest(record.uuid) / FOLDER
        before = read_record(folder / RECORD)
        if before is None:
            remove(folder.parent / _FRESH)
            return record
        for copy in folder.iterdir():
            if copy.name != RECORD:
                copy.replace(folder.parent / copy.name)
        sync_directory(folder.parent)
        # The user of the guest stays: a guest of an older version may have got one since.
        restored = msgspec.structs.replace(before, epoch=epoch, uid=record.uid)
        self._records.save(restored)
        self._forget(restored)
        return restored

    def _forget(self, record: GuestRecord) -> None:
        folder = self._layout.guest(record.uuid)
        gone = folder / f".{FOLDER}.gone"
        remove(gone)
        if (folder / FOLDER).exists():
            (folder / FOLDER).rename(gone)
            sync_directory(folder)
            shutil.rmtree(gone)
        remove(folder / _FRESH)
        wanted = {disk.file for disk in record.disks}
        for disk in (*folder.glob("disk.eph*"), *folder.glob(unfinished("disk.*"))):
            if disk.name not in wanted:
                remove(disk)
        if "disk.swap" not in wanted:
            remove(folder / "disk.swap")


def _make_empty(folder: Path) -> None:
    remove(folder)
    folder.mkdir(mode=0o700)


def _complete(fresh: Path, folder: Path, record: GuestRecord) -> None:
    """Give the copies their name; those of an earlier resize go."""
    for copy in fresh.iterdir():
        sync_file(copy)
    write_record(fresh / RECORD, record)
    remove(folder)
    fresh.rename(folder)
    sync_directory(folder.parent)
