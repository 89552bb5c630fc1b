"""Events for compute: an outbox in a service's database, sent in batches as `os-server-external-events`.

A change and its events are one transaction. The process that wrote the events sends them within milliseconds, many in
one request, and then deletes the rows. If compute did not answer, or the process died, the next sweep of any process
takes the rows: a row belongs to the process that moved its `not_before` into the future. A process that waits for
compute moves it again and again, for the events that it sends and for those that it has queued. It queues `MOST_QUEUED`
at most; further ones wait in the outbox.

Events are kept until compute has taken them. Before an event is sent again, it is compared with what it is about, and
left out if it is not true any more; of equal events about a resource the newest is kept. So the outbox has a few rows
per port or volume, however long compute is away. It has `MOST` rows at most.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.db.locking import in_order
from micronova.embedded.common.chunks import chunks
from micronova.http.client import ServiceClient
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

BATCH = 200  # events in one request
WINDOW = 0.02  # seconds in which further events are collected, and compute commits its own part of the change
HOLD = 10.0  # seconds after which a sweep takes the rows of a sender that has not finished
CLOCKS = 1.0  # seconds by which the clocks of two processes may differ
RENEW = HOLD / 3  # seconds after which a sender that has not finished holds its rows for longer
MOST_QUEUED = 2_000  # events that a process has in memory
SWEEP = 2.0  # seconds between sweeps
MOST = 100_000  # events in the outbox
TRIM = 60.0  # seconds between checks of that limit
STOP_TIMEOUT = 5.0  # seconds that a stop waits for a request under way
MAX_RETRY_DELAY = 30.0  # seconds between two attempts to send a new event
MAX_OLD_RETRY_DELAY = 300.0  # seconds between two attempts to send an old one; they are a tenth of its age apart
_FIRST_VERSIONS: Final = {"volume-reimaged": 93}
_OTHERS_SINCE: Final = 51  # the first with volume-extended


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event about something that a server uses: a port, a volume. The tag is its id."""

    id: str
    name: str
    server_id: str
    tag: str
    created_at: int
    attempts: int = 0


def event_columns() -> tuple[sa.Column[Any], ...]:
    """Return the columns of an outbox besides its key `id`; another index must begin with `tag` and `server_id`."""
    return (
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("server_id", sa.String(255), nullable=False),
        sa.Column("tag", sa.String(255), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("not_before", sa.BigInteger, nullable=False, index=True),  # until then a process is sending it
        sa.Column("attempts", sa.Integer, nullable=False),
    )


def _version(batch: Sequence[Event]) -> dict[str, str]:
    """Return the header of a request with these events: the oldest microversion that has them all."""
    newest = max(_FIRST_VERSIONS.get(event.name, _OTHERS_SINCE) for event in batch)
    return {"openstack-api-version": f"compute 2.{newest}"}


class Outbox:
    """The table of events of a service."""

    def __init__(self, events: sa.Table, still_true: Callable[[sa.Connection, Sequence[Event]], set[str]]) -> None:
        """`still_true` returns the ids of those events that still describe what they are about."""
        self._events = events
        self._still_true = still_true

    def put(self, conn: sa.Connection, new: Sequence[Event]) -> None:
        """Write events, in the transaction of the change."""
        conn.execute(
            self._events.insert(),
            [{**msgspec.structs.asdict(event), "not_before": event.created_at + micros(HOLD)} for event in new],
        )

    def any_due(self, conn: sa.Connection, now: int) -> bool:
        """Return whether there are events that no process is sending."""
        events = self._events
        return conn.execute(sa.select(events.c.id).where(events.c.not_before <= now).limit(1)).first() is not None

    def claim_due(self, conn: sa.Connection, now: int, hold: int) -> tuple[int, list[Event]]:
        """Take events that no process is sending, and delete those that are not true any more.

        Return how many were taken, and those of them that are still true.
        """
        events = self._events
        due = sa.select(events.c.id).where(events.c.not_before <= now).order_by(events.c.not_before).limit(BATCH)
        if conn.dialect.name == "postgresql":
            due = due.with_for_update(skip_locked=True)
        rows = conn.execute(
            events.update()
            .where(events.c.id.in_(due.scalar_subquery()), events.c.not_before <= now)
            .values(not_before=now + hold, attempts=events.c.attempts + 1)
            .returning(
                events.c.id, events.c.name, events.c.server_id, events.c.tag, events.c.created_at, events.c.attempts
            )
        ).all()
        found = [Event(**row._mapping) for row in rows]
        still_true = self._still_true(conn, found)
        obsolete = [event.id for event in found if event.id not in still_true]
        if obsolete:
            conn.execute(events.delete().where(events.c.id.in_(obsolete)))
        return len(rows), [event for event in found if event.id in still_true]

    def record_results(self, conn: sa.Connection, done: list[str], again: list[Event], now: int) -> None:
        """Delete events that compute has accepted, and schedule the next attempt for the newest of equal others."""
        events = self._events
        ids = [*done, *(event.id for event in again)]
        conn.execute(sa.select(events.c.id).where(events.c.id.in_(ids)).order_by(events.c.id).with_for_update())
        if done:
            conn.execute(events.delete().where(events.c.id.in_(done)))
        if not again:
            return
        newer = events.alias()
        superseded = sa.exists().where(
            newer.c.server_id == events.c.server_id,
            newer.c.tag == events.c.tag,
            newer.c.name == events.c.name,
            sa.tuple_(newer.c.created_at, newer.c.id) > sa.tuple_(events.c.created_at, events.c.id),
        )
        repeated = sa.and_(events.c.id.in_([event.id for event in again]), superseded)
        conn.execute(events.delete().where(repeated))
        waits: dict[float, list[str]] = {}
        for event in again:
            wait = min(MAX_RETRY_DELAY, 0.5 * 2 ** min(event.attempts, 10))
            age = round((now - event.created_at) / 10_000_000)  # a tenth, in seconds
            waits.setdefault(max(wait, min(age, MAX_OLD_RETRY_DELAY)), []).append(event.id)
        for wait, ids in sorted(waits.items()):
            conn.execute(events.update().where(events.c.id.in_(ids)).values(not_before=now + micros(wait)))

    def renew(self, conn: sa.Connection, ids: Sequence[str], now: int, hold: int) -> None:
        """Hold events that are being sent, or wait for it, for longer."""
        events = self._events
        for part in chunks(ids):
            conn.execute(
                events.update().where(in_order(events.c.id, events.c.id.in_(part))).values(not_before=now + hold)
            )

    def retry_all(self, conn: sa.Connection, now: int) -> None:
        """Let all events that compute did not take be sent again now.

        Those that are due within the time of a hold are left alone, because another process may be sending them.
        """
        events = self._events
        waiting = sa.and_(events.c.attempts > 0, events.c.not_before > now + micros(HOLD + CLOCKS))
        conn.execute(events.update().where(in_order(events.c.id, waiting)).values(not_before=now))

    def count(self, conn: sa.Connection) -> int:
        """Return the number of events in the outbox."""
        events = self._events
        return int(conn.execute(sa.select(sa.func.count()).select_from(events)).scalar_one())

    def delete_oldest(self, conn: sa.Connection, excess: int) -> None:
        """Delete this many of the oldest events."""
        events = self._events
        oldest = sa.select(events.c.id).order_by(events.c.created_at, events.c.id).limit(excess)
        conn.execute(events.delete().where(in_order(events.c.id, events.c.id.in_(oldest.scalar_subquery()))))


class EventSender:
    """Sends the events of the outbox; without a client of compute it writes and sends nothing."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        compute: ServiceClient | None,
        outbox: Outbox,
        *,
        name: str,
        lost: str,
        window: float = WINDOW,
    ) -> None:
        """`name` is that of the service, `lost` says what follows if events are deleted before compute has them."""
        self._database = database
        self._clock = clock
        self._compute = compute
        self._outbox = outbox
        self._name = name
        self._lost = lost
        self._window = window
        self._queue: list[Event] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()  # nothing is queued, and nothing is being sent
        self._idle.set()
        self._more = False  # the last sweep took as many events as it may
        self._answers = True  # compute has answered the last request
        self._trim_at = 0.0
        self._renew_at = 0.0  # when the queued events must be held for longer
        self.sent = 0  # events that compute accepted
        self.requests = 0

    def put(self, conn: sa.Connection, new: Sequence[Event]) -> None:
        """Write events into the outbox, in the transaction of the change."""
        if self._compute is not None and new:
            self._outbox.put(conn, new)

    def hand_over(self, committed: Sequence[Event]) -> None:
        """Queue events of the outbox for sending; a sweep takes those for which there is no room."""
        if self._compute is not None and committed:
            if self._idle.is_set():
                self._renew_at = self._clock.monotonic() + RENEW
            self._queue.extend(committed[: max(0, MOST_QUEUED - len(self._queue))])
            self._idle.clear()
            self._wake.set()

    async def start(self) -> None:
        """Start to send, and to sweep what earlier processes left."""
        if self._compute is not None:
            self._tasks = [
                keep_running(self._send_forever, name=f"{self._name}-events", clock=self._clock),
                keep_running(self._sweep_forever, name=f"{self._name}-events-sweep", clock=self._clock),
            ]

    async def stop(self) -> None:
        """Stop; events that are not sent stay in the outbox."""
        await end_tasks(*self._tasks)
        self._tasks = []

    async def _send_forever(self) -> None:
        while True:
            await self._wake.wait()
            if len(self._queue) < BATCH:
                await self._clock.sleep(self._window)
            self._wake.clear()
            while self._queue:
                batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
                try:
                    await _finish(self._deliver(batch))
                except Exception:  # the rows are still there, and a sweep takes them
                    log.exception(
                        "cannot record the result of sending %d events to compute; they are sent again", len(batch)
                    )
            self._idle.set()

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await _finish(self._sweep())
            except MicronovaError as error:
                log.warning("cannot read the outbox of events for compute: %s", error)
            except Exception:
                log.exception("cannot read the outbox of events for compute")
            if self._more and self._answers:
                await self._idle.wait()
            else:
                await self._clock.sleep(SWEEP)

    async def _sweep(self) -> None:
        now = self._clock.now()
        if now >= self._trim_at:
            self._trim_at = now + TRIM
            await self._trim()
        self._more = False
        if self._queue:
            return  # other processes may have room
        if await self._database.read(self._outbox.any_due, micros(now)):  # without a write if there are none
            claimed, found = await self._database.write(self._outbox.claim_due, micros(now), micros(HOLD))
            self._more = claimed == BATCH
            self.hand_over(found)

    async def _trim(self) -> None:
        """Delete the oldest events if there are too many."""
        excess = await self._database.read(self._outbox.count) - MOST
        if excess > 0:
            await self._database.write(self._outbox.delete_oldest, excess)
            log.error(
                "deleted the %d oldest events for compute, because compute takes none: %s; find out why it refuses or "
                "does not answer",
                *(excess, self._lost),
            )

    async def _deliver(self, batch: list[Event]) -> None:
        assert self._compute is not None
        body = {
            "events": [
                {"name": event.name, "server_uuid": event.server_id, "status": "completed", "tag": event.tag}
                if event.name not in _WITHOUT_STATUS
                else {"name": event.name, "server_uuid": event.server_id, "tag": event.tag}
                for event in batch
            ]
        }
        self.requests += 1
        back = False
        try:
            answer = await self._renewing(
                batch,
                self._compute.request("POST", "/os-server-external-events", body, headers=_version(batch), ok=(404,)),
            )
        except MicronovaError as error:
            log.warning("cannot send %d events to compute, they are sent again: %s", len(batch), error)
            retry, done = batch, []
            self._answers = False
        else:
            early = _too_early(answer)
            retry = [event for event in batch if (event.name, event.server_id, event.tag) in early]
            done = [event for event in batch if event not in retry]
            back, self._answers = not self._answers, True
        self.sent += len(done)
        now = micros(self._clock.now())
        await self._database.write(self._outbox.record_results, [event.id for event in done], retry, now)
        if back:
            await self._database.write(self._outbox.retry_all, now)

    async def _renewing(self, batch: list[Event], sending: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer to a request; until it comes, let no sweep take the events of this process."""
        request = asyncio.ensure_future(sending)
        try:
            while True:
                pause = asyncio.ensure_future(self._clock.sleep(max(0.0, self._renew_at - self._clock.monotonic())))
                await asyncio.wait({request, pause}, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
                if request.done():
                    return request.result()
                ids = [event.id for event in (*batch, *self._queue)]
                with contextlib.suppress(MicronovaError):  # the answer matters more
                    await self._database.write(self._outbox.renew, ids, micros(self._clock.now()), micros(HOLD))
                self._renew_at = self._clock.monotonic() + RENEW
        finally:
            request.cancel()


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Finish a piece of work even if this task is cancelled, so that it need not be repeated."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(task, STOP_TIMEOUT)
        raise


_WITHOUT_STATUS = frozenset({"network-changed"})  # as Neutron sends it


def _too_early(answer: object) -> set[tuple[str, str, str]]:
    """Return the events that compute could not use yet, because the server has no host."""
    listed = answer.get("events", ()) if isinstance(answer, dict) else ()
    return {
        (str(each.get("name")), str(each.get("server_uuid")), str(each.get("tag")))
        for each in listed
        if isinstance(each, dict) and each.get("code") == 422
    }
