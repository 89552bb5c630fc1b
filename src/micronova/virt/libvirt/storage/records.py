"""The record of each guest: what the driver knows of it besides what libvirt knows.

The record is the first thing that is made of a guest and the last that is removed. So whatever a killed agent has left
is found again, with its epoch, even if libvirt was never told of the guest.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from micronova.virt.libvirt.storage import acl
from micronova.virt.libvirt.storage.layout import Layout, remove, sync_directory, unfinished

log = logging.getLogger(__name__)

RECORD = "guest.json"


class DiskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A disk of a guest."""

    file: str  # in the guest's directory
    format: str  # raw | qcow2
    role: str  # root | ephemeral | swap | blank | config | rescue; `volume` is never stored
    device: str = "disk"  # disk | cdrom | floppy
    bus: str | None = None  # if the user chose one
    backing: str | None = None  # the file name of the cached image below it
    serial: str = ""
    boot_index: int = -1


class BootRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What boots a guest instead of firmware: files in the guest's directory."""

    kernel: str
    ramdisk: str = ""  # empty: there is none


class MdevRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A mediated device that a guest has."""

    uuid: str
    parent: str  # the device of the host, as libvirt names it
    mdev_type: str
    made: bool = True  # for this guest, so that it is removed with it; others were there before


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The host CPUs, NUMA nodes and devices that were claimed for a guest; it keeps them over restarts."""

    vcpus: dict[int, int] = {}  # vCPU -> host CPU
    cells: dict[int, int] = {}  # NUMA nodes of the guest -> of the host
    emulator: tuple[int, ...] = ()
    page_kib: int | None = None  # size of its memory pages, if one was asked for
    devices: tuple[str, ...] = ()  # addresses of the host's PCI devices that it has
    mdevs: tuple[MdevRecord, ...] = ()


class RescueRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A guest that boots from a rescue image."""

    epoch: int  # of the order
    disks: tuple[DiskRecord, ...]  # all that it has meanwhile, also of its own
    complete: bool = False  # it has been started with them
    boot: BootRecord | None = None  # None: firmware boots it


class GuestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A guest."""

    uuid: str
    cloud: str
    host: str
    node: str
    epoch: int
    name: str = ""
    vcpus: int = 0
    memory_mb: int = 0
    local_gb: int = 0
    claimed: dict[str, int] | None = None  # of its node, by resource class; None: an earlier version made it
    complete: bool = False  # it has run, so its owner may have data on its disks
    disks: tuple[DiskRecord, ...] = ()
    pins: PinRecord | None = None  # None until they are reserved
    kept_pins: PinRecord | None = None  # what it had before it was resized, until that is confirmed or reverted
    # The user that QEMU runs as; None: an earlier version made the guest, and it has not been started since.
    uid: int | None = None
    resumed: bool = False  # its last start restored saved memory instead of booting
    rescue: RescueRecord | None = None
    boot: BootRecord | None = None  # None: firmware boots it

    @property
    def started_by(self) -> BootRecord | None:
        """The kernel that the guest is started with; None if firmware boots it."""
        return self.boot if self.rescue is None else self.rescue.boot

    @property
    def pinned_vcpus(self) -> int:
        """How many of its vCPUs have a host CPU for themselves."""
        return 0 if self.pins is None else len(self.pins.vcpus)

    @property
    def pcpus(self) -> int:
        """How many host CPUs it has for itself."""
        return 0 if self.pins is None else len(self.pins.vcpus) + len(self.pins.emulator)

    @property
    def attached(self) -> tuple[DiskRecord, ...]:
        """The disks that the guest is started with."""
        return self.disks if self.rescue is None else self.rescue.disks

    @property
    def backing(self) -> frozenset[str]:
        """The names of the cached images that its disks are based on."""
        return frozenset(disk.backing for disk in (*self.disks, *self.attached) if disk.backing)


class GuestRecords:
    """The records of a host's guests. Methods block."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create(self, record: GuestRecord) -> None:
        """Create a guest's directory with its record, atomically; raise FileExistsError if there is one."""
        folder = self._layout.guest(record.uuid)
        if folder.exists():
            raise FileExistsError(folder)
        fresh = folder.with_name(unfinished(folder.name))
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        write_record(fresh / RECORD, record)
        fresh.rename(folder)
        sync_directory(folder.parent)

    def save(self, record: GuestRecord) -> None:
        """Replace a record."""
        write_record(self._layout.guest(record.uuid) / RECORD, record)

    def load(self, uuid: str) -> GuestRecord | None:
        """Return a guest's record, or None."""
        return read_record(self._layout.guest(uuid) / RECORD)

    def load_removed(self, uuid: str) -> GuestRecord | None:
        """Return the record of a guest whose removal was begun and has failed, or None."""
        return read_record(_gone(self._layout.guest(uuid)) / RECORD)

    def __iter__(self) -> Iterator[GuestRecord]:
        """Yield all records, also of other clouds and hosts that share the directory."""
        for folder in self._layout.instances.iterdir():
            if not folder.name.startswith("."):
                record = read_record(folder / RECORD)
                if record is not None and record.uuid == folder.name:
                    yield record

    def all(self) -> list[GuestRecord]:
        """Return all records."""
        return list(self)

    def backing_files(self) -> set[str]:
        """Return the names of the cached images that disks are based on."""
        return {name for record in self for name in record.backing}

    def taken_ids(self) -> set[int]:
        """Return the user ids of all guests that have files, also of those that are being removed."""
        found: set[int] = set()
        for folder in self._layout.instances.iterdir():
            record = read_record(folder / RECORD)
            if record is not None and record.uid is not None:
                found.add(record.uid)
            found |= acl.users(folder)  # the record may be damaged
        return found

    def renew(self, record: GuestRecord) -> None:
        """Replace a record, then remove the disks, sockets and console logs of the guest that had the one before."""
        self.save(record)
        folder = self._layout.guest(record.uuid)
        self._remove_outside(folder.name)
        for file in folder.iterdir():
            if file.name != RECORD:
                remove(file)
        sync_directory(folder)

    def _remove_outside(self, name: str) -> None:
        """Remove what a guest has outside its directory."""
        for folder in (self._layout.sockets, self._layout.console):
            for file in (folder / name, *folder.glob(f"{name}.*")):
                remove(file)

    def remove(self, uuid: str) -> None:
        """Remove a guest's directory, sockets and console logs.

        The record goes last: until then its user id is taken.
        """
        folder = self._layout.guest(uuid)
        self._remove_outside(folder.name)
        gone = _gone(folder)
        # A rename is atomic: a guest is never seen without its record.
        if folder.exists() and not gone.exists():
            folder.rename(gone)
            sync_directory(gone.parent)
        if gone.exists():
            for file in gone.iterdir():
                if file.name != RECORD:
                    remove(file)
            shutil.rmtree(gone)
        if folder.exists():
            self.remove(uuid)


def write_record(file: Path, record: GuestRecord) -> None:
    """Write a record so that a loss of power leaves the old one or the new one. Blocks."""
    fresh = file.with_name(unfinished(file.name))
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(record))
        stream.flush()
        os.fsync(descriptor)
    fresh.replace(file)
    sync_directory(file.parent)


def _gone(folder: Path) -> Path:
    """Return the name of a guest's directory while it is removed."""
    return folder.with_name(f".{folder.name}.gone")


def read_record(file: Path) -> GuestRecord | None:
    """Return the record in a file; None if there is none, or if it is damaged. Blocks."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=GuestRecord)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        log.error("the record %s is damaged and its guest is ignored; repair or remove the file: %s", file, error)
        return None
