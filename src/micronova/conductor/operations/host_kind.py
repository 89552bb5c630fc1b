"""The contract of a kind of operation whose work a host does, and what such kinds share."""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import Dependencies
from micronova.conductor.operations.engine import Kind, Operation, retry_pause
from micronova.conductor.operations.transitions import Notification, Transitions
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.objects.errors import MicronovaError, OperationFailed
from micronova.objects.instance import Fault, InstanceRow
from micronova.objects.operations import Result
from micronova.objects.orders import Report, WorkOrder

log = logging.getLogger(__name__)


class Continue(msgspec.Struct):
    """The result of a report: this conductor continues the operation and sends these notifications."""

    operation: Operation
    notifications: Sequence[Notification] = ()


class NoMoreWork(msgspec.Struct):
    """The result of a report: this conductor only sends these notifications.

    The operation has ended, continues later, or has another owner.
    """

    ended: Result | None = None  # how the transaction ended the operation; None if it did not end it
    accepted: bool = True
    destroy: bool = False  # the instance is not on the reporting host: that host destroys its guest
    built: bool = False  # a server became ACTIVE: the hooks that follow a build run
    notifications: Sequence[Notification] = ()


ReportResult = Continue | NoMoreWork


class HostKind(Kind):
    """A kind of operation whose work a host does: an order starts it, the host's report ends it."""

    action_event: str  # the name of the event in the instance action

    def __init__(self, dependencies: Dependencies) -> None:
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
        payload = {**msgspec.msgpack.decode(operation.payload), "last_error": reason}
        operation_rows.step(
            conn,
            operation.id,
            operation.lease,
            step=operation.step,
            payload=msgspec.msgpack.encode(payload),
            until=self._engine.until(pause),
            new_owner=self._engine.owner,
        )
        return NoMoreWork()

    def announce(self, operation: Operation, result: ReportResult) -> None:
        """Send the notifications of a transaction that is committed; count the operation if it has ended."""
        for name, row, fault in result.notifications:
            self.transitions.notify(name, operation, row, fault)
        if isinstance(result, NoMoreWork) and result.ended is not None:
            self._engine.ended(operation, result.ended)

    def host_stops(self, conn: sa.Connection, operation: Operation) -> Continue | None:
        """Continue without a host that is being stopped, or return None to leave the operation to the host.

        The host gets the order again when it returns. If it does not return, its lease expires.
        """
        return None


Applied = tuple[HostKind, Operation, ReportResult]


def apply_report(conn: sa.Connection, kinds: Mapping[str, HostKind], report: Report) -> Applied | None:
    """Apply a report unless it is stale; return None if there is no such operation.

    The instance's row is locked before the operation's. A host may report only on the instance of its own operation:
    its report could name any other.
    """
    row = instances.lock(conn, report.instance_uuid)
    found = operation_rows.get(conn, report.operation_id, lock=True)
    if found is None:  # it was purged, or it belongs to another cloud
        return None
    kind, operation = kinds[found["kind"]], Operation.of(found)
    if found["instance_uuid"] != report.instance_uuid:
        log.warning(
            "host %s reported on instance %s with an operation of instance %s: the report is refused",
            report.host,
            report.instance_uuid,
            found["instance_uuid"],
        )
        return kind, operation, NoMoreWork(accepted=False)
    if (
        row is not None
        and row["host"] == report.host
        and found["finished_at"] is None
        and found["epoch"] == report.epoch
        and found["owner"] == operation_rows.host_owner(report.host)
    ):
        apply = kind.postponed if report.temporary else kind.reported
        return kind, operation, apply(conn, operation, row, report)
    repeated = found["epoch"] == report.epoch and found["result"] == "success"
    # A build that ended too late: the host destroys the guest only if the instance is not on this host.
    here = row is not None and row["host"] == report.host
    return kind, operation, NoMoreWork(accepted=repeated, destroy=not here and kind.name == "build")


def fault_of(error: BaseException | str, now: int, code: int = 500) -> Fault:
    """Return the fault that users see on the server. The text of an unexpected error is for admins only."""
    if isinstance(error, MicronovaError):
        details = "; ".join(f"{key}: {value}" for key, value in error.details.items())
        return {"code": code, "message": error.message[:255], "details": details[:4000], "created": now}
    if isinstance(error, str):
        return {"code": code, "message": error[:255], "details": "", "created": now}
    return {
        "code": code,
        "message": "An unexpected error happened; the log has the reason under the request id of this action.",
        "details": f"{type(error).__name__}: {error}"[:1000],
        "created": now,
    }


def reported_error(report: Report) -> OperationFailed:
    """Return the error of a report that says that the host failed, with the host's message."""
    return OperationFailed(report.message or "The host could not carry out the order.", details=report.details or "")
