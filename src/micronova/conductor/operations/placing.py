"""Placing the servers of a request: choose hosts and claim their resources."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Engine, Operation
from micronova.db import aggregates, claims, instances, providers, services
from micronova.objects.errors import NoValidHost, Unavailable
from micronova.objects.explanation import Explanation
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.network import VIF, PlannedPorts
from micronova.objects.operations import BuildPayload, BuildTimes, PlacedPayload
from micronova.objects.scheduling import RequestSpec, Selection
from micronova.objects.service_names import COMPUTE
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.scheduler.rpcapi import SchedulerAPI

P = TypeVar("P", bound=PlacedPayload)


@dataclass(slots=True)
class ServerToPlace(Generic[P]):
    """A server in the step `schedule`: what is known of it, and what the step finds out."""

    operation: Operation
    payload: P
    row: InstanceRow
    spec: RequestSpec
    chosen: Selection = field(init=False)  # set by `Placer.place`
    explanation: Explanation | None = None  # of the scheduler, if it decided
    moving: str | None = None  # the migration that holds the claim on the host that the server leaves


@dataclass(slots=True, kw_only=True)
class ServerToBuild(ServerToPlace[BuildPayload]):
    """A server that is built: its ports, and the times of this attempt."""

    ports: PlannedPorts
    times: BuildTimes
    vifs: tuple[VIF, ...] = ()


@contextmanager
def asking_scheduler(engine: Engine) -> Iterator[None]:
    """Raise Unavailable if the scheduler cannot be asked, so that the operation continues later."""
    try:
        yield
    except BusUnavailable as error:
        engine.health.outage_noticed()  # heartbeats may not arrive, either
        raise Unavailable(f"The scheduler cannot be reached: {error}") from error
    except CallTimeout as error:
        raise Unavailable(f"The scheduler does not answer: {error}") from error


class Placer:
    """Finds hosts for servers that may use the same hosts."""

    def __init__(self, dependencies: ConductorDependencies, scheduler: SchedulerAPI) -> None:
        self._engine = dependencies.engine
        self._scheduler = scheduler
        self._service_down_time = dependencies.service_down_time
        self._pci_aliases = dependencies.pci_aliases

    async def place(self, servers: Sequence[ServerToPlace[Any]], unpreferred: Iterable[str] = ()) -> None:
        """Let the scheduler choose a host for each server and claim its resources; `unpreferred` hosts come last.

        The scheduler is asked again after a host has failed, because it knows what was placed since its last decision.
        The alternates of that decision are the same for all servers of a request, so one is taken only if the scheduler
        cannot be asked.
        """
        unpreferred = {*servers[0].payload.unpreferred, *unpreferred}
        try:
            await self._select(servers, unpreferred)
        except Unavailable:
            if len(servers) > 1 or not await self._take_alternate(servers[0]):
                raise
        except NoValidHost:
            if not unpreferred:
                raise
            await self._select(servers, ())
            for server in servers:
                server.payload.unpreferred = []  # no other host is left: none is preferred

    def any_host_besides(self, conn: sa.Connection, hosts: Sequence[str]) -> bool:
        """Return whether another host than these is up."""
        return services.any_up(conn, COMPUTE, self._engine.now(), self._service_down_time, besides=hosts)

    async def _select(self, servers: Sequence[ServerToPlace[Any]], unpreferred: Iterable[str]) -> None:
        """Let the scheduler choose among the hosts where the servers did not fail, without `unpreferred` ones."""
        first = servers[0]
        ignored = tuple(sorted({*first.spec.ignore_hosts, *first.payload.tried, *unpreferred}))
        spec = msgspec.structs.replace(first.spec, ignore_hosts=ignored)
        with asking_scheduler(self._engine):
            decision = await self._scheduler.select_destinations(
                first.operation.context,
                spec,
                [server.row["uuid"] for server in servers],
                epochs={server.row["uuid"]: server.operation.epoch for server in servers},
                moving={server.row["uuid"]: server.moving for server in servers if server.moving is not None},
            )
        destinations = {destination.instance_uuid: destination for destination in decision.destinations}
        for server in servers:
            destination = destinations[server.row["uuid"]]
            server.chosen = destination.selected
            server.payload.alternates = list(destination.alternates)
            server.explanation = decision.explanation

    async def _take_alternate(self, server: ServerToPlace[Any]) -> bool:
        alternates = server.payload.alternates
        while alternates:
            server.chosen = alternates.pop(0)
            if server.spec.availability_zone not in (None, server.chosen.zone):
                continue  # the server was pinned to another zone since
            claim = claims.Claim.of(
                server.row["uuid"],
                server.chosen,
                server.spec,
                server.operation.epoch,
                aliases=self._pci_aliases,
                moving=server.moving,
            )
            if await self._engine.database.write(self._claim_as_chosen, claim, server.operation.created_at):
                return True
        return False

    def _claim_as_chosen(self, conn: sa.Connection, claim: claims.Claim, since: int) -> bool:
        """Claim an alternate, unless its host is down, or may have been reserved for others since a time.

        Only the scheduler knows for whom aggregates and traits keep hosts: it is asked again later then.
        """
        now = self._engine.now()
        if not services.host_is_up(conn, claim.host, now, self._service_down_time):
            return False
        of_node = providers.get_many(conn, [claim.node_uuid]).values()
        if aggregates.any_changed_since(conn, since) or any(row.updated_at > since for row in of_node):
            return False
        return claims.claim(conn, [claim], now=now).claimed


NO_HOST: Final[InstanceChanges] = {"host": None, "node": None, "node_uuid": None}
"""The changes that let a server belong to no host."""


def host_changes(chosen: Selection) -> InstanceChanges:
    """Return the changes that let a server belong to the chosen host."""
    return {
        "host": chosen.host,
        "node": chosen.node,
        "node_uuid": chosen.node_uuid,
        "availability_zone": chosen.zone,
    }


Loaded = tuple[Operation, InstanceRow | None, RequestSpec | None, PlannedPorts]


def load_builds(conn: sa.Connection, operations: list[Operation]) -> list[Loaded]:
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
            loaded.append((operation, row, instances.request_of(spec), msgspec.convert(spec["networks"], PlannedPorts)))
    return loaded
