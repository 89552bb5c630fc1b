"""What a new volume is made of: nothing, an image, another volume, a snapshot, or a backup."""

from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from micronova.embedded.common.revisions import Changed
from micronova.embedded.volume import images
from micronova.embedded.volume.backend.files import BACKUPS, SNAPSHOTS, VOLUMES
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.images import Images
from micronova.embedded.volume.model import AVAILABLE, IN_USE
from micronova.embedded.volume.tables import backups, snapshots, volumes
from micronova.http.request import Request
from micronova.objects.errors import Invalid

_READABLE: Final = (AVAILABLE, IN_USE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a volume is made of, checked for the caller of a request."""

    size: int  # GiB
    volume_type_id: str | None = None  # of the source, which the new volume gets unless another is named
    source_id: str | None = None  # of the volume, snapshot or backup that the operation reads
    rows: sa.Table | None = None  # the table that has it
    payload: dict[str, Any] = field(default_factory=dict)
    bootable: bool = False
    image_metadata: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)  # of the volume's row


def lock_source(conn: sa.Connection, source: Source) -> None:
    """Keep a source as it is until the transaction ends; from then on the operation keeps it.

    Raise Changed if it cannot be read any more, or is larger than the new volume.
    """
    if source.rows is None:
        return
    columns = source.rows.c
    chosen = sa.select(columns.size, columns.status).where(columns.id == source.source_id)
    found = conn.execute(chosen.with_for_update(read=True)).one_or_none()
    if found is None or found.size > source.size or found.status not in _READABLE:
        raise Changed


class Sources:
    """Finds what volumes are made of."""

    def __init__(self, core: Core, image_service: Images | None) -> None:
        self._core = core
        self._images = image_service

    async def find(
        self,
        request: Request,
        size: int | None,
        *,
        image: str | None,
        volume_id: str | None,
        snapshot_id: str | None,
        backup_id: str | None,
    ) -> Source:
        """Return the source that a request names; raise Invalid, NotFound or Forbidden."""
        if len([each for each in (image, volume_id, snapshot_id, backup_id) if each]) > 1:
            raise Invalid("A volume is made of one thing: name an image, a volume, a snapshot or a backup.")
        if backup_id:
            return await self._backup(request, backup_id, size)
        if snapshot_id:
            return await self._snapshot(request, snapshot_id, size)
        if volume_id:
            return await self._volume(request, volume_id, size)
        if size is None:
            raise Invalid("Invalid input for field/attribute size: it is missing.")
        return await self._image(request, image, size) if image else Source(size=size)

    async def _snapshot(self, request: Request, snapshot_id: str, size: int | None) -> Source:
        snapshot = await self._core.load_snapshot(request, snapshot_id)
        if snapshot.status != AVAILABLE:
            raise Invalid(f"Snapshot {snapshot_id} is {snapshot.status}: it must be {AVAILABLE}.")
        return Source(
            size=_at_least(size, snapshot.size, "snapshot"),
            volume_type_id=snapshot.volume_type_id,
            source_id=snapshot.id,
            rows=snapshots,
            payload={"copy": SNAPSHOTS},
            bootable=snapshot.bootable,
            image_metadata=snapshot.image_metadata,
            values={"snapshot_id": snapshot.id},
        )

    async def _volume(self, request: Request, volume_id: str, size: int | None) -> Source:
        volume = await self._core.load_volume(request, volume_id)
        if volume.status not in _READABLE:
            raise Invalid(f"Volume {volume_id} is {volume.status}: it must be {AVAILABLE} or {IN_USE}.")
        return Source(
            size=_at_least(size, volume.size, "source volume"),
            volume_type_id=volume.volume_type_id,
            source_id=volume.id,
            rows=volumes,
            payload={"copy": VOLUMES},
            bootable=volume.bootable,
            image_metadata=volume.image_metadata,
            values={"source_volid": volume.id},
        )

    async def _backup(self, request: Request, backup_id: str, size: int | None) -> Source:
        backup = await self._core.load_backup(request, backup_id)
        if backup.status != AVAILABLE:
            raise Invalid(f"Backup {backup_id} is {backup.status}: it must be {AVAILABLE}.")
        return Source(
            size=_at_least(size, backup.size, "backup"),
            source_id=backup.id,
            rows=backups,
            payload={"copy": BACKUPS},
            bootable=backup.bootable,
            image_metadata=backup.image_metadata,
        )

    async def _image(self, request: Request, reference: str, size: int) -> Source:
        request.authorize(rule="volume:create_from_image")
        if self._images is None:
            raise Invalid("There is no image service: a volume cannot be made of an image.")
        image = await images.find(self._images, reference, request.context.token)
        images.check_fits(image, size)
        return Source(
            size=size,
            payload={"image_id": image["id"], "disk_format": image.get("disk_format") or "raw"},
            bootable=True,
            image_metadata=images.metadata_of(image),
        )


def _at_least(size: int | None, least: int, what: str) -> int:
    if size is not None and size < least:
        raise Invalid(f"Invalid input for field/attribute size: {size} GiB are less than the {least} of the {what}.")
    return least if size is None else size
