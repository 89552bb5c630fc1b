"""Keeps the host table up to date: reads changes when a decision needs them, and all hosts periodically.

No read grows with the fleet: changes are read once, the last heartbeats of hosts that are late only when there are
others, and everything in parts, because PostgreSQL's rows are decoded in the event loop.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext

from micronova.db import host_states
from micronova.db.engine import Database
from micronova.db.host_states import END, SLOT, Digest
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.scheduler.host_table import HostTable

log = logging.getLogger(__name__)

OVERLAP = 5.0  # seconds that are read again, because clocks differ and commits may be late
LONG_OVERLAP = 60.0  # seconds that are read again now and then: some commits are later
LONG_OVERLAP_INTERVAL = 5.0  # seconds between two reads of so much
REFUSED_INTERVAL = 2.0  # seconds between two of them if requests find no host, however many they are
RELOAD_INTERVAL = 60.0  # seconds; finds deleted hosts, and changes that were missed
RELOAD_SHARE = 0.02  # of the time may be spent on reading all hosts: a larger fleet is read less often
LONGEST_RELOAD_INTERVAL = 600.0  # seconds, however long it takes
CHUNK = 500  # rows that are read and applied before other tasks may run

NEVER = float("-inf")


class _Seen:
    """The rows that were read, by the slot of time in which they changed."""

    def __init__(self) -> None:
        self._times: dict[Hashable, int] = {}
        self._slots: dict[int, dict[Hashable, int]] = {}

    def note(self, key: Hashable, changed_at: int) -> None:
        """Note a row that was read with its time of change."""
        before = self._times.get(key)
        if before == changed_at:
            return
        if before is not None:
            del self._slots[before // SLOT][key]
        self._times[key] = changed_at
        self._slots.setdefault(changed_at // SLOT, {})[key] = changed_at

    def forget(self, begin: int, end: int) -> None:
        """Forget the rows of some slots."""
        for slot in [slot for slot in self._slots if begin <= slot < end]:
            for key in self._slots.pop(slot):
                del self._times[key]

    def unread(self, digests: Mapping[int, Digest], since: int) -> list[int]:
        """Return the slots with rows that were not read, in order."""
        nothing: dict[Hashable, int] = {}
        found = []
        for slot, digest in sorted(digests.items()):
            known = self._slots.get(slot, nothing)
            if digest != (len(known), sum(known.values()) - since * len(known)):
                found.append(slot)
        return found


def _runs(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Join slots that follow each other: (first, after the last)."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs


@contextmanager
def _or_later() -> Iterator[None]:
    """Turn an unexpected error into Unavailable: no request is refused because hosts cannot be read."""
    try:
        yield
    except MicronovaError:
        raise
    except Exception as error:
        log.exception("hosts cannot be read; requests that need them are tried again later")
        raise Unavailable("The scheduler cannot read what hosts have at the moment. Try again later.") from error


class HostFeed:
    """Reads hosts into a table; requests that wait at the same time share one read."""

    def __init__(
        self, database: Database, clock: Clock, *, default_zone: str, heartbeat_read_interval: float = 5.0
    ) -> None:
        self.table = HostTable(clock.monotonic)
        self._database = database
        self._clock = clock
        self._default_zone = default_zone
        # Not every read includes heartbeats: a host is not down as soon as one is late.
        self._heartbeat_read_interval = heartbeat_read_interval
        self._nodes_seen, self._amounts_seen, self._topologies_seen = _Seen(), _Seen(), _Seen()
        # Wall clock when the last read began: of changes, of heartbeats, of changes long ago, of everything.
        self._as_of = self._heartbeats_as_of = self._long_ago_as_of = self._all_as_of = NEVER
        self._reload_took = 0.0  # seconds
        self._heartbeats_due = self._long_ago_due = False
        self._silent: set[str] = set()  # the hosts that were late at the last look, and the digest of their heartbeats
        self._silent_digest: Digest | None = None
        self._outdated = False
        self._outdated_nodes: set[str] = set()
        self._unconfirmed: Counter[str] = Counter()  # nodes: decisions whose use of them is not known to be claimed
        self._reading = asyncio.Lock()

    async def refresh(self, max_age: float) -> None:
        """Read changes, unless that was done within `max_age` seconds."""
        await self._as_of_at_least(self._now() - max_age)

    async def refresh_fully(self) -> None:
        """Read everything that has changed until now, so that no request is refused because of old data.

        However many requests are refused, not all hosts are read: a full cloud would be read all the time.
        """
        moment = self._now()
        self._heartbeats_due |= self._heartbeats_as_of < moment - REFUSED_INTERVAL
        self._long_ago_due |= self._long_ago_as_of < moment - REFUSED_INTERVAL
        if self._unconfirmed:
            self.mark_outdated(self._unconfirmed)  # claims under way may be refused
        await self._as_of_at_least(moment)

    async def reload_all(self) -> None:
        """Read all hosts. Changes can be read between two pages, so that no decision waits for all of them."""
        if self._all_as_of == NEVER:  # there is nothing to decide with before the end
            async with self._reading:
                await self._read_all()
        else:
            await self._read_all(self._reading)

    async def reload_nodes(self, node_uuids: Collection[str]) -> None:
        """Read some nodes whose rows in the table are wrong; if that fails, the next refresh reads them."""
        try:
            with _or_later():
                await self._reload_nodes(node_uuids)
        except BaseException:
            self.mark_outdated(node_uuids)
            raise
        # Another task may have applied newer changes of these nodes meanwhile, which are not read again.
        self._outdated_nodes |= set(node_uuids)

    def _reload_interval(self) -> float:
        """Return the seconds between two reads of all hosts."""
        return max(RELOAD_INTERVAL, min(self._reload_took / RELOAD_SHARE, LONGEST_RELOAD_INTERVAL))

    def mark_outdated(self, node_uuids: Collection[str]) -> None:
        """Make the next refresh read changes in any case, and these nodes even if they did not change."""
        self._outdated_nodes |= set(node_uuids)
        self._outdated = True

    @contextmanager
    def unconfirmed(self, node_uuids: Collection[str]) -> Iterator[None]:
        """Enter while the table counts use of nodes that the database may not have.

        Requests that find no host meanwhile read these nodes. Whatever ends this with an error marks them as outdated.
        """
        self._unconfirmed.update(node_uuids)
        try:
            yield
        except BaseException:
            self.mark_outdated(node_uuids)
            raise
        finally:
            self._unconfirmed -= Counter(node_uuids)

    async def run(self) -> None:
        """Read all hosts periodically, until cancelled."""
        while True:
            await self._clock.sleep(self._reload_interval())
            try:
                await self.reload_all()
            except Exception:  # the database may be unreachable for a while; decisions then fail by themselves
                log.exception("reading all hosts failed; the next attempt is in %g s", self._reload_interval())

    def _now(self) -> float:
        """Return the time. If the clock was set back, what was read counts as read now, or as never read."""
        now = self._clock.now()
        if now < self._as_of:
            # Changes from now on have times before those that were read already; the overlap finds a few seconds.
            read = now if self._as_of - now < OVERLAP / 2 else NEVER
            self._as_of, self._heartbeats_as_of = min(self._as_of, read), min(self._heartbeats_as_of, read)
            self._long_ago_as_of, self._all_as_of = min(self._long_ago_as_of, read), min(self._all_as_of, read)
        return now

    async def _as_of_at_least(self, moment: float) -> None:
        if self._as_of > moment and not self._outdated:  # a read at the very moment may have missed a commit
            return
        async with self._reading:
            if self._as_of <= moment or self._outdated:  # another task may have read while this one waited
                with _or_later():
                    await self._read_changes()

    async def _read_changes(self) -> None:
        begin = self._now()
        if self._all_as_of == NEVER:
            await self._read_all()
            return
        with_heartbeats = self._heartbeats_due or begin - self._heartbeats_as_of >= self._heartbeat_read_interval
        long_ago = self._long_ago_due or begin - self._long_ago_as_of >= LONG_OVERLAP_INTERVAL
        self._long_ago_due = False
        outdated, self._outdated_nodes, self._outdated = self._outdated_nodes, set(), False
        try:
            await self._take_changes(begin, with_heartbeats, long_ago, outdated)
        except BaseException:
            self._long_ago_due |= long_ago
            self.mark_outdated(outdated)
            raise

    async def _take_changes(self, begin: float, with_heartbeats: bool, long_ago: bool, outdated: set[str]) -> None:
        oldest, newest = micros(self._as_of - LONG_OVERLAP) // SLOT, micros(self._as_of) // SLOT
        first = oldest if long_ago else micros(self._as_of - OVERLAP) // SLOT
        # A host that is not among the silent ones has been heard of since. The next read comes before this is so long
        # ago that the host would count as down.
        heard_since = begin - 2 * self._heartbeat_read_interval
        changes = await self._database.read(
            host_states.load_changes, first * SLOT, CHUNK, micros(heard_since) if with_heartbeats else None
        )
        if changes.silent is not None:
            if changes.silent != self._silent_digest:
                self._silent = await self._read_silent(micros(heard_since))
                self._silent_digest = changes.silent
            self.table.set_heard_since(heard_since, but=self._silent)
        page = changes.services
        self.table.set_services(row[:4] for row in page)
        while len(page) == CHUNK:
            host, *_, changed_at = page[-1]
            page = await self._database.read(host_states.load_changed_services, (changed_at, host), CHUNK)
            self.table.set_services(row[:4] for row in page)
        unknown: set[str] = set()
        for seen, digests, read in (
            (self._nodes_seen, changes.nodes, self._read_nodes),
            (self._amounts_seen, changes.amounts, self._read_amounts),
            (self._topologies_seen, changes.topologies, self._read_topologies),
        ):
            seen.forget(0, oldest)
            # The newest changes first: a row that has changed again is then not missing in its former slot.
            if any(slot >= newest for slot in seen.unread(digests, first * SLOT)):
                seen.forget(newest, END)
                unknown |= await read(newest * SLOT, END)
            for slot, end in _runs(slot for slot in seen.unread(digests, first * SLOT) if slot < newest):
                seen.forget(slot, end)
                unknown |= await read(slot * SLOT, end * SLOT)
        self._as_of = begin
        if with_heartbeats:
            self._heartbeats_as_of, self._heartbeats_due = begin, False
        if long_ago:
            self._long_ago_as_of = begin
        await self._reload_nodes(outdated | unknown)

    async def _read_silent(self, since: int) -> set[str]:
        """Read the services that were not heard of since a time; return their hosts."""
        hosts: set[str] = set()
        after, more = "", True
        while more:
            page = await self._database.read(host_states.load_silent_services, since, after, CHUNK)
            self.table.set_services(row[:4] for row in page)
            hosts.update(row[0] for row in page)
            if page:
                after = page[-1][0]
            more = len(page) == CHUNK
        return hosts

    async def _read_nodes(self, since: int, until: int) -> set[str]:
        """Read the nodes that changed between two times; there are no unknown ones among them."""
        mark, more = (since, ""), True
        while more:
            page = await self._database.read(
                host_states.load_changed_nodes, mark, until, CHUNK, default_zone=self._default_zone
            )
            self.table.update(page)
            for state in page:
                self._nodes_seen.note(state.node_uuid, state.changed_at)
                mark = (state.changed_at, state.node_uuid)
            more = len(page) == CHUNK
        return set()

    async def _read_amounts(self, since: int, until: int) -> set[str]:
        """Read the amounts that changed between two times; return the nodes that are not in the table."""
        mark, more, unknown = (since, "", ""), True, set[str]()
        while more:
            page = await self._database.read(host_states.load_changed_amounts, mark, until, CHUNK)
            unknown |= self.table.set_amounts(row[:8] for row in page)
            for node, name, *_, changed_at in page:
                self._amounts_seen.note((node, name), changed_at)
                mark = (changed_at, node, name)
            more = len(page) == CHUNK
        return unknown

    async def _read_topologies(self, since: int, until: int) -> set[str]:
        """Read the topologies that changed between two times; return the nodes that are not in the table."""
        mark, more, unknown = (since, ""), True, set[str]()
        while more:
            page = await self._database.read(host_states.load_changed_topologies, mark, until, CHUNK)
            unknown |= self.table.set_topologies(row[:3] for row in page)
            for node, *_, changed_at in page:
                self._topologies_seen.note(node, changed_at)
                mark = (changed_at, node)
            more = len(page) == CHUNK
        return unknown

    async def _reload_nodes(self, node_uuids: Collection[str]) -> None:
        wanted = sorted(node_uuids)
        for first in range(0, len(wanted), CHUNK):
            part = wanted[first : first + CHUNK]
            states = await self._database.read(host_states.load_hosts, part, default_zone=self._default_zone)
            self.table.update(states)
            self.table.remove(set(part) - {state.node_uuid for state in states})

    async def _read_all(self, turns: AbstractAsyncContextManager[object] | None = None) -> None:
        """Read all hosts page by page; `turns` is entered for each page, so that other reads may come in between.

        Each page is read and applied in one turn: it is never older than what another read has applied before.
        """
        turn = nullcontext() if turns is None else turns
        begin, started = self._now(), self._clock.monotonic()
        found: set[str] = set()
        after, more = "", True
        while more:
            async with turn:
                page = await self._database.read(host_states.load_page, after, CHUNK, default_zone=self._default_zone)
                self.table.update(page)
            found.update(state.node_uuid for state in page)
            more = len(page) == CHUNK
            if page:
                after = page[-1].node_uuid
            await asyncio.sleep(0)  # on SQLite rows are decoded in another thread, and the table is updated here
        async with turn:
            # They are gone, or came after the page where they would have been.
            await self._reload_nodes({*self.table.uuids, *self.table.left_out} - found)
        self._as_of, self._heartbeats_as_of = max(self._as_of, begin), max(self._heartbeats_as_of, begin)
        self._long_ago_as_of, self._all_as_of = max(self._long_ago_as_of, begin), begin
        self._reload_took = self._clock.monotonic() - started
