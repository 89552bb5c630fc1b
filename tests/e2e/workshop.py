"""A machine whose programs and disk a test can take away from a cloud, without touching the real ones.

Programs are found through a directory of links that is the cloud's whole PATH. Its guests' disks are on a small file
system of its own, in a mount namespace that a waiting process holds.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK = 2 << 30
"""Bytes of the file system for guests; it takes memory only as it fills."""
_SHIM = """#!/bin/sh
printf '%s\\n' "$*" >>'{log}'
exec '{real}' "$@"
"""


class Workshop:
    """Where the tools are, and the disk."""

    def __init__(self) -> None:
        self.room = Path(tempfile.mkdtemp(prefix="mn-shop-"))
        self.room.chmod(0o755)  # the cloud is not root
        self.tools = self.room / "bin"
        self.directory = self.room / "c"
        self._log = self.room / "qemu-img.log"
        self._disk = self.directory / "libvirt"
        self._fill_tools()
        self._disk.mkdir(parents=True)
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c",
             f"mount -t tmpfs -o size={DISK},mode=0711 disk '{self._disk}' && echo ready && exec sleep infinity"],
            stdout=subprocess.PIPE, start_new_session=True,  # Ctrl-C is for us; it is needed until the cloud is gone
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
        self._give_shim()

    def _give_shim(self) -> None:
        real = shutil.which("qemu-img")
        assert real is not None
        shim = self.tools / "qemu-img"
        shim.unlink(missing_ok=True)
        shim.write_text(_SHIM.format(log=self._log, real=real))
        shim.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": str(self.tools)}

    @property
    def inside(self) -> list[str]:
        """The command before a command that is to see the disk."""
        # With its root, too: entering a mount namespace alone leads out of a chroot that we may be in.
        return ["nsenter", f"--target={self._holder.pid}", "--mount", "--root", "--"]

    @property
    def disk(self) -> Path:
        """The directory of the guests, as it is seen from here."""
        return Path(f"/proc/{self._holder.pid}/root") / self._disk.relative_to("/")

    def calls(self) -> list[str]:
        """Return the arguments of every call of qemu-img so far."""
        return self._log.read_text().splitlines()

    @contextmanager
    def without(self, program: str) -> Iterator[None]:
        """Take a program away for a while."""
        place, hidden = self.tools / program, self.room / program
        place.rename(hidden)
        try:
            yield
        finally:
            hidden.rename(place)

    @contextmanager
    def full_disk(self, left: int) -> Iterator[None]:
        """Fill the disk but for so many bytes."""
        filler = self.disk / "filler"
        numbers = os.statvfs(filler.parent)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, numbers.f_bavail * numbers.f_frsize - left)
        try:
            yield
        finally:
            filler.unlink()

    def close(self) -> None:
        """Take everything away."""
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        shutil.rmtree(self.room)
