"""Start, stop, reboot, pause and suspend: the plainest operations that a host carries out."""

from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.compute import states
from micronova.conductor.kinds import Continue, Ended, Event, HostKind, abort_error, fault_of
from micronova.conductor.operations import Operation
from micronova.conductor.orders import work_order
from micronova.db import instances
from micronova.objects.errors import Unavailable
from micronova.objects.orders import Report, WorkOrder


class PowerPayload(msgspec.Struct, kw_only=True):
    """Which action of the state table this is, and where the server came from."""

    action: str
    parameters: dict[str, str] = {}


class Power(HostKind):
    """One kind for all of them: the state table says what differs."""

    def __init__(self, tools: Any, kind: str, event: str) -> None:
        super().__init__(tools)
        self.name = self.order_kind = kind  # type: ignore[misc]
        self.event = event
        self.notification = {"stop": "power_off", "start": "power_on"}.get(kind, kind)

    async def run(self, operations: list[Operation]) -> None:
        """Send the order to the server's host, or see what became of it."""
        for operation in operations:
            row = await self.engine.database.read(instances.get, operation.instance_uuid)
            if row is None or row["epoch"] != operation.epoch or row["host"] is None:
                await self.cancel(operation)
                continue
            if operation.step == "dispatched" and await self.host_is_down(row["host"]):
                raise Unavailable(f"Host {row['host']} does not answer.")
            order = await self.engine.database.write(self.dispatch, operation, row, row["host"], {})
            self.engine.stepped(self.name, "dispatched")
            if order is None:
                await self.cancel(operation)
                continue
            self.notify(f"{self.notification}.start", operation, row)
            await self.hand_over(operation, order)

    def order(self, conn: sa.Connection, operation: Operation, row: Any) -> WorkOrder:
        """Return the order."""
        payload = msgspec.msgpack.decode(operation.payload, type=PowerPayload)
        return work_order(
            conn, operation, row, kind=self.order_kind, now=self.engine.now(), parameters=payload.parameters
        )

    def reported(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Continue | Ended:
        """The host is done, or could not."""
        payload = msgspec.msgpack.decode(operation.payload, type=PowerPayload)
        action = states.ACTIONS[payload.action]
        now = self.engine.now()
        values: dict[str, Any] = {"task_state": None}
        if report.power_state is not None:
            values["power_state"] = report.power_state
        if report.outcome == "done":
            values["vm_state"] = action.ends_in
            instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
            self.end(conn, operation, "success", host=report.host)
            return Ended(events=[(f"{self.notification}.end", {**row, **values}, None)])
        fault = fault_of(abort_error(report), now)
        self._failed(conn, operation, row, action, fault, values)
        return Ended(events=[(f"{self.notification}.error", {**row, **values}, fault)])

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give up: the server is what it was before."""
        events = await self.engine.database.write(self._give_up, operation, error)
        if events is None:
            await self.cancel(operation)
            return
        for event, row, fault in events:
            self.notify(event, operation, row, fault)

    def _give_up(self, conn: sa.Connection, operation: Operation, error: Exception) -> list[Event] | None:
        """Return the notifications that are due; None: it was overtaken."""
        payload = msgspec.msgpack.decode(operation.payload, type=PowerPayload)
        row = instances.lock(conn, operation.instance_uuid)
        if not self.owns(conn, operation):
            return []
        if row is None or row["epoch"] != operation.epoch:
            return None
        fault = fault_of(error, self.engine.now())
        values: dict[str, Any] = {"task_state": None}
        self._failed(conn, operation, row, states.ACTIONS[payload.action], fault, values)
        return [(f"{self.notification}.error", {**row, **values}, fault)]

    def _failed(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: Any,
        action: states.Action,
        fault: dict[str, Any],
        values: dict[str, Any],
    ) -> None:
        values["fault"] = fault
        if action.fails_in is not None:
            values["vm_state"] = action.fails_in
        instances.update(conn, row["uuid"], self.engine.now(), values, epoch=operation.epoch)
        self.end(conn, operation, "error", host=row["host"], fault=fault)
