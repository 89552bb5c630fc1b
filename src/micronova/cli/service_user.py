"""The service user: a cloud that root starts gives root's rights up, so that nothing that answers HTTP runs as root.

The agents of real guests have a user of their own (cli/agent.py), which becomes itself in the same way.

The service user owns DIR and reads our code. Either may be below a directory that is closed to it (a clone below
/root, a directory that mktemp made). The permissions of such a parent are not changed. Instead the process gets its own
mount namespace, in which the closed parent contains only what is needed.

The person who typed sudo gets one right: to read DIR/clouds.yaml.
"""

import contextlib
import ctypes
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from micronova.cli import root_records
from micronova.cli.state import StateDirectory
from micronova.conf.settings import SettingsError
from micronova.objects.errors import MicronovaError
from micronova.virt.libvirt.storage import acl

CACHE = Path("/var/cache/micronova")
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True)
class ServiceUser:
    """The user that the cloud runs as."""

    name: str
    uid: int
    gid: int


def service_user(name: str) -> ServiceUser | None:
    """Return the user that root becomes, and create it if it is missing; None if this process is not root."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        entry = _create(name)
    return ServiceUser(name, entry.pw_uid, entry.pw_gid)


def _create(name: str) -> pwd.struct_passwd:
    """Create the user, unless another process has created it meanwhile: useradd itself would give it another id."""
    with root_records.locked():
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
        command = ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin"]
        try:
            subprocess.run(
                [*command, "--home-dir", "/nonexistent", "--", name], check=True, capture_output=True, text=True
            )
        except FileNotFoundError:
            raise SettingsError(
                f"There is no user {name}, and no useradd to create it: name another in default.user."
            ) from None
        except subprocess.CalledProcessError as error:
            raise SettingsError(f"The user {name} cannot be created: {error.stderr.strip()}.") from None
        return pwd.getpwnam(name)


def claim(place: StateDirectory, user: ServiceUser) -> None:
    """Create DIR with its keys, or refuse a directory of another user.

    Root records which cloud it has made, with every driver.
    """
    place.create()
    if place.path.stat().st_uid not in (0, user.uid):
        raise MicronovaError(
            f"{place.path} belongs to another user than {user.name}: choose another --dir, or set default.user."
        )
    if place.has_keys():
        place.keys()  # refuses a file that is damaged
    else:
        root_records.make_keys(place)


def hand_over(place: StateDirectory, user: ServiceUser) -> None:
    """Give DIR to the user, and close it to others; HostProcesses.open lets guests of an existing libvirt in again."""
    claim(place, user)
    top = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fchmod(top, 0o700)
        if os.fstat(top).st_uid == 0:
            _give(top, user, leave="libvirt")  # it has owners of its own
    finally:
        os.close(top)
    CACHE.mkdir(exist_ok=True)
    if CACHE.stat().st_uid == 0:
        os.chown(CACHE, user.uid, user.gid)


def _give(folder: int, user: ServiceUser, leave: str = "") -> None:
    """Give a directory of root's to the user with all that is in it, except one entry and other users' directories.

    Whoever owns a directory can place links in it. So only directories of root's are walked through, by descriptors,
    and each changes its owner after its content.
    """
    for name in os.listdir(folder):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if name == leave:
            continue
        if not stat.S_ISDIR(found.st_mode):
            os.chown(name, user.uid, user.gid, dir_fd=folder, follow_symlinks=False)
        elif found.st_uid == 0:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                _give(inner, user)
            finally:
                os.close(inner)
    os.fchown(folder, user.uid, user.gid)


def take_over(folder: int, before: int, user: ServiceUser) -> None:
    """Give a directory that belonged to another user, `before`, to a user, with all that was that user's in it.

    The other user may have put links there, and may still do so. So the directory is root's before it is read, links
    are removed, and files of others keep their owner: they may be other names of files elsewhere. Sockets of guests'
    consoles stay the guests', and are open to the user instead of the other one.
    """
    os.fchown(folder, 0, -1)
    for name in os.listdir(folder):
        entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            found = os.fstat(entry)
            if stat.S_ISLNK(found.st_mode):
                os.unlink(name, dir_fd=folder)
            elif stat.S_ISDIR(found.st_mode) and found.st_uid in (0, before):
                inner = os.open(f"/proc/self/fd/{entry}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    take_over(inner, before, user)
                finally:
                    os.close(inner)
            elif found.st_uid == before:
                os.chown(f"/proc/self/fd/{entry}", user.uid, -1)
            elif stat.S_ISSOCK(found.st_mode):
                acl.rename(Path(f"/proc/self/fd/{entry}"), before, user.uid)
        finally:
            os.close(entry)
    acl.rename(Path(f"/proc/self/fd/{folder}"), before, user.uid)
    os.fchown(folder, user.uid, -1)


def become(user: ServiceUser, home: Path, groups: Iterable[int] = (), *, cover: Path | None = None) -> None:
    """Become the user for good, with a way to its code and its directory. New files are readable by the user only.

    `cover` is a directory of another user above `home`, which must not change what this process finds there: in the
    process's view it contains nothing but `home`.
    """
    if user.uid == os.geteuid():
        os.umask(0o077)
        return
    os.umask(0o022)  # the user passes through the directories that are made here
    code = {Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)}
    paths = {path.resolve() for path in code if path.is_absolute() and path.exists()}
    own = home.parent.resolve() / home.name  # a link in the place of the directory is not followed
    _open_way(sorted({*paths, own}), user, own, None if cover is None else cover.resolve())
    os.umask(0o077)
    os.setgroups(sorted({*os.getgrouplist(user.name, user.gid), *groups}))
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    os.environ |= {
        "HOME": str(home),
        "USER": user.name,
        "LOGNAME": user.name,
        "XDG_CACHE_HOME": str(CACHE.parent),
    }
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    os.chdir(home)
    unreadable = next((path for path in sys.path if Path(path).is_dir() and not os.access(path, os.R_OK)), None)
    if unreadable is not None:
        raise MicronovaError(
            f"The user {user.name} cannot read {unreadable}: chmod -R go+rX it, or name another user in default.user."
        )


def become_owner(place: StateDirectory) -> None:
    """If this is root, become the owner of DIR for good: in a directory of another user, root follows no links."""
    if os.geteuid() != 0:
        return
    try:
        found = place.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return  # root makes it, or there is none
    if found.st_uid == 0:
        return
    try:
        name = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        name = str(found.st_uid)
    become(ServiceUser(name, found.st_uid, found.st_gid), place.path)


def sudo_user() -> int | None:
    """Return the id of the person who typed sudo; None if this process is not root's or was not started by sudo."""
    number = os.environ.get("SUDO_UID", "")
    return int(number) if os.geteuid() == 0 and number.isdecimal() and int(number) > 0 else None


def share_clouds(place: StateDirectory, person: int) -> bool:
    """Let one person read DIR/clouds.yaml, and nothing else in DIR; return whether the file system can do that.

    It is done by access control lists, as the owner of DIR: no group and no other user gets a right.
    """
    _close_entries(place)
    try:
        for path, right in ((place.path, acl.SEARCH), (place.path / "clouds.yaml", acl.READ)):
            acl.share(path, path.lstat().st_mode, {person: right})  # group and others keep what they have
    except OSError:  # a file system without access control lists
        return False
    return True


def _close_entries(place: StateDirectory) -> None:
    """Take the rights of group and others away from everything in DIR that has no owner of its own."""
    for entry in place.path.iterdir():
        found = entry.lstat()
        if found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and entry.name != "libvirt":
            entry.chmod(stat.S_IMODE(found.st_mode) & 0o700)


def keep_private(place: StateDirectory, *, passable: bool) -> None:
    """Close DIR and what is in it to others, and have new files readable by their owner only.

    It is for a cloud that root did not start. If others may pass through DIR already, `passable` leaves that so.
    """
    os.umask(0o077)
    if place.path.exists() and place.path.stat().st_uid == os.geteuid():
        _close_entries(place)
        place.path.chmod(stat.S_IMODE(place.path.stat().st_mode) & 0o711 if passable else 0o700)


def let_through(place: StateDirectory) -> None:
    """Let guests pass through DIR to their own files in it, and read nothing else there; for DIR's owner.

    Each runs as a user of its own, so everybody may pass. What is in DIR is closed to them.
    """
    os.umask(0o077)
    _close_entries(place)
    place.path.chmod(0o711)


def end_with(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; send it now if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _open_way(paths: list[Path], user: ServiceUser, own: Path, cover: Path | None) -> None:
    """Make these directories reachable: cover closed parents, in this process's view only, by empty directories."""
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        barrier = next((each for each in reversed(path.parents) if each == cover or not _passable(each, user)), None)
        if barrier is not None:
            closed.setdefault(barrier, []).append(path)
    if not closed:
        return
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.unshare(_NEW_MOUNTS), "make a mount namespace")
    # What is mounted elsewhere later is seen here too, but not the other way round.
    _check(library.mount(b"none", b"/", None, _RECURSIVE | _SLAVE, None), "separate its mounts")
    for barrier, wanted in closed.items():
        handles = {path: _open_folder(path, user, trusted=path != own) for path in wanted if path.is_dir()}
        _check(library.mount(b"tmpfs", os.fsencode(barrier), b"tmpfs", 0, b"mode=0755,size=1m"), f"hide {barrier}")
        for path in sorted(handles):
            if any(other in path.parents for other in handles):
                continue  # comes with the one above it
            path.mkdir(parents=True, exist_ok=True)
            source = f"/proc/self/fd/{handles[path]}".encode()
            _check(library.mount(source, os.fsencode(path), None, _BIND | _RECURSIVE, None), f"show {path}")
        for handle in handles.values():
            os.close(handle)


def _open_folder(path: Path, user: ServiceUser, *, trusted: bool) -> int:
    """Open a directory; unless its parent is `trusted`, one that is not a link, and belongs to root or the user."""
    found = os.open(path, os.O_PATH | os.O_DIRECTORY | (0 if trusted else os.O_NOFOLLOW))
    if not trusted and os.fstat(found).st_uid not in (0, user.uid):
        os.close(found)
        raise MicronovaError(f"{path} belongs neither to root nor to {user.name}: move it away.")
    return found


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
