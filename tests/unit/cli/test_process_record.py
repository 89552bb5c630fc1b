"""What a process records of itself, and what it learns of others with its name."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from micronova.cli.process_record import INTERVAL, RecordedProcess
from micronova.cli.wiring import Process
from micronova.db import processes
from micronova.db.engine import Database
from micronova.db.secrets import key_id
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database

KEY = bytes(range(32))


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


def _process(clock: ManualClock, *roles: str, host: str = "control", key: bytes = KEY) -> Process:
    found: Any = SimpleNamespace(clock=clock, name=host, roles=roles, random=random.Random(), secret_keys=lambda: [key])
    return cast(Process, found)


async def _rows(database: Database) -> dict[str, Any]:
    return {row.roles: row for row in await database.read(processes.list_)}


async def test_the_key_is_known_without_being_stored(database: Database) -> None:
    clock = ManualClock()
    for role in ("api", "scheduler"):
        await RecordedProcess(_process(clock, role), database)._seen()
    rows = await _rows(database)
    assert rows["api"].secret_key_id == key_id(KEY) != key_id(KEY[::-1]) and rows["scheduler"].secret_key_id is None
    assert KEY.hex() not in str(rows) and len(key_id(KEY)) == 32


@pytest.mark.parametrize(
    ("role", "host", "warned"), [("conductor", "control", 2), ("conductor", "b", 0), ("api", "control", 0)]
)
async def test_two_with_one_name_are_warned_of(
    database: Database, caplog: pytest.LogCaptureFixture, role: str, host: str, warned: int
) -> None:
    """One that was killed before the start of its successor is not: it shows no sign of life any more."""
    clock = ManualClock()
    await RecordedProcess(_process(clock, role), database)._seen()
    await clock.advance(1.0)
    both = [RecordedProcess(_process(clock, role, host=name), database) for name in ("control", host)]
    for each in both:
        await each.start()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                await clock.advance(INTERVAL)
                async with asyncio.timeout(60):
                    while clock.sleepers < 2:  # each looks for others after its sign of life, and then sleeps
                        await asyncio.sleep(0.001)
    finally:
        for each in both:
            await each.stop()
    assert caplog.text.count("set default.host to another name") == warned
