"""Keeps the host table up to date: reads changes when a decision needs them, and all hosts periodically."""

import asyncio
import logging
from collections.abc import Collection

from micronova.db import host_states
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.scheduler.host_table import HostTable

log = logging.getLogger(__name__)

OVERLAP = 5.0  # seconds that are read again, because clocks differ and commits may be late
RELOAD_INTERVAL = 60.0  # seconds; finds deleted hosts, and changes that were missed
LEAST_RELOAD_INTERVAL = 2.0  # seconds, however many requests find no host
RELOAD_SHARE = 0.02  # of the time may be spent on reading all hosts: a larger fleet is read less often
LONGEST_RELOAD_INTERVAL = 600.0  # seconds, however long it takes
CHUNK = 500  # hosts that are updated before other tasks may run

NEVER = float("-inf")


class HostFeed:
    """Reads hosts into a table; requests that wait at the same time share one read."""

    def __init__(self, database: Database, clock: Clock, *, default_zone: str, heartbeat_interval: float = 5.0) -> None:
        self.table = HostTable()
        self._database = database
        self._clock = clock
        self._default_zone = default_zone
        # Not every read includes heartbeats: they are many, and a host is not down as soon as one is late.
        self._heartbeat_interval = heartbeat_interval
        # Wall clock when the last read began: of changes, of heartbeats, of everything.
        self._as_of = self._heartbeats_as_of = self._all_as_of = NEVER
        self._reload_took = 0.0  # seconds
        self._heartbeats_due = False
        self._outdated = False
        self._outdated_nodes: set[str] = set()
        self._reading = asyncio.Lock()

    async def refresh(self, max_age: float) -> None:
        """Read changes, unless that was done within `max_age` seconds."""
        await self._as_of_at_least(self._now() - max_age)

    async def refresh_fully(self) -> None:
        """Read everything that is committed now, so that no request is refused because of old data."""
        moment = self._now()
        least = self._reload_interval(LEAST_RELOAD_INTERVAL)
        if self._all_as_of < moment - least:
            await self.reload_all(at_most_every=least)
        elif self._heartbeats_as_of < moment - LEAST_RELOAD_INTERVAL:
            self._heartbeats_due = True
        await self._as_of_at_least(moment)

    async def reload_all(self, *, at_most_every: float = 0.0) -> None:
        """Read all hosts, unless that was done within `at_most_every` seconds."""
        needed = self._now() - at_most_every
        async with self._reading:
            if self._all_as_of <= needed:
                await self._read_all()

    async def reload_nodes(self, node_uuids: Collection[str]) -> None:
        """Read some nodes whose rows in the table are wrong."""
        states = await self._database.read(host_states.load_hosts, node_uuids, default_zone=self._default_zone)
        self.table.update(states)
        self.table.remove(set(node_uuids) - {state.node_uuid for state in states})

    def _reload_interval(self, least: float) -> float:
        """Return the seconds between two reads of all hosts, at least so many."""
        return max(least, min(self._reload_took / RELOAD_SHARE, LONGEST_RELOAD_INTERVAL))

    def mark_outdated(self, node_uuids: Collection[str]) -> None:
        """Make the next refresh read changes in any case, and these nodes even if they did not change."""
        self._outdated_nodes |= set(node_uuids)
        self._outdated = True

    async def run(self) -> None:
        """Read all hosts periodically, until cancelled."""
        while True:
            await self._clock.sleep(self._reload_interval(RELOAD_INTERVAL))
            try:
                await self.reload_all()
            except Exception:  # the database may be unreachable for a while; decisions then fail by themselves
                log.exception("Reading all hosts failed; the next try is in %s seconds", RELOAD_INTERVAL)

    def _now(self) -> float:
        """Return the time. If the clock was set back, what was read counts as read now, or as never read."""
        now = self._clock.now()
        if now < self._as_of:
            # Changes from now on have times before those that were read already; the overlap finds a few seconds.
            read = now if self._as_of - now < OVERLAP / 2 else NEVER
            self._as_of, self._heartbeats_as_of = min(self._as_of, read), min(self._heartbeats_as_of, read)
            self._all_as_of = min(self._all_as_of, read)
        return now

    async def _as_of_at_least(self, moment: float) -> None:
        if self._as_of > moment and not self._outdated:  # a read at the very moment may have missed a commit
            return
        async with self._reading:
            if self._as_of <= moment or self._outdated:  # another task may have read while this one waited
                await self._read_changes()

    async def _read_changes(self) -> None:
        begin = self._now()
        if self._all_as_of == NEVER:
            await self._read_all()
            return
        with_heartbeats = self._heartbeats_due or begin - self._heartbeats_as_of >= self._heartbeat_interval
        outdated, self._outdated_nodes, self._outdated = self._outdated_nodes, set(), False
        try:
            await self._take_changes(begin, with_heartbeats, outdated)
        except BaseException:
            self.mark_outdated(outdated)
            raise

    async def _take_changes(self, begin: float, with_heartbeats: bool, outdated: set[str]) -> None:
        changes = await self._database.read(
            host_states.load_changes,
            micros(self._as_of - OVERLAP),
            micros(self._heartbeats_as_of - OVERLAP) if with_heartbeats else None,
            default_zone=self._default_zone,
        )
        self.table.update(changes.states)
        self.table.set_services(changes.services)
        unknown = self.table.set_amounts(changes.amounts)
        self._as_of = begin
        if with_heartbeats:
            self._heartbeats_as_of, self._heartbeats_due = begin, False
        if outdated | unknown:
            await self.reload_nodes(outdated | unknown)

    async def _read_all(self) -> None:
        begin, started = self._now(), self._clock.monotonic()
        states = await self._database.read(host_states.load_hosts, default_zone=self._default_zone)
        for first in range(0, len(states), CHUNK):
            self.table.update(states[first : first + CHUNK])
            await asyncio.sleep(0)
        self.table.remove(set(self.table.uuids) - {state.node_uuid for state in states})
        self._as_of = self._heartbeats_as_of = self._all_as_of = begin
        self._reload_took = self._clock.monotonic() - started
