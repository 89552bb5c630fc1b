"""Servers that are soft-deleted for long enough: a run records some deletes, for the sweeps of all conductors."""

from types import SimpleNamespace
from typing import cast

import pytest
import sqlalchemy as sa

from micronova.conductor import reclaim
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db.tables import instances, operations
from micronova.objects.clock import micros
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database
from tests.unit.scheduler.rows import add_instances

SERVERS = [f"s{number}" for number in range(7)]


async def test_a_run_records_some_deletes_and_leases_none(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "TOGETHER", 2)
    monkeypatch.setattr(reclaim, "MOST_BEGUN", 4)
    clock = ManualClock()
    async with compute_database("sqlite", request) as database:

        def prepare(conn: sa.Connection) -> None:
            add_instances(conn, *SERVERS)
            conn.execute(instances.update().values(vm_state="soft-delete", deleted_at=micros(clock.now() - 60)))

        await database.write(prepare)
        # Only recorded: this engine can start nothing.
        health = SimpleNamespace(undisturbed_for=lambda: 3600.0)
        engine = SimpleNamespace(database=database, clock=clock, now=lambda: micros(clock.now()), health=health)
        needs = cast(ConductorDependencies, SimpleNamespace(engine=engine, operation_timeout=60.0))
        recorded = []
        for _ in range(3):
            await reclaim.reclaim(needs, 30.0)
            rows = await database.read(lambda conn: conn.execute(sa.select(operations)).all())
            recorded.append(len(rows))
            assert {(row.kind, row.owner) for row in rows} == {("delete", None)}
    assert recorded == [4, 7, 7]
