"""The database's clock, for processes on several machines whose own clocks differ.

Leases and heartbeats are times in rows that one process writes and another compares with its own time. On PostgreSQL
all processes use the time of the database server instead of their own. They do not ask for it each time: they measure
how far it is from a clock of this machine that never jumps. A measurement is as exact as half its round trip.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.objects.background import keep_running
from micronova.objects.clock import Clock

log = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between measurements
SAMPLES = 5  # of the first measurement; the best one counts
NOTEWORTHY = 1.0  # seconds; a larger difference between two measurements is logged

_NOW = sa.text("SELECT extract(epoch FROM clock_timestamp())")


def _now(conn: sa.Connection) -> float:
    return float(conn.execute(_NOW).scalar_one())


def now_of(conn: sa.Connection) -> float:
    """Return the time by which rows of a database are dated: of PostgreSQL its own, of a file that of this machine."""
    return _now(conn) if conn.dialect.name == "postgresql" else time.time()


class DatabaseClock:
    """A clock that tells the time of a PostgreSQL server; `start` measures it for the first time."""

    def __init__(self, inner: Clock, database: Database, read_now: Callable[[sa.Connection], float] = _now) -> None:
        """`read_now` asks the database for its time: another one is for the simulation."""
        self._inner = inner
        self._database = database
        self._read_now = read_now
        self._offset = inner.now() - inner.monotonic()
        self._bound = float("inf")  # by how much the offset may be wrong
        self._task: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Return the database's time in seconds since the epoch (UTC)."""
        return self._inner.monotonic() + self._offset

    def monotonic(self) -> float:
        """Return seconds that never go back, to measure durations."""
        return self._inner.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        await self._inner.sleep(seconds)

    async def start(self) -> None:
        """Measure, and go on measuring until `stop`."""
        for _ in range(SAMPLES):
            await self.measure()
        self._task = keep_running(self._run, name="database-clock", clock=self._inner)

    async def stop(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def measure(self) -> None:
        """Measure once; the result counts if it is more exact than the last one, or shows that it is wrong."""
        begin = self._inner.monotonic()
        now = await self._database.read(self._read_now)
        end = self._inner.monotonic()
        offset, bound = now - (begin + end) / 2, (end - begin) / 2
        change = abs(offset - self._offset)
        if bound > self._bound and change <= bound + self._bound:
            return
        if change > NOTEWORTHY and self._bound != float("inf"):
            log.warning("the database's clock was set by %.1f s; times in the database follow it", change)
        self._offset, self._bound = offset, bound

    async def _run(self) -> None:
        while True:
            await self._inner.sleep(INTERVAL)
            try:
                await self.measure()
            except Exception as error:  # noqa: BLE001 - an unreachable database is reported by those who need it
                log.debug("the database's clock could not be measured: %s", error)
