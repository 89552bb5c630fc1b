"""Reporting changes of guests' power states to the agent.

Libvirt's events come late and one by one. If they were passed on, those that an order caused would look as if the guest
had acted by itself. So an event only causes a read of the guest's state, which is reported if it has changed. While an
order changes a guest, events are ignored: the state is read when the order ends. A read may take long, and what it
found of a guest is out of date if an order or another read has ended meanwhile: such a guest is read again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.orders import Guest
from micronova.virt.driver import DriverEvents, Lifecycle
from micronova.virt.libvirt.guests.access import GuestAccess

log = logging.getLogger(__name__)

CHECK_PAUSES: Final = (1.0, 5.0, 20.0)  # seconds between the reads of all states after libvirtd was lost

_EVENTS: Final[dict[int, Lifecycle]] = {
    power_state.RUNNING: "started",
    power_state.PAUSED: "paused",
    power_state.SHUTDOWN: "stopped",
    power_state.CRASHED: "crashed",
    power_state.SUSPENDED: "suspended",
}


class LifecycleReporter:
    """Reports power states that the agent does not know yet."""

    def __init__(self, guests: GuestAccess, clock: Clock) -> None:
        self._guests = guests
        self._clock = clock
        self._events: DriverEvents | None = None
        self._reported: dict[str, int] = {}
        self._busy: Counter[str] = Counter()
        self._scheduled: set[str] = set()
        self._reads: list[set[str]] = []  # the reads that run, each with the guests that changed or were read meanwhile
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, events: DriverEvents) -> None:
        """Begin to report."""
        self._events = events

    async def stop(self) -> None:
        """Stop reporting."""
        self._events = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def changing(self, uuid: str) -> AsyncIterator[None]:
        """Surround what an order does to a guest; the guest's state is reported at the end."""
        self._busy[uuid] += 1
        try:
            yield
            try:
                await self._check(uuid)
            except Exception as error:  # the order itself has succeeded
                log.warning("the power state of guest %s cannot be read: %s", uuid, error)
                self._schedule(uuid)
        except BaseException:
            # Not awaited: a libvirt that hangs must not delay the error.
            self._schedule(uuid)
            raise
        finally:
            self._overtake(uuid)
            self._busy[uuid] -= 1
            if not self._busy[uuid]:
                del self._busy[uuid]

    def check_soon(self, uuid: str) -> None:
        """Read a guest's state soon and report it; ignored while an order changes the guest."""
        if not self._busy[uuid]:
            self._schedule(uuid)

    def check_all_soon(self) -> None:
        """Read the state of all guests soon, and some seconds later again, and report what changed.

        A libvirtd that has just started shows guests as running until it has found, without an event, that they ended.
        """
        if self._events is not None:
            self._spawn(self._check_all_repeatedly())

    def forget(self, uuid: str) -> None:
        """Forget a guest that was removed."""
        self._reported.pop(uuid, None)

    def _schedule(self, uuid: str) -> None:
        if uuid not in self._scheduled and self._events is not None:
            self._scheduled.add(uuid)
            self._spawn(self._check_later(uuid))

    async def _check_later(self, uuid: str) -> None:
        self._scheduled.discard(uuid)  # an event from now on causes another read
        with self._reading() as overtaken:
            try:
                guest = await self._guests.get(uuid)
            except Exception as error:  # reading files may fail, too
                log.warning("the power state of guest %s cannot be read: %s", uuid, error)
                return
        if guest is not None:
            self._found(guest, overtaken)

    async def _check_all_repeatedly(self) -> None:
        await self._check_all()
        for pause in CHECK_PAUSES:
            await self._clock.sleep(pause)
            await self._check_all()

    async def _check_all(self) -> None:
        with self._reading() as overtaken:
            try:
                guests = await self._guests.all()
            except Exception as error:  # reading files may fail, too
                log.warning("the power states of the guests cannot be read: %s", error)
                return
        for guest in guests:
            self._found(guest, overtaken)

    @contextmanager
    def _reading(self) -> Iterator[set[str]]:
        """Surround a read; what is yielded gets the guests of which the read may have found an older state."""
        overtaken: set[str] = set()
        self._reads.append(overtaken)
        try:
            yield overtaken
        finally:
            # Sets are equal by content: remove this one.
            self._reads = [each for each in self._reads if each is not overtaken]

    def _overtake(self, uuid: str) -> None:
        for overtaken in self._reads:
            overtaken.add(uuid)

    def _found(self, guest: Guest, overtaken: set[str]) -> None:
        """Report what a read found; read the guest again if that may be out of date."""
        if self._busy[guest.uuid]:
            return  # the order reads it at its end
        if guest.uuid not in overtaken:
            self._report(guest)
        elif guest.power_state != self._reported.get(guest.uuid):
            self._schedule(guest.uuid)

    async def _check(self, uuid: str) -> None:
        guest = await self._guests.get(uuid)
        if guest is not None:
            self._report(guest)

    def _report(self, guest: Guest) -> None:
        self._overtake(guest.uuid)
        power, before = guest.power_state, self._reported.get(guest.uuid)
        if power in (power_state.NOSTATE, before) or self._events is None:
            return
        self._reported[guest.uuid] = power
        resumed = power == power_state.RUNNING and before in (power_state.PAUSED, power_state.SUSPENDED)
        self._events.lifecycle(guest.uuid, "resumed" if resumed else _EVENTS[power])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
