"""Operations as rows, on both databases: which of them the end of another one wakes."""

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.context import Context
from micronova.objects.operations import VERSIONS, ImagePayload
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances

KNOWN = tuple(sorted(VERSIONS.items()))


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def test_an_operation_that_is_deferred_is_not_woken(database: Database) -> None:
    await database.write(add_instances, "i-1")

    def record(conn: sa.Connection) -> None:
        row = instances.lock(conn, "i-1")
        assert row is not None
        operation_rows.follow_up(conn, row, "discard_image", id="first", epoch=row["epoch"], now=1, context=Context())
        operation_rows.accept_action(
            conn,
            row,
            {"task_state": "shelving"},
            id="deferred",
            kind="shelve",
            context=Context(),
            payload=ImagePayload(),
            now=1,
            deadline=1000,
            deferred_until=100,
        )

    await database.write(record)
    await database.write(operation_rows.lease, ["first"], "conductor", 2, 50, KNOWN)
    assert await database.write(operation_rows.wake, "i-1") == ["first"]
    assert await database.read(operation_rows.expired, 3, 10, KNOWN, with_hosts=True) == ["first"]
    assert await database.write(operation_rows.start_deferred, "deferred", "new", ImagePayload(answered=True))
    assert set(await database.read(operation_rows.expired, 3, 10, KNOWN, with_hosts=True)) == {"first", "deferred"}
