"""Migrations as rows, on both databases: what completes them, what is listed, and who holds what."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import sqlalchemy as sa

from micronova.db import allocations, departures, server_migrations, services
from micronova.db import claims as claim_rows
from micronova.db import instances as db_instances
from micronova.db.engine import Database
from micronova.db.tables import allocations as allocation_table
from micronova.db.tables import compute_nodes, instances, inventories, migrations
from micronova.objects import migration_states
from micronova.objects.errors import Conflict, HostNotHeard
from micronova.objects.migration import MigrationRow
from micronova.objects.service_names import COMPUTE
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances

FLAVOR = {"id": "f", "vcpus": 1, "ram": 512}


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


def _row(uuid: str, **values: Any) -> MigrationRow:
    values = {
        "uuid": uuid, "instance_uuid": f"server-{uuid}", "migration_type": "evacuation", "status": "done",
        "source_compute": "h1", "old_flavor": FLAVOR, "new_flavor": FLAVOR, "old_vm_state": "active",
        "user_id": "u", "project_id": "p", "request_id": "r", "created_at": 1, **values,
    }  # fmt: skip
    return cast(MigrationRow, values)


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
        seen += [row["uuid"] for row in rows]
        if not more:
            break
        marker = rows[-1]["uuid"]
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

    def claim(node: str, amount: int) -> list[claim_rows.Claim]:
        host = f"h{node[1]}"
        return [claim_rows.Claim(consumer_uuid="s", node_uuid=node, host=host, resources={"VCPU": amount}, moving="m")]

    await database.write(prepare)
    assert (await database.write(claim_rows.claim, claim("n1", 1), now=1)).claimed
    await database.write(allocations.hand_over, "s", holder="m")
    assert (await database.write(claim_rows.claim, claim("n2", 3), now=2)).claimed
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
        return "".join(row["uuid"] for row in found[0]), found[1]

    assert await listed(host="h1") == ("ecba", False)
    assert await listed(2, host="h1") == ("ec", True)
    assert await listed(2, "c", host="h1") == ("ba", False)
    assert await listed(host="h1", changes_since=14) == ("ecb", False)
    assert await listed(changes_since=14, changes_before=30) == ("ecb", False)
    assert await listed(changes_before=19) == ("ea", False)
    assert await listed(1, changes_since=30) == ("d", True)


def _lost(conn: sa.Connection, *hosts: str, forced: bool) -> None:
    """Add the services of both hosts of a move; these were not heard of for long."""
    services.heartbeat(conn, COMPUTE, ["h1", "h2"], 1)
    services.heartbeat(conn, COMPUTE, [host for host in ("h1", "h2") if host not in hosts], NOW)
    for host in hosts:
        services.update(conn, services.find(conn, host, COMPUTE).uuid, {"forced_down": forced}, NOW)


NOW = 1_000_000_000
OWN = {"finished": "h2", "confirming": "h2"}  # the server belongs to its source in all other statuses


@pytest.mark.parametrize("status", migration_states.OPEN)
@pytest.mark.parametrize("lost", ["h1", "h2", "both"])
async def test_a_copy_is_protected_only_if_it_can_be_used(database: Database, status: str, lost: str) -> None:
    """An administrator who forces hosts down can always end the move; else only a usable last copy prevents it."""
    own = OWN.get(status, "h1")
    other = "h2" if own == "h1" else "h1"
    hosts = ["h1", "h2"] if lost == "both" else [lost]

    def prepare(conn: sa.Connection, forced: bool) -> None:
        add_instances(conn, "s")
        conn.execute(sa.update(instances).values(host=own, node_uuid="n1"))
        values = {"dest_compute": "h2", "source_node_uuid": "n1", "migration_type": "resize", "status": status}
        server_migrations.insert(conn, _row("m", instance_uuid="s", **values))
        conn.execute(allocation_table.insert(), {"consumer_uuid": "m", "node_uuid": "n1", "resource_class": "VCPU",
                                                 "used": 1})  # fmt: skip
        _lost(conn, *hosts, forced=forced)

    def check(conn: sa.Connection) -> str:
        row = db_instances.get(conn, "s")
        assert row is not None
        try:
            server_migrations.check_last_copy(conn, row, NOW, 60.0, asked)
        except Conflict as error:
            return error.message
        return ""

    asked: server_migrations.HostAsked | None = None
    await database.write(prepare, False)
    copied = status in ("post-migrating", "finished", "confirming", "reverting")
    if copied and own not in hosts:  # it seems up, and may have died a moment ago
        with pytest.raises(HostNotHeard, match="has not been asked") as unheard:
            await database.read(check)
        assert unheard.value.details == {"host": own}
        asked = server_migrations.HostAsked(own, answered=False)
        assert "only another one has its disks" in await database.read(check)
    asked = server_migrations.HostAsked(own, answered=True)
    message = await database.read(check)
    assert bool(message) == (copied and own in hosts)
    assert ("only another one has its disks" in message) == bool(message)
    assert ("that one does not answer either" in message) == (bool(message) and lost == "both")
    if lost == "both":
        uuid = (await database.read(services.find, other, COMPUTE)).uuid
        await database.write(services.update, uuid, {"forced_down": True}, NOW)
        assert await database.read(check) == ""


async def test_a_destination_that_a_revert_has_left_has_no_copy(database: Database) -> None:
    def prepare(conn: sa.Connection) -> None:
        add_instances(conn, "s")
        conn.execute(sa.update(instances).values(host="h1", node_uuid="n1"))
        values = {"dest_compute": "h2", "source_node_uuid": "n1", "migration_type": "resize", "status": "reverting"}
        server_migrations.insert(conn, _row("m", instance_uuid="s", **values))
        _lost(conn, "h1", forced=True)

    def check(conn: sa.Connection) -> None:
        row = db_instances.get(conn, "s")
        assert row is not None
        server_migrations.check_last_copy(conn, row, NOW, 60.0)

    await database.write(prepare)
    await database.read(check)  # the migration holds nothing any more


async def test_departures_of_servers_whose_host_was_not_heard_of_are_held_back(database: Database) -> None:
    """Only of those that moved between these hosts: what is left of a build or an evacuation is no copy of anything."""
    places = {"waits": "h2", "heard": "h3", "deleting": "h2", "nowhere": None, "same": "h1", "built": "h2"}
    places |= {"elsewhere": "h2", "evacuated": "h2"}
    moves = dict.fromkeys(("waits", "heard", "deleting", "nowhere", "same"), ("resize", "h1"))
    moves |= {"elsewhere": ("resize", "h4"), "evacuated": ("evacuation", "h1")}

    def prepare(conn: sa.Connection) -> None:
        add_instances(conn, *places)
        for uuid, host in places.items():
            task_state = "deleting" if uuid == "deleting" else None
            changed = sa.update(instances).where(instances.c.uuid == uuid)
            conn.execute(changed.values(host=host, task_state=task_state))
        for uuid, (kind, host) in moves.items():
            values = {"instance_uuid": uuid, "migration_type": kind, "source_compute": "h3", "dest_compute": host}
            server_migrations.insert(conn, _row(f"m-{uuid}", **values))
        for uuid in (*places, "gone"):
            departures.record(conn, "h1", uuid, 7, 100)
        _alive(conn, {"h1": 100, "h2": 100, "h3": 101})

    def _alive(conn: sa.Connection, at: dict[str, int]) -> None:
        services.compute_heartbeats(conn, dict.fromkeys(at, 1), at, 200)

    await database.write(prepare)
    assert await database.read(departures.held_back, ["h1", "h2"]) == {("h1", "waits", 7)}
    await database.write(_alive, {"h2": 101})
    assert await database.read(departures.held_back, ["h1"]) == set()
