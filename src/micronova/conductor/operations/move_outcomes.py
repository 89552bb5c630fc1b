"""How the steps of a move end: the server is resized, another host is tried, or the move is undone.

All methods run in a transaction, under the lock of the instance: the server, its migration, its claims, the operation
and its instance action change together.
"""

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.move_names import MoveNames
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork
from micronova.conductor.operations.orders import devices_of
from micronova.conductor.operations.placing import place_of
from micronova.conductor.operations.transitions import Notification, Transitions
from micronova.db import departures, instances, server_migrations
from micronova.objects import migration_states, power_state, states
from micronova.objects.block_device import resized
from micronova.objects.errors import MicronovaError
from micronova.objects.flavor import Flavor
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.migration import MigrationRow
from micronova.objects.operations import MovePayload, Step
from micronova.objects.orders import Report

CONDUCTOR_EVENT = "conductor_migrate_server"
"""The event of a move that never reached a host."""


class MoveOutcomes:
    """The transactions in which the steps of one kind of move end."""

    def __init__(self, dependencies: ConductorDependencies, transitions: Transitions, names: MoveNames) -> None:
        self._names = names
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._transitions = transitions

    def arrived(
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
            **place_of(payload.chosen),
            "vm_state": states.state_after(states.ACTIONS[operation.kind], row["vm_state"]),
            "task_state": None,
            "power_state": row["power_state"] if report.power_state is None else report.power_state,
            "progress": 0,
        }
        if not self._names.live:
            changes |= {
                "flavor_id": new.id,
                "flavor": migration["new_flavor"],
                "launched_at": now,
            }
        if payload.disk_config is not None:
            changes["disk_config"] = payload.disk_config
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self._transitions.end(conn, operation, "success", host=report.host, event=event)
        if self._names.live:
            # The source still has the guest, which does not run any more.
            departures.record(conn, migration["source_compute"], row["uuid"], operation.epoch, now)
            server_migrations.stay_on_destination(conn, row, migration, migration_states.COMPLETED, now)
        else:
            instances.set_flavor(conn, row["uuid"], new)
            devices = resized(devices_of(conn, row["uuid"]), row["uuid"], old, new)
            instances.replace_devices(conn, row["uuid"], devices)
            server_migrations.update(conn, migration["uuid"], now, {"status": migration_states.FINISHED})
        after = changed(row, changes)
        notifications: list[Notification] = [(self._names.notifications["finished"], after, None)]
        if self._names.live:  # the source has nothing more to do
            left: InstanceRow = {**after, "host": migration["source_compute"], "node": migration["source_node"]}
            notifications.append((self._names.notifications["left"], left, None))
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
        changes: InstanceChanges | None = None,
        undone: bool = False,
    ) -> NoMoreWork:
        """End a move whose server is on its source as before, except for `changes`.

        The epoch is raised: a scheduler that stood still claims nothing for the move any more.
        """
        now = self._engine.now()
        fault = fault_of(error, now)
        after = states.state_after(states.ACTIONS[operation.kind], row["vm_state"], failed=True)
        values: InstanceChanges = {"vm_state": after, "task_state": None, "fault": fault, **(changes or {})}
        values["epoch"] = operation.epoch + 1
        instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
        self._transitions.end(conn, operation, "error", host=row["host"], fault=fault, event=event)
        status = self._names.statuses["undone"] if undone else migration_states.ERROR
        server_migrations.stay_on_source(conn, row, migration, status, now)
        name = self._names.notifications["undone" if undone else "failed"]
        return NoMoreWork(ended="error", notifications=[(name, changed(row, values), fault)])

    def begin_undo(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        error: MicronovaError,
        *,
        event: str,
        arrived: bool,
    ) -> Continue:
        """Persist that the guest returns to the source as it was; that is repeated until it succeeds.

        If the guest may have `arrived`, the destination removes it.
        """
        now = self._engine.now()
        payload = operation.payload_as(MovePayload)
        payload.error = payload.last_error = error.message
        payload.migrate_data, payload.arrived = b"", arrived
        assert payload.chosen is not None
        self._transitions.end_event(conn, operation, host=None, error=error.message, event=event)
        away = payload.chosen.host != row["host"]
        if away and arrived:
            departures.record(conn, payload.chosen.host, row["uuid"], operation.epoch, now)
        step: Step = "unbind" if away and arrived and row["network_info"] else "undo"
        notifications: list[Notification] = [(self._names.notifications["failed"], row, fault_of(error, now))]
        encoded = msgspec.msgpack.encode(payload)
        return Continue(self._transitions.advance(conn, operation, step, payload=encoded, endless=True), notifications)

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
        error = MicronovaError(message)
        return self.give_up(conn, operation, row, migration, error, event=event, changes=changes, undone=True)
