"""The audit of usage: of several conductors one does it, however long the broker is away."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from micronova.conductor.usage_audit import MOST_PERIODS, UsageAudit
from micronova.db import services, task_logs
from micronova.db.engine import Database
from micronova.db.tables import deleted_instances
from micronova.notifications.resources import Announcement
from micronova.notifications.usage import last_completed
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.service_names import COMPUTE
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database
from tests.unit.db.test_retention import _instance


class SlowBroker:
    """Takes notifications when it is back."""

    enabled = True

    def __init__(self) -> None:
        self.sent = 0
        self.back, self.confirms = asyncio.Event(), asyncio.Event()
        self.confirms.set()

    def announce(self, context: Context, make: Callable[[], Announcement]) -> None:
        self.sent += 1

    async def wait_for_room(self) -> None:
        await self.back.wait()

    async def wait_until_sent(self) -> None:
        await self.confirms.wait()


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


async def test_a_conductor_that_waits_for_the_broker_keeps_the_audit(database: Database) -> None:
    clock, broker = ManualClock(), SlowBroker()
    await clock.advance(600.0)
    period = last_completed("hour", micros(clock.now()))
    used = {"launched_at": period.begin, "deleted_at": period.end - 1, "created_at": period.begin, "host": "h"}
    await database.write(lambda conn: conn.execute(deleted_instances.insert(), [_instance("used", **used)]))
    await database.write(services.heartbeat, COMPUTE, ["h"], micros(clock.now()))
    first, second = (UsageAudit(database, clock, broker, period="hour") for _ in range(2))
    audit = asyncio.create_task(first.run())
    while not await database.read(task_logs.of_period, "instance_usage_audit", period.begin, period.end):
        pass
    for _ in range(30):  # ten minutes
        await clock.advance(20.0)
        await database.write(lambda conn: None)  # the writer has done what the conductor asked for
        await asyncio.wait_for(second.run(), 5)
    broker.back.set()
    await audit
    await second.run()
    assert broker.sent == 1
    [row] = await database.read(task_logs.of_period, "instance_usage_audit", period.begin, period.end)
    assert (row.state, row.task_items) == (task_logs.DONE, 1)


async def _server(database: Database, clock: ManualClock, begin: int, end: int) -> None:
    """Record a server that was used from one time to another, and a compute host."""
    used = {"launched_at": begin, "deleted_at": end, "created_at": begin, "host": "h"}
    await database.write(lambda conn: conn.execute(deleted_instances.insert(), [_instance("used", **used)]))
    await database.write(services.heartbeat, COMPUTE, ["h"], micros(clock.now()))


async def test_a_period_is_done_when_the_broker_has_its_notifications(database: Database) -> None:
    """A conductor that dies before loses those that wait in its queue: another one sends all of them again."""
    clock, broker = ManualClock(), SlowBroker()
    broker.back.set()
    broker.confirms.clear()
    await clock.advance(600.0)
    period = last_completed("hour", micros(clock.now()))
    await _server(database, clock, period.begin, period.end - 1)
    first, second = (UsageAudit(database, clock, broker, period="hour") for _ in range(2))
    audit = asyncio.create_task(first.run())
    while not broker.sent:
        await database.write(lambda conn: None)
    audit.cancel()
    await asyncio.gather(audit, return_exceptions=True)
    await clock.advance(121.0)
    broker.confirms.set()
    await asyncio.wait_for(second.run(), 5)
    assert broker.sent == 2
    [row] = await database.read(task_logs.of_period, "instance_usage_audit", period.begin, period.end)
    assert row.state == task_logs.DONE


@pytest.mark.parametrize("dies", [False, True])
async def test_no_period_is_left_out_however_long_the_broker_is_away(database: Database, dies: bool) -> None:
    """Of the hours of an outage each is told of, in their order, and none twice: they are charged for."""
    clock, broker = ManualClock(), SlowBroker()
    await clock.advance(600.0)
    first = last_completed("hour", micros(clock.now()))
    await _server(database, clock, first.begin, first.begin + 10 * micros(3600.0))
    audit = UsageAudit(database, clock, broker, period="hour")
    waiting = asyncio.create_task(audit.run())
    for _ in range(3 * 180):  # three hours
        await clock.advance(20.0)
        await database.write(lambda conn: None)
    if dies:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await clock.advance(121.0)
        audit = UsageAudit(database, clock, broker, period="hour")
    broker.back.set()
    if not dies:
        await asyncio.wait_for(waiting, 5)
    for _ in range(3):
        await asyncio.wait_for(audit.run(), 5)
    assert broker.sent == 4
    for number in range(4):
        span = (first.begin + number * micros(3600.0), first.end + number * micros(3600.0))
        [row] = await database.read(task_logs.of_period, "instance_usage_audit", *span)
        assert (row.state, row.task_items) == (task_logs.DONE, 1)


async def test_an_audit_that_was_off_does_not_begin_in_the_distant_past(database: Database) -> None:
    clock, broker = ManualClock(), SlowBroker()
    broker.back.set()
    await clock.advance(600.0)
    begin = last_completed("hour", micros(clock.now())).begin
    await _server(database, clock, begin, begin + micros(10 * 86_400.0))
    audit = UsageAudit(database, clock, broker, period="hour")
    await audit.run()
    await clock.advance(9 * 86_400.0)
    await audit.run()
    assert broker.sent == 1 + MOST_PERIODS
