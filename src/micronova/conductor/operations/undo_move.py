"""Undoing a move that a later request has ended: the guest becomes what it was before, on the host that has it.

A reset of the state, an abort, a soft delete or an evacuation ends a move in its own transaction
(`db/server_migrations.py` `abandon`), which records this operation if the source may have changed its guest: it may be
off, be paused, or have another size. The ports return by another operation (`bind_ports`).

If the guest may run on the other host of the move, it is undone only when that host has removed it, or is down. A host
that hangs can delay this for ever: another reset of the state ends the operation then
(`db/server_migrations.py` `end_undo`).
"""

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.follow_up_kind import FollowUpKind
from micronova.conductor.operations.host_kind import HostKind
from micronova.conductor.operations.move_kind import move_order
from micronova.conductor.operations.move_types import COLD, LIVE
from micronova.conductor.operations.operation_kind import NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.transitions import LONGEST_WAIT_FOR_REMOVAL
from micronova.db import instances, server_migrations
from micronova.db import operations as operation_rows
from micronova.objects import migration_states, states
from micronova.objects.errors import GuestElsewhere, MicronovaError, Stale, Unavailable
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.operations import UNDO_MOVE, Result, UndoPayload
from micronova.objects.orders import Report, WorkOrder


class UndoMove(FollowUpKind, HostKind):
    """Steps: `new` → `dispatched` (the host makes the guest what it was).

    It is not bound to the epoch of the server: a later request takes the order from the host, and the conductor sends
    it again at the new epoch. It waits for an evacuation, and ends if the server has left the host.
    """

    name = UNDO_MOVE
    action_event = "conductor_undo_move"

    async def run(self, operations: list[Operation]) -> None:
        """Send the order to the host; send it again if the host's lease has expired."""
        for operation in operations:
            row = await self._engine.database.read(instances.get, operation.instance_uuid)
            if row is None or not _is_needed(row, operation):
                await self.end(operation)
                continue
            host = operation.payload_as(UndoPayload).host
            if await self.transitions.host_is_down(host):
                raise Unavailable(f"Host {host} does not answer.")
            try:
                order = await self._engine.database.write(self._dispatch, operation)
            except GuestElsewhere as error:
                await self._engine.postpone([operation], error, longest=LONGEST_WAIT_FOR_REMOVAL)
                continue
            self._engine.committed(self.name, "dispatched")
            if order is None:
                await self.end(operation)
            else:
                await self.transitions.send(operation, order)

    def _dispatch(self, conn: sa.Connection, operation: Operation) -> WorkOrder | None:
        """Make the host the owner, at the present epoch of the server; return None if nothing is left to undo.

        Raise Unavailable while the server is evacuated, or its guest may run on another host.
        """
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or not _is_needed(row, operation):
            return None
        if server_migrations.open_of(conn, row["uuid"]) is not None:
            raise Unavailable(f"Server {row['uuid']} is evacuated; nothing is left to undo if it leaves its host.")
        payload = operation.payload_as(UndoPayload)
        if payload.undo_awaits_removal:
            self.transitions.require_no_other_guest(conn, row["uuid"], payload.host)
        changes: InstanceChanges = {}
        if row["task_state"] is None and row["vm_state"] != states.SOFT_DELETED:
            changes["task_state"] = states.RESIZE_REVERTING
            instances.update(conn, row["uuid"], self._engine.now(), changes)
        owner = operation_rows.host_owner(payload.host)
        if not self.transitions.persist(conn, operation, "dispatched", owner=owner, epoch=row["epoch"]):
            raise Stale(f"Operation {operation.id} has got another owner.")
        dispatched = msgspec.structs.replace(operation, owner=owner, step="dispatched", epoch=row["epoch"])
        return self.order(conn, dispatched, changed(row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to undo the move; a server that is off, or is deleted and can be restored, stays off."""
        payload = operation.payload_as(UndoPayload)
        migration = server_migrations.get(conn, payload.migration)
        assert migration is not None  # it is kept as long as its server
        live = migration["migration_type"] == migration_states.LIVE_MIGRATION
        move = move_order(migration, sent=payload.sent)
        if row["vm_state"] == states.SOFT_DELETED or row["task_state"] == states.SOFT_DELETING:
            move = msgspec.structs.replace(move, power_on=False)
        kind = (LIVE if live else COLD).orders["undo"]
        return work_order(conn, operation, row, kind=kind, now=self._engine.now(), host=payload.host, move=move)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """End the operation; if the host could not make the guest what it was, the server is in ERROR.

        The instance action of the request that ended the move then has an event with the reason.
        """
        now = self._engine.now()
        changes: InstanceChanges = {}
        if row["task_state"] == states.RESIZE_REVERTING:
            changes["task_state"] = None
        if report.outcome == "done":
            if report.power_state is not None:
                changes["power_state"] = report.power_state
        elif row["vm_state"] != states.SOFT_DELETED:
            message = f"The host could not restore the guest after a move that was ended: {report.message}"
            changes |= {"vm_state": states.ERROR, "fault": fault_of(MicronovaError(message), now)}
        instances.update(conn, row["uuid"], now, changes)
        if report.outcome != "done":
            self.transitions.end_event(conn, operation, host=report.host, error=report.message)
        result: Result = "success" if report.outcome == "done" else "error"
        operation_rows.finish(conn, operation.id, now, result, operation.lease)
        return NoMoreWork(ended=result)


def _is_needed(row: InstanceRow, operation: Operation) -> bool:
    """Return whether the server still has its guest on the host."""
    return row["host"] == operation.payload_as(UndoPayload).host and row["task_state"] != states.DELETING
