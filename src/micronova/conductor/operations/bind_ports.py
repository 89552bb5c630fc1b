"""Binding the ports and volumes of a server to its host again, after a later request has ended a move."""

import functools

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.follow_up_kind import FollowUpKind
from micronova.db import instances, server_migrations
from micronova.objects import migration_states, states
from micronova.objects.errors import Unavailable
from micronova.objects.instance import InstanceRow
from micronova.objects.network import VIF
from micronova.objects.operations import BIND_PORTS


class BindPorts(FollowUpKind):
    """The operation that follows `os-resetState` or a soft delete of a server that moves, and an offload that failed.

    If a later request moves or offloads the server, this waits until the server is on its new host, or on none: till
    then that request decides where the ports are.
    """

    name = BIND_PORTS
    action_event = "conductor_bind_ports"

    async def run(self, operations: list[Operation]) -> None:
        """Bind them, unless the server is gone, is being deleted, or has no host."""
        for operation in operations:
            row = await self._engine.database.read(instances.get, operation.instance_uuid)
            if row is None or row["host"] is None or row["task_state"] == states.DELETING:
                await self.end(operation)
                continue
            check = functools.partial(self._check, operation, row["host"])
            lock = functools.partial(self._lock, row["host"])
            vifs = await self.transitions.rebind(operation, row, row["host"], row["availability_zone"], check, lock)
            await self.end(operation, functools.partial(self._bound, row["host"], vifs))

    async def _check(self, operation: Operation, host: str) -> None:
        """Raise Stale if the operation has another owner, Unavailable unless the server stays on this host."""
        await self.transitions.check_current(operation)
        if not await self._engine.database.read(self._stays, operation.instance_uuid, host):
            raise Unavailable(f"The server moves, leaves its host, or has left host {host}.")

    def _lock(self, host: str, conn: sa.Connection, operation: Operation) -> InstanceRow | None:
        """Lock the server, and return it if its volumes may be connected to this host."""
        row = instances.lock(conn, operation.instance_uuid)
        return (
            row
            if self.transitions.lock_and_is_current(conn, operation)
            and self._stays(conn, operation.instance_uuid, host)
            else None
        )

    def _stays(self, conn: sa.Connection, instance_uuid: str, host: str) -> bool:
        row, migration = instances.get(conn, instance_uuid), server_migrations.open_of(conn, instance_uuid)
        moves = migration is not None and migration["status"] in migration_states.UNDER_WAY
        if row is None or row["task_state"] == states.SHELVING_OFFLOADING:  # its ports are being unbound
            return False
        return row["host"] == host and not moves

    def _bound(self, host: str, vifs: tuple[VIF, ...] | None, conn: sa.Connection, row: InstanceRow) -> None:
        if vifs is not None and self._stays(conn, row["uuid"], host):
            instances.update(conn, row["uuid"], self._engine.now(), {"network_info": msgspec.to_builtins(vifs)})
