"""How a try of a build ends: the server is built, goes to the next host, or is lost.

Everything here is a transaction, or part of one: the server, its operation, its action and its claim change together.
"""

from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.compute import states
from micronova.conductor.build_payload import BuildPayload
from micronova.conductor.kinds import Continue, Ended, HostKind, Tools, abort_error, fault_of
from micronova.conductor.operations import Operation
from micronova.conductor.placing import request_of
from micronova.db import actions, allocations, instances, nodes, services
from micronova.db import operations as rows
from micronova.objects.clock import micros
from micronova.objects.errors import NoValidHost
from micronova.objects.orders import Report

# A server that never got as far as a host has this event instead of the host's.
SCHEDULING_EVENT = "conductor_schedule_and_build_instances"


class BuildEnds(HostKind):
    """The ends of a build; `Build` has the way there."""

    name = "build"
    order_kind = "build"
    event = "compute__do_build_and_run_instance"

    def __init__(self, tools: Tools, max_attempts: int) -> None:
        super().__init__(tools)
        self._max_attempts = max_attempts

    def reported(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Continue | Ended:
        """The host is done, or failed: what another host may do better goes there, the rest is lost."""
        if report.outcome == "done":
            return self._built(conn, operation, row, report)
        payload = _timed(operation, report)
        error = abort_error(report)
        if report.outcome == "reschedule":
            nodes.note_failed_build(conn, row["node_uuid"], self.engine.now())
            spec = request_of(instances.specs(conn, [row["uuid"]])[row["uuid"]])
            if spec.force_host is None and len(payload.tried) < self._max_attempts:
                return self._reschedule(conn, operation, row, payload, error.message, report.left_behind)
            error = exhausted(row["uuid"], payload.tried, error.message)
        return self._lost(conn, operation, row, error)

    def host_stops(self, conn: sa.Connection, operation: Operation) -> Continue | None:
        """A server may go to another host at once; one that cannot waits for its own host to come back."""
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch or not self.owns(conn, operation):
            return None
        payload = BuildPayload.of(operation)
        spec = request_of(instances.specs(conn, [row["uuid"]])[row["uuid"]])
        since = self.engine.now() - micros(self.tools.service_down_time)
        if (
            spec.force_host is not None
            or len(payload.tried) >= self._max_attempts
            or not services.any_up(conn, "nova-compute", since, besides=payload.tried)
        ):
            return None
        # What the host may not have undone in time, it removes when it is back.
        return self._reschedule(conn, operation, row, payload, "The host was stopped.", left_behind=True)

    def host_died(self, conn: sa.Connection, operation: Operation, report: Report) -> Continue | Ended:
        """Take the build from a host that is down, as if it had reported so."""
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch or not self.owns(conn, operation):
            return Ended()
        rows.record_departure(conn, report.host, row["uuid"], operation.epoch, self.engine.now())
        return self.reported(conn, operation, row, report)

    def _built(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Ended:
        now = self.engine.now()
        values: dict[str, Any] = {
            "vm_state": states.ACTIVE,
            "task_state": None,
            "power_state": states.RUNNING if report.power_state is None else report.power_state,
            "launched_at": row["launched_at"] or now,
            **self._access_addresses(row),
        }
        instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
        payload = _timed(operation, report).encode()
        self.end(conn, operation, "success", host=report.host, payload=payload)
        nodes.note_built(conn, row["node_uuid"], now)
        return Ended(events=[("create.end", {**row, **values}, None)], built=True)

    def _access_addresses(self, row: Any) -> dict[str, Any]:
        """Take the access IPs from the network that the operator named, unless the user gave some."""
        values: dict[str, Any] = {}
        for vif in row["network_info"]:
            if self.tools.access_network is None or vif["network_label"] != self.tools.access_network:
                continue
            for address in vif["fixed_ips"]:
                column = f"access_ip_v{address['version']}"
                if not row[column]:
                    values.setdefault(column, address["address"])
        return values

    def _reschedule(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: Any,
        payload: BuildPayload,
        reason: str,
        left_behind: bool,
    ) -> Continue:
        now = self.engine.now()
        payload.last_error = reason
        self._fail_event(conn, operation, row, self.event, reason)
        if left_behind:
            rows.record_departure(conn, row["host"], row["uuid"], operation.epoch, now)
        values = {
            "host": None,
            "node": None,
            "node_uuid": None,
            "task_state": states.SCHEDULING,
            "epoch": operation.epoch + 1,
        }
        instances.update(conn, row["uuid"], now, values, epoch=operation.epoch)
        encoded = payload.encode()
        self.persist(conn, operation, "schedule", payload=encoded, epoch=operation.epoch + 1)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return Continue(self._taken(operation, "schedule", encoded))

    def _taken(self, operation: Operation, step: str, payload: bytes) -> Operation:
        """The operation as this conductor has it now, at the next epoch; a transaction may be tried again, so the
        old one is left as it was."""
        return msgspec.structs.replace(
            operation, owner=self.engine.owner, step=step, payload=payload, epoch=operation.epoch + 1
        )

    def lose(self, conn: sa.Connection, operation: Operation, error: Exception) -> Continue | Ended:
        """Give a build up that is in this conductor's hands; it may have been overtaken."""
        row = instances.lock(conn, operation.instance_uuid)
        if not self.owns(conn, operation):
            return Ended()
        if row is None or row["epoch"] != operation.epoch:
            self.cancelled(conn, operation)
            return Ended()
        return self._lost(conn, operation, row, error)

    def _lost(self, conn: sa.Connection, operation: Operation, row: Any, error: Exception) -> Continue | Ended:
        """The server goes to ERROR at once; a step of its own removes its ports if it may have some."""
        now = self.engine.now()
        fault = fault_of(error, now)
        values: dict[str, Any] = {
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
            # Should the host have left something behind, this record lets it clean up.
            rows.record_departure(conn, row["host"], row["uuid"], operation.epoch, now)
        if isinstance(error, NoValidHost) and "reasons" in error.details:
            decision = {"hosts": error.details.get("hosts", 0), "filters": error.details["reasons"]}
            rows.explain(conn, operation.id, decision)
        events = [("create.error", {**row, **values}, fault)]
        event = self.event if row["host"] is not None else SCHEDULING_EVENT
        spec = instances.specs(conn, [row["uuid"]]).get(row["uuid"])
        has_ports = self.tools.networks is not None and (spec is None or spec["networks"] != "none")
        if has_ports:
            self._fail_event(conn, operation, row, event, fault["message"])
            self.persist(conn, operation, "cleanup", epoch=operation.epoch + 1)
        else:
            self.end(conn, operation, "error", host=row["host"], fault=fault, event=event)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        if not has_ports:
            return Ended(events=events)
        return Continue(self._taken(operation, "cleanup", operation.payload), events)

    def _fail_event(self, conn: sa.Connection, operation: Operation, row: Any, event: str, reason: str) -> None:
        """End the event of this try; the action goes on."""
        actions.event_finish(
            conn,
            row["uuid"],
            operation.context.request_id,
            operation.epoch,
            event,
            self.engine.now(),
            result="Error",
            host=row["host"],
            details=reason,
        )

    def cleaned(self, conn: sa.Connection, operation: Operation) -> list[str]:
        """The ports of a lost build are gone: end it, and return who waits for that."""
        now = self.engine.now()
        if not rows.finish(conn, operation.id, now, "error", owner=operation.owner, epoch=operation.epoch):
            return []
        actions.finish(conn, operation.instance_uuid, operation.context.request_id, now, message="Error")
        return rows.wake(conn, operation.instance_uuid)

    def let_go(self, conn: sa.Connection, operation: Operation, row: Any) -> None:
        """Give the claim back."""
        if row is None or row["host"] is None:
            allocations.release(conn, operation.instance_uuid, now=self.engine.now())


def _timed(operation: Operation, report: Report) -> BuildPayload:
    """The operation's payload, with when the host worked on it."""
    payload = BuildPayload.of(operation)
    if payload.attempts:
        payload.attempts[-1].started = micros(report.started_at)
        payload.attempts[-1].finished = micros(report.finished_at)
    return payload


def exhausted(uuid: str, tried: list[str], last: str, **details: Any) -> NoValidHost:
    """What the user is told when no host is left to try; the hosts' names are for admins."""
    return NoValidHost(
        f"Exceeded maximum number of retries. Exhausted all hosts available for retrying build failures for "
        f"instance {uuid}. Last error: {last}",
        tried=", ".join(tried),
        **details,
    )
