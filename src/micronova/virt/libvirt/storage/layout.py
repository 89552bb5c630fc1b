"""Where a host keeps its guests' files, and the paths by which the hypervisor sees them.

ROOT/instances/UUID/   one guest: its record and its disks
ROOT/base/             the image cache, shared by all guests of the host
ROOT/sockets/          sockets of the consoles of running guests
ROOT/console/          console logs, which libvirt's logger writes as root
"""

import os
import shutil
from pathlib import Path
from uuid import UUID

from micronova.objects.errors import Invalid


class Layout:
    """The files of one host."""

    def __init__(self, root: Path, *, seen_as: Path | None = None, gid: int | None = None) -> None:
        self.root = root
        self._seen_as = seen_as or root
        self._gid = gid  # of the hypervisor if it uses files through its group; otherwise libvirt makes it their owner
        self._root_is_ours = gid is None
        self.instances = root / "instances"
        self.base = root / "base"
        self.sockets = root / "sockets"
        self.console = root / "console"

    def share(self, gid: int) -> None:
        """From now on give files to the hypervisor's group; they keep their owner."""
        self._gid = gid

    @property
    def private(self) -> bool:
        """Whether only their owner and the hypervisor's group can use guests' files."""
        return self._gid is not None

    @property
    def folder_mode(self) -> int:
        """The mode of directories that the hypervisor must traverse."""
        return 0o2750 if self.private else 0o711

    @property
    def folders(self) -> tuple[Path, ...]:
        """All directories."""
        return self.instances, self.base, self.sockets, self.console

    def seen(self, path: Path) -> str:
        """Return the path by which the hypervisor sees a file."""
        return str(self._seen_as / path.relative_to(self.root))

    def prepare(self) -> None:
        """Create the directories, and remove guests that were partly created or partly removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self._root_is_ours and self.root.stat().st_uid == os.geteuid():
            self.grant(self.root, 0o710 if self.private else 0o711)
        # New files inherit the group of their directory: the hypervisor may read and write them, but not replace them.
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            self.grant(folder, self.folder_mode)
        if self._gid is not None:
            self.sockets.chmod(0o2770)  # QEMU creates the sockets
        for leftover in self.instances.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for place in (self.sockets, self.console):
            for file in place.iterdir():
                if not (self.instances / file.name.partition(".")[0]).exists():
                    file.unlink(missing_ok=True)

    def guest(self, uuid: str) -> Path:
        """Return a guest's directory."""
        try:
            return self.instances / str(UUID(uuid))
        except ValueError:
            raise Invalid(f"{uuid!r} is not the id of a server.") from None

    def socket(self, uuid: str, name: str) -> Path:
        """Return the path of a socket of a guest."""
        return self.sockets / f"{UUID(uuid)}.{name}"

    def console_log(self, uuid: str) -> Path:
        """Return the path of a guest's newest console log."""
        return self.console / f"{UUID(uuid)}.log"

    def grant(self, path: Path, mode: int = 0o660) -> None:
        """Give the hypervisor access to a file."""
        if self._gid is not None and path.stat().st_gid != self._gid:
            os.chown(path, -1, self._gid)
        path.chmod(mode)
