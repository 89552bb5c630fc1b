"""The audit of usage: of several conductors one does it, however long the broker is away."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from micronova.conductor.usage_audit import UsageAudit
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
        self.back = asyncio.Event()

    def announce(self, context: Context, make: Callable[[], Announcement]) -> None:
        self.sent += 1

    async def wait_for_room(self) -> None:
        await self.back.wait()


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


async def test_a_conductor_that_waits_for_the_broker_keeps_the_audit(database: Database) -> None:
    clock, broker = ManualClock(), SlowBroker()
    period = last_completed("hour", micros(clock.now()))
    used = {"launched_at": period.begin, "deleted_at": period.end - 1, "created_at": period.begin, "host": "h"}
    await database.write(lambda conn: conn.execute(deleted_instances.insert(), [_instance("used", **used)]))
    await database.write(services.heartbeat, COMPUTE, ["h"], micros(clock.now()))
    first, second = (UsageAudit(database, clock, broker, period="hour") for _ in range(2))
    audit = asyncio.create_task(first.run())
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
