"""Servers that are shelved for long enough: each run of the job offloads each of them once, if it has its image."""

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
import sqlalchemy as sa

from micronova.conductor import shelved_offload
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.shelved_offload import offload_overdue
from micronova.db import instances as instance_rows
from micronova.db.engine import Database
from micronova.db.tables import instances, operations
from micronova.objects import shelved
from micronova.objects.clock import micros
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database
from tests.unit.scheduler.rows import add_instances

SERVERS = ("a", "b", "c")


class FailingEngine:
    """Ends each operation at once without success."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = ManualClock()
        self.offloaded: Counter[str] = Counter()

    def now(self) -> int:
        return micros(self.clock.now())

    async def lease_and_run(self, ids: list[str]) -> None:
        def fail(conn: sa.Connection) -> list[str]:
            found = conn.execute(sa.select(operations.c.instance_uuid).where(operations.c.id.in_(ids))).scalars().all()
            instance_rows.update_many(conn, found, self.now(), {"task_state": None})
            return list(found)

        self.offloaded.update(await self.database.write(fail))
        assert max(self.offloaded.values()) == 1, "a run does not begin with the same server again"


class Images:
    """The image service, with the images of some servers."""

    def __init__(self, *servers: str) -> None:
        self._servers = servers

    async def status_of_made(self, image_id: str) -> str | None:
        return "active" if image_id.removeprefix("image of ") in self._servers else None


async def _offload(request: pytest.FixtureRequest, images: Images) -> Counter[str]:
    """Run the job once, one server after the other; return the servers whose offload has begun."""
    async with compute_database("sqlite", request) as database:
        engine = FailingEngine(database)

        def prepare(conn: sa.Connection) -> None:
            add_instances(conn, *SERVERS)
            at = shelved.instant(engine.now() - micros(60.0))
            for id in SERVERS:
                known = {shelved.SHELVED_AT: at, shelved.SHELVED_IMAGE: f"image of {id}"}
                changes = {"vm_state": "shelved", "host": "one", "system_metadata": known}
                conn.execute(sa.update(instances).where(instances.c.uuid == id).values(changes))

        await database.write(prepare)
        needs = SimpleNamespace(engine=engine, operation_timeout=60.0, image_client=images)
        await offload_overdue(cast(ConductorDependencies, needs), 30.0)
    return engine.offloaded


async def test_a_server_that_cannot_leave_is_left_to_the_next_run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelved_offload, "TOGETHER", 1)
    assert await _offload(request, Images(*SERVERS)) == Counter(SERVERS)


async def test_no_operation_begins_for_a_server_whose_image_is_gone(request: pytest.FixtureRequest) -> None:
    """Its owner would get a failed instance action in each run."""
    assert await _offload(request, Images("a", "c")) == Counter(["a", "c"])
