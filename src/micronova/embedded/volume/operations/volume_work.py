"""The operations on volumes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from micronova.embedded.common.compute_events import Event
from micronova.embedded.volume.backend.capabilities import satisfy
from micronova.embedded.volume.backend.files import SNAPSHOTS, VOLUMES, TooMuchData
from micronova.embedded.volume.backend.luks import header_size
from micronova.embedded.volume.encryption import key_after_copy, key_of, load_cipher
from micronova.embedded.volume.model import (
    AVAILABLE,
    DOWNLOADING,
    ERROR_EXTENDING,
    GIB,
    IN_USE,
    Operation,
    ResourceColumns,
    Volume,
)
from micronova.embedded.volume.operations import messages
from micronova.embedded.volume.operations.base import IMAGE, Apply, Attempt, Deletion, Failed, OperationKind
from micronova.embedded.volume.operations.messages import Action, Detail
from micronova.embedded.volume.operations.payloads import (
    CreateVolumePayload,
    ExtendVolumePayload,
    ReimageVolumePayload,
    UploadVolumePayload,
)
from micronova.embedded.volume.operations.volume_events import EXTENDED, REIMAGED
from micronova.embedded.volume.store import (
    attachment_queries,
    quotas,
    service_queries,
    snapshot_queries,
    type_queries,
    volume_queries,
)
from micronova.imageformat.inspector import RAW_FORMATS, inspect, refuse
from micronova.objects.errors import Invalid, MicronovaError, Unavailable

_OVERHEAD: Final = 64 << 20  # bytes by which the file of an image may be larger than its disk


@contextlib.contextmanager
def _calling_images() -> Iterator[None]:
    """Raise Failed if the image service refuses. If it does not answer, the work is repeated."""
    try:
        yield
    except Unavailable:
        raise
    except MicronovaError as error:
        raise Failed(Detail.NO_IMAGE, str(error)) from error


@contextlib.contextmanager
def _reading_image() -> Iterator[None]:
    """Raise Failed if the data of an image does not have the declared format, or is unsafe."""
    try:
        yield
    except Invalid as error:
        raise Failed(Detail.IMAGE_REFUSED, str(error)) from error


class VolumeKind(OperationKind):
    """An operation that changes one volume."""

    resource = messages.Resource.VOLUME
    directory = VOLUMES
    rows = volume_queries.ROWS

    async def volume(self, operation: Operation) -> Volume:
        """Return the volume, whose row exists for as long as the operation does."""
        return await self.existing(volume_queries.get, operation.resource_id)

    def events_of(self, volume: Volume, name: str, now: int) -> list[Event]:
        """Return the events that tell compute of a change of a volume: one for each server that has it."""
        servers = sorted({each.instance_uuid for each in volume.attachments if each.instance_uuid})
        return [
            Event(id=self.core.new_id(), name=name, server_id=server, tag=volume.id, created_at=now)
            for server in servers
        ]


class FileMaker(VolumeKind):
    """An operation that makes a file from an image, or an empty encrypted file."""

    async def make_encrypted(self, attempt: Attempt, volume: Volume, image: tuple[Path, str] | None = None) -> None:
        """Make or replace the file of an encrypted volume: from an inspected image and its format, or empty."""
        volume_type = await self.core.database.read(type_queries.get, volume.volume_type_id)
        assert volume_type is not None
        cipher, key = await load_cipher(self.core, volume_type), key_of(volume)
        if cipher is None or key is None or self.core.keys is None or self.core.luks is None:
            raise Failed(Detail.NO_KEY, "The service has no key to encrypt the volume with.")
        passphrase, size = self.core.keys.open(key), volume.size * GIB
        part = self.files.part(VOLUMES, volume.id, attempt.operation.id)
        await self.core.luks.format(part, size, cipher.cipher, passphrase)
        if image is not None:
            with _reading_image():
                await self.core.luks.write(*image, part, passphrase, size)
        await self.files.complete(part, VOLUMES, volume.id, size + await self.files.run(header_size, part))


class ImageReader(FileMaker):
    """An operation that fills a volume with an image."""

    async def write_image(self, attempt: Attempt, volume: Volume, image_id: str, declared: str) -> None:
        """Make the file of a volume from an image whose `disk_format` is declared, or replace the file."""
        operation, size = attempt.operation, volume.size * GIB
        if self.images is None:
            raise Unavailable("There is no image service.")
        received = self.files.part(VOLUMES, volume.id, operation.id, IMAGE)
        try:
            with _calling_images():
                chunks = self.images.download(image_id)
                await self.files.receive(chunks, received, size + _OVERHEAD, attempt.reporter(size))
        except TooMuchData:
            raise Failed(Detail.IMAGE_TOO_LARGE) from None
        info = await self.files.run_long(inspect, received)
        if (info.virtual_size or 0) > size:
            raise Failed(Detail.IMAGE_TOO_LARGE)
        with _reading_image():
            refuse(info, declared)
        if volume.encryption_key_id is not None:
            await self.make_encrypted(attempt, volume, (received, "raw" if declared in RAW_FORMATS else declared))
            await self.files.remove(VOLUMES, received.name)
            return
        part = received
        if declared not in RAW_FORMATS:
            part = self.files.part(VOLUMES, volume.id, operation.id)
            with _reading_image():
                await self.images.convert(received, declared, part, size)
            await self.files.remove(VOLUMES, received.name)
        await self.files.complete(part, VOLUMES, volume.id, size)


class CreateVolume(ImageReader):
    """Makes the file of a new volume."""

    name = "create_volume"
    action = Action.CREATE_VOLUME

    async def run(self, attempt: Attempt) -> Apply:
        """Make the file: empty, as a copy, or from an image."""
        operation = attempt.operation
        volume = await self.volume(operation)
        size = volume.size * GIB
        volume_type = await self.core.database.read(type_queries.get, volume.volume_type_id)
        disabled = await self.core.database.read(service_queries.is_disabled, volume.host)
        if disabled or (volume_type is not None and not satisfy(volume_type.extra_specs)):
            raise Failed(Detail.NO_BACKEND)
        payload = CreateVolumePayload.of(operation)
        if payload.image_id is not None:
            await self._from_image(attempt, volume, payload.image_id, payload.disk_format or "raw")
        elif payload.source_directory is not None:
            source = self.files.path(payload.source_directory, operation.source_id or "")
            size = await self.file_size(volume.size, volume.encryption_key_id, source)
            await self.files.create_copy(source, VOLUMES, volume.id, operation.id, size, attempt.reporter(size))
        elif volume.encryption_key_id is not None:
            if not await self.files.exists(VOLUMES, volume.id):
                await self.make_encrypted(attempt, volume)
        else:
            await self.files.create_blank(VOLUMES, volume.id, operation.id, size)
        return lambda conn, now: self.rows.set_status(conn, volume.id, AVAILABLE, now)

    async def _from_image(self, attempt: Attempt, volume: Volume, image_id: str, disk_format: str) -> None:
        if await self.files.exists(VOLUMES, volume.id):
            return
        await self.core.database.write(self.rows.set_status, volume.id, DOWNLOADING, self.core.now())
        await self.write_image(attempt, volume, image_id, disk_format)


class ReimageVolume(ImageReader):
    """Replaces the file of a volume by the data of an image."""

    name = "reimage_volume"
    action = Action.REIMAGE_VOLUME

    async def run(self, attempt: Attempt) -> Apply:
        """Write the image; until the new file is complete, the volume is what it was."""
        operation = attempt.operation
        volume = await self.volume(operation)
        await self.export_manager.end_connections(volume.id)
        payload = ReimageVolumePayload.of(operation)
        await self.write_image(attempt, volume, payload.image_id, payload.disk_format)

        def done(conn: sa.Connection, now: int) -> list[Event]:
            found = volume_queries.get(conn, volume.id)
            if found is None:
                return []
            attachment_queries.end_work(conn, volume.id, now, bootable=True, image_metadata=payload.image_metadata)
            return self.events_of(found, REIMAGED, now)

        return done


class DeleteVolume(VolumeKind, Deletion):
    """Removes the file of a volume, then its row."""

    name = "delete_volume"
    action = Action.DELETE_VOLUME

    async def prepare(self, id: str) -> None:
        """Stop serving the volume; raise Failed if a snapshot that was to be deleted before is still there."""
        if await self.core.database.read(snapshot_queries.of_volume, id):
            raise Failed(Detail.HAS_SNAPSHOTS)
        await self.export_manager.end_connections(id)

    def forget(self, conn: sa.Connection, id: str) -> None:
        """Delete the row and release the quota."""
        if volume := volume_queries.delete(conn, id):
            quotas.release(conn, volume.project_id, quotas.volume(volume.volume_type_id, volume.size))


class ExtendVolume(VolumeKind):
    """Makes the file of a volume larger, and tells those who use it."""

    name = "extend_volume"
    action = Action.EXTEND_VOLUME
    failure_status = ERROR_EXTENDING

    async def run(self, attempt: Attempt) -> Apply:
        """Make the file larger, then serve it with its new size; compute is told last, for guests that have it."""
        volume_id, payload = attempt.operation.resource_id, ExtendVolumePayload.of(attempt.operation)
        size, path = payload.size, self.files.path(VOLUMES, volume_id)
        length = await self.file_size(size, (await self.volume(attempt.operation)).encryption_key_id, path)
        await self.files.grow(VOLUMES, volume_id, length)
        await self.export_manager.resize(volume_id, length)

        def done(conn: sa.Connection, now: int) -> list[Event]:
            volume = volume_queries.get(conn, volume_id)
            if volume is None:
                return []
            attachment_queries.end_work(conn, volume_id, now, size=max(size, volume.size))
            # An administrator may have set the status, so that two extends were recorded at the same size.
            grown = max(size - volume.size, 0)
            self._release(conn, volume, payload.charged - grown)
            return self.events_of(volume, EXTENDED, now)

        return done

    def give_back(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Give back what was charged for it."""
        if volume := volume_queries.get(conn, operation.resource_id):
            self._release(conn, volume, ExtendVolumePayload.of(operation).charged)

    def _release(self, conn: sa.Connection, volume: Volume, size: int) -> None:
        quotas.release(conn, volume.project_id, quotas.volume(volume.volume_type_id, size, 0))


class RevertVolume(VolumeKind):
    """Replaces the file of a volume by a copy of its snapshot."""

    name = "revert_volume"
    action = Action.REVERT_VOLUME

    async def run(self, attempt: Attempt) -> Apply:
        """Copy the snapshot; until the copy is complete, the volume is what it was."""
        operation = attempt.operation
        volume = await self.volume(operation)
        snapshot = await self.existing(snapshot_queries.get, operation.source_id or "")
        source = self.files.path(SNAPSHOTS, snapshot.id)
        size = await self.file_size(volume.size, snapshot.encryption_key_id, source)
        values: ResourceColumns = {"status": AVAILABLE, **key_after_copy(self.core, volume, snapshot)}
        await self.export_manager.end_connections(volume.id)
        await self.files.replace_by_copy(source, VOLUMES, volume.id, operation.id, size, attempt.reporter(size))
        return lambda conn, now: volume_queries.touch(conn, volume.id, values, now)


class UploadVolume(VolumeKind):
    """Uploads a volume as the data of an image that the request has created."""

    name = "upload_volume"
    action = Action.COPY_VOLUME_TO_IMAGE

    async def run(self, attempt: Attempt) -> Apply:
        """Upload the file, unless an attempt before has done it."""
        operation = attempt.operation
        payload = UploadVolumePayload.of(operation)
        volume = await self.volume(operation)
        if self.images is None:
            raise Unavailable("There is no image service.")
        with _calling_images():
            status = await self.images.status(payload.image_id)
        if status == "active":
            return self._end_work(operation)
        if status is None:
            raise Failed(Detail.NO_IMAGE)
        size = volume.size * GIB
        report = attempt.reporter(size)
        live = payload.status == IN_USE and self.files.live_copies is not None
        path = self.files.path(VOLUMES, volume.id)
        if live:
            path = await self.files.copy_at_one_moment(volume.id, operation.id, report)
        try:
            with _calling_images():
                await self.images.upload(payload.image_id, self.files.chunks(path, report), size)
        finally:
            if live:
                await self.files.discard(path)
        return self._end_work(operation)

    def _end_work(self, operation: Operation) -> Apply:
        return lambda conn, now: attachment_queries.end_work(conn, operation.resource_id, now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Leave the volume as it was; the message says that the image has no data."""
        self._end_work(operation)(conn, now)
