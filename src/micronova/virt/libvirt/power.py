"""Asking guests to stop or restart by themselves, with patience and with an end to it."""

from typing import Any, Final

from micronova.objects.clock import Clock
from micronova.virt import power_state
from micronova.virt.libvirt import domains
from micronova.virt.libvirt.connection import Connection
from micronova.virt.libvirt.events import Watchers
from micronova.virt.libvirt.library import has_code

ASK_AGAIN: Final = 5.0
"""Seconds after which a guest that does not react is asked again: one that was just booting did not hear it."""
REBOOT_ASK_AGAIN: Final = 15.0
"""Longer, because a guest that has just restarted must not be asked once more."""
LOOK_AGAIN: Final = 1.0
"""Seconds between looks at its state, for events that never come."""


class Requests:
    """Sends requests to guests and waits for what they do."""

    def __init__(self, connection: Connection, watchers: Watchers, clock: Clock, cloud: str) -> None:
        self._connection = connection
        self._watchers = watchers
        self._clock = clock
        self._cloud = cloud

    async def shut_down(self, uuid: str, timeout: float) -> bool:
        """Ask a guest to shut itself down; say whether it has."""
        deadline = self._clock.monotonic() + timeout
        ask_at = self._clock.monotonic()
        with self._watchers.watch(uuid) as watch:
            while (now := self._clock.monotonic()) < deadline:
                if await self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE):
                    return True
                if now >= ask_at:
                    await self._ask(uuid, "shutdownFlags", "shut the guest down")
                    ask_at = now + ASK_AGAIN
                await watch.next(max(0.0, min(LOOK_AGAIN, deadline - now)))
        return await self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE)

    async def restart(self, uuid: str, timeout: float) -> bool:
        """Ask a guest to restart itself; say whether it has."""
        deadline = self._clock.monotonic() + timeout
        ask_at = self._clock.monotonic()
        with self._watchers.watch(uuid) as watch:
            while (now := self._clock.monotonic()) < deadline:
                if await self._power(uuid) != power_state.RUNNING:
                    return False  # it stopped instead: to be started by whoever asked
                if now >= ask_at:
                    await self._ask(uuid, "reboot", "restart the guest")
                    ask_at = now + REBOOT_ASK_AGAIN
                event = await watch.next(max(0.0, min(LOOK_AGAIN, deadline - now)))
                while event is not None:
                    if event.kind == "reboot":
                        return True
                    event = await watch.next(0.0)
        return False

    async def _ask(self, uuid: str, method: str, what: str) -> None:
        def ask(connection: Any) -> None:
            domain = domains.find_ours(connection, uuid, self._cloud)
            if domain is None:
                return
            try:
                getattr(domain, method)(0)
            except Exception as error:
                if not has_code(error, "VIR_ERR_OPERATION_INVALID"):  # it has stopped meanwhile
                    raise

        await self._connection.work(uuid, ask, what)

    async def _power(self, uuid: str) -> int:
        seen = await self._connection.read(lambda connection: domains.look(connection, uuid))
        return power_state.SHUTDOWN if seen is None else seen.power
