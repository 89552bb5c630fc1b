"""Actions that record work on the file of a volume: extend, revert to a snapshot, write an image, make an image."""

from typing import Annotated, Any, Final, Literal

import sqlalchemy as sa
from msgspec import Meta

from micronova.embedded.volume import states
from micronova.embedded.volume.api.action_routes import action_route
from micronova.embedded.volume.api.request_bodies import Body, Flag, Size, Text, Uuid, gibibytes, truth, uuid
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.images import Images, check_fits, find, metadata_of, properties_of
from micronova.embedded.volume.model import AVAILABLE, IN_USE, RESERVED, Volume
from micronova.embedded.volume.operations.base import OperationKind
from micronova.embedded.volume.operations.payloads import (
    ExtendVolumePayload,
    Payload,
    ReimageVolumePayload,
    UploadVolumePayload,
)
from micronova.embedded.volume.operations.volume_work import ExtendVolume, ReimageVolume, RevertVolume, UploadVolume
from micronova.embedded.volume.store import (
    attachment_queries,
    operation_queries,
    quotas,
    snapshot_queries,
    volume_queries,
)
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import SERVICE_ROLE, Route
from micronova.http.versions import since
from micronova.objects.clock import micros
from micronova.objects.errors import Conflict, Invalid

IMAGE_SECONDS: Final = 60.0  # within which a request creates the image of a volume, after its operation is written


class Extend(Body):
    """The arguments of os-extend."""

    new_size: Size


class Upload(Body):
    """The arguments of os-volume_upload_image."""

    versions = {"visibility": since(1), "protected": since(1)}

    image_name: Annotated[str, Meta(min_length=1, max_length=255)]
    force: Flag = False
    disk_format: Literal["raw", "vmdk", "vdi", "qcow2", "vhd", "vhdx", "ploop"] = "raw"
    container_format: Text | None = "bare"
    visibility: Literal["community", "public", "private", "shared"] | None = None
    protected: Flag | None = None


class Reimage(Body):
    """The arguments of os-reimage."""

    image_id: Uuid
    reimage_reserved: Flag = False


class Revert(Body):
    """The arguments of revert."""

    snapshot_id: Text | None = None


class FileActions:
    """The handlers of these actions."""

    def __init__(self, core: Core, images: Images | None) -> None:
        self._core = core
        self._images = images

    def routes(self) -> list[Route]:
        """Return the routes."""
        upload = "volume_extension:volume_actions:upload_image"
        return [
            action_route("os-extend", self.extend, "volume:extend", Extend),
            action_route("os-reimage", self.reimage, "volume:reimage", Reimage, versions=since(68)),
            action_route("revert", self.revert, "volume:revert_to_snapshot", Revert, versions=since(40)),
            action_route("os-volume_upload_image", self.upload, upload, Upload),
        ]

    async def extend(self, request: Request, volume_id: str) -> None:
        """Make a volume larger."""
        size = gibibytes(request.body.arguments.new_size, "new_size")
        operation_id = self._core.new_id()

        async def try_once() -> None:
            volume = await self._core.load_volume(request, volume_id)
            if request.minor >= 42 and volume.status == IN_USE:
                request.authorize(volume.target, "volume:extend_attached_volume")
            states.check_volume(volume, "extend" if request.minor < 42 else "extend_attached")
            if size <= volume.size:
                raise Invalid(
                    f"New size for extend must be greater than current size: {size} is not above {volume.size}."
                )
            await self._core.record_operation(
                self._record_extend, volume, size, operation_id, request.context.request_id
            )

        await retry_or_conflict(f"volume {volume_id}", try_once)

    def _record_extend(
        self, conn: sa.Connection, volume: Volume, size: int, operation_id: str, request_id: str
    ) -> None:
        payload = ExtendVolumePayload(size=size, charged=size - volume.size)
        if self._record(conn, ExtendVolume, volume, operation_id, request_id, "extend", payload=payload):
            defaults = self._core.settings.quotas
            quotas.check_size(conn, volume.project_id, size, defaults)
            more = quotas.volume(volume.volume_type_id, size - volume.size, 0)
            quotas.charge(conn, volume.project_id, more, defaults)

    async def revert(self, request: Request, volume_id: str) -> None:
        """Return a volume to the content of its newest snapshot."""
        named = request.body.arguments.snapshot_id
        operation_id = self._core.new_id()

        async def try_once() -> None:
            volume = await self._core.load_volume(request, volume_id)
            found = await self._core.database.read(snapshot_queries.of_volume, volume.id)
            if not found or named != found[0].id:
                raise Invalid(f"Volume {volume_id} can be reverted to its newest snapshot only: name that one.")
            if found[0].size != volume.size:
                raise Invalid(f"Volume {volume_id} has another size than its newest snapshot: it cannot be reverted.")
            try:
                states.check_volume(volume, "revert")
            except Invalid as error:
                raise Conflict(error.message) from None
            if found[0].status != AVAILABLE:
                raise Conflict(f"Snapshot {found[0].id} is {found[0].status}: it must be {AVAILABLE}.")
            await self._core.record_operation(
                self._record,
                RevertVolume,
                volume,
                operation_id,
                request.context.request_id,
                "revert",
                source_id=found[0].id,
            )

        await retry_or_conflict(f"volume {volume_id}", try_once)

    async def reimage(self, request: Request, volume_id: str) -> None:
        """Replace the content of a volume by an image."""
        asked: Reimage = request.body.arguments
        if self._images is None:
            raise Invalid("There is no image service: a volume cannot be made from an image.")
        volume = await self._core.load_volume(request, volume_id)
        action = "reimage_reserved" if truth(asked.reimage_reserved) else "reimage"
        states.check_volume(volume, action)
        # A service does not have the user's token. It has checked that the user may see the image.
        named = uuid(asked.image_id)
        of_service = SERVICE_ROLE in request.context.roles
        image = await (
            self._images.show_as_service(named) if of_service else find(self._images, named, request.context.token)
        )
        check_fits(image, volume.size)
        payload = ReimageVolumePayload(
            image_id=image["id"],
            disk_format=image["disk_format"],
            image_metadata=metadata_of(image),
        )
        operation_id = self._core.new_id()

        async def try_once() -> None:
            found = await self._core.load_volume(request, volume_id)
            states.check_volume(found, action)
            if found.status == RESERVED:
                request.authorize(found.target, "volume:reimage_reserved")
            await self._core.record_operation(
                self._record, ReimageVolume, found, operation_id, request.context.request_id, action, payload=payload
            )

        await retry_or_conflict(f"volume {volume_id}", try_once)

    async def upload(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Make an image of a volume."""
        asked: Upload = request.body.arguments
        if self._images is None:
            raise Invalid("There is no image service: no image can be made from a volume.")
        if asked.disk_format != "raw" or asked.container_format not in ("bare", None):
            raise Invalid("Images are made with disk_format raw and container_format bare.")
        volume = await self._core.load_volume(request, volume_id)
        if volume.encryption_key_id is not None:
            raise Invalid(
                f"Invalid volume: Volume {volume_id} is encrypted, so no image can be made from it. Take a snapshot "
                "or a backup."
            )
        action = "force_upload" if truth(asked.force) else "upload"
        states.check_volume(volume, action)
        if asked.visibility == "public":
            request.authorize(volume.target, "volume_extension:volume_actions:upload_public")
        image_id, operation_id = self._core.new_id(), self._core.new_id()
        document = {
            **properties_of(volume.image_metadata),
            "id": image_id,
            "name": asked.image_name,
            "disk_format": "raw",
            "container_format": "bare",
            "min_disk": volume.size,
            "visibility": asked.visibility or "shared",
            "protected": False if asked.protected is None else truth(asked.protected),
        }

        async def try_once() -> Volume:
            found = await self._core.load_volume(request, volume_id)
            states.check_volume(found, action)
            # If this process dies, the operation begins later, and fails if there is no image by then.
            await self._core.record_operation(
                self._record,
                UploadVolume,
                found,
                operation_id,
                request.context.request_id,
                action,
                payload=UploadVolumePayload(image_id=image_id, status=found.status),
                deferred_until=self._core.now() + micros(IMAGE_SECONDS),
            )
            return found

        volume = await retry_or_conflict(f"volume {volume_id}", try_once)
        try:
            image = await self._images.create(document, request.context.token)
        except Exception:
            await self._core.database.write(_end_upload, volume.id, operation_id, self._core.now())
            raise
        await self._core.record_operation(operation_queries.start_deferred, operation_id)
        shown = {
            "id": volume.id,
            "updated_at": iso_micros(volume.updated_at),
            "status": states.VOLUME_ACTIONS[action].during,
            "display_description": volume.description,
            "size": volume.size,
            "volume_type": volume.type_name,
            "image_id": image_id,
            "container_format": "bare",
            "disk_format": "raw",
            "image_name": asked.image_name,
        }
        if request.minor >= 1:
            shown |= {"visibility": image.get("visibility"), "protected": image.get("protected")}
        return {"os-volume_upload_image": shown}

    def _record(
        self,
        conn: sa.Connection,
        kind: type[OperationKind],
        volume: Volume,
        operation_id: str,
        request_id: str,
        action: str,
        payload: Payload | None = None,
        source_id: str | None = None,
        deferred_until: int = 0,
    ) -> bool:
        new = kind.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=volume.id,
            source_id=source_id,
            project_id=volume.project_id,
            request_id=request_id,
            payload=payload,
            deferred_until=deferred_until,
        )
        if new:
            during = states.VOLUME_ACTIONS[action].during
            volume_queries.update(conn, volume, {"status": during}, self._core.now())
        return new


def _end_upload(conn: sa.Connection, volume_id: str, operation_id: str, now: int) -> None:
    """End an upload to an image that could not be created."""
    if operation_queries.remove(conn, operation_id):
        attachment_queries.end_work(conn, volume_id, now)
