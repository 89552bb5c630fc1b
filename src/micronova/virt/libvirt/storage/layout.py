"""Where a host keeps its guests' files, and the paths by which the hypervisor sees them.

ROOT/instances/UUID/   one guest: its record and its disks, and hard links to the cached images below them
ROOT/base/             the image cache, shared by all guests of the host
ROOT/sockets/UUID/     sockets of the consoles of a guest, which QEMU creates
ROOT/console/          console logs, which libvirt's logger writes as root

All of it belongs to the agent. Each guest runs as a user of its own, who gets rights by access control lists: to
traverse the guest's directory, to use its disks, to create sockets. The image cache is closed to all guests: a cached
image can be read through the links in the directories of the guests that use it, and nowhere else.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from uuid import UUID

from micronova.objects.errors import Invalid
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.storage import acl

_BASE: Final = ".base"
_PASSABLE, _CLOSED = 0o711, 0o700


class Layout:
    """The files of one host."""

    def __init__(self, root: Path, *, seen_as: Path | None = None) -> None:
        self.root = root
        self._seen_as = seen_as or root
        self.instances = root / "instances"
        self.base = root / "base"
        self.sockets = root / "sockets"
        self.console = root / "console"

    @property
    def folders(self) -> dict[Path, int]:
        """All directories, with their modes."""
        return {self.instances: _PASSABLE, self.base: _CLOSED, self.sockets: _PASSABLE, self.console: _CLOSED}

    def seen(self, path: Path) -> str:
        """Return the path by which the hypervisor sees a file."""
        return str(self._seen_as / path.relative_to(self.root))

    def prepare(self) -> None:
        """Create the directories, and remove guests that were partly created or partly removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        own = self.root.stat().st_uid == os.geteuid()  # else root has made it, and the directories in it
        if own:
            self.root.chmod(_PASSABLE)
        for folder, mode in self.folders.items():
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        if own:
            sync_directory(self.root)
        for leftover in self.instances.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in (self.sockets, self.console):
            for file in folder.iterdir():
                if not (self.instances / file.name.partition(".")[0]).exists():
                    remove(file)

    def check_sharing(self) -> None:
        """Raise LibvirtMissing if files cannot be given to single guests here."""
        probe = self.instances / ".probe"
        link = self.base / ".probe"
        try:
            probe.touch(mode=0o600)
            acl.share(probe, 0o600, {os.geteuid() + 1: acl.READ})
            link.unlink(missing_ok=True)
            os.link(probe, link)
        except OSError as error:
            raise LibvirtMissing(
                f"The file system of {self.root} cannot give single guests access to their files ({error.strerror}): "
                "it needs POSIX access control lists and hard links, as ext4, XFS and Btrfs have. Choose another one."
            ) from None
        finally:
            for file in (probe, link):
                file.unlink(missing_ok=True)

    def part_of_disk(self, percent: int) -> int:
        """Return a part, in bytes, of the file system that has the cached images."""
        numbers = os.statvfs(self.base)
        return numbers.f_blocks * numbers.f_frsize * percent // 100

    def guest(self, uuid: str) -> Path:
        """Return a guest's directory."""
        try:
            return self.instances / str(UUID(uuid))
        except ValueError:
            raise Invalid(f"{uuid!r} is not the id of a server.") from None

    def socket(self, uuid: str, name: str) -> Path:
        """Return the path of a socket of a guest."""
        return self.sockets / str(UUID(uuid)) / name

    def console_log(self, uuid: str) -> Path:
        """Return the path of a guest's newest console log."""
        return self.console / f"{UUID(uuid)}.log"

    def link_base(self, uuid: str, name: str, file: str = "disk") -> None:
        """Put a cached image, on which a disk in this file is based, into a guest's directory, unless it is there."""
        target = self.guest(uuid) / base_link_name(file)
        if not target.exists():
            os.link(self.base / name, target)
            sync_directory(target.parent)
        # Everybody may read the file, but only this guest can reach it here, and no guest can enter the cache. An
        # access control list would have no room for all guests that use an image.
        target.chmod(0o644)

    def admit(self, uuid: str, user: int, files: Mapping[str, bool]) -> None:
        """Let a guest's user use its files, each for writing or not, and create its sockets; nobody else's user may.

        The files stay the agent's: a guest can neither replace them nor share them with others.
        """
        folder = self.guest(uuid)
        for name, writable in files.items():
            acl.share(folder / name, 0o600, {user: acl.READ | (acl.WRITE if writable else 0)})
        acl.share(folder, 0o700, {user: acl.SEARCH})
        sockets = self.sockets / folder.name
        remove(sockets)
        sockets.mkdir(mode=_CLOSED)
        every = acl.READ | acl.WRITE | acl.SEARCH
        acl.share_contents(sockets, 0o700, {os.geteuid(): every})
        acl.share(sockets, 0o700, {user: every})

    def seal(self, uuid: str) -> None:
        """Take the right to create sockets away again, once QEMU has started and before the guest runs.

        So a guest that leaves its QEMU cannot put a link or a directory in the place of a socket.
        """
        sockets = self.sockets / self.guest(uuid).name
        if sockets.exists():
            acl.share(sockets, 0o700, {})


def unfinished(name: str) -> str:
    """Return the name of a file or a directory while it is being made."""
    return f".{name}.new"


def base_link_name(file: str) -> str:
    """Return the name, in the directory of a guest, of the cached image that a disk in this file is based on."""
    return file + _BASE


def is_base_link_name(name: str) -> bool:
    """Return whether a file in the directory of a guest is a cached image."""
    return name.endswith(_BASE)


def sync_directory(folder: Path) -> None:
    """Make the names of files in a directory survive a loss of power. Blocks."""
    _sync(folder, os.O_DIRECTORY)


def sync_file(file: Path) -> None:
    """Make the content of a file survive a loss of power. Blocks."""
    _sync(file, os.O_NOFOLLOW)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a directory with its content, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
