"""Ceasing to be root: nothing that answers HTTP runs as root.

`micronova up`, started by root, works as a system user. That user owns DIR and reads our code; the places of both may
be closed to it (a clone below /root, a directory that mktemp made). Their parents are not opened for that. Instead
the process gets a mount namespace of its own, in which a closed parent holds nothing but what is needed.
"""

import ctypes
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from micronova.cli.state import StateDirectory
from micronova.conf.settings import SettingsError
from micronova.objects.errors import MicronovaError

CACHE = Path("/var/cache/micronova")
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True)
class ServiceUser:
    """Whom the cloud works as."""

    name: str
    uid: int
    gid: int


def service_user(name: str) -> ServiceUser | None:
    """Find the user that root is to become, and make it when it is missing; None: this process is not root."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        command = ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin"]
        try:
            subprocess.run(
                [*command, "--home-dir", "/nonexistent", "--", name], check=True, capture_output=True, text=True
            )
        except FileNotFoundError:
            raise SettingsError(
                f"There is no user {name}, and no useradd to make it: name another in default.user."
            ) from None
        except subprocess.CalledProcessError as error:
            raise SettingsError(f"The user {name} cannot be made: {error.stderr.strip()}.") from None
        entry = pwd.getpwnam(name)
    return ServiceUser(name, entry.pw_uid, entry.pw_gid)


def claim(place: StateDirectory, user: ServiceUser) -> None:
    """Make DIR with its keys, or refuse one that is somebody else's."""
    place.create()
    if place.path.stat().st_uid not in (0, user.uid):
        raise MicronovaError(
            f"{place.path} belongs to another user than {user.name}: choose another --dir, or set default.user."
        )
    place.keys()


def hand_over(place: StateDirectory, user: ServiceUser) -> None:
    """Give DIR to the user. Only what root owns is touched, and nothing while anybody else could interfere."""
    claim(place, user)
    if place.path.stat().st_uid == 0:
        place.path.chmod(0o700)
        for folder, directories, files in os.walk(place.path):
            if Path(folder) == place.path and "libvirt" in directories:
                directories.remove("libvirt")  # has owners of its own
            for name in (*directories, *files):
                os.chown(Path(folder, name), user.uid, user.gid, follow_symlinks=False)
        os.chown(place.path, user.uid, user.gid)
    CACHE.mkdir(exist_ok=True)
    if CACHE.stat().st_uid == 0:
        os.chown(CACHE, user.uid, user.gid)


def become(user: ServiceUser, place: StateDirectory, groups: Iterable[int] = ()) -> None:
    """Be that user from now on, and let it reach its code and DIR."""
    if user.uid == os.geteuid():
        return
    paths = {Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path), place.path}
    _open_way(sorted({path.resolve() for path in paths if path.is_absolute() and path.exists()}), user)
    os.setgroups(sorted({*os.getgrouplist(user.name, user.gid), *groups}))
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    os.environ |= {
        "HOME": str(place.path),
        "USER": user.name,
        "LOGNAME": user.name,
        "XDG_CACHE_HOME": str(CACHE.parent),
    }
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    os.chdir(place.path)
    unreadable = next((path for path in sys.path if Path(path).is_dir() and not os.access(path, os.R_OK)), None)
    if unreadable is not None:
        raise MicronovaError(
            f"The user {user.name} cannot read {unreadable}: chmod -R go+rX it, or name another user in default.user."
        )


def let_through(place: StateDirectory, gid: int) -> None:
    """Let a group pass through DIR to what is theirs in it, and see nothing else there; for DIR's owner."""
    os.umask(0o077)
    for entry in place.path.iterdir():
        found = entry.lstat()
        if found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and entry.name != "libvirt":
            entry.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    os.chown(place.path, -1, gid)
    place.path.chmod(0o710)


def end_with(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; end at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _open_way(paths: list[Path], user: ServiceUser) -> None:
    """Make these directories reachable, by emptying (in our view only) the closed ones above them."""
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        barrier = next((each for each in reversed(path.parents) if not _passable(each, user)), None)
        if barrier is not None:
            closed.setdefault(barrier, []).append(path)
    if not closed:
        return
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.unshare(_NEW_MOUNTS), "make a mount namespace")
    # What is mounted elsewhere later is seen here too, but not the other way round.
    _check(library.mount(b"none", b"/", None, _RECURSIVE | _SLAVE, None), "separate its mounts")
    for barrier, wanted in closed.items():
        handles = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in wanted if path.is_dir()}
        _check(library.mount(b"tmpfs", os.fsencode(barrier), b"tmpfs", 0, b"mode=0755,size=1m"), f"hide {barrier}")
        for path in sorted(handles):
            if any(other in path.parents for other in handles):
                continue  # comes with the one above it
            path.mkdir(parents=True, exist_ok=True)
            source = f"/proc/self/fd/{handles[path]}".encode()
            _check(library.mount(source, os.fsencode(path), None, _BIND | _RECURSIVE, None), f"show {path}")
        for handle in handles.values():
            os.close(handle)


def _passable(directory: Path, user: ServiceUser) -> bool:
    found = directory.stat()
    if found.st_uid == user.uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == user.gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)


def _check(result: int, what: str) -> None:
    if result != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MicronovaError(f"Cannot {what}: {reason}. Set default.user to root to do without.")
