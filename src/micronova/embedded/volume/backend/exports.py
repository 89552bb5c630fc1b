"""Exports: how the file of an attached volume reaches a host.

What serves volumes is given to the service, so that a cloud with simulated guests needs no processes.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

OnProgress = Callable[[int], None]
"""Is told, from any thread, how many bytes of a file are written."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A volume that is served, by NBD on a Unix socket, to every guest that it is attached to."""

    volume_id: str
    readonly: bool


class NBDConnection(msgspec.Struct, frozen=True, kw_only=True, tag_field="driver_volume_type", tag="nbd"):
    """How a host of this machine reaches an export: NBD on a Unix socket."""

    volume_id: str
    socket_path: str
    export_name: str
    access_mode: str  # rw or ro
    discard: bool = True
    encrypted: bool = False
    qos_specs: dict[str, str] | None = None  # for the front end


Connection = NBDConnection
"""The `connection_info` of an attachment: a tagged union of all ways to reach a volume."""


class Exports(Protocol):
    """Serves the volumes that are attached. Raises Unavailable if that is not possible for the moment."""

    def socket(self, volume_id: str) -> str:
        """Return the socket of a volume, as the QEMU of a guest sees it."""

    async def serve(self, export: Export) -> None:
        """Serve a volume; return when hosts can connect. Do nothing if it is served already."""

    async def stop_serving(self, volume_id: str) -> None:
        """Stop serving a volume; do nothing if it is not served."""

    async def resize(self, volume_id: str, size: int) -> None:
        """Announce to the guests that use a volume that its file is larger; do nothing if it is not served."""

    async def served(self) -> set[str]:
        """Return the volumes that are served."""

    async def wait_for_end(self) -> None:
        """Return when the exporter has ended, so that the next one has to be told which volumes to serve."""

    @property
    def live_copies(self) -> "LiveCopies | None":
        """What copies volumes that may be in use; None if their files can be copied as they are."""


class LiveCopies(Protocol):
    """Copies the files of volumes while guests write to them."""

    def prepare(self, volume_id: str, name: str) -> Path:
        """Make an empty file for a copy, of the size of the volume, and return it. Blocks."""

    async def copy(self, volume_id: str, name: str, on_progress: OnProgress) -> None:
        """Copy a volume, as it is at one moment, to a file that was prepared."""

    def leftovers(self) -> list[Path]:
        """Return the files of copies, complete or not, that nothing has taken yet. Blocks."""


class SimulatedExports:
    """The exports of a cloud with simulated guests: nobody connects, so nothing is served."""

    live_copies = None

    def __init__(self, directory: Path) -> None:
        """`directory` has the files of volumes."""
        self._sockets = directory / "sockets"

    def socket(self, volume_id: str) -> str:
        """Return a name that nothing listens on."""
        return str(self._sockets / f"{volume_id}.sock")

    async def serve(self, export: Export) -> None:
        """Do nothing."""

    async def stop_serving(self, volume_id: str) -> None:
        """Do nothing."""

    async def resize(self, volume_id: str, size: int) -> None:
        """Do nothing."""

    async def served(self) -> set[str]:
        """Return nothing."""
        return set()

    async def wait_for_end(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()
