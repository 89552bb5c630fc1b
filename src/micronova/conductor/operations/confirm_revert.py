"""What follows a resize or a cold migration: its confirmation, or its revert.

Confirming: `new` → `dispatched` (the source removes the guest that left: success). Reverting: the request lets the
server belong to its source again, with the old flavor; `new` → `dispatched` (the destination removes its guest, and
what the server holds there is given back) → `bind` (the ports return) → `finish` (the source makes the old guest run:
success). The last two are repeated until they succeed.

Before one guest is removed, the host of the other one must be up: that guest is all that is left. The conductor checks
it when it sends the order, when it goes on without a host, and when the host asks right before it begins. Until then
the operation waits; if that lasts until its deadline, and no host has begun, the server is RESIZED again as before.

A place that is left and cannot remove its guest, because it is down, fails, hangs or
lacks something, does it later, when it reads the record of the departure. Only a revert waits until its deadline for a
destination that lacks something: the guest there may run. If source and destination are the same host, that host has
both guests' disks, and its order says which of them to keep.
"""

import logging
from abc import abstractmethod
from typing import cast

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import Continue, NoMoreWork, ReportResult, reported_error
from micronova.conductor.operations.move_kind import MoveKind
from micronova.conductor.operations.orders import devices_of, removal_order, work_order
from micronova.db import departures, instances, server_migrations
from micronova.objects import migration_states, states
from micronova.objects.block_device import resized
from micronova.objects.errors import Unavailable
from micronova.objects.flavor import Flavor
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.migration import MigrationRow
from micronova.objects.network import VIF
from micronova.objects.operations import ResizedPayload, Step
from micronova.objects.orders import MoveOrder, Report, WorkOrder

log = logging.getLogger(__name__)

FINISH_EVENT = "compute_finish_revert_resize"


class ResizedKind(MoveKind):
    """What the confirmation and the revert share."""

    notification: str

    def load(self, conn: sa.Connection, operation: Operation) -> tuple[InstanceRow, MigrationRow] | None:
        """Return server and migration; None if a later request has overtaken the operation."""
        row = instances.get(conn, operation.instance_uuid)
        migration = _migration(conn, operation)
        if row is None or row["epoch"] != operation.epoch or row["host"] is None or migration is None:
            return None
        return row, migration

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Set the server to ERROR; it keeps the place that it belongs to."""
        if not await self.recorded_failure(operation, error, self.failed):
            await self.overtaken(operation)

    def failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        """End the operation: the server is in ERROR in the place that it belongs to."""
        migration, now = _migration(conn, operation), self._engine.now()
        assert migration is not None
        fault = fault_of(error, now)
        changes: InstanceChanges = {"vm_state": states.ERROR, "task_state": None, "fault": fault}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        event = FINISH_EVENT if operation.step in ("bind", "finish") else None
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault, event=event)
        self.release(conn, operation, row, migration, migration_states.ERROR)
        return NoMoreWork(ended="error", notifications=[(f"{self.notification}.error", changed(row, changes), fault)])

    @abstractmethod
    def release(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, status: str
    ) -> None:
        """Give the migration its last status, and release what it holds; the operation has ended."""

    def may_leave(self, conn: sa.Connection, row: InstanceRow, migration: MigrationRow) -> None:
        """Raise Unavailable unless the server's own host is up, if its other guest is on another host."""
        if server_migrations.other_place(row, migration) is not None:
            self.transitions.require_up(conn, row["host"] or "")

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Let a host remove its guest, if the other one can stay."""
        migration = _migration(conn, operation)
        assert migration is not None
        self.may_leave(conn, row, migration)
        return super().dispatch(conn, operation, row, host)

    def destruction_begins(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> None:
        """Note that the host begins to remove its guest, if the other one can stay."""
        migration = _migration(conn, operation)
        assert migration is not None
        if operation.step == "dispatched" and server_migrations.other_place(row, migration) is not None:
            self.may_leave(conn, row, migration)
            payload = msgspec.structs.replace(_payload(operation), begun=True)
            encoded = msgspec.msgpack.encode(payload)
            self.transitions.persist(conn, operation, operation.step, payload=encoded, owner=operation.owner)

    def resized_again(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: Exception,
        changes: InstanceChanges,
    ) -> NoMoreWork:
        """End an operation that has changed no guest: the server waits for its owner, as before.

        The epoch is raised, so that no host carries out an order of the operation.
        """
        now = self._engine.now()
        fault = fault_of(error, now)
        changes = {**changes, "task_state": None, "fault": fault, "epoch": operation.epoch + 1}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault)
        server_migrations.update(conn, migration["uuid"], now, {"status": migration_states.FINISHED})
        return NoMoreWork(ended="error", notifications=[(f"{self.notification}.error", changed(row, changes), fault)])

    def record_departure(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow
    ) -> None:
        """Record that the guest in the other place has to be removed."""
        other = server_migrations.other_place(row, migration)
        if other is not None:
            departures.record(conn, other, row["uuid"], operation.epoch, self._engine.now())


class ConfirmResize(ResizedKind):
    """The operation behind the server action `confirmResize`."""

    name = "confirm_resize"
    action_event = "compute_confirm_resize"
    notification = "resize_confirm"

    async def run_one(self, operation: Operation) -> None:
        """Order the source to remove the guest; continue without a source that is down."""
        loaded = await self._engine.database.read(self.load, operation)
        if loaded is None:
            await self.overtaken(operation)
            return
        row, migration = loaded
        source = migration["source_compute"]
        if await self.transitions.host_is_down(source):
            if source == row["host"]:
                raise Unavailable(f"Host {source} does not answer.")
            await self._continue_without_source(operation)
            return
        order = await self._engine.database.write(self.dispatch, operation, row, source)
        self._engine.committed(self.name, "dispatched")
        if order is None:
            await self.overtaken(operation)
            return
        if operation.step == "new":
            self.transitions.notify(f"{self.notification}.start", operation, row)
        await self.transitions.send(operation, order)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to remove what the source still has."""
        migration = _migration(conn, operation)
        assert migration is not None
        return removal_order(
            operation,
            row,
            now=self._engine.now(),
            host=migration["source_compute"],
            move=_move_order(migration),
        )

    def failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        """Confirm without a source that did not answer in time; set the server to ERROR if it is its own host.

        If the server's own host is down, nothing is removed; as long as no host has begun to, the server is as before.
        """
        migration = _migration(conn, operation)
        assert migration is not None
        if migration["source_compute"] == row["host"]:
            if operation.step == "new":
                return self.resized_again(conn, operation, row, migration, error, {})
            return super().failed(conn, operation, row, error)
        try:
            return self._confirmed_without_source(conn, operation, row, migration)
        except Unavailable:
            if _payload(operation).begun:
                raise
            return self.resized_again(conn, operation, row, migration, error, {})

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Confirm without a source that lacks something; wait for it if it, or nothing else, has the guest."""
        migration = _migration(conn, operation)
        assert migration is not None
        if migration["source_compute"] == row["host"]:
            return super().postponed(conn, operation, row, report)
        try:
            return self._confirmed_without_source(conn, operation, row, migration)
        except Unavailable:
            return super().postponed(conn, operation, row, report)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Confirm; a source that could not remove the guest does it later, unless it is the server's own host."""
        migration = _migration(conn, operation)
        assert migration is not None
        if report.outcome == "done":
            return self._confirmed(conn, operation, row, migration)
        if migration["source_compute"] == row["host"]:
            return self.failed(conn, operation, row, reported_error(report))
        return self.postponed(conn, operation, row, report)

    async def _continue_without_source(self, operation: Operation) -> None:
        result = await self._engine.database.write(self._without_source, operation)
        self._engine.committed(self.name, "source left")
        if result is None:
            await self.overtaken(operation)
        else:
            self.announce(operation, result)

    def _without_source(self, conn: sa.Connection, operation: Operation) -> NoMoreWork | None:
        row, migration = self.transitions.lock_current(conn, operation), _migration(conn, operation)
        if row is None or migration is None:
            return None
        return self._confirmed_without_source(conn, operation, row, migration)

    def _confirmed_without_source(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow
    ) -> NoMoreWork:
        """Confirm; the source removes its guest later. Raise Unavailable if that guest is all that is left."""
        self.may_leave(conn, row, migration)
        self.record_departure(conn, operation, row, migration)
        return self._confirmed(conn, operation, row, migration)

    def _confirmed(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow
    ) -> NoMoreWork:
        now = self._engine.now()
        changes: InstanceChanges = {"vm_state": states.after_resize(row["power_state"]), "task_state": None}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=migration["source_compute"])
        self.release(conn, operation, row, migration, migration_states.CONFIRMED)
        return NoMoreWork(ended="success", notifications=[(f"{self.notification}.end", changed(row, changes), None)])

    def release(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, status: str
    ) -> None:
        """Release what the migration holds on the source."""
        server_migrations.stay_on_destination(conn, row, migration, status, self._engine.now())


class RevertResize(ResizedKind):
    """The operation behind the server action `revertResize`."""

    name = "revert_resize"
    action_event = "compute_revert_resize"
    notification = "resize_revert"

    def may_fail(self, operation: Operation) -> bool:
        """Return False when the destination is left: the server needs its ports and its guest."""
        return operation.step not in ("bind", "finish")

    async def run_one(self, operation: Operation) -> None:
        """Continue from the persisted step."""
        loaded = await self._engine.database.read(self.load, operation)
        if loaded is None:
            await self.overtaken(operation)
            return
        row, migration = loaded
        if operation.step in ("new", "dispatched"):
            await self._remove(operation, row, migration)
        elif operation.step == "bind":
            await self._bind(operation, row)
        elif await self.transitions.host_is_down(row["host"] or ""):
            raise Unavailable(f"Host {row['host']} does not answer.")
        else:
            await self._finish(operation, None)

    async def _remove(self, operation: Operation, row: InstanceRow, migration: MigrationRow) -> None:
        """Let the destination remove its guest; continue without one that is down, or if it is the source, too."""
        other = server_migrations.other_place(row, migration)
        if other is None or await self.transitions.host_is_down(other):
            await self._continue_without_destination(operation, row)
            return
        order = await self._engine.database.write(self.dispatch, operation, row, other)
        self._engine.committed(self.name, "dispatched")
        if order is None:
            await self.overtaken(operation)
            return
        if operation.step == "new":
            self.transitions.notify(f"{self.notification}.start", operation, row)
        await self.transitions.send(operation, order)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Continue without a destination that did not answer in time, or could not be told.

        If the source is down, too, nothing is removed; as long as the destination has not begun to, the server stays.
        """
        if not await self.recorded_failure(operation, error, self._returned_or_stays):
            await self.overtaken(operation)

    def _returned_or_stays(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception
    ) -> ReportResult:
        migration, payload = _migration(conn, operation), _payload(operation)
        assert migration is not None
        try:
            taken = self._left_behind(conn, operation, row, migration)
        except Unavailable:
            if payload.begun or not payload.destination:
                raise
            return self._stays(conn, operation, row, migration, error)
        log.warning("server %s returns without its destination: %s", operation.instance_uuid, error)
        return Continue(taken)

    def _stays(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, error: Exception
    ) -> NoMoreWork:
        """Let the server belong to its destination again, where its guest is, with the new flavor."""
        old, new = (msgspec.convert(migration[key], Flavor) for key in ("old_flavor", "new_flavor"))
        instances.set_flavor(conn, row["uuid"], new)
        instances.replace_devices(conn, row["uuid"], resized(devices_of(conn, row["uuid"]), row["uuid"], old, new))
        place = cast(InstanceChanges, _payload(operation).destination)
        changes: InstanceChanges = {**place, "flavor_id": new.id, "flavor": migration["new_flavor"]}
        return self.resized_again(conn, operation, row, migration, error, changes)

    async def _continue_without_destination(self, operation: Operation, row: InstanceRow) -> None:
        taken = await self._engine.database.write(self._without_destination, operation)
        self._engine.committed(self.name, "destination left")
        if taken is None:
            await self.overtaken(operation)
            return
        if operation.step == "new":
            self.transitions.notify(f"{self.notification}.start", operation, row)
        await self.run([taken])

    def _without_destination(self, conn: sa.Connection, operation: Operation) -> Operation | None:
        row, migration = self.transitions.lock_current(conn, operation), _migration(conn, operation)
        if row is None or migration is None:
            return None
        return self._left_behind(conn, operation, row, migration)

    def _left_behind(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow
    ) -> Operation:
        """Go on without the destination, which removes its guest later; raise Unavailable if nothing else is left."""
        self.may_leave(conn, row, migration)
        self.record_departure(conn, operation, row, migration)
        return self._advance(conn, operation, row, migration)

    def _advance(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow
    ) -> Operation:
        """Persist that the destination is left, at the next epoch; from now on there is no deadline."""
        away = migration["dest_compute"] != row["host"]
        step: Step = "bind" if away and row["network_info"] else "finish"
        taken = self.transitions.advance(conn, operation, step, endless=True)
        server_migrations.leave_destination(conn, row, migration, migration_states.REVERTING, self._engine.now())
        return taken

    async def _bind(self, operation: Operation, row: InstanceRow) -> None:
        assert row["host"] is not None
        vifs = await self.rebind(operation, row, row["host"], row["availability_zone"])
        await self._finish(msgspec.structs.replace(operation, step="finish"), vifs)

    async def _finish(self, operation: Operation, vifs: tuple[VIF, ...] | None) -> None:
        order = await self._engine.database.write(self._dispatch_finish, operation, vifs)
        self._engine.committed(self.name, "finish")
        if order is None:
            await self.overtaken(operation)
        else:
            await self.transitions.send(operation, order)

    def _dispatch_finish(
        self, conn: sa.Connection, operation: Operation, vifs: tuple[VIF, ...] | None
    ) -> WorkOrder | None:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["host"] is None:
            return None
        changes: InstanceChanges = {} if vifs is None else {"network_info": msgspec.to_builtins(vifs)}
        dispatched = self.transitions.dispatch(conn, operation, row["host"], changes, step="finish", event=FINISH_EVENT)
        return None if dispatched is None else self.order(conn, dispatched, changed(row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to the destination, which removes its guest, or to the source, which has the old one."""
        migration = _migration(conn, operation)
        assert migration is not None
        now, move = self._engine.now(), _move_order(migration)
        if operation.step != "finish":
            return removal_order(operation, row, now=now, host=migration["dest_compute"], move=move)
        return work_order(conn, operation, row, kind="finish_revert_resize", now=now, move=move)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Continue with the source when the destination is left; end when the old guest is back."""
        migration = _migration(conn, operation)
        assert migration is not None
        if operation.step != "finish":
            return self._destination_left(conn, operation, row, report)
        if report.outcome != "done":
            return self.failed(conn, operation, row, reported_error(report))
        now = self._engine.now()
        power = row["power_state"] if report.power_state is None else report.power_state
        changes: InstanceChanges = {
            "vm_state": states.after_resize(power),
            "task_state": None,
            "power_state": power,
            "launched_at": now,
        }
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host, event=FINISH_EVENT)
        self.release(conn, operation, row, migration, migration_states.REVERTED)
        return NoMoreWork(ended="success", notifications=[(f"{self.notification}.end", changed(row, changes), None)])

    def _destination_left(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report
    ) -> ReportResult:
        """Continue with the ports and the source; a destination that has not removed its guest does it later."""
        migration = _migration(conn, operation)
        assert migration is not None
        if report.outcome == "done":
            taken = self._advance(conn, operation, row, migration)
            self.transitions.end_event(conn, operation, host=report.host)
            return Continue(taken)
        try:
            taken = self._left_behind(conn, operation, row, migration)
        except Unavailable:
            return self.postponed(conn, operation, row, report)
        self.transitions.end_event(conn, operation, host=report.host, error=reported_error(report).message)
        return Continue(taken)

    def release(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, status: str
    ) -> None:
        """Give it its status: the request to revert has released the rest, and the destination is left."""
        server_migrations.update(conn, migration["uuid"], self._engine.now(), {"status": status})


def _payload(operation: Operation) -> ResizedPayload:
    return msgspec.msgpack.decode(operation.payload, type=ResizedPayload)


def _migration(conn: sa.Connection, operation: Operation) -> MigrationRow | None:
    return server_migrations.get(conn, _payload(operation).migration)


def _move_order(migration: MigrationRow) -> MoveOrder:
    return MoveOrder(
        source=migration["source_compute"],
        destination=migration["dest_compute"] or "",
        old_flavor=msgspec.convert(migration["old_flavor"], Flavor),
        power_on=migration["old_vm_state"] == states.ACTIVE,
    )
