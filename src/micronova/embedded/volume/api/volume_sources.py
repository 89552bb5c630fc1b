"""What a new volume is made from: nothing, an image, another volume, a snapshot, or a backup."""

from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from micronova.embedded.common.revisions import Changed
from micronova.embedded.volume import images
from micronova.embedded.volume.backend.files import BACKUPS, SNAPSHOTS, VOLUMES
from micronova.embedded.volume.backend.keys import SealedKey
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.encryption import key_of
from micronova.embedded.volume.images import Images
from micronova.embedded.volume.model import AVAILABLE, IN_USE, Backup, Snapshot, Volume
from micronova.embedded.volume.operations.payloads import CreateVolumePayload
from micronova.embedded.volume.store.resource_queries import lock_to_read
from micronova.embedded.volume.tables import backups, snapshots, volumes
from micronova.http.request import Request
from micronova.objects.errors import Invalid

_READABLE: Final = (AVAILABLE, IN_USE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a volume is made from, checked for the caller of a request."""

    size: int  # GiB
    volume_type_id: str | None = None  # of the source, which the new volume gets unless another is named
    source_id: str | None = None  # of the volume, snapshot or backup that the operation reads
    rows: sa.Table | None = None  # the table with the row of this volume, snapshot or backup
    payload: CreateVolumePayload = field(default_factory=CreateVolumePayload)
    bootable: bool = False
    image_metadata: dict[str, str] = field(default_factory=dict)
    snapshot_id: str | None = None  # of the volume's row, as is the next
    source_volid: str | None = None
    key: SealedKey | None = None  # of what is copied, if it is encrypted
    is_copy: bool = False
    same_encryption: bool = False  # the type of the new volume must encrypt as that of the source


def lock_source(conn: sa.Connection, source: Source) -> None:
    """Keep a source as it is until the transaction ends; from then on the operation keeps it.

    Raise Changed if it cannot be read any more, or is larger than the new volume.
    """
    if source.rows is None:
        return
    found = lock_to_read(conn, source.rows, source.source_id or "")
    if found is None or found.size > source.size or found.status not in _READABLE:
        raise Changed


class Sources:
    """Finds what volumes are made from."""

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
            raise Invalid("A volume is made from one source: name an image, a volume, a snapshot or a backup.")
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
        snapshot = await self._core.load_snapshot(request, snapshot_id, "volume:get_snapshot")
        return _copy_of(
            snapshot,
            size,
            noun="Snapshot",
            directory=SNAPSHOTS,
            rows=snapshots,
            volume_type_id=snapshot.volume_type_id,
            snapshot_id=snapshot.id,
        )

    async def _volume(self, request: Request, volume_id: str, size: int | None) -> Source:
        volume = await self._core.load_volume(request, volume_id, "volume:get")
        return _copy_of(
            volume,
            size,
            noun="Volume",
            directory=VOLUMES,
            rows=volumes,
            statuses=_READABLE,
            volume_type_id=volume.volume_type_id,
            source_volid=volume.id,
        )

    async def _backup(self, request: Request, backup_id: str, size: int | None) -> Source:
        backup = await self._core.load_backup(request, backup_id, "backup:get")
        volume_type_id = backup.volume_type_id if backup.encryption_key_id else None
        return _copy_of(backup, size, noun="Backup", directory=BACKUPS, rows=backups, volume_type_id=volume_type_id)

    async def _image(self, request: Request, reference: str, size: int) -> Source:
        request.authorize(rule="volume:create_from_image")
        if self._images is None:
            raise Invalid("There is no image service: a volume cannot be made from an image.")
        image = await images.find(self._images, reference, request.context.token)
        images.check_fits(image, size)
        return Source(
            size=size,
            payload=CreateVolumePayload(image_id=image["id"], disk_format=image["disk_format"]),
            bootable=True,
            image_metadata=images.metadata_of(image),
        )


def _copy_of(
    found: Volume | Snapshot | Backup,
    size: int | None,
    *,
    noun: str,
    directory: str,
    rows: sa.Table,
    statuses: tuple[str, ...] = (AVAILABLE,),
    volume_type_id: str | None = None,
    snapshot_id: str | None = None,
    source_volid: str | None = None,
) -> Source:
    """Return a resource as the source of a volume; raise Invalid if its status or its size does not allow it."""
    if found.status not in statuses:
        raise Invalid(f"{noun} {found.id} is {found.status}: it must be {' or '.join(statuses)}.")
    if size is not None and size < found.size:
        what = "source volume" if noun == "Volume" else noun.lower()
        raise Invalid(
            f"Invalid input for field/attribute size: {size} GiB are less than the {found.size} of the {what}."
        )
    return Source(
        size=found.size if size is None else size,
        volume_type_id=volume_type_id,
        key=key_of(found),
        is_copy=True,
        same_encryption=noun != "Backup",  # whose type may be gone
        source_id=found.id,
        rows=rows,
        payload=CreateVolumePayload(source_directory=directory),
        bootable=found.bootable,
        image_metadata=found.image_metadata,
        snapshot_id=snapshot_id,
        source_volid=source_volid,
    )
