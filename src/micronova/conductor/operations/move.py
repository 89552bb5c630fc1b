"""Moving a server to another host or size: resize, cold migration, live migration.

Steps: `schedule` (choose the destination and claim it) → `prep` (the destination checks that it can take the guest;
else the next host) → `migrate` (the source stops the guest and sends its disks) → `bind` (its ports are bound to the
destination) → `finish` (the destination makes the guest: the server is RESIZED). Until then the server belongs to its
source. What fails from `migrate` on is undone: `unbind` (the ports return) → `undo` (the source makes the guest run
again as before: error), which is repeated until it succeeds. Source and destination of a resize may be the same host.

A live migration takes the same steps: in `migrate` the guest runs while its memory is sent, and `finish` ends the move.
"""

import logging
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.destinations import Destinations
from micronova.conductor.operations.engine import Operation, retry_pause
from micronova.conductor.operations.host_kind import reported_error
from micronova.conductor.operations.move_kind import MoveKind, move_order
from micronova.conductor.operations.move_names import COLD, LIVE
from micronova.conductor.operations.move_outcomes import CONDUCTOR_EVENT, MoveOutcomes
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import devices_of, work_order
from micronova.conductor.operations.placing import ServerToPlace
from micronova.db import instances, server_migrations
from micronova.objects.block_device import resized
from micronova.objects.errors import HostUnavailable, MicronovaError, NoValidHost, OperationFailed, Stale, Unavailable
from micronova.objects.flavor import Flavor
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.migration import MigrationChanges, MigrationRow
from micronova.objects.network import VIF
from micronova.objects.operations import MovePayload, OperationRow, Step
from micronova.objects.orders import Report, WorkOrder
from micronova.scheduler.rpcapi import SchedulerAPI

log = logging.getLogger(__name__)

MOVE_KINDS: Final = ("resize", "migrate", "live_migrate")
SOURCE_STEPS: Final = frozenset({"migrate", "undo"})
BEFORE_THE_GUEST: Final = frozenset({"schedule", "prep"})
"""Steps before the guest is touched."""


class Move(MoveKind):
    """The operations behind the server actions `resize`, `migrate` and `os-migrateLive`."""

    def __init__(
        self, dependencies: ConductorDependencies, kind: str, scheduler: SchedulerAPI, max_attempts: int
    ) -> None:
        self.name = kind
        self._names = LIVE if kind == "live_migrate" else COLD
        self.action_event = self._event("prep")
        super().__init__(dependencies)
        self._destinations = Destinations(dependencies, self, scheduler, max_attempts)
        self._outcomes = MoveOutcomes(dependencies, self.transitions, self._names)

    def may_fail(self, operation: Operation) -> bool:
        """Return False if the move is being undone."""
        return operation.step not in ("unbind", "undo")

    async def run_one(self, operation: Operation) -> None:
        """Continue from the persisted step."""
        loaded = await self._engine.database.read(self.load, operation)
        if loaded is None:
            await self.transitions.cancel(operation)
            return
        row, migration = loaded
        if operation.step == "schedule":
            await self._schedule(operation, row, migration)
        elif operation.step == "bind":
            await self._bind(operation, row)
        elif operation.step == "unbind":
            await self._unbind(operation, row)
        else:
            await self._order_host(operation, row, migration)

    # --- the destination -------------------------------------------------------------------------------------

    async def _schedule(self, operation: Operation, row: InstanceRow, migration: MigrationRow) -> None:
        spec = await self._engine.database.read(instances.request_spec, row["uuid"])
        if spec is None:
            await self.transitions.cancel(operation)
            return
        payload = operation.payload_as(MovePayload)
        wanted = msgspec.structs.replace(
            spec,
            flavor=msgspec.convert(migration["new_flavor"], Flavor),
            ignore_hosts=tuple(payload.excluded),
        )
        server = ServerToPlace(operation, payload, row, wanted, moving=migration["uuid"])
        if not await self._destinations.choose(server):
            return
        order = await self.dispatched(operation, "prep", self._dispatch_prep, server)
        if order is not None:
            self._notify_prep("start", operation, row, migration)
            await self.transitions.send(operation, order)

    def _dispatch_prep(self, conn: sa.Connection, server: ServerToPlace[MovePayload]) -> WorkOrder | None:
        operation, chosen = server.operation, server.chosen
        payload = msgspec.structs.replace(
            server.payload, tried=[*server.payload.tried, chosen.host], chosen=chosen, migrate_data=b""
        )
        changes: InstanceChanges = {"epoch": operation.epoch + 1, **self._task_state("prep")}
        dispatched = self.transitions.dispatch(
            conn,
            operation,
            chosen.host,
            changes,
            msgspec.msgpack.encode(payload),
            step="prep",
            event=self._event("prep"),
        )
        if dispatched is None:
            return None
        self.record_destination(conn, server, self._names.statuses["prep"])
        return self.order(conn, dispatched, changed(server.row, changes))

    # --- orders ----------------------------------------------------------------------------------------------

    async def _order_host(self, operation: Operation, row: InstanceRow, migration: MigrationRow) -> None:
        """Send the order of a step to its host; send it again if the host's lease has expired."""
        host = _host(operation, row)
        if await self.transitions.host_is_down(host):
            if host == row["host"]:  # it has the guest: the operation waits for it
                raise Unavailable(f"Host {host} does not answer.")
            result = await self._engine.database.write(self._without_destination, operation)
            self._engine.committed(self.name, "without host")
            await self.continue_with(operation, result)
            return
        order = await self._engine.database.write(self._dispatch, operation, None)
        self._engine.committed(self.name, operation.step)
        if operation.step == "migrate":
            self._notify_prep("end", operation, row, migration)
        await self._sent(operation, row, order)

    async def _sent(self, operation: Operation, row: InstanceRow, order: WorkOrder | None) -> None:
        if order is None:
            await self.overtaken(operation)
            return
        if operation.step in self._names.notifications:
            self.transitions.notify(self._names.notifications[operation.step], operation, row)
        await self.transitions.send(operation, order)

    def _dispatch(self, conn: sa.Connection, operation: Operation, vifs: tuple[VIF, ...] | None) -> WorkOrder | None:
        """Make the host of the step the owner; `vifs` are the interfaces as they are bound now."""
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch:
            return None
        step = operation.step
        changes = self._task_state(step)
        if vifs is not None:
            changes["network_info"] = msgspec.to_builtins(vifs)
        host = _host(operation, row)
        dispatched = self.transitions.dispatch(
            conn, operation, host, changes, step=step, event=self._event(step), endless=step == "undo"
        )
        if dispatched is None:
            return None
        if step == "migrate":
            status: MigrationChanges = {"status": self._names.statuses["migrate"]}
            server_migrations.update(conn, operation.payload_as(MovePayload).migration, self._engine.now(), status)
        return self.order(conn, dispatched, changed(row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order of the step: to the destination with the new flavor, to the source with the old one."""
        payload, step = operation.payload_as(MovePayload), operation.step
        migration = self.migration_of(conn, operation)
        assert payload.chosen is not None
        old = msgspec.convert(migration["old_flavor"], Flavor)
        new = msgspec.convert(migration["new_flavor"], Flavor)
        devices = devices_of(conn, row["uuid"])
        host = _host(operation, row)
        if step not in SOURCE_STEPS:
            devices = resized(devices, row["uuid"], old, new)
            row = changed(row, {"flavor": migration["new_flavor"], "node": payload.chosen.node})
            row = changed(row, {"availability_zone": payload.chosen.zone})
        return work_order(
            conn,
            operation,
            row,
            kind=self._names.orders[step],
            now=self._engine.now(),
            host=host,
            block_devices=devices,
            move=move_order(
                migration, arrived=payload.arrived, migrate_data=payload.migrate_data if step == "finish" else b""
            ),
        )

    # --- the host's report, and its absence ------------------------------------------------------------------

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Apply a report on the present step."""
        migration = self.migration_of(conn, operation)
        step, event = operation.step, self._event(operation.step)
        if step == "undo":
            return self._outcomes.undone(conn, operation, row, migration, report, event=event)
        if step == "prep":
            return self._prepared(conn, operation, row, migration, report)
        if report.outcome == "done":
            if step == "finish":
                return self._outcomes.arrived(conn, operation, row, migration, report, event)
            return self._migrated(conn, operation, row, migration, report)
        error = reported_error(report)
        return self._outcomes.begin_undo(conn, operation, row, error, event=event, arrived=step == "finish")

    def has_applied(self, found: OperationRow, report: Report) -> bool:
        """Return whether the report led to the next step, at the next epoch, and that was not undone since."""
        if super().has_applied(found, report):
            return True
        continues = found["step"] in ("migrate", "bind", "finish") or found["result"] == "success"
        return report.outcome == "done" and found["epoch"] == report.epoch + 1 and continues

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Choose the destination again if it lacks something before the guest is touched, as a build does."""
        payload = operation.payload_as(MovePayload)
        if operation.step != "prep" or not self._destinations.may_choose_again(conn, payload, payload.excluded):
            return super().postponed(conn, operation, row, report)
        reason = reported_error(report).message
        payload.put_off(report.host, reason)
        self.transitions.end_event(conn, operation, host=report.host, error=reason, event=self._event("prep"))
        encoded = msgspec.msgpack.encode(payload)
        self.transitions.advance(conn, operation, "schedule", payload=encoded, seconds=retry_pause(operation))
        return NoMoreWork()

    def _prepared(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, report: Report
    ) -> StepResult:
        """Continue with the source if the destination can take the guest; else with another destination."""
        event = self._event("prep")
        if report.outcome == "done":
            self.transitions.end_event(conn, operation, host=report.host, event=event)
            return Continue(self.transitions.advance(conn, operation, "migrate"))
        error = reported_error(report)
        if report.outcome == "reschedule":
            return self._try_another(conn, operation, row, migration, error)
        return self._outcomes.give_up(conn, operation, row, migration, error, event=event)

    def _try_another(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: MicronovaError,
    ) -> StepResult:
        payload = operation.payload_as(MovePayload)
        if not self._destinations.may_try_another(payload):
            last = NoValidHost(f"No host could take the server. Last error: {error.message}")
            return self._outcomes.give_up(conn, operation, row, migration, last, event=self._event("prep"))
        self.transitions.end_event(conn, operation, host=None, error=error.message, event=self._event("prep"))
        payload.last_error = error.message
        encoded = msgspec.msgpack.encode(payload)
        return Continue(self.transitions.advance(conn, operation, "schedule", payload=encoded))

    def _migrated(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, report: Report
    ) -> Continue:
        payload = operation.payload_as(MovePayload)
        payload.migrate_data = report.migrate_data
        changes = self._task_state("migrated")
        if report.power_state is not None:
            changes["power_state"] = report.power_state
        status: MigrationChanges = {"status": self._names.statuses["migrated"]}
        server_migrations.update(conn, migration["uuid"], self._engine.now(), status)
        self.transitions.end_event(conn, operation, host=report.host, event=self._event("migrate"))
        assert payload.chosen is not None
        away = payload.chosen.host != row["host"]
        step: Step = "bind" if away and row["network_info"] else "finish"
        encoded = msgspec.msgpack.encode(payload)
        taken = self.transitions.advance(conn, operation, step, payload=encoded, changes=changes)
        return Continue(taken, [(self._names.notifications["migrated"], changed(row, changes), None)])

    def _without_destination(self, conn: sa.Connection, operation: Operation) -> StepResult:
        """Continue without a destination that is down: with another one, or back on the source."""
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        error = OperationFailed("The destination does not answer any more.")
        if operation.step == "finish":
            self._require_source(conn, row)
            return self._outcomes.begin_undo(conn, operation, row, error, event=self._event("finish"), arrived=True)
        migration = self.migration_of(conn, operation)
        return self._try_another(conn, operation, row, migration, error)

    # --- ports -----------------------------------------------------------------------------------------------

    async def _bind(self, operation: Operation, row: InstanceRow) -> None:
        chosen = operation.payload_as(MovePayload).chosen
        assert chosen is not None
        try:
            vifs = await self.rebind(operation, row, chosen.host, chosen.zone)
        except (Stale, Unavailable):
            raise
        except MicronovaError as error:
            await self.fail(operation, error)
            return
        await self._dispatch_bound(operation, row, "finish", vifs)

    async def _unbind(self, operation: Operation, row: InstanceRow) -> None:
        assert row["host"] is not None
        vifs = await self.rebind(operation, row, row["host"], row["availability_zone"])
        await self._dispatch_bound(operation, row, "undo", vifs)

    async def _dispatch_bound(
        self, operation: Operation, row: InstanceRow, step: Step, vifs: tuple[VIF, ...] | None
    ) -> None:
        bound = msgspec.structs.replace(operation, step=step)
        order = await self._engine.database.write(self._dispatch, bound, vifs)
        self._engine.committed(self.name, step)
        await self._sent(bound, row, order)

    # --- failures --------------------------------------------------------------------------------------------

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Undo the move; if the guest was not touched yet, the server is as before at once."""
        if operation.step in ("bind", "finish") and not await self._engine.database.read(self._may_return, operation):
            # Nothing but the destination has a guest that can be used: the move goes on until the source is back.
            await self.run_one(operation)
            return
        task = "migrate_server" if operation.step == "schedule" else None
        if not await self.recorded_failure(operation, error, self._failed, task):
            await self.overtaken(operation)

    def _notify_prep(self, phase: str, operation: Operation, row: InstanceRow, migration: MigrationRow) -> None:
        details = {"new_flavor": migration["new_flavor"]}
        name = f"{self._names.notifications['prep']}.{phase}"
        self.transitions.notify(name, operation, row, details=None if self._names.live else details)

    def _event(self, step: str) -> str:
        """Return the event of a step in the instance action."""
        return f"compute_{self._names.orders[step]}"

    def _task_state(self, step: str) -> InstanceChanges:
        """Return the change of the server's task state with a step."""
        return {"task_state": self._names.task_states[step]} if step in self._names.task_states else {}

    def _may_return(self, conn: sa.Connection, operation: Operation) -> bool:
        """Return whether the source of a guest that may have arrived is up, so that the guest can return to it."""
        row = instances.get(conn, operation.instance_uuid)
        try:
            self._require_source(conn, row)
        except HostUnavailable:
            return False
        return True

    def _require_source(self, conn: sa.Connection, row: InstanceRow | None) -> None:
        """Raise HostUnavailable if the source is down: the guest that may have arrived is all that is left."""
        if row is not None and row["host"] is not None:
            self.transitions.require_up(conn, row["host"])

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> StepResult:
        migration = self.migration_of(conn, operation)
        if operation.step in BEFORE_THE_GUEST:
            event = CONDUCTOR_EVENT if operation.step == "schedule" else self._event(operation.step)
            return self._outcomes.give_up(conn, operation, row, migration, error, event=event)
        known = error if isinstance(error, MicronovaError) else MicronovaError("An unexpected error happened.")
        event = self._event("finish" if operation.step == "bind" else operation.step)
        arrived = operation.step in ("bind", "finish")
        if arrived:
            self._require_source(conn, row)
        return self._outcomes.begin_undo(conn, operation, row, known, event=event, arrived=arrived)


def _host(operation: Operation, row: InstanceRow) -> str:
    """Return the host that has the order of the step; the server belongs to its source."""
    chosen = operation.payload_as(MovePayload).chosen
    assert row["host"] is not None and chosen is not None
    return row["host"] if operation.step in SOURCE_STEPS else chosen.host
