"""Console logs: files that virtlogd writes and rotates, and that only root may read.

An agent that is not root reads them through libvirt, as volumes of a storage pool that exists only for that.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from micronova.virt.driver import last_lines
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.library import has_code
from micronova.virt.libvirt.client.xmltree import child, element, unparse

MOST_BYTES: Final = 256 * 1024
"""How much of the end of a log is returned at most."""

Tail = Callable[[str, int], bytes | None]
"""Returns at most so many bytes of the end of a file, or None if there is none."""


def read_console(tail: Tail, name: str, lines: int | None) -> str:
    """Return the last lines of a log, or all that is kept. Blocks."""
    # virtlogd names the older file NAME.0, and with other settings keeps more.
    data = b""
    for number, file in enumerate((name, *(f"{name}.{old}" for old in range(10)))):
        wanted = MOST_BYTES - len(data)
        if wanted <= 0:
            break
        part = tail(file, wanted)
        if part is None:
            if number == 0:
                continue  # it is being rotated, or the guest has not run yet
            break
        data = part + data
    return last_lines(data.decode(errors="replace").replace("\x00", ""), lines)


def from_files(folder: Path) -> Tail:
    """Return a reader of the files of a directory; it raises PermissionError if this process is not root."""

    def tail(name: str, most: int) -> bytes | None:
        try:
            with (folder / name).open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(max(0, size - most))
                return stream.read(most)
        except FileNotFoundError:
            return None

    return tail


def through_libvirt(connection: Connect, folder: str, pool_name: str) -> Tail:
    """Return a reader of the files of a directory by way of libvirt."""
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


def log_pool_name(root: Path) -> str:
    """Return the name of the storage pool for the console logs of a host, by the directory of its guests."""
    return f"micronova-{uuid5(NAMESPACE_URL, root.as_uri())}"


def remove_pool(connection: Connect, pool_name: str) -> None:
    """Remove the storage pool, if there is one; the files stay."""
    try:
        connection.storagePoolLookupByName(pool_name).destroy()
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_STORAGE_POOL"):
            raise


def _pool(connection: Connect, folder: str, name: str) -> Any:
    try:
        return connection.storagePoolLookupByName(name)
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_STORAGE_POOL"):
            raise
    definition = element("pool", type="dir")
    child(definition, "name", name)
    child(child(definition, "target"), "path", folder)
    return connection.storagePoolCreateXML(unparse(definition), 0)
