"""Migrations as rows, on both databases: what completes them, what is listed, and who holds what."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import allocations, server_migrations
from micronova.db.engine import Database
from micronova.db.tables import allocations as allocation_table
from micronova.db.tables import compute_nodes, inventories, migrations
from tests.unit.db.databases import KINDS, compute_database

FLAVOR = {"id": "f", "vcpus": 1, "ram": 512}


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


def _row(uuid: str, **values: Any) -> dict[str, Any]:
    return {
        "uuid": uuid, "instance_uuid": f"server-{uuid}", "migration_type": "evacuation", "status": "done",
        "source_compute": "h1", "old_flavor": FLAVOR, "new_flavor": FLAVOR, "old_vm_state": "active",
        "user_id": "u", "project_id": "p", "request_id": "r", "created_at": 1, **values,
    }  # fmt: skip


async def _statuses(database: Database) -> dict[str, str]:
    rows = await database.read(lambda conn: conn.execute(sa.select(migrations)).all())
    return {row.uuid: row.status for row in rows}


async def test_only_evacuations_of_what_a_host_has_removed_are_completed(database: Database) -> None:
    others = (_row("c", source_compute="h2"), _row("d", status="accepted"))
    for row in (_row("a"), _row("b"), *others):
        await database.write(server_migrations.insert, row)
    removed = [("h1", "server-a"), ("h1", "server-c"), ("h2", "server-b"), ("h1", "server-d"), ("h1", "unknown")]
    await database.write(server_migrations.complete_evacuations, removed, 7)
    assert await _statuses(database) == {"a": "completed", "b": "done", "c": "done", "d": "accepted"}
    await database.write(server_migrations.complete_evacuations, [], 8)


async def test_pages_are_in_the_order_of_creation_and_end(database: Database) -> None:
    for number, uuid in enumerate("abcd"):
        await database.write(server_migrations.insert, _row(uuid, created_at=number // 2))
    seen: list[str] = []
    marker = None
    while True:
        found = await database.read(server_migrations.list_page, {"project_id": "p"}, marker=marker, limit=3)
        assert found is not None
        rows, more = found
        seen += [row.uuid for row in rows]
        if not more:
            break
        marker = rows[-1].uuid
    assert seen == list("dcba")
    assert await database.read(server_migrations.list_page, {}, marker="x") is None


async def test_a_claim_is_handed_over_and_taken_back(database: Database) -> None:
    """What a server claims for its move is given back, and what it left is its own again; a second time is no error."""

    def prepare(conn: sa.Connection) -> None:
        for node in ("n1", "n2"):
            known = {"uuid": node, "id": int(node[1]), "host": f"h{node[1]}", "hypervisor_hostname": node}
            known |= {"hypervisor_type": "fake", "hypervisor_version": 1, "host_ip": "127.0.0.1"}
            conn.execute(compute_nodes.insert(), {**known, "created_at": 0, "changed_at": 0})
            stock = {"node_uuid": node, "resource_class": "VCPU", "total": 4, "capacity": 4, "changed_at": 0}
            conn.execute(inventories.insert(), stock)

    def held(conn: sa.Connection) -> set[tuple[str, str, int]]:
        rows = conn.execute(sa.select(allocation_table))
        return {(row.consumer_uuid, row.node_uuid, row.used) for row in rows}

    def used(conn: sa.Connection) -> dict[str, int]:
        return {row.node_uuid: row.used for row in conn.execute(sa.select(inventories))}

    def claim(node: str, amount: int) -> list[allocations.Claim]:
        host = f"h{node[1]}"
        return [allocations.Claim(consumer_uuid="s", node_uuid=node, host=host, resources={"VCPU": amount}, moving="m")]

    await database.write(prepare)
    assert (await database.write(allocations.claim, claim("n1", 1), now=1)).claimed
    await database.write(allocations.hand_over, "s", holder="m")
    assert (await database.write(allocations.claim, claim("n2", 3), now=2)).claimed
    assert await database.read(held) == {("m", "n1", 1), ("s", "n2", 3)}
    assert await database.read(allocations.places_of, ["m", "s"]) == {"h1": 1, "h2": 1}
    for _ in range(2):
        await database.write(allocations.take_back, "s", holder="m", now=3, group_uuid=None)
        assert await database.read(held) == {("s", "n1", 1)}
        assert await database.read(used) == {"n1": 1, "n2": 0}
