"""Servers that are shelved for long enough: each run of the job offloads each of them once, if it has its image."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import sqlalchemy as sa

from micronova.conductor import shelved_offload
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.shelved_offload import offload_overdue
from micronova.db import instances as instance_rows
from micronova.db import periodic_jobs
from micronova.db.engine import Database
from micronova.db.tables import instances, operations
from micronova.objects import shelved
from micronova.objects.clock import micros
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database
from tests.unit.scheduler.rows import add_instances

SERVERS = ("a", "b", "c")


class RecordingEngine:
    """Has what a job needs: the operations that it records are for the sweeps of all conductors."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = ManualClock()

    def now(self) -> int:
        return micros(self.clock.now())


class Images:
    """The image service, with the images of some servers."""

    def __init__(self, *servers: str) -> None:
        self._servers = servers

    async def status_of_made(self, image_id: str) -> str | None:
        return "active" if image_id.removeprefix("image of ") in self._servers else None


class World:
    """Servers that are shelved for long enough, and the job."""

    def __init__(self, database: Database, images: Images, servers: Sequence[str]) -> None:
        self.database = database
        self.engine = RecordingEngine(database)
        self._servers = servers
        needs = SimpleNamespace(engine=self.engine, operation_timeout=60.0, image_client=images)
        self._needs = cast(ConductorDependencies, needs)

    def prepare(self, conn: sa.Connection) -> None:
        add_instances(conn, *self._servers)
        at = shelved.instant(self.engine.now() - micros(60.0))
        for id in self._servers:
            known = {shelved.SHELVED_AT: at, shelved.SHELVED_IMAGE: f"image of {id}"}
            changes = {"vm_state": "shelved", "host": "one", "system_metadata": known}
            conn.execute(sa.update(instances).where(instances.c.uuid == id).values(changes))

    async def run(self) -> list[str]:
        """Run the job once; return the servers whose offload has begun, which then fails."""

        def take(conn: sa.Connection) -> list[str]:
            found = conn.execute(sa.select(operations.c.instance_uuid).where(operations.c.finished_at.is_(None)))
            servers = list(found.scalars())
            conn.execute(operations.update().values(finished_at=self.engine.now()))
            instance_rows.update_many(conn, servers, self.engine.now(), {"task_state": None})
            return sorted(servers)

        await self.engine.clock.advance(1.0)
        now, interval = self.engine.now(), 1
        assert await self.database.write(periodic_jobs.claim, shelved_offload.NAME, "a conductor", now, interval)
        await offload_overdue(self._needs, 30.0)
        return await self.database.write(take)


@contextlib.asynccontextmanager
async def _world(
    request: pytest.FixtureRequest, images: Images, servers: Sequence[str] = SERVERS
) -> AsyncIterator[World]:
    async with compute_database("sqlite", request) as database:
        world = World(database, images, servers)
        await database.write(world.prepare)
        yield world


async def test_a_server_that_cannot_leave_is_left_to_the_next_run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelved_offload, "TOGETHER", 1)
    async with _world(request, Images(*SERVERS)) as world:
        assert [await world.run() for _ in range(2)] == [list(SERVERS)] * 2


async def test_no_operation_begins_for_a_server_whose_image_is_gone(request: pytest.FixtureRequest) -> None:
    """Its owner would get a failed instance action in each run."""
    async with _world(request, Images("a", "c")) as world:
        assert await world.run() == ["a", "c"]


async def test_a_run_takes_some_and_the_next_ones_the_others(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that stay, because their images are gone, do not keep the job from those behind them."""
    monkeypatch.setattr(shelved_offload, "TOGETHER", 2)
    monkeypatch.setattr(shelved_offload, "MOST_BEGUN", 4)
    async with _world(request, Images(*"fgh"), "abcdefgh") as world:
        runs = [await world.run() for _ in range(5)]
    assert runs == [[], list("fgh"), [], [], list("fgh")]  # the third finds that it is at the end
