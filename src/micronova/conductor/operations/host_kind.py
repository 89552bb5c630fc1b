"""The contract of a kind of operation whose work a host does, and what such kinds share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec

import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation, retry_pause
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, OperationKind, Retry, StepResult
from micronova.conductor.operations.orders import with_secrets
from micronova.conductor.operations.transitions import LONGEST_WAIT_FOR_REMOVAL, server_of
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.db.secrets import Secrets
from micronova.objects import states
from micronova.objects.clock import micros
from micronova.objects.errors import GuestElsewhere, NotSupported, OperationFailed, Stale, Unavailable
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import OperationRow, Step, with_last_error
from micronova.objects.orders import Progress, Report, WorkOrder

P = ParamSpec("P")


class HostKind(OperationKind):
    """A kind of operation whose work a host does: an order starts it, the host's report ends it."""

    moves_servers = False  # hosts that a server does not belong to get orders, too
    late_guest_is_destroyed = False  # a host whose report comes too late destroys the guest that it has made

    @abstractmethod
    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order, made from the database alone: a heartbeat may ask for it again."""

    @abstractmethod
    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Apply a host's report, in the transaction that ends or continues the operation."""

    def dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        """Make a host the owner of an operation that changes nothing of the instance before the host reports.

        Return the order, or None if the operation is no longer current or is overtaken.
        """
        dispatched = self.transitions.dispatch(conn, operation, host, {})
        return None if dispatched is None else self.order(conn, dispatched, row)

    def dispatch_current(self, conn: sa.Connection, operation: Operation) -> tuple[InstanceRow, WorkOrder] | None:
        """Make the server's host the owner of an operation; return the server as it was, and the order.

        Return None if the server is gone or has no host, or if the operation is no longer current or is overtaken.
        """
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch or row["host"] is None:
            return None
        order = self.dispatch(conn, operation, row, row["host"])
        return None if order is None else (row, order)

    async def check_host_answers(self, operation: Operation) -> None:
        """Raise Unavailable if the server's host is down: it gets its order again when it is back."""
        row = await self._engine.database.read(server_of, operation)
        if row is not None and row["host"] is not None and await self.transitions.host_is_down(row["host"]):
            raise Unavailable(f"Host {row['host']} does not answer.")

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Let the host, which lacks something for the moment, have its order again after a pause.

        The pause grows with each attempt, and only the operation's deadline limits their number.
        """
        pause = retry_pause(operation)
        reason = reported_error(report).message
        payload = with_last_error(operation.payload, reason)
        self.transitions.persist(conn, operation, operation.step, payload=payload, lease_seconds=pause)
        return NoMoreWork(retry=Retry(pause, reason))

    def order_again(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order that a host should have and has not, as it is sent."""
        return with_secrets(self.order(conn, operation, row), self._dependencies.secrets)

    def secrets_of(self, operation: Operation) -> Secrets:
        """Return the secrets of an operation, for its order."""
        return self._dependencies.secrets.open(operation.secrets, operation.id)

    def progressed(self, conn: sa.Connection, operation: Operation) -> None:
        """Record more than the task state when a host reports its progress."""

    def upload_url_for(self, operation: Operation, progress: Progress) -> str | None:
        """Return where the host uploads an image, if that follows the task state that it has reached."""
        return None

    def destruction_begins(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, unheard_since: int | None
    ) -> None:
        """Note that the host is about to do what cannot be undone.

        It asked first at `unheard_since`, which is None if the server's own host, another one, has answered since.
        Raise HostUnavailable if the host has to wait for the answer, Stale if it must go on without doing it. Both rows
        are locked, and the order still stands. The host repeats its question until it gets an answer.
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
            except GuestElsewhere as error:
                await self._engine.postpone([operation], error, longest=LONGEST_WAIT_FOR_REMOVAL)
            except Stale:
                await self.overtaken(operation)

    @abstractmethod
    async def run_one(self, operation: Operation) -> None:
        """Continue from the persisted step; raise Stale if a later request has overtaken the operation."""

    @abstractmethod
    async def overtaken(self, operation: Operation) -> None:
        """Cancel, unless another conductor continues, and release what the operation holds."""

    async def commit_dispatch(
        self,
        operation: Operation,
        step: Step,
        dispatch: Callable[Concatenate[sa.Connection, P], WorkOrder | None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> WorkOrder | None:
        """Run the transaction that makes a host the owner, at this step; return the order, which is still to be sent.

        Return None if the operation was overtaken before that; it is cancelled then.
        """
        order = await self._engine.database.write(dispatch, *args, **kwargs)
        self._engine.committed(self.name, step)
        if order is None:
            await self.overtaken(operation)
        return order


class OneOrderKind(HostKind):
    """A kind of operation whose work is one order to the server's host."""

    notification: str | None  # the name of its notifications, without the phase; None if it sends none

    async def run(self, operations: list[Operation]) -> None:
        """Send the order to the server's host; send it again if the host's lease has expired."""
        for operation in operations:
            if operation.step == "dispatched":
                await self.check_host_answers(operation)
            dispatched = await self._engine.database.write(self.dispatch_current, operation)
            self._engine.committed(self.name, "dispatched")
            if dispatched is None:
                await self.transitions.cancel(operation)
                continue
            row, order = dispatched
            if operation.step == "new" and self.notification is not None:
                details = self.notification_details(operation)
                self.transitions.notify(f"{self.notification}.start", operation, row, details=details)
            await self.transitions.send(operation, order)


Applied = tuple[HostKind, Operation, StepResult]


def known_kind(kinds: Mapping[str, OperationKind], row: OperationRow) -> OperationKind | None:
    """Return the kind of an operation; None if only newer conductors know the kind or its version."""
    kind = kinds.get(row["kind"])
    return None if kind is None or row["version"] > kind.version else kind


def _kind_of(kinds: Mapping[str, OperationKind], row: OperationRow) -> HostKind | None:
    """Return the kind of an operation of which a host sends a message; None if no host works on such operations.

    Raise NotSupported if only newer conductors know it: the host repeats its message until such a conductor gets it.
    """
    kind = known_kind(kinds, row)
    if kind is None:
        raise NotSupported(f"This conductor is too old for {row['kind']} operations of version {row['version']}.")
    return kind if isinstance(kind, HostKind) else None


def apply_report(conn: sa.Connection, kinds: Mapping[str, OperationKind], report: Report) -> Applied | None:
    """Apply a report unless it is stale; return None if there is no such operation, or no host works on it.

    The instance's row is locked before the operation's. A host may report only on the instance of its own operation:
    its report could name any other.
    """
    row = instances.lock(conn, report.instance_uuid)
    found = operation_rows.get(conn, report.operation_id, lock=True)
    if found is None:  # it was purged, or it belongs to another cloud
        return None
    kind, operation = _kind_of(kinds, found), Operation.of(found)
    if kind is None:
        return None
    if found["instance_uuid"] != report.instance_uuid:
        return kind, operation, NoMoreWork(accepted=False)
    if row is not None and _is_at_work(kind, row, found, report):
        apply = kind.postponed if report.temporary else kind.reported
        return kind, operation, apply(conn, operation, row, report)
    repeated = kind.has_applied(found, report)
    # It came too late: the host destroys the guest only if the instance is not on this host. The agent checks the kind
    # of its order, too: no reply may cost a guest that was there before the order.
    here = row is not None and row["host"] == report.host
    return kind, operation, NoMoreWork(accepted=repeated, destroy=not here and kind.late_guest_is_destroyed)


def apply_progress(
    conn: sa.Connection, kinds: Mapping[str, OperationKind], progress: Progress, now: int, answered: str | None = None
) -> tuple[HostKind, Operation] | None:
    """Set the task state that a host has reached; return None if the operation is not the host's any more.

    A message that arrives twice, or after a later one, changes nothing: a task state only goes on. `answered` is
    another host that has answered since this one asked whether it may destroy something.
    """
    row = instances.lock(conn, progress.instance_uuid)
    found = operation_rows.get(conn, progress.operation_id, lock=True)
    if row is None or found is None:
        return None
    kind, operation = _kind_of(kinds, found), Operation.of(found)
    if kind is None or not _is_at_work(kind, row, found, progress):
        return None
    if progress.destroys:
        try:
            kind.destruction_begins(conn, operation, row, _unheard_since(operation, row, progress, now, answered))
        except Stale:
            return None
    # The action of the kind's name has the task states that a host may report; a kind without one has none.
    action = states.ACTIONS.get(kind.name)
    if action is not None and states.is_further(action, row["task_state"], progress.task_state):
        instances.update(conn, row["uuid"], now, {"task_state": progress.task_state}, epoch=operation.epoch)
    kind.progressed(conn, operation)
    return kind, operation


def _unheard_since(
    operation: Operation, row: InstanceRow, progress: Progress, now: int, answered: str | None
) -> int | None:
    """Return since when the server's host has to be heard of before another host may destroy; None if it answered."""
    if answered is not None and answered == row["host"]:
        return None
    # A host of an older version does not say when it asked first; the request was certainly earlier.
    return operation.created_at if progress.waited is None else now - micros(progress.waited)


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
