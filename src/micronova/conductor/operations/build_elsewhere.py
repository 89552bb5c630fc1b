"""Building the guest of a server that exists already: on the chosen host, or on the next one if that host fails.

A kind that has these attempts has the steps `schedule` → `dispatched`; if no host is left, `unbind` (the ports leave
the chosen host).
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.destinations import Destinations
from micronova.conductor.operations.engine import Operation, retry_pause
from micronova.conductor.operations.host_kind import SteppedKind, reported_error
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.objects.errors import MicronovaError, NoValidHost, OperationFailed
from micronova.objects.instance import InstanceChanges, InstanceRow, fault_of
from micronova.objects.operations import ChosenPayload, Step
from micronova.objects.orders import Report

C = TypeVar("C", bound=ChosenPayload)
C_contra = TypeVar("C_contra", bound=ChosenPayload, contravariant=True)


class LeaveHost(Protocol[C_contra]):
    """Ends the attempt on the chosen host, or the one to choose it, and its event.

    If something may be `left_behind`, it records the departure, so that the host removes it.
    """

    def __call__(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        payload: C_contra,
        *,
        error: str,
        left_behind: bool,
    ) -> InstanceChanges:
        """Return the changes of the server."""


class BuildElsewhere(Generic[C]):
    """The attempts of one kind of operation to build the guest of an existing server on another host."""

    def __init__(
        self,
        dependencies: ConductorDependencies,
        kind: SteppedKind,
        destinations: Destinations,
        payload_type: type[C],
        *,
        leave_host: LeaveHost[C],
        excluded_hosts: Callable[[sa.Connection, C], Sequence[str]] | None = None,
    ) -> None:
        """`excluded_hosts` returns the hosts that the scheduler does not choose besides those that were tried."""
        self._engine = dependencies.engine
        self._kind = kind
        self._destinations = destinations
        self._payload_type = payload_type
        self._leave_host = leave_host
        self._excluded_hosts = excluded_hosts

    async def continue_without_host(self, operation: Operation) -> None:
        """Continue without the chosen host, which is down."""
        result = await self._engine.database.write(self._without_host, operation)
        self._engine.committed(self._kind.name, "without host")
        await self._kind.continue_with(operation, result)

    def _without_host(self, conn: sa.Connection, operation: Operation) -> StepResult:
        row = self._kind.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        error = OperationFailed("The host does not answer any more.")
        return self._try_another(conn, operation, row, error, left_behind=True)

    def not_built(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Try another host, or give up, because the chosen one has reported that it could not build the guest."""
        continued = self._try_another if report.outcome == "reschedule" else self.give_up
        return continued(conn, operation, row, reported_error(report), left_behind=report.left_behind)

    def postponed(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report
    ) -> NoMoreWork | None:
        """Choose the host again if it lacks something before the guest is built, as a build does.

        Return None, and change nothing, if the host has to have its order again.
        """
        payload = operation.payload_as(self._payload_type)
        excluded = () if self._excluded_hosts is None else self._excluded_hosts(conn, payload)
        if operation.step != "dispatched" or not self._destinations.may_choose_again(conn, payload, excluded):
            return None
        reason, pause = reported_error(report).message, retry_pause(operation)
        payload.prefer_others(report.host, reason)
        self._continue_with(conn, operation, row, "schedule", payload, reason, report.left_behind, lease_seconds=pause)
        return NoMoreWork()

    def _try_another(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: MicronovaError, *, left_behind: bool
    ) -> Continue:
        payload = operation.payload_as(self._payload_type)
        if not self._destinations.may_try_another(payload):
            error = NoValidHost(f"No host could take the server: {error.message}")
            return self.give_up(conn, operation, row, error, left_behind=left_behind)
        payload.last_error = error.message
        return Continue(self._continue_with(conn, operation, row, "schedule", payload, error.message, left_behind))

    def give_up(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception, *, left_behind: bool
    ) -> Continue:
        """Persist that only the ports are left."""
        payload = operation.payload_as(self._payload_type)
        payload.error = fault_of(error, self._engine.now())["message"]
        return Continue(self._continue_with(conn, operation, row, "unbind", payload, payload.error, left_behind))

    def _continue_with(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        step: Step,
        payload: C,
        error: str,
        left_behind: bool,
        *,
        lease_seconds: float | None = None,
    ) -> Operation:
        """End the attempt and persist that this conductor continues with a step.

        After `lease_seconds` any conductor may. The step `unbind` has no deadline.
        """
        changes = self._leave_host(conn, operation, row, payload, error=error, left_behind=left_behind)
        encoded, endless = payload.encode(), step == "unbind"
        return self._kind.transitions.advance(
            conn, operation, step, payload=encoded, changes=changes, endless=endless, lease_seconds=lease_seconds
        )
