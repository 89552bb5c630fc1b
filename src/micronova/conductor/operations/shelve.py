"""Shelving a server: its guest is switched off, its disk becomes an image, and it may leave its host.

| operation            | steps                                                                                        |
|----------------------|----------------------------------------------------------------------------------------------|
| `shelve`             | as `create_image`, up to the complete image; then SHELVED, or `unbind` → `offload`           |
|                      | of a server that boots from a volume: `new` → `dispatched` (off) → `unbind` → `offload`      |
| `shelve_offload`     | `new` → `offload` (`shelve_offload.py`): SHELVED_OFFLOADED, without host and claim           |
| `unshelve`           | `new` → `dispatched` (`unshelve.py`): the host starts the guest, which it still has          |
| `unshelve_offloaded` | `schedule` → `dispatched` (`unshelve_offloaded.py`): a host builds the guest from the image  |
| `discard_image`      | `new`: deletes the image of a server that is deleted, or not shelved any more                |

The image has the id of the operation that makes it. From the transaction on that makes the server SHELVED, the row's
system metadata name the image (`objects/shelved.py`), and whoever ends the server's shelving lets it be deleted: an
unshelve, another action that finds the guest on its host (`power.py`), or the delete of the server. Until then a failed
shelve deletes it, as a failed createImage does; one that a later request overtakes deletes it even if it is complete,
because nobody else knows it.

With `shelved_offload_time` 0 the operation goes on to the offload, in the same instance action. A failure before that
leaves the server as it was, but for its guest: one that was switched off is STOPPED. A server whose root disk is a
volume is offloaded whatever that setting says, as in Nova: there is no image, and it is never SHELVED. Its host first
switches the guest off, because nothing else may take a volume from a guest that runs.
"""

import sqlalchemy as sa

from micronova.conductor.operations.create_image import CreateImage
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.discard_image import discard_operation_ids, record_discard
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import reported_error
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import switch_off_order
from micronova.conductor.operations.shelve_offload import Offloading
from micronova.conductor.operations.transitions import Notification
from micronova.db import instances
from micronova.objects import power_state, shelved, states
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.operations import ImagePayload
from micronova.objects.orders import Report, WorkOrder

_OFFLOAD_STEPS = ("unbind", "offload")


class Shelve(CreateImage):
    """The operation behind the server action `shelve`."""

    notification = "shelve"

    def __init__(self, dependencies: ConductorDependencies, *, offloads: bool) -> None:
        """`offloads`: the server leaves its host at once."""
        super().__init__(dependencies, "shelve")
        self._offloads = offloads
        self._offloading = Offloading(dependencies, self)

    def may_fail(self, operation: Operation) -> bool:
        """Return False if only the image is left to delete, or if the host may have begun to remove the guest."""
        return operation.step != "offload" and super().may_fail(operation)

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step."""
        for operation in operations:
            if operation.step in _OFFLOAD_STEPS:
                await self._offloading.run(operation)
            elif _without_image(operation):
                await self._switch_off(operation)
            else:
                await super().run([operation])

    async def _switch_off(self, operation: Operation) -> None:
        """Let the host switch the guest off; send the order again if the host's lease has expired."""
        if operation.step == "dispatched":
            await self.check_host_answers(operation)
        dispatched = await self._engine.database.write(self.dispatch_current, operation)
        self._engine.committed(self.name, "dispatched")
        if dispatched is None:
            await self.transitions.cancel(operation)
        else:
            await self.transitions.send(operation, dispatched[1])

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Make the host the owner; switching off is not an event of its own."""
        if not _without_image(operation):
            return super().dispatch(conn, operation, row, host)
        dispatched = self.transitions.dispatch(conn, operation, host, {}, event="")
        return None if dispatched is None else self.order(conn, dispatched, row)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to make the image, or to remove the guest."""
        if operation.step in _OFFLOAD_STEPS:
            return self._offloading.order(operation, row)
        if _without_image(operation):
            return switch_off_order(conn, operation, row, now=self._engine.now())
        return super().order(conn, operation, row)

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return nothing: the image is not in these notifications."""
        return {}

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Shelve the server, or take it from its host."""
        if operation.step in _OFFLOAD_STEPS:
            return self._offloading.reported(conn, operation, row, report)
        if not _without_image(operation):
            return super().reported(conn, operation, row, report)
        if report.outcome != "done":
            return self._offloading.failed(conn, operation, row, reported_error(report), report.power_state)
        changes: InstanceChanges = {
            "task_state": states.SHELVING_OFFLOADING,
            "power_state": power_state.SHUTDOWN if report.power_state is None else report.power_state,
        }
        return Continue(self.transitions.advance(conn, operation, "unbind", changes=changes))

    def completed(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> StepResult:
        """Shelve the server, whose image is complete; the guest is off."""
        now = self._engine.now()
        changes: InstanceChanges = {
            **record_discard(conn, operation, row, now),  # of an earlier shelve that a reset of the state has ended
            "vm_state": states.state_after(states.ACTIONS[self.name], row["vm_state"]),
            "task_state": states.SHELVING_OFFLOADING if self._offloads else None,
            "power_state": power_state.SHUTDOWN,
            "system_metadata": shelved.shelved(row, operation.id, now),
        }
        notifications = [Notification("shelve.end", changed(row, changes))]
        if not self._offloads:
            if not self.transitions.end(conn, operation, "success", host=row["host"]):
                return NoMoreWork()
            instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
            return NoMoreWork(ended="success", notifications=notifications, follow_ups=discard_operation_ids(row))
        self.transitions.end_event(conn, operation, host=row["host"])
        advanced = self.transitions.advance(conn, operation, "unbind", changes=changes)
        return Continue(advanced, notifications, follow_ups=discard_operation_ids(row))

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Delete the image; a server that is SHELVED stays so."""
        if operation.step == "unbind" or _without_image(operation):
            await self._offloading.fail(operation, error)
        else:
            await super().fail(operation, error)

    async def leaves_image(self, operation: Operation) -> bool:
        """Return False: the server's row does not know the image yet."""
        return False


def _without_image(operation: Operation) -> bool:
    return operation.payload_as(ImagePayload).without_image
