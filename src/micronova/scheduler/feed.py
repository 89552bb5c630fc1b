"""What keeps the host table close to the database: changes when needed, all of it from time to time."""

import asyncio
import logging
from collections.abc import Collection

from micronova.db import host_states
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.scheduler.host_table import HostTable

log = logging.getLogger(__name__)

OVERLAP = 5.0  # seconds by which clocks may differ and commits may be late without a change being missed
COMPLETE_INTERVAL = 60.0  # what slipped through, hosts that were deleted: mended at the latest then
LEAST_COMPLETE_INTERVAL = 2.0  # however many requests fail for want of room
CHUNK = 500  # hosts that are taken over without letting others work

NEVER = float("-inf")


class HostFeed:
    """Reads hosts into a table; any number of requests may wait for one and the same read."""

    def __init__(self, database: Database, clock: Clock, *, default_zone: str, heartbeat_interval: float = 5.0) -> None:
        self.table = HostTable()
        self._database = database
        self._clock = clock
        self._default_zone = default_zone
        # Heartbeats are many, and a host is not down the moment it is late: they are not read every time.
        self._heartbeat_interval = heartbeat_interval
        # Wall clock at the begin of the last read: of changes, of heartbeats, of everything.
        self._as_of = self._heard_as_of = self._complete_as_of = NEVER
        self._in_doubt = False
        self._doubtful: set[str] = set()
        self._reading = asyncio.Lock()

    async def at_most_behind(self, seconds: float) -> None:
        """Take in changes, unless that was done within so many seconds."""
        await self._as_of_at_least(self._clock.now() - seconds)

    async def before_refusing(self) -> None:
        """Take in all that was committed by now: nobody is told "no room" on old knowledge."""
        moment = self._clock.now()
        if self._complete_as_of < moment - LEAST_COMPLETE_INTERVAL:
            await self.complete(at_most_every=LEAST_COMPLETE_INTERVAL)
        await self._as_of_at_least(moment)

    async def complete(self, *, at_most_every: float = 0.0) -> None:
        """Read everything anew, unless that was done a moment ago."""
        needed = self._clock.now() - at_most_every
        async with self._reading:
            if self._complete_as_of <= needed:
                await self._read_all()

    async def reload(self, node_uuids: Collection[str]) -> None:
        """Read some nodes anew, because what we believe of them proved wrong."""
        states = await self._database.read(host_states.load_hosts, node_uuids, default_zone=self._default_zone)
        self.table.update(states)
        self.table.remove(set(node_uuids) - {state.node_uuid for state in states})

    def doubt(self, node_uuids: Collection[str] = ()) -> None:
        """Have the next decision look at the database first, and at these nodes even if unchanged."""
        self._doubtful |= set(node_uuids)
        self._in_doubt = True

    async def run(self) -> None:
        """Read everything from time to time, until cancelled."""
        while True:
            await self._clock.sleep(COMPLETE_INTERVAL)
            try:
                await self.complete()
            except Exception:  # the database may be away for a while; decisions then fail on their own
                log.exception("Reading all hosts failed.")

    async def _as_of_at_least(self, moment: float) -> None:
        if self._as_of >= moment and not self._in_doubt:
            return
        async with self._reading:
            if self._as_of < moment or self._in_doubt:  # not done by whoever read while we waited
                await self._read_changes()

    async def _read_changes(self) -> None:
        begin = self._clock.now()
        if self._complete_as_of == NEVER:
            await self._read_all()
            return
        hear = begin - self._heard_as_of >= self._heartbeat_interval
        doubtful, self._doubtful, self._in_doubt = self._doubtful, set(), False
        try:
            await self._take_changes(begin, hear, doubtful)
        except BaseException:
            self.doubt(doubtful)
            raise

    async def _take_changes(self, begin: float, hear: bool, doubtful: set[str]) -> None:
        changes = await self._database.read(
            host_states.load_changes,
            micros(self._as_of - OVERLAP),
            micros(self._heard_as_of - OVERLAP) if hear else None,
            default_zone=self._default_zone,
        )
        self.table.update(changes.states)
        self.table.set_services(changes.services)
        unknown = self.table.set_amounts(changes.amounts)
        self._as_of = begin
        if hear:
            self._heard_as_of = begin
        if doubtful | unknown:
            await self.reload(doubtful | unknown)

    async def _read_all(self) -> None:
        begin = self._clock.now()
        states = await self._database.read(host_states.load_hosts, default_zone=self._default_zone)
        for first in range(0, len(states), CHUNK):
            self.table.update(states[first : first + CHUNK])
            await asyncio.sleep(0)
        self.table.remove(set(self.table.uuids) - {state.node_uuid for state in states})
        self._as_of = self._heard_as_of = self._complete_as_of = begin
