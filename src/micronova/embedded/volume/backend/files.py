"""The files of volumes, snapshots and backups: sparse raw files in one directory, each named by the id of its row.

    DIR/volumes/volumes/ID      what guests read and write
    DIR/volumes/snapshots/ID    a copy at one point in time
    DIR/volumes/backups/ID      a full copy that outlives the volume
    DIR/volumes/exports/ID/     copies of a volume that is in use, until they are complete
    DIR/volumes/locks/ID        the lock of an operation, held by the process that works on it

A new file is written as `ID.OPERATION.part` and renamed when it is complete, so a file with a final name is whole. A
name that the database relies on survives a loss of power, even if an attempt has ended between the rename and the sync
of the directory. A copy is a reflink where the file system has them, else only the parts that have data are copied. All
work on files, except taking and giving back locks, is done in two small pools of threads, one of them for what takes
long. Copies take turns in it, a slice each time, so that none waits until others have ended.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from micronova.embedded.volume.backend.exports import LiveCopies, OnProgress
from micronova.telemetry.threads import CountedThreads

P = ParamSpec("P")
R = TypeVar("R")

VOLUMES: Final = "volumes"
SNAPSHOTS: Final = "snapshots"
BACKUPS: Final = "backups"
EXPORTS: Final = "exports"
"""The directory that has, for each volume that was ever served, one for copies while they are made."""
DIRECTORIES: Final = (VOLUMES, SNAPSHOTS, BACKUPS)
"""The directories of files that have a row."""

BLOCK: Final = 4 << 20  # bytes that are copied between two reports
SLICE: Final = 16 * BLOCK  # bytes that a copy writes at one turn
_LOCKS: Final = "locks"
_FICLONE: Final = 0x40049409  # of linux/fs.h
_NEW: Final = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC
_NO_REFLINK: Final = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)


class Interrupted(Exception):
    """The work was cancelled. The engine reads its operation again to find out what to do."""


class Files:
    """The directory of all files."""

    def __init__(self, root: Path, copies: int = 4) -> None:
        """`copies` are the long copies that run at once."""
        self.root = root
        self._quick = CountedThreads(2, "volume-files")
        self._long = CountedThreads(copies, "volume-copies")
        self.live_copies: LiveCopies | None = None

    @property
    def pools(self) -> dict[str, CountedThreads]:
        """The pools of threads, by what they are called."""
        return {"volume-files": self._quick, "volume-copies": self._long}

    async def start(self) -> None:
        """Create the directories; only the user of the service can read them."""

        def make() -> None:
            for name in (*DIRECTORIES, _LOCKS):
                (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)

        await self.run(make)

    async def stop(self) -> None:
        """End the threads. The tasks that use them have ended."""
        await asyncio.to_thread(self._long.shutdown)
        await asyncio.to_thread(self._quick.shutdown)

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that takes a short time."""
        return await _in_thread(self._quick, lambda: fn(*args, **kwargs))

    async def run_long(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that reads or writes up to a slice of a file."""
        return await _in_thread(self._long, lambda: fn(*args, **kwargs))

    def path(self, directory: str, id: str) -> Path:
        """Return the file of a volume, a snapshot or a backup."""
        return self.root / directory / id

    async def names(self, directory: str) -> list[str]:
        """Return the names of all files in a directory, complete or not."""
        return await self.run(os.listdir, self.root / directory)

    async def remove(self, directory: str, name: str) -> bool:
        """Remove a file and return True; return False if there is none."""

        def unlink() -> bool:
            path = self.root / directory / name
            if directory == VOLUMES:
                shutil.rmtree(self.root / EXPORTS / name, ignore_errors=True)
            found = path.exists()
            path.unlink(missing_ok=True)
            _sync_directory(path.parent)  # an earlier attempt may have removed it, and ended before this
            return found

        return await self.run(unlink)

    async def discard(self, path: Path) -> None:
        """Remove a file that is not complete or not wanted any more, if it is there."""
        await self.run(path.unlink, missing_ok=True)

    async def free(self) -> tuple[int, int]:
        """Return the bytes that the file system has, and those of them that are free."""
        found = await self.run(os.statvfs, self.root)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    # --- new files -------------------------------------------------------------------------------------------

    async def create_blank(self, directory: str, id: str, operation_id: str, size: int) -> None:
        """Create a file of zeros, unless it exists."""

        def create() -> None:
            path, part = self.path(directory, id), self.part(directory, id, operation_id)
            if not _is_complete(path):  # else an attempt that was interrupted after this has made it
                with _opened(part, _NEW) as file:
                    os.ftruncate(file, size)
                    os.fsync(file)
                _publish(part, path)

        await self.run(create)

    async def create_copy(
        self, source: Path, directory: str, id: str, operation_id: str, size: int, on_progress: OnProgress
    ) -> None:
        """Create a file of `size` bytes as a copy of another one, unless it exists."""
        if await self.exists(directory, id):
            return
        if self.live_copies is None or source.parent != self.root / VOLUMES:
            await self.replace_by_copy(source, directory, id, operation_id, size, on_progress)
            return
        copy = await self.copy_at_one_moment(source.name, operation_id, on_progress)
        try:
            await self.complete(copy, directory, id, size)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            await self.replace_by_copy(copy, directory, id, operation_id, size, on_progress)  # backups may be elsewhere
        finally:
            await self.discard(copy)

    async def copy_at_one_moment(self, volume_id: str, operation_id: str, on_progress: OnProgress) -> Path:
        """Return the file of a copy of a volume as it is at one moment. The caller removes the file.

        If the file system has no reflinks, the storage daemon of the volume makes the copy, because a guest may write
        to the volume meanwhile.
        """
        assert self.live_copies is not None
        source, name = self.path(VOLUMES, volume_id), f"{operation_id}.part"
        target = await self.run(self.live_copies.prepare, volume_id, name)
        try:
            if not await self.run(_reflink, source, target):
                await self.live_copies.copy(volume_id, name, on_progress)
        except BaseException:
            await self.discard(target)
            raise
        return target

    async def replace_by_copy(
        self, source: Path, directory: str, id: str, operation_id: str, size: int, on_progress: OnProgress
    ) -> None:
        """Replace a file by a copy of another one, made `size` bytes long."""
        part = self.part(directory, id, operation_id)
        original = await self.run(os.open, source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file = await self.run(os.open, part, _NEW, 0o600)
            try:
                if not await self.run_long(_clone, original, file):
                    at: int | None = 0
                    while at is not None:
                        at = await self.run_long(_copy_slice, original, file, at, on_progress)
            finally:
                os.close(file)
        finally:
            os.close(original)
        await self.complete(part, directory, id, size)

    async def exists(self, directory: str, id: str) -> bool:
        """Return whether a file is complete."""
        return await self.run(_is_complete, self.path(directory, id))

    def part(self, directory: str, id: str, operation_id: str, what: str = "") -> Path:
        """Return the name of a file that an operation has not completed; `what` tells several of them apart."""
        path = self.path(directory, id)
        return path.with_name(f"{path.name}.{operation_id}{what and '.'}{what}.part")

    async def receive(self, chunks: AsyncIterator[bytes], part: Path, limit: int, on_progress: OnProgress) -> None:
        """Write chunks of data to a file that is not complete; raise TooMuchData."""
        file = await self.run(os.open, part, _NEW, 0o600)
        try:
            written = 0
            async for chunk in chunks:
                if written + len(chunk) > limit:
                    raise TooMuchData(limit)
                await self.run_long(_write_sparse, file, chunk, written)
                written += len(chunk)
                on_progress(written)
            await self.run(os.ftruncate, file, written)
        finally:
            os.close(file)

    async def complete(self, part: Path, directory: str, id: str, size: int) -> None:
        """Give a file, made `size` bytes long, its final name."""

        def publish() -> None:
            with _opened(part, os.O_RDWR) as file:
                os.ftruncate(file, size)
                os.fsync(file)
            _publish(part, self.path(directory, id))

        await self.run_long(publish)

    async def chunks(self, path: Path, on_progress: OnProgress) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file."""
        file = await self.run(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            at = 0
            while chunk := await self.run_long(os.pread, file, BLOCK // 4, at):
                yield chunk
                at += len(chunk)
                on_progress(at)
        finally:
            os.close(file)

    async def link(self, directory: str, source: str, id: str, size: int) -> None:
        """Give a file that nothing writes to, and that has this size, a second name; do nothing if it has it.

        Raise FileNotFoundError if there is none.
        """

        def link() -> None:
            path = self.path(directory, id)
            original = path if _is_complete(path) else self.path(directory, source)
            if original.stat().st_size != size:
                raise FileNotFoundError(f"{original} has another size than {size} bytes")
            if original != path:
                os.link(original, path, follow_symlinks=False)
                _sync_directory(path.parent)

        await self.run(link)

    async def grow(self, directory: str, id: str, size: int) -> None:
        """Make a file at least `size` bytes long."""

        def extend() -> None:
            with _opened(self.path(directory, id), os.O_RDWR) as file:
                if os.fstat(file).st_size < size:
                    os.ftruncate(file, size)
                    os.fsync(file)

        await self.run(extend)

    # --- locks -----------------------------------------------------------------------------------------------

    def lock(self, name: str) -> int | None:
        """Take the lock of an operation and return it; return None if another process has it.

        The lock ends with the process. So it needs neither a clock nor a lease. It is taken without a thread, because
        a caller that is cancelled meanwhile could not give it back.
        """
        return _lock(self.root / _LOCKS / name)

    def unlock(self, name: str, lock: int) -> None:
        """Give a lock back and forget it."""
        (self.root / _LOCKS / name).unlink(missing_ok=True)
        os.close(lock)


class TooMuchData(Exception):
    """There is more data than fits into the file."""

    def __init__(self, size: int) -> None:
        super().__init__(f"more than {size} bytes")


def _reflink(source: Path, target: Path) -> bool:
    """Make a file a reflink of another, and return True; return False if the file system has none."""
    with _opened(source) as original, _opened(target, os.O_RDWR) as file:
        return _clone(original, file)


@contextlib.contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


async def _in_thread(pool: ThreadPoolExecutor, fn: Callable[[], R]) -> R:
    """Run a function in a thread. A task that is cancelled ends after it: the thread may use the task's descriptors."""
    future = asyncio.get_running_loop().run_in_executor(pool, fn)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def _clone(source: int, target: int) -> bool:
    """Make a file a reflink of another one; return False where the file system has none."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _NO_REFLINK:
            raise
        return False
    return True


def _copy_slice(source: int, target: int, at: int, on_progress: OnProgress) -> int | None:
    """Copy a slice of the data from an offset on; return where the next one begins, None after the last one."""
    left = SLICE
    while left > 0:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return None
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end and left > 0:
            copied = os.copy_file_range(source, target, min(BLOCK, end - at), at, at)
            if not copied:
                return None  # the source has become shorter
            at, left = at + copied, left - copied
            on_progress(at)
    return at


def _write_sparse(file: int, chunk: bytes, at: int) -> None:
    """Write data at an offset; a block of zeros stays a hole."""
    for begin in range(0, len(chunk), 65_536):
        block = chunk[begin : begin + 65_536]
        if block.count(0) == len(block):
            continue
        view = memoryview(block)
        while view:
            done = os.pwrite(file, view, at + begin)
            view, begin = view[done:], begin + done


def _is_complete(path: Path) -> bool:
    """Return whether a file has its final name, which it then keeps after a loss of power.

    The attempt that has renamed the file may have ended before it synced the directory.
    """
    if not path.exists():
        return False
    _sync_directory(path.parent)
    return True


def _publish(part: Path, path: Path) -> None:
    os.rename(part, path)
    _sync_directory(path.parent)


def _lock(path: Path) -> int | None:
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the holder has just forgotten it


def _sync_directory(directory: Path) -> None:
    with _opened(directory) as file:
        os.fsync(file)
