"""How an attempt of a build ends: the server is built, is rescheduled, or goes to ERROR.

All methods run in a transaction: the server, its operation, its instance action and its claim change together.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.operation_kind import Continue, FailedTask, NoMoreWork, StepResult
from micronova.conductor.operations.placing import NO_HOST
from micronova.conductor.operations.transitions import Notification, Transitions
from micronova.db import allocations, departures, explanations, instances, nodes
from micronova.db import operations as operation_rows
from micronova.objects import power_state, states
from micronova.objects.clock import micros
from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import explanation_of
from micronova.objects.instance import Fault, InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.operations import BuildPayload
from micronova.objects.orders import Report

CONDUCTOR_EVENT = "conductor_schedule_and_build_instances"
"""The event of a build that never reached a host."""


class BuildOutcomes:
    """The transactions that end an attempt of a build."""

    def __init__(self, dependencies: ConductorDependencies, transitions: Transitions, event: str) -> None:
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
        payload = payload_with_times(operation, report).encode()
        self._transitions.end(conn, operation, "success", host=report.host, payload=payload)
        nodes.note_built(conn, row["node_uuid"], now)
        return NoMoreWork(ended="success", notifications=[Notification("create.end", changed(row, values))], built=True)

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
        self._transitions.end_event(conn, operation, host=row["host"], error=reason)
        if left_behind and row["host"] is not None:
            departures.record(conn, row["host"], row["uuid"], operation.epoch, now)
        changes: InstanceChanges = {**NO_HOST, "task_state": states.SCHEDULING}
        taken = self._transitions.advance(
            conn, operation, "schedule", payload=payload.encode(), changes=changes, lease_seconds=pause
        )
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return Continue(taken)

    def fail_owned(self, conn: sa.Connection, operation: Operation, error: Exception, same_as: str = "") -> StepResult:
        """Fail a build if this conductor still owns it; cancel it if a later request has overtaken it."""
        row = instances.lock(conn, operation.instance_uuid)
        if not self._transitions.lock_and_is_current(conn, operation):
            return NoMoreWork()
        if row is None or row["epoch"] != operation.epoch:
            waiting = self._transitions.cancel_in(conn, operation, self._transitions.release_claim)
            return NoMoreWork(ended=None if waiting is None else "cancelled")
        return self.fail(conn, operation, row, error, same_as)

    def fail_all(self, conn: sa.Connection, failed: Sequence[tuple[Operation, Exception]]) -> list[StepResult]:
        """Fail several builds, which one decision found no host for; return their results in the same order."""
        uuids = [operation.instance_uuid for operation, _ in failed]
        instances.lock_many(conn, uuids)
        operation_rows.lock_many(conn, [operation.id for operation, _ in failed])
        held = allocations.get_many(conn, uuids)
        # Claims are released in the order of their nodes, in which every transaction locks inventories.
        in_order = sorted(failed, key=lambda each: [claim.node_uuid for claim in held.get(each[0].instance_uuid, [])])
        results: dict[str, StepResult] = {}
        explained = ""  # the operation that has the filters of the decision
        for operation, error in in_order:
            results[operation.id] = result = self.fail_owned(conn, operation, error, explained)
            if isinstance(result, Continue) or result.ended == "error":  # it was not overtaken
                explained = explained or operation.id
        return [results[operation.id] for operation, _ in failed]

    def fail(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception, same_as: str = ""
    ) -> StepResult:
        """Set the server to ERROR; the step `cleanup` deletes its ports if it may have some.

        `same_as` is the operation of the same request that has the filters of the decision.
        """
        now = self._engine.now()
        payload = operation.payload_as(BuildPayload)
        explanation = explanation_of(error) if isinstance(error, NoValidHost) else None
        if explanation is not None:
            own = explanation.sharing_filters(same_as)
            explanations.record(conn, operation.id, own, again=payload.placed_before)
        fault = fault_of(error, now)
        values: InstanceChanges = {
            "vm_state": states.ERROR,
            "task_state": None,
            "fault": fault,
            **NO_HOST,
            "network_info": [],
        }
        if row["host"] is not None:
            # The record of the departure lets the host remove what it left behind.
            departures.record(conn, row["host"], row["uuid"], operation.epoch, now)
        # A build that was never dispatched to a host, because there was none, sends no create.error.
        begun = payload.placed_before or not isinstance(error, NoValidHost)
        notifications = [Notification("create.error", changed(row, values), fault)] if begun else []
        failed_task = self._failed_task(conn, changed(row, values), fault) if isinstance(error, NoValidHost) else None
        event = self._event if row["host"] is not None else CONDUCTOR_EVENT
        has_ports = self._dependencies.network_client is not None and instances.may_have_ports(conn, row)
        result: StepResult
        if has_ports:
            self._transitions.end_event(conn, operation, host=row["host"], error=fault["message"], event=event)
            taken = self._transitions.advance(conn, operation, "cleanup", changes=values)
            result = Continue(taken, notifications, failed_task)
        else:
            values["epoch"] = operation.epoch + 1
            instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
            self._transitions.end(conn, operation, "error", host=row["host"], fault=fault, event=event)
            result = NoMoreWork(ended="error", notifications=notifications, failed_task=failed_task)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return result

    def _failed_task(self, conn: sa.Connection, row: InstanceRow, fault: Fault) -> FailedTask | None:
        if not self._dependencies.notifier.enabled:
            return None
        return FailedTask("build_instances", row, instances.request_spec(conn, row["uuid"]), fault)

    def cleaned_up(self, conn: sa.Connection, operation: Operation) -> list[str] | None:
        """End a failed build whose ports are deleted; return the operations that waited for this.

        Return None, and change nothing, if it has another owner.
        """
        return self._transitions.end_and_wake(
            conn, operation, lambda _: self._transitions.end_without_event(conn, operation)
        )


def payload_with_times(operation: Operation, report: Report) -> BuildPayload:
    """Return the operation's payload with the times at which the host worked on it."""
    payload = operation.payload_as(BuildPayload)
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


def hosts_went_down(uuid: str, names: list[str]) -> NoValidHost:
    """Return the error of a build whose hosts went down one after the other; their names are for admins."""
    return NoValidHost(
        f"Exceeded maximum number of retries. {len(names)} hosts went down one after the other while they built "
        f"instance {uuid}, so that no further host is tried.",
        tried=", ".join(names),
    )
