"""Telling the manager what guests do.

Libvirt's events come late and one by one; told as they come, those that an order caused would pass for the guest's own
doing. So an event is only a hint to look, and what is told is what was found, if it is news. While an order changes a
guest, hints are left alone: the order's end looks.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from micronova.objects.errors import MicronovaError
from micronova.objects.orders import Guest
from micronova.virt import power_state
from micronova.virt.driver import DriverEvents, Lifecycle
from micronova.virt.libvirt.guests import Guests

log = logging.getLogger(__name__)

_EVENTS: Final[dict[int, Lifecycle]] = {
    power_state.RUNNING: "started",
    power_state.PAUSED: "paused",
    power_state.SHUTDOWN: "stopped",
    power_state.CRASHED: "crashed",
    power_state.SUSPENDED: "suspended",
}


class Observer:
    """Knows what the manager knows."""

    def __init__(self, guests: Guests) -> None:
        self._guests = guests
        self._events: DriverEvents | None = None
        self._told: dict[str, int] = {}
        self._busy: Counter[str] = Counter()
        self._hinted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, events: DriverEvents) -> None:
        """Begin to tell."""
        self._events = events

    async def stop(self) -> None:
        """Tell nothing any more."""
        self._events = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def changing(self, uuid: str) -> AsyncIterator[None]:
        """Surround what an order does to a guest; at the end the manager knows what became of it."""
        self._busy[uuid] += 1
        try:
            yield
            try:
                await self._look(uuid)
            except MicronovaError as error:  # what the order did is done nevertheless
                log.warning("guest %s cannot be looked at: %s", uuid, error)
                self._look_soon(uuid)
        except BaseException:
            # Not waited for: a libvirt that hangs should not hold a failure up.
            self._look_soon(uuid)
            raise
        finally:
            self._busy[uuid] -= 1
            if not self._busy[uuid]:
                del self._busy[uuid]

    def hint(self, uuid: str) -> None:
        """Something happened to a guest."""
        if not self._busy[uuid]:
            self._look_soon(uuid)

    def hint_all(self) -> None:
        """Anything may have happened to any guest."""
        if self._events is not None:
            self._do(self._look_at_all())

    def gone(self, uuid: str) -> None:
        """A guest was removed."""
        self._told.pop(uuid, None)

    def progress(self, uuid: str, percent: int) -> None:
        """The work on a guest has come so far."""
        if self._events is not None:
            self._events.progress(uuid, percent)

    def _look_soon(self, uuid: str) -> None:
        if uuid not in self._hinted and self._events is not None:
            self._hinted.add(uuid)
            self._do(self._look_later(uuid))

    async def _look_later(self, uuid: str) -> None:
        self._hinted.discard(uuid)  # a hint from now on means another look
        try:
            guest = await self._guests.one(uuid)
        except MicronovaError as error:
            log.warning("guest %s cannot be looked at: %s", uuid, error)
            return
        if guest is not None and not self._busy[uuid]:
            self._tell(guest)

    async def _look_at_all(self) -> None:
        try:
            guests = await self._guests.all()
        except MicronovaError as error:
            log.warning("the guests cannot be looked at: %s", error)
            return
        for guest in guests:
            if not self._busy[guest.uuid]:
                self._tell(guest)

    async def _look(self, uuid: str) -> None:
        guest = await self._guests.one(uuid)
        if guest is not None:
            self._tell(guest)

    def _tell(self, guest: Guest) -> None:
        power, before = guest.power_state, self._told.get(guest.uuid)
        if power in (power_state.NOSTATE, before) or self._events is None:
            return
        self._told[guest.uuid] = power
        resumed = power == power_state.RUNNING and before in (power_state.PAUSED, power_state.SUSPENDED)
        self._events.lifecycle(guest.uuid, "resumed" if resumed else _EVENTS[power])

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
