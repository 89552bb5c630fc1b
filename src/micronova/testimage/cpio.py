"""Writes an initial file system for the kernel (cpio, "newc"). Device files need no root here."""

import stat
from collections.abc import Iterator


class Archive:
    """The files of an archive, in the order in which the kernel creates them."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._made: set[str] = set()

    def directory(self, path: str, mode: int = 0o755) -> None:
        """Add a directory, and its parents."""
        for parent in _parents(path):
            if parent not in self._made:
                self._add(parent, stat.S_IFDIR | 0o755)
        if path not in self._made:
            self._add(path, stat.S_IFDIR | mode)

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Add a file, and its parent directories."""
        self._add_parents(path)
        self._add(path, stat.S_IFREG | mode, content)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._add_parents(path)
        self._add(path, stat.S_IFLNK | 0o777, target.encode())

    def device(self, path: str, major: int, minor: int) -> None:
        """Add a character device."""
        self._add_parents(path)
        self._add(path, stat.S_IFCHR | 0o600, device=(major, minor))

    def content(self) -> bytes:
        """Return the archive."""
        return b"".join([*self._parts, _entry("TRAILER!!!", 0, 0, b"", (0, 0))])

    def _add_parents(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        if parent:
            self.directory(parent)

    def _add(self, path: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._made.add(path)
        self._parts.append(_entry(path, len(self._made), mode, content, device))


def _parents(path: str) -> Iterator[str]:
    names = path.split("/")
    return ("/".join(names[:n]) for n in range(1, len(names)))


def _entry(path: str, inode: int, mode: int, content: bytes, device: tuple[int, int]) -> bytes:
    name = path.encode() + b"\0"
    # inode, mode, owner, group, links, time, size, device that has it (2), device that it is (2), name length, checksum
    numbers = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % number for number in numbers)
    return _padded(header + name) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
