"""Attaching a volume to a server, detaching or replacing one, and telling a guest that its volume has grown.

The API has reserved the volume, or has told the volume service that it is being detached, with its user's token.
Attaching: `new` (the volume is connected to the host) → `dispatched` (the host gives it to the guest). Detaching:
`new` → `dispatched` (the host takes it from the guest). Swapping: `new` (the other volume, which the API has reserved,
is connected to the host) → `dispatched` (the host copies, and lets the guest use the other one). The transaction that
ends one of them also records what the volume service has to be told (`settle_volumes.py`), and changes the device of
the server, or takes it from a server that has not got the volume, or has it no more.
"""

from functools import partial

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import HostKind, reported_error
from micronova.conductor.operations.operation_kind import NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.transitions import Notification, server_of
from micronova.conductor.operations.volume_records import record_settle
from micronova.db import instances, volume_usages
from micronova.notifications import resources
from micronova.objects import states
from micronova.objects.block_device import BlockDevice, attached_volumes
from micronova.objects.errors import MicronovaError, Stale, Unavailable
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.operations import SWAP_VOLUME, ReleasedVolume, Result, SettlePayload, VolumePayload
from micronova.objects.orders import Report, WorkOrder


class ServerVolumeKind(HostKind):
    """What the operations on one volume of a server share."""

    notification: str | None = None  # the name of its notifications, without the phase; None if it sends none
    tells_failures = True  # whether there is one about a failure

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order, whose list of volumes has the one that it is about."""
        payload = operation.payload_as(VolumePayload)
        return work_order(conn, operation, row, now=self._engine.now(), parameters=self.parameters(payload))

    def parameters(self, payload: VolumePayload) -> dict[str, str]:
        """Return what the order is about."""
        return {"volume_id": payload.volume_id}

    async def run(self, operations: list[Operation]) -> None:
        """Send the order to the server's host; send it again if the host's lease has expired."""
        for operation in operations:
            row = await self._engine.database.read(server_of, operation)
            if row is None or row["host"] is None:
                await self.transitions.cancel(operation, self.given_up)
                continue
            if await self.transitions.host_is_down(row["host"]):
                raise Unavailable(f"Host {row['host']} does not answer.")
            try:
                operation = await self.prepare(operation, row)
            except Stale:
                await self.transitions.cancel(operation, self.given_up)
                continue
            except Unavailable:
                raise
            except MicronovaError as error:
                await self.fail(operation, error)
                continue
            dispatched = await self._engine.database.write(self.dispatch_current, operation)
            self._engine.committed(self.name, "dispatched")
            if dispatched is None:
                await self.transitions.cancel(operation, self.given_up)
                continue
            if self.notification is not None and operation.step == "new":
                details = self.notification_details(operation)
                self.transitions.notify(f"{self.notification}.start", operation, dispatched[0], details=details)
            await self.transitions.send(operation, dispatched[1])

    async def prepare(self, operation: Operation, row: InstanceRow) -> Operation:
        """Do what comes before the order; return the operation with what is known of it now."""
        return operation

    def given_up(self, conn: sa.Connection, operation: Operation, row: InstanceRow | None) -> None:
        """Give back what an operation holds that a later request has overtaken; a server that is gone has nothing."""
        if row is not None:
            self._settle(conn, operation, row, failed=True)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """End the operation."""
        if report.outcome == "done":
            return self._ended(conn, operation, row, None)
        return self._ended(conn, operation, row, reported_error(report), report.error_code)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Leave the server as it was."""
        if not await self.commit_failure(operation, error, self._failed):
            await self.transitions.cancel(operation, self.given_up)

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        code = error.code if isinstance(error, MicronovaError) else MicronovaError.code
        return self._ended(conn, operation, row, error, code)

    def _ended(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        error: Exception | None,
        code: str | None = None,
    ) -> NoMoreWork:
        now = self._engine.now()
        payload = operation.payload_as(VolumePayload)
        fault = None if error is None else fault_of(error, now)
        if fault is not None:
            payload.error_code, payload.error = code, fault["message"]
        result: Result = "error" if fault else "success"
        encoded = payload.encode()
        if not self.transitions.end(conn, operation, result, host=row["host"], fault=fault, payload=encoded):
            return NoMoreWork()
        vm_state = states.state_after(states.ACTIONS[self.name], row["vm_state"], failed=fault is not None)
        changes: InstanceChanges = {"task_state": None, "vm_state": vm_state}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        sent = []
        if self.notification is not None and (fault is None or self.tells_failures):
            name = f"{self.notification}.{'error' if fault else 'end'}"
            sent.append(Notification(name, changed(row, changes), fault))
        follow_ups = self._settle(conn, operation, row, failed=fault is not None)
        return NoMoreWork(ended=result, notifications=sent, follow_ups=follow_ups)

    def _settle(self, conn: sa.Connection, operation: Operation, row: InstanceRow, *, failed: bool) -> tuple[str, ...]:
        payload = operation.payload_as(VolumePayload)
        known = instances.devices_of(conn, row["uuid"])
        device = next((each for each in known if each.uuid == payload.device_uuid), None)
        told = self.change_device(conn, payload, device, failed=failed)
        return record_settle(conn, operation, row, self._engine.now(), told)

    def change_device(
        self, conn: sa.Connection, payload: VolumePayload, device: BlockDevice | None, *, failed: bool
    ) -> SettlePayload:
        """Change the device after success or a failure; return what the volume service has to be told."""
        return SettlePayload()


def _taken_from_server(conn: sa.Connection, payload: VolumePayload, device: BlockDevice) -> SettlePayload:
    """Remove the device of a volume from its server; return what gives the volume back."""
    instances.remove_device(conn, device.uuid)
    return SettlePayload(release=[ReleasedVolume(volume_id=payload.volume_id, attachment_id=device.attachment_id)])


class AttachVolume(ServerVolumeKind):
    """The operation behind POST /servers/{id}/os-volume_attachments."""

    name = "attach_volume"
    action_event = "compute_attach_volume"
    notification = "volume_attach"

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return the volume."""
        return {"volume_id": operation.payload_as(VolumePayload).volume_id}

    async def prepare(self, operation: Operation, row: InstanceRow) -> Operation:
        """Connect the volume to the server's host."""
        payload = operation.payload_as(VolumePayload)
        await self.transitions.volumes.connect(operation, row, row["host"], only=payload.device_uuid, completes=False)
        return operation

    def change_device(
        self, conn: sa.Connection, payload: VolumePayload, device: BlockDevice | None, *, failed: bool
    ) -> SettlePayload:
        """Complete the attachment; after a failure take the device from the server."""
        if device is None or device.attachment_id is None:
            return SettlePayload()
        if not failed:
            return SettlePayload(complete=[device.attachment_id])
        return _taken_from_server(conn, payload, device)


class DetachVolume(ServerVolumeKind):
    """The operation behind DELETE /servers/{id}/os-volume_attachments/{volume_id}."""

    name = "detach_volume"
    action_event = "compute_detach_volume"
    notification = "volume_detach"
    tells_failures = False

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return the volume."""
        return {"volume_id": operation.payload_as(VolumePayload).volume_id}

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """End the operation; notify what the server has read and written of the volume."""
        result = super().reported(conn, operation, row, report)
        found = report.volume_statistics
        if not (isinstance(result, NoMoreWork) and result.ended == "success" and found is not None):
            return result
        notifies = self._dependencies.notifies_volume_usage and self._dependencies.notifier.enabled
        if not notifies or found.volume_id != operation.payload_as(VolumePayload).volume_id:
            return result
        usage = volume_usages.record_end(conn, row, found, self._engine.now())
        return msgspec.structs.replace(result, announcements=[partial(resources.volume_usage, usage, report.host)])

    def change_device(
        self, conn: sa.Connection, payload: VolumePayload, device: BlockDevice | None, *, failed: bool
    ) -> SettlePayload:
        """Take the device from the server, and give the volume back; after a failure the server keeps it."""
        if failed:
            return SettlePayload(keep=[payload.volume_id])
        if device is None:
            return SettlePayload()
        return _taken_from_server(conn, payload, device)


class SwapVolume(ServerVolumeKind):
    """The operation behind PUT /servers/{id}/os-volume_attachments/{volume_id} with another volume."""

    name = SWAP_VOLUME
    action_event = "compute_swap_volume"
    notification = "volume_swap"

    async def prepare(self, operation: Operation, row: InstanceRow) -> Operation:
        """Connect the volume that takes the place of the other one to the server's host."""
        payload, host = operation.payload_as(VolumePayload), row["host"]
        new = _replacement(payload)
        if new.connection is None or new.connected_host != host:
            assert host is not None and new.attachment_id is not None
            assert new.volume_id is not None
            volumes = self.transitions.volumes
            connection = await volumes.open_connection(
                volumes.client(), new.volume_id, new.attachment_id, host, new.device_name
            )
            payload.replacement = msgspec.structs.replace(new, connection=connection, connected_host=host)
            self._engine.committed(self.name, "connected")
        return msgspec.structs.replace(operation, payload=payload.encode())

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Make the host the owner, without a deadline: only the host knows which of both volumes the guest uses."""
        dispatched = self.transitions.dispatch(conn, operation, host, {}, endless=True)
        return None if dispatched is None else self.order(conn, dispatched, row)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order, whose list of volumes has both."""
        order = super().order(conn, operation, row)
        new = attached_volumes((_replacement(operation.payload_as(VolumePayload)),))
        return msgspec.structs.replace(order, volumes=(*order.volumes, *new))

    def parameters(self, payload: VolumePayload) -> dict[str, str]:
        """Return both volumes."""
        return {"volume_id": payload.volume_id, "new_volume_id": _replacement(payload).volume_id or ""}

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return both volumes."""
        payload = operation.payload_as(VolumePayload)
        return {"old_volume_id": payload.volume_id, "new_volume_id": _replacement(payload).volume_id or ""}

    def change_device(
        self, conn: sa.Connection, payload: VolumePayload, device: BlockDevice | None, *, failed: bool
    ) -> SettlePayload:
        """Give the device its new volume, and the old one back; after a failure the server keeps the old one."""
        new = _replacement(payload)
        if failed or device is None:
            release = ReleasedVolume(volume_id=new.volume_id or "", attachment_id=new.attachment_id)
            return SettlePayload(keep=[payload.volume_id], release=[release])
        kept = device.delete_on_termination  # a request may have changed it meanwhile
        instances.change_device(conn, msgspec.structs.replace(new, delete_on_termination=kept))
        release = ReleasedVolume(volume_id=payload.volume_id, attachment_id=device.attachment_id)
        return SettlePayload(complete=[new.attachment_id or ""], release=[release])


def _replacement(payload: VolumePayload) -> BlockDevice:
    assert payload.replacement is not None
    return payload.replacement


class ExtendVolume(ServerVolumeKind):
    """The operation behind the event volume-extended of the volume service."""

    name = "extend_volume"
    action_event = "compute_extend_volume"

    def parameters(self, payload: VolumePayload) -> dict[str, str]:
        """Return the volume and its new size."""
        return {"volume_id": payload.volume_id, "size_gb": str(payload.size_gb)}

    def change_device(
        self, conn: sa.Connection, payload: VolumePayload, device: BlockDevice | None, *, failed: bool
    ) -> SettlePayload:
        """Record the new size, which a guest that was not told sees when it is started the next time."""
        if device is not None and payload.size_gb:
            instances.change_device(conn, msgspec.structs.replace(device, size_gb=payload.size_gb))
        return SettlePayload()
