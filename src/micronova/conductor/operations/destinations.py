"""The hosts that the scheduler chooses for servers that exist already."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.host_kind import SteppedKind
from micronova.conductor.operations.placing import Placer, ServerToPlace
from micronova.db import explanations
from micronova.objects.errors import MicronovaError, NoValidHost, Stale, Unavailable
from micronova.objects.network import VIF
from micronova.objects.operations import ChosenPayload, RequestedPayload
from micronova.objects.port_resources import PortResources
from micronova.scheduler.rpcapi import SchedulerAPI

P = TypeVar("P", bound=RequestedPayload)
C = TypeVar("C", bound=ChosenPayload)


class BoundPorts(msgspec.Struct, frozen=True):
    """The interfaces of a server whose ports are bound to its destination; None without a network service."""

    vifs: tuple[VIF, ...] | None


class Destinations:
    """Chooses the destinations of one kind of operation."""

    def __init__(
        self, dependencies: ConductorDependencies, kind: SteppedKind, scheduler: SchedulerAPI, max_attempts: int
    ) -> None:
        self._kind = kind
        self._network_client = dependencies.network_client
        self._max_attempts = max_attempts
        self._placer = Placer(dependencies, scheduler)

    async def choose(self, server: ServerToPlace[P]) -> bool:
        """Choose and claim a destination; return False if there is none, so that the operation waits or has failed.

        A forced one may be in another availability zone, and disabled, as in Nova. The server's ports ask for what the
        network service says now: they, and their QoS policies, may have changed since the server was made.
        """
        payload = server.payload
        ports: tuple[PortResources, ...] = ()
        if self._network_client is not None and server.row["network_info"]:
            ports = await self._network_client.resources_of_server(server.row["uuid"])
        server.spec = msgspec.structs.replace(
            server.spec,
            availability_zone=None if payload.forced else server.spec.availability_zone,
            ignore_status=payload.forced,
            force_host=payload.requested_host if payload.forced else None,
            force_node=None,
            requested_host=None if payload.forced else payload.requested_host,
            requested_node=None,
            ports=ports,
        )
        try:
            await self._placer.place([server])
        except NoValidHost as error:
            if not await self._kind.transitions.wait_for_hosts([server], error):
                await self._kind.fail(server.operation, error)
            return False
        if ports:
            await self._kind.transitions.served_ports(server.row["uuid"], server.spec)
        return True

    async def choose_and_bind(self, server: ServerToPlace[P]) -> BoundPorts | None:
        """Choose a destination and bind the ports to it; return None if the operation waits or has failed.

        Until then the ports may be bound to no host, and what they ask for may change.
        """
        if not await self.choose(server):
            return None
        operation, chosen = server.operation, server.chosen
        try:
            vifs = await self._kind.transitions.rebind(operation, server.row, chosen.host, chosen.zone, exact=True)
            return BoundPorts(vifs)
        except (Stale, Unavailable):
            raise
        except MicronovaError as error:
            await self._kind.fail(operation, error)
            return None

    def may_try_another(self, payload: RequestedPayload) -> bool:
        """Return whether another host may be tried: none was requested, and there are attempts left."""
        return payload.requested_host is None and len(payload.tried) < self._max_attempts

    def may_choose_again(self, conn: sa.Connection, payload: RequestedPayload, excluded: Iterable[str]) -> bool:
        """Return whether there may be another destination than the one that lacks something: a host that is up."""
        return payload.requested_host is None and self._placer.any_host_besides(conn, [*payload.tried, *excluded])


def record_explanation(conn: sa.Connection, server: ServerToPlace[C]) -> None:
    """Record why the scheduler chose the host, if it did; those of earlier attempts are kept."""
    if server.explanation is not None:
        own = server.explanation.of_one(server.row["uuid"], server.chosen.host, server.chosen.node, "")
        explanations.record(conn, server.operation.id, own, again=server.payload.placed_before)
