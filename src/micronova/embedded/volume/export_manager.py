"""Connecting compute hosts to volumes: exports and the `connection_info` of attachments."""

import asyncio
import logging
from typing import Any

import msgspec

from micronova.embedded.volume.backend.exports import Connection, Export, Exports, NBDConnection
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import Volume
from micronova.embedded.volume.store import connection_queries
from micronova.embedded.volume.store.qos_queries import front_end_specs
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.errors import Invalid, MicronovaError, Unavailable, resource_exhausted

log = logging.getLogger(__name__)

MODES = ("rw", "ro")
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before the next attempt to serve volumes


class ExportManager:
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
        """Return how the compute host that a connector describes will reach a volume; raise Invalid."""
        if self._exports is None:
            raise Invalid("This cloud does not export volumes: they cannot be connected to hosts.")
        if not isinstance(connector.get("host"), str) or not connector["host"]:
            raise Invalid("Invalid input for field/attribute connector: it must name the host.")
        return NBDConnection(
            volume_id=volume.id,
            socket_path=self._exports.socket(volume.id),
            export_name=volume.id,
            access_mode=mode,
            encrypted=volume.encryption_key_id is not None,
            qos_specs=await self._core.database.read(front_end_specs, volume.volume_type_id),
        )

    async def serve(self, volume: Volume) -> None:
        """Serve a volume. The caller has recorded a connection, so `_follow` serves it again after an interruption."""
        if self._exports is not None:
            await self._exports.serve(Export(volume_id=volume.id, readonly=bool(volume.readonly)))

    async def resize(self, volume_id: str, size: int) -> None:
        """Announce the new size of a volume's file, in bytes, to the guests that use it."""
        if self._exports is not None:
            await self._exports.resize(volume_id, size)

    async def end_connections(self, volume_id: str) -> None:
        """End the connections of a volume that no attachment has, because its file goes; stop serving it if unused."""
        if self._exports is not None:
            await self._core.database.write(connection_queries.end, volume_id)
            await self.stop_serving_unused(volume_id)

    async def stop_serving_unused(self, volume_id: str) -> None:
        """Stop serving a volume unless it has a connection. A caller that ends a connection removes its row first."""
        if self._exports is None or await self._connected(volume_id):
            return
        await self._exports.stop_serving(volume_id)
        for export in await self._connected(volume_id):  # another request has connected it meanwhile
            await self._exports.serve(export)

    async def _connected(self, volume_id: str | None = None) -> list[Export]:
        """Return the exports of the volumes here that have a connection: of one, or of all."""
        return await self._core.database.read(connection_queries.connected, self._core.host, volume_id)

    async def _follow(self) -> None:
        assert self._exports is not None
        pause = PAUSE
        while True:
            end = asyncio.ensure_future(self._exports.wait_for_end())
            try:
                await self._reconcile(self._exports)
                pause = PAUSE
                await end
            except Unavailable as error:
                log.warning("volumes cannot be served, next attempt in %g s: %s", pause, error)
                await self._core.clock.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            finally:
                end.cancel()
                await asyncio.wait({end})

    async def _reconcile(self, exports: Exports) -> None:
        """Serve all volumes with a connection, and no others; raise Unavailable if one cannot be served yet."""
        served = await exports.served()
        connected = await self._connected()
        lacking: Unavailable | None = None
        for export in connected:
            try:
                await exports.serve(export)
            except (MicronovaError, OSError) as error:
                lack = error if isinstance(error, Unavailable) else resource_exhausted(error)
                if lack is not None:
                    log.warning("cannot serve volume %s yet: %s", export.volume_id, lack)
                    # Raises Unavailable if the exporter does not answer; else go on with the others.
                    await exports.served()
                    lacking = lack
                    continue
                log.error(
                    "volume %s cannot be served, and the guests that have it wait: %s; remove the cause, then restart "
                    "the volume service",
                    export.volume_id,
                    error,
                )
        for volume_id in served - {export.volume_id for export in connected}:
            if not await self._connected(volume_id):
                log.info("volume %s has no connection any more: it is not served from now on", volume_id)
                await exports.stop_serving(volume_id)
        if lacking is not None:
            raise lacking


def check_mode(volume: Volume, mode: object) -> str:
    """Return the mode of an attachment; raise Invalid if it is none, or if the volume does not allow it."""
    if mode is None:
        return "ro" if volume.readonly else "rw"
    if not isinstance(mode, str) or mode not in MODES:
        raise Invalid(f"Invalid input for field/attribute mode: '{str(mode)[:64]}' is neither rw nor ro.")
    if mode == "rw" and volume.readonly:
        raise Invalid(f"Invalid volume: Volume {volume.id} is read-only: attach it with mode ro.")
    return mode


def as_attachment(connection: Connection, attachment_id: str) -> dict[str, Any]:
    """Return the `connection_info` of an attachment: all fields in one object."""
    return {**msgspec.to_builtins(connection), "attachment_id": attachment_id}


def as_action_answer(connection: Connection) -> dict[str, Any]:
    """Return the `connection_info` that os-initialize_connection answers: the type, and the other fields in `data`."""
    data = msgspec.to_builtins(connection)
    return {"driver_volume_type": data.pop("driver_volume_type"), "data": data}
