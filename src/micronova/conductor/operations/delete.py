"""Deleting a server: its guest, its ports, its claims. It is repeated until it succeeds.

Operations that follow delete the image of a shelve (`discard_image.py`) and give volumes back (`settle_volumes.py`):
neither the server's quota nor its claim waits for an image service or a volume service that is away.
"""

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.discard_image import discard_operation_ids, record_discard
from micronova.conductor.operations.engine import NeverFails, Operation, retry_pause
from micronova.conductor.operations.host_kind import HostKind
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import minimal_order
from micronova.conductor.operations.transitions import Notification
from micronova.conductor.operations.volume_records import record_release_of_all
from micronova.db import allocations, departures, instances, quotas
from micronova.db import operations as operation_rows
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import DISCARD_IMAGE, IMAGE_KINDS, SETTLE_VOLUMES, UNDO_MOVE, OperationRow
from micronova.objects.orders import Report, WorkOrder

_OF_OTHER_SERVICES = (*IMAGE_KINDS, DISCARD_IMAGE, SETTLE_VOLUMES)


class Delete(NeverFails, HostKind):
    """Steps: new → dispatched (the host destroys the guest) → cleanup (ports). It always ends in "success"."""

    name = "delete"
    action_event = "compute_terminate_instance"

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step."""
        for operation in operations:
            await self._run(operation)

    async def _run(self, operation: Operation) -> None:
        database = self._engine.database
        row = await database.read(instances.get, operation.instance_uuid)
        if row is None:
            if await database.write(self._end_without_server, operation):
                self._engine.ended(operation, "success")
            return
        host = row["host"]
        if operation.step == "new":
            self.transitions.notify("delete.start", operation, row)
        if operation.step == "cleanup" or host is None:
            await self._clean_up(operation, row)
            return
        if await self.transitions.host_is_down(host):
            # The host destroys the guest when it is back and reads the record of the departure.
            await database.write(self._continue_without_host, operation, row)
            self._engine.committed(self.name, "without host")
            await self._clean_up(operation, row)
            return
        order = await database.write(self.dispatch, operation, row, host)
        self._engine.committed(self.name, "dispatched")
        if order is not None:
            if operation.step == "new":
                self.transitions.notify("shutdown.start", operation, row)
            await self.transitions.send(operation, order)

    def _end_without_server(self, conn: sa.Connection, operation: Operation) -> bool:
        """End a delete whose server is gone, because another delete has removed it; locks begin with the instance."""
        instances.lock(conn, operation.instance_uuid)
        return self.transitions.end(conn, operation, "success")

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to destroy the guest."""
        return minimal_order(operation, row, now=self._engine.now())

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Continue with the ports when the guest is gone; if the host failed, send it the order again after a pause."""
        if report.outcome != "done":
            return self.postponed(conn, operation, row, report)
        if instances.may_have_ports(conn, row) or self._has_open_operations(conn, operation):
            taken = self.transitions.continue_at(conn, operation, "cleanup")
            return Continue(taken, notifications=[Notification("shutdown.end", row)])
        result = self._move_to_deleted(conn, operation, row)
        return msgspec.structs.replace(result, notifications=[Notification("shutdown.end", row), *result.notifications])

    async def _clean_up(self, operation: Operation, row: InstanceRow) -> None:
        database = self._engine.database
        if self._dependencies.network_client is not None and await database.read(instances.may_have_ports, row):
            if await database.write(self._wait_for_others, operation):
                return
            await self.transitions.delete_ports(operation)
        await self.continue_with(operation, await database.write(self._end, operation))

    def _wait_for_others(self, conn: sa.Connection, operation: Operation) -> bool:
        """Persist that this operation waits, if another one of the server is still open; return whether it waits.

        The instance is locked, so that the other operation, which wakes this one when it ends, sees it waiting.
        """
        instances.lock(conn, operation.instance_uuid)
        if not self._has_open_operations(conn, operation):
            return False
        # The lease expires in case the other operation never wakes this one.
        self.transitions.persist(conn, operation, operation.step, lease_seconds=retry_pause(operation))
        return True

    def _has_open_operations(self, conn: sa.Connection, operation: Operation) -> bool:
        """Return whether the delete has to wait for another operation of the server.

        A build may still allocate ports until it sees the new epoch. Operations that only give back an image or volumes
        do not count. The undo of a move does not count either, because it ends when it sees the delete.
        """
        found = operation_rows.open_of(conn, operation.instance_uuid)
        others = [row for row in found if row["id"] != operation.id and row["kind"] != UNDO_MOVE]
        return not all(map(_only_gives_back, others))

    def _continue_without_host(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> None:
        """Record that the instance left its host, which is down, and persist that only the ports are left."""
        instances.lock(conn, row["uuid"])
        if row["host"] is not None:
            departures.record(conn, row["host"], row["uuid"], operation.epoch, self._engine.now())
        self.transitions.persist(conn, operation, "cleanup")

    def _end(self, conn: sa.Connection, operation: Operation) -> NoMoreWork:
        """Move the server to the deleted servers, unless it is gone already or the delete has to wait."""
        row = instances.lock(conn, operation.instance_uuid)
        if row is None:
            return NoMoreWork(ended="success" if self.transitions.end(conn, operation, "success") else None)
        if self._wait_for_others(conn, operation):
            return NoMoreWork()
        return self._move_to_deleted(conn, operation, row)

    def _move_to_deleted(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> NoMoreWork:
        """Move the server to the deleted servers and release its allocations, quota, image and volumes."""
        record_discard(conn, operation, row, self._engine.now())  # its changes are not written: the row is removed
        volumes = record_release_of_all(conn, operation, row, self._engine.now())
        instances.move_to_deleted(conn, row, self._engine.now())
        ended = self.transitions.end(conn, operation, "success", host=row["host"])
        allocations.release(conn, row["uuid"], now=self._engine.now(), group_uuid=row["server_group_id"])
        if row["deleted_at"] is None:  # else the soft delete has released it
            quotas.release_server(conn, row)
        return NoMoreWork(
            ended="success" if ended else None,
            notifications=[Notification("delete.end", row)],
            follow_ups=(*discard_operation_ids(row), *volumes),
        )


def _only_gives_back(row: OperationRow) -> bool:
    """Return whether an operation has nothing left to change but an image, or volumes that the server has left.

    A shelve at the steps `unbind` and `offload` changes ports and the guest.
    """
    return row["kind"] in _OF_OTHER_SERVICES and row["step"] not in ("unbind", "offload")
