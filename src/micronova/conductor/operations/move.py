"""Moving a server to another host or size: resize, cold migration, live migration.

Steps: `schedule` (choose the destination and claim it) → `prep` (the destination checks that it can take the guest;
else the next host) → `migrate` (the source stops the guest and sends its disks) → `bind` (its ports are bound to the
destination) → `finish` (the destination makes the guest: the server is RESIZED). Until then the server belongs to its
source. What fails from `migrate` on is undone: `unbind` (the ports return) → `undo` (the source makes the guest run
again as before: error), which is repeated until it succeeds. If the guest may run on a destination that is up, `undo`
waits until it is removed there. Source and destination of a resize may be the same host.

A live migration takes the same steps: in `migrate` the guest runs while its memory is sent, and `finish` ends the move.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.destinations import Destinations
from micronova.conductor.operations.engine import Operation, retry_pause
from micronova.conductor.operations.host_kind import reported_error
from micronova.conductor.operations.move_kind import MoveKind, move_order, needs_binding
from micronova.conductor.operations.move_outcomes import MoveOutcomes
from micronova.conductor.operations.move_types import COLD, LIVE
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.placing import ServerToPlace
from micronova.conductor.operations.transitions import Notification
from micronova.db import instances, server_migrations, topologies
from micronova.objects.block_device import resized
from micronova.objects.errors import (
    HostNotHeard,
    HostUnavailable,
    Invalid,
    MicronovaError,
    NoValidHost,
    OperationFailed,
    Stale,
    Unavailable,
)
from micronova.objects.flavor import Flavor
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.migration import MigrationChanges, MigrationRow
from micronova.objects.network import VIF
from micronova.objects.operations import MovePayload, OperationRow, Step
from micronova.objects.orders import Report, WorkOrder
from micronova.objects.pci_devices import device_requests
from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.rpcapi import SchedulerAPI

MOVE_KINDS: Final = ("resize", "migrate", "live_migrate")
SOURCE_STEPS: Final = frozenset({"migrate", "undo"})


class Move(MoveKind):
    """The operations behind the server actions `resize`, `migrate` and `os-migrateLive`."""

    def __init__(
        self, dependencies: ConductorDependencies, kind: str, scheduler: SchedulerAPI, max_attempts: int
    ) -> None:
        self.name = kind
        self._type = LIVE if kind == "live_migrate" else COLD
        self.action_event = self._event("prep")
        super().__init__(dependencies)
        self._destinations = Destinations(dependencies, self, scheduler, max_attempts)
        self._outcomes = MoveOutcomes(dependencies, self.transitions, self._type)
        self._pci_aliases = dependencies.pci_aliases

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
            await self._order_host(operation, row)

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
        if self._type.live and (problem := await self._source_problem(row, payload, wanted)) is not None:
            await self.fail(operation, problem)
            return
        server = ServerToPlace(operation, payload, row, wanted, moving=migration["uuid"])
        if not await self._destinations.choose(server):
            return
        order = await self.commit_dispatch(operation, "prep", self._dispatch_prep, server)
        if order is None:
            return
        if not self._type.live:  # there the destination only checks whether it can take the guest
            start = self._about_prep("start", row, migration, server.chosen.host)
            self.transitions.notify(start.name, operation, row, details=start.details, sender=start.sender)
        await self.transitions.send(operation, order)

    async def _source_problem(self, row: InstanceRow, payload: MovePayload, spec: RequestSpec) -> MicronovaError | None:
        """Return why a live migration cannot begin, or None: the API does not check this before it answers."""
        host = row["host"] or ""
        if payload.requested_host == host:
            return OperationFailed(f"Unable to migrate instance ({row['uuid']}) to its current host.", details=host)
        if await self.transitions.host_is_down(host):
            return OperationFailed(
                "The compute service of the server's host is unavailable at this time.", details=host
            )
        if "pci_passthrough:alias" in spec.flavor.extra_specs and not await self._engine.database.read(
            self._devices_can_go, spec, [row["uuid"], payload.migration]
        ):
            return OperationFailed(
                f"Migration pre-check error: instance {row['uuid']} has PCI devices that were not requested as "
                "live_migratable, so it cannot be moved while it runs. Migrate it cold."
            )
        return None

    def _devices_can_go(self, conn: sa.Connection, spec: RequestSpec, holders: list[str]) -> bool:
        """Return whether all PCI devices of a server were, and those of its destination will be, live_migratable."""
        held = [
            device
            for _, assignment in topologies.assignments_of(conn, holders).values()
            for device in assignment.devices
        ]
        try:
            wanted = device_requests(GuestProperties(spec.flavor, spec.image), self._pci_aliases)
        except Invalid:  # the alias has been removed
            return False
        return (
            bool(held) and all(each.live_migratable for each in held) and all(each.live_migratable for each in wanted)
        )

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
            payload.encode(),
            step="prep",
            event=self._event("prep"),
        )
        if dispatched is None:
            return None
        self.record_destination(conn, server, self._type.statuses.prep)
        if not self._type.live:  # else the conductor's part ends when the destination has checked
            self._end_conductor_events(conn, operation)
        return self.order(conn, dispatched, changed(server.row, changes))

    def _end_conductor_events(self, conn: sa.Connection, operation: Operation, error: str | None = None) -> None:
        """End the events of the conductor's own part: the epoch of the operation is that of the step `schedule`."""
        for number, event in enumerate(reversed(self._conductor_events(operation))):
            self.transitions.end_conductor_event(conn, operation, event, outer=number > 0, error=error)

    def _conductor_events(self, operation: Operation) -> tuple[str, ...]:
        """Return their names. Nova answers old requests when the hosts have been checked, by another method."""
        answers_after_checks = operation.payload_as(MovePayload).answers_after_checks
        return COLD.conductor_events[:1] if answers_after_checks else self._type.conductor_events

    # --- orders ----------------------------------------------------------------------------------------------

    async def _order_host(self, operation: Operation, row: InstanceRow) -> None:
        """Send the order of a step to its host; send it again if the host's lease has expired."""
        host = _host(operation, row)
        if await self.transitions.host_is_down(host):
            if host == row["host"]:  # it has the guest: the operation waits for it
                raise Unavailable(f"Host {host} does not answer.")
            result = await self._engine.database.write(self._without_destination, operation)
            self._engine.committed(self.name, "without host")
            await self.continue_with(operation, result)
            return
        await self._dispatch_step(operation, row, None)

    async def _dispatch_step(self, operation: Operation, row: InstanceRow, vifs: tuple[VIF, ...] | None) -> None:
        order = await self.commit_dispatch(operation, operation.step, self._dispatch, operation, vifs)
        if order is None:
            return
        if (name := self._type.notifications.ordered.get(operation.step)) is not None:
            self.transitions.notify(name, operation, row, sender=_host(operation, row))
        await self.transitions.send(operation, order)

    def _dispatch(self, conn: sa.Connection, operation: Operation, vifs: tuple[VIF, ...] | None) -> WorkOrder | None:
        """Make the host of the step the owner; `vifs` are the interfaces as they are bound now.

        Raise GuestElsewhere if the guest returns to its source, and may run on the destination.
        """
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch:
            return None
        step = operation.step
        if step == "undo" and operation.payload_as(MovePayload).undo_awaits_removal:
            self.transitions.require_no_other_guest(conn, row["uuid"], row["host"] or "")
        changes = self._task_state(step)
        if vifs is not None:
            changes["network_info"] = msgspec.to_builtins(vifs)
        host = _host(operation, row)
        dispatched = self.transitions.dispatch(
            conn, operation, host, changes, step=step, event=self._event(step), endless=step == "undo"
        )
        if dispatched is None:
            return None
        if step in ("migrate", "finish"):  # of an attempt to finish that is repeated, the guest was perhaps removed
            statuses = self._type.statuses
            status: MigrationChanges = {"status": statuses.migrate if step == "migrate" else statuses.migrated}
            server_migrations.update(conn, operation.payload_as(MovePayload).migration, self._engine.now(), status)
        return self.order(conn, dispatched, changed(row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order of the step: to the destination with the new flavor, to the source with the old one."""
        payload, step = operation.payload_as(MovePayload), operation.step
        migration = self.migration_of(conn, operation)
        assert payload.chosen is not None
        old = msgspec.convert(migration["old_flavor"], Flavor)
        new = msgspec.convert(migration["new_flavor"], Flavor)
        devices = instances.devices_of(conn, row["uuid"])
        host = _host(operation, row)
        if step not in SOURCE_STEPS:
            devices = resized(devices, row["uuid"], old, new)
            row = changed(row, {"flavor": migration["new_flavor"], "node": payload.chosen.node})
            row = changed(row, {"availability_zone": payload.chosen.zone})
        return work_order(
            conn,
            operation,
            row,
            kind=self._type.orders[step],
            now=self._engine.now(),
            host=host,
            block_devices=devices,
            holder=migration["uuid"] if step in SOURCE_STEPS else None,
            move=move_order(
                migration,
                sent=payload.sent,
                migrate_data=payload.migrate_data if step == "finish" else b"",
                mdev_types=self._mdev_types(conn, migration) if step not in SOURCE_STEPS else (),
            ),
        )

    def _mdev_types(self, conn: sa.Connection, migration: MigrationRow) -> tuple[str, ...]:
        """Return the types of the mediated devices on the source of a live migration."""
        flavor = msgspec.convert(migration["old_flavor"], Flavor)
        if not self._type.live or extra_specs.resource_request(flavor, None) is None:
            return ()
        held = topologies.assignments_of(conn, [migration["uuid"]]).values()
        return tuple(sorted(device.mdev_type for _, assignment in held for device in assignment.mdevs))

    def progressed(self, conn: sa.Connection, operation: Operation) -> None:
        """Record that the source sends the guest: before, it may have waited until it had sent others."""
        if operation.step == "migrate" and self._type.live:
            status: MigrationChanges = {"status": self._type.statuses.under_way}
            server_migrations.update(conn, operation.payload_as(MovePayload).migration, self._engine.now(), status)

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
                return self._outcomes.finished(conn, operation, row, migration, report, event)
            return self._migrated(conn, operation, row, migration, report)
        error, sent = reported_error(report), step == "finish"
        left = sent and report.left_behind
        try:
            return self._outcomes.begin_undo(
                conn, operation, row, migration, error, event=event, sent=sent, left_behind=left
            )
        except HostUnavailable:  # the destination tries again
            return super().postponed(conn, operation, row, report)

    def destruction_begins(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, unheard_since: int | None
    ) -> None:
        """Let the destination remove a guest that it could not start; raise Stale if nothing else is left."""
        if operation.step != "finish":
            return
        migration = self.migration_of(conn, operation)
        try:
            self.transitions.require_own_copy(conn, row, migration, since=unheard_since)
        except HostNotHeard:
            raise
        except HostUnavailable as error:
            raise Stale(error.message) from error
        self._outcomes.copy_is_removed(conn, migration)

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
        payload.prefer_others(report.host, reason)
        self.transitions.end_event(conn, operation, host=report.host, error=reason, event=self._event("prep"))
        encoded = payload.encode()
        self.transitions.advance(conn, operation, "schedule", payload=encoded, lease_seconds=retry_pause(operation))
        migration = self.migration_of(conn, operation)
        return NoMoreWork(notifications=self._after_prep(row, migration, report.host))

    def _prepared(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, report: Report
    ) -> StepResult:
        """Continue with the source if the destination can take the guest; else with another destination."""
        event = self._event("prep")
        if report.outcome == "done":
            self.transitions.end_event(conn, operation, host=report.host, event=event)
            notifications = self._after_prep(row, migration, report.host)
            if self._type.live:
                self._record_checks(conn, operation, row, report.host)
                notifications = [self._about_prep(phase, row, migration, report.host) for phase in ("start", "end")]
            return Continue(self.transitions.advance(conn, operation, "migrate"), notifications)
        error = reported_error(report)
        if report.outcome == "reschedule":
            return self._try_another(conn, operation, row, migration, error)
        return self._give_up_prep(conn, operation, row, migration, error)

    def _record_checks(self, conn: sa.Connection, operation: Operation, row: InstanceRow, destination: str) -> None:
        """Record the events of the checks of a live migration, and of what Nova does then: it is part of our order."""
        chosen = msgspec.structs.replace(operation, epoch=operation.epoch - 1)  # the step `schedule`
        self._end_conductor_events(conn, chosen)
        for number, name, host in (
            (1, "compute_check_can_live_migrate_source", row["host"] or ""),
            (2, "compute_pre_live_migration", destination),
        ):
            self.transitions.add_event(conn, operation, name, host, number)

    def _after_prep(self, row: InstanceRow, migration: MigrationRow, host: str) -> list[Notification]:
        """Return the notification that a destination has prepared a cold move, or refused it."""
        return [] if self._type.live else [self._about_prep("end", row, migration, host)]

    def _give_up_prep(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: Exception,
        notifications: Sequence[Notification] = (),
    ) -> NoMoreWork:
        """End a move that no destination can take."""
        chosen = operation.payload_as(MovePayload).chosen
        assert chosen is not None
        if self._type.live:
            before = msgspec.structs.replace(operation, epoch=operation.epoch - 1)
            self._end_conductor_events(conn, before, fault_of(error, self._engine.now())["message"])
        return self._outcomes.give_up(
            conn,
            operation,
            row,
            migration,
            error,
            event=self._event("prep"),
            notifications=[*notifications, *self._after_prep(row, migration, chosen.host)],
        )

    def _try_another(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        migration: MigrationRow,
        error: MicronovaError,
    ) -> StepResult:
        payload = operation.payload_as(MovePayload)
        assert payload.chosen is not None
        host, notifications = payload.chosen.host, []
        if payload.requested_host is None and (name := self._type.notifications.another) is not None:
            notifications.append(Notification(name, row, fault_of(error, self._engine.now()), sender=host))
        if not self._destinations.may_try_another(payload):
            last = NoValidHost(f"No host could take the server. Last error: {error.message}")
            return self._give_up_prep(conn, operation, row, migration, last, notifications)
        self.transitions.end_event(conn, operation, host=None, error=error.message, event=self._event("prep"))
        payload.last_error = error.message
        encoded = payload.encode()
        return Continue(
            self.transitions.advance(conn, operation, "schedule", payload=encoded),
            [*notifications, *self._after_prep(row, migration, host)],
        )

    def _migrated(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, migration: MigrationRow, report: Report
    ) -> Continue:
        payload = operation.payload_as(MovePayload)
        payload.migrate_data = report.migrate_data
        task_state = self._type.migrated_task_state
        changes: InstanceChanges = {} if task_state is None else {"task_state": task_state}
        if report.power_state is not None:
            changes["power_state"] = report.power_state
        status: MigrationChanges = {"status": self._type.statuses.migrated}
        server_migrations.update(conn, migration["uuid"], self._engine.now(), status)
        self.transitions.end_event(conn, operation, host=report.host, event=self._event("migrate"))
        step: Step = "bind" if needs_binding(conn, row, migration) else "finish"
        encoded = payload.encode()
        taken = self.transitions.advance(conn, operation, step, payload=encoded, changes=changes)
        return Continue(taken, [Notification(self._type.notifications.migrated, changed(row, changes))])

    def _without_destination(self, conn: sa.Connection, operation: Operation) -> StepResult:
        """Continue without a destination that is down: with another one, or back on the source."""
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        error = OperationFailed("The destination does not answer any more.")
        migration = self.migration_of(conn, operation)
        if operation.step == "finish":
            event = self._event("finish")
            return self._outcomes.begin_undo(
                conn, operation, row, migration, error, event=event, sent=True, left_behind=True
            )
        return self._try_another(conn, operation, row, migration, error)

    # --- ports -----------------------------------------------------------------------------------------------

    async def _bind(self, operation: Operation, row: InstanceRow) -> None:
        chosen = operation.payload_as(MovePayload).chosen
        assert chosen is not None
        try:
            vifs = await self.transitions.rebind(operation, row, chosen.host, chosen.zone)
        except (Stale, Unavailable):
            raise
        except MicronovaError as error:
            await self._undo(operation, error)
            return
        await self._dispatch_step(msgspec.structs.replace(operation, step="finish"), row, vifs)

    async def _unbind(self, operation: Operation, row: InstanceRow) -> None:
        assert row["host"] is not None
        if operation.payload_as(MovePayload).undo_awaits_removal:
            await self._engine.database.read(self.transitions.require_no_other_guest, row["uuid"], row["host"])
        vifs = await self.transitions.rebind(
            operation,
            row,
            row["host"],
            row["availability_zone"],
            holder=operation.payload_as(MovePayload).migration,
        )
        await self._dispatch_step(msgspec.structs.replace(operation, step="undo"), row, vifs)

    # --- failures --------------------------------------------------------------------------------------------

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Undo the move; if the guest was not touched yet, the server is as before at once.

        If nothing but the destination has a guest that can be used, the move goes on until the source is back.
        """
        try:
            await self._undo(operation, error)
        except HostUnavailable:
            if operation.step not in ("bind", "finish"):
                raise
            await self.run([operation])

    async def _undo(self, operation: Operation, error: Exception) -> None:
        if not await self.commit_failure(operation, error, self._failed):
            await self.overtaken(operation)

    def _about_prep(self, phase: str, row: InstanceRow, migration: MigrationRow, host: str) -> Notification:
        """Return a notification of the destination about the step `prep`."""
        details = None if self._type.live else {"new_flavor": migration["new_flavor"]}
        return Notification(f"{self._type.notifications.prep}.{phase}", row, sender=host, details=details)

    def _event(self, step: Step) -> str:
        """Return the event of a step in the instance action; "" if it has none."""
        return self._type.events.get(step, f"compute_{self._type.orders[step]}")

    def _task_state(self, step: Step) -> InstanceChanges:
        """Return the change of the server's task state with a step."""
        return {"task_state": self._type.task_states[step]} if step in self._type.task_states else {}

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> StepResult:
        migration = self.migration_of(conn, operation)
        if operation.step == "prep":
            return self._give_up_prep(conn, operation, row, migration, error)
        if operation.step == "schedule":
            self._end_conductor_events(conn, operation, fault_of(error, self._engine.now())["message"])
            event = self._conductor_events(operation)[-1]
            return self._outcomes.give_up(conn, operation, row, migration, error, event=event)
        known = error if isinstance(error, MicronovaError) else MicronovaError("An unexpected error happened.")
        event = self._event("finish" if operation.step == "bind" else operation.step)
        sent = operation.step in ("bind", "finish")
        left = operation.step == "finish"  # the destination may be at work
        return self._outcomes.begin_undo(
            conn, operation, row, migration, known, event=event, sent=sent, left_behind=left
        )


def _host(operation: Operation, row: InstanceRow) -> str:
    """Return the host that has the order of the step; the server belongs to its source."""
    chosen = operation.payload_as(MovePayload).chosen
    assert row["host"] is not None and chosen is not None
    return row["host"] if operation.step in SOURCE_STEPS else chosen.host
