"""How an attempt of a build ends: the server is built, is rescheduled, or goes to ERROR.

All methods run in a transaction: the server, its operation, its instance action and its claim change together.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import Dependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import Continue, NoMoreWork, ReportResult, fault_of
from micronova.conductor.operations.transitions import Transitions
from micronova.db import allocations, instance_actions, instances, nodes
from micronova.db import operations as operation_rows
from micronova.objects import power_state, states
from micronova.objects.clock import micros
from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import Explanation, FilterStep
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.operations import BuildPayload
from micronova.objects.orders import Report

# The event of a build that never reached a host.
SCHEDULING_EVENT = "conductor_schedule_and_build_instances"


class BuildOutcomes:
    """The transactions that end an attempt of a build."""

    def __init__(self, dependencies: Dependencies, transitions: Transitions, event: str) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._transitions = transitions
        self._event = event

    def built(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> NoMoreWork:
        """Set the server to ACTIVE and end the operation."""
        now = self._engine.now()
        values: InstanceChanges = {
            "vm_state": states.ACTIVE,
            "task_state": None,
            "power_state": power_state.RUNNING if report.power_state is None else report.power_state,
            "launched_at": row["launched_at"] or now,
            "config_drive": row["config_drive"] or report.config_drive,
            **self._access_addresses(row),
        }
        instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
        payload = timed(operation, report).encode()
        self._transitions.end(conn, operation, "success", host=report.host, payload=payload)
        nodes.note_built(conn, row["node_uuid"], now)
        return NoMoreWork(ended="success", notifications=[("create.end", changed(row, values), None)], built=True)

    def _access_addresses(self, row: InstanceRow) -> InstanceChanges:
        """Return the access IPs of the network that the operator named, where the user gave none."""
        values: InstanceChanges = {}
        for vif in row["network_info"]:
            if self._dependencies.access_network is None or vif["network_label"] != self._dependencies.access_network:
                continue
            for address in vif["fixed_ips"]:
                if address["version"] == 4 and not row["access_ip_v4"]:
                    values.setdefault("access_ip_v4", address["address"])
                elif address["version"] == 6 and not row["access_ip_v6"]:
                    values.setdefault("access_ip_v6", address["address"])
        return values

    def reschedule(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        payload: BuildPayload,
        reason: str,
        left_behind: bool,
        *,
        pause: float | None = None,
    ) -> Continue:
        """Take the server from its host and persist that this conductor places it again, or any one after a pause."""
        now = self._engine.now()
        payload.last_error = reason
        self._fail_event(conn, operation, row, self._event, reason)
        if left_behind and row["host"] is not None:
            operation_rows.record_departure(conn, row["host"], row["uuid"], operation.epoch, now)
        values: InstanceChanges = {
            "host": None,
            "node": None,
            "node_uuid": None,
            "task_state": states.SCHEDULING,
            "epoch": operation.epoch + 1,
        }
        instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
        encoded = payload.encode()
        self._transitions.persist(
            conn, operation, "schedule", payload=encoded, epoch=operation.epoch + 1, seconds=pause
        )
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return Continue(self._taken(operation, "schedule", encoded))

    def _taken(self, operation: Operation, step: str, payload: bytes) -> Operation:
        """Return the operation as this conductor owns it, at the next epoch.

        The old one stays as it was, because the transaction may run again.
        """
        return msgspec.structs.replace(
            operation, owner=self._engine.owner, step=step, payload=payload, epoch=operation.epoch + 1
        )

    def fail_owned(
        self, conn: sa.Connection, operation: Operation, error: Exception, same_as: str = ""
    ) -> ReportResult:
        """Fail a build if this conductor still owns it; cancel it if a later request has overtaken it."""
        row = instances.lock(conn, operation.instance_uuid)
        if not self._transitions.owns(conn, operation):
            return NoMoreWork()
        if row is None or row["epoch"] != operation.epoch:
            waiting = self._transitions.cancel_in(conn, operation, self.release_claim)
            return NoMoreWork(ended=None if waiting is None else "cancelled")
        return self.fail(conn, operation, row, error, same_as)

    def fail_all(self, conn: sa.Connection, failed: Sequence[tuple[Operation, Exception]]) -> list[ReportResult]:
        """Fail several builds, which one decision found no host for; return their results in the same order."""
        uuids = [operation.instance_uuid for operation, _ in failed]
        instances.lock_many(conn, uuids)
        operation_rows.lock_many(conn, [operation.id for operation, _ in failed])
        held = allocations.get_many(conn, uuids)
        # Claims are released in the order of their nodes, in which every transaction locks inventories.
        in_order = sorted(failed, key=lambda each: [claim.node_uuid for claim in held.get(each[0].instance_uuid, [])])
        results: dict[str, ReportResult] = {}
        explained = ""  # the operation that has the filters of the decision
        for operation, error in in_order:
            results[operation.id] = result = self.fail_owned(conn, operation, error, explained)
            if result.notifications:  # it was not overtaken
                explained = explained or operation.id
        return [results[operation.id] for operation, _ in failed]

    def fail(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception, same_as: str = ""
    ) -> ReportResult:
        """Set the server to ERROR; the step `cleanup` deletes its ports if it may have some.

        `same_as` is the operation of the same request that has the filters of the decision.
        """
        now = self._engine.now()
        decision = _decision(error, same_as)
        if decision is not None:
            operation_rows.explain(conn, operation.id, decision)
        fault = fault_of(error, now)
        values: InstanceChanges = {
            "vm_state": states.ERROR,
            "task_state": None,
            "fault": fault,
            "host": None,
            "node": None,
            "node_uuid": None,
            "network_info": [],
            "epoch": operation.epoch + 1,
        }
        instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
        if row["host"] is not None:
            # The record of the departure lets the host remove what it left behind.
            operation_rows.record_departure(conn, row["host"], row["uuid"], operation.epoch, now)
        notifications = [("create.error", changed(row, values), fault)]
        event = self._event if row["host"] is not None else SCHEDULING_EVENT
        has_ports = self._dependencies.network_client is not None and instances.may_have_ports(conn, row)
        if has_ports:
            self._fail_event(conn, operation, row, event, fault["message"])
            self._transitions.persist(conn, operation, "cleanup", epoch=operation.epoch + 1)
        else:
            self._transitions.end(conn, operation, "error", host=row["host"], fault=fault, event=event)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        if not has_ports:
            return NoMoreWork(ended="error", notifications=notifications)
        return Continue(self._taken(operation, "cleanup", operation.payload), notifications)

    def _fail_event(self, conn: sa.Connection, operation: Operation, row: InstanceRow, event: str, reason: str) -> None:
        """End the event of this attempt; the instance action continues."""
        instance_actions.event_finish(
            conn,
            row["uuid"],
            operation.context.request_id,
            operation.epoch,
            event,
            self._engine.now(),
            result="Error",
            host=row["host"],
            details=reason,
        )

    def cleaned_up(self, conn: sa.Connection, operation: Operation) -> list[str] | None:
        """End a failed build whose ports are deleted; return the operations that waited for this.

        Return None, and change nothing, if it has got another owner.
        """
        now = self._engine.now()
        instances.lock(conn, operation.instance_uuid)
        operation_rows.lock_open_of(conn, operation.instance_uuid)
        if not operation_rows.finish(conn, operation.id, now, "error", operation.lease):
            return None
        instance_actions.finish(conn, operation.instance_uuid, operation.context.request_id, now, message="Error")
        return operation_rows.wake(conn, operation.instance_uuid)

    def release_claim(self, conn: sa.Connection, operation: Operation, row: InstanceRow | None) -> None:
        """Release the claim of a cancelled build, unless the instance is on a host."""
        if row is None or row["host"] is None:
            allocations.release(conn, operation.instance_uuid, now=self._engine.now())


def _decision(error: Exception, same_as: str) -> Explanation | None:
    """Return why the scheduler found no host; another operation may have the filters already."""
    if not isinstance(error, NoValidHost) or "reasons" not in error.details:
        return None
    filters = () if same_as else msgspec.convert(error.details["reasons"], tuple[FilterStep, ...])
    return Explanation(hosts=error.details.get("hosts", 0), filters=filters, same_as=same_as)


def timed(operation: Operation, report: Report) -> BuildPayload:
    """Return the operation's payload with the times at which the host worked on it."""
    payload = BuildPayload.decode(operation.payload)
    if payload.dispatches:
        payload.dispatches[-1].started = micros(report.started_at)
        payload.dispatches[-1].finished = micros(report.finished_at)
    return payload


def exhausted(uuid: str, tried: list[str], last: str, **details: Any) -> NoValidHost:
    """Return the error of a build for which no host is left; the hosts' names are for admins."""
    return NoValidHost(
        f"Exceeded maximum number of retries. Exhausted all hosts available for retrying build failures for "
        f"instance {uuid}. Last error: {last}",
        tried=", ".join(tried),
        **details,
    )
