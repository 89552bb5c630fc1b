"""The contract of a kind of operation whose work a host does, and what such kinds share."""

import functools
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Kind, Operation, retry_pause
from micronova.conductor.operations.transitions import Notification, Transitions
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.notifications import resources
from micronova.objects import states
from micronova.objects.errors import NotSupported, OperationFailed, Stale, Unavailable
from micronova.objects.instance import Fault, InstanceRow, fault_of
from micronova.objects.network import VIF
from micronova.objects.operations import OperationRow, Result, with_last_error
from micronova.objects.orders import Progress, Report, WorkOrder
from micronova.objects.scheduling import RequestSpec

log = logging.getLogger(__name__)


class Continue(msgspec.Struct):
    """The result of a report: this conductor continues the operation and sends these notifications."""

    operation: Operation
    notifications: Sequence[Notification] = ()
    gave_up: "GaveUp | None" = None
    follow_ups: Sequence[str] = ()  # operations that the transaction may have recorded: they start now


class NoMoreWork(msgspec.Struct):
    """The result of a report: this conductor only sends these notifications.

    The operation has ended, continues later, or has another owner.
    """

    ended: Result | None = None  # how the transaction ended the operation; None if it did not end it
    accepted: bool = True
    destroy: bool = False  # the instance is not on the reporting host: that host destroys its guest
    built: bool = False  # a server became ACTIVE: the hooks that follow a build run
    notifications: Sequence[Notification] = ()
    gave_up: "GaveUp | None" = None
    follow_ups: Sequence[str] = ()  # as in `Continue`


class GaveUp(msgspec.Struct):
    """Work on a server that this conductor gave up, such as a build for which it found no host."""

    row: InstanceRow
    spec: RequestSpec | None
    fault: Fault


ReportResult = Continue | NoMoreWork
RecordFailure = Callable[[sa.Connection, Operation, InstanceRow, Exception], ReportResult]
"""The part of a transaction that records a failure of a kind."""


class HostKind(Kind):
    """A kind of operation whose work a host does: an order starts it, the host's report ends it."""

    action_event: str  # the name of the event in the instance action
    moves_servers = False  # hosts that a server does not belong to get orders, too

    def __init__(self, dependencies: ConductorDependencies) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self.transitions = Transitions(dependencies, self.action_event)

    @abstractmethod
    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order, made from the database alone: a heartbeat may ask for it again."""

    @abstractmethod
    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Apply a host's report, in the transaction that ends or continues the operation."""

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Make a host the owner of an operation that changes nothing of the instance before the host reports.

        Return the order, or None if another request or conductor has taken over.
        """
        dispatched = self.transitions.dispatch(conn, operation, host, {})
        return None if dispatched is None else self.order(conn, dispatched, row)

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Let the host, which lacks something for the moment, have its order again after a pause.

        The pause grows with each attempt, and only the operation's deadline limits their number.
        """
        pause = retry_pause(operation)
        reason = reported_error(report).message
        log.warning("%s of instance %s is tried again in %.1f s: %s", self.name, row["uuid"], pause, reason)
        payload = with_last_error(operation.payload, reason)
        self.transitions.persist(conn, operation, operation.step, payload=payload, seconds=pause)
        return NoMoreWork()

    async def rebind(
        self,
        operation: Operation,
        row: InstanceRow,
        host: str,
        zone: str | None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[VIF, ...] | None:
        """Bind the server's ports to a host that it moves to; return its interfaces, None without a network service.

        Raise what `check` raises, which is called before each change; else Stale if the operation is overtaken.
        """
        if self._dependencies.network_client is None:
            return None
        return await self._dependencies.network_client.rebind(
            instance_uuid=row["uuid"],
            host=host,
            zone=zone,
            port_ids=[vif["port_id"] for vif in row["network_info"]],
            check=check or functools.partial(self.transitions.check_not_overtaken, operation),
        )

    def announce(self, operation: Operation, result: ReportResult) -> None:
        """Send the notifications of a transaction that is committed; count the operation if it has ended."""
        for name, row, fault in result.notifications:
            self.transitions.notify(name, operation, row, fault, self.notification_details(operation))
        if (gave_up := result.gave_up) is not None:
            self.announce_failed_task("build_instances", operation, gave_up)
        if isinstance(result, NoMoreWork) and result.ended is not None:
            self._engine.ended(operation, result.ended)

    def announce_failed_task(self, method: str, operation: Operation, gave_up: GaveUp) -> None:
        """Send the notification that this conductor gave up work on a server; `method` is Nova's name of the work."""
        failed = partial(resources.task_failed, method, gave_up.row, gave_up.spec, gave_up.fault)
        self._dependencies.notifier.announce(operation.context, failed)

    async def continue_with(self, operation: Operation, result: ReportResult) -> None:
        """Do what follows a transaction of this conductor that is committed.

        Send its notifications, start the operations that it has recorded, and continue this one.
        """
        self.announce(operation, result)
        await self.start_follow_ups(result)
        if isinstance(result, Continue):
            await self.run([result.operation])

    async def recorded_failure(
        self, operation: Operation, error: Exception, record: RecordFailure, task: str | None = None
    ) -> bool:
        """Record that an operation has failed, under the lock of its instance, and continue with what is left of it.

        Return False, and do nothing, if a later request has overtaken the operation, or another conductor has it.
        `task` is Nova's name of the conductor's own work, if that has failed: a notification tells of it.
        """
        result = await self._engine.database.write(self._failure_in, operation, error, record)
        self._engine.committed(self.name, "failed")
        if result is None:
            return False
        if task is not None and result.notifications:
            row = result.notifications[0][1]
            self.announce_failed_task(task, operation, GaveUp(row, None, fault_of(error, self._engine.now())))
        await self.continue_with(operation, result)
        return True

    def _failure_in(
        self, conn: sa.Connection, operation: Operation, error: Exception, record: RecordFailure
    ) -> ReportResult | None:
        row = self.transitions.lock_current(conn, operation)
        return None if row is None else record(conn, operation, row, error)

    async def start_follow_ups(self, result: ReportResult) -> None:
        """Start the operations that a transaction has recorded; if that fails now, the sweep finds them."""
        if result.follow_ups:
            try:
                await self._engine.lease_and_run(result.follow_ups)
            except Unavailable as error:
                log.warning("operations that follow from another start with the next sweep: %s", error)

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return the fields that only the notifications of this kind have."""
        return {}

    def upload_url_for(self, operation: Operation, progress: Progress) -> str | None:
        """Return where the host uploads an image, if that follows the task state that it has reached."""
        return None

    def destruction_begins(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> None:
        """Note that the host is about to do what cannot be undone; raise Unavailable if it has to wait.

        Both are locked, and the order still stands. The host repeats its question until it gets an answer.
        """

    def has_applied(self, found: OperationRow, report: Report) -> bool:
        """Return whether a report that arrives again was applied before, so that its host undoes nothing."""
        return found["epoch"] == report.epoch and found["result"] == "success"

    def host_stops(self, conn: sa.Connection, operation: Operation) -> Continue | None:
        """Continue without a host that is being stopped, or return None to leave the operation to the host.

        The host gets the order again when it returns. If it does not return, its lease expires.
        """
        return None


class SteppedKind(HostKind):
    """A kind of operation of several steps that a later request may overtake between any two."""

    async def run(self, operations: list[Operation]) -> None:
        """Continue each from its persisted step."""
        for operation in operations:
            try:
                await self.run_one(operation)
            except Stale:
                await self.overtaken(operation)

    @abstractmethod
    async def run_one(self, operation: Operation) -> None:
        """Continue from the persisted step; raise Stale if a later request has overtaken the operation."""

    @abstractmethod
    async def overtaken(self, operation: Operation) -> None:
        """Cancel, unless another conductor continues, and release what the operation holds."""


class OneOrderKind(HostKind):
    """A kind of operation whose work is one order to the server's host."""

    notification: str | None  # the name of its notifications, without the phase; None if it sends none

    async def run(self, operations: list[Operation]) -> None:
        """Send the order to the server's host; send it again if the host's lease has expired."""
        for operation in operations:
            row = await self._engine.database.read(instances.get, operation.instance_uuid)
            if row is None or row["epoch"] != operation.epoch or row["host"] is None:
                await self.transitions.cancel(operation)
                continue
            if operation.step == "dispatched" and await self.transitions.host_is_down(row["host"]):
                raise Unavailable(f"Host {row['host']} does not answer.")
            order = await self._engine.database.write(self.dispatch, operation, row, row["host"])
            self._engine.committed(self.name, "dispatched")
            if order is None:
                await self.transitions.cancel(operation)
                continue
            if operation.step == "new" and self.notification is not None:
                details = self.notification_details(operation)
                self.transitions.notify(f"{self.notification}.start", operation, row, details=details)
            await self.transitions.send(operation, order)


Applied = tuple[HostKind, Operation, ReportResult]


def known_kind(kinds: Mapping[str, HostKind], row: OperationRow) -> HostKind | None:
    """Return the kind of an operation; None if only newer conductors know the kind or its version."""
    kind = kinds.get(row["kind"])
    return None if kind is None or row["version"] > kind.version else kind


def _kind_of(kinds: Mapping[str, HostKind], row: OperationRow) -> HostKind:
    """Return the kind of an operation that a host works on; raise NotSupported if only newer conductors know it.

    The host repeats its message until such a conductor gets it.
    """
    kind = known_kind(kinds, row)
    if kind is None:
        raise NotSupported(f"This conductor is too old for {row['kind']} operations of version {row['version']}.")
    return kind


def apply_report(conn: sa.Connection, kinds: Mapping[str, HostKind], report: Report) -> Applied | None:
    """Apply a report unless it is stale; return None if there is no such operation.

    The instance's row is locked before the operation's. A host may report only on the instance of its own operation:
    its report could name any other.
    """
    row = instances.lock(conn, report.instance_uuid)
    found = operation_rows.get(conn, report.operation_id, lock=True)
    if found is None:  # it was purged, or it belongs to another cloud
        return None
    kind, operation = _kind_of(kinds, found), Operation.of(found)
    if found["instance_uuid"] != report.instance_uuid:
        log.warning(
            "host %s reported on instance %s with an operation of instance %s: the report is refused",
            report.host,
            report.instance_uuid,
            found["instance_uuid"],
        )
        return kind, operation, NoMoreWork(accepted=False)
    if row is not None and _is_at_work(kind, row, found, report):
        apply = kind.postponed if report.temporary else kind.reported
        return kind, operation, apply(conn, operation, row, report)
    repeated = kind.has_applied(found, report)
    # A build that ended too late: the host destroys the guest only if the instance is not on this host. The agent
    # checks the kind of its order, too: no reply may cost a guest that was there before the order.
    here = row is not None and row["host"] == report.host
    return kind, operation, NoMoreWork(accepted=repeated, destroy=not here and kind.name == "build")


def apply_progress(
    conn: sa.Connection, kinds: Mapping[str, HostKind], progress: Progress, now: int
) -> tuple[HostKind, Operation] | None:
    """Set the task state that a host has reached; return None if the operation is not the host's any more.

    A message that arrives twice, or after a later one, changes nothing: a task state only goes on.
    """
    row = instances.lock(conn, progress.instance_uuid)
    found = operation_rows.get(conn, progress.operation_id, lock=True)
    if row is None or found is None:
        return None
    kind, operation = _kind_of(kinds, found), Operation.of(found)
    if not _is_at_work(kind, row, found, progress):
        return None
    if progress.destroys:
        kind.destruction_begins(conn, operation, row)
    # The action of the kind's name has the task states that a host may report; a kind without one has none.
    action = states.ACTIONS.get(kind.name)
    if action is not None and states.is_further(action, row["task_state"], progress.task_state):
        instances.update(conn, row["uuid"], now, {"task_state": progress.task_state}, epoch=operation.epoch)
    return kind, operation


def _is_at_work(kind: HostKind, row: InstanceRow, found: OperationRow, message: Report | Progress) -> bool:
    """Return whether the sender of a message works on the operation of this instance, at its present epoch."""
    return (
        found["instance_uuid"] == row["uuid"]
        and (kind.moves_servers or row["host"] == message.host)
        and found["finished_at"] is None
        and found["epoch"] == message.epoch
        and found["owner"] == operation_rows.host_owner(message.host)
    )


def reported_error(report: Report) -> OperationFailed:
    """Return the error of a report that says that the host failed, with the host's message."""
    return OperationFailed(report.message or "The host could not carry out the order.", details=report.details or "")
