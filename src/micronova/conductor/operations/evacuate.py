"""Evacuating a server from a host that is lost: it is built again, from its image, on another host.

Steps: `new` (a conductor learns that the host is lost, and ends what else works on the server) → `schedule` (choose and
claim a host, bind the ports to it) → `dispatched` (the host builds the guest; if it fails, back to `schedule` for the
next host) → `finish` if the server must be off (the host stops the guest). Until the guest is built, the server belongs
to its lost host; then a record of the departure lets that host remove its guest when it is back. If no host is left:
`unbind` (the ports return), and the server is in ERROR on its lost host.

A host that was only silent, because the bus or its agent was away, still has the guest and its disks. So a conductor
that can hear hosts asks whether the host is lost: before anything of the server changes, before each attempt, when it
dispatches the build, and before it lets the server leave. At the step `new` the operation is not bound to the server's
epoch: other operations go on, and nothing is interrupted for a host that is not lost. If the host is not lost any more
later, the evacuation ends, and the server is on it as before: a move that was interrupted is undone. It is in ERROR if
other work was interrupted that may have left its guest half changed.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.build_elsewhere import BuildElsewhere
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.destinations import Destinations
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import reported_error
from micronova.conductor.operations.move import MOVE_KINDS
from micronova.conductor.operations.move_kind import MoveKind
from micronova.conductor.operations.operation_kind import Continue, FailedTask, NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.placing import ServerToPlace, host_changes
from micronova.conductor.operations.transitions import Notification
from micronova.db import allocations, departures, instances, server_migrations
from micronova.db import operations as operation_rows
from micronova.notifications.notifier import CONDUCTOR
from micronova.objects import migration_states, power_state, states
from micronova.objects.errors import Conflict, OperationFailed, Unavailable
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.migration import MigrationRow
from micronova.objects.network import VIF
from micronova.objects.operations import FOLLOW_UP_KINDS, EvacuatePayload, OperationRow
from micronova.objects.orders import Report, WorkOrder
from micronova.scheduler.rpcapi import SchedulerAPI

ACTION = states.ACTIONS["evacuate"]
CONDUCTOR_EVENT = "rebuild_server"
STOP_EVENT = "compute_stop_instance"


class Evacuate(MoveKind):
    """The operation behind the server action `evacuate`."""

    name = "evacuate"
    action_event = "compute_rebuild_instance"

    def __init__(self, dependencies: ConductorDependencies, scheduler: SchedulerAPI, max_attempts: int) -> None:
        super().__init__(dependencies)
        self._destinations = Destinations(dependencies, self, scheduler, max_attempts)
        self._attempts = BuildElsewhere(
            dependencies,
            self,
            self._destinations,
            EvacuatePayload,
            leave_host=self._leave_host,
            excluded_hosts=self._excluded_hosts,
        )

    def may_fail(self, operation: Operation) -> bool:
        """Return False if the evacuation has failed already, and only the ports are left."""
        return operation.step != "unbind"

    async def run_one(self, operation: Operation) -> None:
        """Continue from the persisted step."""
        if operation.step == "new":
            await self._begin(operation)
            return
        loaded = await self._engine.database.read(self.load, operation)
        if loaded is None:
            await self.overtaken(operation)
            return
        row, migration = loaded
        if operation.step == "schedule":
            await self._schedule(operation, row, migration)
        elif operation.step == "unbind":
            assert row["host"] is not None
            vifs = await self.transitions.rebind(
                operation, row, row["host"], row["availability_zone"], holder=migration["uuid"]
            )
            result = await self._engine.database.write(self._unbound, operation, vifs)
            self.announce(operation, result)
        else:
            await self._order_host(operation)

    # --- the beginning ---------------------------------------------------------------------------------------

    async def _begin(self, operation: Operation) -> None:
        """Begin the evacuation, or end it if the server cannot be evacuated as it is now."""
        await self._continue_from_new(operation, await self._engine.database.write(self._begun, operation))

    async def _refuse(self, operation: Operation, error: Exception) -> None:
        """End an evacuation that has not begun."""
        await self._continue_from_new(operation, await self._engine.database.write(self._ended, operation, error))

    async def _continue_from_new(self, operation: Operation, result: StepResult | None) -> None:
        self._engine.committed(self.name, "new")
        if result is None:
            await self.overtaken(operation)
        else:
            await self.continue_with(operation, result)

    def _ended(self, conn: sa.Connection, operation: Operation, error: Exception) -> StepResult | None:
        row = self._lock(conn, operation)
        return None if row is None else self._refused(conn, operation, row, error)

    def _begun(self, conn: sa.Connection, operation: Operation) -> StepResult | None:
        """End all other work on the server if its host is lost; else end the evacuation.

        Return None if another conductor has the operation, or a later request has ended it. Raise HostUnavailable if it
        is not known whether the host is lost.
        """
        row = self._lock(conn, operation)
        if row is None:
            return None
        payload = operation.payload_as(EvacuatePayload)
        reason = self._reason_against(conn, row, payload)
        if reason is not None:
            return self._refused(conn, operation, row, reason)
        now, epoch = self._engine.now(), row["epoch"] + 1
        others = [each for each in operation_rows.open_of(conn, row["uuid"]) if each["id"] != operation.id]
        payload.interrupted = any(map(_may_change_guest_halfway, others))
        begun = msgspec.structs.replace(operation, step="schedule", epoch=epoch, payload=payload.encode())
        self.transitions.persist(conn, operation, begun.step, epoch=epoch, payload=begun.payload)
        changes: InstanceChanges = {"task_state": ACTION.task_state, "progress": 0, "epoch": epoch}
        instances.update(conn, row["uuid"], now, changes)
        to_end = operation_rows.cancel_open(conn, row["uuid"], now)
        server_migrations.abandon(conn, row, now, epoch=epoch, down_time=None, context=operation.context)
        server_migrations.insert(conn, self._migration(operation, row, migration_states.ACCEPTED))
        allocations.hand_over(conn, row["uuid"], holder=payload.migration)
        return Continue(begun, follow_ups=to_end)

    def _lock(self, conn: sa.Connection, operation: Operation) -> InstanceRow | None:
        """Lock the server and its operations; return it, whatever its epoch is, or None as `lock_current` does."""
        row = instances.lock(conn, operation.instance_uuid)
        operation_rows.lock_open_of(conn, operation.instance_uuid)
        return row if self.transitions.lock_and_is_current(conn, operation) else None

    def _reason_against(
        self, conn: sa.Connection, row: InstanceRow, payload: EvacuatePayload
    ) -> OperationFailed | None:
        """Return why a server, which may have changed since the request, is not evacuated; None if it is."""
        if row["host"] is None or row["host"] == payload.requested_host or row["vm_state"] not in ACTION.starts_from:
            return OperationFailed("Other work on the server has ended meanwhile: it cannot be evacuated as it is now.")
        if not self.transitions.host_is_lost(conn, row["host"]):
            return HostNotLost()
        try:
            server_migrations.check_last_copy(conn, row, self._engine.now(), self._dependencies.service_down_time)
        except Conflict as error:
            return OperationFailed(error.message)
        return None

    def _refused(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        """End an evacuation that has not begun: nothing of the server has changed but its task state."""
        payload, now = operation.payload_as(EvacuatePayload), self._engine.now()
        fault = fault_of(error, now)
        changes: InstanceChanges = {}
        if payload.marked and row["epoch"] == operation.epoch:  # else other work has begun since
            changes = {"task_state": None, "fault": fault}
            instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "error", fault=fault, event=CONDUCTOR_EVENT)
        if row["host"] is not None:
            server_migrations.insert(conn, self._migration(operation, row, migration_states.ERROR))
        spec = instances.request_spec(conn, row["uuid"])
        failed_task = FailedTask("rebuild_server", changed(row, changes), spec, fault)
        return NoMoreWork(ended="error", failed_task=failed_task)

    def _migration(self, operation: Operation, row: InstanceRow, status: str) -> MigrationRow:
        payload = operation.payload_as(EvacuatePayload)
        return server_migrations.new_row(
            operation.context,
            row,
            row["flavor"],
            uuid=payload.migration,
            migration_type=migration_states.EVACUATION,
            status=status,
            destination=payload.requested_host,
            now=self._engine.now(),
        )

    # --- the new host ----------------------------------------------------------------------------------------

    async def _schedule(self, operation: Operation, row: InstanceRow, migration: MigrationRow) -> None:
        spec = await self._engine.database.read(instances.request_spec, row["uuid"])
        if spec is None:
            await self.overtaken(operation)
            return
        source = migration["source_compute"]
        if not await self._engine.database.read(self.transitions.host_is_lost, source):
            await self.fail(operation, HostNotLost())
            return
        payload = operation.payload_as(EvacuatePayload)
        wanted = msgspec.structs.replace(spec, ignore_hosts=(source,))
        server = ServerToPlace(operation, payload, row, wanted, moving=migration["uuid"])
        bound = await self._destinations.choose_and_bind(server)
        if bound is None:
            return
        try:
            order = await self.commit_dispatch(
                operation, "dispatched", self._dispatch_build, server, source, bound.vifs
            )
        except OperationFailed as error:
            await self.fail(operation, error)
            return
        if order is None:
            return
        if payload.chosen is None:  # of several attempts, the first begins what the last ends
            self.transitions.notify("rebuild.scheduled", operation, row, sender=CONDUCTOR)
            self.transitions.notify_exists(operation, row)
            self.transitions.notify("rebuild.start", operation, row, sender=server.chosen.host)
        await self.transitions.send(operation, order)

    def _dispatch_build(
        self,
        conn: sa.Connection,
        server: ServerToPlace[EvacuatePayload],
        source: str,
        vifs: tuple[VIF, ...] | None,
    ) -> WorkOrder | None:
        """Make the chosen host the owner; raise OperationFailed if the source is not lost any more."""
        operation, chosen = server.operation, server.chosen
        payload = msgspec.structs.replace(server.payload, tried=[*server.payload.tried, chosen.host], chosen=chosen)
        changes: InstanceChanges = {"epoch": operation.epoch + 1, "task_state": states.REBUILD_SPAWNING}
        if vifs is not None:
            changes["network_info"] = msgspec.to_builtins(vifs)
        encoded = payload.encode()
        dispatched = self.transitions.dispatch(conn, operation, chosen.host, changes, encoded)
        if dispatched is None:
            return None
        if not self.transitions.host_is_lost(conn, source):
            raise HostNotLost()
        if server.payload.chosen is None:
            self.transitions.end_conductor_event(conn, operation, CONDUCTOR_EVENT)
        self.record_destination(conn, server, migration_states.PRE_MIGRATING)
        return self.order(conn, dispatched, changed(server.row, changes))

    async def _order_host(self, operation: Operation) -> None:
        """Send the order again to a host whose lease has expired; continue without one that is down."""
        chosen = operation.payload_as(EvacuatePayload).chosen
        assert chosen is not None
        if await self.transitions.host_is_down(chosen.host):
            if operation.step == "finish":
                raise Unavailable(f"Host {chosen.host} does not answer.")
            await self._attempts.continue_without_host(operation)
            return
        order = await self.commit_dispatch(operation, operation.step, self._dispatch_again, operation)
        if order is not None:
            await self.transitions.send(operation, order)

    def _dispatch_again(self, conn: sa.Connection, operation: Operation) -> WorkOrder | None:
        row, chosen = instances.lock(conn, operation.instance_uuid), operation.payload_as(EvacuatePayload).chosen
        assert chosen is not None
        event = STOP_EVENT if operation.step == "finish" else None
        dispatched = self.transitions.dispatch(conn, operation, chosen.host, {}, step=operation.step, event=event)
        return None if dispatched is None or row is None else self.order(conn, dispatched, row)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to build the guest, or to stop it."""
        chosen = operation.payload_as(EvacuatePayload).chosen
        assert chosen is not None
        now = self._engine.now()
        if operation.step == "finish":
            return work_order(conn, operation, row, kind="stop", now=now)
        host_of_guest: InstanceChanges = {"node": chosen.node, "availability_zone": chosen.zone}
        return work_order(
            conn,
            operation,
            changed(row, host_of_guest),
            kind="build",
            now=now,
            host=chosen.host,
            secrets=self.secrets_of(operation),
            download_url=self._dependencies.download_url,
        )

    # --- the host's report, and its absence ------------------------------------------------------------------

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Let the server belong to its new host, or try another one; end it when it is stopped, if it must be."""
        if operation.step == "finish":
            return self._stopped(conn, operation, row, report)
        if report.outcome == "done":
            return self._built(conn, operation, row, report)
        return self._attempts.not_built(conn, operation, row, report)

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Choose the host again if it lacks something before the guest is built."""
        chosen_again = self._attempts.postponed(conn, operation, row, report)
        return super().postponed(conn, operation, row, report) if chosen_again is None else chosen_again

    def _excluded_hosts(self, conn: sa.Connection, payload: EvacuatePayload) -> Sequence[str]:
        """Return the lost host."""
        migration = server_migrations.get(conn, payload.migration)
        assert migration is not None
        return [migration["source_compute"]]

    def _built(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        now, payload = self._engine.now(), operation.payload_as(EvacuatePayload)
        migration = self.migration_of(conn, operation)
        assert payload.chosen is not None
        source = migration["source_compute"]
        if not self.transitions.host_is_lost(conn, source):
            return self._give_up(conn, operation, row, HostNotLost(), left_behind=True)
        changes: InstanceChanges = {
            **host_changes(payload.chosen),
            "vm_state": states.state_after(ACTION, row["vm_state"]),
            "task_state": states.POWERING_OFF if payload.stops else None,
            "power_state": power_state.RUNNING if report.power_state is None else report.power_state,
            "launched_at": now,
            "config_drive": row["config_drive"] or report.config_drive,
            "fault": None,
        }
        # The lost host removes its guest when it is back; it is not the server's own any more.
        departures.record(conn, source, row["uuid"], operation.epoch, now)
        if payload.stops:
            self.transitions.end_event(conn, operation, host=report.host)
            taken = self.transitions.advance(conn, operation, "finish", changes=changes)
            result: StepResult = Continue(taken, [Notification("power_off.start", changed(row, changes))])
        else:
            instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
            self.transitions.end(conn, operation, "success", host=report.host)
            result = NoMoreWork(ended="success", notifications=[Notification("rebuild.end", changed(row, changes))])
        server_migrations.stay_on_destination(conn, row, migration, migration_states.DONE, now)
        return result

    def _stopped(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> NoMoreWork:
        if report.outcome != "done":
            return self._not_stopped(conn, operation, row, reported_error(report))
        changes: InstanceChanges = {
            "task_state": None,
            "vm_state": states.STOPPED,
            "power_state": power_state.SHUTDOWN,
        }
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host, event=STOP_EVENT)
        after = changed(row, changes)
        names = ("power_off.end", "rebuild.end")
        return NoMoreWork(ended="success", notifications=[Notification(name, after) for name in names])

    def _not_stopped(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        """End the evacuation: the server is there and runs; the event of the stop says why."""
        now, changes = self._engine.now(), InstanceChanges(task_state=None)
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        fault = fault_of(error, now)
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault, event=STOP_EVENT)
        return NoMoreWork(ended="error", notifications=[Notification("rebuild.end", changed(row, changes))])

    # --- failures --------------------------------------------------------------------------------------------

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give the evacuation up; its ports return to the host that it belongs to."""
        if operation.step == "new":
            await self._refuse(operation, error)
        elif not await self.commit_failure(operation, error, self._failed):
            await self.overtaken(operation)

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> StepResult:
        if operation.step == "finish":
            return self._not_stopped(conn, operation, row, error)
        # The host of the last attempt may be at work.
        return self._give_up(conn, operation, row, error, left_behind=operation.step == "dispatched")

    def _give_up(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception, *, left_behind: bool
    ) -> StepResult:
        """Persist that only the ports are left, and whether the host is lost: at the end that may have changed."""
        payload = operation.payload_as(EvacuatePayload)
        payload.lost = not isinstance(error, HostNotLost)
        noted = msgspec.structs.replace(operation, payload=payload.encode())
        return self._attempts.give_up(conn, noted, row, error, left_behind=left_behind)

    def _leave_host(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        payload: EvacuatePayload,
        *,
        error: str,
        left_behind: bool,
    ) -> InstanceChanges:
        """End the attempt; the server still belongs to its lost host, and its claim is replaced or released later."""
        if operation.step == "schedule":  # the conductor's own part has failed
            self.transitions.end_event(conn, operation, host=None, error=error, event=CONDUCTOR_EVENT)
        else:
            assert payload.chosen is not None
            self.transitions.end_event(conn, operation, host=payload.chosen.host, error=error)
            if left_behind:
                departures.record(conn, payload.chosen.host, row["uuid"], operation.epoch, self._engine.now())
        return {"task_state": states.REBUILDING}

    def _unbound(self, conn: sa.Connection, operation: Operation, vifs: tuple[VIF, ...] | None) -> NoMoreWork:
        """End the evacuation: the server is in ERROR, or as before if its host was not lost and nothing interrupted."""
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        payload, now = operation.payload_as(EvacuatePayload), self._engine.now()
        migration = self.migration_of(conn, operation)
        fault = fault_of(payload.error, now)
        task_state = server_migrations.idle_task_state(conn, row["uuid"])
        changes: InstanceChanges = {"task_state": task_state, "fault": fault}
        if payload.lost or payload.interrupted:
            changes["vm_state"] = states.state_after(ACTION, row["vm_state"], failed=True)
        if vifs is not None:
            changes["network_info"] = msgspec.to_builtins(vifs)
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end_without_event(conn, operation)
        failed = changed(row, changes)
        if payload.chosen is None:  # no host was ever found
            server_migrations.stay_on_source(conn, row, migration, migration_states.ERROR, now)
            spec = instances.request_spec(conn, row["uuid"])
            return NoMoreWork(ended="error", failed_task=FailedTask("rebuild_server", failed, spec, fault))
        server_migrations.stay_on_source(conn, row, migration, migration_states.FAILED, now)
        told = Notification("rebuild.error", failed, fault, sender=payload.chosen.host)
        return NoMoreWork(ended="error", notifications=[told])


class HostNotLost(OperationFailed):
    """The host that a server would leave is not lost."""

    def __init__(self) -> None:
        super().__init__("The server's host is not lost: the server stays on it. Force its service down if it is.")


_CHANGES_NO_GUEST_HALFWAY: Final = frozenset(
    {*FOLLOW_UP_KINDS, *MOVE_KINDS, "create_image", "create_backup", "change_password"}
)
"""Kinds whose early end leaves no guest half changed: a move is undone (`conductor/operations/undo_move.py`)."""


def _may_change_guest_halfway(operation: OperationRow) -> bool:
    """Return whether the early end of an operation leaves its server half changed."""
    if operation["kind"] == "evacuate":  # it has changed nothing on the host, but may have ended other work
        return EvacuatePayload.decode(operation["payload"]).interrupted
    return operation["kind"] not in _CHANGES_NO_GUEST_HALFWAY
