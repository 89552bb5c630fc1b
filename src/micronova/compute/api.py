"""What may be asked of compute below HTTP: what is accepted as work, and what is answered or done at once."""

import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from micronova.compute import states
from micronova.compute.acceptance import Acceptance, rpc_context
from micronova.compute.creation import Creation
from micronova.compute.interfaces import Interfaces, Networks, ServerGroups
from micronova.compute.new_servers import Created, CreateRequest
from micronova.compute.rpcapi import ComputeAPI, InstanceEvent
from micronova.conductor.kinds import Notifier
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import instances, services
from micronova.db.engine import Database
from micronova.http.context import RequestContext
from micronova.objects.clock import Clock, micros
from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import Conflict, NotFound, NotSupported, Unavailable
from micronova.rpc.errors import BusUnavailable, CallTimeout

log = logging.getLogger(__name__)

T = TypeVar("T")


class API:
    """The compute API below HTTP."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        random: random.Random,
        conductor: ConductorAPI,
        compute: ComputeAPI,
        notifier: Notifier,
        creation: Creation,
        networks: Networks | None,
        build_timeout: float,
        service_down_time: float,
    ) -> None:
        self._database = database
        self._clock = clock
        self._compute = compute
        self._networks = networks
        self._service_down_time = service_down_time
        self._creation = creation
        self.actions = Acceptance(
            database=database,
            clock=clock,
            random=random,
            conductor=conductor,
            notifier=notifier,
            timeout=build_timeout,
        )
        self.interfaces = Interfaces(
            database=database, clock=clock, acceptance=self.actions, networks=networks, is_up=self._is_up
        )

    async def create(self, context: RequestContext, request: CreateRequest) -> Created:
        """Accept servers to be built; durable when this returns."""
        return await self._creation.create(context, request)

    # --- what is asked of hosts ------------------------------------------------------------------------------

    async def console_output(self, context: RequestContext, row: Any, length: int | None) -> str:
        """Read a server's console log from its host."""
        ask = self._compute.get_console_output
        return await self._ask_host(row, lambda host: ask(rpc_context(context), host, row["uuid"], length))

    async def console_endpoint(self, context: RequestContext, row: Any, protocol: ConsoleProtocol) -> ConsoleEndpoint:
        """Ask a server's host where its screen or serial port is."""
        ask = self._compute.get_console
        return await self._ask_host(row, lambda host: ask(rpc_context(context), host, row["uuid"], protocol))

    async def diagnostics(self, context: RequestContext, row: Any) -> GuestDiagnostics:
        """Have a running server measured by its host."""
        power = row["power_state"]
        if row["host"] is not None and power != states.RUNNING:
            raise Conflict(f"Cannot 'get_diagnostics' instance {row['uuid']} while it is in power_state {power}")
        ask = self._compute.get_diagnostics
        return await self._ask_host(row, lambda host: ask(rpc_context(context), host, row["uuid"]))

    async def _ask_host(self, row: Any, ask: Callable[[str], Awaitable[T]]) -> T:
        """Ask a server's host, unless it has none or that is known to be away."""
        if row["host"] is None:
            raise Conflict(f"Instance {row['uuid']} is not ready: it has no host yet.")
        away = Unavailable(f"The host of instance {row['uuid']} does not answer just now. Try again later.")
        if not await self._database.read(self._is_up, row["host"]):
            raise away
        try:
            return await ask(row["host"])
        except (BusUnavailable, CallTimeout) as error:
            log.warning("the host of %s does not answer: %s", row["uuid"], error)
            raise away from error

    def _is_up(self, conn: sa.Connection, host: str) -> bool:
        found = services.list_(conn, binary="nova-compute", host=host)
        return bool(found) and services.is_up(found[0], micros(self._clock.now()), self._service_down_time)

    # --- security groups -------------------------------------------------------------------------------------

    async def security_groups(self, context: RequestContext, row: Any) -> list[dict[str, Any]]:
        """Return the security groups of a server's ports, with their rules."""
        return await self._groups().of_server(row["uuid"], context.token)

    async def add_security_group(self, context: RequestContext, row: Any, group: str) -> None:
        """Give all ports of a server a group; rules hold for a running guest at once."""
        names = await self._groups().add(row["uuid"], group, token=context.token, project_id=row["project_id"])
        await self._show_groups(row["uuid"], names)

    async def remove_security_group(self, context: RequestContext, row: Any, group: str) -> None:
        """Take a group off all ports of a server."""
        names = await self._groups().remove(row["uuid"], group, token=context.token, project_id=row["project_id"])
        await self._show_groups(row["uuid"], names)

    def _groups(self) -> ServerGroups:
        if self._networks is None:
            raise NotSupported("There is no network service, and so there are no security groups.")
        return self._networks.groups

    async def _show_groups(self, uuid: str, names: list[str]) -> None:
        await self._database.write(instances.update, uuid, micros(self._clock.now()), {"security_groups": names})

    async def host_uptime(self, context: RequestContext, host: str) -> str | None:
        """Ask a host how long it is up; None if it does not tell, or not in time."""
        try:
            return await self._compute.get_host_uptime(rpc_context(context), host)
        except (NotSupported, Unavailable):
            return None

    async def fault_rules(
        self, context: RequestContext, host: str, rules: list[dict[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """List, or replace, the fault rules of a simulated host's process."""
        if not await self._database.read(services.list_, binary="nova-compute", host=host):
            raise NotFound(f"Compute host {host} could not be found.")
        return await self._compute.fault_rules(rpc_context(context), host, rules)

    async def external_event(self, context: RequestContext, row: Any, event: InstanceEvent) -> bool:
        """Do what a neighbour's event asks for, and pass it on to the server's host; say whether it is on its way."""
        if event.name == "network-changed":
            await self.interfaces.refresh(row["uuid"])
        elif event.name == "network-vif-deleted" and event.tag:
            await self.interfaces.port_deleted(context, row, event.tag)
        try:
            await self._compute.external_instance_event(rpc_context(context), row["host"], event)
        except BusUnavailable as error:
            log.warning("event %s for %s is lost: %s", event.name, event.instance_uuid, error)
            return False
        return True
