"""What follows a resize or a cold migration: its confirmation, or its revert.

Confirming: `new` → `dispatched` (the source removes its guest: success). Reverting: the request lets the server belong
to its source again, with the old flavor; `new` → `dispatched` (the destination removes its guest, and what the server
holds there is given back) → `bind` (the ports return) → `finish` (the source makes the old guest run: success). The
last two are repeated until they succeed. The other host is the one that the server does not belong to.

Before one guest is removed, the host of the other guest must be up, for that guest is then the only one. The conductor
checks it when it sends the order, when it goes on without a host, and when the host asks right before it begins; that
host gets its answer when the other one has answered a call, or sent a heartbeat. Until then the operation waits; if
that lasts until its deadline, and no host has begun, the server is RESIZED again as before.

The other host, if it cannot remove its guest because it is down, fails, hangs or lacks something, does it later, when
it reads the record of the departure. Only a revert waits until its deadline for a destination that lacks something: the
guest there may run. The old guest is not started before that one is removed, or its host is down. If
source and destination are the same host, that host has both guests' disks, and its order says which of them to keep.
"""

import logging
from abc import abstractmethod
from typing import cast

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import reported_error
from micronova.conductor.operations.move_kind import MoveKind, move_order, needs_binding
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import minimal_order, work_order
from micronova.conductor.operations.transitions import Notification
from micronova.db import departures, instances, nodes, server_migrations
from micronova.objects import migration_states, states
from micronova.objects.block_device import resized
from micronova.objects.errors import HostUnavailable, OperationFailed, Unavailable
from micronova.objects.flavor import Flavor
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.migration import MigrationRow
from micronova.objects.network import VIF
from micronova.objects.operations import ResizedPayload, Step
from micronova.objects.orders import Report, WorkOrder

log = logging.getLogger(__name__)

FINISH_EVENT = "compute_finish_revert_resize"


class ResizedKind(MoveKind):
    """What the confirmation and the revert share."""

    notification: str

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Set the server to ERROR; it keeps the host that it belongs to."""
        if not await self.commit_failure(operation, error, self.failed):
            await self.overtaken(operation)

    def failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> StepResult:
        """End the operation: the server is in ERROR on the host that it belongs to."""
        migration, now = self.migration_of(conn, operation), self._engine.now()
        fault = fault_of(error, now)
        after = states.state_after(states.ACTIONS[self.name], row["vm_state"], failed=True)
        changes: InstanceChanges = {"vm_state": after, "task_state": None, "fault": fault}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        event = FINISH_EVENT if operation.step in ("bind", "finish") else None
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault, event=event)
        self.release(conn, operation, row, migration, migration_states.ERROR)
        return NoMoreWork(ended="error")

    @abstractmethod
    def release(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, status: str
    ) -> None:
        """Give the migration its last status, and release what it holds; the operation has ended."""

    async def _order_removal(self, operation: Operation, row: InstanceRow, host: str) -> None:
        """Order a host to remove its guest; order it again if the host's lease has expired."""
        order = await self.commit_dispatch(operation, "dispatched", self.dispatch, operation, row, host)
        if order is None:
            return
        if operation.step == "new":
            self.transitions.notify(f"{self.notification}.start", operation, row)
        await self.transitions.send(operation, order)

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Let a host remove its guest, if the other one can stay; one that does not ask may have begun from now on."""
        asks = nodes.host_asks(conn, host)
        since = None if asks else operation.created_at
        self.transitions.require_own_copy(conn, row, self.migration_of(conn, operation), since)
        if not asks:
            payload = msgspec.structs.replace(operation.payload_as(ResizedPayload), begun=True)
            operation = msgspec.structs.replace(operation, payload=payload.encode())
        return super().dispatch(conn, operation, row, host)

    def destruction_begins(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, unheard_since: int | None
    ) -> None:
        """Note that the host begins to remove its guest, if the other one can stay."""
        migration = self.migration_of(conn, operation)
        if operation.step == "dispatched" and server_migrations.other_host(row, migration) is not None:
            self.transitions.require_own_copy(conn, row, migration, since=unheard_since)
            payload = msgspec.structs.replace(operation.payload_as(ResizedPayload), begun=True)
            encoded = payload.encode()
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
        self.transitions.end(conn, operation, "error", fault=fault)
        server_migrations.update(conn, migration["uuid"], now, {"status": migration_states.FINISHED})
        return NoMoreWork(ended="error")

    def record_departure(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow
    ) -> None:
        """Record that the guest on the other host has to be removed."""
        other = server_migrations.other_host(row, migration)
        if other is not None:
            departures.record(conn, other, row["uuid"], operation.epoch, self._engine.now())

    async def continue_without_other_host(self, operation: Operation) -> None:
        """Continue without the other host: it removes its guest when it reads the record of the departure."""
        result = await self._engine.database.write(self._without_other_host, operation)
        self._engine.committed(self.name, "without host")
        if result is None:
            await self.overtaken(operation)
        else:
            await self.continue_with(operation, result)

    def _without_other_host(self, conn: sa.Connection, operation: Operation) -> StepResult | None:
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return None
        error = OperationFailed("The host does not answer any more.")
        return self.remove_later(conn, operation, row, self.migration_of(conn, operation), error)

    def remove_later(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, error: Exception
    ) -> StepResult:
        """Go on without the other host, which removes its guest later; raise HostUnavailable if that guest is the last.

        `error` is why it has not removed its guest now.
        """
        self.transitions.require_own_copy(conn, row, migration, since=operation.created_at)
        self.record_departure(conn, operation, row, migration)
        return self.after_removal(conn, operation, row, migration, error)

    @abstractmethod
    def after_removal(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: Exception | None = None,
    ) -> StepResult:
        """End or continue the operation: the server has only its own host.

        `error` is why the other host removes its guest only later, if it does.
        """


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
            await self.continue_without_other_host(operation)
            return
        await self._order_removal(operation, row, source)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to remove what the source still has."""
        migration = self.migration_of(conn, operation)
        return minimal_order(
            operation,
            row,
            now=self._engine.now(),
            host=migration["source_compute"],
            move=move_order(migration),
        )

    def failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> StepResult:
        """Confirm without a source that did not answer in time; set the server to ERROR if it is its own host.

        If the server's own host is down, nothing is removed; as long as no host has begun to, the server is as before.
        """
        migration = self.migration_of(conn, operation)
        if migration["source_compute"] == row["host"]:
            if operation.step == "new":
                return self.resized_again(conn, operation, row, migration, error, {})
            return super().failed(conn, operation, row, error)
        try:
            return self.remove_later(conn, operation, row, migration, error)
        except HostUnavailable:
            if operation.payload_as(ResizedPayload).begun:
                raise
            return self.resized_again(conn, operation, row, migration, error, {})

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Confirm without a source that lacks something; wait for it if it, or nothing else, has the guest."""
        migration = self.migration_of(conn, operation)
        if migration["source_compute"] == row["host"]:
            return super().postponed(conn, operation, row, report)
        try:
            return self.remove_later(conn, operation, row, migration, reported_error(report))
        except HostUnavailable:
            return super().postponed(conn, operation, row, report)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Confirm; a source that could not remove the guest does it later, unless it is the server's own host."""
        migration = self.migration_of(conn, operation)
        if report.outcome == "done":
            return self.after_removal(conn, operation, row, migration)
        if migration["source_compute"] == row["host"]:
            return self.failed(conn, operation, row, reported_error(report))
        return self.postponed(conn, operation, row, report)

    def after_removal(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: Exception | None = None,
    ) -> NoMoreWork:
        """End the operation: the resize is confirmed, even if the source removes its guest later."""
        now = self._engine.now()
        changes: InstanceChanges = {"vm_state": states.after_resize(row["power_state"]), "task_state": None}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=migration["source_compute"])
        self.release(conn, operation, row, migration, migration_states.CONFIRMED)
        return NoMoreWork(
            ended="success", notifications=[Notification(f"{self.notification}.end", changed(row, changes))]
        )

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
        """Return False when the other host has removed its guest, or does it later: the server needs its guest."""
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
        other = server_migrations.other_host(row, migration)
        if other is None or await self.transitions.host_is_down(other):
            await self.continue_without_other_host(operation)
            return
        await self._order_removal(operation, row, other)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Continue without a destination that did not answer in time, or whose order could not be made.

        If the source is down, too, nothing is removed; as long as the destination has not begun to, the server stays.
        """
        if not await self.commit_failure(operation, error, self._returned_or_stays):
            await self.overtaken(operation)

    def _returned_or_stays(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception
    ) -> StepResult:
        migration, payload = self.migration_of(conn, operation), operation.payload_as(ResizedPayload)
        try:
            result = self.remove_later(conn, operation, row, migration, error)
        except HostUnavailable:
            if payload.begun or not payload.destination:
                raise
            return self._stays(conn, operation, row, migration, error)
        log.warning(
            "the revert of the resize of server %s continues although its destination has not removed its guest, which "
            "it does when it is back: %s",
            operation.instance_uuid,
            error,
        )
        return result

    def _stays(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, error: Exception
    ) -> NoMoreWork:
        """Let the server belong to its destination again, where its guest is, with the new flavor."""
        old, new = (msgspec.convert(migration[key], Flavor) for key in ("old_flavor", "new_flavor"))
        instances.set_flavor(conn, row["uuid"], new)
        devices = instances.devices_of(conn, row["uuid"])
        instances.replace_devices(conn, row["uuid"], resized(devices, row["uuid"], old, new))
        destination = cast(InstanceChanges, operation.payload_as(ResizedPayload).destination)
        changes: InstanceChanges = {**destination, "flavor_id": new.id, "flavor": migration["new_flavor"]}
        return self.resized_again(conn, operation, row, migration, error, changes)

    def after_removal(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: Exception | None = None,
    ) -> Continue:
        """Persist that the server has only its own host, at the next epoch; from now on there is no deadline."""
        now = self._engine.now()
        if operation.step == "dispatched":  # else the event has not begun
            reason = None if error is None else fault_of(error, now)["message"]
            self.transitions.end_event(conn, operation, host=migration["dest_compute"], error=reason)
        step: Step = "bind" if needs_binding(conn, row, migration) else "finish"
        taken = self.transitions.advance(conn, operation, step, endless=True)
        server_migrations.leave_destination(conn, row, migration, migration_states.REVERTING, now)
        return Continue(taken, [Notification(f"{self.notification}.start", row)] if operation.step == "new" else [])

    async def _bind(self, operation: Operation, row: InstanceRow) -> None:
        assert row["host"] is not None
        await self._engine.database.read(self.transitions.require_no_other_guest, row["uuid"], row["host"])
        vifs = await self.transitions.rebind(operation, row, row["host"], row["availability_zone"])
        await self._finish(msgspec.structs.replace(operation, step="finish"), vifs)

    async def _finish(self, operation: Operation, vifs: tuple[VIF, ...] | None) -> None:
        order = await self.commit_dispatch(operation, "finish", self._dispatch_finish, operation, vifs)
        if order is not None:
            await self.transitions.send(operation, order)

    def _dispatch_finish(
        self, conn: sa.Connection, operation: Operation, vifs: tuple[VIF, ...] | None
    ) -> WorkOrder | None:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["host"] is None:
            return None
        self.transitions.require_no_other_guest(conn, row["uuid"], row["host"])
        changes: InstanceChanges = {} if vifs is None else {"network_info": msgspec.to_builtins(vifs)}
        dispatched = self.transitions.dispatch(conn, operation, row["host"], changes, step="finish", event=FINISH_EVENT)
        return None if dispatched is None else self.order(conn, dispatched, changed(row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to the destination, which removes its guest, or to the source, which has the old one."""
        migration = self.migration_of(conn, operation)
        now, move = self._engine.now(), move_order(migration)
        if operation.step != "finish":
            return minimal_order(operation, row, now=now, host=migration["dest_compute"], move=move)
        return work_order(conn, operation, row, kind="finish_revert_resize", now=now, move=move)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Continue with the source when the destination has reported; end when the old guest is back."""
        migration = self.migration_of(conn, operation)
        if operation.step != "finish":
            return self._removal_reported(conn, operation, row, report)
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
        return NoMoreWork(
            ended="success", notifications=[Notification(f"{self.notification}.end", changed(row, changes))]
        )

    def _removal_reported(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report
    ) -> StepResult:
        """Continue with the ports and the source; a destination that has not removed its guest does it later."""
        migration = self.migration_of(conn, operation)
        if report.outcome == "done":
            return self.after_removal(conn, operation, row, migration)
        try:
            return self.remove_later(conn, operation, row, migration, reported_error(report))
        except HostUnavailable:
            return self.postponed(conn, operation, row, report)

    def release(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, status: str
    ) -> None:
        """Give it its status: the rest was released after the removal."""
        server_migrations.update(conn, migration["uuid"], self._engine.now(), {"status": status})
