"""Deleting a server: the guest on its host, its ports, its claims; a delete always converges."""

from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.conductor.kinds import Continue, Ended, HostKind
from micronova.conductor.operations import Operation
from micronova.conductor.orders import work_order
from micronova.db import allocations, instances, quotas
from micronova.db import operations as rows
from micronova.objects.errors import Unavailable
from micronova.objects.orders import Report, WorkOrder


class Delete(HostKind):
    """Steps: new → dispatched (the host destroys the guest) → cleanup (ports) → gone."""

    name = "delete"
    order_kind = "delete"
    event = "compute_terminate_instance"

    async def run(self, operations: list[Operation]) -> None:
        """Go on from the persisted step."""
        for operation in operations:
            await self._run(operation)

    async def _run(self, operation: Operation) -> None:
        database = self.engine.database
        row = await database.read(instances.get, operation.instance_uuid)
        if row is None:
            await database.write(self.end, operation, "success")
            return
        host = row["host"]
        if operation.step == "new":
            self.notify("delete.start", operation, row)
        if operation.step == "cleanup" or host is None:
            await self._clean_up(operation, row)
            return
        if await self.host_is_down(host):
            # The guest is destroyed when the host comes back and reads the record of the departure.
            await database.write(self._leave, operation, row)
            self.engine.stepped(self.name, "left")
            await self._clean_up(operation, row)
            return
        order = await database.write(self.dispatch, operation, row, host, {})
        self.engine.stepped(self.name, "dispatched")
        if order is not None:
            await self.hand_over(operation, order)

    def order(self, conn: sa.Connection, operation: Operation, row: Any) -> WorkOrder:
        """Return the order to destroy the guest."""
        return work_order(conn, operation, row, kind=self.order_kind, now=self.engine.now())

    def reported(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Continue | Ended:
        """The guest is gone; or the host could not, and tries again later."""
        if report.outcome != "done":
            self.persist(conn, operation, "new", seconds=5.0)
            return Ended()
        if row["network_info"] or self._others(conn, operation):
            self.persist(conn, operation, "cleanup")
            return Continue(msgspec.structs.replace(operation, owner=self.engine.owner, step="cleanup"))
        self.remove(conn, operation, row)
        return Ended(events=[("delete.end", row, None)])

    async def _clean_up(self, operation: Operation, row: Any) -> None:
        database = self.engine.database
        if self.tools.networks is not None and await database.read(_has_networks, row):
            if await database.write(self._waits, operation):
                return
            await self.tools.networks.deallocate(instance_uuid=row["uuid"])
        if await database.write(self._remove, operation):
            self.notify("delete.end", operation, row)

    def _waits(self, conn: sa.Connection, operation: Operation) -> bool:
        """Say whether another operation has not noticed yet that the server is being deleted, and wait for it.

        With the instance locked, so that the other one, which wakes us at its end, finds us waiting.
        """
        instances.lock(conn, operation.instance_uuid)
        if not self._others(conn, operation):
            return False
        pause = min(30.0, 0.5 * 2 ** min(operation.attempts, 6))  # should it never wake us
        self.persist(conn, operation, operation.step, seconds=pause)
        return True

    def _others(self, conn: sa.Connection, operation: Operation) -> bool:
        """A build in a conductor's hands may still allocate; it lets go once it sees the new epoch."""
        return any(row["id"] != operation.id for row in rows.open_of(conn, operation.instance_uuid))

    def _leave(self, conn: sa.Connection, operation: Operation, row: Any) -> None:
        instances.lock(conn, row["uuid"])
        rows.record_departure(conn, row["host"], row["uuid"], operation.epoch, self.engine.now())
        self.persist(conn, operation, "cleanup")

    def _remove(self, conn: sa.Connection, operation: Operation) -> bool:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None:
            self.end(conn, operation, "success")
            return False
        if self._waits(conn, operation):
            return False
        self.remove(conn, operation, row)
        return True

    def remove(self, conn: sa.Connection, operation: Operation, row: Any) -> None:
        """Make the server history and give back all that it held, in one transaction."""
        instances.to_history(conn, row["uuid"], self.engine.now())
        self.end(conn, operation, "success", host=row["host"])
        allocations.release(conn, row["uuid"], now=self.engine.now(), group_uuid=row["server_group_id"])
        flavor = row["flavor"]
        quotas.release(
            conn, row["project_id"], {"instances": 1, "cores": flavor["vcpus"], "ram": flavor["ram"]}, row["user_id"]
        )

    async def fail(self, operation: Operation, error: Exception) -> None:
        """A delete is never given up: it is tried again, more and more slowly."""
        raise Unavailable(f"The delete is tried again: {error}")


def _has_networks(conn: sa.Connection, row: Any) -> bool:
    """Say whether the server may have ports: it has some, or asked for some that we may not know of yet."""
    spec = instances.specs(conn, [row["uuid"]]).get(row["uuid"])
    return bool(row["network_info"]) or spec is None or spec["networks"] != "none"
