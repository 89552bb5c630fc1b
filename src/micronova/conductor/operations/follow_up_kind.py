"""The base class of kinds that follow from another change of a server; conductors do the work, most without a host."""

from collections.abc import Callable

import sqlalchemy as sa

from micronova.conductor.operations.engine import NeverFails, Operation
from micronova.conductor.operations.operation_kind import OperationKind
from micronova.db import operations as operation_rows
from micronova.objects.instance import InstanceRow

Record = Callable[[sa.Connection, InstanceRow], None]


class FollowUpKind(NeverFails, OperationKind):
    """A kind of operation that `db/operations.py` `follow_up` records; FOLLOW_UP_KINDS lists these kinds.

    There is no instance action. No later request ends it, and it is repeated until it succeeds.
    """

    async def end(self, operation: Operation, record: Record | None = None) -> None:
        """End the operation, unless it has another owner, and start the operations that waited for this.

        `record` writes the result in the same transaction, unless the server is gone.
        """
        waiting = await self._engine.database.write(self._end, operation, record)
        await self.transitions.count_end_and_run_waiting(operation, "success", waiting)

    def _end(self, conn: sa.Connection, operation: Operation, record: Record | None) -> list[str] | None:
        def end(row: InstanceRow | None) -> bool:
            if not operation_rows.finish(conn, operation.id, self._engine.now(), "success", operation.lease):
                return False
            if row is not None and record is not None:
                record(conn, row)
            return True

        return self.transitions.end_and_wake(conn, operation, end)
