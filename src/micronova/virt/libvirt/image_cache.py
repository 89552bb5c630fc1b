"""Images as this host fetched them: once, checked, and as raw files that overlays stand on.

A base appears under its name only when it is whole, by renaming. Builds that want the same image wait for one
download. A base stays as long as a guest stands on it, and some time longer.
"""

import asyncio
import logging
import math
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from micronova.imageformat.inspector import check
from micronova.objects.clock import Clock
from micronova.objects.errors import BuildAborted, BuildFailed, Invalid, MicronovaError, NotSupported
from micronova.objects.image import ImageMeta
from micronova.virt.libvirt import tools
from micronova.virt.libvirt.fetch import Fetcher, Progress, TicketRefused, fetch
from micronova.virt.libvirt.layout import Layout
from micronova.virt.libvirt.pool import Pool

log = logging.getLogger(__name__)

PART: Final = ".part-"
_QEMU_FORMATS: Final = {"qcow2": "qcow2", "vmdk": "vmdk", "vhd": "vpc", "vhdx": "vhdx", "vdi": "vdi"}
_RAW: Final = ("raw", "iso", "ami")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9-]")


@dataclass(frozen=True, slots=True)
class Base:
    """A cached image."""

    name: str
    path: Path
    virtual_size: int


@dataclass(slots=True)
class _Work:
    task: asyncio.Task[None]
    limit: float  # the most that the disk may hold for those who began it
    waiting: int = 0
    listeners: set[Progress] = field(default_factory=set)


class ImageCache:
    """The cached images of one host."""

    def __init__(self, layout: Layout, files: Pool, clock: Clock, *, fetcher: Fetcher = fetch) -> None:
        self._layout = layout
        self._files = files
        self._clock = clock
        self._fetch = fetcher
        self._works: dict[str, _Work] = {}
        self._held: dict[str, int] = {}

    def sweep(self) -> None:
        """Remove what an agent before us left half done. Blocks."""
        for part in self._layout.base.glob(f"{PART}*"):
            part.unlink(missing_ok=True)

    @asynccontextmanager
    async def image(
        self, image: ImageMeta, ticket: str | None, limit: int | None, progress: Progress | None = None
    ) -> AsyncIterator[Base]:
        """Have an image in the cache; while it is held it is not aged away. `limit` is the most its disk may hold."""
        name = base_name(image)
        self._held[name] = self._held.get(name, 0) + 1
        try:
            base = await self._files.run(self._look, name)
            if base is None:
                await self._get(name, image, ticket, limit, progress)
                base = await self._files.run(self._look, name)
            if base is None:
                raise BuildFailed(f"The image {image.id} vanished from this host's cache.")
            if limit is not None and base.virtual_size > limit:
                raise _too_large(image, base.virtual_size, limit)
            yield base
        finally:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]

    async def remove_unused(self, in_use: Iterable[str], age: float) -> list[str]:
        """Remove images that nobody has used for so many seconds; give their names."""
        used = {*in_use, *self._held, *self._works}
        names = await self._files.run(self._list)
        removed = []
        for name in names:
            # Looked at again for each: a build may have begun meanwhile.
            if name in used or name in self._held or name in self._works:
                continue
            if await self._files.run(self._age, name, self._clock.now() - age):
                log.info("the image %s was not used for long and is not cached any more", name)
                removed.append(name)
        return removed

    async def _get(
        self, name: str, image: ImageMeta, ticket: str | None, limit: int | None, progress: Progress | None
    ) -> None:
        most = math.inf if limit is None else limit
        while True:
            work = self._works.get(name)
            mine = work is None
            if work is None:
                if ticket is None:
                    raise BuildFailed(f"The order says not where the image {image.id} can be fetched.")
                task = asyncio.create_task(self._make(name, image, ticket, limit), name=f"image-{name}")
                work = self._works[name] = _Work(task, most)
                work.task.add_done_callback(lambda _, work=work: self._finished(name, work))  # type: ignore[misc]
            try:
                await self._wait(work, progress)
                return
            except TicketRefused:
                if mine:
                    raise
            except BuildAborted:
                # Too large for the flavor of the one who fetched is perhaps not too large for ours.
                if mine or most <= work.limit:
                    raise

    async def _wait(self, work: _Work, progress: Progress | None) -> None:
        work.waiting += 1
        if progress is not None:
            work.listeners.add(progress)
        try:
            await asyncio.shield(work.task)
        except asyncio.CancelledError:
            if work.task.cancelled():
                raise BuildFailed("The download of the image was stopped.") from None
            raise
        finally:
            work.waiting -= 1
            if progress is not None:
                work.listeners.discard(progress)
            if not work.waiting and not work.task.done():
                work.task.cancel()  # nobody wants it any more
                await asyncio.wait({work.task}, timeout=10.0)

    def _finished(self, name: str, work: _Work) -> None:
        if self._works.get(name) is work:
            del self._works[name]
        if not work.task.cancelled():
            work.task.exception()  # those who waited have it

    async def _make(self, name: str, image: ImageMeta, ticket: str, limit: int | None) -> None:
        _refuse(image)
        base = self._layout.base
        mark = secrets.token_hex(6)
        got, made = base / f"{PART}{mark}-{name}.image", base / f"{PART}{mark}-{name}.raw"

        def progress(percent: int) -> None:
            work = self._works.get(name)
            for listener in tuple(work.listeners) if work is not None else ():
                listener(percent)

        try:
            await self._fetch(image, ticket, got, self._files, progress)
            try:
                virtual_size = await self._files.run(_check, got, image, limit)
            except Invalid as error:
                raise BuildAborted(f"The image {image.id} is refused: {error.message}") from error
            if image.disk_format in _RAW:
                made = got
            else:
                await tools.convert(got, _QEMU_FORMATS[image.disk_format], made, virtual_size)
            if not await self._files.run(_can_start, made):
                raise BuildAborted(
                    f"The image {image.id} cannot be booted: it has no boot sector, no partition table and no "
                    "CD file system."
                )
            await self._files.run(self._publish, made, base / name)
        except OSError as error:
            raise BuildFailed(f"The image cannot be cached: {error.strerror}.") from error
        finally:
            for part in (got, made):
                part.unlink(missing_ok=True)

    def _publish(self, made: Path, target: Path) -> None:
        self._layout.grant(made, 0o640 if self._layout.private else 0o644)
        descriptor = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(made, target)

    def _look(self, name: str) -> Base | None:
        path = self._layout.base / name
        try:
            size = path.stat().st_size
            os.utime(path)  # when it was last used
        except FileNotFoundError:
            return None
        return Base(name, path, size)

    def _list(self) -> list[str]:
        return [path.name for path in self._layout.base.iterdir() if not path.name.startswith(".")]

    def _age(self, name: str, before: float) -> bool:
        path = self._layout.base / name
        if path.stat().st_mtime >= before:
            return False
        path.unlink()
        return True


def base_name(image: ImageMeta) -> str:
    """Name the cached file: the id, and the checksum in case that an id comes to mean something else."""
    content = image.os_hash_value or image.checksum or "unsummed"
    return f"{_UNSAFE.sub('_', image.id)[:64]}.{_UNSAFE.sub('_', content)[:32]}"


def _can_start(disk: Path) -> bool:
    """Say whether firmware finds anything to start on a disk: an MBR, a GPT, or an ISO 9660 file system. Blocks."""
    with disk.open("rb") as stream:
        begin = stream.read(36 * 1024)
    if begin[510:512] == b"\x55\xaa" or b"EFI PART" in (begin[512:520], begin[4096:4104]):
        return True
    return begin[32769:32774] == b"CD001"


def _refuse(image: ImageMeta) -> None:
    if image.container_format not in ("bare", "ami"):
        raise NotSupported(f"This host boots bare images only, not {image.container_format}.")
    if image.disk_format not in _RAW and image.disk_format not in _QEMU_FORMATS:
        known = ", ".join((*_RAW, *_QEMU_FORMATS))
        raise BuildAborted(f"The image {image.id} has the format {image.disk_format}; this host boots {known}.")


def _check(path: Path, image: ImageMeta, limit: int | None) -> int:
    if limit is None:
        numbers = os.statvfs(path)
        limit = numbers.f_blocks * numbers.f_frsize
    info = check(path, image.disk_format, max_virtual_size=limit)
    return info.file_size if info.virtual_size is None else info.virtual_size


def _too_large(image: ImageMeta, size: int, limit: int) -> MicronovaError:
    gigabytes = -(-size // 1024**3)
    return BuildAborted(f"The image {image.id} needs a disk of {gigabytes} GB; the flavor's has {limit // 1024**3} GB.")
