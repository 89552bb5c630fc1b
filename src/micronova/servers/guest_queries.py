"""Questions that a server's host answers: its console log, where its consoles are, its figures."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from micronova.compute.rpcapi import ComputeAPI
from micronova.db import services
from micronova.db.engine import Database
from micronova.objects import power_state, states
from micronova.objects.clock import Clock, micros
from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol, at_registered_relay
from micronova.objects.context import RequestContext
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import Conflict, NotFound, NotSupported, Unavailable
from micronova.objects.instance import InstanceRow
from micronova.objects.service_names import COMPUTE
from micronova.rpc.errors import BusUnavailable, CallTimeout

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuestQueries:
    """Asks hosts about their guests, and about themselves."""

    def __init__(self, *, database: Database, clock: Clock, compute: ComputeAPI, service_down_time: float) -> None:
        self._database = database
        self._clock = clock
        self._compute = compute
        self._service_down_time = service_down_time

    async def console_output(self, context: RequestContext, row: InstanceRow, length: int | None) -> str:
        """Read a server's console log from its host."""
        ask = self._compute.get_console_output
        return await self._ask_host(row, lambda host: ask(context.for_bus(), host, row["uuid"], length))

    async def console_endpoint(
        self, context: RequestContext, row: InstanceRow, protocol: ConsoleProtocol
    ) -> ConsoleEndpoint:
        """Ask a server's host where its screen or serial port is."""
        ask = self._compute.get_console
        answer = await self._ask_host(row, lambda host: ask(context.for_bus(), host, row["uuid"], protocol))
        host = str(row["host"])
        address = await self._database.read(services.console_address, host)
        return answer if address is None else at_registered_relay(answer, host, address)

    async def diagnostics(self, context: RequestContext, row: InstanceRow) -> GuestDiagnostics:
        """Have a running server measured by its host."""
        power = row["power_state"]
        if row["host"] is not None and power != power_state.RUNNING:
            raise Conflict(f"Cannot 'get_diagnostics' instance {row['uuid']} while it is in power_state {power}")
        ask = self._compute.get_diagnostics
        return await self._ask_host(row, lambda host: ask(context.for_bus(), host, row["uuid"]))

    async def host_uptime(self, context: RequestContext, host: str) -> str | None:
        """Ask a host for its uptime; None if it has none to tell or does not answer."""
        try:
            return await self._compute.get_host_uptime(context.for_bus(), host)
        except (NotSupported, Unavailable):
            return None

    async def fault_rules(
        self, context: RequestContext, host: str, rules: list[dict[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """List, or replace, the fault rules of a simulated host's process."""
        if not await self._database.read(services.list_, binary=COMPUTE, host=host):
            raise NotFound(f"Compute host {host} could not be found.")
        return await self._compute.fault_rules(context.for_bus(), host, rules)

    async def check_host(self, row: InstanceRow) -> None:
        """Raise Unavailable if a server's host has sent no heartbeat lately."""
        now = micros(self._clock.now())
        if not await self._database.read(services.host_is_up, str(row["host"]), now, self._service_down_time):
            raise _no_answer(row)

    async def _ask_host(self, row: InstanceRow, ask: Callable[[str], Awaitable[T]]) -> T:
        """Ask a server's host, unless it has none or its host is known to be down."""
        if row["host"] is None:
            if row["vm_state"] == states.ERROR:
                raise Conflict(f"Instance {row['uuid']} was never placed on a host: its fault says why.")
            raise Conflict(f"Instance {row['uuid']} is not ready: it has no host yet.")
        await self.check_host(row)
        try:
            return await ask(row["host"])
        except (BusUnavailable, CallTimeout) as error:
            log.warning("the host of %s does not answer: %s", row["uuid"], error)
            raise _no_answer(row) from error


def _no_answer(row: InstanceRow) -> Unavailable:
    return Unavailable(f"The host of instance {row['uuid']} does not answer just now. Try again later.")
