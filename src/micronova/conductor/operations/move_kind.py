"""What the kinds share that move a server or end a move."""

from typing import TypeVar

import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import SteppedKind
from micronova.conductor.operations.placed_kind import PlacedKind
from micronova.conductor.operations.placing import ServerToPlace
from micronova.db import instances, server_migrations
from micronova.db import operations as operation_rows
from micronova.objects.instance import InstanceRow
from micronova.objects.migration import MigrationChanges, MigrationRow
from micronova.objects.operations import MigrationPayload
from micronova.objects.scheduling import RequestSpec

P = TypeVar("P", bound=MigrationPayload)


class MoveKind(SteppedKind):
    """A kind of operation on a server that has two places."""

    moves_servers = True

    async def overtaken(self, operation: Operation) -> None:
        """Cancel, unless another conductor continues; the later request has released what the migration held."""
        if not await self._engine.database.read(self.transitions.continued_elsewhere, operation):
            await self.transitions.cancel(operation)


class PlacedMoveKind(PlacedKind, MoveKind):
    """A kind of move for which the scheduler chooses a destination."""

    def record_destination(self, conn: sa.Connection, server: ServerToPlace[P], status: str) -> None:
        """Record the chosen host in the migration, and why the scheduler chose it."""
        operation, chosen = server.operation, server.chosen
        if server.explanation is not None:
            own = server.explanation.of_one(chosen.host, chosen.node, "")
            operation_rows.explain(conn, operation.id, own, again=bool(server.payload.tried))
        changes: MigrationChanges = {
            "status": status,
            "dest_compute": chosen.host,
            "dest_node": chosen.node,
            "dest_host": server_migrations.address_of(conn, chosen.node_uuid),
        }
        server_migrations.update(conn, server.payload.migration, self._engine.now(), changes)


Loaded = tuple[InstanceRow, MigrationRow, RequestSpec]


def load(conn: sa.Connection, operation: Operation, migration_uuid: str) -> Loaded | None:
    """Return server, migration and request spec; None if a later request has overtaken the operation."""
    row = instances.get(conn, operation.instance_uuid)
    spec = instances.specs(conn, [operation.instance_uuid]).get(operation.instance_uuid)
    migration = server_migrations.get(conn, migration_uuid)
    if row is None or row["epoch"] != operation.epoch or row["host"] is None or spec is None or migration is None:
        return None
    return row, migration, instances.request_of(spec)
