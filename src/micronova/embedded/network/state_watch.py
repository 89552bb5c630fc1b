"""The desired states that network agents wait for: computed once, and again only when a change concerns the host.

Each process reads the table of changes (`host_changes.py`) once a second, however many agents wait, and at once after
a transaction of its own that notes changes (`Core.write_and_wake`). So the processes of the service need to know
nothing of each other.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.network.host_document import host_document
from micronova.embedded.network.router_placement import Times, is_due, place
from micronova.embedded.network.tables import host_changes
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

POLL_INTERVAL = 1.0  # seconds between two looks for changes by other processes
BATCH_TIME = 0.02  # seconds in which further changes are collected
OVERLAP = 30.0  # seconds that a look reaches back: a transaction may commit that long after it has noted a change
KEEP = 600.0  # seconds for which changes are kept
PURGE_INTERVAL = 60.0  # seconds between deletions of older ones
MAX_AGE = 600.0  # seconds after which a state is computed again although no change was noted
IDLE = 300.0  # seconds without a request after which a host is forgotten
COMPUTATIONS = 4  # that run at once, so that other requests get the database, too


@dataclass
class _Known:
    """What is known of the desired state of a host."""

    fingerprint: str
    topics: frozenset[str]
    computed_at: float  # by the monotonic clock; `asked_at` too
    asked_at: float
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class StateWatch:
    """Computes the desired states of hosts and waits for their changes."""

    def __init__(self, database: Database, clock: Clock, agent_times: Callable[[], Times]) -> None:
        self._database = database
        self._clock = clock
        self._agent_times = agent_times
        self._hosts: dict[str, _Known] = {}
        self._by_topic: dict[str, set[str]] = {}  # topic -> hosts whose states depend on it
        self._computing: set[_Noted] = set()
        self._slots = asyncio.Semaphore(COMPUTATIONS)
        self._noted_here = asyncio.Event()  # this process has noted changes
        self._position: int | None = None  # of the last change that was read; None: no host is known
        self._read_at = 0  # when the changes were last read, in microseconds
        self._seen: dict[int, int] = {}  # position -> time, of the changes that the next look reads again
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    async def start(self) -> None:
        """Start to follow the changes."""
        self._task = asyncio.create_task(self._follow(), name="state-watch")

    async def stop(self) -> None:
        """Stop following the changes."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def end_waits(self) -> None:
        """Let no request wait any more: the service stops."""
        self._ended = True
        self._change(self._hosts)

    def look_soon(self) -> None:
        """Look for changes soon, because this process has noted some."""
        self._noted_here.set()

    async def state(self, host: str, fingerprint: str, wait: float) -> tuple[str, dict[str, Any] | None]:
        """Return the fingerprint of a host's desired state, and the state if the fingerprint is another one.

        Wait for at most `wait` seconds until it is another one.
        """
        deadline = self._clock.monotonic() + wait
        while True:
            known = self._hosts.get(host)
            old = known is None or known.changed.is_set() or self._clock.monotonic() - known.computed_at > MAX_AGE
            if known is None or old or known.fingerprint != fingerprint:
                known, found = await self._compute(host)
                if known.fingerprint != fingerprint:
                    return known.fingerprint, found
            if self._ended:
                return known.fingerprint, None
            known.asked_at = self._clock.monotonic()
            try:
                async with asyncio.timeout(deadline - self._clock.monotonic()):
                    await known.changed.wait()
            except TimeoutError:
                return known.fingerprint, None

    async def _compute(self, host: str) -> tuple[_Known, dict[str, Any]]:
        """Compute a state; it counts as changed if one of its topics is noted meanwhile."""
        if self._position is None:
            self._read_at = self._now()
            self._position = await self._database.read(_last_position)
        noted = _Noted()
        try:
            async with self._slots:
                await self.look(complete=False)  # or earlier changes would count as later than the state
                self._computing.add(noted)
                found = await self._database.read(host_document, host)
        finally:
            self._computing.discard(noted)
        fingerprint = hashlib.blake2b(msgspec.json.encode(found.content), digest_size=16).hexdigest()
        now = self._clock.monotonic()
        known = _Known(fingerprint, found.topics, now, now)
        self._forget(host)
        self._hosts[host] = known
        for topic in found.topics:
            self._by_topic.setdefault(topic, set()).add(host)
        if found.topics & noted.topics:
            known.changed.set()
        return known, found.content

    def _forget(self, host: str) -> None:
        known = self._hosts.pop(host, None)
        if known is None:
            return
        known.changed.set()  # another request for the same host may wait; it looks at what has taken its place
        for topic in known.topics:
            hosts = self._by_topic[topic]
            hosts.discard(host)
            if not hosts:
                del self._by_topic[topic]

    # --- following the changes ---

    async def _follow(self) -> None:
        complete_at = purge_at = self._clock.monotonic()
        while True:
            try:
                async with asyncio.timeout(complete_at - self._clock.monotonic()):
                    await self._noted_here.wait()
                    await asyncio.sleep(BATCH_TIME)
                complete = False
            except TimeoutError:
                complete = True
            self._noted_here.clear()
            try:
                await self.look(complete)
                if self._clock.monotonic() >= purge_at:
                    purge_at = self._clock.monotonic() + PURGE_INTERVAL
                    await self.purge()
            except MicronovaError as error:
                log.warning("cannot read which states of hosts have changed: %s", error)
            except Exception:
                log.exception("cannot read which states of hosts have changed")
            if complete:
                complete_at = self._clock.monotonic() + POLL_INTERVAL

    async def look(self, complete: bool) -> None:
        """Read the new changes; with `complete` also those that were committed late, and place the routers."""
        if self._position is None:
            return
        now = self._now()
        if now - self._read_at > micros(KEEP) / 2:  # some changes may be deleted already
            self._change(list(self._hosts))
        since = self._read_at - micros(OVERLAP) if complete else None
        rows, placing = await self._database.read(_read, self._position, since, self._agent_times())
        if complete:
            self._read_at = now
        for row in rows:
            self._position = max(self._position, row.position)
            if row.position not in self._seen:
                self._seen[row.position] = row.created_at
                self._noted(row.topics)
        if complete:
            horizon = self._read_at - micros(OVERLAP)
            self._seen = {position: at for position, at in self._seen.items() if at >= horizon}
        if placing:
            await self._database.write(place, self._agent_times())
            await self.look(complete=False)

    def _noted(self, topics: Iterable[str]) -> None:
        for noted in self._computing:
            noted.topics.update(topics)
        for topic in topics:
            self._change(self._by_topic.get(topic, ()))

    def _change(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            self._hosts[host].changed.set()

    async def purge(self) -> None:
        """Delete old changes, and forget hosts whose agents do not ask any more."""
        horizon = self._now() - micros(KEEP)
        if await self._database.read(_any_before, horizon):
            await self._database.write(_delete_before, horizon)
        idle = self._clock.monotonic() - IDLE
        for host in [host for host, known in self._hosts.items() if known.asked_at < idle]:
            self._forget(host)
        if not self._hosts and not self._computing:
            self._position = None
            self._seen = {}

    def _now(self) -> int:
        """Return the time as rows have it."""
        return micros(self._clock.now())


@dataclass(eq=False)
class _Noted:
    """The topics that are noted while a state is computed."""

    topics: set[str] = field(default_factory=set)


def _last_position(conn: sa.Connection) -> int:
    return conn.execute(sa.select(sa.func.max(host_changes.c.position))).scalar() or 0


def _read(conn: sa.Connection, position: int, since: int | None, times: Times) -> tuple[list[Any], bool]:
    """Return the changes after a position, and those since a time; and with a time whether routers have to move."""
    c = host_changes.c
    new = c.position > position if since is None else sa.or_(c.position > position, c.created_at >= since)
    rows = list(conn.execute(sa.select(host_changes).where(new).order_by(c.position)))
    return rows, since is not None and is_due(conn, times)


def _any_before(conn: sa.Connection, horizon: int) -> bool:
    c = host_changes.c
    return conn.execute(sa.select(c.position).where(c.created_at < horizon).limit(1)).first() is not None


def _delete_before(conn: sa.Connection, horizon: int) -> None:
    conn.execute(host_changes.delete().where(host_changes.c.created_at < horizon))
