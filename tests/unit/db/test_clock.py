"""Processes whose clocks differ agree on the database's time."""

import asyncio
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import load
from micronova.db.clock import DatabaseClock
from micronova.db.engine import Database, open_database
from micronova.db.tables import operations, services
from micronova.objects.clock import micros
from tests.functional.cloud import CloudOptions, one_process
from tests.services.postgres import Postgres


class WrongClock:
    """A clock that is set wrong, and may be set again; it measures durations like any other."""

    def __init__(self, error: float) -> None:
        self.error = error

    def now(self) -> float:
        return time.time() + self.error

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("error", [-30.0, 0.0, 30.0, 86400.0])
async def test_whatever_the_own_clock_says_the_time_is_the_database_s(postgres: Postgres, error: float) -> None:
    database = open_database(postgres.url)
    clock = DatabaseClock(WrongClock(error), database)
    await clock.start()
    try:
        before = time.time()  # the database runs on this machine
        told = clock.now()
        assert before - clock._bound - 0.5 <= told <= time.time() + clock._bound + 0.5
        assert clock._bound < 15
    finally:
        await clock.stop()
        await database.close()


async def test_a_clock_that_is_set_while_we_run_changes_nothing(postgres: Postgres) -> None:
    database = open_database(postgres.url)
    own = WrongClock(0.0)
    clock = DatabaseClock(own, database)
    await clock.start()
    try:
        before = clock.now()
        own.error = -3600.0
        assert 0 <= clock.now() - before < 60
        await clock.measure()
        assert -1 <= clock.now() - before < 60
    finally:
        await clock.stop()
        await database.close()


class Told(Database):
    """A database whose server says what the test tells it to."""

    dialect = "postgresql"

    def __init__(self, clock: "StoppedClock") -> None:
        super().__init__()
        self.time = 1000.0
        self.slow = 0.0
        self._clock = clock

    async def read(self, fn, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._clock.passed += self.slow
        told = self.time
        self._clock.passed += self.slow
        return told

    async def write(self, fn, *args, **kwargs):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class StoppedClock(WrongClock):
    """Time that passes as the test says."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.passed = 0.0

    def now(self) -> float:
        return 5000.0 + self.passed

    def monotonic(self) -> float:
        return self.passed


async def test_a_slow_answer_counts_only_if_it_shows_that_the_clock_is_wrong() -> None:
    own = StoppedClock()
    database = Told(own)
    clock = DatabaseClock(own, database)
    database.slow = 0.1
    await clock.measure()
    assert clock.now() == pytest.approx(1000.1)
    database.slow, database.time = 2.0, 1003.0  # within what such an answer can tell
    await clock.measure()
    assert clock.now() == pytest.approx(1004.1)
    database.time = 2000.0  # the server's clock was set
    await clock.measure()
    assert clock.now() == pytest.approx(2002.0)


async def test_leases_and_heartbeats_have_the_database_s_time(database_url: str, tmp_path: Path) -> None:
    options = CloudOptions(clock=WrongClock(3600.0), settings={"database": {"connection": database_url}})
    async with one_process(tmp_path, options) as cloud:
        user = cloud.caller()
        await user.boot()
        now = micros(time.time())
        (row,) = await cloud.read(sa.select(operations))
        assert abs(row.created_at - now) < 120_000_000
        assert row.lease_until < now + 120_000_000
        for service in await cloud.read(sa.select(services)):
            assert abs(service.last_seen_at - now) < 120_000_000


@pytest.mark.parametrize("role", ["identity", "image", "network", "metadata"])
async def test_every_role_with_a_database_uses_its_clock(database_url: str, tmp_path: Path, role: str) -> None:
    """Also where it is alone in its process: others compare the times that it writes."""
    settings = load(database={"connection": database_url})
    process = Process(settings, [role], StateDirectory(tmp_path), clock=WrongClock(3600.0))
    try:
        await process.connect(upgrade=True)
        assert abs(process.clock.now() - time.time()) < 60
    finally:
        await process.stop()
