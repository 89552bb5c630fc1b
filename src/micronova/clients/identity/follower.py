"""Reading something of the identity service again and again."""

import asyncio
import logging
from abc import ABC, abstractmethod

from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock

log = logging.getLogger(__name__)


class Follower(ABC):
    """Reads once when it is started, and then every `interval` seconds; an error is logged and does not stop it."""

    what: str  # is read, for the log

    def __init__(self, clock: Clock, interval: float) -> None:
        self._clock = clock
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read once and then follow; an identity service that does not answer yet is asked again."""
        await self._look()
        self._task = keep_running(self._follow, name=f"follow-{self.what.replace(' ', '-')}", clock=self._clock)

    async def stop(self) -> None:
        """Stop following."""
        await end_tasks(self._task)
        self._task = None

    @abstractmethod
    async def refresh(self) -> None:
        """Read what is new."""

    async def _follow(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self._look()

    async def _look(self) -> None:
        try:
            await self.refresh()
        except Exception as error:  # the next look tries again
            log.warning("cannot read the %s of the identity service: %s", self.what, error)
