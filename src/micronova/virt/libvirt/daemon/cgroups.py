"""The control groups of a private libvirtd: one group of the machine, inside which libvirtd has a tree of its own.

libvirtd runs in a control group namespace, in which this group is the root of all hierarchies. There it makes a group
per guest. The machine's other groups are neither seen nor changed. Where the machine has no control groups, or does not
let root make one, guests have none.
"""

import contextlib
import hashlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONTROLLERS: Final = ("cpu", "cpuacct", "memory", "devices")
"""What libvirt sets limits by. CPUs are pinned by affinity, and disks are limited by QEMU."""
NEEDED: Final = frozenset({"cpu", "memory"})
REMOVE_TIMEOUT: Final = 5.0
_ROOT: Final = "/sys/fs/cgroup"

# Join control groups: the files to write to, "--", and the command line to continue with.
_JOIN: Final = """
set -eu
while [ "$1" != -- ]; do
    echo $$ >"$1"
    shift
done
shift
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted hierarchy of control groups."""

    kind: str  # cgroup | cgroup2
    controllers: tuple[str, ...]
    path: Path


def hierarchies(proc: Path = Path("/proc")) -> list[Hierarchy]:
    """Return the machine's hierarchies that guests can be limited by; none if memory or CPU cannot be."""
    known = {line.split()[0] for line in _lines(proc / "cgroups")}
    found: list[Hierarchy] = []
    for line in _lines(proc / "self" / "mounts"):
        _, path, kind, options, *_ = line.split()
        mounted = Path(path)
        if kind == "cgroup":
            # All controllers of a hierarchy are mounted together.
            found.append(Hierarchy(kind, tuple(each for each in options.split(",") if each in known), mounted))
        elif kind == "cgroup2":
            given = " ".join(_lines(mounted / "cgroup.subtree_control"))
            found.append(Hierarchy(kind, tuple(given.split()), mounted))
    for kind in ("cgroup2", "cgroup"):
        usable = [each for each in found if each.kind == kind and set(each.controllers) & set(CONTROLLERS)]
        if {name for each in usable for name in each.controllers} >= NEEDED:
            return usable
    return []


class DaemonGroup:
    """The control group of the private libvirtd of a directory. Methods block; all but `exists` are for root."""

    def __init__(self, directory: Path, proc: Path = Path("/proc")) -> None:
        self._name = f"micronova-{hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:12]}"
        self._proc = proc

    def _groups(self) -> list[tuple[Hierarchy, Path]]:
        return [(each, each.path / self._name) for each in hierarchies(self._proc)]

    def exists(self) -> bool:
        """Whether the machine has the group."""
        groups = self._groups()
        return bool(groups) and all(path.is_dir() for _, path in groups)

    def make(self) -> None:
        """Make the group, if the machine has control groups and lets root make and join one."""
        try:
            for _, path in self._groups():
                path.mkdir(exist_ok=True)
            subprocess.run([*self.join(), "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):  # in a container, for example
            self.remove()

    def join(self) -> list[str]:
        """Return the start of a command line that joins the group, in a namespace in which it is the root."""
        members = [str(path / "cgroup.procs") for _, path in self._groups()]
        return ["sh", "-c", _JOIN, "join", *members, "--", "unshare", "--cgroup", "--"]

    @property
    def mounts(self) -> list[tuple[str, str, str]]:
        """What shows the group as the root of its hierarchies: type, options and place of each mount."""
        found = [each for each, _ in self._groups()]
        if any(each.kind == "cgroup2" for each in found):
            return [("cgroup2", "rw", _ROOT)]
        names = [",".join(each.controllers) for each in found]
        return [("tmpfs", "mode=0755,size=1m", _ROOT), *(("cgroup", name, f"{_ROOT}/{name}") for name in names)]

    def remove(self) -> None:
        """Remove the group with all groups in it, once the kernel has noticed that their processes have ended."""
        deadline = time.monotonic() + REMOVE_TIMEOUT
        for _, top in self._groups():
            while top.is_dir() and time.monotonic() < deadline:
                for folder, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
                if top.is_dir():
                    time.sleep(0.02)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
