"""The row of a process in the compute database, by which `micronova status` knows it.

Processes with the compute database have one from their start. Other control processes (embedded services, console) have
one if their settings name the database of the region. They do without it if it does not answer, or if it has no compute
service: what they do for users needs no record.
"""

import importlib.metadata
import logging
import os
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from micronova.cli.connections import open_and_ask
from micronova.cli.process_name import ONE_OF_A_NAME
from micronova.db import processes, schema
from micronova.db.secrets import key_id
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.objects.ids import new_uuid

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from micronova.cli.wiring import Process
    from micronova.db.engine import Database

log = logging.getLogger(__name__)

INTERVAL: Final = 30.0  # seconds between two signs of life
FIRST_PAUSE: Final = 2.0  # seconds until a process that could not be recorded tries again; then longer, to INTERVAL
SEALING_ROLES: Final = frozenset({"api", "conductor", "identity", "volume"})
"""Roles that seal secrets with default.secret_key."""


class RecordedProcess:
    """Records that a process runs, again and again, and that it stops."""

    def __init__(self, process: "Process", database: "Database") -> None:
        self._database = database
        self._clock = process.clock
        self._record = processes.ProcessRecord(
            id=new_uuid(process.random),
            host=process.name[:255],
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

    def read_certificates(self) -> None:
        """It has no connection of its own."""

    async def _forever(self) -> None:
        warned = False
        while True:
            await self._clock.sleep(INTERVAL)
            await self._seen()
            warned = warned or await self._warn_of_twins()

    async def _warn_of_twins(self) -> bool:
        """Warn of a process on another machine that has this one's row among services; return whether there is one.

        One that was killed shows no sign of life after the start of this one, which may have taken its place.
        """
        if not set(self._record["roles"].split()) & ONE_OF_A_NAME:
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


class RecordedService:
    """The same for a process without the compute database, which has a connection of its own for this alone."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._database: Database | None = None
        self._recorded: RecordedProcess | None = None
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to record the process as soon as the compute database can be used."""
        self._loop = keep_running(self._until_recorded, name="process-record", clock=self._process.clock)

    async def stop(self) -> None:
        """Remove the row."""
        await end_tasks(self._loop)
        if self._recorded is not None:
            await self._recorded.stop()
        if self._database is not None:
            await self._database.close()

    def read_certificates(self) -> "Callable[[], None] | None":
        """Read the certificates of the connection anew; return what takes them into use."""
        return None if self._database is None else self._database.read_certificates()

    async def _until_recorded(self) -> None:
        said, pause = "", FIRST_PAUSE
        while self._recorded is None:
            try:
                await self._record()
            except (MicronovaError, sa.exc.SQLAlchemyError) as error:
                reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
                if reason != said:
                    log.info("`micronova status` and `micronova check` do not know this process yet: %s", reason)
                    said = reason
                await self._process.clock.sleep(pause)
                pause = min(2 * pause, INTERVAL)

    async def _record(self) -> None:
        """Record the process; raise an error if the compute database cannot be used."""
        if self._database is None:
            self._database = await open_and_ask(self._process.settings.database.connection, None, 1)
        at = await self._database.read(schema.current)
        needed = schema.head("micronova.db.migrations")
        if at is None or at < needed:
            raise MicronovaError(
                f"the tables of the compute service are {f'at revision {at}' if at else 'missing'} in the database, "
                f"and this release needs {needed}: run `micronova db upgrade --config FILE`"
            )
        self._recorded = RecordedProcess(self._process, self._database)
        try:
            await self._recorded.start()
        except BaseException:
            self._recorded = None  # nothing is recorded
            raise
