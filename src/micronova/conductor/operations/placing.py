"""Placing the servers of a request: choose hosts and claim their resources."""

from dataclasses import dataclass, field

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Engine, Operation
from micronova.db import allocations, instances
from micronova.objects.errors import Unavailable
from micronova.objects.explanation import Explanation
from micronova.objects.instance import InstanceRow
from micronova.objects.network import VIF, PlannedPorts
from micronova.objects.operations import Attempt, BuildPayload
from micronova.objects.scheduling import RequestSpec, Selection
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.scheduler.rpcapi import SchedulerAPI


@dataclass(slots=True)
class Candidate:
    """A server in the schedule step."""

    operation: Operation
    payload: BuildPayload
    row: InstanceRow
    spec: RequestSpec
    ports: PlannedPorts
    attempt: Attempt
    chosen: Selection = field(init=False)  # set by `Placer.place`
    explanation: Explanation | None = None  # of the scheduler, if it decided
    vifs: tuple[VIF, ...] = ()


class Placer:
    """Finds hosts for servers that may use the same hosts."""

    def __init__(self, engine: Engine, scheduler: SchedulerAPI) -> None:
        self._engine = engine
        self._scheduler = scheduler

    async def place(self, candidates: list[Candidate]) -> None:
        """Claim a host for each: an alternate of the last decision if there is one, else the scheduler's choice."""
        if len(candidates) == 1 and await self._take_alternate(candidates[0]):
            return
        first = candidates[0]
        spec = msgspec.structs.replace(first.spec, ignore_hosts=tuple(sorted(first.payload.tried)))
        try:
            answer = await self._scheduler.select_destinations(
                first.operation.context,
                spec,
                [c.row["uuid"] for c in candidates],
                epochs={c.row["uuid"]: c.operation.epoch for c in candidates},
            )
        except BusUnavailable as error:
            self._engine.health.outage_noticed()  # heartbeats may not arrive, either
            raise Unavailable(f"The scheduler cannot be reached: {error}") from error
        except CallTimeout as error:
            raise Unavailable(f"The scheduler does not answer: {error}") from error
        placements = {placement.instance_uuid: placement for placement in answer.placements}
        for candidate in candidates:
            placement = placements[candidate.row["uuid"]]
            candidate.chosen = placement.selected
            candidate.payload.alternates = list(placement.alternates)
            candidate.explanation = answer.explanation

    async def _take_alternate(self, candidate: Candidate) -> bool:
        alternates = candidate.payload.alternates
        while alternates:
            candidate.chosen = alternates.pop(0)
            claim = allocations.Claim(
                consumer_uuid=candidate.row["uuid"],
                node_uuid=candidate.chosen.node_uuid,
                host=candidate.chosen.host,
                resources=candidate.spec.flavor.resources(),
                group=candidate.spec.group,
                epoch=candidate.operation.epoch,
            )
            result = await self._engine.database.write(allocations.claim, [claim], now=self._engine.now())
            if result.claimed:
                return True
        return False


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
