"""What the process of a guest can reach on its host, tried with the guest's user id in the guest's own view of files.

It is what somebody can do who breaks out of QEMU into its process.
"""

import ctypes
import json
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
TREES = ("/var/lib/libvirt", "/run/libvirt", "/var/log/libvirt", "/var/cache/libvirt", "/etc/libvirt")


@dataclass(frozen=True)
class Process:
    """The QEMU of a guest, as it was when it was found."""

    pid: int
    status: dict[str, str]

    @property
    def uid(self) -> int:
        [uid] = set(self.status["Uid"].split())
        return int(uid)

    @property
    def gid(self) -> int:
        [gid] = set(self.status["Gid"].split())
        return int(gid)


def process_of(uuid: str) -> Process:
    """Return the process of a guest that runs."""
    [found] = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_qemu(entry, f"-uuid\0{uuid}".encode())
    ]
    lines = Path(f"/proc/{found}/status").read_text().splitlines()
    return Process(found, {name: value.strip() for name, _, value in (line.partition(":") for line in lines)})


def _is_qemu(entry: Path, words: bytes) -> bool:
    try:
        command = (entry / "cmdline").read_bytes()
    except OSError:
        return False
    return b"qemu-system" in command and words in command


def reach(guest: Process, *trees: str) -> dict[str, set[str]]:
    """Return what the guest's user can do with each file of libvirt's trees, or of others: read, write, list, connect.

    Files with which the user can do nothing are left out.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            found = _look(guest, trees or TREES)
            with os.fdopen(writing, "w") as stream:
                json.dump({path: sorted(rights) for path, rights in found.items()}, stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the guest's view could not be entered"
    return {path: set(rights) for path, rights in json.loads(text).items()}


def _look(guest: Process, trees: tuple[str, ...]) -> dict[str, set[str]]:
    uid, gid = guest.uid, guest.gid
    view = os.open(f"/proc/{guest.pid}/ns/mnt", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(view, _NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    # As root: all names, also those that the guest's user cannot list.
    paths = [os.path.join(folder, name) for tree in trees for folder, inner, files in os.walk(tree)
             for name in (".", *inner, *files)]  # fmt: skip
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    return {path: rights for path in map(os.path.normpath, paths) if (rights := _rights(path))}


def _rights(path: str) -> set[str]:
    found = set()
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        kind = 0
    if stat.S_ISSOCK(kind):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
                found.add("connect")
            except OSError:
                pass
        return found
    if stat.S_ISDIR(kind):
        try:
            os.listdir(path)
            found.add("list")
        except OSError:
            pass
        if os.access(path, os.W_OK):
            found.add("write")
        return found
    for flags, word in ((os.O_RDONLY, "read"), (os.O_WRONLY, "write")):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            found.add(word)
        except OSError:
            pass
    return found
