"""Migrations as rows, on both databases: what completes them, what is listed, and who holds what."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import allocations, server_migrations
from micronova.db.engine import Database
from micronova.db.tables import allocations as allocation_table
from micronova.db.tables import compute_nodes, instances, inventories, migrations
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances

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
    assert await database.read(allocations.hosts_of, ["m", "s"]) == {"h1": 1, "h2": 1}
    for _ in range(2):
        await database.write(allocations.take_back, "s", holder="m", node_uuid="n1", now=3, group_uuid=None)
        assert await database.read(held) == {("s", "n1", 1)}
        assert await database.read(used) == {"n1": 1, "n2": 0}


async def test_resizes_that_cannot_be_confirmed_do_not_hide_those_that_can(database: Database) -> None:
    states = {"failed": ("error", None), "busy": ("resized", "deleting"), "ready": ("resized", None)}

    def prepare(conn: sa.Connection) -> None:
        add_instances(conn, *states)
        for number, (server, (vm_state, task_state)) in enumerate(states.items()):
            values = {"vm_state": vm_state, "task_state": task_state}
            conn.execute(sa.update(instances).where(instances.c.uuid == server).values(values))
            finished = {"instance_uuid": server, "migration_type": "resize", "status": "finished"}
            server_migrations.insert(conn, _row(f"m-{server}", **finished, updated_at=number))
        server_migrations.insert(conn, _row("gone", migration_type="resize", status="finished", updated_at=0))

    await database.write(prepare)
    assert await database.read(server_migrations.unconfirmed, 10, 1) == [("m-ready", "ready")]
    assert await database.read(server_migrations.unconfirmed, 2, 1) == []


async def test_a_page_by_host_and_time_has_each_migration_once(database: Database) -> None:
    """Those that were never updated changed when they were created; a resize may have one host."""
    places = {"a": ("h1", "h2"), "b": ("h2", "h1"), "c": ("h1", "h1"), "d": ("h3", "h2"), "e": ("h1", None)}
    times = {"b": 20, "c": 30, "d": 40}
    for number, (uuid, (source, destination)) in enumerate(places.items()):
        updated = times.get(uuid)
        row = _row(uuid, source_compute=source, dest_compute=destination, updated_at=updated, created_at=10 + number)
        await database.write(server_migrations.insert, row)

    async def listed(limit: int | None = None, marker: str | None = None, **wanted: Any) -> tuple[str, bool]:
        found = await database.read(server_migrations.list_page, {}, limit=limit, marker=marker, **wanted)
        assert found is not None
        return "".join(row.uuid for row in found[0]), found[1]

    assert await listed(host="h1") == ("ecba", False)
    assert await listed(2, host="h1") == ("ec", True)
    assert await listed(2, "c", host="h1") == ("ba", False)
    assert await listed(host="h1", changes_since=14) == ("ecb", False)
    assert await listed(changes_since=14, changes_before=30) == ("ecb", False)
    assert await listed(changes_before=19) == ("ea", False)
    assert await listed(1, changes_since=30) == ("d", True)
