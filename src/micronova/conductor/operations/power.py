"""Start, stop, reboot, pause, suspend and the like: one order to the host, its report, a new state."""

from typing import Final

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.discard_image import discard_operation_ids, record_discard
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import OneOrderKind, reported_error
from micronova.conductor.operations.operation_kind import NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.transitions import Notification
from micronova.db import instances
from micronova.objects import states
from micronova.objects.errors import MicronovaError, Stale
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.operations import PowerPayload
from micronova.objects.orders import Report, WorkOrder

POWER_KINDS: Final = (
    *("stop", "start", "reboot", "pause", "unpause", "suspend", "resume"),
    *("unrescue", "trigger_crash_dump"),
)
STARTS: Final = frozenset({"start", "reboot", "resume", "unrescue"})
"""The kinds that give a guest its volumes again."""
WITH_ERRORS: Final = frozenset({"reboot"})
"""Notifications that also tell of a failure, as in Nova."""
_OTHER_EVENTS: Final = {
    "change_password": "compute_set_admin_password",
    "trigger_crash_dump": "compute_trigger_crash_dump",
    "unshelve": "compute_start_instance",
}


class _LacksVolumesError(Exception):
    """A server has volumes that its host cannot reach."""

    def __init__(self, row: InstanceRow) -> None:
        super().__init__(f"instance {row['uuid']}")
        self.row = row


def action_event_of(kind: str) -> str:
    """Return the name of the event in the instance action, which is Nova's."""
    return _OTHER_EVENTS.get(kind, f"compute_{kind}_instance")


def notification_of(kind: str) -> str | None:
    """Return the name of the kind's notifications, without the phase; None if it sends none."""
    return {"stop": "power_off", "start": "power_on", "unshelve": "power_on", "change_password": None}.get(kind, kind)


class Power(OneOrderKind):
    """One kind per power action; `objects/states.py` has their states."""

    def __init__(self, dependencies: ConductorDependencies, kind: str) -> None:
        self.name = kind
        self.action_event = action_event_of(kind)
        self.notification = notification_of(kind)
        super().__init__(dependencies)

    async def run(self, operations: list[Operation]) -> None:
        """Send the order; before a guest is started, its host gets the volumes that it lacks.

        A rebuild that has failed, for example, has taken the root volume from the host.
        """
        for operation in operations:
            try:
                await super().run([operation])
            except _LacksVolumesError as lack:
                try:
                    await self.transitions.volumes.connect(operation, lack.row, lack.row["host"])
                except Stale:
                    await self.transitions.cancel(operation)
                    continue
                await super().run([operation])

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Make the host the owner, unless it would start the guest without one of its volumes."""
        if operation.step == "new" and self.name in STARTS:
            held = [device for device in instances.devices_of(conn, row["uuid"]) if device.is_volume]
            if any(device.connected_host != host for device in held):
                raise _LacksVolumesError(row)
        return super().dispatch(conn, operation, row, host)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order."""
        payload = operation.payload_as(PowerPayload)
        return work_order(conn, operation, row, now=self._engine.now(), parameters=payload.parameters)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Set the state that the action ends in, or record the host's failure."""
        payload = operation.payload_as(PowerPayload)
        action = states.ACTIONS[payload.action]
        now = self._engine.now()
        changes: InstanceChanges = {"task_state": None}
        if report.power_state is not None:
            changes["power_state"] = report.power_state
        if report.outcome != "done":
            return self.record_failure(conn, operation, row, changes, reported_error(report), report.error_code)
        changes = {**changes, **self.succeeded(conn, operation, row)}
        changes["vm_state"] = states.state_after(action, row["vm_state"])
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host)
        return NoMoreWork(
            ended="success",
            notifications=[]
            if self.notification is None
            else [Notification(f"{self.notification}.end", changed(row, changes))],
            follow_ups=discard_operation_ids(row),
        )

    def succeeded(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> InstanceChanges:
        """Return what changes besides the states when the host has succeeded, in the transaction of its report.

        The guest is there: an image that a shelve has made from its disk is deleted.
        """
        return record_discard(conn, operation, row, self._engine.now())

    def failed_payload(self, operation: Operation, code: str | None, message: str) -> bytes | None:
        """Return the payload of an operation that has failed, or None if it stays as it is."""
        return None

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Set the state that the server's action has for a failure."""
        if not await self.commit_failure(operation, error, self._failed):
            await self.transitions.cancel(operation)

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        code = error.code if isinstance(error, MicronovaError) else MicronovaError.code
        return self.record_failure(conn, operation, row, {"task_state": None}, error, code)

    def record_failure(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        changes: InstanceChanges,
        error: Exception,
        code: str | None,
    ) -> NoMoreWork:
        """Record the fault and end the operation."""
        action = states.ACTIONS[operation.payload_as(PowerPayload).action]
        fault = fault_of(error, self._engine.now())
        changes = {
            **changes,
            "fault": fault,
            "vm_state": states.state_after(action, row["vm_state"], failed=True),
        }
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        payload = self.failed_payload(operation, code, fault["message"])
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault, payload=payload)
        notifications = list[Notification]()
        if self.notification in WITH_ERRORS:  # failures of others have compute.exception only
            notifications.append(Notification(f"{self.notification}.error", changed(row, changes), fault))
        return NoMoreWork(ended="error", notifications=notifications)
