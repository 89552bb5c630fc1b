"""The clients of the exporter: the volume service, and the agent of this host."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from micronova.exporter import messages as m
from micronova.exporter import wire
from micronova.objects.errors import MicronovaError, NotFound, Unavailable

ANSWER_SECONDS: Final = 90.0

_replies = msgspec.msgpack.Decoder(m.Reply)


class ExportFailed(MicronovaError):
    """The exporter, or the storage daemon of a volume, refused."""

    code = "export_failed"


class ExporterClient:
    """Asks the exporter of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def ask(self, request: m.Request, descriptors: Sequence[int] = ()) -> m.Reply:
        """Send a request and return the answer; raise NotFound, Unavailable or ExportFailed."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await self._send(request, descriptors)
                try:
                    return await _reply(connection)
                finally:
                    connection.close()
        except TimeoutError:
            raise Unavailable(f"The exporter at {self._path} does not answer.") from None

    async def copy(self, request: m.Copy, descriptors: Sequence[int], report: Callable[[int], None]) -> None:
        """Copy a volume. If the caller is cancelled, the copy is."""
        connection = await self._send(request, descriptors)
        try:
            while not (reply := await _reply(connection)).final:
                report(reply.done)
        finally:
            connection.close()

    async def watch(self) -> None:
        """Return when the exporter that runs now has ended; raise Unavailable if none runs."""
        connection = await self._send(m.Watch(), ())
        try:
            await wire.receive(connection)
        except OSError:
            pass
        finally:
            connection.close()

    async def _send(self, request: m.Request, descriptors: Sequence[int]) -> socket.socket:
        try:
            connection = await wire.connect(self._path)
            try:
                await wire.send(connection, msgspec.msgpack.encode(request), descriptors)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            raise Unavailable(f"The exporter at {self._path} does not answer: {error.strerror}.") from error
        return connection


async def _reply(connection: socket.socket) -> m.Reply:
    try:
        packet, descriptors = await wire.receive(connection)
    except OSError as error:
        raise Unavailable(f"The exporter does not answer: {error.strerror}.") from error
    wire.close(descriptors)
    if not packet:
        raise Unavailable("The exporter has ended.")
    reply = _replies.decode(packet)
    match reply.kind:
        case "":
            return reply
        case "missing":
            raise NotFound(reply.error)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "unavailable":
            raise Unavailable(f"The volume cannot be served for the moment: {reply.error}.")
        case _:
            raise ExportFailed(f"The volume cannot be served: {reply.error}.")


class VolumeAccess:
    """Says which guests of this host may connect to which volumes."""

    def __init__(self, client: ExporterClient) -> None:
        self._client = client

    async def allow(self, volume_id: str, uid: int, *, encrypted: bool = False) -> None:
        """Let the user of a guest connect to a volume.

        Raise Unavailable if it is not served, ExportFailed if QEMU would not get it open.
        """
        try:
            await self._client.ask(m.Allow(volume_id=volume_id, uid=uid, encrypted=encrypted))
        except NotFound as error:
            raise Unavailable(error.message) from error  # the volume service serves it as soon as it can

    async def revoke(self, uid: int, volume_id: str | None = None) -> None:
        """Take away the right of a guest's user to connect to one volume, or to all."""
        await self._client.ask(m.Refuse(uid=uid, volume_id=volume_id))
