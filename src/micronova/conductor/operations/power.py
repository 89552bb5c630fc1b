"""Start, stop, reboot, pause and suspend: one order to the host, its report, a new state."""

from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import Dependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import (
    HostKind,
    NoMoreWork,
    ReportResult,
    fault_of,
    reported_error,
)
from micronova.conductor.operations.orders import work_order
from micronova.db import instances
from micronova.objects import states
from micronova.objects.errors import Unavailable
from micronova.objects.instance import Fault, InstanceChanges, InstanceRow, changed
from micronova.objects.operations import PowerPayload
from micronova.objects.orders import Report, WorkOrder

POWER_KINDS: Final = ("stop", "start", "reboot", "pause", "unpause", "suspend", "resume")


def action_event_of(kind: str) -> str:
    """Return the name of the event in the instance action, which is Nova's."""
    return f"compute_{kind}_instance"


def notification_of(kind: str) -> str:
    """Return the name of the kind's notifications, without the phase."""
    return {"stop": "power_off", "start": "power_on"}.get(kind, kind)


class Power(HostKind):
    """One kind per power action; `objects/states.py` has their states."""

    def __init__(self, dependencies: Dependencies, kind: str) -> None:
        self.name = kind
        self.action_event = action_event_of(kind)
        self._notification = notification_of(kind)
        super().__init__(dependencies)

    async def run(self, operations: list[Operation]) -> None:
        """Send the order to the server's host; send it again if the host's lease has expired."""
        for operation in operations:
            row = await self._engine.database.read(instances.get, operation.instance_uuid)
            if row is None or row["epoch"] != operation.epoch or row["host"] is None:
                await self.transitions.cancel(operation)
                continue
            if operation.step == "dispatched" and await self.transitions.host_is_down(row["host"]):
                raise Unavailable(f"Host {row['host']} does not answer.")
            order = await self._engine.database.write(self.dispatch, operation, row, row["host"])
            self._engine.committed(self.name, "dispatched")
            if order is None:
                await self.transitions.cancel(operation)
                continue
            if operation.step == "new":
                self.transitions.notify(f"{self._notification}.start", operation, row)
            await self.transitions.send(operation, order)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order."""
        payload = msgspec.msgpack.decode(operation.payload, type=PowerPayload)
        return work_order(conn, operation, row, kind=self.name, now=self._engine.now(), parameters=payload.parameters)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Set the state that the action ends in, or record the host's failure."""
        payload = msgspec.msgpack.decode(operation.payload, type=PowerPayload)
        action = states.ACTIONS[payload.action]
        now = self._engine.now()
        changes: InstanceChanges = {"task_state": None}
        if report.power_state is not None:
            changes["power_state"] = report.power_state
        if report.outcome != "done":
            fault = fault_of(reported_error(report), now)
            return self._record_failure(conn, operation, row, action, fault, changes)
        changes["vm_state"] = states.state_after(action, row["vm_state"])
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host)
        notification = f"{self._notification}.end", changed(row, changes), None
        return NoMoreWork(ended="success", notifications=[notification])

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Set the state that the server's action has for a failure."""
        result = await self._engine.database.write(self._fail, operation, error)
        if result is None:
            await self.transitions.cancel(operation)
            return
        self.announce(operation, result)

    def _fail(self, conn: sa.Connection, operation: Operation, error: Exception) -> NoMoreWork | None:
        """Return None if a later request has overtaken the operation."""
        payload = msgspec.msgpack.decode(operation.payload, type=PowerPayload)
        row = instances.lock(conn, operation.instance_uuid)
        if not self.transitions.owns(conn, operation):
            return NoMoreWork()
        if row is None or row["epoch"] != operation.epoch:
            return None
        fault = fault_of(error, self._engine.now())
        return self._record_failure(conn, operation, row, states.ACTIONS[payload.action], fault, {"task_state": None})

    def _record_failure(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        action: states.Action,
        fault: Fault,
        changes: InstanceChanges,
    ) -> NoMoreWork:
        """Record the fault and end the operation."""
        changes = {
            **changes,
            "fault": fault,
            "vm_state": states.state_after(action, row["vm_state"], failed=True),
        }
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault)
        notification = f"{self._notification}.error", changed(row, changes), fault
        return NoMoreWork(ended="error", notifications=[notification])
