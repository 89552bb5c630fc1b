"""Exports of a cloud with real guests: the exporter of this machine serves the files of volumes.

The files stay the service's. It gives the exporter descriptors of a volume's file and of a directory for copies
(`exports/VOLUME`), and an access control list lets the exporter's user open these two, and nothing else here.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from micronova.embedded.volume.backend.exports import Export, OnProgress
from micronova.embedded.volume.backend.files import EXPORTS, VOLUMES, Files
from micronova.exporter import messages as m
from micronova.exporter import wire
from micronova.exporter.access import SetAccess
from micronova.exporter.client import ExporterClient

_READ, _WRITE, _SEARCH = 4, 2, 1


class ExporterExports:
    """The volumes of a directory, served by an exporter."""

    def __init__(self, files: Files, client: ExporterClient, set_access: SetAccess, uid: int, seen_as: Path) -> None:
        """`uid` is the exporter's user, `seen_as` the directory of its sockets as guests' QEMU sees it."""
        self._files = files
        self._client = client
        self._set_access = set_access
        self._uid = uid
        self._seen_as = seen_as

    @property
    def live_copies(self) -> "ExporterExports":
        """Itself: storage daemons copy what they serve."""
        return self

    def socket(self, volume_id: str) -> str:
        """Return the socket of a volume, as the QEMU of a guest sees it."""
        return str(self._seen_as / volume_id / m.SOCKET)

    async def serve(self, export: Export) -> None:
        """Serve a volume."""
        opened = await self._files.run(self._open, export.volume_id)
        with _closing(opened):
            await self._client.ask(m.Serve(volume_id=export.volume_id, readonly=export.readonly), opened)

    async def stop_serving(self, volume_id: str) -> None:
        """Stop serving a volume."""
        await self._client.ask(m.StopServing(volume_id=volume_id))

    async def resize(self, volume_id: str, size: int) -> None:
        """Show those who use a volume that its file has become larger."""
        await self._client.ask(m.Resize(volume_id=volume_id, size=size))

    async def served(self) -> set[str]:
        """Return the volumes that are served."""
        return set((await self._client.ask(m.Served())).volumes)

    async def wait_for_end(self) -> None:
        """Return when the exporter has ended: the next one needs the descriptors."""
        await self._client.watch()

    def prepare(self, volume_id: str, name: str) -> Path:
        """Make an empty file for a copy."""
        path = self._copies_directory(volume_id) / name
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(file, self._files.path(VOLUMES, volume_id).stat().st_size)
        finally:
            os.close(file)
        self._set_access(path, 0o600, {self._uid: _READ | _WRITE})
        return path

    async def copy(self, volume_id: str, name: str, on_progress: OnProgress) -> None:
        """Copy a volume to a file that was prepared."""
        opened = await self._files.run(self._open, volume_id)
        with _closing(opened):
            await self._client.copy(m.Copy(volume_id=volume_id, name=name), opened, on_progress)

    def leftovers(self) -> list[Path]:
        """Return the files of copies that nothing has taken yet."""
        return list((self._files.root / EXPORTS).glob("*/*"))

    def _copies_directory(self, volume_id: str) -> Path:
        directory = self._files.root / EXPORTS / volume_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._set_access(directory, 0o700, {self._uid: _SEARCH})
        return directory

    def _open(self, volume_id: str) -> list[int]:
        file, directory = self._files.path(VOLUMES, volume_id), self._copies_directory(volume_id)
        self._set_access(file, 0o600, {self._uid: _READ | _WRITE})
        opened: list[int] = []
        try:
            for path, flags in ((file, 0), (directory, os.O_DIRECTORY)):
                opened.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | flags))
        except BaseException:
            wire.close(opened)
            raise
        return opened


@contextlib.contextmanager
def _closing(opened: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        wire.close(opened)
