"""POSIX access control lists: the owner of a file gives single users rights to it, without privileges.

The users need no name. Neither a group nor other users get a right by an entry for one user.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

READ: Final = 4
WRITE: Final = 2
SEARCH: Final = 1
"""The right to traverse a directory."""
_ACCESS: Final = "system.posix_acl_access"
_DEFAULT: Final = "system.posix_acl_default"
_VERSION: Final = 2
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID: Final = 0xFFFFFFFF  # of entries that name no user or group


def share(path: Path, mode: int, users: Mapping[int, int]) -> None:
    """Give a file these rights of owner, group and others, and each user its own; earlier entries are replaced.

    Raise OSError if the file system has no access control lists, or if this process does not own the file.
    """
    os.setxattr(path, _ACCESS, _packed(mode, users), follow_symlinks=False)


def share_contents(folder: Path, mode: int, users: Mapping[int, int]) -> None:
    """Have files that anybody creates in a directory get these rights, as far as their creator's mode allows."""
    os.setxattr(folder, _DEFAULT, _packed(mode, users), follow_symlinks=False)


def users(path: Path) -> set[int]:
    """Return the users that have an entry of their own."""
    try:
        content = os.getxattr(path, _ACCESS, follow_symlinks=False)
    except OSError:  # there is no list
        return set()
    return {user for tag, _, user in struct.iter_unpack("<HHI", content[4:]) if tag == _USER}


def rename(path: Path, before: int, after: int) -> None:
    """Give the entries of one user to another, also in what files get that are created in a directory.

    Links are followed, so that a descriptor can be named by its path in /proc.
    """
    for name in (_ACCESS, _DEFAULT):
        try:
            content = os.getxattr(path, name)
        except OSError:  # there is no list
            continue
        entries = [
            (tag, right, after if tag == _USER and user == before else user)
            for tag, right, user in struct.iter_unpack("<HHI", content[4:])
        ]
        os.setxattr(path, name, content[:4] + b"".join(struct.pack("<HHI", *entry) for entry in entries))


def _packed(mode: int, users: Mapping[int, int]) -> bytes:
    group = mode >> 3 & 7
    most = group
    for right in users.values():
        most |= right
    entries = [
        (_OWNER, mode >> 6 & 7, _NO_ID),
        *((_USER, right, user) for user, right in sorted(users.items())),
        (_GROUP, group, _NO_ID),
        (_MASK, most, _NO_ID),  # the most that anybody but the owner gets
        (_OTHER, mode & 7, _NO_ID),
    ]
    return struct.pack("<I", _VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
