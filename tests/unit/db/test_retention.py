"""What is kept for a time only: purges delete the oldest rows, in batches, with all that belongs to them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import periodic_jobs, retention
from micronova.db.engine import Database
from micronova.db.tables import deleted_instances, instance_action_events, instance_actions, instances, operations
from tests.unit.db.databases import KINDS, compute_database

BEFORE = 1_000


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


def _instance(uuid: str, **values: Any) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "project_id": "p",
        "user_id": "u",
        "reservation_id": "r",
        "display_name": uuid,
        "hostname": uuid,
        "vm_state": "active",
        "flavor_id": "1",
        "flavor": {},
        "created_at": 1,
        "updated_at": 1,
        **values,
    }


def _operation(id: str, finished_at: int | None) -> dict[str, Any]:
    return {
        "id": id,
        "kind": "build",
        "instance_uuid": id,
        "batch_id": "g",
        "step": "done",
        "epoch": 1,
        "deadline": 0,
        "payload": b"",
        "context": b"",
        "created_at": 0,
        "finished_at": finished_at,
    }


def _fill(conn: sa.Connection) -> None:
    ages = {"old-1": BEFORE - 500, "old-2": BEFORE - 400, "old-3": BEFORE - 1, "new": BEFORE}
    conn.execute(deleted_instances.insert(), [_instance(uuid, deleted_at=age) for uuid, age in ages.items()])
    conn.execute(instances.insert(), [_instance("living")])
    for uuid in (*ages, "living"):
        request = "shared" if uuid in ("old-1", "living") else f"req-{uuid}"  # one request may create both
        action = {"request_id": request, "instance_uuid": uuid, "action": "create", "start_time": 1, "updated_at": 1}
        conn.execute(instance_actions.insert(), action)
        event = {"request_id": request, "instance_uuid": uuid, "sequence": 1, "event": "e", "start_time": 1}
        conn.execute(instance_action_events.insert(), event)
    conn.execute(operations.insert(), [_operation(uuid, age) for uuid, age in ages.items()])
    conn.execute(operations.insert(), [_operation("open", None)])


def _left(conn: sa.Connection) -> dict[str, set[str]]:
    columns = {
        "servers": deleted_instances.c.uuid,
        "actions": instance_actions.c.instance_uuid,
        "events": instance_action_events.c.instance_uuid,
        "operations": operations.c.id,
    }
    return {name: set(conn.execute(sa.select(column)).scalars()) for name, column in columns.items()}


async def test_servers_go_with_their_actions_and_the_oldest_go_first(database: Database) -> None:
    await database.write(_fill)
    assert await database.read(retention.count_servers, BEFORE) == 3
    assert await database.write(retention.purge_servers, BEFORE, 2) == 2
    left = await database.read(_left)
    assert left["servers"] == {"old-3", "new"}
    assert left["actions"] == left["events"] == {"old-3", "new", "living"}
    assert await database.write(retention.purge_servers, BEFORE, 2) == 1
    assert await database.write(retention.purge_servers, BEFORE, 2) == 0
    left = await database.read(_left)
    assert left["servers"] == {"new"}
    assert left["operations"] == {"old-1", "old-2", "old-3", "new", "open"}


async def test_only_finished_operations_go(database: Database) -> None:
    await database.write(_fill)
    assert await database.read(retention.count_operations, BEFORE) == 3
    assert await database.write(retention.purge_operations, BEFORE, 2) == 2
    assert await database.write(retention.purge_operations, BEFORE, 2) == 1
    assert (await database.read(_left))["operations"] == {"new", "open"}


async def test_one_conductor_claims_a_job(database: Database) -> None:
    interval = 100
    assert await database.write(periodic_jobs.claim, "repair_counters", "a", 1_000, interval)
    assert not await database.write(periodic_jobs.claim, "repair_counters", "b", 1_000, interval)
    assert await database.write(periodic_jobs.claim, "purge", "b", 1_000, interval)
    assert not await database.write(periodic_jobs.claim, "repair_counters", "a", 1_099, interval)
    assert await database.write(periodic_jobs.claim, "repair_counters", "b", 1_100, interval)
    assert not await database.write(periodic_jobs.claim, "repair_counters", "a", 1_101, interval)


async def test_a_claim_by_a_clock_far_ahead_does_not_stop_a_job(database: Database) -> None:
    assert await database.write(periodic_jobs.claim, "repair_counters", "ahead", 1_000_000, 100)
    assert await database.write(periodic_jobs.claim, "repair_counters", "right", 1_000, 100)
