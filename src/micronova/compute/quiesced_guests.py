"""Guests whose file systems are frozen while snapshots of their volumes are made.

The caller that freezes a guest thaws it. If it never does, because it has died, the guest is thawed after LIMIT. An
agent that starts thaws what an earlier one has left frozen: its driver does that (`Driver.init_host`).
"""

import asyncio
import logging
from typing import Final

from micronova.compute.waiting import wait_for_all
from micronova.objects.background import end_tasks
from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict, InstanceNotFound
from micronova.virt.driver import Driver, Quiesce, capable_driver

log = logging.getLogger(__name__)

LIMIT: Final = 30.0
"""Seconds after which a guest is thawed in any case; more than the API needs for what it does meanwhile."""
LONGEST_WAIT: Final = 20.0
"""Seconds after which a request to thaw a guest is answered; the attempts to thaw it continue."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
"""Seconds between attempts to thaw a guest."""
ATTEMPTS: Final = 12
"""Attempts to thaw a guest. If the agent in the guest has not answered by then, it never will; a reboot thaws it."""


class _Frozen:
    """A guest that is being frozen, is frozen, or is being thawed."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()  # has the error, if freezing fails
        self.begun.add_done_callback(lambda begun: begun.cancelled() or begun.exception())
        self.ended: asyncio.Future[None] = loop.create_future()
        self.held = False  # it was frozen until a caller asked to thaw it
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class QuiescedGuests:
    """Freezes and thaws the file systems of the guests of one host."""

    def __init__(self, host: str, driver: Driver, clock: Clock) -> None:
        self._host = host
        self._driver = driver
        self._clock = clock
        self._frozen: dict[str, _Frozen] = {}

    async def quiesce(self, uuid: str) -> None:
        """Freeze the file systems of a guest until `unquiesce`, or for LIMIT; raise what the driver raises."""
        driver = capable_driver(
            self._driver, Quiesce, f"The host {self._host} cannot freeze the file systems of its guests."
        )
        if uuid in self._frozen:
            raise Conflict(f"The file systems of the guest {uuid} are frozen already.")
        frozen = self._frozen[uuid] = _Frozen()
        # A task of its own: a thaw must not overtake a freeze whose caller no longer waits.
        frozen.task = asyncio.create_task(self._hold(uuid, driver, frozen), name=f"quiesce-{uuid}")
        frozen.task.add_done_callback(lambda _: self._frozen.pop(uuid))
        try:
            await asyncio.shield(frozen.begun)
        except asyncio.CancelledError:
            frozen.end()
            raise

    async def unquiesce(self, uuid: str) -> bool:
        """Thaw a guest; return whether it has been frozen until now."""
        frozen = self._frozen.get(uuid)
        if frozen is None or frozen.task is None:
            return False
        frozen.end()
        await wait_for_all(self._clock, [frozen.task], LONGEST_WAIT)
        return frozen.held

    async def stop(self, seconds: float) -> None:
        """Thaw all guests; what cannot be thawed in time is left to the next agent."""
        for each in self._frozen.values():
            each.end()
        tasks = [each.task for each in self._frozen.values() if each.task is not None]
        await wait_for_all(self._clock, tasks, seconds)
        await end_tasks(*tasks)

    async def _hold(self, uuid: str, driver: Quiesce, frozen: _Frozen) -> None:
        try:
            await driver.quiesce(uuid)
        except Exception as error:
            frozen.begun.set_exception(error)  # some file systems may be frozen nevertheless
        else:
            frozen.begun.set_result(None)
            await wait_for_all(self._clock, [frozen.ended], LIMIT)
            frozen.held = frozen.ended.done()
            if not frozen.held:
                log.warning(
                    "host %s: no request to thaw guest %s came within %g s; it is thawed now", self._host, uuid, LIMIT
                )
        await self._thaw(uuid, driver)

    async def _thaw(self, uuid: str, driver: Quiesce) -> None:
        """Thaw a guest; try again for some time, until it is thawed or gone."""
        pause = FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await driver.unquiesce(uuid)
                return
            except InstanceNotFound:
                return
            except Exception as error:  # drivers may raise anything
                log.warning(
                    "host %s: the file systems of guest %s could not be thawed (attempt %d of %d): %s",
                    self._host,
                    uuid,
                    attempt,
                    ATTEMPTS,
                    error,
                )
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        log.error("host %s: the file systems of guest %s may stay frozen; reboot the guest", self._host, uuid)
