"""The user that libvirt runs guests as, and which directories that user can reach."""

import grp
import os
import pwd
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.client.xmltree import parse

QEMU_USERS: Final = ("libvirt-qemu", "qemu")
"""The users that distributions' packages make for guests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuUser:
    """The user and the group that guests run as."""

    name: str
    group: str
    uid: int
    gid: int


def find_qemu_user(name: str = "", group: str = "") -> QemuUser:
    """Return the named user, or the one that the packages made for guests; raise LibvirtMissing if there is none."""
    for candidate in [name] if name else QEMU_USERS:
        try:
            entry = pwd.getpwnam(candidate)
        except KeyError:
            continue
        found, gid = _group(group, candidate, entry.pw_gid)
        return QemuUser(name=candidate, group=found, uid=entry.pw_uid, gid=gid)
    raise LibvirtMissing(
        f"There is no user {name or ' or '.join(QEMU_USERS)} to run guests as: install libvirt-daemon-system."
    )


def qemu_user_of(capabilities: str) -> QemuUser | None:
    """Return the user that a libvirt runs guests as, from its capabilities; None if they do not say."""
    for model in parse(capabilities).iterfind("./host/secmodel"):
        if model.findtext("model") != "dac":
            continue
        label = model.findtext("./baselabel[@type='qemu']") or model.findtext("./baselabel") or ""
        uid, _, gid = label.replace("+", "").partition(":")
        if uid.isdigit() and gid.isdigit():
            return QemuUser(name=_user_name(int(uid)), group=group_name(int(gid)), uid=int(uid), gid=int(gid))
    return None


def barrier(folder: Path, user: QemuUser) -> Path | None:
    """Return the first directory on the path to one that QEMU's user may not traverse, or that is missing."""
    groups = {user.gid, *_groups(user)}
    path = [*reversed(folder.absolute().parents), folder.absolute()]
    return next((each for each in path if not (each.exists() and _traversable(each, user.uid, groups))), None)


def _traversable(folder: Path, uid: int, groups: Collection[int]) -> bool:
    """Return whether a user may traverse a directory."""
    status = folder.stat()
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid in groups:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _group(wanted: str, user: str, primary: int) -> tuple[str, int]:
    try:
        return wanted or user, grp.getgrnam(wanted or user).gr_gid
    except KeyError:
        if wanted:
            raise LibvirtMissing(f"There is no group {wanted} to run guests as.") from None
    return grp.getgrgid(primary).gr_name, primary


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


def group_name(gid: int) -> str:
    """Return the name of a group, or its number if it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
