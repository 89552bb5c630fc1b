"""The volumes of servers: attach, detach, swap, and the event that one has grown.

A volume is checked and reserved with the token of the request, before anything is recorded; if the request is refused
after that, or its API dies, the reservation is given back (`volume_reservations.py`). Attaching is an operation like
all others, but its caller waits for the end.
Requests for one server that come together are served one after the other.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.clients.volume.client import Volume, VolumeClient
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.objects import block_device, states
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
    Unavailable,
)
from micronova.objects.ids import new_uuid
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import SETTLE_VOLUMES, ReleasedVolume, SettlePayload, VolumePayload
from micronova.servers.actions import ServerActions, check_lock, check_state
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.volume_reservations import Reservations, withdraw_recorded
from micronova.servers.waiting import DeviceChanges, wait_for_operation

log = logging.getLogger(__name__)

WAIT: Final = 60.0  # seconds that a request waits for another one that changes the same server's devices
EVENT_WAIT: Final = 5.0  # the same, for an event of the volume service
COMPLETE_WAIT: Final = 30.0  # seconds that an attach to a server without a host waits for the volume service

# Errors of a failed attachment that the caller gets as they are; all others become a 500.
_PASSED_ON: Final[dict[str, type[MicronovaError]]] = {
    error.code: error for error in (Conflict, Forbidden, Invalid, NotFound, NotSupported)
}


def check_usable(volume: Volume, *, may_be_shared: bool) -> None:
    """Raise an error if servers cannot use a volume; without `may_be_shared` it must not allow several servers."""
    if volume.multiattach and not may_be_shared:
        raise Invalid("Multiattach volumes are only supported starting with compute API version 2.60.")


class _Reservation(NamedTuple):
    """A volume that a request has reserved."""

    announced: str  # the operation that gives it back
    attachment_id: str


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
        self._reservations = Reservations(dependencies.database, dependencies.clock, dependencies.conductor)
        self._random = dependencies.random
        self._actions = actions
        self._check_host = check_host

    async def attach(
        self, context: RequestContext, row: InstanceRow, wanted: BlockDevice, *, may_be_shared: bool, waits: bool = True
    ) -> BlockDevice:
        """Attach a volume; return the device when the guest has it, or without `waits` when that has begun."""
        action = states.ACTIONS["attach_volume"]
        assert wanted.volume_id is not None
        check_lock(context, row)
        row = await self._changes.wait(row, WAIT)
        check_state(action, row)
        client = self._dependencies.require_volume_client()
        volume = await client.volume(wanted.volume_id, context.token)
        wanted = msgspec.structs.replace(wanted, multiattach=volume.multiattach)
        await self._database.read(_check_new, row["uuid"], wanted)
        check_usable(volume, may_be_shared=may_be_shared)
        if row["host"] is not None:
            await self._check_host(row)
        reservation = await self._reserve(context, client, row, volume.id)
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
            attachment_id=reservation.attachment_id,
            multiattach=volume.multiattach,
        )
        try:
            return await self._record_attach(context, row, action, device, reservation, waits=waits)
        except BaseException:
            await self._give_back(context, client, row, reservation)
            raise

    async def _reserve(
        self, context: RequestContext, client: VolumeClient, row: InstanceRow, volume_id: str
    ) -> "_Reservation":
        """Reserve a volume for a server; if the request ends without recording that, it is given back."""
        announced = new_uuid(self._random)
        await self._reservations.announce(context, {row["uuid"]: (announced, [volume_id])})
        try:
            return _Reservation(announced, await client.reserve(volume_id, row["uuid"], context.token))
        except (Unavailable, asyncio.CancelledError):  # it may have been made
            await self._reservations.give_back(context, [announced])
            raise
        except MicronovaError:
            await self._reservations.withdraw([announced])
            raise

    async def _give_back(
        self, context: RequestContext, client: VolumeClient, row: InstanceRow, reservation: "_Reservation"
    ) -> None:
        """Give a reservation back, unless it is recorded: an equal request may have got the same one."""
        if await self._is_recorded(row, reservation.attachment_id):
            await self._reservations.withdraw([reservation.announced])
            return
        try:
            await client.delete_attachment(reservation.attachment_id)
        except MicronovaError:
            await self._reservations.give_back(context, [reservation.announced])
        else:
            await self._reservations.withdraw([reservation.announced])

    async def _record_attach(
        self,
        context: RequestContext,
        row: InstanceRow,
        action: states.Action,
        device: BlockDevice,
        reservation: "_Reservation",
        *,
        waits: bool,
    ) -> BlockDevice:
        payload = VolumePayload(device_uuid=device.uuid, volume_id=device.volume_id or "")

        def record(conn: sa.Connection) -> tuple[str, ...]:
            known = instances.lock_existing(conn, row["uuid"])
            found = _check_new(conn, row["uuid"], device)
            [named] = [each for each in with_names((*found, device)) if each.uuid == device.uuid]
            if known["vm_state"] in states.WITHOUT_HOST:
                check_state(action, known)
                self._actions.record_done(conn, context, known, action.name, {})
                # The volume is in use from now on: no other server gets it. A host connects it later.
                settled = SettlePayload(complete=[reservation.attachment_id])
                operations: tuple[str, ...] = (self._settle(conn, context, known, settled),)
            else:
                operations = self._actions.check_and_record(conn, context, row["uuid"], action.name, action, payload)
            instances.add_device(conn, row["uuid"], named)
            withdraw_recorded(conn, [reservation.announced])
            return operations

        operations = await self._begin(row, WAIT, record)
        await self._conductor.run_operations(context.for_bus(), operations)
        if not waits:
            return device
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
        client = self._dependencies.require_volume_client()
        begun = device.connection is not None and await self._begin_detaching(context, client, row, volume_id)
        payload = VolumePayload(device_uuid=device.uuid, volume_id=volume_id)

        def record(conn: sa.Connection) -> tuple[str, ...]:
            known = instances.lock_existing(conn, row["uuid"])
            present = _attached_as(instances.volumes_of(conn, row["uuid"]), known, volume_id)
            if known["vm_state"] not in states.WITHOUT_HOST:
                return self._actions.check_and_record(conn, context, row["uuid"], action.name, action, payload)
            check_state(action, known)
            self._actions.record_done(conn, context, known, action.name, {})
            instances.remove_device(conn, present.uuid)
            released = ReleasedVolume(volume_id=volume_id, attachment_id=present.attachment_id)
            return (self._settle(conn, context, known, SettlePayload(release=[released])),)

        try:
            operations = await self._begin(row, WAIT, record)
        except BaseException:
            if begun:
                await self._keep(context, client, row, volume_id)
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
        client = self._dependencies.require_volume_client()
        new = await self._checked_for_swap(context, client, row, volume_id, new_id)
        await self._check_host(row)
        begun = await self._begin_detaching(context, client, row, volume_id)
        reservation: _Reservation | None = None
        try:
            reservation = reserved = await self._reserve(context, client, row, new.id)
            operations = await self._begin(
                row, WAIT, lambda conn: self._record_swap(conn, context, row["uuid"], volume_id, new, reserved)
            )
        except BaseException:
            # An equal request may have got the same attachment, and swaps the volume.
            swaps = reservation is not None and await self._is_recorded(row, reservation.attachment_id)
            try:
                if reservation is not None:
                    await self._give_back(context, client, row, reservation)
            finally:
                if begun and not swaps:
                    await self._keep(context, client, row, volume_id)
            raise
        await self._conductor.run_operations(context.for_bus(), operations)

    async def _is_recorded(self, row: InstanceRow, attachment_id: str) -> bool:
        """Return whether a server has this attachment, or swaps a volume to it."""
        return attachment_id in await self._database.read(operation_rows.attachment_ids_with_swaps, row["uuid"])

    async def _checked_for_swap(
        self, context: RequestContext, client: VolumeClient, row: InstanceRow, volume_id: str, new_id: str
    ) -> Volume:
        """Return the volume that takes the place of another one; raise an error if it cannot."""
        old = await client.volume(volume_id, context.token)
        try:
            new = await client.volume(new_id, context.token)
        except NotFound as error:
            raise Invalid(error.message) from error
        check_usable(new, may_be_shared=True)
        for volume in (old, new):
            if volume.encrypted:
                raise NotSupported(f"Volume {volume.id} is encrypted: it cannot be exchanged while a server uses it.")
        if old.migrating:
            raise NotSupported(f"The volume service migrates volume {volume_id}: compute cannot take part in that.")
        if new.status != "available" and not await self._is_reserved(client, row, new):
            raise Invalid(f"Invalid volume: the new volume {new.id} is {new.status}; it must be available.")
        if new.size < old.size:
            raise Invalid(
                f"Invalid volume: the new volume {new.id} has {new.size} GiB; it must have {old.size} GiB at least."
            )
        return new

    async def _is_reserved(self, client: VolumeClient, row: InstanceRow, volume: Volume) -> bool:
        """Return whether an earlier request has reserved a volume for a server that does not have it."""
        if volume.status != "reserved" or volume.id in await self._database.read(
            operation_rows.volume_ids_with_swaps, row["uuid"]
        ):
            return False
        return bool(await client.attachments_of(row["uuid"], volume.id))

    def _record_swap(
        self,
        conn: sa.Connection,
        context: RequestContext,
        uuid: str,
        volume_id: str,
        new: Volume,
        reservation: "_Reservation",
    ) -> tuple[str, ...]:
        action = states.ACTIONS["swap_volume"]
        known = instances.lock_existing(conn, uuid)
        found = instances.volumes_of(conn, uuid)
        check_free(conn, new.id, shared_by=uuid if new.multiattach else None)
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
            attachment_id=reservation.attachment_id,
            multiattach=new.multiattach,
            connection=None,
            connected_host=None,
        )
        payload = VolumePayload(device_uuid=device.uuid, volume_id=volume_id, replacement=replacement)
        withdraw_recorded(conn, [reservation.announced])
        return self._actions.check_and_record(conn, context, uuid, action.name, action, payload)

    async def _begin_detaching(
        self, context: RequestContext, client: VolumeClient, row: InstanceRow, volume_id: str
    ) -> bool:
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
        except (Unavailable, asyncio.CancelledError):  # it may have been done
            await self._keep(context, client, row, volume_id)
            raise
        return True

    async def _keep(self, context: RequestContext, client: VolumeClient, row: InstanceRow, volume_id: str) -> None:
        """Tell the volume service that a server keeps a volume after all; if it does not answer, a conductor does."""
        try:
            await client.roll_detaching(volume_id)
        except NotFound:
            pass
        except MicronovaError as error:
            log.warning(
                "a conductor tells the volume service that %s keeps volume %s: %s", row["uuid"], volume_id, error
            )
            kept = SettlePayload(keep=[volume_id])
            try:
                operation = await self._database.write(self._settle, context, row, kept)
            except Unavailable as lack:
                log.warning("volume %s of %s stays in the status detaching: %s", volume_id, row["uuid"], lack)
            else:
                await self._conductor.run_operations(context.for_bus(), (operation,))

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

    def _settle(self, conn: sa.Connection, context: RequestContext, row: InstanceRow, payload: SettlePayload) -> str:
        id, now = new_uuid(self._random), micros(self._clock.now())
        operation_rows.follow_up(
            conn,
            row["uuid"],
            SETTLE_VOLUMES,
            id=id,
            epoch=row["epoch"],
            now=now,
            context=context.for_bus(),
            payload=payload,
        )
        return id

    async def _attached(self, uuid: str, operation: str) -> None:
        """Wait until an attachment ends; raise its error.

        That of a server without a host is recorded already: if the volume service does not answer, it learns of it
        later.
        """
        late = f"The volume is still being attached to instance {uuid}: look at it later."
        found = await wait_for_operation(self._database, self._clock, operation, late, follow_up=COMPLETE_WAIT)
        if found is None or found["kind"] == SETTLE_VOLUMES or found["result"] == "success":
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


def check_free(conn: sa.Connection, volume_id: str, *, shared_by: str | None) -> None:
    """Raise Invalid if a server has a volume; one that several servers may have, if `shared_by` has it.

    The volume service gives a volume to one server only. But an administrator may have reset its status, and the guest
    that has it writes to it all the same.
    """
    found = instances.with_volume(conn, volume_id)
    if shared_by is not None:
        if shared_by in found:
            raise Invalid(f"Invalid volume: volume {volume_id} already attached")
    elif found:
        raise Invalid(f"Invalid volume: volume {volume_id} is already attached to instances: {' '.join(sorted(found))}")


def _check_new(conn: sa.Connection, uuid: str, wanted: BlockDevice) -> list[BlockDevice]:
    """Return the devices of a server; raise an error if it cannot have this one, too."""
    assert wanted.volume_id is not None
    check_free(conn, wanted.volume_id, shared_by=uuid if wanted.multiattach else None)
    devices = list(instances.devices_of(conn, uuid))
    if len(devices) >= block_device.MOST_DISKS:
        raise Forbidden(
            f"The maximum allowed number of disk devices ({block_device.MOST_DISKS}) to attach to a single instance "
            "has been exceeded."
        )
    if wanted.device_name and any(device.device_name == wanted.device_name for device in devices):
        raise Conflict(f"The supplied device path ({wanted.device_name}) is in use.")
    return devices
