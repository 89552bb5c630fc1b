"""A cloud's view of the machine, in which programs can be missing and the disk can be full; the real ones stay.

The cloud's PATH is one directory of links. Its guests' disks are on a small file system in a mount namespace, which a
waiting process keeps alive.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK = 2 << 30
"""Size of the file system for guests in bytes; it uses memory only for what is stored."""
# The program by which others are started: qemu-img itself is confined to its files and could not write a log.
_SHIM = """#!/bin/sh
case "$*" in
*/qemu-img*) printf '%s\\n' "$*" >>'{log}' ;;
esac
exec '{real}' "$@"
"""


class FaultMachine:
    """The programs and the disk that a cloud sees."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mn-fault-"))
        self.folder.chmod(0o755)  # the cloud is not root
        self.tools = self.folder / "bin"
        self.directory = self.folder / "c"
        self._log = self.folder / "qemu-img.log"
        self._disk = self.directory / "libvirt"
        self._fill_tools()
        self._disk.mkdir(parents=True)
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c",
             f"mount -t tmpfs -o size={DISK},mode=0711 disk '{self._disk}' && echo ready && exec sleep infinity"],
            stdout=subprocess.PIPE, start_new_session=True,  # not for Ctrl-C: the cloud needs it until it has ended
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"

    def _fill_tools(self) -> None:
        self.tools.mkdir()
        for folder in os.environ["PATH"].split(os.pathsep):
            for program in Path(folder).glob("*") if Path(folder).is_dir() else ():
                link = self.tools / program.name
                if not link.exists() and os.access(program, os.X_OK):
                    link.symlink_to(program)
        self._log.touch()
        self._log.chmod(0o666)
        self._log_calls()

    def _log_calls(self) -> None:
        real = shutil.which("setpriv")
        assert real is not None
        shim = self.tools / "setpriv"
        shim.unlink(missing_ok=True)
        shim.write_text(_SHIM.format(log=self._log, real=real))
        shim.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": str(self.tools)}

    @property
    def inside(self) -> list[str]:
        """The prefix for commands that must see the disk."""
        # With its root: entering only the mount namespace would leave a chroot that we may be in.
        return ["nsenter", f"--target={self._holder.pid}", "--mount", "--root", "--"]

    @property
    def disk(self) -> Path:
        """The directory of the guests, as a path for this process."""
        return Path(f"/proc/{self._holder.pid}/root") / self._disk.relative_to("/")

    def calls(self) -> list[str]:
        """Return the arguments of every call of qemu-img so far."""
        return self._log.read_text().splitlines()

    @contextmanager
    def without(self, program: str) -> Iterator[None]:
        """Hide a program while the context lasts."""
        place, hidden = self.tools / program, self.folder / program
        place.rename(hidden)
        try:
            yield
        finally:
            hidden.rename(place)

    @contextmanager
    def full_disk(self, left: int) -> Iterator[None]:
        """Fill the disk, except for `left` bytes, while the context lasts."""
        filler = self.disk / "filler"
        numbers = os.statvfs(filler.parent)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, numbers.f_bavail * numbers.f_frsize - left)
        try:
            yield
        finally:
            filler.unlink()

    def close(self) -> None:
        """Remove everything."""
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        shutil.rmtree(self.folder)
