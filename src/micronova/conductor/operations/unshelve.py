"""Unshelving a server that has not left its host: the host starts the guest, which it still has."""

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.power import Power
from micronova.objects import states
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.orders import WorkOrder


class Unshelve(Power):
    """Starts the guest of a server that is SHELVED, on the host that it has not left."""

    def __init__(self, dependencies: ConductorDependencies) -> None:
        super().__init__(dependencies, "unshelve")

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Make the host the owner; the server is being started from now on."""
        changes: InstanceChanges = {"task_state": states.POWERING_ON}
        dispatched = self.transitions.dispatch(conn, operation, host, changes)
        return None if dispatched is None else self.order(conn, dispatched, changed(row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to start the guest."""
        return msgspec.structs.replace(super().order(conn, operation, row), kind="start")
