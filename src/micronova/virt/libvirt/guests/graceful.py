"""Asking guests to shut down or restart by themselves, with a timeout."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.errors import MicronovaError
from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.events import EventQueues
from micronova.virt.libvirt.client.library import has_code, load
from micronova.virt.libvirt.guests import agent, domains

log = logging.getLogger(__name__)

ASK_AGAIN: Final = 5.0
"""Seconds after which a guest that does not react is asked again: while it boots, it ignores the request."""
REBOOT_ASK_AGAIN: Final = 15.0
"""Longer, because a guest that has just restarted must not be asked again."""
POLL_INTERVAL: Final = 1.0
"""Seconds between reads of its state, in case that an event is lost."""
AGENT_ANSWERS: Final = 75.0
"""Seconds after which a request to an agent counts as hung: libvirt waits a minute for the guest to react."""


class GracefulPower:
    """Asks guests to shut down or restart, and waits until they have.

    All guests have a power button. Libvirt would rather ask the agent of a guest that has one, and wait for its answer
    for a minute. So the agent is asked second, while this waits for the guest.
    """

    def __init__(self, connection: Connection, queues: EventQueues, clock: Clock, cloud: str) -> None:
        self._connection = connection
        self._queues = queues
        self._clock = clock
        self._cloud = cloud

    async def shut_down(self, uuid: str, timeout: float) -> bool:
        """Ask a guest to shut down; return whether it has."""
        deadline = self._clock.monotonic() + timeout
        ask_at = self._clock.monotonic()
        with self._queues.watch(uuid) as watch, self._requests(uuid, _SHUTDOWN) as ask:
            while (now := self._clock.monotonic()) < deadline:
                if await self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE):
                    return True
                if now >= ask_at:
                    await ask()
                    ask_at = now + ASK_AGAIN
                await watch.next(max(0.0, min(POLL_INTERVAL, deadline - now)))
        return await self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE)

    async def reboot(self, uuid: str, timeout: float) -> bool:
        """Ask a guest to restart; return whether it has."""
        deadline = self._clock.monotonic() + timeout
        ask_at = self._clock.monotonic()
        with self._queues.watch(uuid) as watch, self._requests(uuid, _REBOOT) as ask:
            while (now := self._clock.monotonic()) < deadline:
                if await self._power(uuid) != power_state.RUNNING:
                    return False  # it stopped instead: the caller starts it
                if now >= ask_at:
                    await ask()
                    ask_at = now + REBOOT_ASK_AGAIN
                event = await watch.next(max(0.0, min(POLL_INTERVAL, deadline - now)))
                while event is not None:
                    if event.kind == "reboot":
                        return True
                    event = await watch.next(0.0)
        return False

    @contextmanager
    def _requests(self, uuid: str, request: "_Request") -> Iterator[Callable[[], Awaitable[None]]]:
        """Return the function that asks a guest, again and again. A request that waits for its turn ends with this."""
        asked = 0
        agent_asked: asyncio.Task[None] | None = None

        async def ask() -> None:
            nonlocal asked, agent_asked
            asked += 1
            has_agent = await self._push(uuid, request)
            if has_agent and asked > 1 and agent_asked is None:
                agent_asked = asyncio.create_task(self._ask_agent(uuid, request))

        try:
            yield ask
        finally:
            if agent_asked is not None:
                agent_asked.cancel()

    async def _push(self, uuid: str, request: "_Request") -> bool:
        """Push the power button, as it were; return whether the guest has a channel to an agent."""

        def push(domain: Domain) -> bool:
            has_agent = agent.channel_state(domain) is not None
            # Without an agent, libvirt knows best what to do.
            request.send(domain, getattr(load(), request.button) if has_agent else 0)
            return has_agent

        return bool(await self._connection.change(uuid, self._if_there(uuid, push), request.what))

    async def _ask_agent(self, uuid: str, request: "_Request") -> None:
        def send(domain: Domain) -> bool:
            request.send(domain, getattr(load(), request.agent))
            return True

        what, there = request.what, self._if_there(uuid, send)
        try:
            await self._connection.change(uuid, there, what, timeout=AGENT_ANSWERS, lane="shutdown")
        except MicronovaError as error:
            log.info("the agent of guest %s does not %s: %s", uuid, what, error)

    def _if_there(self, uuid: str, function: Callable[[Domain], bool]) -> Callable[[Connect], bool]:
        def call(connection: Connect) -> bool:
            domain = domains.find_ours(connection, uuid, self._cloud)
            if domain is None:
                return False
            try:
                return function(domain)
            except Exception as error:
                if not has_code(error, "VIR_ERR_OPERATION_INVALID"):  # it has stopped
                    raise
                return False

        return call

    async def _power(self, uuid: str) -> int:
        info = await self._connection.read(lambda connection: domains.describe(connection, uuid))
        return power_state.SHUTDOWN if info is None else info.power


@dataclass(frozen=True)
class _Request:
    send: Callable[[Domain, int], object]
    button: str  # the names of libvirt's flags
    agent: str
    what: str


_SHUTDOWN: Final = _Request(
    lambda domain, flags: domain.shutdownFlags(flags),
    "VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN",
    "VIR_DOMAIN_SHUTDOWN_GUEST_AGENT",
    "shut the guest down",
)
_REBOOT: Final = _Request(
    lambda domain, flags: domain.reboot(flags),
    "VIR_DOMAIN_REBOOT_ACPI_POWER_BTN",
    "VIR_DOMAIN_REBOOT_GUEST_AGENT",
    "restart the guest",
)
