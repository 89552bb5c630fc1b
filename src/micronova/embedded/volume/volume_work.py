"""The operations on volumes."""

from typing import Final

import sqlalchemy as sa

from micronova.embedded.common.compute_events import Event
from micronova.embedded.volume import (
    attachment_queries,
    messages,
    quotas,
    service_rows,
    snapshot_queries,
    type_queries,
    volume_queries,
)
from micronova.embedded.volume.backend.capabilities import satisfy
from micronova.embedded.volume.backend.files import SNAPSHOTS, VOLUMES, TooMuchData
from micronova.embedded.volume.messages import Action, Detail
from micronova.embedded.volume.model import (
    AVAILABLE,
    DOWNLOADING,
    ERROR,
    ERROR_DELETING,
    ERROR_EXTENDING,
    GIB,
    IN_USE,
    Operation,
    Volume,
)
from micronova.embedded.volume.operations import IMAGE, Apply, Failed, OperationKind, Work
from micronova.embedded.volume.volume_events import EXTENDED, REIMAGED
from micronova.imageformat.inspector import inspect, refuse
from micronova.objects.errors import Invalid, Unavailable

_AS_THEY_ARE: Final = ("raw", "iso", "ami")  # formats whose data is that of the disk
_OVERHEAD: Final = 64 << 20  # bytes that the file of an image may have more than its disk


class VolumeKind(OperationKind):
    """An operation that changes one volume."""

    resource = messages.Resource.VOLUME
    directory = VOLUMES

    async def volume(self, operation: Operation) -> Volume:
        """Return the volume, whose row exists for as long as the operation does."""
        volume = await self.core.database.read(volume_queries.get, operation.resource_id)
        assert volume is not None
        return volume

    def events_of(self, volume: Volume, name: str, now: int) -> list[Event]:
        """Return the events that tell compute of a change of a volume: one for each server that has it."""
        servers = sorted({each.instance_uuid for each in volume.attachments if each.instance_uuid})
        return [
            Event(id=self.core.new_id(), name=name, server_id=server, tag=volume.id, created_at=now)
            for server in servers
        ]


class ImageReader(VolumeKind):
    """An operation that fills a volume with an image."""

    async def write_image(self, work: Work, volume: Volume) -> None:
        """Make the file of a volume of an image, or replace it by one."""
        operation, size = work.operation, volume.size * GIB
        if self.images is None:
            raise Unavailable("There is no image service.")
        image_id, declared = operation.payload["image_id"], operation.payload["disk_format"]
        received = self.files.part(VOLUMES, volume.id, operation.id, IMAGE)
        try:
            chunks = self.images.download(image_id)
            await self.files.receive(chunks, received, size + _OVERHEAD, work.reporter(size))
        except TooMuchData:
            raise Failed(Detail.IMAGE_TOO_LARGE) from None
        info = await self.files.run_long(inspect, received)
        if (info.virtual_size or 0) > size:
            raise Failed(Detail.IMAGE_TOO_LARGE)
        try:
            refuse(info, declared)
        except Invalid as error:
            raise Failed(Detail.IMAGE_REFUSED, str(error)) from None
        part = received
        if declared not in _AS_THEY_ARE:
            part = self.files.part(VOLUMES, volume.id, operation.id)
            await self.images.convert(received, declared, part, size)
            await self.files.remove(VOLUMES, received.name)
        await self.files.complete(part, VOLUMES, volume.id, size)


class CreateVolume(ImageReader):
    """Makes the file of a new volume."""

    name = "create_volume"
    action = Action.CREATE_VOLUME

    async def run(self, work: Work) -> Apply:
        """Make the file: empty, as a copy, or from an image."""
        operation = work.operation
        volume = await self.volume(operation)
        size = volume.size * GIB
        volume_type = await self.core.database.read(type_queries.get, volume.volume_type_id)
        disabled = await self.core.database.read(service_rows.is_disabled, volume.host)
        if disabled or (volume_type is not None and not satisfy(volume_type.extra_specs)):
            raise Failed(Detail.NO_BACKEND)
        if "image_id" in operation.payload:
            await self._from_image(work, volume)
        elif "copy" in operation.payload:
            source = self.files.path(operation.payload["copy"], operation.source_id or "")
            await self.files.create_copy(source, VOLUMES, volume.id, operation.id, size, work.reporter(size))
        else:
            await self.files.create_blank(VOLUMES, volume.id, operation.id, size)
        return lambda conn, now: volume_queries.record(conn, volume.id, {"status": AVAILABLE}, now)

    async def _from_image(self, work: Work, volume: Volume) -> None:
        if await self.files.exists(VOLUMES, volume.id):
            return
        await self.core.database.write(volume_queries.record, volume.id, {"status": DOWNLOADING}, self.core.now())
        await self.write_image(work, volume)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show the volume as failed; it counts until it is deleted."""
        volume_queries.record(conn, operation.resource_id, {"status": ERROR}, now)


class ReimageVolume(ImageReader):
    """Replaces the file of a volume by the data of an image."""

    name = "reimage_volume"
    action = Action.REIMAGE_VOLUME

    async def run(self, work: Work) -> Apply:
        """Write the image; until the new file is complete, the volume is what it was."""
        operation = work.operation
        volume = await self.volume(operation)
        await self.connector.disconnect(volume.id)
        await self.write_image(work, volume)
        metadata = dict(operation.payload["image_metadata"])

        def done(conn: sa.Connection, now: int) -> list[Event]:
            found = volume_queries.get(conn, volume.id)
            if found is None:
                return []
            attachment_queries.end_work(conn, volume.id, now, bootable=True, image_metadata=metadata)
            return self.events_of(found, REIMAGED, now)

        return done

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that it failed; the volume is what it was."""
        volume_queries.record(conn, operation.resource_id, {"status": ERROR}, now)


class DeleteVolume(VolumeKind):
    """Removes the file of a volume, then its row."""

    name = "delete_volume"
    action = Action.DELETE_VOLUME

    async def run(self, work: Work) -> Apply:
        """Remove the file, unless a snapshot that was to be deleted before is still there."""
        volume_id = work.operation.resource_id
        if await self.core.database.read(snapshot_queries.of_volume, volume_id):
            raise Failed(Detail.HAS_SNAPSHOTS)
        await self.connector.disconnect(volume_id)
        await self.files.remove(VOLUMES, volume_id)

        def forget(conn: sa.Connection, now: int) -> None:
            volume = volume_queries.delete(conn, volume_id)
            if volume is not None:
                quotas.release(conn, volume.project_id, quotas.volume(volume.volume_type_id, volume.size))

        return forget

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that the volume is still there."""
        volume_queries.record(conn, operation.resource_id, {"status": ERROR_DELETING}, now)


class ExtendVolume(VolumeKind):
    """Makes the file of a volume larger, and tells those who use it."""

    name = "extend_volume"
    action = Action.EXTEND_VOLUME

    async def run(self, work: Work) -> Apply:
        """Make the file larger, then serve it with its new size; compute is told last, for guests that have it."""
        operation = work.operation
        volume_id, size = operation.resource_id, int(operation.payload["size"])
        await self.files.grow(VOLUMES, volume_id, size * GIB)
        await self.connector.resize(volume_id, size * GIB)

        def done(conn: sa.Connection, now: int) -> list[Event]:
            volume = volume_queries.get(conn, volume_id)
            if volume is None:
                return []
            attachment_queries.end_work(conn, volume_id, now, size=max(size, volume.size))
            # An administrator may have set the status, so that two extends were begun at the same size.
            grown = max(size - volume.size, 0)
            self._release(conn, volume, int(operation.payload["charged"]) - grown)
            return self.events_of(volume, EXTENDED, now)

        return done

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that it failed, and give back what was charged for it."""
        volume_queries.record(conn, operation.resource_id, {"status": ERROR_EXTENDING}, now)
        self.cancelled(conn, operation, now)

    def cancelled(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Give back what was charged for it."""
        if volume := volume_queries.get(conn, operation.resource_id):
            self._release(conn, volume, int(operation.payload["charged"]))

    def _release(self, conn: sa.Connection, volume: Volume, size: int) -> None:
        quotas.release(conn, volume.project_id, quotas.volume(volume.volume_type_id, size, 0))


class RevertVolume(VolumeKind):
    """Replaces the file of a volume by a copy of its snapshot."""

    name = "revert_volume"
    action = Action.REVERT_VOLUME

    async def run(self, work: Work) -> Apply:
        """Copy the snapshot; until the copy is complete, the volume is what it was."""
        operation = work.operation
        volume = await self.volume(operation)
        source = self.files.path(SNAPSHOTS, operation.source_id or "")
        size = volume.size * GIB
        await self.connector.disconnect(volume.id)
        await self.files.replace_by_copy(source, VOLUMES, volume.id, operation.id, size, work.reporter(size))
        return lambda conn, now: volume_queries.record(conn, volume.id, {"status": AVAILABLE}, now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that it failed; the volume is what it was."""
        volume_queries.record(conn, operation.resource_id, {"status": ERROR}, now)


class UploadVolume(VolumeKind):
    """Uploads a volume as the data of an image that the request has created."""

    name = "upload_volume"
    action = Action.COPY_VOLUME_TO_IMAGE

    async def run(self, work: Work) -> Apply:
        """Upload the file, unless an attempt before has done it."""
        operation = work.operation
        volume = await self.volume(operation)
        if self.images is None:
            raise Unavailable("There is no image service.")
        status = await self.images.status(operation.payload["image_id"])
        if status == "active":
            return self._back(operation)
        if status is None:
            raise Failed(Detail.NO_IMAGE)
        size = volume.size * GIB
        report = work.reporter(size)
        live = operation.payload["status"] == IN_USE and self.files.live_copies is not None
        path = self.files.path(VOLUMES, volume.id)
        if live:
            path = await self.files.freeze(volume.id, operation.id, report)
        try:
            await self.images.upload(operation.payload["image_id"], self.files.chunks(path, report), size)
        finally:
            if live:
                path.unlink(missing_ok=True)
        return self._back(operation)

    def _back(self, operation: Operation) -> Apply:
        return lambda conn, now: attachment_queries.end_work(conn, operation.resource_id, now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Leave the volume as it was; the message says that the image has no data."""
        self._back(operation)(conn, now)
