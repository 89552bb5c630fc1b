"""The volumes of servers: attach, detach, swap, and the event that one has grown.

A volume is checked and reserved with the token of the request, before anything is recorded; if the request is refused
after that, the reservation is given back. Attaching is an operation like all others, but its caller waits for the end.
Requests for one server that come together are served one after the other.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.clients.volume.client import Volume, VolumeClient
from micronova.db import instance_actions, instances
from micronova.db import operations as operation_rows
from micronova.objects import states
from micronova.objects.block_device import BlockDevice, with_names
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import (
    Conflict,
    Forbidden,
    Invalid,
    MicronovaError,
    NotFound,
    NotSupported,
    OperationFailed,
)
from micronova.objects.ids import new_uuid
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import SETTLE_VOLUMES, ReleasedVolume, SettlePayload, VolumePayload
from micronova.servers.actions import ServerActions, check_lock, check_state
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.waiting import DeviceChanges, wait_for_operation

log = logging.getLogger(__name__)

WAIT: Final = 60.0  # seconds that a request waits for another one that changes the same server's devices
EVENT_WAIT: Final = 5.0  # the same, for an event of the volume service
NO_SERVICE: Final = "There is no block storage service here: servers cannot use volumes."

# Errors of a failed attachment that the caller gets as they are; all others become a 500.
_PASSED_ON: Final[dict[str, type[MicronovaError]]] = {
    error.code: error for error in (Conflict, Forbidden, Invalid, NotFound, NotSupported)
}


def volume_client_of(dependencies: RequestDependencies) -> VolumeClient:
    """Return the client of the volume service; raise NotSupported if there is none."""
    if dependencies.volume_client is None:
        raise NotSupported(NO_SERVICE)
    return dependencies.volume_client


def check_usable(volume: Volume, *, may_be_shared: bool) -> None:
    """Raise an error if servers cannot use a volume; without `may_be_shared` it must not allow several servers."""
    if volume.multiattach and not may_be_shared:
        raise Invalid("Multiattach volumes are only supported starting with compute API version 2.60.")
    if volume.encrypted:
        raise NotSupported(f"Volume {volume.id} is encrypted, which hosts of this cloud cannot do.")


class ServerVolumes:
    """Changes the volumes of servers."""

    def __init__(
        self,
        dependencies: RequestDependencies,
        actions: ServerActions,
        check_host: Callable[[InstanceRow], Awaitable[None]],
    ) -> None:
        """`check_host` raises Unavailable if the host of a server does not answer."""
        self._dependencies = dependencies
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._changes = DeviceChanges(
            dependencies.database, dependencies.clock, states.CHANGES_VOLUMES | states.CHANGES_INTERFACES
        )
        self._conductor = dependencies.conductor
        self._random = dependencies.random
        self._actions = actions
        self._check_host = check_host

    async def attach(
        self, context: RequestContext, row: InstanceRow, wanted: BlockDevice, *, may_be_shared: bool
    ) -> BlockDevice:
        """Attach a volume; return the device when the guest has it."""
        action = states.ACTIONS["attach_volume"]
        assert wanted.volume_id is not None
        check_lock(context, row)
        row = await self._changes.wait(row, WAIT)
        check_state(action, row)
        client = volume_client_of(self._dependencies)
        _check_new(await self._volumes(row), wanted)
        volume = await client.volume(wanted.volume_id, context.token)
        check_usable(volume, may_be_shared=may_be_shared)
        if row["host"] is not None:
            await self._check_host(row)
        attachment = await client.reserve(volume.id, row["uuid"], context.token)
        device = BlockDevice(
            uuid=new_uuid(self._random),
            source_type="volume",
            destination_type="volume",
            volume_id=volume.id,
            boot_index=None,
            device_name=wanted.device_name,
            size_gb=volume.size,
            tag=wanted.tag,
            delete_on_termination=wanted.delete_on_termination,
            attachment_id=attachment,
            multiattach=volume.multiattach,
        )
        try:
            return await self._record_attach(context, row, action, device)
        except BaseException:
            if not await self._is_recorded(row, attachment):
                await client.release(attachment)
            raise

    async def _record_attach(
        self, context: RequestContext, row: InstanceRow, action: states.Action, device: BlockDevice
    ) -> BlockDevice:
        payload = VolumePayload(device_uuid=device.uuid, volume_id=device.volume_id or "")

        def record(conn: sa.Connection) -> tuple[str, ...]:
            known = instances.lock_existing(conn, row["uuid"])
            found = instances.devices_of(conn, row["uuid"])
            _check_new(found, device)
            [named] = [each for each in with_names((*found, device)) if each.uuid == device.uuid]
            if known["vm_state"] in states.WITHOUT_HOST:
                check_state(action, known)
                self._note(conn, context, known, action)
                operations: tuple[str, ...] = ()
            else:
                operations = self._actions.check_and_record(conn, context, row["uuid"], action.name, action, payload)
            instances.add_device(conn, row["uuid"], named)
            return operations

        operations = await self._begin(row, WAIT, record)
        if operations:
            await self._conductor.run_operations(context.for_bus(), operations)
            await self._attached(row["uuid"], operations[0])
        for each in await self._volumes(row):
            if each.uuid == device.uuid:
                return each
        raise Conflict(f"The volume was detached from instance {row['uuid']} meanwhile.")

    async def detach(self, context: RequestContext, row: InstanceRow, volume_id: str) -> None:
        """Accept a request to detach a volume."""
        action = states.ACTIONS["detach_volume"]
        check_lock(context, row)
        device = _attached_as(await self._volumes(row), row, volume_id)
        if device.boot_index == 0:
            raise Invalid("Cannot detach a root device volume")
        row = await self._changes.wait(row, WAIT)
        check_state(action, row)
        client = volume_client_of(self._dependencies)
        begun = device.connection is not None and await self._begin_detaching(context, client, volume_id)
        payload = VolumePayload(device_uuid=device.uuid, volume_id=volume_id)

        def record(conn: sa.Connection) -> tuple[str, ...]:
            known = instances.lock_existing(conn, row["uuid"])
            present = _attached_as(instances.volumes_of(conn, row["uuid"]), known, volume_id)
            if known["vm_state"] not in states.WITHOUT_HOST:
                return self._actions.check_and_record(conn, context, row["uuid"], action.name, action, payload)
            check_state(action, known)
            self._note(conn, context, known, action)
            instances.remove_device(conn, present.uuid)
            released = ReleasedVolume(volume_id=volume_id, attachment_id=present.attachment_id)
            return (self._settle(conn, context, known, SettlePayload(release=[released])),)

        try:
            operations = await self._begin(row, WAIT, record)
        except BaseException:
            if begun:
                await client.roll_detaching(volume_id)
            raise
        await self._conductor.run_operations(context.for_bus(), operations)

    async def swap(self, context: RequestContext, row: InstanceRow, volume_id: str, new_id: str) -> None:
        """Accept a request to copy a volume to another one, which takes its place."""
        action = states.ACTIONS["swap_volume"]
        device = next((each for each in await self._volumes(row) if each.volume_id == volume_id), None)
        if device is None:
            raise NotFound(f"Volume {volume_id[:64]} could not be found.")
        check_lock(context, row)
        row = await self._changes.wait(row, WAIT)
        check_state(action, row)
        client = volume_client_of(self._dependencies)
        new = await self._checked_for_swap(context, client, volume_id, new_id)
        await self._check_host(row)
        begun = await self._begin_detaching(context, client, volume_id)
        attachment: str | None = None
        try:
            attachment = await client.reserve(new.id, row["uuid"], context.token)
            operations = await self._begin(
                row, WAIT, lambda conn: self._record_swap(conn, context, row["uuid"], volume_id, new, attachment)
            )
        except BaseException:
            # An equal request may have got the same attachment, and swaps the volume.
            if not await self._is_recorded(row, attachment):
                try:
                    if attachment is not None:
                        await client.release(attachment)
                finally:
                    if begun:
                        await client.roll_detaching(volume_id)
            raise
        await self._conductor.run_operations(context.for_bus(), operations)

    async def _is_recorded(self, row: InstanceRow, attachment_id: str | None) -> bool:
        """Return whether a server has this attachment, or swaps a volume to it."""
        return attachment_id in await self._database.read(operation_rows.attachments_of, row["uuid"])

    async def _checked_for_swap(
        self, context: RequestContext, client: VolumeClient, volume_id: str, new_id: str
    ) -> Volume:
        """Return the volume that takes the place of another one; raise an error if it cannot."""
        old = await client.volume(volume_id, context.token)
        try:
            new = await client.volume(new_id, context.token)
        except NotFound as error:
            raise Invalid(error.message) from error
        check_usable(new, may_be_shared=True)
        if old.migrating:
            raise NotSupported(f"The volume service migrates volume {volume_id}: compute cannot take part in that.")
        if new.status != "available":
            raise Invalid(f"Invalid volume: the new volume {new.id} is {new.status}; it must be available.")
        if new.size < old.size:
            raise Invalid(
                f"Invalid volume: the new volume {new.id} has {new.size} GiB; it must have {old.size} GiB at least."
            )
        return new

    def _record_swap(
        self,
        conn: sa.Connection,
        context: RequestContext,
        uuid: str,
        volume_id: str,
        new: Volume,
        attachment_id: str | None,
    ) -> tuple[str, ...]:
        action = states.ACTIONS["swap_volume"]
        known = instances.lock_existing(conn, uuid)
        found = instances.volumes_of(conn, uuid)
        if any(device.volume_id == new.id for device in found):
            raise Invalid(f"Invalid volume: volume {new.id} already attached")
        device = _attached_as(found, known, volume_id)
        if instances.count_with_volume(conn, volume_id) > 1:
            raise Invalid(f"Volume {volume_id} has several servers: it can be swapped when it has one.")
        replacement = msgspec.structs.replace(
            device,
            source_type="volume",
            image_id=None,
            snapshot_id=None,
            volume_id=new.id,
            size_gb=new.size,
            volume_type=None,
            attachment_id=attachment_id,
            multiattach=new.multiattach,
            connection=None,
            connected_host=None,
        )
        payload = VolumePayload(device_uuid=device.uuid, volume_id=volume_id, replacement=replacement)
        return self._actions.check_and_record(conn, context, uuid, action.name, action, payload)

    async def _begin_detaching(self, context: RequestContext, client: VolumeClient, volume_id: str) -> bool:
        """Tell the volume service, as the user, that a volume is being detached; return whether that changed it.

        An earlier detach may have been interrupted, and a volume may be deleted by force while it is attached: then it
        can be detached all the same.
        """
        try:
            await client.begin_detaching(volume_id, context.token)
        except NotFound:
            return False
        except Invalid:
            if (await client.volume(volume_id, context.token)).status != "detaching":
                raise
        return True

    async def has(self, row: InstanceRow, volume_id: str) -> bool:
        """Return whether a server has a volume."""
        return any(device.volume_id == volume_id for device in await self._volumes(row))

    async def extended(self, context: RequestContext, row: InstanceRow, volume_id: str) -> bool:
        """Let a guest see that its volume has grown; return False if that is not possible now."""
        found = [device for device in await self._volumes(row) if device.volume_id == volume_id]
        if not found or self._dependencies.volume_client is None:
            return False
        size = (await self._dependencies.volume_client.volume(volume_id)).size
        action = states.ACTIONS["extend_volume"]
        payload = VolumePayload(device_uuid=found[0].uuid, volume_id=volume_id, size_gb=size)

        def record(conn: sa.Connection) -> tuple[str, ...]:
            return self._actions.check_and_record(conn, context, row["uuid"], action.name, action, payload)

        try:
            operations = await self._begin(row, EVENT_WAIT, record)
        except (Conflict, NotSupported) as error:
            log.warning("volume %s of %s has grown, and its guest is not told: %s", volume_id, row["uuid"], error)
            return False
        await self._conductor.run_operations(context.for_bus(), operations)
        return True

    # --- recording -----------------------------------------------------------------------------------------------

    async def _begin(
        self, row: InstanceRow, seconds: float, record: Callable[[sa.Connection], tuple[str, ...]]
    ) -> tuple[str, ...]:
        """Run a transaction that accepts a request, after the operations on the same server's devices."""

        async def begin(free: InstanceRow) -> tuple[str, ...]:
            return await self._database.write(record)

        return await self._changes.begin(row, seconds, begin)

    def _note(self, conn: sa.Connection, context: RequestContext, row: InstanceRow, action: states.Action) -> None:
        """Record a change of a server without a host, which is done with the transaction."""
        now = micros(self._clock.now())
        instances.update(conn, row["uuid"], now, {})
        instance_actions.record_done(conn, row, context, action.name, now)

    def _settle(self, conn: sa.Connection, context: RequestContext, row: InstanceRow, payload: SettlePayload) -> str:
        id, now = new_uuid(self._random), micros(self._clock.now())
        operation_rows.follow_up(
            conn,
            row,
            SETTLE_VOLUMES,
            id=id,
            epoch=row["epoch"],
            now=now,
            context=context.for_bus(),
            payload=payload,
        )
        return id

    async def _attached(self, uuid: str, operation: str) -> None:
        """Wait until an attachment ends; raise its error."""
        late = f"The volume is still being attached to instance {uuid}: look at it later."
        found = await wait_for_operation(self._database, self._clock, operation, late)
        if found is None or found["result"] == "success":
            return
        if found["result"] == "cancelled":
            raise Conflict(f"The volume was not attached to instance {uuid}: a later request took its place.")
        payload = VolumePayload.decode(found["payload"])
        known = _PASSED_ON.get(payload.error_code or "")
        if known is not None:
            raise known(payload.error)
        raise OperationFailed(f"Failed to attach the volume to instance {uuid}: {payload.error}")

    async def _volumes(self, row: InstanceRow) -> Sequence[BlockDevice]:
        return await self._database.read(instances.volumes_of, row["uuid"])


def not_attached(uuid: str, volume_id: str) -> NotFound:
    """Return the error about a volume that a server does not have."""
    return NotFound(f"Instance {uuid} is not attached to volume {volume_id[:64]}")


def _attached_as(devices: Sequence[BlockDevice], row: InstanceRow, volume_id: str) -> BlockDevice:
    for device in devices:
        if device.volume_id == volume_id:
            return device
    raise not_attached(row["uuid"], volume_id)


def _check_new(devices: Sequence[BlockDevice], wanted: BlockDevice) -> None:
    """Raise an error if a server has the volume already, or another one with its name."""
    for device in devices:
        if device.volume_id == wanted.volume_id:
            raise Invalid(f"Invalid volume: volume {wanted.volume_id} already attached")
        if wanted.device_name and device.device_name == wanted.device_name:
            raise Conflict(f"The supplied device path ({wanted.device_name}) is in use.")
