"""What a guest has written to its console: a ring of files that virtlogd keeps, and that only root may read.

An agent that is not root reads them through libvirt, which it may use anyway: as volumes of a storage pool that is
there just for that.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from micronova.virt.driver import last_lines
from micronova.virt.libvirt.library import has_code
from micronova.virt.libvirt.xmltree import child, element, unparse

MOST_BYTES: Final = 256 * 1024
"""How much of the end is given at most."""

Tail = Callable[[str, int], bytes | None]
"""Gives at most so many bytes of the end of a file, or None if there is none."""


def read_console(tail: Tail, name: str, lines: int | None) -> str:
    """Give the last lines, or all that is kept. Blocks."""
    # The older file is named NAME.0; with other settings of virtlogd there are more.
    data = b""
    for number, file in enumerate((name, *(f"{name}.{old}" for old in range(10)))):
        wanted = MOST_BYTES - len(data)
        if wanted <= 0:
            break
        piece = tail(file, wanted)
        if piece is None:
            if number == 0:
                continue  # just being replaced, or the guest has not run yet
            break
        data = piece + data
    return last_lines(data.decode(errors="replace").replace("\x00", ""), lines)


def from_files(folder: Path) -> Tail:
    """Read the files themselves; PermissionError if they are root's and we are not."""

    def tail(name: str, most: int) -> bytes | None:
        try:
            with (folder / name).open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(max(0, size - most))
                return stream.read(most)
        except FileNotFoundError:
            return None

    return tail


def through_libvirt(connection: Any, folder: str, pool_name: str) -> Tail:
    """Have libvirt read the files of a directory."""
    pool = _pool(connection, folder, pool_name)
    pool.refresh(0)

    def tail(name: str, most: int) -> bytes | None:
        try:
            volume = pool.storageVolLookupByName(name)
        except Exception as error:
            if has_code(error, "VIR_ERR_NO_STORAGE_VOL"):
                return None
            raise
        size = volume.info()[1]
        if not size:
            return b""
        parts: list[bytes] = []
        stream = connection.newStream(0)
        start = max(0, size - most)
        volume.download(stream, start, size - start, 0)
        stream.recvAll(lambda _, data, parts: parts.append(data), parts)
        stream.finish()
        return b"".join(parts)

    return tail


def pool_of(root: Path) -> str:
    """Name the pool of a host by the directory of its guests."""
    return f"micronova-{uuid5(NAMESPACE_URL, root.as_uri())}"


def forget_pool(connection: Any, pool_name: str) -> None:
    """Remove the pool, if there is one; the files stay."""
    try:
        connection.storagePoolLookupByName(pool_name).destroy()
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_STORAGE_POOL"):
            raise


def _pool(connection: Any, folder: str, name: str) -> Any:
    try:
        return connection.storagePoolLookupByName(name)
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_STORAGE_POOL"):
            raise
    definition = element("pool", type="dir")
    child(definition, "name", name)
    child(child(definition, "target"), "path", folder)
    return connection.storagePoolCreateXML(unparse(definition), 0)
