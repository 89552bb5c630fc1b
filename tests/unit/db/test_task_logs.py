"""Logs of tasks: who works on a period, and how little that costs with many hosts."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import task_logs
from micronova.db.engine import Database
from micronova.db.tables import services
from micronova.objects.service_names import COMPUTE
from tests.unit.db.databases import KINDS, compute_database

TASK, PERIOD, SILENCE = "audit", (0, 100), 50
HOSTS = 20


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        rows: list[dict[str, Any]] = [
            {
                "id": number + 1,
                "uuid": f"s-{number}",
                "binary": COMPUTE,
                "host": f"host-{number:02}",
                "last_seen_at": 0,
                "created_at": 0,
            }
            for number in range(HOSTS)
        ]
        await opened.write(lambda conn: conn.execute(services.insert(), rows))
        yield opened


def _begin(conn: sa.Connection, now: int) -> bool:
    return task_logs.begin(conn, TASK, PERIOD, "started", now, SILENCE)


async def test_one_works_on_a_period_and_another_takes_over_after_a_silence(database: Database) -> None:
    assert await database.write(_begin, 1000)
    assert not await database.write(_begin, 1010)
    await database.write(task_logs.renew, TASK, PERIOD, 1040)
    assert not await database.write(_begin, 1060)
    assert await database.write(_begin, 1090)
    assert not await database.write(_begin, 1091)
    await database.write(task_logs.finish, TASK, PERIOD, {"host-03": 7}, "done", 1100)
    assert not await database.write(_begin, 9000)
    rows = await database.read(task_logs.of_period, TASK, *PERIOD)
    assert {row.state for row in rows} == {task_logs.DONE}
    assert [row.task_items for row in rows] == [7 if number == 3 else 0 for number in range(HOSTS)]


async def test_to_say_that_somebody_works_on_it_changes_one_row(database: Database) -> None:
    await database.write(_begin, 1000)
    await database.write(task_logs.renew, TASK, PERIOD, 1040)
    rows = await database.read(task_logs.of_period, TASK, *PERIOD)
    assert sorted(row.updated_at for row in rows) == [1000] * (HOSTS - 1) + [1040]


async def test_old_periods_are_purged_one_by_one(database: Database) -> None:
    for period in ((0, 100), (100, 200), (200, 300)):
        await database.write(task_logs.begin, TASK, period, "started", 1000, SILENCE)
    assert await database.read(task_logs.count, 300) == 2 * HOSTS
    assert [await database.write(task_logs.purge, 300) for _ in range(3)] == [HOSTS, HOSTS, 0]
    assert len(await database.read(task_logs.of_period, TASK, 200, 300)) == HOSTS
