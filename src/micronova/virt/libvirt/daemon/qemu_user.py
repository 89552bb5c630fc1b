"""The user that libvirt probes QEMU as, and the directories that guests can reach."""

import grp
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from micronova.virt.libvirt.client.library import LibvirtMissing

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


def barrier(folder: Path) -> Path | None:
    """Return the first directory on the path to one that not everybody may traverse, or that is missing."""
    path = [*reversed(folder.absolute().parents), folder.absolute()]
    return next((each for each in path if not (each.exists() and each.stat().st_mode & stat.S_IXOTH)), None)


def _group(wanted: str, user: str, primary: int) -> tuple[str, int]:
    try:
        return wanted or user, grp.getgrnam(wanted or user).gr_gid
    except KeyError:
        if wanted:
            raise LibvirtMissing(f"There is no group {wanted} to run guests as.") from None
    return grp.getgrgid(primary).gr_name, primary


def group_name(gid: int) -> str:
    """Return the name of a group, or its number if it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
