"""The image cache of a host: each image is downloaded once, checked, and kept as a raw file that overlays are based on.

A cached image gets its name, by a rename, only when it is complete. Builds that need the same image wait for one
download. An image stays as long as a disk is based on it, and for some time after. All images together have a limit,
in which the files of downloads count while they grow: a small file can unpack to a large disk. For a new image, those
are removed that no disk is based on, the longest unused first.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from micronova.http.image_downloads import TicketRefused
from micronova.imageformat.inspector import RAW_FORMATS, check
from micronova.imageformat.signatures import verify_file
from micronova.objects.clock import Clock
from micronova.objects.errors import (
    BuildAborted,
    BuildFailed,
    InsufficientResources,
    Invalid,
    MicronovaError,
    NotSupported,
    Unavailable,
    resource_exhausted,
)
from micronova.objects.image import KERNEL_FORMATS, NO_DISKS, RAMDISK_FORMATS, ImageMeta, ImageSignature
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage import tools
from micronova.virt.libvirt.storage.fetch import Fetcher, fetch
from micronova.virt.libvirt.storage.layout import Layout, sync_directory, sync_file
from micronova.virt.libvirt.storage.tools import GIB

log = logging.getLogger(__name__)

PART: Final = ".part-"
WATCH: Final = 0.1  # seconds between looks at files that grow
_QEMU_FORMATS: Final = {"qcow2": "qcow2", "vmdk": "vmdk", "vhd": "vpc", "vhdx": "vhdx", "vdi": "vdi"}
DISK_FORMATS: Final = (*RAW_FORMATS, *_QEMU_FORMATS)
"""The formats of images that hosts boot."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9-]")


@dataclass(frozen=True, slots=True)
class CachedImage:
    """A raw file in the cache."""

    name: str
    path: Path
    virtual_size: int


@dataclass(slots=True)
class _Download:
    task: asyncio.Task[None]
    size: int  # bytes that it takes of the disk, or will take
    limit: float  # bytes that the disk may have for the build that started it
    waiting: int = 0  # builds


class ImageCache:
    """The cached images of one host."""

    def __init__(
        self,
        layout: Layout,
        files: ThreadPool,
        clock: Clock,
        *,
        fetcher: Fetcher = fetch,
        max_bytes: Callable[[], int] | None = None,
        used_by_disks: Callable[[], set[str]] = set,
        evict: bool = True,
    ) -> None:
        """Make the cache; `max_bytes` and `used_by_disks` may block. Without `evict`, unused images are not removed."""
        self._max_bytes = max_bytes
        self._used_by_disks = used_by_disks
        self._evict = evict
        self._layout = layout
        self._files = files
        self._clock = clock
        self._fetch = fetcher
        self._downloads: dict[str, _Download] = {}
        self._verifying = asyncio.Lock()
        self._in_use: dict[str, int] = {}  # builds that use an image right now, by its name

    def remove_incomplete(self) -> None:
        """Remove incomplete downloads that an earlier agent left. Blocks."""
        for part in self._layout.base.glob(f"{PART}*"):
            part.unlink(missing_ok=True)

    @asynccontextmanager
    async def image(
        self, image: ImageMeta, url: str | None, limit: int | None, *, is_disk: bool = True
    ) -> AsyncIterator[CachedImage]:
        """Download an image if it is not cached, and keep it while the context lasts; `limit` is its disk's size.

        A kernel and a ramdisk are no disks.
        """
        name = base_name(image)
        self._in_use[name] = self._in_use.get(name, 0) + 1
        try:
            base = await self._files.run(self._find, name)
            if base is None:
                await self._download(name, image, url, limit, is_disk)
                base = await self._files.run(self._find, name)
            if base is None:
                raise BuildFailed(f"The image {image.id} vanished from this host's cache.")
            if limit is not None and base.virtual_size > limit:
                raise _too_large(image, base.virtual_size, limit)
            yield base
        finally:
            self._in_use[name] -= 1
            if not self._in_use[name]:
                del self._in_use[name]

    async def fetch(self, image: ImageMeta, url: str | None) -> bool:
        """Download an image before a build needs it; return False if it is cached. Both count as a use of it."""
        if await self._files.run(self._find, base_name(image)) is not None:
            return False
        async with self.image(image, url, None):
            return True

    async def remove_unused(self, age: float) -> list[str]:
        """Remove images that no disk is based on and that were not used for `age` seconds; return their names."""
        removed = []
        for name in await self._unused():
            if self._is_free(name) and await self._files.run(self._remove_if_older, name, self._clock.now() - age):
                log.info("removed the image %s from the cache: it was not used for %g s", name, age)
                removed.append(name)
        return removed

    async def _unused(self) -> list[str]:
        """Return the images that no disk is based on, the longest unused first."""
        used = await self._files.run(self._used_by_disks)
        return [name for name in await self._files.run(self._list) if name not in used]

    def _is_free(self, name: str) -> bool:
        """Return whether no build uses an image; asked before each removal, because one may have begun meanwhile."""
        return name not in self._in_use and name not in self._downloads

    async def _make_room(self, name: str) -> None:
        """Remove unused images until what is cached, a download and those that began before it fit.

        Later downloads do not count: they end themselves, so that the first one succeeds. Otherwise raise
        InsufficientResources if disks take the room, and Unavailable if builds and downloads take it for the moment.
        """
        if self._max_bytes is None:
            return
        most = await self._files.run(self._max_bytes)
        unused: list[str] | None = None
        while (taken := await self._files.run(self._taken)) + (coming := self._coming(name)) > most:
            if unused is None:
                unused = await self._unused() if self._evict else []
            removed = next((name for name in unused if self._is_free(name)), None)
            if removed is None:
                own = self._downloads[name].size
                kept = await self._files.run(self._kept)
                error, when = (InsufficientResources, "") if kept + own > most else (Unavailable, " at the moment")
                # The owner of the server reads the message; what others use is for admins.
                figures = f"{most >> 20} MB allowed, {taken >> 20} MB used, {coming >> 20} MB are being downloaded"
                raise error(f"The image cache of the server's host is full{when}.", details=figures)
            unused.remove(removed)
            if await self._files.run(self._remove_if_older, removed, math.inf):
                log.info("removed the image %s from the cache: it was not used, and another one needs room", removed)

    def _coming(self, name: str) -> int:
        """Return the bytes of a download and of those that began before it."""
        before = itertools.takewhile(lambda each: each != name, self._downloads)
        return sum(self._downloads[each].size for each in (*before, name))

    def _taken(self) -> int:
        """Return the bytes that the cached images take of the disk. Blocks."""
        return sum(_blocks(self._layout.base / name) for name in self._list())

    def _kept(self) -> int:
        """Return the bytes of the cached images that stay when all builds have ended. Blocks."""
        if not self._evict:
            return self._taken()
        return sum(_blocks(self._layout.base / name) for name in self._used_by_disks())

    async def _download(self, name: str, image: ImageMeta, url: str | None, limit: int | None, is_disk: bool) -> None:
        most = math.inf if limit is None else limit
        while True:
            download = self._downloads.get(name)
            started_here = download is None
            if download is None:
                if url is None:
                    raise BuildFailed(f"The order has no URL of the image {image.id}.")
                task = asyncio.create_task(
                    self._fetch_and_convert(name, image, url, limit, is_disk), name=f"image-{name}"
                )
                download = self._downloads[name] = _Download(task, image.size, most)
                task.add_done_callback(partial(self._forget, name))
            try:
                await self._wait(download)
                return
            except TicketRefused:
                if started_here:
                    raise
            except BuildAborted:
                # An image too large for the other build's flavor may fit ours.
                if started_here or most <= download.limit:
                    raise

    async def _wait(self, download: _Download) -> None:
        download.waiting += 1
        try:
            await asyncio.shield(download.task)
        except asyncio.CancelledError:
            if download.task.cancelled():
                raise BuildFailed("The download of the image was stopped.") from None
            raise
        finally:
            download.waiting -= 1
            if not download.waiting and not download.task.done():
                download.task.cancel()  # no build waits for it any more
                await asyncio.wait({download.task}, timeout=10.0)

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        download = self._downloads.get(name)
        if download is not None and download.task is task:
            del self._downloads[name]
        if not task.cancelled():
            task.exception()  # the builds that waited got the error; asyncio is not to log it

    async def _fetch_and_convert(self, name: str, image: ImageMeta, url: str, limit: int | None, is_disk: bool) -> None:
        _refuse(image, is_disk=is_disk)
        base = self._layout.base
        mark = secrets.token_hex(6)
        fetched, raw = base / f"{PART}{mark}-{name}.image", base / f"{PART}{mark}-{name}.raw"
        try:
            await self._make_room(name)
            await self._watched(name, image, fetched, raw, self._fetch(image, url, fetched, self._files))
            if image.signature is not None:
                async with self._verifying:  # not in a thread for files: it lasts as long as the file is large
                    await asyncio.to_thread(_verify, fetched, image, image.signature)
            try:
                virtual_size = await self._files.run(_check, fetched, image, limit)
            except Invalid as error:
                raise BuildAborted(f"The image {image.id} is refused: {error.message}") from error
            if image.disk_format in (*RAW_FORMATS, *NO_DISKS):
                raw = fetched
            else:
                unpacking = tools.convert(fetched, _QEMU_FORMATS[image.disk_format], raw, virtual_size)
                await self._watched(name, image, fetched, raw, unpacking)
            by_firmware = is_disk and image.kernel is None
            if by_firmware and not await self._files.run(_is_bootable, raw):
                raise BuildAborted(
                    f"The image {image.id} cannot be booted: it has no boot sector, no partition table and no "
                    "CD file system."
                )
            await self._grow(name, image, 0, await self._files.run(_blocks, raw))  # the other file is about to go
            await self._files.run(self._publish, raw, base / name)
        except OSError as error:
            lack = resource_exhausted(error)
            raise lack or BuildFailed(f"The image cannot be cached: {error.strerror}.") from error
        finally:
            for part in (fetched, raw):
                part.unlink(missing_ok=True)

    async def _watched(self, name: str, image: ImageMeta, fetched: Path, raw: Path, work: Awaitable[None]) -> None:
        """Do work that lets the files of a download grow, and end it when the cache has no room for them."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=WATCH))[0]:
                first, second = [await self._files.run(_blocks, part) for part in (fetched, raw)]
                await self._grow(name, image, max(first, image.size), second)
            await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _grow(self, name: str, image: ImageMeta, fetched: int, unpacked: int) -> None:
        """Count the bytes that a download takes now, and make room; raise BuildAborted if it alone fills the cache."""
        if (download := self._downloads.get(name)) is not None:
            download.size = fetched + unpacked
        most = math.inf if self._max_bytes is None else await self._files.run(self._max_bytes)
        if fetched + unpacked > most:
            raise BuildAborted(
                f"The image {image.id} is refused: with its unpacked disk it is larger than the {int(most) >> 20} MB "
                "of the image cache."
            )
        await self._make_room(name)

    def _publish(self, raw: Path, target: Path) -> None:
        sync_file(raw)
        os.replace(raw, target)
        sync_directory(target.parent)

    def _find(self, name: str) -> CachedImage | None:
        path = self._layout.base / name
        try:
            size = path.stat().st_size
            os.utime(path)  # its last use
        except FileNotFoundError:
            return None
        return CachedImage(name, path, size)

    def _list(self) -> list[str]:
        """Return the names of the images, the longest unused first."""
        found: list[tuple[float, str]] = []
        for path in self._layout.base.iterdir():
            if not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime, path.name))
        return [name for _, name in sorted(found)]

    def _remove_if_older(self, name: str, before: float) -> bool:
        path = self._layout.base / name
        try:
            if path.stat().st_mtime >= before:
                return False
        except FileNotFoundError:
            return False
        path.unlink()
        return True


def base_name(image: ImageMeta) -> str:
    """Return the name of an image in the cache: its id, and its checksum in case that an id is used again.

    An image whose signature was verified has a name of its own: a copy that was cached unverified is not used.
    """
    content = image.os_hash_value or image.checksum or "unsummed"
    name = f"{_UNSAFE.sub('_', image.id)[:64]}.{_UNSAFE.sub('_', content)[:32]}"
    if image.signature is None:
        return name
    return f"{name}.{hashlib.sha256(msgspec.msgpack.encode(image.signature)).hexdigest()[:32]}"


def _blocks(file: Path) -> int:
    """Return the bytes that a file takes of the disk: its holes take none. Blocks."""
    try:
        return file.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _is_bootable(disk: Path) -> bool:
    """Return whether a disk has anything that firmware can boot: an MBR, a GPT, or an ISO 9660 file system. Blocks."""
    with disk.open("rb") as stream:
        start = stream.read(36 * 1024)
    if start[510:512] == b"\x55\xaa" or b"EFI PART" in (start[512:520], start[4096:4104]):
        return True
    return start[32769:32774] == b"CD001"


def _refuse(image: ImageMeta, *, is_disk: bool) -> None:
    if not is_disk:
        if image.disk_format not in (*KERNEL_FORMATS, *RAMDISK_FORMATS):
            raise BuildAborted(f"The image {image.id} has the format {image.disk_format}: it is no kernel or ramdisk.")
        return
    if image.container_format not in ("bare", "ami"):
        raise NotSupported(f"This host boots bare images only, not {image.container_format}.")
    if image.disk_format not in DISK_FORMATS:
        known = ", ".join(DISK_FORMATS)
        raise BuildAborted(f"The image {image.id} has the format {image.disk_format}; this host boots {known}.")


def _verify(path: Path, image: ImageMeta, signature: ImageSignature) -> None:
    try:
        verify_file(path, signature)
    except Invalid as error:
        raise BuildAborted(f"The image {image.id} is refused: {error.message}.") from error


def _check(path: Path, image: ImageMeta, limit: int | None) -> int:
    if limit is None:
        numbers = os.statvfs(path)
        limit = numbers.f_blocks * numbers.f_frsize
    info = check(path, image.disk_format, max_virtual_size=limit)
    return info.file_size if info.virtual_size is None else info.virtual_size


def _too_large(image: ImageMeta, size: int, limit: int) -> MicronovaError:
    gigabytes = -(-size // GIB)
    return BuildAborted(f"The image {image.id} needs a disk of {gigabytes} GB; the flavor's has {limit // GIB} GB.")
