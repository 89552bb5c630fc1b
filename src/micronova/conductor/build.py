"""Building servers: place, prepare the network, order the host; reschedule or give up by what went wrong.

Steps: `schedule` (place and prepare; nothing of it is persisted but the claim, which a second try replaces) →
`dispatched` (a host builds) → done, or back to `schedule` for the next host, or `cleanup` (the server is in ERROR
already, its ports still have to go).
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.compute import states
from micronova.conductor.build_ends import BuildEnds, exhausted
from micronova.conductor.build_payload import Attempt, BuildPayload
from micronova.conductor.kinds import Continue, Ended, Tools
from micronova.conductor.operations import Operation
from micronova.conductor.orders import work_order
from micronova.conductor.placing import Candidate, Placer, load
from micronova.db import instances
from micronova.db import operations as rows
from micronova.objects.errors import BuildAborted, MicronovaError, NoValidHost, Stale, Unavailable
from micronova.objects.orders import Report, WorkOrder
from micronova.scheduler.rpcapi import SchedulerAPI
from micronova.telemetry.spans import span

log = logging.getLogger(__name__)


class Build(BuildEnds):
    """The operation behind POST /servers."""

    def __init__(self, tools: Tools, scheduler: SchedulerAPI, max_attempts: int) -> None:
        super().__init__(tools, max_attempts)
        self._placer = Placer(tools.engine, scheduler)

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
        for operation, row, spec, networks in await self.engine.database.read(load, operations):
            if row is None or row["epoch"] != operation.epoch or row["vm_state"] != states.BUILDING:
                await self._overtaken(operation)
                continue
            payload = BuildPayload.of(operation)
            if payload.tried:
                log.info("%s is rescheduled: %s", row["uuid"], payload.last_error)
            candidates.append(Candidate(operation, payload, row, spec, networks, Attempt(begun)))
        # The hosts that were tried belong to each server: those of others must not be closed to it.
        alike: dict[tuple[str, ...], list[Candidate]] = {}
        for candidate in candidates:
            alike.setdefault(tuple(sorted(candidate.payload.tried)), []).append(candidate)
        for group in alike.values():
            await self._schedule_together(group)

    async def _schedule_together(self, candidates: list[Candidate]) -> None:
        try:
            with span("schedule", instances=len(candidates)):
                await self._placer.place(candidates)
        except Stale:  # one of them was deleted meanwhile: look again, and place the others
            await self._schedule([candidate.operation for candidate in candidates])
            return
        except (NoValidHost, BuildAborted) as error:
            if isinstance(error, NoValidHost) and await self.hosts_may_be_unheard():
                raise Unavailable("Hosts that could not be heard for a while may have room.") from error
            for candidate in candidates:
                await self.fail(candidate.operation, self._final_error(candidate, error))
            return
        placed = self.engine.now()
        for candidate in candidates:
            candidate.attempt.placed = placed
            self.tools.hooks.pre("build_instance", candidate.operation.context, candidate.row)
            self.notify("create.start", candidate.operation, candidate.row)
        prepared = await asyncio.gather(*(self._prepare(candidate) for candidate in candidates))
        await self._dispatch([candidate for candidate in prepared if candidate is not None])

    async def _prepare(self, candidate: Candidate) -> Candidate | None:
        """Allocate and bind the server's ports to its host; what cannot work anywhere ends the build."""
        networks = self.tools.networks
        if candidate.networks == "none" or networks is None:
            return candidate
        if await self.engine.database.read(_is_anothers, candidate.operation):
            return None  # placing took so long that the lease ran out
        chosen = candidate.chosen
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
            await self.engine.later([candidate.operation], error)
            return None
        except MicronovaError as error:
            await self.fail(candidate.operation, BuildAborted(f"Failed to allocate the network(s): {error.message}"))
            return None
        candidate.attempt.networked = self.engine.now()
        candidate.payload.wait_for_plugs = [vif.port_id for vif in candidate.vifs if vif.status != "ACTIVE"]
        return candidate

    async def _dispatch(self, candidates: Sequence[Candidate]) -> None:
        """Make the hosts the owners of all these builds in one transaction, then send the orders."""
        if not candidates:
            return
        with span("dispatch", instances=len(candidates)):
            orders = await self.engine.database.write(self._dispatch_all, candidates)
            self.engine.stepped(self.name, "dispatched")
            due = []
            for candidate in candidates:
                order = orders[candidate.row["uuid"]]
                if order is None:
                    await self._overtaken(candidate.operation, candidate.networks)
                else:
                    due.append((candidate.operation, order))
            await asyncio.gather(*(self.hand_over(operation, order) for operation, order in due))

    def _dispatch_all(self, conn: sa.Connection, candidates: Sequence[Candidate]) -> dict[str, WorkOrder | None]:
        orders: dict[str, WorkOrder | None] = {}
        for candidate in sorted(candidates, key=lambda c: c.row["uuid"]):  # the order in which all lock
            chosen = candidate.chosen
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
                conn, candidate.operation, candidate.row, chosen.host, values, payload=payload.encode()
            )
            if order is not None and candidate.explanation is not None:
                rows.explain(conn, candidate.operation.id, msgspec.to_builtins(candidate.explanation))
            orders[candidate.row["uuid"]] = order
        return orders

    def order(self, conn: sa.Connection, operation: Operation, row: Any) -> WorkOrder:
        """Return the order to build the guest."""
        payload = BuildPayload.of(operation)
        image = row["image_ref"]
        return work_order(
            conn,
            operation,
            row,
            kind=self.order_kind,
            now=self.engine.now(),
            secrets=self.tools.secrets.open(operation.secrets, operation.id),
            image_ticket=self.tools.images.ticket_url(image) if image and self.tools.images else None,
            wait_for_plugs=tuple(payload.wait_for_plugs),
        )

    # --- what may go wrong -----------------------------------------------------------------------------------

    async def _overtaken(self, operation: Operation, networks: Any = "unknown") -> None:
        """The server is being deleted: let go of what this build holds, quietly.

        Unless the build goes on in other hands: then the ports are theirs.
        """
        if await self.engine.database.read(_is_anothers, operation):
            return
        if self.tools.networks is not None and networks != "none":
            await self.tools.networks.deallocate(instance_uuid=operation.instance_uuid)
        await self.cancel(operation)

    async def _look_after(self, operation: Operation) -> None:
        """The host's lease ran out: is it dead, or did we only not hear it?"""
        row = await self.engine.database.read(instances.get, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch or row["host"] is None:
            await self._overtaken(operation)
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
            result = await self.engine.database.write(self.host_died, operation, report)
            self.engine.stepped(self.name, "rescheduled")
            await self._after(operation, result)
        else:
            await self.engine.database.write(self.give_back_to_host, operation, row["host"])

    def _final_error(self, candidate: Candidate, error: MicronovaError) -> MicronovaError:
        """Tell the user why the last host failed, if there was one, rather than that there are no more."""
        if not candidate.payload.tried:
            return error
        last = candidate.payload.last_error or error.message
        return exhausted(candidate.row["uuid"], candidate.payload.tried, last, **error.details)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give up: ERROR with a fault, everything cleaned up."""
        result = await self.engine.database.write(self.lose, operation, error)
        self.engine.stepped(self.name, "lost")
        await self._after(operation, result)

    async def _after(self, operation: Operation, result: Continue | Ended) -> None:
        for event, row, fault in result.events:
            self.notify(event, operation, row, fault)
        if isinstance(result, Continue):
            await self.run([result.operation])

    async def _clean_up(self, operation: Operation) -> None:
        """Remove the ports of a build that was lost; the server may be deleted meanwhile, which does the same."""
        if self.tools.networks is not None:
            await self.tools.networks.deallocate(instance_uuid=operation.instance_uuid)
        waiting = await self.engine.database.write(self.cleaned, operation)
        if waiting:
            await self.engine.take(waiting)


def _is_anothers(conn: sa.Connection, operation: Operation) -> bool:
    """Say whether somebody else has a build that we took to be ours: another conductor, and perhaps its host by now."""
    row = rows.get(conn, operation.id)
    if row is not None and row["owner"] == operation.owner and row["epoch"] == operation.epoch:
        return False
    instance = instances.get(conn, operation.instance_uuid)
    return instance is not None and instance["task_state"] != states.DELETING
