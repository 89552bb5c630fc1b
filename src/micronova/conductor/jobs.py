"""Periodic jobs of the whole cloud, each done by one conductor at a time.

Two of them are here: repairing counters, and purging old rows. `cli/roles/conductor.py` adds those that the settings
turn on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from micronova.conductor.findings import counters
from micronova.conductor.image_caching import NAME as CACHE_IMAGES
from micronova.db import periodic_jobs, retention, task_logs
from micronova.db.engine import Database
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Unavailable

log = logging.getLogger(__name__)

REPAIR_INTERVAL = 300.0
PURGE_INTERVAL = 60.0
PURGE_BATCHES = 100
"""Batches of one purge: what remains is left to the next one, so that the database has time for other work."""
PURGE_PAUSE = 0.05
"""Seconds between two batches."""
DECLARE_PAUSE = 30.0
LONGEST_ERROR = 255
"""Characters of the error of a failed run that are kept."""


class PeriodicJob(NamedTuple):
    """A job of the whole cloud."""

    name: str
    run: Callable[[], Awaitable[None]]
    interval: float  # seconds between two runs


class Jobs:
    """Claims jobs that are due, and does them."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        owner: str,
        keep_finished: float,
        keep_deleted: float,
        more: Sequence[PeriodicJob] = (),
    ) -> None:
        """`keep_finished` and `keep_deleted` are seconds; 0 keeps deleted servers for ever. `more` are further jobs."""
        self._database = database
        self._clock = clock
        self._owner = owner
        self._keep_finished = keep_finished
        self._keep_deleted = keep_deleted
        self._more = more
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to look for jobs."""
        jobs = (
            PeriodicJob("repair_counters", self.repair_counters, REPAIR_INTERVAL),
            PeriodicJob("purge", self.purge, PURGE_INTERVAL),
            *self._more,
        )
        names = [CACHE_IMAGES, *(job.name for job in jobs)]
        declaring = keep_running(partial(self._declare, names), name="conductor-declare-jobs", clock=self._clock)
        self._loops = [declaring] + [
            keep_running(partial(self._forever, job), name=f"conductor-{job.name}", clock=self._clock) for job in jobs
        ]

    async def stop(self) -> None:
        """Stop; another conductor claims the jobs when they are due again."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    async def _declare(self, names: Sequence[str]) -> None:
        """Record which jobs there are, for `micronova status`: some run for the first time after hours."""
        while True:
            try:
                return await self._database.write(periodic_jobs.declare, names)
            except Unavailable as error:
                log.warning("the periodic jobs are not recorded, which is repeated in %g s: %s", DECLARE_PAUSE, error)
                await self._clock.sleep(DECLARE_PAUSE)

    async def _forever(self, job: PeriodicJob) -> None:
        while True:
            await self._clock.sleep(job.interval)
            try:
                now = micros(self._clock.now())
                if await self._database.write(periodic_jobs.claim, job.name, self._owner, now, micros(job.interval)):
                    await self._run(job)
            except Exception as error:
                log.warning("the periodic job %s failed and is repeated: %s", job.name, error)

    async def _run(self, job: PeriodicJob) -> None:
        """Do a job, and record when it ended and why it failed, for `micronova status`."""
        holding = keep_running(partial(self._hold, job), name=f"conductor-{job.name}-hold", clock=self._clock)
        try:
            await job.run()
        except Exception as error:
            await self._ended(job.name, f"{type(error).__name__}: {error}"[:LONGEST_ERROR])
            raise
        finally:
            await end_tasks(holding)
        await self._ended(job.name, "")

    async def _hold(self, job: PeriodicJob) -> None:
        """Keep other conductors from a job that takes longer than its interval."""
        while True:
            await self._clock.sleep(job.interval / 4)
            # For less than an interval: a later time would look like that of a wrong clock.
            until = micros(self._clock.now() + job.interval / 2)
            await self._database.write(periodic_jobs.hold, job.name, self._owner, until)

    async def _ended(self, name: str, error: str) -> None:
        await self._database.write(periodic_jobs.note_end, name, self._owner, micros(self._clock.now()), error)

    async def repair_counters(self) -> None:
        """Correct counters that drifted."""
        await self._database.write(periodic_jobs.forget, "mend")  # as conductors of 0.2 call this job
        for what in await counters.repair_counters(self._database, micros(self._clock.now())):
            log.warning("corrected a counter that had drifted: %s", what)

    async def purge(self) -> None:
        """Delete finished operations and the records of deleted servers that are older than they are kept."""
        now = self._clock.now()
        await self._purge(retention.purge_operations, micros(now - self._keep_finished))
        if self._keep_deleted > 0:
            await self._purge(retention.purge_servers, micros(now - self._keep_deleted))
            await self._purge(task_logs.purge, micros(now - self._keep_deleted))

    async def _purge(self, purge: Callable[..., int], before: int) -> None:
        for _ in range(PURGE_BATCHES):
            if await self._database.write(purge, before) < retention.BATCH:
                return
            await self._clock.sleep(PURGE_PAUSE)
