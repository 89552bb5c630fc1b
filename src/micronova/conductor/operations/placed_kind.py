"""What the kinds share for which the scheduler chooses a host for a server that exists already."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation, retry_pause
from micronova.conductor.operations.host_kind import Continue, NoMoreWork, ReportResult, SteppedKind, reported_error
from micronova.conductor.operations.placing import Placer, ServerToPlace
from micronova.objects.errors import MicronovaError, NoValidHost, OperationFailed, Stale, Unavailable
from micronova.objects.instance import InstanceRow, fault_of
from micronova.objects.network import VIF
from micronova.objects.operations import ChosenPayload, RequestedPayload, Step
from micronova.objects.orders import Report
from micronova.scheduler.rpcapi import SchedulerAPI

P = TypeVar("P", bound=RequestedPayload)
C = TypeVar("C", bound=ChosenPayload)


class BoundPorts(msgspec.Struct, frozen=True):
    """The interfaces of a server that has a place; None without a network service."""

    vifs: tuple[VIF, ...] | None


class PlacedKind(SteppedKind):
    """A kind of operation for which the scheduler chooses a destination."""

    def __init__(self, dependencies: ConductorDependencies, scheduler: SchedulerAPI, max_attempts: int) -> None:
        super().__init__(dependencies)
        self._max_attempts = max_attempts
        self._placer = Placer(dependencies.engine, scheduler, dependencies.service_down_time)

    async def placed(self, server: ServerToPlace[P]) -> bool:
        """Choose and claim a destination; return False if there is none, so that the operation waits or has failed."""
        payload = server.payload
        server.spec = msgspec.structs.replace(
            server.spec,
            force_host=payload.requested_host if payload.forced else None,
            force_node=None,
            requested_host=None if payload.forced else payload.requested_host,
            requested_node=None,
        )
        try:
            await self._placer.place([server])
        except NoValidHost as error:
            if not await self.transitions.wait_for_hosts([server.operation], error):
                await self.fail(server.operation, error)
            return False
        return True

    async def placed_and_bound(self, server: ServerToPlace[P]) -> BoundPorts | None:
        """Choose a destination and bind the ports to it; return None if the operation waits or has failed."""
        if not await self.placed(server):
            return None
        operation, chosen = server.operation, server.chosen
        try:
            return BoundPorts(await self.rebind(operation, server.row, chosen.host, chosen.zone))
        except (Stale, Unavailable):
            raise
        except MicronovaError as error:
            await self.fail(operation, error)
            return None

    def may_try_another(self, payload: RequestedPayload) -> bool:
        """Return whether another host may be tried: none was requested, and there are attempts left."""
        return payload.requested_host is None and len(payload.tried) < self._max_attempts


class PlacedBuildKind(PlacedKind, Generic[C]):
    """A kind of operation in which the chosen host builds the server's guest, or the next one if that host fails.

    Steps: `schedule` → `dispatched`; if no host is left, `unbind` (the ports leave the chosen host).
    """

    payload_type: type[C]

    def may_fail(self, operation: Operation) -> bool:
        """Return False if the operation has failed already, and only the ports are left."""
        return operation.step != "unbind"

    def payload_of(self, operation: Operation) -> C:
        """Return the decoded payload."""
        return msgspec.msgpack.decode(operation.payload, type=self.payload_type)

    @abstractmethod
    def leave_host(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        step: Step,
        payload: C,
        *,
        error: str,
        left_behind: bool,
        seconds: float | None = None,
    ) -> Operation:
        """End the attempt on the chosen host, if there is one, and persist that this conductor continues with `step`.

        If something may be `left_behind`, record the departure, so that the host removes it. After `seconds` any
        conductor may continue. The step `unbind` has no deadline.
        """

    def excluded_hosts(self, conn: sa.Connection, payload: C) -> Sequence[str]:
        """Return the hosts that the scheduler does not choose besides those that were tried."""
        return ()

    async def continue_without_host(self, operation: Operation) -> None:
        """Continue without the chosen host, which is down."""
        result = await self._engine.database.write(self._host_lost, operation)
        self._engine.committed(self.name, "host lost")
        await self.continue_with(operation, result)

    def _host_lost(self, conn: sa.Connection, operation: Operation) -> ReportResult:
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        return self._try_another(
            conn, operation, row, OperationFailed("The host does not answer any more."), left_behind=True
        )

    def not_built(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Try another host, or give up, because the chosen one has reported that it could not build the guest."""
        continued = self._try_another if report.outcome == "reschedule" else self.give_up
        return continued(conn, operation, row, reported_error(report), left_behind=report.left_behind)

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> ReportResult:
        """Choose the host again if it lacks something before the guest is built, as a build does."""
        payload = self.payload_of(operation)
        excluded = self.excluded_hosts(conn, payload)
        if operation.step != "dispatched" or not self._placer.may_choose_again(conn, payload, excluded):
            return super().postponed(conn, operation, row, report)
        reason = reported_error(report).message
        payload.put_off(report.host, reason)
        self.leave_host(
            conn,
            operation,
            row,
            "schedule",
            payload,
            error=reason,
            left_behind=report.left_behind,
            seconds=retry_pause(operation),
        )
        return NoMoreWork()

    def _try_another(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: MicronovaError, *, left_behind: bool
    ) -> Continue:
        payload = self.payload_of(operation)
        if not self.may_try_another(payload):
            error = NoValidHost(f"No host could take the server: {error.message}")
            return self.give_up(conn, operation, row, error, left_behind=left_behind)
        payload.last_error = error.message
        return Continue(
            self.leave_host(conn, operation, row, "schedule", payload, error=error.message, left_behind=left_behind)
        )

    def give_up(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception, *, left_behind: bool
    ) -> Continue:
        """Persist that only the ports are left."""
        payload = self.payload_of(operation)
        payload.error = fault_of(error, self._engine.now())["message"]
        return Continue(
            self.leave_host(conn, operation, row, "unbind", payload, error=payload.error, left_behind=left_behind)
        )
