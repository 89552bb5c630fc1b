"""The audit of usage: one `instance.exists` for every server of each period, for metering and billing.

One conductor does it, after a period has ended, and notes it in `task_logs` when the broker has all notifications. If
that conductor dies, another one begins the period anew, so consumers may get a notification twice. It waits for a
broker that is away, and for the queue of notifications, which would else drop the oldest; meanwhile it says that it is
there. Periods that end meanwhile follow.
"""

import asyncio
import logging
from collections import Counter
from functools import partial

import sqlalchemy as sa

from micronova.db import instances, task_logs, usages
from micronova.db.engine import Database
from micronova.notifications import usage
from micronova.notifications.notifier import Announcer
from micronova.objects.background import keep_running
from micronova.objects.clock import Clock, micros
from micronova.objects.context import Context
from micronova.objects.instance import InstanceRow

log = logging.getLogger(__name__)

NAME = "usage_audit"
TASK = "instance_usage_audit"
INTERVAL = 60.0  # seconds between checks whether a period has ended
PART = 200  # servers that are read at a time
RENEWAL = 20.0  # seconds after which a conductor says that it is at work
MOST_PERIODS = 48  # that are made up for after an outage
SILENCE = micros(120.0)  # after which another conductor takes over


class UsageAudit:
    """Sends the notifications of the periods that have ended, unless that is done."""

    def __init__(self, database: Database, clock: Clock, notifier: Announcer, *, period: str) -> None:
        self._database = database
        self._clock = clock
        self._notifier = notifier
        self._period = period

    def _now(self) -> int:
        return micros(self._clock.now())

    async def run(self) -> None:
        """Audit the periods that have ended and are not done, in their order; do nothing if there is no broker."""
        if not self._notifier.enabled:
            return
        for period in _due(await self._database.read(task_logs.done_until, TASK), self._period, self._now()):
            if not await self._audit(period):
                return

    async def _audit(self, period: usage.Period) -> bool:
        """Audit a period; return False if another conductor works on it, or if there are no hosts."""
        span = (period.begin, period.end)
        started = self._clock.monotonic()
        message = "Instance usage audit started..."
        if not await self._database.write(task_logs.begin, TASK, span, message, self._now(), SILENCE):
            return False
        renewing = keep_running(partial(self._renew, span), name="usage-audit-renew", clock=self._clock)
        try:
            counts = await self._send(period)
            await self._notifier.wait_until_sent()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        seconds = self._clock.monotonic() - started
        total = sum(counts.values())
        message = f"Instance usage audit ran, {total} instances in {seconds:.1f} seconds."
        await self._database.write(task_logs.finish, TASK, span, counts, message, self._now())
        log.info("the usage audit of the last %s has sent %d notifications", self._period, total)
        return True

    async def _send(self, period: usage.Period) -> Counter[str]:
        """Send the notifications of a period; return their numbers by host."""
        counts: Counter[str] = Counter()
        after: usages.Mark | None = None
        while True:
            rows, after = await self._database.read(_page, period.begin, period.end, after)
            for row in rows:
                await self._notifier.wait_for_room()
                self._notifier.announce(Context(), partial(usage.exists, row, Context(), period))
                if row["host"] is not None:
                    counts[row["host"]] += 1
            if after is None:
                return counts

    async def _renew(self, span: tuple[int, int]) -> None:
        """Say again and again that this conductor works on a period."""
        while True:
            await self._clock.sleep(RENEWAL)
            await self._database.write(task_logs.renew, TASK, span, self._now())


def _due(done_until: int | None, unit: str, now: int) -> list[usage.Period]:
    """Return the periods that have ended since the last one that is done, the oldest first; at least the newest."""
    found = [usage.last_completed(unit, now)]
    while done_until is not None and found[0].begin > done_until and len(found) < MOST_PERIODS:
        found.insert(0, usage.last_completed(unit, found[0].begin + 1))
    return [each for each in found if done_until is None or each.end > done_until]


def _page(
    conn: sa.Connection, begin: int, end: int, after: usages.Mark | None
) -> tuple[list[InstanceRow], usages.Mark | None]:
    """Return servers of the period after a mark, and the mark of the last one if more may follow."""
    used = usages.used(conn, begin, end, after=after, limit=PART)
    living = instances.get_many(conn, [each.uuid for each in used if each.ended_at is None])
    gone = instances.get_many_deleted(conn, [each.uuid for each in used if each.uuid not in living])
    known = {**living, **gone}
    found = [known[each.uuid] for each in used if each.uuid in known]
    return found, (used[-1].created_at, used[-1].uuid) if len(used) == PART else None
