"""A libvirt that runs already, beside us: what has to be known of it, and this cloud's guests there.

It runs QEMU as a user of its own. Guests' files are shared with that user through its group, as with a private
libvirtd, and keep their owner: libvirt is told not to give them away. So whatever stands above them has to let that
user pass.

Everything here blocks, and is for processes without an event loop of libvirt's: root's, and those that just look.
"""

import getpass
import grp
import logging
import os
import pwd
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from micronova.objects.errors import Unavailable
from micronova.virt.libvirt import domains
from micronova.virt.libvirt.console import forget_pool, pool_of
from micronova.virt.libvirt.layout import Layout
from micronova.virt.libvirt.library import LibvirtMissing, has_code, is_error, load
from micronova.virt.libvirt.private import QemuUser
from micronova.virt.libvirt.xmltree import parse

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE: Final = 60.0
"""Seconds after which a libvirt that does not answer counts as hung; its first look at QEMU takes some."""
SOCKETS: Final = tuple(Path("/run/libvirt", name) for name in ("libvirt-sock", "virtqemud-sock"))
PRIVATE_INSTEAD: Final = "leave libvirt.connection_uri empty for a private one"


class RunningLibvirt:
    """The libvirt at an address, and the guests that one cloud has there."""

    def __init__(self, uri: str, cloud_id: str = "", guests: Path | None = None) -> None:
        """`guests` is where the cloud has its guests' files."""
        self.uri = uri
        self._cloud = cloud_id
        self._guests = guests

    def user(self) -> QemuUser:
        """Say whom it runs guests as, or raise in one line if it cannot be used."""
        with self._open() as connection:
            found = qemu_user(connection.getCapabilities())
        if found is None or not found.gid:
            raise LibvirtMissing(
                f"The libvirt at {self.uri} runs guests as {'root' if found else 'nobody that it names'}: set user and "
                f"group in its qemu.conf (such as libvirt-qemu), or {PRIVATE_INSTEAD}."
            )
        return found

    def groups(self, user: QemuUser) -> list[int]:
        """List the groups that whoever uses it needs: its guests' group, and that of its socket."""
        found = {user.gid}
        place = socket_of(self.uri)
        if place is not None:
            about = place.stat()
            if about.st_mode & stat.S_IWGRP and about.st_gid:
                found.add(about.st_gid)
        return sorted(found)

    def has_guests(self) -> bool:
        """Say whether a guest of the cloud runs."""
        with self._open() as connection:
            return any(True for _ in self._ours(connection))

    def stop(self) -> None:
        """Switch the cloud's guests off, as switching the machine off would; disks and definitions stay.

        Nor does anything else stay there that an agent was perhaps killed before it could take it away.
        """
        with self._open() as connection:
            for uuid in self._ours(connection):
                domain = domains.find_ours(connection, uuid, self._cloud)
                try:
                    if domain is not None:
                        domains.switch_off(domain, forget=False)
                except Exception as error:  # the others are to go nevertheless
                    if not is_error(error):
                        raise
                    log.error("guest %s could not be switched off: %s", uuid, error)
            if self._guests is not None:
                forget_pool(connection, pool_of(self._guests))

    def _ours(self, connection: Any) -> Iterator[str]:
        for seen in domains.look_at_all(connection):
            if seen.active and seen.owner is not None and seen.owner.cloud == self._cloud:
                yield seen.uuid

    @contextmanager
    def _open(self) -> Iterator[Any]:
        library = load()
        library.registerErrorHandler(lambda _context, _error: None, None)  # else it prints what it also raises
        try:
            connection = _within(PATIENCE, lambda: library.open(self.uri))
        except Exception as error:
            if not is_error(error):
                raise
            raise LibvirtMissing(why_not(self.uri, error)) from error
        try:
            yield connection
        except Exception as error:
            if not is_error(error):
                raise
            raise Unavailable(f"The libvirt at {self.uri} failed: {error}") from error
        finally:
            connection.close()


def why_not(uri: str, error: Exception) -> str:
    """Say in one line why there is no connection, and what to do."""
    words = str(error).removesuffix(".")
    if has_code(error, "VIR_ERR_AUTH_FAILED", "VIR_ERR_AUTH_UNAVAILABLE", "VIR_ERR_AUTH_CANCELLED") or (
        "Permission denied" in words
    ):
        name = getpass.getuser()
        return (
            f"The user {name} may not talk to libvirt at {uri} ({words}): "
            f"usermod --append --groups {_socket_group(uri)} {name}"
        )
    return f"No libvirt answers at {uri} ({words}): start it (systemctl start libvirtd), or {PRIVATE_INSTEAD}."


def obstacle(uri: str, folder: Path) -> str | None:
    """Say why guests below a directory cannot be run by the libvirt at an address; None when they can."""
    address = urlsplit(uri)
    if address.hostname:
        return (
            f"libvirt.connection_uri names the machine {address.hostname}: guests run where their agent does. "
            f"Use qemu:///system there, or {PRIVATE_INSTEAD}."
        )
    if not address.scheme.startswith("qemu"):
        return None
    if address.path == "/session":
        return f"A libvirt of one user has no network for guests: use qemu:///system, or {PRIVATE_INSTEAD}."
    try:
        user = RunningLibvirt(uri).user()
    except LibvirtMissing as error:
        return str(error)
    closed = barrier(folder, user)
    return None if closed is None else _unreachable(user, closed)


def share_files(layout: Layout, capabilities: str) -> None:
    """Have guests' files in the group of those who run them, if we may; refuse a place that these cannot reach."""
    user = qemu_user(capabilities)
    if user is None:
        return
    if user.gid and (os.geteuid() == 0 or user.gid in (os.getegid(), *os.getgroups())):
        layout.share(user.gid)
    closed = barrier(layout.root.parent, user)
    if closed is not None:
        raise LibvirtMissing(_unreachable(user, closed))


def _unreachable(user: QemuUser, closed: Path) -> str:
    return (
        f"This libvirt runs guests as {user.name}, who cannot pass {closed}: choose another --dir (such as "
        "/var/lib/micronova, as root), or set libvirt.instances_path to a directory that this user reaches."
    )


def barrier(folder: Path, user: QemuUser) -> Path | None:
    """Find the first directory on the way to one that QEMU's user may not pass, or that is not there."""
    groups = {user.gid, *_groups(user)}
    way = [*reversed(folder.absolute().parents), folder.absolute()]
    return next((each for each in way if not (each.exists() and passable(each, user.uid, groups))), None)


def passable(folder: Path, uid: int, groups: Collection[int]) -> bool:
    """Say whether somebody may pass a directory."""
    about = folder.stat()
    if about.st_uid == uid:
        return bool(about.st_mode & stat.S_IXUSR)
    if about.st_gid in groups:
        return bool(about.st_mode & stat.S_IXGRP)
    return bool(about.st_mode & stat.S_IXOTH)


def qemu_user(capabilities: str) -> QemuUser | None:
    """Read from a libvirt's capabilities whom it runs guests as; None if it does not say."""
    for model in parse(capabilities).iterfind("./host/secmodel"):
        if model.findtext("model") != "dac":
            continue
        label = model.findtext("./baselabel[@type='qemu']") or model.findtext("./baselabel") or ""
        uid, _, gid = label.replace("+", "").partition(":")
        if uid.isdigit() and gid.isdigit():
            return QemuUser(name=_user_name(int(uid)), group=_group_name(int(gid)), uid=int(uid), gid=int(gid))
    return None


def socket_of(uri: str) -> Path | None:
    """Find the socket of a local libvirt."""
    named = parse_qs(urlsplit(uri).query).get("socket")
    candidates = [Path(named[0])] if named else SOCKETS
    return next((each for each in candidates if each.is_socket()), None)


def _socket_group(uri: str) -> str:
    place = socket_of(uri)
    gid = 0 if place is None else place.stat().st_gid
    return _group_name(gid) if gid else "libvirt"


def _groups(user: QemuUser) -> list[int]:
    try:
        return os.getgrouplist(user.name, user.gid)
    except KeyError:
        return []


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call something that may hang for ever, and wait no longer than that."""
    outcome: list[T | Exception] = []

    def call() -> None:
        try:
            outcome.append(function())
        except Exception as error:  # it is raised to the caller
            outcome.append(error)

    worker = threading.Thread(target=call, daemon=True)
    worker.start()
    worker.join(seconds)
    if not outcome:
        raise LibvirtMissing(f"Libvirt does not answer within {seconds:g} s.")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
