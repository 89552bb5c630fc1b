"""Soft deletion: the server's guest is switched off, and everything else of it is kept until it is reclaimed.

A soft delete releases the quota and sets `deleted_at`, in the transaction that accepts it; a restore does the opposite.
So a server is charged exactly if it has no `deleted_at`.
"""

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import NeverFails, Operation
from micronova.conductor.operations.host_kind import OneOrderKind
from micronova.conductor.operations.operation_kind import NoMoreWork, StepResult
from micronova.conductor.operations.orders import minimal_order
from micronova.conductor.operations.power import Power
from micronova.conductor.operations.transitions import Notification
from micronova.db import instances, quotas
from micronova.objects import states
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.orders import Report, WorkOrder


class SoftDelete(NeverFails, OneOrderKind):
    """Steps: new → dispatched (the host switches the guest off). It is repeated until it succeeds, as a delete is."""

    name = "soft_delete"
    action_event = "compute_soft_delete_instance"
    notification = "soft_delete"

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to switch the guest off."""
        return minimal_order(operation, row, now=self._engine.now())

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Set the server to SOFT_DELETED; if the host failed, send it the order again after a pause."""
        if report.outcome != "done":
            return self.postponed(conn, operation, row, report)
        changes: InstanceChanges = {"vm_state": states.SOFT_DELETED, "task_state": None}
        if report.power_state is not None:
            changes["power_state"] = report.power_state
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host)
        return NoMoreWork(ended="success", notifications=[Notification("soft_delete.end", changed(row, changes))])


class Restore(Power):
    """Starts the guest of a server that is soft-deleted. A server that cannot be restored is soft-deleted again."""

    def __init__(self, dependencies: ConductorDependencies) -> None:
        super().__init__(dependencies, "restore")

    def record_failure(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        changes: InstanceChanges,
        error: Exception,
        code: str | None,
    ) -> NoMoreWork:
        """Release the quota again, record the fault and end the operation."""
        again: InstanceChanges = {**changes, "deleted_at": self._engine.now()}
        result = super().record_failure(conn, operation, row, again, error, code)
        if row["deleted_at"] is None:
            quotas.release_server(conn, row)
        return result
