"""The desired states that network agents wait for: parts that are read once, and again only when a change is noted.

Each process reads the table of changes (`change_feed.py`) once a second, however many agents wait, and at once after
a transaction of its own that notes changes (`Core.write_and_wake`). So the processes of the service need to know
nothing of each other. A part (`state_parts.py`) is kept in memory while a host has it in its state, and read once
for all of them.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.network.agent_liveness import AgentTimes
from micronova.embedded.network.change_feed import (
    KEEP,
    Change,
    ChangeFeed,
    Question,
    any_before,
    purge_changes,
    read_changes,
    recent_changes,
)
from micronova.embedded.network.router_placement import is_due, place
from micronova.embedded.network.state_parts import Part, read_parts, too_large
from micronova.embedded.network.topics import OVERSIZED_TOPIC, PartKind, host_topic, kind_and_id
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

POLL_INTERVAL = 1.0  # seconds between two looks for changes by other processes
BATCH_TIME = 0.02  # seconds in which further changes are collected
PURGE_INTERVAL = 60.0  # seconds between deletions of old changes
MAX_AGE = 600.0  # seconds after which a part is read again although no change was noted
IDLE = 300.0  # seconds without a request after which a host is forgotten
READS = 4  # of parts that run at once, so that other requests get the database, too


class Parts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent needs to bring the parts that it has up to date."""

    fingerprint: str
    since: str = ""  # the fingerprint of the state that is changed; without it the parts are all
    parts: dict[str, msgspec.Raw] = {}
    removed: list[str] = []


@dataclass
class _Read:
    """A part as it was read."""

    part: Part
    raw: msgspec.Raw
    digest: bytes
    read_at: float  # by the monotonic clock
    stale: bool = False  # a change was noted


@dataclass
class _Known:
    """What is known of the desired state of a host."""

    asked_at: float  # by the monotonic clock
    requests: int = 0  # that read parts of it
    fingerprint: str = ""
    digests: Mapping[str, bytes] = field(default_factory=dict)  # of its parts, by name
    names: frozenset[str] = frozenset()  # of parts that were read for it
    oversized: msgspec.Raw = field(default_factory=lambda: msgspec.Raw(b"{}"))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    changes: int = 0  # how often it was set


class StateWatch:
    """Keeps the parts of hosts' desired states and waits for their changes."""

    def __init__(self, database: Database, clock: Clock, agent_times: Callable[[], AgentTimes]) -> None:
        self._database = database
        self._clock = clock
        self._agent_times = agent_times
        self._hosts: dict[str, _Known] = {}
        self._parts: dict[str, _Read] = {}
        self._users: dict[str, set[str]] = {}  # part -> hosts that have it in their states
        self._dependent: dict[str, set[str]] = {}  # topic -> parts of other names that depend on it
        self._reading: dict[str, asyncio.Task[None]] = {}  # by part
        self._noted_while_reading: list[set[str]] = []  # a set of topics per read
        self._slots = asyncio.Semaphore(READS)
        self._noted_here = asyncio.Event()  # this process has noted changes
        self._feed = ChangeFeed()
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    async def start(self) -> None:
        """Start to follow the changes."""
        self._task = keep_running(self._follow, name="state-watch", clock=self._clock)

    async def stop(self) -> None:
        """Stop following the changes."""
        await end_tasks(self._task)
        self._task = None

    def end_waits(self) -> None:
        """Let no request wait any more: the service stops."""
        self._ended = True
        self._change(self._hosts)

    def look_soon(self) -> None:
        """Look for changes soon, because this process has noted some."""
        self._noted_here.set()

    # --- answers ---

    async def state(self, host: str, fingerprint: str, wait: float, *, whole: bool = False) -> Parts:
        """Return the parts of a host's desired state that differ from those of the state with this fingerprint.

        Wait for at most `wait` seconds until there are any. With `whole`, return all parts then.
        """
        deadline = self._clock.monotonic() + wait
        before: Mapping[str, bytes] | None = None
        if host not in self._hosts or self._hosts[host].fingerprint != fingerprint:
            await self.look(complete=False)  # who does not wait gets what is true now
        while True:
            known = self._hosts.setdefault(host, _Known(self._clock.monotonic()))
            known.asked_at = self._clock.monotonic()
            if known.fingerprint == fingerprint and fingerprint and not whole:
                before = known.digests
            if self._is_old(known):
                known.requests += 1
                try:
                    await self._update(host, known)
                finally:
                    known.requests -= 1
            if known.fingerprint != fingerprint:
                return self._difference(known, fingerprint, before)
            if self._ended:
                return Parts(fingerprint=known.fingerprint, since=known.fingerprint)
            try:
                async with asyncio.timeout(deadline - self._clock.monotonic()):
                    await known.changed.wait()
            except TimeoutError:
                return Parts(fingerprint=known.fingerprint, since=known.fingerprint)

    def _is_old(self, known: _Known) -> bool:
        oldest = self._clock.monotonic() - MAX_AGE
        return (
            known.changed.is_set()
            or not known.fingerprint
            or any(name not in self._parts or self._parts[name].read_at < oldest for name in known.names)
        )

    def _difference(self, known: _Known, fingerprint: str, before: Mapping[str, bytes] | None) -> Parts:
        held = before or {}
        changed = [name for name, digest in known.digests.items() if held.get(name) != digest]
        return Parts(
            fingerprint=known.fingerprint,
            since="" if before is None else fingerprint,
            parts={name: known.oversized if name == OVERSIZED_TOPIC else self._parts[name].raw for name in changed},
            removed=[name for name in held if name not in known.digests],
        )

    async def _update(self, host: str, known: _Known) -> None:
        """Read what is missing or old of a host's state, and compute its fingerprint.

        The state counts as changed until then, so that other requests for it wait for the same parts. It still does if
        a change was noted meanwhile: the host is among the users of a part before it is read.
        """
        changes = known.changes
        tried: set[str] = set()
        oldest = self._clock.monotonic() - MAX_AGE
        while True:
            names = self._reached(host)
            for name in names - known.names:
                self._users.setdefault(name, set()).add(host)
            known.names |= names
            due = []
            for name in names:
                read = self._parts.get(name)
                if read is None or (name not in tried and (read.stale or read.read_at < oldest)):
                    due.append(name)
            if not due:
                break
            tried.update(due)
            await self._read(due)
        if known.changes == changes:
            known.changed.clear()
        self._release(host, known.names - names)
        known.names = frozenset(names)
        self._conclude(known)

    def _reached(self, host: str) -> set[str]:
        """Return the names of the parts of a host's state, as far as they are known."""
        found = {host_topic(host)}
        front = list(found)
        while front:
            read = self._parts.get(front.pop())
            new = set(read.part.refers_to) - found if read is not None else set()
            found |= new
            front += new
        return found

    def _conclude(self, known: _Known) -> None:
        """Set the fingerprint of a host's state from its parts."""
        groups = {name: id for name in known.names for kind, id in [kind_and_id(name)] if kind == PartKind.MEMBERS}
        left_out = too_large({id: self._parts[name].part.size for name, id in groups.items()})
        digests = {
            name: self._parts[name].digest
            for name in sorted(known.names)
            if self._parts[name].part.content is not None and groups.get(name) not in left_out
        }
        if left_out:
            known.oversized, digests[OVERSIZED_TOPIC] = _encoded(left_out)
        known.digests = digests
        whole = hashlib.blake2b(digest_size=16)
        for name, digest in digests.items():
            whole.update(f"{name} ".encode() + digest)
        fingerprint, known.fingerprint = known.fingerprint, whole.hexdigest()
        if fingerprint not in ("", known.fingerprint):
            known.changed.set()  # other requests for the same host may wait

    def _release(self, host: str, names: Iterable[str]) -> None:
        """Remove a host from the users of parts, and forget parts without users."""
        for name in names:
            users = self._users[name]
            users.discard(host)
            if not users:
                del self._users[name]
                self._drop(name)

    def _drop(self, name: str) -> None:
        read = self._parts.pop(name, None)
        for topic in read.part.depends_on if read is not None else ():
            self._dependent[topic].discard(name)
            if not self._dependent[topic]:
                del self._dependent[topic]

    # --- reading parts ---

    async def _read(self, names: Iterable[str]) -> None:
        """Read parts; if another request reads one of them already, wait for that."""
        tasks: set[asyncio.Task[None]] = set()
        new: list[str] = []
        for name in names:
            task = self._reading.get(name)
            if task is None:
                new.append(name)
            else:
                tasks.add(task)
        if new:
            task = asyncio.create_task(self._read_now(sorted(new)))
            task.add_done_callback(lambda each: each.cancelled() or each.exception())  # all requests may be cancelled
            self._reading.update(dict.fromkeys(new, task))
            tasks.add(task)
        await asyncio.wait(tasks)  # all end, even if this request is cancelled
        for task in tasks:
            task.result()

    async def _read_now(self, names: list[str]) -> None:
        noted: set[str] = set()
        try:
            async with self._slots:
                if not self._feed.is_open:
                    now = self._now()
                    self._feed.open(await self._database.read(recent_changes, now), now)
                await self.look(complete=False)  # or earlier changes would count as later than the parts
                self._noted_while_reading.append(noted)
                try:
                    found = await self._database.read(read_parts, names)
                finally:
                    self._noted_while_reading = [each for each in self._noted_while_reading if each is not noted]
        finally:
            for name in names:
                del self._reading[name]
        read_at = self._clock.monotonic()
        for name, part in found.items():
            self._keep(name, part, read_at, stale=not noted.isdisjoint((name, *part.depends_on)))

    def _keep(self, name: str, part: Part, read_at: float, stale: bool) -> None:
        before = self._parts.get(name)
        self._drop(name)
        if name not in self._users:
            return  # its last user was forgotten meanwhile
        raw, digest = _encoded(part.content)
        self._parts[name] = _Read(part, raw, digest, read_at, stale)
        for topic in part.depends_on:
            self._dependent.setdefault(topic, set()).add(name)
        references = before is not None and before.part.refers_to == part.refers_to
        if stale or (before is not None and (before.digest != digest or not references)):
            self._change(self._users[name])

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
        """Read the new changes; including, with `complete`, those that were committed late, and place the routers."""
        async with self._looking:
            if not self._feed.is_open:
                return
            now = self._now()
            if self._feed.has_lost_some(now):
                self._note([*self._parts, *self._dependent])
            asked = self._feed.question(complete)
            changes, placing = await self._database.read(_look, asked, self._agent_times() if complete else None)
            self._note(self._feed.new_topics(changes, asked, now))
        if placing:
            await self._database.write(place, self._agent_times())
            await self.look(complete=False)

    def _note(self, topics: Iterable[str]) -> None:
        for noted in self._noted_while_reading:
            noted.update(topics)
        for topic in topics:
            for name in (topic, *self._dependent.get(topic, ())):
                read = self._parts.get(name)
                if read is not None:
                    read.stale = True
                self._change(self._users.get(name, ()))

    def _change(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            if (known := self._hosts.get(host)) is not None:
                known.changes += 1
                known.changed.set()

    async def purge(self) -> None:
        """Delete old changes, and forget hosts whose agents do not ask any more."""
        horizon = self._now() - micros(KEEP)
        if await self._database.read(any_before, horizon):
            await self._database.write(purge_changes, horizon)
        idle = self._clock.monotonic() - IDLE
        # A read may take as long as an outage: the parts of a host for which one runs are not dropped.
        for host in [host for host, known in self._hosts.items() if known.asked_at < idle and not known.requests]:
            known = self._hosts.pop(host)
            known.changed.set()
            self._release(host, known.names)
        if not self._hosts and not self._reading:
            self._feed.close()

    def _now(self) -> int:
        """Return the time as rows have it."""
        return micros(self._clock.now())


def _encoded(content: Any) -> tuple[msgspec.Raw, bytes]:
    raw = msgspec.json.encode(content)
    return msgspec.Raw(raw), hashlib.blake2b(raw, digest_size=16).digest()


def _look(conn: sa.Connection, asked: Question, times: AgentTimes | None) -> tuple[list[Change], bool]:
    """Return the changes, and with times whether the routers have to be placed."""
    return read_changes(conn, asked), times is not None and is_due(conn, times)
