"""Guests that hosts have not removed: those that nobody can remove now do not hide the others."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
import sqlalchemy as sa

from micronova.conductor.incomplete_migrations import MOST, find_incomplete_migrations
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import services
from micronova.db.engine import Database
from micronova.db.tables import departures, instances, migrations
from micronova.objects import migration_states
from micronova.objects.clock import micros
from micronova.objects.errors import OperationFailed
from micronova.objects.service_names import COMPUTE
from tests.clocks import ManualClock
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances

DOWN_TIME = 60.0


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def _run(database: Database, clock: ManualClock) -> str:
    """Run the job; return its error."""
    engine = SimpleNamespace(database=database, clock=clock, now=lambda: micros(clock.now()))
    needs = SimpleNamespace(engine=engine, service_down_time=DOWN_TIME)
    try:
        await find_incomplete_migrations(cast(ConductorDependencies, needs))
    except OperationFailed as error:
        return error.message
    return ""


def _leave(conn: sa.Connection, host: str, servers: list[str], at: int) -> None:
    rows = [{"host": host, "instance_uuid": server, "epoch": 1, "created_at": at} for server in servers]
    conn.execute(departures.insert(), rows)


def _moved(conn: sa.Connection, servers: list[str], source: str, to: str) -> None:
    """Let servers be on a host that they were moved to."""
    add_instances(conn, *servers)
    conn.execute(instances.update().where(instances.c.uuid.startswith(source)).values(host=to))
    values = {
        "status": "confirmed", "migration_type": migration_states.MIGRATION, "source_compute": source,
        "dest_compute": to, "old_flavor": {}, "new_flavor": {}, "old_vm_state": "active", "user_id": "u",
        "project_id": "p", "request_id": "r", "created_at": 1,
    }  # fmt: skip
    conn.execute(migrations.insert(), [{**values, "uuid": f"m-{each}", "instance_uuid": each} for each in servers])


async def test_hosts_that_are_down_hide_no_host(database: Database) -> None:
    """A part of the fleet is lost for long, with more guests than one run looks at."""
    clock = ManualClock()
    now = micros(clock.now())

    def prepare(conn: sa.Connection) -> None:
        services.heartbeat(conn, COMPUTE, ["down"], now - micros(10 * DOWN_TIME))
        services.heartbeat(conn, COMPUTE, ["up"], now)
        _leave(conn, "down", [f"lost-{number}" for number in range(MOST)], 1)
        _leave(conn, "gone", [f"gone-{number}" for number in range(MOST)], 1)
        _leave(conn, "up", ["left"], 2)
        _leave(conn, "up", ["recent"], now)

    await database.write(prepare)
    assert "up (1)" in await _run(database, clock)


async def test_guests_that_are_held_back_hide_no_host(database: Database) -> None:
    """The servers moved to a host that died at once: the guests that they left are their last copies, perhaps."""
    clock = ManualClock()
    now = micros(clock.now())

    def prepare(conn: sa.Connection) -> None:
        services.heartbeat(conn, COMPUTE, ["dead"], now - micros(10 * DOWN_TIME))
        services.heartbeat(conn, COMPUTE, ["held", "up"], now)
        servers = [f"held-{number}" for number in range(MOST)]
        _moved(conn, servers, "held", "dead")
        _leave(conn, "held", servers, 1)
        _leave(conn, "up", ["left"], 2)

    await database.write(prepare)
    error = await _run(database, clock)
    assert "up (1)" in error and "held" not in error


async def test_nothing_is_named_where_hosts_had_no_time(database: Database) -> None:
    clock = ManualClock()
    now = micros(clock.now())

    def prepare(conn: sa.Connection) -> None:
        services.heartbeat(conn, COMPUTE, ["up"], now)
        _leave(conn, "up", ["recent"], now)

    await database.write(prepare)
    assert await _run(database, clock) == ""
