"""Connecting the volumes of a server to a host.

A volume has one attachment for each host that the server is connected on. One for a host is made before the one for an
earlier host is given back, so that the volume is never free for others in between. The new one is recorded in the row
of the block device, in a transaction that also records the operation that gives the old one back. A conductor that dies
between the call and its transaction leaves an attachment that nobody has recorded: a later attempt of the operation,
and the end of the server, delete those.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.clients.volume.client import CREATING, Volume, VolumeClient
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.volume_records import record_settle
from micronova.db import instances, nodes
from micronova.db import operations as operation_rows
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import (
    HostIsOlder,
    MicronovaError,
    NotFound,
    NotSupported,
    OperationFailed,
    Stale,
    Unauthorized,
)
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import ReleasedVolume, SettlePayload
from micronova.objects.volume import Connection, ISCSIConnection

FIRST_POLL: Final = 0.05
LONGEST_POLL: Final = 2.0
"""Seconds between requests for the status of a volume that is being made."""


LockCurrent = Callable[[sa.Connection, Operation], InstanceRow | None]
"""Locks the instance of an operation and returns it; None if the operation is no longer current or is overtaken."""


class VolumeConnections:
    """Connects the volumes of servers for one kind of operation."""

    def __init__(self, dependencies: ConductorDependencies, lock_current: LockCurrent) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._lock_current = lock_current

    async def wanted_volumes(self, uuid: str) -> tuple[BlockDevice, ...]:
        """Return the volumes of a server, including those that are still to be made."""
        found = await self._engine.database.read(instances.devices_of, uuid)
        return tuple(device for device in found if device.is_volume)

    async def make(self, operation: Operation, row: InstanceRow, token: str | None) -> None:
        """Make the volumes of a server that are not recorded, with the token of its user; one may be made already.

        Raise Stale if the operation is overtaken, Unavailable if the volume service does not answer, another error if
        it refuses.
        """
        client = self.client()
        if token is None:
            raise OperationFailed("The API was interrupted. Create the server again.")
        for device in await self.wanted_volumes(row["uuid"]):
            if device.volume_id is not None:
                continue
            try:
                volume = await client.made_for(device.uuid, token) or await client.create_for(
                    row["uuid"], device, token
                )
            except Unauthorized as error:
                message = "The API was interrupted, and the token of its request has expired. Create the server again."
                raise OperationFailed(message) from error
            made = msgspec.structs.replace(device, volume_id=volume.id)
            if not await self._engine.database.write(self._record_made, operation, made):
                raise Stale(f"Operation {operation.id} is overtaken.")
            self._engine.committed(operation.kind, "made")

    def _record_made(self, conn: sa.Connection, operation: Operation, device: BlockDevice) -> bool:
        if self._lock_current(conn, operation) is None:
            return False
        instances.change_device(conn, device)
        return True

    async def connect(
        self,
        operation: Operation,
        row: InstanceRow,
        host: str | None,
        *,
        only: str | None = None,
        completes: bool = True,
        lock: LockCurrent | None = None,
    ) -> None:
        """Connect the volumes of a server to a host, or without one keep them reserved for the server.

        With `only`, the uuid of a device, connect this one alone. Volumes that are connected to the host stay as they
        are. `lock` locks the server and decides whether the operation may still connect volumes; by default it may
        unless it is overtaken. Without `completes` the volume service learns later that the server has its volume.
        Raise Stale if the operation is overtaken, OperationFailed if the volume service refuses the connection,
        Unavailable if it does not answer.
        """
        found = await self.wanted_volumes(row["uuid"])
        left = [
            device
            for device in found
            if (device.connected_host != host or not device.attachment_id) and only in (None, device.uuid)
        ]
        if not left:
            return
        client = self.client()
        if operation.leases > 1:
            await self._delete_unrecorded(client, row["uuid"], left)
        made = await asyncio.gather(
            *(self._connect_one(client, row["uuid"], device, host, completes) for device in left),
            return_exceptions=True,
        )
        connected = [device for device in made if isinstance(device, BlockDevice)]
        errors = [error for error in made if isinstance(error, BaseException)]
        if errors or not await self._engine.database.write(
            self._record, operation, left, connected, lock or self._lock_current
        ):
            for device in connected:
                if device.attachment_id is not None:
                    await self._release_unless_recorded(client, row["uuid"], device.attachment_id)
            raise errors[0] if errors else Stale(f"Operation {operation.id} is overtaken.")
        self._engine.committed(operation.kind, "connected")

    def client(self) -> VolumeClient:
        """Return the client; raise OperationFailed if there is no volume service any more."""
        if self._dependencies.volume_client is None:
            raise OperationFailed("The server has volumes, and this cloud has no volume service.")
        return self._dependencies.volume_client

    async def _connect_one(
        self, client: VolumeClient, uuid: str, device: BlockDevice, host: str | None, completes: bool
    ) -> BlockDevice:
        """Return the device with an attachment for the host."""
        volume_id = device.volume_id
        if volume_id is None:
            raise OperationFailed("A volume of the server was not made: the API was interrupted. Create it again.")
        made_for_host = False
        try:
            multiattach, size = await self.wait_until_made(volume_id)
            attachment_id = device.attachment_id
            if attachment_id is None or device.connected_host is not None:
                attachment_id, made_for_host = await client.reserve(volume_id, uuid), True
            device = msgspec.structs.replace(
                device,
                attachment_id=attachment_id,
                size_gb=size,
                multiattach=multiattach,
                connected_host=host,
                connection=None,
            )
            if host is None:
                return device
            try:
                connection = await self.open_connection(client, volume_id, attachment_id, host, device.device_name)
                if completes:
                    await client.complete(attachment_id)
            except MicronovaError:
                if made_for_host:
                    await self._release_unless_recorded(client, uuid, attachment_id)
                raise
            return msgspec.structs.replace(device, connection=connection)
        except NotFound as error:
            raise OperationFailed(f"Volume {volume_id} cannot be attached: {error.message}") from error

    async def open_connection(
        self, client: VolumeClient, volume_id: str, attachment_id: str, host: str, device_name: str | None
    ) -> Connection:
        """Let a host reach a volume; return how it does, with its password, or the key of the volume, sealed."""
        connection = await client.connect(attachment_id, host, device_name)
        secrets = self._dependencies.secrets
        if isinstance(connection, ISCSIConnection) and connection.auth_password is not None:
            if connection.encrypted:
                raise NotSupported(f"Volume {volume_id} is encrypted, and its target needs a password, too.")
            sealed = secrets.seal_text(connection.auth_password, volume_id)
            return msgspec.structs.replace(connection, auth_password=None, sealed_secret=sealed)
        if not connection.encrypted:
            return connection
        if not await self._engine.database.read(nodes.host_decrypts, host):
            raise HostIsOlder(
                f"Volume {volume_id} is encrypted, and the server's host runs an older version, which cannot decrypt.",
                details=f"Upgrade the host {host}.",
            )
        passphrase = await client.encryption_key(volume_id)
        sealed = secrets.seal_text(passphrase, volume_id)
        return msgspec.structs.replace(connection, sealed_secret=sealed)

    async def wait_until_made(self, volume_id: str, longest: float = 0.0) -> tuple[bool, int]:
        """Wait until a volume is made; return whether it may have several servers, and its size.

        Raise OperationFailed if that takes longer than the settings allow, and than `longest`.
        """
        client = self.client()
        volume = await client.volume(volume_id)
        if volume.status in CREATING:
            async with self._engine.waiting():
                longest = max(longest, self._dependencies.volume_creation_timeout)
                volume = await self._made(client, volume_id, longest)
        if volume.status.startswith("error") or volume.status == "deleting":
            raise OperationFailed(f"Volume {volume_id} cannot be used: its status is {volume.status}.")
        return volume.multiattach, volume.size

    async def _made(self, client: VolumeClient, volume_id: str, longest: float) -> Volume:
        """Return a volume when it is no longer being made; raise OperationFailed if that takes too long."""
        clock, pause = self._engine.clock, FIRST_POLL
        until = clock.monotonic() + longest
        while True:
            await clock.sleep(pause)
            pause = min(LONGEST_POLL, pause * 1.5)
            volume = await client.volume(volume_id)
            if volume.status not in CREATING:
                return volume
            if clock.monotonic() >= until:
                raise OperationFailed(
                    f"Volume {volume_id} did not finish being created even after we waited {longest:.0f} seconds. "
                    f"Its status is {volume.status}."
                )

    async def _release_unless_recorded(self, client: VolumeClient, uuid: str, attachment_id: str) -> None:
        """Delete an attachment, unless another owner of the operation got the same one and has recorded it."""
        if attachment_id not in await self._engine.database.read(operation_rows.attachment_ids_with_swaps, uuid):
            await client.delete_attachment(attachment_id)

    async def _delete_unrecorded(self, client: VolumeClient, uuid: str, devices: Sequence[BlockDevice]) -> None:
        """Delete the attachments that an earlier attempt has made for these devices and not recorded."""
        known = await self._engine.database.read(operation_rows.attachment_ids_with_swaps, uuid)
        for volume_id in sorted({device.volume_id for device in devices if device.volume_id is not None}):
            for attachment_id in sorted((await client.attachments_of(uuid, volume_id)).keys() - known):
                await client.delete_attachment(attachment_id)

    def _record(
        self,
        conn: sa.Connection,
        operation: Operation,
        before: Sequence[BlockDevice],
        after: Sequence[BlockDevice],
        lock: LockCurrent,
    ) -> bool:
        """Record the attachments; return False if the operation is overtaken, or another request changed a device."""
        row = lock(conn, operation)
        if row is None:
            return False
        present = {device.uuid: device for device in instances.devices_of(conn, row["uuid"])}
        old = []
        for each, new in zip(before, after, strict=True):
            known = present.get(each.uuid)
            if known is None or known.attachment_id != each.attachment_id:
                return False
            instances.change_device(conn, _with_connection(known, new))
            if each.volume_id and each.attachment_id and each.attachment_id != new.attachment_id:
                old.append(ReleasedVolume(volume_id=each.volume_id, attachment_id=each.attachment_id))
        record_settle(conn, operation, row, self._engine.now(), SettlePayload(release=old))
        return True


def _with_connection(device: BlockDevice, connected: BlockDevice) -> BlockDevice:
    """Return a device as it is now, with the connection that was made."""
    return msgspec.structs.replace(
        device,
        attachment_id=connected.attachment_id,
        connection=connected.connection,
        connected_host=connected.connected_host,
        size_gb=connected.size_gb,
        multiattach=connected.multiattach,
    )
