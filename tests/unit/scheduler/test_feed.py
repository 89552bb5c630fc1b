"""The host table follows the database, also when the clock is set."""

from pathlib import Path

import pytest

from micronova.db.engine import open_database
from micronova.objects.clock import SystemClock, micros
from micronova.scheduler.feed import HostFeed
from tests.unit.scheduler.rows import add_host, make_tables


class SettableClock(SystemClock):
    """A clock that is set to another time."""

    time = 10_000.0

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize("jump", [-0.5, -4.0, -3600.0, 3600.0])
@pytest.mark.parametrize("fully", [False, True])
async def test_a_clock_that_is_set_delays_nothing(tmp_path: Path, jump: float, fully: bool) -> None:
    database = open_database(f"sqlite:///{tmp_path}/compute.db")
    clock = SettableClock()
    feed = HostFeed(database, clock, default_zone="nova")
    try:
        await make_tables(database)
        await database.write(lambda conn: add_host(conn, "old", 1, now=micros(clock.now())))
        await feed.refresh(0.0)
        assert set(feed.table.uuids) == {"node-old"}
        clock.time += jump
        await database.write(lambda conn: add_host(conn, "new", 2, now=micros(clock.now())))
        clock.time += 0.1
        await (feed.refresh_fully() if fully else feed.refresh(0.0))
        assert set(feed.table.uuids) == {"node-old", "node-new"}
    finally:
        await database.close()


class SlowClock(SettableClock):
    """A clock by which every read takes ten seconds."""

    def monotonic(self) -> float:
        self.reads = getattr(self, "reads", 0) + 1
        return self.reads * 10.0


async def test_a_full_cloud_is_not_read_as_a_whole_all_the_time(tmp_path: Path) -> None:
    """Reading all hosts took ten seconds; requests that find no host read what has changed instead."""
    database = open_database(f"sqlite:///{tmp_path}/compute.db")
    clock = SlowClock()
    feed = HostFeed(database, clock, default_zone="nova")
    try:
        await make_tables(database)
        await database.write(lambda conn: add_host(conn, "old", 1, now=micros(clock.now())))
        await feed.refresh_fully()
        for number in range(2, 6):
            clock.time += 10.0
            now = micros(clock.now())
            await database.write(lambda conn, name, at: add_host(conn, name, at, now=at), f"new{number}", now)
            clock.time += 0.1
            await feed.refresh_fully()
            assert f"node-new{number}" in feed.table
        assert database.statistics.by_function["load_hosts"] == 1
        clock.time += 600.0
        await feed.refresh_fully()
        assert database.statistics.by_function["load_hosts"] == 2
    finally:
        await database.close()
