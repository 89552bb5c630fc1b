"""Evacuating a server from a host that is lost: it is built again, from its image, on another host.

Steps: `schedule` (choose and claim a host, bind the ports to it) → `dispatched` (the host builds the guest; if it
fails, back to `schedule` for the next host) → `finish` if the server must be off (the host stops the guest). Until the
guest is built, the server belongs to its lost host; then a record of the departure lets that host remove its guest when
it is back. If no host is left: `unbind` (the ports return), and the server is in ERROR on its lost host.

A host that was only silent, because the bus or its agent was away, still has the guest and its disks. So a conductor
that can hear hosts asks whether the host is lost: before each attempt, when it dispatches the build, and before it lets
the server leave. If the host is not lost any more, the evacuation ends, and the server is on it as before.
"""

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.build_attempts import BuildAttempts
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.destinations import Destinations
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.move_kind import MoveKind
from micronova.conductor.operations.operation_kind import Continue, GaveUp, NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.placing import ServerToPlace, host_changes
from micronova.conductor.operations.transitions import Notification
from micronova.db import departures, instances, server_migrations, services
from micronova.notifications.notifier import CONDUCTOR
from micronova.objects import migration_states, power_state, states
from micronova.objects.errors import OperationFailed, Unavailable
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.migration import MigrationRow
from micronova.objects.network import VIF
from micronova.objects.operations import EvacuatePayload
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
        self._attempts = BuildAttempts(
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
        loaded = await self._engine.database.read(self.load, operation)
        if loaded is None:
            await self.overtaken(operation)
            return
        row, migration = loaded
        if operation.step == "schedule":
            await self._schedule(operation, row, migration)
        elif operation.step == "unbind":
            assert row["host"] is not None
            vifs = await self.rebind(operation, row, row["host"], row["availability_zone"])
            result = await self._engine.database.write(self._unbound, operation, vifs)
            self.announce(operation, result)
        else:
            await self._order_host(operation)

    async def _schedule(self, operation: Operation, row: InstanceRow, migration: MigrationRow) -> None:
        spec = await self._engine.database.read(instances.request_spec, row["uuid"])
        if spec is None:
            await self.overtaken(operation)
            return
        source = migration["source_compute"]
        if not await self._engine.database.read(self.transitions.host_is_lost, source):
            await self.fail(operation, _not_lost())
            return
        payload = operation.payload_as(EvacuatePayload)
        wanted = msgspec.structs.replace(spec, ignore_hosts=(source,))
        server = ServerToPlace(operation, payload, row, wanted, moving=migration["uuid"])
        bound = await self._destinations.choose_and_bind(server)
        if bound is None:
            return
        try:
            order = await self.dispatched(operation, "dispatched", self._dispatch_build, server, source, bound.vifs)
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
        encoded = msgspec.msgpack.encode(payload)
        dispatched = self.transitions.dispatch(conn, operation, chosen.host, changes, encoded)
        if dispatched is None:
            return None
        if not self.transitions.host_is_lost(conn, source):
            raise _not_lost()
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
        order = await self.dispatched(operation, operation.step, self._dispatch_again, operation)
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
            return self._attempts.give_up(conn, operation, row, _not_lost(), left_behind=True)
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
        """End the evacuation. A guest that could not be stopped runs: it is there, which is what counts."""
        changes: InstanceChanges = {"task_state": None}
        names = ["rebuild.end"]
        if report.outcome == "done":
            changes |= {"vm_state": states.STOPPED, "power_state": power_state.SHUTDOWN}
            names = ["power_off.end", *names]
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host, event=STOP_EVENT)
        after = changed(row, changes)
        return NoMoreWork(ended="success", notifications=[Notification(name, after) for name in names])

    # --- failures --------------------------------------------------------------------------------------------

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give the evacuation up; its ports return to the host that it belongs to."""
        if not await self.recorded_failure(operation, error, self._failed):
            await self.overtaken(operation)

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> StepResult:
        if operation.step == "finish":  # the server is there, and runs
            changes: InstanceChanges = {"task_state": None}
            instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
            self.transitions.end(conn, operation, "success", host=row["host"], event=STOP_EVENT)
            return NoMoreWork(ended="success", notifications=[Notification("rebuild.end", changed(row, changes))])
        self.transitions.explain_failure(conn, operation, error)
        # The host of the last attempt may be at work.
        return self._attempts.give_up(conn, operation, row, error, left_behind=operation.step == "dispatched")

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
        """End the evacuation: the server is in ERROR, or as before if its host is not lost."""
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        payload, now = operation.payload_as(EvacuatePayload), self._engine.now()
        migration = self.migration_of(conn, operation)
        fault = fault_of(payload.error, now)
        changes: InstanceChanges = {"task_state": None, "fault": fault}
        if row["host"] is None or services.host_is_lost(conn, row["host"], now, self._dependencies.service_down_time):
            changes["vm_state"] = states.state_after(ACTION, row["vm_state"], failed=True)
        if vifs is not None:
            changes["network_info"] = msgspec.to_builtins(vifs)
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end_without_event(conn, operation)
        failed = changed(row, changes)
        if payload.chosen is None:  # no host was ever found
            server_migrations.stay_on_source(conn, row, migration, migration_states.ERROR, now)
            spec = instances.request_spec(conn, row["uuid"])
            return NoMoreWork(ended="error", gave_up=GaveUp("rebuild_server", failed, spec, fault))
        server_migrations.stay_on_source(conn, row, migration, migration_states.FAILED, now)
        told = Notification("rebuild.error", failed, fault, sender=payload.chosen.host)
        return NoMoreWork(ended="error", notifications=[told])


def _not_lost() -> OperationFailed:
    return OperationFailed("The server's host is not lost: the server stays on it. Force its service down if it is.")
