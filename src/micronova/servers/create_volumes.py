"""The volumes of servers that are created: the checks with the user's token, reservations, and new volumes.

Volumes that exist are reserved before the request is accepted. Those that have to be made are made after that, by the
API, because only it has the user's token: the operations of the servers wait for it. If the volume service refuses one,
or the API dies meanwhile, the build of the server fails with the reason.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from micronova.clients.image.client import ImageClient
from micronova.clients.volume.client import Volume, VolumeClient
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.block_device import BlockDevice, bad_mapping, root_volume
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, MicronovaError, NotFound, NotSupported
from micronova.objects.image import ImageMeta
from micronova.objects.operations import BuildPayload
from micronova.servers.image_refs import named_image
from micronova.servers.volumes import NO_SERVICE, check_usable

log = logging.getLogger(__name__)

CREATION_TIME: Final = 120.0
"""Seconds in which the API asks for the volumes of a request; later a conductor fails the builds that lack some."""
AT_ONCE: Final = 10  # volumes that are asked for at the same time
# The attributes of an image that a volume keeps, beside the properties of the image, in its image metadata.
_ATTRIBUTES: Final = frozenset(
    {"image_id", "image_name", "checksum", "container_format", "disk_format", "min_disk", "min_ram", "size"}
)


@dataclass(kw_only=True)
class VolumePlan:
    """The block devices of a request, whose volumes were checked."""

    devices: list[BlockDevice]
    image: ImageMeta | None = None  # of the volume that the servers boot from
    reserved: dict[tuple[str, str], str] = field(default_factory=dict)  # attachments, by server and volume

    @property
    def creates(self) -> bool:
        """Whether volumes have to be made."""
        return any(device.is_volume and device.volume_id is None for device in self.devices)


def has_volumes(devices: Sequence[BlockDevice]) -> bool:
    """Return whether servers get volumes."""
    return any(device.is_volume for device in devices)


class NewServerVolumes:
    """Checks, reserves and makes the volumes of new servers."""

    def __init__(self, database: Database, client: VolumeClient | None, image_client: ImageClient | None) -> None:
        self._database = database
        self._volume_client = client
        self._image_client = image_client

    async def plan(
        self, context: RequestContext, devices: list[BlockDevice], *, count: int, may_be_shared: bool
    ) -> VolumePlan:
        """Check the volumes of `count` servers as the user may see them; raise Invalid."""
        if not has_volumes(devices):
            return VolumePlan(devices=devices)
        client = self._client()
        types = await client.volume_types(context.token) if any(device.volume_type for device in devices) else {}
        checked = await asyncio.gather(
            *(self._check(client, context, device, types, count, may_be_shared) for device in devices)
        )
        root = root_volume(devices)
        image = next((image for device, (_, image) in zip(devices, checked, strict=True) if device is root), None)
        return VolumePlan(devices=[device for device, _ in checked], image=image)

    def _client(self) -> VolumeClient:
        if self._volume_client is None:
            raise NotSupported(NO_SERVICE)
        return self._volume_client

    async def _check(
        self,
        client: VolumeClient,
        context: RequestContext,
        device: BlockDevice,
        types: Mapping[str, str],
        count: int,
        may_be_shared: bool,
    ) -> tuple[BlockDevice, ImageMeta | None]:
        """Return a device with what is known of its volume, and the image that the volume is, or will be, made of."""
        if not device.is_volume:
            return device, None
        boots = device.boot_index == 0
        if device.volume_type and device.volume_type not in types and device.volume_type not in types.values():
            raise Invalid(f"Volume type {device.volume_type[:64]} could not be found.")
        if device.source_type == "volume":
            volume = await self._named_volume(client, context, device)
            check_usable(volume, may_be_shared=may_be_shared)
            if count > 1 and not volume.multiattach:
                raise Invalid("Cannot attach one or more volumes to multiple instances")
            if boots and not volume.bootable:
                raise bad_mapping(f"Block Device {volume.id} is not bootable.")
            known = msgspec.structs.replace(device, size_gb=volume.size, multiattach=volume.multiattach)
            return known, image_of(volume.image_metadata)
        if device.source_type == "snapshot":
            return await self._of_snapshot(client, context, device)
        if not device.size_gb:
            raise bad_mapping(
                "Blank volumes (source: 'blank', dest: 'volume') need to have non-zero size"
                if device.source_type == "blank"
                else "Images with destination_type 'volume' need to have a non-zero size specified"
            )
        if device.source_type == "blank":
            if boots:
                raise bad_mapping("a blank volume has nothing to boot from.")
            return device, None
        assert device.image_id is not None
        image = await named_image(self._image_client, context, device.image_id)
        if image.min_disk > device.size_gb:
            raise bad_mapping(
                f"Volume is smaller than the minimum size specified in image metadata. Volume size is "
                f"{device.size_gb} GB, minimum size is {image.min_disk} GB."
            )
        return device, image

    async def _named_volume(self, client: VolumeClient, context: RequestContext, device: BlockDevice) -> Volume:
        assert device.volume_id is not None
        try:
            return await client.volume(device.volume_id, context.token)
        except NotFound:
            raise bad_mapping(f"failed to get volume {device.volume_id[:64]}.") from None

    async def _of_snapshot(
        self, client: VolumeClient, context: RequestContext, device: BlockDevice
    ) -> tuple[BlockDevice, ImageMeta | None]:
        assert device.snapshot_id is not None
        try:
            snapshot = await client.snapshot(device.snapshot_id, context.token)
        except NotFound:
            raise bad_mapping(f"failed to get snapshot {device.snapshot_id[:64]}.") from None
        if snapshot.status != "available":
            raise bad_mapping(f"snapshot {snapshot.id} is {snapshot.status}.")
        if device.size_gb and device.size_gb < snapshot.size:
            raise bad_mapping(
                f"a volume of {device.size_gb} GB is smaller than snapshot {snapshot.id}: {snapshot.size} GB."
            )
        known = msgspec.structs.replace(device, size_gb=device.size_gb or snapshot.size)
        if device.boot_index != 0:
            return known, None
        try:
            volume = await client.volume(snapshot.volume_id, context.token)
        except NotFound:
            return known, None
        if not volume.bootable:
            raise bad_mapping(f"Block Device {snapshot.id} is not bootable.")
        return known, image_of(volume.image_metadata)

    # --- reservations --------------------------------------------------------------------------------------------

    async def reserve(self, context: RequestContext, plan: VolumePlan, uuids: Sequence[str]) -> None:
        """Reserve the volumes that exist for these servers; all or none."""
        for device in plan.devices:
            if not device.is_volume or device.volume_id is None:
                continue
            for uuid in uuids:
                try:
                    attachment = await self._client().reserve(device.volume_id, uuid, context.token)
                except BaseException:
                    await self.release(plan)
                    raise
                plan.reserved[uuid, device.volume_id] = attachment

    async def release(self, plan: VolumePlan, kept: Sequence[str] = ()) -> None:
        """Give reservations back, but not those of the servers that are kept."""
        for (uuid, volume_id), attachment in list(plan.reserved.items()):
            if uuid not in kept:
                del plan.reserved[uuid, volume_id]
                try:
                    await self._client().release(attachment)
                except MicronovaError as error:
                    log.warning("attachment %s of volume %s stays: %s", attachment, volume_id, error.message)

    # --- new volumes ---------------------------------------------------------------------------------------------

    async def create(self, context: RequestContext, uuids: Sequence[str], operations: Sequence[str]) -> None:
        """Make the volumes of servers that are accepted, record them, and let their builds begin."""
        slots = asyncio.Semaphore(AT_ONCE)
        devices = await self._database.read(instances.devices, uuids)
        await asyncio.gather(
            *(
                self._create_of(context, uuid, operation, devices.get(uuid, ()), slots)
                for uuid, operation in zip(uuids, operations, strict=True)
            )
        )

    async def _create_of(
        self,
        context: RequestContext,
        uuid: str,
        operation: str,
        devices: Sequence[BlockDevice],
        slots: asyncio.Semaphore,
    ) -> None:
        made: list[BlockDevice] = []
        error = ""
        for device in devices:
            if not device.is_volume or device.volume_id is not None:
                continue
            try:
                async with slots:
                    volume = await self._create_one(context, uuid, device)
            except MicronovaError as reason:
                error = reason.message
                break
            made.append(msgspec.structs.replace(device, volume_id=volume.id))
        await self._database.write(_start, uuid, operation, made, error)

    async def _create_one(self, context: RequestContext, uuid: str, device: BlockDevice) -> Volume:
        wanted: dict[str, Any] = {"size": device.size_gb, "volume_type": device.volume_type}
        if device.source_type == "image":
            wanted |= {"imageRef": device.image_id, "name": ""}
        elif device.source_type == "snapshot":
            wanted |= {"snapshot_id": device.snapshot_id, "name": ""}
        else:
            wanted |= {"name": f"{uuid}-blank-vol"}
        return await self._client().create(context.token, **wanted)


def _start(conn: sa.Connection, uuid: str, operation: str, made: Sequence[BlockDevice], error: str) -> None:
    """Record the volumes that were made, and let a conductor build the server, or fail it with the error."""
    row = instances.lock(conn, uuid)
    if row is None:
        return
    for device in made:
        instances.change_device(conn, device)
    operation_rows.start_deferred(conn, operation, "schedule", BuildPayload(volumes=True, volume_error=error))


def image_of(metadata: Mapping[str, str]) -> ImageMeta | None:
    """Return the image that a volume was made of, as far as the volume knows it; None if it was not made of one."""
    if not metadata:
        return None
    properties = {name: value for name, value in metadata.items() if name not in _ATTRIBUTES}
    return ImageMeta(
        id=metadata.get("image_id", ""),
        name=metadata.get("image_name", ""),
        min_disk=_number(metadata.get("min_disk")),
        min_ram=_number(metadata.get("min_ram")),
        properties=properties,
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
