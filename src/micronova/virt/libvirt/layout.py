"""Where a host keeps its guests' files, and under which names the hypervisor sees them.

ROOT/instances/UUID/   one guest: its record and its disks
ROOT/base/             images as they were fetched, shared by all guests of the host
ROOT/sockets/          consoles of running guests
ROOT/console/          what guests wrote to their consoles; libvirt's logger writes there, as root

The record is the first thing made of a guest and the last that goes: so whatever an agent that was killed has left is
found again, with its epoch, also when libvirt never heard of it.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import msgspec

from micronova.objects.errors import Invalid

log = logging.getLogger(__name__)

RECORD = "guest.json"


class DiskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A disk of a guest."""

    file: str  # in the guest's directory
    format: str  # raw | qcow2
    role: str  # root | ephemeral | swap | blank | config
    device: str = "disk"  # disk | cdrom
    bus: str | None = None  # as the user asked
    backing: str | None = None  # the name of the cached image that it stands on
    serial: str = ""
    boot_index: int = -1


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a guest was placed on the host's CPUs and memory; it keeps that over restarts."""

    vcpus: dict[int, int] = {}  # of the guest -> of the host
    cells: dict[int, int] = {}  # NUMA nodes of the guest -> of the host
    emulator: tuple[int, ...] = ()


class GuestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a guest besides what libvirt knows."""

    uuid: str
    cloud: str
    host: str
    node: str
    epoch: int
    name: str = ""
    vcpus: int = 0
    memory_mb: int = 0
    local_gb: int = 0
    complete: bool = False  # it has run: from then on its owner may have data on it
    disks: tuple[DiskRecord, ...] = ()
    pins: PinRecord | None = None  # not placed yet
    resumed: bool = False  # it was last started from its saved memory: it has not booted in this run


class Layout:
    """The files of one host."""

    def __init__(self, root: Path, *, seen_as: Path | None = None, gid: int | None = None) -> None:
        self.root = root
        self._seen_as = seen_as or root
        self._gid = gid  # of the hypervisor, if it may use files through its group; else libvirt gives them to it
        self._root_is_ours = gid is None
        self.instances = root / "instances"
        self.base = root / "base"
        self.sockets = root / "sockets"
        self.console = root / "console"

    def share(self, gid: int) -> None:
        """Let the hypervisor use files through its group from now on; they keep their owner."""
        self._gid = gid

    @property
    def private(self) -> bool:
        """Whether nobody but the owner and the hypervisor can get at guests' files."""
        return self._gid is not None

    @property
    def folder_mode(self) -> int:
        """The mode of directories that the hypervisor goes through."""
        return 0o2750 if self.private else 0o711

    @property
    def folders(self) -> tuple[Path, ...]:
        """All directories."""
        return self.instances, self.base, self.sockets, self.console

    def seen(self, path: Path) -> str:
        """Give a file's name as the hypervisor sees it."""
        return str(self._seen_as / path.relative_to(self.root))

    def prepare(self) -> None:
        """Make the directories, and remove what was half made or half removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self._root_is_ours and self.root.stat().st_uid == os.geteuid():
            self.grant(self.root, 0o710 if self.private else 0o711)
        # New files inherit the group of their directory: the hypervisor may read and write, and not replace, them.
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            self.grant(folder, self.folder_mode)
        if self._gid is not None:
            self.sockets.chmod(0o2770)  # QEMU makes those itself
        for leftover in self.instances.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for place in (self.sockets, self.console):
            for file in place.iterdir():
                if not (self.instances / file.name.partition(".")[0]).exists():
                    file.unlink(missing_ok=True)

    def guest(self, uuid: str) -> Path:
        """Give a guest's directory."""
        try:
            return self.instances / str(UUID(uuid))
        except ValueError:
            raise Invalid(f"{uuid!r} is not the id of a server.") from None

    def socket(self, uuid: str, name: str) -> Path:
        """Give a socket of a guest."""
        return self.sockets / f"{UUID(uuid)}.{name}"

    def console_log(self, uuid: str) -> Path:
        """Give the newest console log of a guest."""
        return self.console / f"{UUID(uuid)}.log"

    def grant(self, path: Path, mode: int = 0o660) -> None:
        """Let the hypervisor use a file that was made for it."""
        self._give(path)
        path.chmod(mode)

    def _give(self, path: Path) -> None:
        if self._gid is not None and path.stat().st_gid != self._gid:
            os.chown(path, -1, self._gid)


class GuestStore:
    """The records of a host's guests. Methods block."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create(self, record: GuestRecord) -> None:
        """Make a guest's directory with its record, at once; FileExistsError if there is one."""
        folder = self._layout.guest(record.uuid)
        if folder.exists():
            raise FileExistsError(folder)
        fresh = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        self._layout.grant(fresh, self._layout.folder_mode)
        _write(fresh / RECORD, record)
        fresh.rename(folder)

    def save(self, record: GuestRecord) -> None:
        """Replace a record."""
        _write(self._layout.guest(record.uuid) / RECORD, record)

    def load(self, uuid: str) -> GuestRecord | None:
        """Find a guest's record."""
        return _read(self._layout.guest(uuid) / RECORD)

    def __iter__(self) -> Iterator[GuestRecord]:
        """List all records, also of other clouds and hosts if they share the directory."""
        for folder in self._layout.instances.iterdir():
            if not folder.name.startswith("."):
                record = _read(folder / RECORD)
                if record is not None and record.uuid == folder.name:
                    yield record

    def all(self) -> list[GuestRecord]:
        """List all records at once."""
        return list(self)

    def remove(self, uuid: str) -> None:
        """Remove a guest's directory with all that is in it."""
        folder = self._layout.guest(uuid)
        gone = folder.with_name(f".{folder.name}.gone")
        try:
            # At once, so that nobody ever sees a guest without its record.
            if not gone.exists():
                folder.rename(gone)
        except FileNotFoundError:
            pass
        if gone.exists():
            shutil.rmtree(gone)
        if folder.exists():
            self.remove(uuid)
        for place in (self._layout.sockets, self._layout.console):
            for file in place.glob(f"{folder.name}.*"):
                file.unlink(missing_ok=True)


def _write(file: Path, record: GuestRecord) -> None:
    fresh = file.with_name(f".{file.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(record))
        stream.flush()
        os.fsync(descriptor)
    fresh.replace(file)


def _read(file: Path) -> GuestRecord | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=GuestRecord)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        log.error("%s is damaged, its guest is left alone: %s", file, error)
        return None
