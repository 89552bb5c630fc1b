"""Building servers: place them, prepare their networks, send orders to hosts; reschedule or fail what did not succeed.

Steps: `schedule` (place and prepare; only the claim is persisted, and a second attempt replaces it) → `dispatched` (a
host builds; the operation ends with success) → if that failed, back to `schedule` for the next host, or `cleanup` (the
server is in ERROR, its ports are still to be deleted; the operation ends with error). `build_outcomes` has the
transactions that end an attempt.
"""

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.build_outcomes import BuildOutcomes, exhausted, hosts_went_down, payload_with_times
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation, retry_pause
from micronova.conductor.operations.host_kind import HostKind, reported_error
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, Retry, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.placing import Placer, ServerToBuild, host_changes, load_builds
from micronova.conductor.operations.transitions import server_of
from micronova.db import explanations, instances, nodes, services
from micronova.db import operations as operation_rows
from micronova.objects import states
from micronova.objects.errors import BuildAborted, HostIsOlder, MicronovaError, NoValidHost, Stale, Unavailable
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.network import VIF, PlannedPorts, unplugged
from micronova.objects.operations import BuildPayload, BuildTimes
from micronova.objects.orders import Report, WorkOrder
from micronova.scheduler.rpcapi import SchedulerAPI
from micronova.telemetry.spans import span

log = logging.getLogger(__name__)

DISPATCHED_TOGETHER = 100
"""Builds that one transaction dispatches: it locks their operations, whose leases cannot be renewed meanwhile."""
PREPARATIONS = 4  # how often a server is prepared again because it changed before it was dispatched


@dataclass(slots=True)
class _Dispatched:
    """The builds of one transaction: dispatched with their orders, overtaken, or to prepare again."""

    orders: list[tuple[ServerToBuild, WorkOrder]] = field(default_factory=list)
    overtaken: list[ServerToBuild] = field(default_factory=list)
    changed: list[tuple[ServerToBuild, InstanceRow]] = field(default_factory=list)  # with the present row
    # By id() of an explanation: the operation with which its filters are stored.
    explained: dict[int, str] = field(default_factory=dict)


class Build(HostKind):
    """The operation behind POST /servers."""

    name = "build"
    action_event = "compute__do_build_and_run_instance"
    late_guest_is_destroyed = True

    def __init__(self, dependencies: ConductorDependencies, scheduler: SchedulerAPI, max_attempts: int) -> None:
        super().__init__(dependencies)
        self._outcomes = BuildOutcomes(dependencies, self.transitions, self.action_event)
        self._max_attempts = max_attempts
        self._placer = Placer(dependencies, scheduler)

    def may_fail(self, operation: Operation) -> bool:
        """Return False if the build has failed already: its fault says why, and only its ports are left to delete."""
        return operation.step != "cleanup"

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step; operations of one request in the same step come together."""
        step = operations[0].step
        if step == "schedule":
            await self._schedule(operations)
        elif step == "cleanup":
            for operation in operations:
                await self._clean_up(operation)
        else:
            for operation in operations:
                await self._check_host(operation)

    # --- schedule --------------------------------------------------------------------------------------------

    async def _schedule(self, operations: list[Operation]) -> None:
        servers = []
        begun = self._engine.now()
        for operation, row, spec, ports in await self._engine.database.read(load_builds, operations):
            if row is None or spec is None or row["epoch"] != operation.epoch or row["vm_state"] != states.BUILDING:
                await self._overtaken(operation)
                continue
            payload = operation.payload_as(BuildPayload)
            if payload.volume_error:
                await self.fail(operation, BuildAborted(f"Failed to create a volume: {payload.volume_error}"))
                continue
            if payload.dispatches:
                log.info("instance %s is rescheduled: %s", row["uuid"], payload.last_error)
            servers.append(ServerToBuild(operation, payload, row, spec, ports=ports, times=BuildTimes(begun)))
        # Each server has its own lists of hosts to leave out, and may have been pinned to another zone since; those
        # with the same ones are placed together.
        alike: dict[tuple[object, ...], list[ServerToBuild]] = {}
        for server in servers:
            payload = server.payload
            hosts = frozenset(payload.tried), frozenset(payload.unpreferred)
            key = (server.spec.availability_zone, payload.needs_decryption, *hosts)
            alike.setdefault(key, []).append(server)
        for group in alike.values():
            await self._schedule_together(group)

    async def _schedule_together(self, servers: list[ServerToBuild]) -> None:
        try:
            with span("schedule", instances=len(servers)):
                older: set[str] = set()
                if servers[0].payload.needs_decryption:
                    older = await self._engine.database.read(nodes.hosts_that_do_not_decrypt)
                await self._placer.place(servers, older)
        except Stale:  # one of them was deleted meanwhile: load again and place the others
            await self._schedule([server.operation for server in servers])
            return
        except NoValidHost as error:
            if not await self.transitions.wait_for_hosts(servers, error):
                await self._fail_together(servers, error)
            return
        placed = self._engine.now()
        for server in servers:
            server.times.placed = placed
            self._dependencies.hooks.pre("build_instance", server.operation.context, server.row)
            self.transitions.notify("create.start", server.operation, server.row)
        await self._dispatch(await self._prepare_all(servers))

    async def _prepare_all(self, servers: Sequence[ServerToBuild]) -> list[ServerToBuild]:
        """Return the servers whose ports are allocated and bound."""
        # All of them end before an error is raised: none may allocate ports after the operations were put back.
        prepared = await asyncio.gather(*(self._prepare(server) for server in servers), return_exceptions=True)
        for result in prepared:
            if isinstance(result, BaseException):
                raise result
        return [server for server in prepared if isinstance(server, ServerToBuild)]

    async def _prepare(self, server: ServerToBuild) -> ServerToBuild | None:
        """Make ports and volumes ready on the server's host, side by side; return None if the build cannot go on."""
        # Both end before the build goes on or fails: nothing may be attached after that.
        ready = await asyncio.gather(self._prepare_ports(server), self._prepare_volumes(server), return_exceptions=True)
        for error in ready:
            if isinstance(error, Stale):
                return None  # another conductor continues, or the server is being deleted
            if isinstance(error, Unavailable):
                # Only this server waits. Its next attempt replaces the claim.
                await self._engine.postpone([server.operation], error)
                return None
            if isinstance(error, HostIsOlder):
                result = await self._engine.database.write(self._avoid_older, server, error)
                if result is not None:
                    await self.continue_with(server.operation, result)
                    return None
            if isinstance(error, MicronovaError):
                await self.fail(server.operation, error)
                return None
            if isinstance(error, BaseException):
                raise error
        return server

    def _avoid_older(self, conn: sa.Connection, server: ServerToBuild, error: HostIsOlder) -> NoMoreWork | None:
        """Place the server again, on a host that decrypts volumes.

        Return None if the request forces its host, or no other host is up. During an upgrade most hosts may be older.
        If the newer ones are full, the build waits for them.
        """
        operation = server.operation
        if self.transitions.lock_current(conn, operation) is None:
            return NoMoreWork()
        older, payload = nodes.hosts_that_do_not_decrypt(conn), server.payload
        if self._is_forced(conn, server.row) or not self._placer.any_host_besides(conn, [*payload.tried, *older]):
            return None
        # Not the names of the older hosts: that may be most of the fleet, in the row of each such operation.
        payload = msgspec.structs.replace(payload, needs_decryption=True, last_error=error.message)
        pause = retry_pause(operation)
        self.transitions.persist(conn, operation, operation.step, payload=payload.encode(), lease_seconds=pause)
        return NoMoreWork(retry=Retry(pause, error.message))

    async def _prepare_volumes(self, server: ServerToBuild) -> None:
        """Make the server's volumes that the API could not make, and connect all of them to its host."""
        if not server.payload.volumes:
            return
        volumes = self.transitions.volumes
        if any(device.volume_id is None for device in await volumes.wanted_volumes(server.row["uuid"])):
            await self._make_volumes(server)
        try:
            await volumes.connect(server.operation, server.row, server.chosen.host)
        except (Stale, Unavailable, HostIsOlder):
            raise
        except MicronovaError as error:
            raise BuildAborted(f"Failed to attach the volume(s): {error.message}") from error

    async def _make_volumes(self, server: ServerToBuild) -> None:
        try:
            token = self.secrets_of(server.operation).user_token
            await self.transitions.volumes.make(server.operation, server.row, token)
        except (Stale, Unavailable):
            raise
        except MicronovaError as error:
            raise BuildAborted(f"Failed to create a volume: {error.message}") from error

    async def _prepare_ports(self, server: ServerToBuild) -> None:
        """Allocate the server's ports and bind them to its host."""
        network_client = self._dependencies.network_client
        if server.ports == "none" or network_client is None:
            return
        if await self._engine.database.read(self.transitions.continued_elsewhere, server.operation):
            raise Stale(f"Operation {server.operation.id} was placed for longer than its lease.")
        chosen = server.chosen
        served = await self.transitions.served_ports(server.row["uuid"], server.spec) if server.spec.ports else ()
        try:
            with span("network", instance=server.row["uuid"]):
                server.vifs = await network_client.allocate(
                    instance_uuid=server.row["uuid"],
                    project_id=server.row["project_id"],
                    host=chosen.host,
                    zone=chosen.zone,
                    ports=server.ports,
                    security_groups=server.row["security_groups"],
                    hostname=server.row["hostname"],
                    served=served,
                    fresh=server.operation.leases == 1 and not server.payload.dispatches and not server.vifs,
                    check=functools.partial(self.transitions.check_current, server.operation),
                )
        except (Stale, Unavailable):
            raise
        except MicronovaError as error:
            raise BuildAborted(f"Failed to allocate the network(s): {error.message}") from error
        server.times.networked = self._engine.now()
        server.payload.wait_for_plugs = unplugged(server.vifs)

    async def _dispatch(self, servers: Sequence[ServerToBuild], preparations: int = PREPARATIONS) -> None:
        """Make the hosts the owners of all these builds and send the orders.

        If this conductor dies after it has dispatched some, another one places the rest again, on the nodes where they
        hold their resources. A server that changed since it was loaded is prepared again: an event of the network
        service may have changed what is stored of its ports.
        """
        result = _Dispatched()
        changed_since = []
        for first in range(0, len(servers), DISPATCHED_TOGETHER):
            part = servers[first : first + DISPATCHED_TOGETHER]
            with span("dispatch", instances=len(part)):
                result = await self._engine.database.write(
                    self._dispatch_part, part, preparations > 0, result.explained
                )
                self._engine.committed(self.name, "dispatched")
                await asyncio.gather(
                    *(self.transitions.send(server.operation, order) for server, order in result.orders)
                )
                for server in result.overtaken:
                    await self._overtaken(server.operation, server.ports, server.vifs)
            for server, row in result.changed:
                server.row = row
                changed_since.append(server)
        if changed_since:
            await self._dispatch(await self._prepare_all(changed_since), preparations - 1)

    def _dispatch_part(
        self, conn: sa.Connection, servers: Sequence[ServerToBuild], unchanged_only: bool, explained: Mapping[int, str]
    ) -> _Dispatched:
        """Dispatch the builds; with `unchanged_only`, not those of servers with ports that changed since.

        `explained` are the decisions whose filters earlier parts have stored.
        """
        result = _Dispatched(explained=dict(explained))
        if len(servers) > 1:
            instances.lock_many(conn, [server.row["uuid"] for server in servers])
            operation_rows.lock_many(conn, [server.operation.id for server in servers])
        for server in servers:
            if unchanged_only and server.vifs:
                known = instances.lock(conn, server.row["uuid"])
                if (
                    known is not None
                    and known["epoch"] == server.operation.epoch
                    and known["updated_at"] != server.row["updated_at"]
                ):
                    result.changed.append((server, known))
                    continue
            chosen = server.chosen
            payload = msgspec.structs.replace(
                server.payload,
                tried=[*server.payload.tried, chosen.host],
                dispatches=[
                    *server.payload.dispatches,
                    msgspec.structs.replace(server.times, dispatched=self._engine.now(), host=chosen.host),
                ],
            )
            changes: InstanceChanges = {
                **host_changes(chosen),
                "task_state": states.SPAWNING,
                "epoch": server.operation.epoch + 1,
                "network_info": msgspec.to_builtins(server.vifs),
            }
            dispatched = self.transitions.dispatch(conn, server.operation, chosen.host, changes, payload.encode())
            if dispatched is None:
                result.overtaken.append(server)
                continue
            if server.explanation is not None:
                first = result.explained.setdefault(id(server.explanation), server.operation.id)
                same_as = first if first != server.operation.id else ""
                own = server.explanation.of_one(server.row["uuid"], chosen.host, chosen.node, same_as)
                explanations.record(conn, server.operation.id, own, again=server.payload.placed_before)
            order = self.order(conn, dispatched, changed(server.row, changes))
            result.orders.append((server, order))
        return result

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to build the guest."""
        payload = operation.payload_as(BuildPayload)
        return work_order(
            conn,
            operation,
            row,
            now=self._engine.now(),
            secrets=self.secrets_of(operation),
            download_url=self._dependencies.download_url,
            wait_for_plugs=tuple(payload.wait_for_plugs),
        )

    # --- the host's report, and its absence ------------------------------------------------------------------

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Apply a report: the server is built, is rescheduled if another host may succeed, or goes to ERROR."""
        if report.outcome == "done":
            return self._outcomes.built(conn, operation, row, report)
        payload = payload_with_times(operation, report)
        error: MicronovaError = reported_error(report)
        if report.outcome == "reschedule":
            nodes.note_failed_build(conn, row["node_uuid"], self._engine.now())
            if not self._is_forced(conn, row) and len(payload.tried) < self._max_attempts:
                return self._outcomes.reschedule(conn, operation, row, payload, error.message, report.left_behind)
            error = exhausted(row["uuid"], payload.tried, error.message)
        return self._outcomes.fail(conn, operation, row, error)

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Place the server again after a pause; it has not used up an attempt.

        This build prefers other hosts then. It does not count as one that failed on its host, which would keep all
        other builds away until one succeeds there: the lack is over soon, or is that of an image service. The pause
        limits how many hosts meet such a service. If no other host may build the server, it stays with its host, where
        it holds resources.
        """
        payload = payload_with_times(operation, report)
        if not self._may_go_elsewhere(conn, row, payload):
            return super().postponed(conn, operation, row, report)
        reason = reported_error(report).message
        payload.prefer_others(report.host, reason)
        pause = retry_pause(operation)
        self._outcomes.reschedule(conn, operation, row, payload, reason, report.left_behind, pause=pause)
        return NoMoreWork(retry=Retry(pause, reason))

    def host_stops(self, conn: sa.Connection, operation: Operation) -> Continue | None:
        """Reschedule a build whose host is being stopped; return None if it has to wait for that host."""
        row = self.transitions.lock_current(conn, operation)
        if row is None or not self._may_go_elsewhere(conn, row, operation.payload_as(BuildPayload)):
            return None
        return self._go_elsewhere(conn, operation, row, "The host was stopped.")

    def _take_from_host_down(self, conn: sa.Connection, operation: Operation) -> StepResult | None:
        """Take the build from its host, which is down.

        Return None, and change nothing, if the request forces this host and the host may return soon.
        """
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        assert row["host"] is not None  # the operation was dispatched at this epoch
        now, down_time = self._engine.now(), self._dependencies.service_down_time
        reason = "The host does not answer any more."
        forced = self._is_forced(conn, row)
        if forced and services.host_may_return(conn, row["host"], now, down_time):
            return None
        nodes.note_failed_build(conn, row["node_uuid"], now)
        if forced:
            return self._outcomes.fail(conn, operation, row, exhausted(row["uuid"], [row["host"]], reason))
        went_down = self._went_down(conn, operation, row["host"])
        if len(went_down) > self._max_attempts:
            return self._outcomes.fail(conn, operation, row, hosts_went_down(row["uuid"], went_down))
        return self._go_elsewhere(conn, operation, row, reason, went_down)

    def _went_down(self, conn: sa.Connection, operation: Operation, host: str) -> list[str]:
        """Return the hosts that went down while they built the server, with this one, which is down.

        It does not count if none of the other hosts is up: then something else than this build may have ended all of
        them.
        """
        before = operation.payload_as(BuildPayload).went_down
        counted = sorted({*before, host})
        return counted if self._placer.any_host_besides(conn, counted) else before

    def _go_elsewhere(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        reason: str,
        went_down: list[str] | None = None,
    ) -> Continue:
        """Reschedule a build that has not failed on its host: it may return there, and has not used up an attempt.

        Other hosts are preferred: the scheduler may not know yet that this one is gone. The record of the departure
        lets the host remove, when it is back, what it could not undo. `went_down` are the hosts that went down so far,
        if this is one of them.
        """
        payload = operation.payload_as(BuildPayload)
        assert row["host"] is not None  # the operation was dispatched at this epoch
        payload.prefer_others(row["host"], reason)
        if went_down is not None:
            payload.went_down = went_down
        return self._outcomes.reschedule(conn, operation, row, payload, reason, left_behind=True)

    def _may_go_elsewhere(self, conn: sa.Connection, row: InstanceRow, payload: BuildPayload) -> bool:
        """Return whether another host may build the server: its request forces none, and one is up."""
        return not self._is_forced(conn, row) and self._placer.any_host_besides(conn, payload.tried)

    def _is_forced(self, conn: sa.Connection, row: InstanceRow) -> bool:
        spec = instances.request_spec(conn, row["uuid"])
        assert spec is not None
        return spec.forced

    async def _check_host(self, operation: Operation) -> None:
        """Take the build from a host whose lease expired if the host is down; else return it to the host."""
        row = await self._engine.database.read(server_of, operation)
        if row is None or row["host"] is None:
            await self._overtaken(operation)
        elif await self.transitions.host_is_down(row["host"]):
            result = await self._engine.database.write(self._take_from_host_down, operation)
            if result is None:
                raise Unavailable(f"Host {row['host']} does not answer.")
            self._engine.committed(self.name, "rescheduled")
            await self.continue_with(operation, result)
        else:
            await self._engine.database.write(self.transitions.return_to_host, operation, row["host"])

    # --- failures --------------------------------------------------------------------------------------------

    async def _overtaken(
        self, operation: Operation, ports: PlannedPorts | None = None, vifs: Sequence[VIF] = ()
    ) -> None:
        """Cancel the build of a server that is being deleted, unless another conductor continues the build.

        In that case only the ports are deleted that this attempt (`vifs`) created too late.
        """
        if await self._engine.database.read(self.transitions.continued_elsewhere, operation):
            await self.transitions.withdraw(operation, vifs)
            return
        if ports != "none":
            await self.transitions.delete_ports(operation)
        await self.transitions.cancel(operation, self.transitions.release_claim)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Set the server to ERROR with a fault, and release its claim and ports."""
        result = await self._engine.database.write(self._outcomes.fail_owned, operation, error)
        self._engine.committed(self.name, "failed")
        await self.continue_with(operation, result)

    async def _fail_together(self, servers: Sequence[ServerToBuild], error: MicronovaError) -> None:
        """Fail all of these builds in one transaction.

        Else a conductor that dies in between would leave fewer servers, for which there might be hosts.
        """
        failed = [(server.operation, _final_error(server, error)) for server in servers]
        results = await self._engine.database.write(self._outcomes.fail_all, failed)
        self._engine.committed(self.name, "failed")
        for server, result in zip(servers, results, strict=True):
            await self.continue_with(server.operation, result)

    async def _clean_up(self, operation: Operation) -> None:
        """Delete the ports of a failed build; deleting the server does the same, so this may run twice."""
        await self.transitions.delete_ports(operation)
        waiting = await self._engine.database.write(self._outcomes.cleaned_up, operation)
        await self.transitions.count_end_and_run_waiting(operation, "error", waiting)


def _final_error(server: ServerToBuild, error: MicronovaError) -> MicronovaError:
    """Return the error that users see: why the last host failed, if there was one."""
    if not server.payload.dispatches:
        return error
    last = server.payload.last_error or error.message
    return exhausted(server.row["uuid"], server.payload.tried, last, **error.details)
