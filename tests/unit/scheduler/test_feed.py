"""The host table follows the database, also when the clock is set."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.db import aggregates, allocations, host_states, services, topologies
from micronova.db import claims as claim_rows
from micronova.db.engine import Database, open_database
from micronova.db.tables import compute_nodes, inventories, node_topologies
from micronova.db.tables import services as services_table
from micronova.objects.clock import SystemClock, micros
from micronova.objects.errors import Unavailable
from micronova.objects.scheduling import HostState, NodeAmount, ServiceState
from micronova.objects.service_names import COMPUTE
from micronova.objects.topology import NOTHING_USED, NodeTopology, TopologyUse, decode_use, encode
from micronova.scheduler.feed import CHUNK, LONG_OVERLAP_INTERVAL, OVERLAP, REFUSED_INTERVAL, HostFeed
from micronova.scheduler.filters.basic import ComputeFilter
from micronova.scheduler.host_table import HostTable
from tests.unit.scheduler.claim_cases import PINNED, numa_cloud, pinned
from tests.unit.scheduler.factory import OPTIONS, a_spec
from tests.unit.scheduler.rows import a_claim, add_host, make_tables


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


async def test_what_others_claim_of_numa_cells_is_followed(tmp_path: Path) -> None:
    """Also what a host reports anew, without a change of its other figures."""
    database = open_database(f"sqlite:///{tmp_path}/compute.db")
    clock = SettableClock()
    feed = HostFeed(database, clock, default_zone="nova")

    def use() -> TopologyUse:
        row = feed.table.index("node-a")
        assert row is not None
        return decode_use(feed.table.state(row).held)

    async def later() -> int:
        clock.time += 0.1
        return micros(clock.now())

    try:
        await make_tables(database)
        await database.write(numa_cloud, "ab", 2, micros(clock.now()))
        await feed.refresh(0.0)
        assert use() == NOTHING_USED
        claim = a_claim("i0", "a", PINNED, topology=pinned())
        assert (await database.write(claim_rows.claim, [claim], now=await later())).claimed
        await later()
        await feed.refresh(0.0)
        assert [len(cell.pinned) for cell in use().cells.values()] == [2]
        await database.write(allocations.release, "i0", now=await later())
        await database.write(topologies.report, {"node-a": NodeTopology()}, await later())
        await later()
        await feed.refresh(0.0)
        assert use() == NOTHING_USED
        row = feed.table.index("node-a")
        assert row is not None and feed.table.state(row).topology == encode(NodeTopology())
    finally:
        await database.close()


class CountingTable(HostTable):
    """A table that counts the rows that were read into it."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = self.amounts = self.services = 0

    def update(self, states: Iterable[HostState]) -> None:
        rows = list(states)
        self.nodes += len(rows)
        super().update(rows)

    def set_amounts(self, amounts: Iterable[NodeAmount]) -> set[str]:
        rows = list(amounts)
        self.amounts += len(rows)
        return super().set_amounts(rows)

    def set_services(self, services: Iterable[ServiceState]) -> None:
        rows = list(services)
        self.services += len(rows)
        super().set_services(rows)

    def forget_counts(self) -> None:
        self.nodes = self.amounts = self.services = 0


class Cloud:
    """A database with hosts, and a feed whose reads are counted."""

    def __init__(self, database: Database) -> None:
        self.database, self.clock, self.table = database, SettableClock(), CountingTable()
        self.feed = HostFeed(database, self.clock, default_zone="nova")
        self.feed.table = self.table
        self.largest_read = 0
        read = database.read

        async def counted(fn: Any, *args: Any, **kwargs: Any) -> Any:
            found = await read(fn, *args, **kwargs)
            self.largest_read = max(self.largest_read, _rows(found))
            return found

        database.read = counted  # type: ignore[method-assign]

    @property
    def now(self) -> int:
        return micros(self.clock.now())

    async def add_hosts(self, count: int) -> None:
        def add(conn: sa.Connection) -> None:
            for number in range(count):
                add_host(conn, f"host{number}", number + 1, now=self.now)

        await self.database.write(add)

    async def add_hosts_from(self, number: int) -> None:
        await self.database.write(lambda conn: add_host(conn, f"host{number}", number + 1, now=self.now))

    async def refresh_for(self, seconds: float) -> None:
        """Refresh the table as a busy scheduler does."""
        for _ in range(round(seconds / 0.5)):
            self.clock.time += 0.5
            await self.feed.refresh(0.4)


def _rows(found: Any) -> int:
    """Return how many rows were decoded at once."""
    if isinstance(found, msgspec.Struct):
        return sum(_rows(getattr(found, name)) for name in found.__struct_fields__)
    return len(found) if isinstance(found, list | tuple | dict) else 0


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Cloud]:
    database = open_database(f"sqlite:///{tmp_path}/compute.db")
    await make_tables(database)
    yield Cloud(database)
    await database.close()


async def test_a_change_is_read_once(cloud: Cloud) -> None:
    """Reads overlap by seconds; a change of the whole fleet was read ten times by each scheduler."""
    await cloud.add_hosts(20)
    await cloud.refresh_for(10.0)
    cloud.table.forget_counts()
    await cloud.database.write(host_states.touch_hosts, [f"host{n}" for n in range(20)], lambda: cloud.now)
    claimed = inventories.update().where(inventories.c.node_uuid.in_(["node-host1", "node-host2"]))
    await cloud.database.write(lambda conn: conn.execute(claimed.values(used=1, changed_at=cloud.now)))
    cloud.clock.time += 0.3
    await cloud.refresh_for(10.0)
    assert (cloud.table.nodes, cloud.table.amounts) == (20, 6)

    # A node of a change that was read changes again.
    cloud.table.forget_counts()
    await cloud.database.write(host_states.touch_hosts, [f"host{n}" for n in range(20)], lambda: cloud.now)
    cloud.clock.time += 0.3
    await cloud.refresh_for(1.0)
    await cloud.database.write(host_states.touch_hosts, ["host7"], lambda: cloud.now)
    cloud.clock.time += 0.3
    await cloud.refresh_for(10.0)
    assert cloud.table.nodes == 21


@pytest.mark.parametrize("late", [0.05, 1.0, 4.0])
async def test_a_commit_that_is_late_is_found(cloud: Cloud, late: float) -> None:
    await cloud.add_hosts(20)
    await cloud.refresh_for(10.0)
    moment = cloud.now
    await cloud.database.write(host_states.touch_hosts, [f"host{n}" for n in range(5)], lambda: moment)
    cloud.clock.time += late
    await cloud.feed.refresh(0.0)
    used = inventories.update().where(inventories.c.node_uuid == "node-host9", inventories.c.resource_class == "VCPU")
    await cloud.database.write(lambda conn: conn.execute(used.values(used=3, changed_at=moment)))
    await cloud.database.write(lambda conn: add_host(conn, "late", 99, now=moment))
    cloud.clock.time += 0.01
    await cloud.feed.refresh(0.0)
    assert "node-late" in cloud.table
    row = cloud.table.index("node-host9")
    assert row is not None and cloud.table.state(row).used["VCPU"] == 3


def up(cloud: Cloud, service_down_time: float) -> set[str]:
    """Return the hosts that ComputeFilter lets pass."""
    compute_filter = ComputeFilter(msgspec.structs.replace(OPTIONS, service_down_time=service_down_time))
    cloud.table.now = cloud.clock.now()
    view = cloud.table.view()
    mask = compute_filter.mask(view, a_spec())
    assert mask is not None
    return {each.host for each, passes in zip(view.selections(), mask, strict=True) if passes}


async def test_a_stop_that_a_host_announces_is_read_with_the_next_changes(cloud: Cloud) -> None:
    """It was found only when late heartbeats were looked for, and builds went to hosts without an agent meanwhile."""
    await cloud.add_hosts(3)
    await cloud.feed.refresh(0.0)
    await cloud.refresh_for(10.0)
    assert up(cloud, 20.0) == {"host0", "host1", "host2"}
    now = micros(cloud.clock.now())
    await cloud.database.write(lambda conn: services.compute_hosts_stopped(conn, ["host1"], now, 20.0))
    cloud.clock.time += 0.1
    await cloud.feed.refresh(0.0)
    assert up(cloud, 20.0) == {"host0", "host2"}


async def test_a_change_of_an_aggregate_that_waits_is_read_when_it_is_made(cloud: Cloud) -> None:
    """Its time was taken before it waited: other projects' servers went to reserved hosts for minutes."""
    await cloud.add_hosts(3)

    def add(conn: sa.Connection) -> int:
        made = aggregates.insert(conn, "aggregate", "reserved", None, cloud.now)
        aggregates.add_host(conn, made.id, "host0", lambda: cloud.now)
        return made.id

    number = await cloud.database.write(add)
    await cloud.refresh_for(10.0)
    free = threading.Event()
    before = asyncio.ensure_future(cloud.database.write(lambda conn: free.wait()))
    reserved: dict[str, str | None] = {"filter_tenant_id": "other"}
    change = asyncio.ensure_future(cloud.database.write(aggregates.update, number, None, reserved, lambda: cloud.now))
    await cloud.refresh_for(3 * OVERLAP)
    free.set()
    await asyncio.gather(before, change)
    cloud.clock.time += 0.1
    await cloud.feed.refresh(0.0)
    row = cloud.table.index("node-host0")
    assert row is not None and cloud.table.state(row).aggregates == (("reserved", reserved),)


@pytest.mark.parametrize("late", [10.0, 50.0])
async def test_a_commit_that_is_very_late_is_found_within_seconds(cloud: Cloud, late: float) -> None:
    """It was found when all hosts were read, which is up to ten minutes later in a large fleet."""
    await cloud.add_hosts(20)
    await cloud.refresh_for(90.0)
    moment = cloud.now
    await cloud.refresh_for(late)
    await cloud.database.write(host_states.touch_hosts, ["host3"], lambda: moment)
    cloud.table.forget_counts()
    await cloud.refresh_for(LONG_OVERLAP_INTERVAL + 0.5)
    assert cloud.table.nodes == 1


@pytest.mark.parametrize("late", [10.0, 55.0])
async def test_a_commit_that_is_very_late_refuses_no_request(cloud: Cloud, late: float) -> None:
    """Before a request is refused, the last minute is read again, and of it only what is not known."""
    await cloud.add_hosts(20)
    await cloud.refresh_for(90.0)
    moment = cloud.now
    await cloud.database.write(host_states.touch_hosts, [f"host{n}" for n in range(5)], lambda: moment)
    await cloud.refresh_for(late)
    cloud.table.forget_counts()
    await cloud.database.write(lambda conn: add_host(conn, "late", 99, now=moment))
    cloud.clock.time += REFUSED_INTERVAL + 0.1
    await cloud.feed.refresh_fully()
    assert "node-late" in cloud.table
    assert cloud.table.nodes == 6, "those that changed in the same tenth of a second"


async def test_a_full_cloud_is_not_read_as_a_whole(cloud: Cloud) -> None:
    """Requests that find no host read what has changed: a host that is new, or has room again."""
    await cloud.add_hosts(20)
    await cloud.feed.refresh(0.0)
    cloud.clock.time += 100.0
    await cloud.feed.refresh_fully()
    cloud.table.forget_counts()
    pages = cloud.database.statistics.by_function["load_page"]
    for number in range(100):
        cloud.clock.time += 3.0
        if number == 50:
            await cloud.database.write(lambda conn: add_host(conn, "new", 99, now=cloud.now))
            cloud.clock.time += 0.1
        await cloud.feed.refresh_fully()
        assert ("node-new" in cloud.table) == (number >= 50)
    assert cloud.database.statistics.by_function["load_page"] == pages
    assert cloud.table.nodes == 1


async def test_heartbeats_are_read_only_of_hosts_that_are_late(cloud: Cloud) -> None:
    """A scheduler read the heartbeats of all hosts every few seconds."""
    await cloud.add_hosts(20)
    await cloud.feed.refresh(0.0)
    everyone = [f"host{n}" for n in range(20)]
    dead, died = "host3", cloud.clock.now()

    cloud.table.forget_counts()
    while cloud.clock.now() < died + 60.0:
        await cloud.database.write(services.heartbeat, COMPUTE, [h for h in everyone if h != dead], cloud.now)
        await cloud.refresh_for(4.5)
        expected = set(everyone) if cloud.clock.now() - died <= 20.0 else set(everyone) - {dead}
        assert up(cloud, 20.0) == expected
    await cloud.database.write(services.heartbeat, COMPUTE, everyone, cloud.now)
    await cloud.refresh_for(6.0)
    assert up(cloud, 20.0) == set(everyone)
    assert 0 < cloud.table.services <= 12, "only the dead host's heartbeat is read, once per interval"


async def test_a_silent_fleet_is_read_once_and_in_parts(cloud: Cloud) -> None:
    """In an outage of the bus all hosts are late: each look read them all at once."""
    count = 2 * CHUNK + 10
    await cloud.add_hosts(count)
    await cloud.feed.refresh(0.0)
    await cloud.refresh_for(30.0)
    assert up(cloud, 20.0) == set()
    assert cloud.largest_read <= CHUNK
    cloud.table.forget_counts()
    await cloud.refresh_for(10.0)
    await cloud.feed.refresh_fully()
    assert (cloud.table.services, up(cloud, 20.0)) == (0, set())
    await cloud.database.write(services.heartbeat, COMPUTE, ["host7", "host8"], cloud.now)
    await cloud.refresh_for(6.0)
    assert up(cloud, 20.0) == {"host7", "host8"}
    # An administrator disables them all.
    disable = services_table.update().values(disabled=True, updated_at=cloud.now)
    await cloud.database.write(lambda conn: conn.execute(disable))
    await cloud.refresh_for(1.0)
    assert not cloud.table.view().column("enabled").any()
    assert cloud.largest_read <= CHUNK


async def test_a_large_fleet_is_read_in_parts(cloud: Cloud) -> None:
    """On PostgreSQL rows are decoded in the event loop, which has other things to do."""
    count = 3 * CHUNK + 10
    await cloud.add_hosts(count)
    await cloud.feed.refresh(0.0)
    assert len(cloud.table) == count
    await cloud.refresh_for(10.0)
    await cloud.database.write(host_states.touch_hosts, [f"host{n}" for n in range(count)], lambda: cloud.now)
    everything = inventories.update().values(used=1, changed_at=cloud.now)
    await cloud.database.write(lambda conn: conn.execute(everything))
    await cloud.refresh_for(1.0)
    assert set(cloud.table.view().used("VCPU")) == {1.0}
    assert cloud.largest_read <= CHUNK


async def test_a_refresh_does_not_wait_until_all_hosts_are_read(cloud: Cloud) -> None:
    """What changes during the read of all hosts is in the table after it, also if its page was read before."""
    count = 4 * CHUNK
    await cloud.add_hosts(count)
    await cloud.feed.refresh(0.0)
    await cloud.refresh_for(1.0)
    pages = cloud.database.statistics.by_function
    before, first_page, refreshing = pages["load_page"], asyncio.Event(), asyncio.Event()
    update, read = cloud.table.update, cloud.database.read

    def noting(states: Iterable[HostState]) -> None:
        update(states)
        first_page.set()

    async def held(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if fn is host_states.load_page and first_page.is_set():
            await refreshing.wait()
        return await read(fn, *args, **kwargs)

    cloud.table.update = noting  # type: ignore[method-assign]
    cloud.database.read = held  # type: ignore[method-assign]
    reload = asyncio.create_task(cloud.feed.reload_all())
    await first_page.wait()
    await cloud.database.write(_change_some, cloud.now)
    cloud.clock.time += 1.0
    refresh = asyncio.create_task(cloud.feed.refresh(0.4))
    await asyncio.sleep(0)  # it waits for the second page
    refreshing.set()
    await refresh
    assert pages["load_page"] - before <= 3, "of 5 pages"
    assert not reload.done()
    for _ in range(2):
        row = cloud.table.index("node-host0")
        assert "node-a" in cloud.table
        assert row is not None and cloud.table.state(row).used["VCPU"] == 2
        await reload
    assert "node-host7" not in cloud.table


def _change_some(conn: sa.Connection, now: int) -> None:
    """Add a host that is before all others, remove one, and use some of one."""
    add_host(conn, "a", 99_999, now=now)
    used = inventories.update().where(inventories.c.node_uuid == "node-host0", inventories.c.resource_class == "VCPU")
    conn.execute(used.values(used=2, changed_at=now))
    conn.execute(compute_nodes.delete().where(compute_nodes.c.uuid == "node-host7"))


def _stored_before(memory_mb: int) -> str:
    """Return a topology that earlier versions have stored."""
    return f'{{"cells": [{{"id": 0, "memory_mb": {memory_mb}}}]}}'


async def test_a_host_that_cannot_be_read_is_left_out_alone(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler that read it placed no servers any more, and a new one did not start."""
    await cloud.add_hosts(3)
    await cloud.feed.reload_all()
    changed = node_topologies.update().where(node_topologies.c.node_uuid == "node-host1")

    async def store(text: str) -> None:
        cloud.clock.time += 0.2
        values = {"topology": text, "changed_at": cloud.now}
        await cloud.database.write(lambda conn: conn.execute(changed.values(**values)))
        cloud.clock.time += 0.2

    await cloud.database.write(topologies.report, {"node-host1": NodeTopology()}, cloud.now)
    for number in range(3):
        await store(_stored_before(2**63 + number))
        await cloud.add_hosts_from(3 + number)
        await cloud.feed.refresh(0.0)
        await cloud.feed.refresh_fully()
        assert set(cloud.table.uuids) == {f"node-host{n}" for n in range(4 + number) if n != 1}
    await cloud.feed.reload_all()
    started = HostFeed(cloud.database, cloud.clock, default_zone="nova")
    await started.reload_all()
    assert set(started.table.uuids) == set(cloud.table.uuids) and started.table.left_out == {"node-host1"}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["node node-host1 gets no servers"] * 2
    await store(_stored_before(1024))
    await cloud.feed.refresh(0.0)
    assert "node-host1" in cloud.table and not cloud.table.left_out
    await store(_stored_before(2**64))
    await cloud.feed.refresh(0.0)
    await cloud.database.write(
        lambda conn: conn.execute(compute_nodes.delete().where(compute_nodes.c.uuid == "node-host1"))
    )
    await cloud.feed.reload_all()
    assert not cloud.table.left_out


@pytest.mark.parametrize("fully", [False, True])
async def test_an_error_that_nobody_expected_means_later(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, fully: bool
) -> None:
    """The server of the request would be in ERROR."""
    await cloud.add_hosts(1)
    await cloud.feed.reload_all()

    def fail(*_: object, **__: object) -> None:
        raise OverflowError("too large")

    cloud.clock.time += 1
    monkeypatch.setattr(host_states, "load_changes", fail)
    with pytest.raises(Unavailable, match="cannot read what hosts have"):
        await (cloud.feed.refresh_fully() if fully else cloud.feed.refresh(0.0))
    monkeypatch.undo()
    await cloud.feed.refresh(0.0)
