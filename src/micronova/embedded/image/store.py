"""Image data as files in one directory, each named by the id of its image.

An upload writes to `IMAGE_ID.UPLOAD_ID.part`, renames the file when it is complete, and holds a lock (flock) on it
until the row of the image says that the data is there. The lock ends with its process. So a file without a lock that
no row refers to is left over from an interrupted upload. A sweep therefore needs neither clocks nor leases, and several
processes may share a directory.

All operations on files run in a small pool of threads.
"""

import asyncio
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from micronova.embedded.image.model import DataSummary
from micronova.telemetry.threads import CountedThreads, ThreadUse

P = ParamSpec("P")
R = TypeVar("R")

BLOCK = 1 << 20  # bytes per call of a thread: enough to make the call cheap, few enough to use little memory


class DirectorySync:
    """Makes changes of a directory survive a crash of the machine; those that wait at the same time share an fsync."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._counting = threading.Lock()
        self._syncing = threading.Lock()
        self.changes = 0
        self._synced = 0  # how many of the changes are durable

    def changed(self) -> None:
        """Return when the change that the caller has made is durable."""
        with self._counting:
            self.changes += 1
            mine = self.changes
        with self._syncing:
            if self._synced >= mine:
                return  # by an fsync that began after the change
            with self._counting:
                covered = self.changes
            _sync_directory(self._directory)
            self._synced = covered


class Upload:
    """A file that is being written; its methods are called one at a time, from any thread."""

    def __init__(self, directory: Path, image_id: str, upload_id: str, directory_sync: DirectorySync) -> None:
        self.image_id = image_id
        self.id = upload_id
        self.path = directory / f"{image_id}.{upload_id}.part"
        self.size = 0
        self._final = directory / image_id
        self._directory_sync = directory_sync
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._sha512 = hashlib.sha512()
        self._file = _create_locked(self.path)

    def write(self, blocks: list[bytes]) -> None:
        """Append the blocks; raise OSError, for example if the disk is full."""
        for block in blocks:
            view = memoryview(block)
            while view:
                view = view[os.write(self._file, view) :]
            self._md5.update(block)
            self._sha512.update(block)
            self.size += len(block)

    def summary(self, virtual_size: int | None) -> DataSummary:
        """Return the size and the digests of what was written."""
        return DataSummary(
            size=self.size,
            checksum=self._md5.hexdigest(),
            os_hash_value=self._sha512.hexdigest(),
            virtual_size=virtual_size,
        )

    def publish(self) -> None:
        """Make what was written survive a crash of the machine, and give the file its final name; it stays locked."""
        os.fsync(self._file)
        os.rename(self.path, self._final)
        self.path = self._final
        self._directory_sync.changed()

    def close(self) -> None:
        """Close and unlock the file; it stays as it is."""
        os.close(self._file)

    def discard(self) -> None:
        """Remove the file and unlock it."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


class Download:
    """The bytes of a file from `begin` up to `end`, in blocks, as a stream for Falcon."""

    def __init__(self, store: "Store", file: int, begin: int, end: int) -> None:
        self._store = store
        self._file = file
        self._position = begin
        self._end = end

    def __aiter__(self) -> "Download":
        return self

    async def __anext__(self) -> bytes:
        amount = min(BLOCK // 4, self._end - self._position)
        block = await self._store.run(os.pread, self._file, amount, self._position) if amount > 0 else b""
        if not block:
            raise StopAsyncIteration
        self._position += len(block)
        return block

    async def close(self) -> None:
        """Close the file, after everything was sent or the client has disconnected."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        if self._file >= 0:  # never streamed: the client disconnected before the first byte
            os.close(self._file)


class Store:
    """The directory of image data."""

    def __init__(self, directory: Path, threads: int = 4) -> None:
        self._directory = directory
        self._sync = DirectorySync(directory)
        self._pool = CountedThreads(threads, "image-data")

    def use(self) -> ThreadUse:
        """Return how the threads are used."""
        return self._pool.use()

    async def start(self) -> None:
        """Create the directory; only the user of the service can read it."""
        await self.run(lambda: self._directory.mkdir(mode=0o700, parents=True, exist_ok=True))

    async def stop(self) -> None:
        """Finish the operations that run."""
        await asyncio.to_thread(self._pool.shutdown)

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: fn(*args, **kwargs))

    async def open_upload(self, image_id: str, upload_id: str) -> Upload:
        """Create the file of a new upload."""
        return await self.run(Upload, self._directory, image_id, upload_id, self._sync)

    def path(self, image_id: str) -> Path:
        """Return the file of an image's data."""
        return self._directory / image_id

    async def open_download(self, image_id: str, begin: int, end: int) -> Download:
        """Open the file of an image; raise FileNotFoundError."""
        file = await self.run(os.open, self._directory / image_id, os.O_RDONLY | os.O_CLOEXEC)
        return Download(self, file, begin, end)

    async def files(self) -> list[str]:
        """Return the names of all files."""
        return await self.run(os.listdir, self._directory)

    async def is_under_way(self, image_id: str, upload_id: str) -> bool:
        """Return whether an upload still runs, in any process."""
        part = self._directory / f"{image_id}.{upload_id}.part"
        # In this order, because an upload renames its file before it ends.
        return await self.run(lambda: _is_locked(part) or _is_locked(self._directory / image_id))

    async def is_locked(self, name: str) -> bool:
        """Return whether an upload has locked a file."""
        return await self.run(_is_locked, self._directory / name)

    async def remove(self, name: str) -> bool:
        """Remove a file and return True; return False if there is none."""
        try:
            await self.run(os.unlink, self._directory / name)
        except FileNotFoundError:
            return False
        return True


def _create_locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
        except BlockingIOError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # a sweep has taken the new file for an old one
        path.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(file)


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
