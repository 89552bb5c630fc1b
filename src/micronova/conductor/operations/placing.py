"""Placing the servers of a request: choose hosts and claim their resources."""

from dataclasses import dataclass, field

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Engine, Operation
from micronova.db import allocations, instances, services
from micronova.objects.errors import Unavailable
from micronova.objects.explanation import Explanation
from micronova.objects.instance import InstanceRow
from micronova.objects.network import VIF, PlannedPorts
from micronova.objects.operations import BuildPayload, BuildTimes
from micronova.objects.scheduling import RequestSpec, Selection
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.scheduler.rpcapi import SchedulerAPI


@dataclass(slots=True)
class ServerToBuild:
    """A server in the step `schedule`: what is known of it, and what the step finds out."""

    operation: Operation
    payload: BuildPayload
    row: InstanceRow
    spec: RequestSpec
    ports: PlannedPorts
    times: BuildTimes
    chosen: Selection = field(init=False)  # set by `Placer.place`
    explanation: Explanation | None = None  # of the scheduler, if it decided
    vifs: tuple[VIF, ...] = ()


class Placer:
    """Finds hosts for servers that may use the same hosts."""

    def __init__(self, engine: Engine, scheduler: SchedulerAPI, service_down_time: float) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._service_down_time = service_down_time

    async def place(self, servers: list[ServerToBuild]) -> None:
        """Claim a host for each: an alternate of the last decision if there is one, else the scheduler's choice."""
        if len(servers) == 1 and await self._take_alternate(servers[0]):
            return
        first = servers[0]
        spec = msgspec.structs.replace(first.spec, ignore_hosts=tuple(sorted(first.payload.tried)))
        try:
            answer = await self._scheduler.select_destinations(
                first.operation.context,
                spec,
                [server.row["uuid"] for server in servers],
                epochs={server.row["uuid"]: server.operation.epoch for server in servers},
            )
        except BusUnavailable as error:
            self._engine.health.outage_noticed()  # heartbeats may not arrive, either
            raise Unavailable(f"The scheduler cannot be reached: {error}") from error
        except CallTimeout as error:
            raise Unavailable(f"The scheduler does not answer: {error}") from error
        placements = {placement.instance_uuid: placement for placement in answer.placements}
        for server in servers:
            placement = placements[server.row["uuid"]]
            server.chosen = placement.selected
            server.payload.alternates = list(placement.alternates)
            server.explanation = answer.explanation

    async def _take_alternate(self, server: ServerToBuild) -> bool:
        alternates = server.payload.alternates
        while alternates:
            server.chosen = alternates.pop(0)
            if server.spec.availability_zone not in (None, server.chosen.zone):
                continue  # the server was pinned to another zone since
            claim = allocations.Claim.of(server.row["uuid"], server.chosen, server.spec, server.operation.epoch)
            if await self._engine.database.write(self._claim_if_up, claim):
                return True
        return False

    def _claim_if_up(self, conn: sa.Connection, claim: allocations.Claim) -> bool:
        """Claim an alternate, which may have gone down since the scheduler chose it."""
        now = self._engine.now()
        if not services.host_is_up(conn, claim.host, now, self._service_down_time):
            return False
        return allocations.claim(conn, [claim], now=now).claimed


Loaded = tuple[Operation, InstanceRow | None, RequestSpec | None, PlannedPorts]


def load(conn: sa.Connection, operations: list[Operation]) -> list[Loaded]:
    """Return each build with its server's row, request spec and planned ports, or None for a server that is gone."""
    uuids = [operation.instance_uuid for operation in operations]
    found = instances.get_many(conn, uuids)
    specs = instances.specs(conn, uuids)
    loaded: list[Loaded] = []
    for operation in operations:
        row, spec = found.get(operation.instance_uuid), specs.get(operation.instance_uuid)
        if row is None or spec is None:
            loaded.append((operation, None, None, "none"))
        else:
            loaded.append((operation, row, request_of(spec), msgspec.convert(spec["networks"], PlannedPorts)))
    return loaded


def request_of(row: instances.SpecRow) -> RequestSpec:
    """Return the request spec of a row."""
    return msgspec.msgpack.decode(row["spec"], type=RequestSpec)
