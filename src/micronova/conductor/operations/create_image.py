"""Making an image of a server: a snapshot (createImage), or a backup of which only the newest are kept (createBackup).

A shelve begins in the same way (`shelve.py`).

The API records the operation, creates the image as its user, and lets conductors take the operation. `new` →
`dispatched` (the host copies the root disk and uploads it) → for a backup `rotate` (excess backups are deleted):
success. A failure leads to `cleanup` (the image is deleted): error. The server has no task state any more by then.

The image has the operation's id: a worker that knows the operation knows the image, also one that does not know whether
the API has created it. An operation that a later request overtakes, such as a delete of the server, leaves an image
only if it is complete.
"""

from typing import ClassVar, Final

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import HostKind, reported_error
from micronova.conductor.operations.made_images import COMPLETE, MadeImages
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.transitions import Notification, server_of
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.objects import states
from micronova.objects.clock import micros, seconds
from micronova.objects.errors import OperationFailed, Unavailable
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.operations import IMAGE_CREATION_TIME, ImagePayload
from micronova.objects.orders import Progress, Report, WorkOrder

_EVENTS: Final = {
    "create_image": "compute_snapshot_instance",
    "create_backup": "compute_backup_instance",
    "create_volume_image": "api_snapshot_instance",
    "shelve": "compute_shelve_instance",
}
_UPLOADS: Final = (states.IMAGE_UPLOADING, states.SHELVING_IMAGE_UPLOADING)


class CreateImage(HostKind):
    """One kind for snapshots and one for backups; a backup also deletes older ones."""

    notification: ClassVar[str] = "snapshot"

    def __init__(self, dependencies: ConductorDependencies, kind: str) -> None:
        self.name = kind
        self.action_event = _EVENTS[kind]
        self.images = MadeImages(dependencies.image_client)
        super().__init__(dependencies)

    def may_fail(self, operation: Operation) -> bool:
        """Return False if only the image is left to delete."""
        return operation.step != "cleanup"

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step."""
        for operation in operations:
            if operation.step == "cleanup":
                await self._clean_up(operation)
            elif operation.step == "new" and operation.payload_as(ImagePayload).answered:
                await self._order_host(operation)
            else:
                await self._continue(operation)

    async def _continue(self, operation: Operation) -> None:
        """Continue an operation of which it is not known whether its image exists, or is complete."""
        row = await self._engine.database.read(server_of, operation)
        if row is None or row["host"] is None:
            await self._overtaken(operation)
        elif operation.step == "rotate":
            await self._rotate(operation)
        else:
            await self._order_unless_complete(operation, row["host"])

    async def _order_unless_complete(self, operation: Operation, host: str) -> None:
        """Send the order, unless it was sent before and the host has carried it out.

        Without an image nothing is sent: a shelve would switch the guest off for nothing.
        """
        sent = operation.step == "dispatched"
        status = await self.images.status(operation.id)
        if status is None:
            reason = "was deleted before it was complete" if sent else "could not be created"
            await self.fail(operation, OperationFailed(f"The image {reason}."))
            return
        if sent and status == COMPLETE:
            result = await self._engine.database.write(self._uploaded, operation)
            if isinstance(result, Continue):
                self._engine.committed(self.name, result.operation.step)
            await self.continue_with(operation, result)
            return
        if sent and await self.transitions.host_is_down(host):
            raise Unavailable(f"Host {host} does not answer.")
        await self._order_host(operation)

    async def _order_host(self, operation: Operation) -> None:
        dispatched = await self._engine.database.write(self.dispatch_current, operation)
        self._engine.committed(self.name, "dispatched")
        if dispatched is None:
            await self._overtaken(operation)
            return
        row, order = dispatched
        if operation.step == "new":
            details = self.notification_details(operation)
            self.transitions.notify(f"{self.notification}.start", operation, row, details=details)
        await self.transitions.send(operation, order)

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Make the host the owner; the server shows that its image is being made from now on."""
        # The API has set image_snapshot_pending for a snapshot; the others keep their task state here.
        task_state = states.ACTIONS[self.name].task_state
        changes: InstanceChanges = {"task_state": states.IMAGE_SNAPSHOT if self.name == "create_image" else task_state}
        dispatched = self.transitions.dispatch(conn, operation, host, changes)
        return None if dispatched is None else self.order(conn, dispatched, row)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order. It has no URL for the upload, which the host gets when its copy is complete."""
        return work_order(conn, operation, row, now=self._engine.now())

    def upload_url_for(self, operation: Operation, progress: Progress) -> str | None:
        """Return the URL for the upload when the host begins it."""
        if progress.task_state not in _UPLOADS or self._dependencies.image_client is None:
            return None
        return self._dependencies.image_client.upload_url(operation.id, progress.host)

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return the id of the image."""
        return {"snapshot_image_id": operation.id}

    # --- the host's report -----------------------------------------------------------------------------------

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """End the operation or go on to older backups if the image is uploaded; else delete the image."""
        if report.outcome == "done":
            return self.completed(conn, operation, row)
        return self._to_clean_up(conn, operation, row, reported_error(report), report.power_state)

    def _uploaded(self, conn: sa.Connection, operation: Operation) -> StepResult:
        """The image is complete and the host's report is lost: continue as the report would have."""
        row = self.transitions.lock_current(conn, operation)
        return NoMoreWork() if row is None else self.completed(conn, operation, row)

    def completed(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> StepResult:
        """End the operation, or continue it, because the image is complete."""
        if self.name == "create_image":
            return self._succeed(conn, operation, row)
        return Continue(self.transitions.continue_at(conn, operation, "rotate"))

    def _succeed(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> NoMoreWork:
        changes: InstanceChanges = {"task_state": None}
        if not self.transitions.end(conn, operation, "success", host=row["host"]):
            return NoMoreWork()
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        return NoMoreWork(
            ended="success", notifications=[Notification(f"{self.notification}.end", changed(row, changes))]
        )

    # --- older backups ---------------------------------------------------------------------------------------

    async def _rotate(self, operation: Operation) -> None:
        """Delete the older backups that the API has found to be too many, and end the operation."""
        payload = operation.payload_as(ImagePayload)
        for id in [*payload.excess, *([] if payload.kept else [operation.id])]:
            await self.images.delete(id)
        self._engine.committed(self.name, "rotated")
        await self.continue_with(operation, await self._engine.database.write(self._rotated, operation))

    def _rotated(self, conn: sa.Connection, operation: Operation) -> StepResult:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch:
            return NoMoreWork()  # the next run finds that it is overtaken
        return self._succeed(conn, operation, row)

    # --- failures --------------------------------------------------------------------------------------------

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Delete the image; the server is as before."""
        result = await self._engine.database.write(self._fail, operation, error)
        if result is None:
            return
        self._engine.committed(self.name, "cleanup")
        await self.continue_with(operation, result)

    def _fail(self, conn: sa.Connection, operation: Operation, error: Exception) -> StepResult | None:
        row = instances.lock(conn, operation.instance_uuid)
        if not self.transitions.lock_and_is_current(conn, operation):
            return None
        if operation.step == "rotate" and row is not None:  # the image is complete and stays
            return self._fail_to_rotate(conn, operation, row, error)
        return self._to_clean_up(conn, operation, row, error)

    def _fail_to_rotate(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception
    ) -> NoMoreWork:
        fault = fault_of(error, self._engine.now())
        changes: InstanceChanges = {"task_state": None, "fault": fault}
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault)
        return NoMoreWork(ended="error")

    def _to_clean_up(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow | None,
        error: Exception,
        power: int | None = None,
    ) -> StepResult:
        """Record the failure and persist that only the image is left to delete, by this conductor.

        `power` is the guest's power state, if the host has changed it.
        """
        fault = fault_of(error, self._engine.now())
        payload = operation.payload_as(ImagePayload)
        payload.error = fault["message"]
        taken = self.transitions.continue_at(conn, operation, "cleanup", payload=payload.encode())
        if row is not None and row["epoch"] == operation.epoch:
            changes: InstanceChanges = {"task_state": None, "fault": fault}
            if power is not None:
                changes |= {"power_state": power, "vm_state": states.after_power_change(row["vm_state"], power)}
            instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        return Continue(taken)

    async def _clean_up(self, operation: Operation) -> None:
        if not await self._delete_own(operation):
            return
        waiting = await self._engine.database.write(self._cleaned_up, operation)
        await self.transitions.count_end_and_run_waiting(operation, "error", waiting)

    def _cleaned_up(self, conn: sa.Connection, operation: Operation) -> list[str] | None:
        """End the operation; return the operations that waited for this, or None if it has another owner."""
        fault = fault_of(operation.payload_as(ImagePayload).error, self._engine.now())

        def end(row: InstanceRow | None) -> bool:
            host = None if row is None else row["host"]
            return self.transitions.end(conn, operation, "error", host=host, fault=fault)

        return self.transitions.end_and_wake(conn, operation, end)

    async def _overtaken(self, operation: Operation) -> None:
        """Delete the image unless it is complete, and cancel the operation.

        Do nothing if another conductor has taken it.
        """
        current = await self._engine.database.read(operation_rows.get, operation.id)
        if not operation.is_current(current):
            return
        if await self.leaves_image(operation) or await self._delete_own(operation):
            await self.transitions.cancel(operation)

    async def leaves_image(self, operation: Operation) -> bool:
        """Return whether the image of an operation that a later request has overtaken stays: it is complete."""
        return await self.images.status(operation.id) == COMPLETE

    async def _delete_own(self, operation: Operation) -> bool:
        """Delete the operation's image; return False if the API may still create it, and look for it later.

        The operation is postponed meanwhile: a conductor has other work to do.
        """
        if await self.images.delete(operation.id) or operation.payload_as(ImagePayload).answered:
            return True
        left = operation.created_at + micros(IMAGE_CREATION_TIME) - self._engine.now()
        if left <= 0:
            return True
        await self._engine.postpone([operation], Unavailable("Its image may still be created."), longest=seconds(left))
        return False
