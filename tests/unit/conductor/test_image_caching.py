"""How many hosts fetch images ahead of time at once, and what becomes of a conductor's requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sqlalchemy as sa

from micronova.compute.rpcapi import CacheStatus
from micronova.conductor.image_caching import CacheImagesTasks
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import aggregates, services
from micronova.db.engine import Database
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.image import ImageMeta
from micronova.objects.service_names import COMPUTE
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database

HOSTS = [f"h{number}" for number in range(5)]


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


class Hosts:
    """Hosts that fetch images for as long as the test wants."""

    def __init__(self) -> None:
        self.at_work: set[str] = set()
        self.urls: list[str | None] = []
        self.most = 0
        self.status: CacheStatus = "cached"
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.takes: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)

    async def cache_image(self, context: Context, host: str, image: ImageMeta, url: str | None) -> CacheStatus:
        self.urls.append(url)
        self.at_work.add(host)
        self.most = max(self.most, len(self.at_work))
        self.begun.set()
        await self.gate.wait()
        await self.takes()
        self.at_work.remove(host)
        return self.status


class World:
    def __init__(self, database: Database, concurrency: int) -> None:
        self.clock, self.hosts = ManualClock(), Hosts()
        self.told: list[Any] = []
        self.ended = asyncio.Event()
        engine = SimpleNamespace(
            database=database, clock=self.clock, now=lambda: micros(self.clock.now()), owner="conductor:a"
        )
        needs = SimpleNamespace(
            engine=engine,
            compute=self.hosts,
            image_client=SimpleNamespace(download_url=lambda id: f"http://images/{id}?ticket={len(self.hosts.urls)}"),
            notifier=self,
            service_down_time=60.0,
            operation_timeout=100.0,
        )
        self.caching = CacheImagesTasks(cast(ConductorDependencies, needs), concurrency)

    def announce(self, context: Context, make: Any) -> None:
        self.told.append(make())
        if self.told[-1].event.endswith(".end"):
            self.ended.set()

    def failed(self) -> list[str]:
        """The images that could not be cached."""
        told = [each.payload["nova_object.data"] for each in self.told if each.event.endswith(".progress")]
        return [image for each in told for image in each["images_failed"]]


async def _aggregate(database: Database, now: int) -> int:
    def add(conn: sa.Connection) -> int:
        services.heartbeat(conn, COMPUTE, HOSTS, now)
        row = aggregates.insert(conn, "11111111-1111-4111-8111-111111111111", "a", None, now)
        for host in HOSTS:
            aggregates.add_host(conn, row.id, host, lambda: now)
        return row.id

    return await database.write(add)


async def test_so_many_hosts_at_once_for_all_requests(database: Database) -> None:
    world = World(database, concurrency=2)
    number = await _aggregate(database, micros(world.clock.now()))
    for image in ("one", "two"):
        world.caching.begin(Context(), number, [ImageMeta(id=image)])
    while len(world.hosts.at_work) < 2:
        await asyncio.wait_for(world.hosts.begun.wait(), 10)
        world.hosts.begun.clear()
    world.hosts.gate.set()
    async with asyncio.timeout(10):
        while sum(each.event.endswith(".end") for each in world.told) < 2:
            await world.ended.wait()
            world.ended.clear()
    assert world.hosts.most == 2
    assert sum(each.event.endswith(".progress") for each in world.told) == 2 * len(HOSTS)
    assert len(set(world.hosts.urls)) == len(world.hosts.urls)  # a ticket for each host


async def test_a_download_that_never_ends(database: Database) -> None:
    world = World(database, concurrency=1)
    number = await _aggregate(database, micros(world.clock.now()))
    world.hosts.status = "caching"
    world.hosts.gate.set()
    world.hosts.takes = lambda: world.clock.advance(20.0)
    world.caching.begin(Context(), number, [ImageMeta(id="one")])
    await asyncio.wait_for(world.ended.wait(), 10)
    assert world.failed() == ["one"] * len(HOSTS)


async def test_a_conductor_that_stops(database: Database) -> None:
    world = World(database, concurrency=1)
    number = await _aggregate(database, micros(world.clock.now()))
    world.caching.begin(Context(), number, [ImageMeta(id="one")])
    await asyncio.wait_for(world.hosts.begun.wait(), 10)
    await world.caching.stop()
    assert [each.event for each in world.told] == ["aggregate.cache_images.start"]
