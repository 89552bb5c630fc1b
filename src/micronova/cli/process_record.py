"""The row of a process in the compute database, by which `micronova status` knows it."""

import importlib.metadata
import logging
import os
from typing import TYPE_CHECKING, Final

from micronova.db import processes
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import micros
from micronova.objects.errors import Unavailable
from micronova.objects.ids import new_uuid

if TYPE_CHECKING:
    import asyncio

    from micronova.cli.wiring import Process
    from micronova.db.engine import Database

log = logging.getLogger(__name__)

INTERVAL: Final = 30.0  # seconds between two signs of life


class RecordedProcess:
    """Records that a process runs, again and again, and that it stops."""

    def __init__(self, process: "Process", database: "Database") -> None:
        self._database = database
        self._clock = process.clock
        self._record = processes.ProcessRecord(
            id=new_uuid(process.random),
            host=process.host[:255],
            pid=os.getpid(),
            roles=" ".join(process.roles),
            release=importlib.metadata.version("micronova")[:64],
            started_at=micros(process.clock.now()),
        )
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Record the process, and begin to do that again and again."""
        await self._seen()
        self._loop = keep_running(self._forever, name="process-record", clock=self._clock)

    async def stop(self) -> None:
        """Remove the row; if the database is away, it is listed as silent for a day."""
        await end_tasks(self._loop)
        try:
            await self._database.write(processes.stopped, self._record["id"])
        except Unavailable as error:
            log.warning("that this process stops is not recorded, `micronova status` lists it as silent: %s", error)

    async def _forever(self) -> None:
        while True:
            await self._clock.sleep(INTERVAL)
            await self._seen()

    async def _seen(self) -> None:
        try:
            await self._database.write(processes.seen, self._record, micros(self._clock.now()))
        except Unavailable as error:
            log.warning("that this process runs is not recorded, which is repeated in %g s: %s", INTERVAL, error)
