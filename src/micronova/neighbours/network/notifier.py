"""News for compute: an outbox that survives crashes, sent in batches as `os-server-external-events`.

A change and the news of it are one transaction. The process that wrote them sends them within milliseconds, many in
one request, and then deletes the rows. Rows that stay (compute did not answer, or we died) are picked up by whoever
sweeps next: a row belongs to the one who moved its `not_before` into the future.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.http.client import ServiceClient
from micronova.neighbours.network.tables import events
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

BATCH = 200  # events in one request
WINDOW = 0.02  # seconds that the first event waits for company, and for compute to have written its own part
HOLD = 10.0  # seconds in which the sender must have finished, before a sweep takes its rows
SWEEP = 2.0  # seconds between sweeps
GIVE_UP = 600.0  # seconds after which compute is not told any more: it asks us itself by then
PATIENCE = 5.0  # seconds that a stop waits for a request under way
SLOWEST = 30.0  # seconds between attempts, at most


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that compute should know about a server's port."""

    id: str
    name: str
    server_id: str
    tag: str
    created_at: int
    attempts: int = 0


class Notifier:
    """Sends what is in the outbox; without a client for compute nothing is written or sent."""

    def __init__(
        self, database: Database, clock: Clock, compute: ServiceClient | None, *, window: float = WINDOW
    ) -> None:
        self._database = database
        self._clock = clock
        self._compute = compute
        self._window = window
        self._queue: list[Event] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.sent = 0  # events that compute took
        self.requests = 0

    def put(self, conn: sa.Connection, news: Sequence[Event]) -> None:
        """Write news into the outbox, in the transaction of the change that they tell of."""
        if self._compute is None:
            return
        conn.execute(
            events.insert(),
            [
                {
                    "id": event.id,
                    "name": event.name,
                    "server_id": event.server_id,
                    "tag": event.tag,
                    "created_at": event.created_at,
                    "not_before": event.created_at + micros(HOLD),
                    "attempts": 0,
                }
                for event in news
            ],
        )

    def hand_over(self, news: Sequence[Event]) -> None:
        """Send news that are safely in the outbox, soon."""
        if self._compute is not None and news:
            self._queue.extend(news)
            self._wake.set()

    async def start(self) -> None:
        """Begin to send, first of all what an earlier process left."""
        if self._compute is not None:
            self._tasks = [asyncio.create_task(self._send_forever()), asyncio.create_task(self._sweep_forever())]

    async def stop(self) -> None:
        """Stop; what was not sent stays in the outbox."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
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
                    await _whole(self._deliver(batch))
                except Exception:  # the rows are still there: a sweep takes them
                    log.exception("could not note what became of %d events", len(batch))

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await _whole(self._sweep())
            except MicronovaError as error:
                log.warning("the outbox cannot be read: %s", error)
            except Exception:
                log.exception("the outbox cannot be read")
            await self._clock.sleep(SWEEP)

    async def _sweep(self) -> None:
        now = micros(self._clock.now())
        if await self._database.read(any_due, now):  # an idle cloud writes nothing
            self.hand_over(await self._database.write(claim_due, now, micros(HOLD)))

    async def _deliver(self, batch: list[Event]) -> None:
        assert self._compute is not None
        body = {
            "events": [
                {"name": event.name, "server_uuid": event.server_id, "status": "completed", "tag": event.tag}
                if event.name in _WITH_STATUS
                else {"name": event.name, "server_uuid": event.server_id, "tag": event.tag}
                for event in batch
            ]
        }
        self.requests += 1
        try:
            answer = await self._compute.request("POST", "/os-server-external-events", body, ok=(404,))
        except MicronovaError as error:
            log.warning("compute was not told of %d events: %s", len(batch), error)
            retry, done = batch, []
        else:
            early = _too_early(answer)
            retry = [event for event in batch if (event.name, event.server_id, event.tag) in early]
            done = [event for event in batch if event not in retry]
        self.sent += len(done)
        now = micros(self._clock.now())
        old = [event for event in retry if now - event.created_at > micros(GIVE_UP)]
        if old:
            log.error("compute could not be told of %d events, the first: %s", len(old), old[0])
        again = [event for event in retry if event not in old]
        await self._database.write(settle, [event.id for event in (*done, *old)], again, now)


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Do a piece of work to its end even when we are stopped meanwhile: half of it would only be done again."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(task, PATIENCE)
        raise


# network-changed carries no status in Neutron's messages.
_WITH_STATUS = frozenset({"network-vif-plugged", "network-vif-unplugged", "network-vif-deleted"})


def _too_early(answer: object) -> set[tuple[str, str, str]]:
    """Which events compute could not use yet: the server has no host so far."""
    listed = answer.get("events", ()) if isinstance(answer, dict) else ()
    return {
        (str(each.get("name")), str(each.get("server_uuid")), str(each.get("tag")))
        for each in listed
        if isinstance(each, dict) and each.get("code") == 422
    }


def any_due(conn: sa.Connection, now: int) -> bool:
    """Say whether there are events that nobody is working on."""
    return conn.execute(sa.select(events.c.id).where(events.c.not_before <= now).limit(1)).first() is not None


def claim_due(conn: sa.Connection, now: int, hold: int) -> list[Event]:
    """Take over events that nobody is working on."""
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
    return [
        Event(id=r.id, name=r.name, server_id=r.server_id, tag=r.tag, created_at=r.created_at, attempts=r.attempts)
        for r in rows
    ]


def settle(conn: sa.Connection, done: list[str], again: list[Event], now: int) -> None:
    """Forget events that compute has taken, and give the others back for a later attempt."""
    if done:
        conn.execute(events.delete().where(events.c.id.in_(done)))
    for attempts in sorted({event.attempts for event in again}):
        wait = min(SLOWEST, 0.5 * 2 ** min(attempts, 10))
        ids = [event.id for event in again if event.attempts == attempts]
        conn.execute(events.update().where(events.c.id.in_(ids)).values(not_before=now + micros(wait)))


def pending(conn: sa.Connection) -> int:
    """Return how many events compute has yet to hear."""
    return int(conn.execute(sa.select(sa.func.count()).select_from(events)).scalar_one())
