"""Asking guests to shut down or restart by themselves, with a timeout."""

from collections.abc import Callable
from typing import Final

from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.events import EventQueues
from micronova.virt.libvirt.client.library import has_code
from micronova.virt.libvirt.guests import domains

ASK_AGAIN: Final = 5.0
"""Seconds after which a guest that does not react is asked again: while it boots, it ignores the request."""
REBOOT_ASK_AGAIN: Final = 15.0
"""Longer, because a guest that has just restarted must not be asked again."""
POLL_INTERVAL: Final = 1.0
"""Seconds between reads of its state, in case that an event is lost."""


class GracefulPower:
    """Asks guests to shut down or restart, and waits until they have."""

    def __init__(self, connection: Connection, queues: EventQueues, clock: Clock, cloud: str) -> None:
        self._connection = connection
        self._queues = queues
        self._clock = clock
        self._cloud = cloud

    async def shut_down(self, uuid: str, timeout: float) -> bool:
        """Ask a guest to shut down; return whether it has."""
        deadline = self._clock.monotonic() + timeout
        ask_at = self._clock.monotonic()
        with self._queues.watch(uuid) as watch:
            while (now := self._clock.monotonic()) < deadline:
                if await self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE):
                    return True
                if now >= ask_at:
                    await self._ask(uuid, lambda domain: domain.shutdownFlags(0), "shut the guest down")
                    ask_at = now + ASK_AGAIN
                await watch.next(max(0.0, min(POLL_INTERVAL, deadline - now)))
        return await self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE)

    async def reboot(self, uuid: str, timeout: float) -> bool:
        """Ask a guest to restart; return whether it has."""
        deadline = self._clock.monotonic() + timeout
        ask_at = self._clock.monotonic()
        with self._queues.watch(uuid) as watch:
            while (now := self._clock.monotonic()) < deadline:
                if await self._power(uuid) != power_state.RUNNING:
                    return False  # it stopped instead: the caller starts it
                if now >= ask_at:
                    await self._ask(uuid, lambda domain: domain.reboot(0), "restart the guest")
                    ask_at = now + REBOOT_ASK_AGAIN
                event = await watch.next(max(0.0, min(POLL_INTERVAL, deadline - now)))
                while event is not None:
                    if event.kind == "reboot":
                        return True
                    event = await watch.next(0.0)
        return False

    async def _ask(self, uuid: str, request: Callable[[Domain], int], what: str) -> None:
        def ask(connection: Connect) -> None:
            domain = domains.find_ours(connection, uuid, self._cloud)
            if domain is None:
                return
            try:
                request(domain)
            except Exception as error:
                if not has_code(error, "VIR_ERR_OPERATION_INVALID"):  # it has stopped
                    raise

        await self._connection.change(uuid, ask, what)

    async def _power(self, uuid: str) -> int:
        info = await self._connection.read(lambda connection: domains.describe(connection, uuid))
        return power_state.SHUTDOWN if info is None else info.power
