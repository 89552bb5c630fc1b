"""Telling the volume service what has become of the volumes of a server.

A change of a server is recorded in one transaction, and the volume service learns of it later, by an operation that the
same transaction records. So neither a server's task state nor its quota waits for a volume service that is away, and
nothing is forgotten. Attachments are deleted before the volumes that go with their server. Requests that reserve
volumes announce that by such an operation (`servers/volume_reservations.py`), in case they cannot be recorded.
"""

import logging
from collections.abc import Awaitable

import sqlalchemy as sa

from micronova.clients.volume.client import WORKING, VolumeClient
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.follow_up_kind import FollowUpKind
from micronova.db import operations as operation_rows
from micronova.objects.errors import Conflict, Invalid, MicronovaError, NotFound, Unavailable
from micronova.objects.operations import SETTLE_VOLUMES, SettlePayload

log = logging.getLogger(__name__)


class SettleVolumes(FollowUpKind):
    """Completes and deletes attachments, and deletes volumes."""

    name = SETTLE_VOLUMES
    action_event = "conductor_settle_volumes"

    async def run(self, operations: list[Operation]) -> None:
        """Tell the volume service; an operation is repeated while it does not answer."""
        for operation in operations:
            client = self._dependencies.volume_client
            if client is None:
                raise Unavailable("This conductor knows no volume service: set cinder.endpoint_override.")
            await self._settle(client, operation)
            self._engine.committed(self.name, "told")
            await self.end(operation)

    async def _settle(self, client: VolumeClient, operation: Operation) -> None:
        payload = operation.payload_as(SettlePayload)
        for attachment_id in payload.complete:
            await _unless_refused(client.complete(attachment_id), "complete attachment", attachment_id)
        for volume_id in payload.keep:
            await _unless_refused(client.roll_detaching(volume_id), "keep volume", volume_id)
        if payload.reserved:
            await self._give_back(client, operation, set(payload.reserved))
        leaving = {each.attachment_id for each in payload.release if each.attachment_id}
        if payload.all_attachments:
            leaving |= (await client.attachments_of(operation.instance_uuid)).keys()
        for attachment_id in sorted(leaving):
            await _unless_refused(client.delete_attachment(attachment_id), "delete attachment", attachment_id)
        for device_uuid in payload.unrecorded:
            if (volume := await client.made_for(device_uuid)) is not None:
                await _unless_refused(_delete(client, volume.id), "delete volume", volume.id)
        for each in payload.release:
            if each.delete:
                await _unless_refused(_delete(client, each.volume_id), "delete volume", each.volume_id)

    async def _give_back(self, client: VolumeClient, operation: Operation, reserved: set[str]) -> None:
        """Delete the attachments that a request has made and not recorded.

        A volume that the server has got meanwhile is left alone: another operation may be connecting it. Raise
        Unavailable while another request reserves one of them for the server.
        """
        for volume_id in await self._engine.database.read(_not_had, operation, reserved):
            for attachment_id in sorted(await client.attachments_of(operation.instance_uuid, volume_id)):
                await _unless_refused(client.delete_attachment(attachment_id), "delete attachment", attachment_id)


def _not_had(conn: sa.Connection, operation: Operation, reserved: set[str]) -> list[str]:
    """Return those of the volumes that the operation's server does not have."""
    for row in operation_rows.open_of(conn, operation.instance_uuid):
        if row["id"] == operation.id or row["kind"] != SETTLE_VOLUMES or row["leases"] > 0:
            continue
        if not reserved.isdisjoint(SettlePayload.decode(row["payload"]).reserved):
            raise Unavailable("Another request reserves the volume for the server.")
    return sorted(reserved - operation_rows.volume_ids_with_swaps(conn, operation.instance_uuid))


async def _delete(client: VolumeClient, volume_id: str) -> None:
    """Delete a volume; raise Unavailable while the service works on it, because it can be deleted later."""
    try:
        await client.delete(volume_id)
    except (Invalid, Conflict):
        if (await client.volume(volume_id)).status in WORKING:
            raise Unavailable(f"The volume service still works on volume {volume_id}.") from None
        raise


async def _unless_refused(call: Awaitable[None], what: str, id: str) -> None:
    """Await a call. What the volume service refuses is not repeated: the log and `micronova audit` tell of it."""
    try:
        await call
    except Unavailable:
        raise
    except NotFound:
        pass
    except MicronovaError as error:
        log.warning("the volume service refuses to %s %s: %s", what, id, error.message)
