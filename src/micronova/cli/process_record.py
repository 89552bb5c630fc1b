"""The row of a process in the compute database, by which `micronova status` knows it."""

import importlib.metadata
import logging
import os
from typing import TYPE_CHECKING, Final

from micronova.db import processes
from micronova.db.secrets import key_id
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
SEALING_ROLES: Final = frozenset({"api", "conductor", "identity", "volume"})
"""Roles that seal secrets with default.secret_key."""
ONE_OF_A_HOST: Final = frozenset({"conductor", "scheduler"})
"""Roles that have a row of their own among services, which default.host names. Workers of an API share a host."""


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
            secret_key_id=key_id(process.secret_keys()[0]) if set(process.roles) & SEALING_ROLES else None,
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
        warned = False
        while True:
            await self._clock.sleep(INTERVAL)
            await self._seen()
            warned = warned or await self._warn_of_twins()

    async def _warn_of_twins(self) -> bool:
        """Warn of a process that has the row of this one among services; return whether there is one.

        One that was killed shows no sign of life after the start of this one, which may have taken its place.
        """
        if not set(self._record["roles"].split()) & ONE_OF_A_HOST:
            return False
        try:
            twins = await self._database.read(processes.twins, self._record)
        except Unavailable:
            return False
        for each in twins:
            log.warning(
                "process %d has the roles (%s) and the host name (%s) of this process, so both share a row of "
                "`openstack compute service list`, which stays up if one of them dies: set default.host to another "
                "name in each",
                each.pid,
                each.roles,
                each.host,
            )
        return bool(twins)

    async def _seen(self) -> None:
        try:
            await self._database.write(processes.seen, self._record, micros(self._clock.now()))
        except Unavailable as error:
            log.warning("that this process runs is not recorded, which is repeated in %g s: %s", INTERVAL, error)
