"""Connecting hosts to volumes: exports and the `connection_info` of attachments."""

import asyncio
import logging
from typing import Any, Final

import msgspec

from micronova.embedded.volume import attachment_queries
from micronova.embedded.volume.backend.exports import Connection, Export, Exports, NBDConnection
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import Volume
from micronova.embedded.volume.qos_specs import front_end_specs
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.errors import Invalid, MicronovaError, Unavailable

log = logging.getLogger(__name__)

MODES = ("rw", "ro")
PAUSE: Final = 1.0  # seconds before the next attempt to serve volumes


class Connector:
    """Serves the volumes that are attached, and no others."""

    def __init__(self, core: Core, exports: Exports | None) -> None:
        """Without `exports` volumes cannot be connected."""
        self._core = core
        self._exports = exports
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve what is attached, now and after each restart of the exporter."""
        if self._exports is not None:
            self._task = keep_running(self._follow, name="volume-exports", clock=self._core.clock)

    async def stop(self) -> None:
        """Stop; volumes are still served."""
        if self._task is not None:
            await end_tasks(self._task)

    async def describe(self, volume: Volume, connector: dict[str, Any], mode: str) -> Connection:
        """Return how the host that a connector describes will reach a volume; raise Invalid."""
        if self._exports is None:
            raise Invalid("This cloud does not export volumes: they cannot be connected to hosts.")
        if not isinstance(connector.get("host"), str) or not connector["host"]:
            raise Invalid("Invalid input for field/attribute connector: it must name the host.")
        return NBDConnection(
            volume_id=volume.id,
            socket_path=self._exports.socket(volume.id),
            export_name=volume.id,
            access_mode=mode,
            qos_specs=await self._core.database.read(front_end_specs, volume.volume_type_id),
        )

    async def connect(self, volume: Volume) -> None:
        """Serve a volume, after the attachment is recorded: what is recorded is served, whoever is interrupted."""
        if self._exports is not None:
            await self._exports.ensure(Export(volume_id=volume.id, readonly=bool(volume.readonly)))

    async def resize(self, volume_id: str, size: int) -> None:
        """Show those who use a volume that its file has this many bytes now."""
        if self._exports is not None:
            await self._exports.resize(volume_id, size)

    async def disconnect(self, volume: Volume) -> None:
        """Stop serving a volume, after its attachment was removed, unless another attachment has a connection to it."""
        if self._exports is None or volume.id in await self._connected():
            return
        await self._exports.remove(volume.id)
        found = (await self._connected()).get(volume.id)
        if found is not None:  # another request has connected it meanwhile
            await self._exports.ensure(found)

    async def _connected(self) -> dict[str, Export]:
        found = await self._core.database.read(attachment_queries.connected, self._core.host)
        return {id: Export(volume_id=id, readonly=readonly) for id, readonly in found}

    async def _follow(self) -> None:
        assert self._exports is not None
        while True:
            lost = asyncio.ensure_future(self._exports.lost())
            try:
                await self._reconcile(self._exports)
                await lost
            except Unavailable as error:
                log.warning("volumes cannot be served for the moment: %s", error)
                await self._core.clock.sleep(PAUSE)
            finally:
                lost.cancel()
                await asyncio.wait({lost})

    async def _reconcile(self, exports: Exports) -> None:
        """Serve all volumes with a connection, and no others."""
        served = await exports.served()
        connected = await self._connected()
        for export in connected.values():
            try:
                await exports.ensure(export)
            except (MicronovaError, OSError) as error:
                if isinstance(error, Unavailable):
                    raise
                log.error("volume %s cannot be served: %s", export.volume_id, error)
        for volume_id in served - connected.keys():
            if volume_id not in await self._connected():
                log.info("volume %s is not attached any more: its export ends", volume_id)
                await exports.remove(volume_id)


def check_mode(volume: Volume, mode: str | None) -> str:
    """Return the mode of an attachment; raise Invalid if the volume does not allow it."""
    if mode is None:
        return "ro" if volume.readonly else "rw"
    if mode not in MODES:
        raise Invalid(f"Invalid input for field/attribute mode: '{mode[:64]}' is neither rw nor ro.")
    if mode == "rw" and volume.readonly:
        raise Invalid(f"Invalid volume: Volume {volume.id} is read-only: attach it with mode ro.")
    return mode


def flat(connection: Connection, attachment_id: str) -> dict[str, Any]:
    """Return a connection as an attachment has it: all in one object."""
    return {**msgspec.to_builtins(connection), "attachment_id": attachment_id}


def nested(connection: Connection) -> dict[str, Any]:
    """Return a connection as os-initialize_connection answers it: the type, and the data beside it."""
    data = msgspec.to_builtins(connection)
    return {"driver_volume_type": data.pop("driver_volume_type"), "data": data}
