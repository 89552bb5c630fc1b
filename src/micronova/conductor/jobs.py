"""Periodic jobs of the whole cloud, each done by one conductor at a time: mending counters, purging old rows."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from micronova.conductor import audit
from micronova.db import periodic_jobs, retention
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros

log = logging.getLogger(__name__)

MEND_INTERVAL = 300.0
PURGE_INTERVAL = 60.0
PURGE_BATCHES = 100
"""Batches of one purge: what remains is left to the next one, so that the database has time for other work."""
PURGE_PAUSE = 0.05
"""Seconds between two batches."""


class Jobs:
    """Claims jobs that are due, and does them."""

    def __init__(
        self, database: Database, clock: Clock, *, owner: str, keep_finished: float, keep_deleted: float
    ) -> None:
        """`keep_finished` and `keep_deleted` are seconds; 0 keeps deleted servers for ever."""
        self._database = database
        self._clock = clock
        self._owner = owner
        self._keep_finished = keep_finished
        self._keep_deleted = keep_deleted
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to look for jobs."""
        self._loops = [
            asyncio.create_task(self._forever("mend", self.mend, MEND_INTERVAL), name="conductor-mend"),
            asyncio.create_task(self._forever("purge", self.purge, PURGE_INTERVAL), name="conductor-purge"),
        ]

    async def stop(self) -> None:
        """Stop; another conductor claims the jobs when they are due again."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    async def _forever(self, name: str, job: Callable[[], Awaitable[None]], interval: float) -> None:
        while True:
            await self._clock.sleep(interval)
            try:
                now = micros(self._clock.now())
                if await self._database.write(periodic_jobs.claim, name, self._owner, now, micros(interval)):
                    await job()
            except Exception as error:
                log.warning("the periodic job %s failed and is repeated: %s", name, error)

    async def mend(self) -> None:
        """Correct counters that drifted."""
        for what in await audit.mend(self._database, micros(self._clock.now())):
            log.warning("the audit mended: %s", what)

    async def purge(self) -> None:
        """Delete finished operations and the records of deleted servers that are older than they are kept."""
        now = self._clock.now()
        await self._purge(retention.purge_operations, micros(now - self._keep_finished))
        if self._keep_deleted > 0:
            await self._purge(retention.purge_servers, micros(now - self._keep_deleted))

    async def _purge(self, purge: Callable[..., int], before: int) -> None:
        for _ in range(PURGE_BATCHES):
            if await self._database.write(purge, before) < retention.BATCH:
                return
            await self._clock.sleep(PURGE_PAUSE)
