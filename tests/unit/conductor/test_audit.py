"""What the audit asks the database for is bounded, whatever it finds; on both databases."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor.findings import guests, images
from micronova.db import allocation_audit
from micronova.db.engine import Database
from micronova.db.tables import instance_actions, server_group_hosts
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def test_any_number_of_guests_may_differ(database: Database) -> None:
    """A site without power: more servers than a statement may have parameters."""

    def prepare(conn: sa.Connection) -> None:
        add_instances(conn, "s1", "s2")
        action = {"instance_uuid": "s1", "request_id": "r", "action": "resetState", "start_time": 1 << 50}
        values = {"user_id": "u", "project_id": "p", "updated_at": 1}
        conn.execute(instance_actions.insert(), {**action, **values})
        conn.execute(sa.text("UPDATE instances SET launched_at = 1"))

    await database.write(prepare)
    servers = ["s1", "s2", *(f"other-{number}" for number in range(40_000))]
    assert await database.read(guests._set_by_hand, servers) == {"s1"}
    assert await database.read(images._still_needed, servers) == {}


async def test_only_the_members_of_a_group_are_read_to_correct_it(database: Database) -> None:
    read: list[tuple[str, Any]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        read.append((statement, parameters))

    def repair(conn: sa.Connection) -> list[allocation_audit.Drift]:
        sa.event.listen(conn, "before_cursor_execute", note)
        return allocation_audit.repair_group(conn, "g1")

    def prepare(conn: sa.Connection) -> None:
        for group in ("g1", "g2"):
            conn.execute(server_group_hosts.insert(), {"group_uuid": group, "host": "h1", "members": 3})

    await database.write(prepare)
    assert [(drift.where, drift.recorded) for drift in await database.write(repair)] == [("g1", 3)]
    assert read and all("g1" in str(parameters) for _, parameters in read), read
    assert [drift.where for drift in await database.read(allocation_audit.audit)] == ["g2"]
