"""How the steps of a move end: the server is resized, another host is tried, or the move is undone.

All methods run in a transaction, under the lock of the instance: the server, its migration, its claims, the operation
and its instance action change together.
"""

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.move_kind import needs_binding
from micronova.conductor.operations.move_types import MoveType
from micronova.conductor.operations.operation_kind import Continue, FailedTask, NoMoreWork
from micronova.conductor.operations.placing import host_changes
from micronova.conductor.operations.transitions import Notification, Transitions
from micronova.db import departures, instances, server_migrations
from micronova.objects import migration_states, power_state, states
from micronova.objects.block_device import resized
from micronova.objects.errors import MicronovaError, NoValidHost
from micronova.objects.flavor import Flavor
from micronova.objects.instance import Fault, InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.migration import MigrationRow
from micronova.objects.operations import MovePayload, Step
from micronova.objects.orders import Report


class MoveOutcomes:
    """The transactions in which the steps of one kind of move end."""

    def __init__(self, dependencies: ConductorDependencies, transitions: Transitions, move_type: MoveType) -> None:
        self._type = move_type
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._transitions = transitions

    def finished(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        report: Report,
        event: str,
    ) -> NoMoreWork:
        """Let the server belong to its destination. After a cold move it waits for the confirmation of its owner."""
        now = self._engine.now()
        payload = operation.payload_as(MovePayload)
        assert payload.chosen is not None
        old = msgspec.convert(migration["old_flavor"], Flavor)
        new = msgspec.convert(migration["new_flavor"], Flavor)
        changes: InstanceChanges = {
            **host_changes(payload.chosen),
            "vm_state": states.state_after(states.ACTIONS[operation.kind], row["vm_state"]),
            "task_state": None,
            "power_state": row["power_state"] if report.power_state is None else report.power_state,
            "progress": 0,
        }
        if not self._type.live:
            changes |= {
                "flavor_id": new.id,
                "flavor": migration["new_flavor"],
                "launched_at": now,
            }
        if payload.disk_config is not None:
            changes["disk_config"] = payload.disk_config
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self._transitions.end(conn, operation, "success", host=report.host, event=event)
        if self._type.live:
            # The source still has the guest, which does not run any more.
            departures.record(conn, migration["source_compute"], row["uuid"], operation.epoch, now)
            server_migrations.stay_on_destination(conn, row, migration, migration_states.COMPLETED, now)
        else:
            instances.set_flavor(conn, row["uuid"], new)
            devices = resized(instances.devices_of(conn, row["uuid"]), row["uuid"], old, new)
            instances.replace_devices(conn, row["uuid"], devices)
            server_migrations.update(conn, migration["uuid"], now, {"status": migration_states.FINISHED})
        after = changed(row, changes)
        notifications = [Notification(self._type.notifications.finished, after)]
        if (name := self._type.notifications.source_finished) is not None:
            notifications.append(Notification(name, after, sender=migration["source_compute"]))
        return NoMoreWork(ended="success", notifications=notifications)

    def give_up(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: Exception,
        *,
        event: str,
        notifications: Sequence[Notification] = (),
    ) -> NoMoreWork:
        """End a move whose server is on its source as before: its guest was not touched.

        If no host is left, because this conductor has found none or all have refused, a notification tells of it.
        """
        fault = fault_of(error, self._engine.now())
        values = self._stay(conn, operation, row, migration, fault, migration_states.ERROR)
        self._transitions.end(conn, operation, "error", fault=fault, event=event)
        failed_task = None
        if isinstance(error, NoValidHost) or operation.step == "schedule":
            spec = instances.request_spec(conn, row["uuid"])
            failed_task = FailedTask("migrate_server", changed(row, values), spec, fault)
        return NoMoreWork(ended="error", notifications=notifications, failed_task=failed_task)

    def _stay(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        fault: Fault,
        status: str,
        changes: InstanceChanges | None = None,
    ) -> InstanceChanges:
        """Let the server belong to its source, with a fault; return what has changed.

        The epoch is raised: a scheduler that stood still claims nothing for the move any more.
        """
        now = self._engine.now()
        after = states.state_after(states.ACTIONS[operation.kind], row["vm_state"], failed=True)
        values: InstanceChanges = {"vm_state": after, "task_state": None, "fault": fault, **(changes or {})}
        values["epoch"] = operation.epoch + 1
        instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
        server_migrations.stay_on_source(conn, row, migration, status, now)
        return values

    def begin_undo(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: MicronovaError,
        *,
        event: str,
        sent: bool,
        left_behind: bool,
    ) -> Continue:
        """Persist that the guest returns to the source as it was; that is repeated until it succeeds.

        If the source has `sent` the guest, the destination may have made it, and removes it; `left_behind` says that it
        has not done so itself, and the guest may run. Raise HostUnavailable, and change nothing, if the source is down
        then: nothing else has the guest.
        """
        now = self._engine.now()
        if sent:
            self._transitions.require_own_copy(conn, row, migration)
        payload = operation.payload_as(MovePayload)
        payload.error = payload.last_error = error.message
        payload.migrate_data, payload.sent, payload.undo_awaits_removal = b"", sent, left_behind
        assert payload.chosen is not None
        self._transitions.end_event(conn, operation, host=None, error=error.message, event=event)
        if sent and payload.chosen.host != row["host"]:
            departures.record(conn, payload.chosen.host, row["uuid"], operation.epoch, now)
            self.copy_is_removed(conn, migration)
        step: Step = "unbind" if sent and needs_binding(conn, row, migration) else "undo"
        encoded = payload.encode()
        taken = self._transitions.advance(conn, operation, step, payload=encoded, endless=True)
        return Continue(taken, self._about_undo(self._type.notifications.undo, row))

    def copy_is_removed(self, conn: sa.Connection, migration: MigrationRow) -> None:
        """Record that from now on the copy on the destination may be gone."""
        returns = self._type.statuses.under_way
        server_migrations.update(conn, migration["uuid"], self._engine.now(), {"status": returns})

    def _about_undo(self, name: str | None, row: InstanceRow) -> list[Notification]:
        """Return the notification that an undo begins or has ended, if there is one: it has no fault, as in Nova."""
        return [] if name is None else [Notification(name, row)]

    def undone(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        report: Report,
        *,
        event: str,
    ) -> NoMoreWork:
        """End a move that was undone. If the source could not make the guest run again, the server is in ERROR."""
        payload = operation.payload_as(MovePayload)
        changes: InstanceChanges = {}
        message = payload.error
        if report.outcome != "done":
            changes["vm_state"] = states.ERROR
            message = f"{payload.error} The source could not restore the guest: {report.message}"
        elif report.power_state is not None:
            changes["power_state"] = report.power_state
        else:
            changes["power_state"] = power_state.NOSTATE
        fault = fault_of(MicronovaError(message), self._engine.now())
        values = self._stay(conn, operation, row, migration, fault, self._type.statuses.undone, changes)
        if event:
            failed = None if report.outcome == "done" else report.message
            self._transitions.end_event(conn, operation, host=report.host, error=failed, event=event)
        self._transitions.end_without_event(conn, operation)
        after = changed(row, values)
        about_destination = [] if payload.sent else self._about_destination(payload, after)
        return NoMoreWork(
            ended="error", notifications=[*about_destination, *self._about_undo(self._type.notifications.undone, after)]
        )

    def _about_destination(self, payload: MovePayload, row: InstanceRow) -> list[Notification]:
        """Return the notifications that the destination has nothing of the guest, if there are any.

        If the guest was sent to it, a heartbeat tells when the destination has removed it.
        """
        name = self._type.notifications.undone_on_destination
        if name is None or payload.chosen is None:
            return []
        return [Notification(f"{name}.{phase}", row, sender=payload.chosen.host) for phase in ("start", "end")]
