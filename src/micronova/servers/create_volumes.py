"""The volumes of servers that are created: the checks with the user's token, reservations, and new volumes.

Volumes that exist are reserved before the request is accepted. Those that have to be made are made after that, by the
API with the user's token: the operations of the servers wait for it. If the volume service refuses one, the build of
the server fails with the reason. If it does not answer, or the API dies meanwhile, a conductor goes on, with the token
that is among the operation's secrets; each volume names the block device that it was made for, so that none is made
twice.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.clients.volume.client import Volume, VolumeClient
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.objects.block_device import BlockDevice, bad_mapping, root_volume
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, MicronovaError, NotFound, Unavailable
from micronova.objects.ids import new_uuid
from micronova.objects.image import ImageMeta
from micronova.objects.operations import SETTLE_VOLUMES, BuildPayload, ReleasedVolume, SettlePayload
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.image_refs import named_image
from micronova.servers.volume_reservations import Reservations, withdraw_recorded
from micronova.servers.volumes import check_free, check_usable

log = logging.getLogger(__name__)

CREATION_TIME: Final = 120.0
"""Seconds in which the API asks for the volumes of a request; later a conductor does it."""
LAST_REQUEST: Final = 50.0
"""Seconds after which the API asks for no further volume: a request to the volume service may take 60."""
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
    announced: dict[str, str] = field(default_factory=dict)  # operations that give reservations back, by server
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

    def __init__(self, dependencies: RequestDependencies) -> None:
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._random = dependencies.random
        self._client = dependencies.require_volume_client
        self._image_client = dependencies.image_client
        self._reservations = Reservations(dependencies.database, dependencies.clock, dependencies.conductor)

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
        if device.source_type == "blank":  # also one that the server boots from: it gets its system by a rescue
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
        existing = [device.volume_id for device in plan.devices if device.is_volume and device.volume_id is not None]
        if not existing:
            return
        announced = {uuid: new_uuid(self._random) for uuid in uuids}
        await self._reservations.announce(context, {uuid: (id, existing) for uuid, id in announced.items()})
        plan.announced |= announced
        try:
            for volume_id in existing:
                for uuid in uuids:
                    plan.reserved[uuid, volume_id] = await self._client().reserve(volume_id, uuid, context.token)
        except BaseException as error:
            # Whether the one that failed was made is not known, unless the volume service has refused it.
            await self.release(context, plan, complete=isinstance(error, MicronovaError) and not _unknown(error))
            raise

    def record(self, conn: sa.Connection, plan: VolumePlan, uuids: Sequence[str]) -> None:
        """Note, in the transaction that records servers, that they have their reservations.

        Raise Unavailable if these are being given back, Invalid if another server has a volume.
        """
        for device in plan.devices:
            if device.volume_id is not None and not device.multiattach:
                check_free(conn, device.volume_id, shared_by=None)
        withdraw_recorded(conn, [plan.announced[uuid] for uuid in uuids if uuid in plan.announced])

    async def release(
        self, context: RequestContext, plan: VolumePlan, kept: Sequence[str] = (), *, complete: bool = True
    ) -> None:
        """Give reservations back, but not those of the servers that are kept.

        If they are not `complete`, or the volume service does not answer, a conductor gives back what there is.
        """
        for (uuid, volume_id), attachment in list(plan.reserved.items()):
            if uuid not in kept:
                del plan.reserved[uuid, volume_id]
                try:
                    await self._client().delete_attachment(attachment)
                except MicronovaError as error:
                    log.warning("attachment %s of volume %s is deleted later: %s", attachment, volume_id, error.message)
                    complete = False
        announced = [id for uuid, id in plan.announced.items() if uuid not in kept]
        if announced and complete:
            await self._reservations.withdraw(announced)
        elif announced:
            await self._reservations.give_back(context, announced)

    # --- new volumes ---------------------------------------------------------------------------------------------

    async def create(self, context: RequestContext, uuids: Sequence[str], operations: Sequence[str]) -> list[str]:
        """Make the volumes of servers that are accepted, record them, and let their builds begin.

        Return the operations that delete those of servers that are deleted meanwhile. If the database does not answer,
        the request succeeds nevertheless: the servers are recorded, and a conductor makes their volumes.
        """
        slots = asyncio.Semaphore(AT_ONCE)
        try:
            devices = await self._database.read(instances.devices, uuids)
        except Unavailable as reason:
            log.warning("a conductor makes volumes of %s: %s", ", ".join(uuids), reason.message)
            return []
        found = await asyncio.gather(
            *(
                self._create_of(context, uuid, operation, devices.get(uuid, ()), slots)
                for uuid, operation in zip(uuids, operations, strict=True)
            )
        )
        return [operation for operation in found if operation is not None]

    async def _create_of(
        self,
        context: RequestContext,
        uuid: str,
        operation: str,
        devices: Sequence[BlockDevice],
        slots: asyncio.Semaphore,
    ) -> str | None:
        made: list[BlockDevice] = []
        error, until = "", self._clock.monotonic() + LAST_REQUEST
        missing = [device for device in devices if device.is_volume and device.volume_id is None]
        for device in missing:
            try:
                async with slots:
                    if self._clock.monotonic() > until:
                        break
                    volume = await self._client().create_for(uuid, device, context.token)
            except Unavailable as reason:
                log.warning("a conductor makes volumes of %s: %s", uuid, reason.message)
                break
            except MicronovaError as reason:
                error = reason.message
                break
            made.append(msgspec.structs.replace(device, volume_id=volume.id))
        settle = new_uuid(self._random)

        def record(conn: sa.Connection) -> str | None:
            if _start(conn, uuid, operation, made, error):
                return None
            left = missing[len(made) :] if not error else []
            return self._record_removal(conn, context, uuid, settle, made, left)

        try:
            return await self._database.write(record)
        except Unavailable as reason:
            log.warning("a conductor looks for the volumes that were made for %s: %s", uuid, reason.message)
            return None

    def _record_removal(
        self,
        conn: sa.Connection,
        context: RequestContext,
        uuid: str,
        id: str,
        made: Sequence[BlockDevice],
        left: Sequence[BlockDevice],
    ) -> str | None:
        """Record that the volumes that go with a server are deleted, because it is gone; return the operation.

        Whether those that are `left` were made is not known.
        """
        release = [
            ReleasedVolume(volume_id=device.volume_id, attachment_id=None, delete=True)
            for device in made
            if device.volume_id and device.delete_on_termination
        ]
        unrecorded = [device.uuid for device in left if device.delete_on_termination]
        if not (release or unrecorded):
            return None
        if operation_rows.get(conn, id) is None:  # else the answer to the first commit was lost
            operation_rows.follow_up(
                conn,
                uuid,
                SETTLE_VOLUMES,
                id=id,
                epoch=0,
                now=micros(self._clock.now()),
                context=context.for_bus(),
                payload=SettlePayload(release=release, unrecorded=unrecorded),
            )
        return id


def _start(conn: sa.Connection, uuid: str, operation: str, made: Sequence[BlockDevice], error: str) -> bool:
    """Record the volumes that were made, and let a conductor build the server, or fail it with the error.

    Return False if the server is gone. A conductor that has taken the operation already finds the volumes itself.
    """
    row = instances.lock(conn, uuid)
    if row is None:
        return False
    if operation_rows.start_deferred(conn, operation, "schedule", BuildPayload(volumes=True, volume_error=error)):
        for device in made:
            instances.change_device(conn, device)
    return True


def _unknown(error: MicronovaError) -> bool:
    """Return whether a request that ended with an error may have had its effect."""
    return isinstance(error, Unavailable)


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
