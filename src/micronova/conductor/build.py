"""Building servers: place, prepare the network, order the host; reschedule or give up by what went wrong.

Steps: `schedule` (place and prepare; nothing of it is persisted but the claim, which a second try replaces) →
`dispatched` (a host builds) → done, or back to `schedule` for the next host, or `cleanup` (the server is in ERROR
already, its ports still have to go).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.compute import states
from micronova.conductor.kinds import Continue, Ended, HostKind, Tools, abort_error, fault_of
from micronova.conductor.operations import Operation
from micronova.conductor.orders import work_order
from micronova.db import actions, allocations, instances, nodes, services
from micronova.db import operations as rows
from micronova.objects.clock import micros
from micronova.objects.errors import BuildAborted, MicronovaError, NoValidHost, Stale, Unavailable
from micronova.objects.network import VIF
from micronova.objects.orders import Report, WorkOrder
from micronova.objects.scheduling import Placement, RequestSpec, Selection
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.scheduler.rpcapi import SchedulerAPI
from micronova.telemetry.spans import span

log = logging.getLogger(__name__)


# A server that never got as far as a host has this event instead of the host's.
SCHEDULING_EVENT = "conductor_schedule_and_build_instances"


class Attempt(msgspec.Struct, array_like=True):
    """How far one try of a build came, and when (microseconds since the epoch): what `micronova timeline` shows."""

    begun: int
    placed: int = 0  # a host was chosen and its resources were claimed
    networked: int = 0
    dispatched: int = 0
    host: str = ""
    started: int = 0  # by the host's clock, as is finished
    finished: int = 0


class BuildPayload(msgspec.Struct, kw_only=True):
    """What a build remembers between its steps; the tried hosts belong to each server, not to the request."""

    tried: list[str] = []
    alternates: list[Selection] = []
    wait_for_plugs: list[str] = []
    last_error: str = ""
    lost: bool = False  # the build is over; only its ports are left to clean up
    attempts: list[Attempt] = []


@dataclass(slots=True)
class _Candidate:
    """A server on its way through one pass of the schedule step."""

    operation: Operation
    payload: BuildPayload
    row: Any
    spec: RequestSpec
    networks: Any
    attempt: Attempt
    placement: Placement | None = None
    explanation: Any = None
    vifs: tuple[VIF, ...] = ()


class Build(HostKind):
    """The operation behind POST /servers."""

    name = "build"
    order_kind = "build"
    event = "compute__do_build_and_run_instance"

    def __init__(self, tools: Tools, scheduler: SchedulerAPI, max_attempts: int) -> None:
        super().__init__(tools)
        self._scheduler = scheduler
        self._max_attempts = max_attempts

    async def run(self, operations: list[Operation]) -> None:
        """Go on from the persisted step; operations of one request in the same step come together."""
        step = operations[0].step
        if step == "schedule":
            await self._schedule(operations)
        elif step == "cleanup":
            for operation in operations:
                await self._clean_up(operation)
        else:
            for operation in operations:
                await self._look_after(operation)

    # --- schedule --------------------------------------------------------------------------------------------

    async def _schedule(self, operations: list[Operation]) -> None:
        candidates = []
        begun = self.engine.now()
        for operation, row, spec, networks in await self.engine.database.read(_load, operations):
            if row is None or row["epoch"] != operation.epoch or row["vm_state"] != states.BUILDING:
                await self._overtaken(operation, row)
                continue
            payload = msgspec.msgpack.decode(operation.payload, type=BuildPayload)
            if payload.tried:
                log.info("%s is rescheduled: %s", row["uuid"], payload.last_error)
            candidates.append(_Candidate(operation, payload, row, spec, networks, Attempt(begun)))
        # The hosts that were tried belong to each server: those of others must not be closed to it.
        alike: dict[tuple[str, ...], list[_Candidate]] = {}
        for candidate in candidates:
            alike.setdefault(tuple(sorted(candidate.payload.tried)), []).append(candidate)
        for group in alike.values():
            await self._schedule_together(group)

    async def _schedule_together(self, candidates: list[_Candidate]) -> None:
        try:
            with span("schedule", instances=len(candidates)):
                candidates = await self._place(candidates)
        except Stale:  # one of them was deleted meanwhile: look again, and place the others
            await self._schedule([candidate.operation for candidate in candidates])
            return
        except (NoValidHost, BuildAborted) as error:
            if isinstance(error, NoValidHost) and await self.hosts_may_be_unheard():
                raise Unavailable("Hosts that could not be heard for a while may have room.") from error
            for candidate in candidates:
                await self._lose(candidate.operation, self._final_error(candidate, error))
            return
        placed = self.engine.now()
        for candidate in candidates:
            candidate.attempt.placed = placed
            self.tools.hooks.pre("build_instance", candidate.operation.context, candidate.row)
            self.notify("create.start", candidate.operation, candidate.row)
        prepared = await asyncio.gather(*(self._prepare(candidate) for candidate in candidates))
        await self._dispatch([candidate for candidate in prepared if candidate is not None])

    async def _place(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Claim a host for each: an alternate of the last decision if there is one, else ask the scheduler."""
        first = candidates[0]
        if len(candidates) == 1 and first.payload.alternates:
            chosen = await self._take_alternate(first)
            if chosen is not None:
                first.placement = chosen
                return candidates
        spec = msgspec.structs.replace(first.spec, ignore_hosts=tuple(sorted(first.payload.tried)))
        try:
            answer = await self._scheduler.select_destinations(
                first.operation.context,
                spec,
                [c.row["uuid"] for c in candidates],
                epochs={c.row["uuid"]: c.operation.epoch for c in candidates},
            )
        except (BusUnavailable, CallTimeout) as error:
            raise Unavailable(f"The scheduler does not answer: {error}") from error
        placements = {placement.instance_uuid: placement for placement in answer.placements}
        for candidate in candidates:
            candidate.placement = placements[candidate.row["uuid"]]
            candidate.explanation = answer.explanation
            candidate.payload.alternates = list(candidate.placement.alternates)
        return candidates

    async def _take_alternate(self, candidate: _Candidate) -> Placement | None:
        payload = candidate.payload
        while payload.alternates:
            chosen = payload.alternates.pop(0)
            claim = allocations.Claim(
                consumer_uuid=candidate.row["uuid"],
                node_uuid=chosen.node_uuid,
                host=chosen.host,
                resources=candidate.spec.flavor.resources(),
                group=candidate.spec.group,
                epoch=candidate.operation.epoch,
            )
            result = await self.engine.database.write(allocations.claim, [claim], now=self.engine.now())
            if result.claimed:
                return Placement(instance_uuid=candidate.row["uuid"], selected=chosen)
        return None

    async def _prepare(self, candidate: _Candidate) -> _Candidate | None:
        """Allocate and bind the server's ports to its host; what cannot work anywhere ends the build."""
        networks = self.tools.networks
        if candidate.networks == "none" or networks is None:
            return candidate
        if await self.engine.database.read(_is_anothers, candidate.operation):
            return None  # placing took so long that the lease ran out
        assert candidate.placement is not None
        chosen = candidate.placement.selected
        try:
            with span("network", instance=candidate.row["uuid"]):
                candidate.vifs = await networks.allocate(
                    instance_uuid=candidate.row["uuid"],
                    project_id=candidate.row["project_id"],
                    host=chosen.host,
                    zone=chosen.zone,
                    requests=candidate.networks,
                    security_groups=candidate.row["security_groups"],
                    hostname=candidate.row["hostname"],
                    fresh=candidate.operation.attempts == 1 and not candidate.payload.tried,
                )
        except Unavailable as error:
            # Only this server waits; its claim is replaced when it is tried again.
            await self.engine._later([candidate.operation], error)
            return None
        except MicronovaError as error:
            await self._lose(candidate.operation, BuildAborted(f"Failed to allocate the network(s): {error.message}"))
            return None
        candidate.attempt.networked = self.engine.now()
        candidate.payload.wait_for_plugs = [vif.port_id for vif in candidate.vifs if vif.status != "ACTIVE"]
        return candidate

    async def _dispatch(self, candidates: Sequence[_Candidate]) -> None:
        """Make the hosts the owners of all these builds in one transaction, then send the orders."""
        if not candidates:
            return
        with span("dispatch", instances=len(candidates)):
            await self._hand_out(candidates)

    async def _hand_out(self, candidates: Sequence[_Candidate]) -> None:
        orders = await self.engine.database.write(self._dispatch_all, candidates)
        self.engine.stepped(self.name, "dispatched")
        for candidate, order in zip(candidates, orders, strict=True):
            if order is None:
                await self._overtaken(candidate.operation, candidate.row, candidate.networks)
        await asyncio.gather(
            *(
                self.hand_over(candidate.operation, candidate.row, order)
                for candidate, order in zip(candidates, orders, strict=True)
                if order is not None
            )
        )

    def _dispatch_all(self, conn: sa.Connection, candidates: Sequence[_Candidate]) -> list[WorkOrder | None]:
        orders = []
        for candidate in sorted(candidates, key=lambda c: c.row["uuid"]):
            assert candidate.placement is not None
            chosen = candidate.placement.selected
            payload = msgspec.structs.replace(
                candidate.payload,
                tried=[*candidate.payload.tried, chosen.host],
                attempts=[
                    *candidate.payload.attempts,
                    msgspec.structs.replace(candidate.attempt, dispatched=self.engine.now(), host=chosen.host),
                ],
            )
            values = {
                "host": chosen.host,
                "node": chosen.node,
                "node_uuid": chosen.node_uuid,
                "availability_zone": chosen.zone,
                "task_state": states.SPAWNING,
                "epoch": candidate.operation.epoch + 1,
                "network_info": msgspec.to_builtins(candidate.vifs),
            }
            order = self.dispatch(
                conn,
                candidate.operation,
                candidate.row,
                chosen.host,
                values,
                payload=msgspec.msgpack.encode(payload),
            )
            if order is not None and candidate.explanation is not None:
                rows.explain(conn, candidate.operation.id, msgspec.to_builtins(candidate.explanation))
            orders.append((candidate.row["uuid"], order))
        found = dict(orders)
        return [found[candidate.row["uuid"]] for candidate in candidates]

    def order(self, conn: sa.Connection, operation: Operation, row: Any) -> WorkOrder:
        """Return the order to build the guest."""
        payload = msgspec.msgpack.decode(operation.payload, type=BuildPayload)
        image = row["image_ref"]
        return work_order(
            operation,
            row,
            kind=self.order_kind,
            host=row["host"],
            now=self.engine.now(),
            devices=instances.devices(conn, [row["uuid"]]).get(row["uuid"], ()),
            secrets=self.tools.secrets.open(operation.secrets, operation.id),
            image_ticket=self.tools.images.ticket_url(image) if image and self.tools.images else None,
            wait_for_plugs=tuple(payload.wait_for_plugs),
        )

    # --- what may go wrong -----------------------------------------------------------------------------------

    async def _overtaken(self, operation: Operation, row: Any, networks: Any = "unknown") -> None:
        """The server is being deleted: let go of what this build holds, quietly.

        Unless the build goes on in other hands: then the ports are theirs.
        """
        if await self.engine.database.read(_is_anothers, operation):
            return
        if self.tools.networks is not None and networks != "none":
            await self.tools.networks.deallocate(instance_uuid=operation.instance_uuid)
        await self.cancel(operation)

    def let_go(self, conn: sa.Connection, operation: Operation, row: Any) -> None:
        """Give the claim back."""
        if row is None or row["host"] is None:
            allocations.release(conn, operation.instance_uuid, now=self.engine.now())

    async def _look_after(self, operation: Operation) -> None:
        """The host's lease ran out: is it dead, or did we only not hear it?"""
        row = await self.engine.database.read(instances.get, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch or row["host"] is None:
            await self._overtaken(operation, row)
        elif await self.host_is_down(row["host"]):
            report = Report(
                operation_id=operation.id,
                epoch=operation.epoch,
                instance_uuid=operation.instance_uuid,
                host=row["host"],
                outcome="reschedule",
                error_code="host_down",
                message="The host does not answer any more.",
            )
            result = await self.engine.database.write(self._reschedule_from_dead, operation, report)
            self.engine.stepped(self.name, "rescheduled")
            await self._after(result)
        else:
            await self.engine.database.write(self.give_back_to_host, operation, row["host"])

    def host_stops(self, conn: sa.Connection, operation: Operation) -> Continue | None:
        """A server may go to another host at once; one that cannot waits for its own host to come back."""
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch or not self.owns(conn, operation):
            return None
        payload = msgspec.msgpack.decode(operation.payload, type=BuildPayload)
        spec = _spec_of(instances.specs(conn, [row["uuid"]])[row["uuid"]])
        since = self.engine.now() - micros(self.tools.service_down_time)
        if (
            spec.force_host is not None
            or len(payload.tried) >= self._max_attempts
            or not services.any_up(conn, "nova-compute", since, besides=payload.tried)
        ):
            return None
        # What the host may not have undone in time, it removes when it is back.
        return self._reschedule(conn, operation, row, payload, "The host was stopped.", left_behind=True)

    def _reschedule_from_dead(self, conn: sa.Connection, operation: Operation, report: Report) -> Continue | Ended:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch or not self.owns(conn, operation):
            return Ended()
        rows.record_departure(conn, report.host, row["uuid"], operation.epoch, self.engine.now())
        return self.reported(conn, operation, row, report)

    async def _after(self, result: Continue | Ended) -> None:
        if isinstance(result, Continue):
            await self.run([result.operation])

    def reported(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Continue | Ended:
        """The host is done, or failed in one of the ways of the table in nova-flow section 5."""
        if report.outcome == "done":
            return self._built(conn, operation, row, report)
        payload = _timed(operation, report)
        error = abort_error(report)
        if report.outcome == "reschedule":
            nodes.note_failed_build(conn, row["node_uuid"], self.engine.now())
            spec = _spec_of(instances.specs(conn, [row["uuid"]])[row["uuid"]])
            if spec.force_host is None and len(payload.tried) < self._max_attempts:
                return self._reschedule(conn, operation, row, payload, error.message, report.left_behind)
            error = _exhausted(row["uuid"], payload.tried, error.message)
        return self._lost(conn, operation, row, error)

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
        payload = msgspec.msgpack.encode(_timed(operation, report))
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
        actions.event_finish(
            conn,
            row["uuid"],
            operation.context.request_id,
            operation.epoch,
            self.event,
            now,
            result="Error",
            host=row["host"],
            details=reason,
        )
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
        encoded = msgspec.msgpack.encode(payload)
        self.persist(conn, operation, "schedule", payload=encoded, epoch=operation.epoch + 1)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return Continue(self._taken(operation, "schedule", encoded))

    def _taken(self, operation: Operation, step: str, payload: bytes) -> Operation:
        """The operation as this conductor has it now, at the next epoch; a transaction may be tried again, so the
        old one is left as it was."""
        return msgspec.structs.replace(
            operation, owner=self.engine.owner, step=step, payload=payload, epoch=operation.epoch + 1
        )

    def _final_error(self, candidate: _Candidate, error: MicronovaError) -> MicronovaError:
        """Tell the user why the last host failed, if there was one, rather than that there are no more."""
        if not candidate.payload.tried:
            return error
        last = candidate.payload.last_error or error.message
        return _exhausted(candidate.row["uuid"], candidate.payload.tried, last, **error.details)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give up: ERROR with a fault, everything cleaned up."""
        await self._lose(operation, error)

    async def _lose(self, operation: Operation, error: Exception) -> None:
        result = await self.engine.database.write(self._lose_now, operation, error)
        self.engine.stepped(self.name, "lost")
        for event, row, fault in result.events:
            self.notify(event, operation, row, fault)
        if isinstance(result, Continue):
            await self._clean_up(result.operation)

    def _lose_now(self, conn: sa.Connection, operation: Operation, error: Exception) -> Continue | Ended:
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
        if self.tools.networks is None or (spec is not None and spec["networks"] == "none"):
            self.end(conn, operation, "error", host=row["host"], fault=fault, event=event)
            allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
            return Ended(events=events)
        actions.event_finish(
            conn,
            row["uuid"],
            operation.context.request_id,
            operation.epoch,
            event,
            now,
            result="Error",
            host=row["host"],
            details=fault["message"],
        )
        self.persist(conn, operation, "cleanup", epoch=operation.epoch + 1)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return Continue(self._taken(operation, "cleanup", operation.payload), events)

    async def _clean_up(self, operation: Operation) -> None:
        """Remove the ports of a build that was lost; the server may be deleted meanwhile, which does the same."""
        if self.tools.networks is not None:
            await self.tools.networks.deallocate(instance_uuid=operation.instance_uuid)
        waiting = await self.engine.database.write(self._cleaned, operation)
        if waiting:
            await self.engine.take(waiting)

    def _cleaned(self, conn: sa.Connection, operation: Operation) -> list[str]:
        now = self.engine.now()
        if not rows.finish(conn, operation.id, now, "error", owner=operation.owner, epoch=operation.epoch):
            return []
        actions.finish(conn, operation.instance_uuid, operation.context.request_id, now, message="Error")
        return rows.wake(conn, operation.instance_uuid)


def _load(conn: sa.Connection, operations: list[Operation]) -> list[tuple[Operation, Any, Any, Any]]:
    uuids = [operation.instance_uuid for operation in operations]
    found = instances.get_many(conn, uuids)
    specs = instances.specs(conn, uuids)
    loaded: list[tuple[Operation, Any, Any, Any]] = []
    for operation in operations:
        row, spec = found.get(operation.instance_uuid), specs.get(operation.instance_uuid)
        if row is None or spec is None:
            loaded.append((operation, None, None, None))
        else:
            loaded.append((operation, row, _spec_of(spec), spec["networks"]))
    return loaded


def _is_anothers(conn: sa.Connection, operation: Operation) -> bool:
    """Say whether somebody else has a build that we took to be ours: another conductor, and perhaps its host by now."""
    row = rows.get(conn, operation.id)
    if row is not None and row["owner"] == operation.owner and row["epoch"] == operation.epoch:
        return False
    instance = instances.get(conn, operation.instance_uuid)
    return instance is not None and instance["task_state"] != states.DELETING


def _timed(operation: Operation, report: Report) -> BuildPayload:
    """The operation's payload, with when the host worked on it."""
    payload = msgspec.msgpack.decode(operation.payload, type=BuildPayload)
    if payload.attempts:
        payload.attempts[-1].started = micros(report.started_at)
        payload.attempts[-1].finished = micros(report.finished_at)
    return payload


def _spec_of(row: Any) -> RequestSpec:
    return msgspec.msgpack.decode(row["spec"], type=RequestSpec)


def _exhausted(uuid: str, tried: list[str], last: str, **details: Any) -> NoValidHost:
    """What the user is told when no host is left to try; the hosts' names are for admins."""
    return NoValidHost(
        f"Exceeded maximum number of retries. Exhausted all hosts available for retrying build failures for "
        f"instance {uuid}. Last error: {last}",
        tried=", ".join(tried),
        **details,
    )
