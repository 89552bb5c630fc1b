"""What all kinds of operations share: the results of their transactions, and what follows from these."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Kind, Operation
from micronova.conductor.operations.transitions import Notification, Transitions
from micronova.notifications import resources
from micronova.notifications.resources import Announcement
from micronova.objects.errors import Unavailable
from micronova.objects.instance import Fault, InstanceRow
from micronova.objects.operations import Result
from micronova.objects.scheduling import RequestSpec

log = logging.getLogger(__name__)


class Continue(msgspec.Struct):
    """The result of a transaction that ends a step: this conductor sends these notifications and continues."""

    operation: Operation
    notifications: Sequence[Notification] = ()
    failed_task: "FailedTask | None" = None
    follow_ups: Sequence[str] = ()  # operations that the transaction may have recorded: they start now


class Retry(NamedTuple):
    """Why an operation is tried again, and the seconds until then."""

    pause: float
    reason: str


class NoMoreWork(msgspec.Struct):
    """The result of a transaction that ends a step: this conductor only sends these notifications.

    The operation has ended, continues later, or has another owner.
    """

    ended: Result | None = None  # how the transaction ended the operation; None if it did not end it
    accepted: bool = True
    destroy: bool = False  # the instance is not on the reporting host: that host destroys its guest
    built: bool = False  # a server became ACTIVE: the hooks that follow a build run
    notifications: Sequence[Notification] = ()
    failed_task: "FailedTask | None" = None
    follow_ups: Sequence[str] = ()  # as in `Continue`
    retry: Retry | None = None  # of an operation that continues later, because something is missing for the moment
    announcements: Sequence[Callable[[], Announcement]] = ()  # sent before the notifications


class FailedTask(msgspec.Struct):
    """A task of this conductor that has failed, such as a build for which it found no host: Nova's compute_task."""

    method: str  # Nova's name of the task
    row: InstanceRow
    spec: RequestSpec | None
    fault: Fault


StepResult = Continue | NoMoreWork
RecordFailure = Callable[[sa.Connection, Operation, InstanceRow, Exception], StepResult]
"""The part of a transaction that records a failure of a kind."""


class OperationKind(Kind):
    """A kind of operation on a server."""

    action_event: str  # the name of the event in the instance action

    def __init__(self, dependencies: ConductorDependencies) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self.transitions = Transitions(dependencies, self.action_event)

    def announce(self, operation: Operation, result: StepResult) -> None:
        """Send the notifications of a transaction that is committed; count the operation if it ends or is retried."""
        for announcement in result.announcements if isinstance(result, NoMoreWork) else ():
            self._dependencies.notifier.announce(operation.context, announcement)
        for each in result.notifications:
            details = {**self.notification_details(operation), **(each.details or {})}
            self.transitions.notify(each.name, operation, each.row, each.fault, details, each.sender)
        if (failed_task := result.failed_task) is not None:
            self.announce_failed_task(operation, failed_task)
        if isinstance(result, NoMoreWork) and result.ended is not None:
            self._engine.ended(operation, result.ended)
        if isinstance(result, NoMoreWork) and result.retry is not None:
            self._engine.retried(operation, result.retry.pause, result.retry.reason)

    def announce_failed_task(self, operation: Operation, failed_task: FailedTask) -> None:
        """Send the notification that a task of this conductor has failed."""
        failed = partial(
            resources.task_failed, failed_task.method, failed_task.row, failed_task.spec, failed_task.fault
        )
        self._dependencies.notifier.announce(operation.context, failed)

    async def continue_with(self, operation: Operation, result: StepResult) -> None:
        """Do what follows a transaction of this conductor that is committed.

        Send its notifications, start the operations that it has recorded, and continue this one.
        """
        self.announce(operation, result)
        await self.start_follow_ups(result)
        if isinstance(result, Continue):
            self._engine.step_begins([result.operation])
            await self.run([result.operation])

    async def commit_failure(self, operation: Operation, error: Exception, record: RecordFailure) -> bool:
        """Record that an operation has failed, under the lock of its instance, and continue with what is left of it.

        Return False, and do nothing, if a later request has overtaken the operation, or another conductor has it.
        """
        result = await self._engine.database.write(self._failure_in, operation, error, record)
        self._engine.committed(self.name, "failed")
        if result is None:
            return False
        await self.continue_with(operation, result)
        return True

    def _failure_in(
        self, conn: sa.Connection, operation: Operation, error: Exception, record: RecordFailure
    ) -> StepResult | None:
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return None
        self.transitions.explain_failure(conn, operation, error)
        return record(conn, operation, row, error)

    async def start_follow_ups(self, result: StepResult) -> None:
        """Start the operations that a transaction has recorded; if that fails now, the sweep finds them."""
        if result.follow_ups:
            try:
                await self._engine.lease_and_run(result.follow_ups)
            except Unavailable as error:
                ids = ", ".join(result.follow_ups)
                log.warning("operations %s are not started now but by the next sweep: %s", ids, error)

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return the fields that only the notifications of this kind have."""
        return {}
