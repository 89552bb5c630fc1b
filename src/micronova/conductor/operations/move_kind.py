"""The base class of the kinds that move a server, or confirm or revert a move, and what these kinds share."""

from typing import TypeVar

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.destinations import record_explanation
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import SteppedKind
from micronova.conductor.operations.placing import ServerToPlace
from micronova.conductor.operations.transitions import server_of
from micronova.db import instances, port_claims, server_migrations
from micronova.objects import states
from micronova.objects.flavor import Flavor
from micronova.objects.instance import InstanceRow
from micronova.objects.migration import MigrationChanges, MigrationRow
from micronova.objects.operations import MigrationPayload, MigrationReference
from micronova.objects.orders import MoveOrder

P = TypeVar("P", bound=MigrationPayload)


class MoveKind(SteppedKind):
    """A kind of operation on a server that has two hosts."""

    moves_servers = True

    def load(self, conn: sa.Connection, operation: Operation) -> tuple[InstanceRow, MigrationRow] | None:
        """Return server and migration; None if a later request has overtaken the operation."""
        row = server_of(conn, operation)
        if row is None or row["host"] is None:
            return None
        return row, self.migration_of(conn, operation)

    def migration_of(self, conn: sa.Connection, operation: Operation) -> MigrationRow:
        """Return the migration of an operation whose server exists."""
        migration = server_migrations.get(conn, operation.payload_as(MigrationReference).migration)
        assert migration is not None  # it is kept as long as its server
        return migration

    async def overtaken(self, operation: Operation) -> None:
        """Cancel, unless another conductor continues; the later request has released what the migration held."""
        if not await self._engine.database.read(self.transitions.continued_elsewhere, operation):
            await self.transitions.cancel(operation)

    def record_destination(self, conn: sa.Connection, server: ServerToPlace[P], status: str) -> None:
        """Record the chosen host in the migration, and why the scheduler chose it."""
        record_explanation(conn, server)
        chosen = server.chosen
        changes: MigrationChanges = {
            "status": status,
            "dest_compute": chosen.host,
            "dest_node": chosen.node,
            "dest_host": server_migrations.address_of(conn, chosen.node_uuid),
        }
        server_migrations.update(conn, server.payload.migration, self._engine.now(), changes)


def needs_binding(conn: sa.Connection, row: InstanceRow, migration: MigrationRow) -> bool:
    """Return whether ports or volumes of a server are bound again when it goes from one host of a move to the other.

    On the same host, too, another provider may serve a port.
    """
    away = migration["dest_compute"] != migration["source_compute"]
    moves = away and instances.has_ports_or_volumes(conn, row)
    return moves or port_claims.holds_any(conn, row["uuid"], migration["uuid"])


def move_order(
    migration: MigrationRow, *, sent: bool = True, migrate_data: bytes = b"", mdev_types: tuple[str, ...] = ()
) -> MoveOrder:
    """Return what an order says of the move; the destination is chosen."""
    assert migration["dest_compute"] is not None
    return MoveOrder(
        source=migration["source_compute"],
        destination=migration["dest_compute"],
        old_flavor=msgspec.convert(migration["old_flavor"], Flavor),
        power_on=migration["old_vm_state"] == states.ACTIVE,
        sent=sent,
        migrate_data=migrate_data,
        mdev_types=mdev_types,
    )
