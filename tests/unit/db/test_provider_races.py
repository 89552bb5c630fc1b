"""Two changes of one tree of resource providers at the same moment, on PostgreSQL: the second sees the first."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import node_reports, nodes, provider_inventories, providers
from micronova.db.engine import open_database
from micronova.db.provider_inventories import InventoryFields
from micronova.db.tables import inventories, resource_providers
from micronova.objects.errors import Conflict, Invalid, MicronovaError
from tests.unit.db.databases import open_transaction
from tests.unit.db.test_node_reports import UUID, a_node, waits_for_a_lock
from tests.unit.scheduler.rows import make_tables

STOCK: InventoryFields = {
    "total": 8, "reserved": 0, "min_unit": 1, "max_unit": 8, "step_size": 1, "allocation_ratio": 1.0
}  # fmt: skip
Change = Callable[[sa.Connection], Any]


def _child(name: str, parent: str) -> Change:
    return lambda conn: providers.create(conn, name, name, parent, 2)


def _delete(name: str) -> Change:
    return lambda conn: providers.delete(conn, name, 2)


def _move(name: str, parent: str | None) -> Change:
    return lambda conn: providers.update(conn, name, name, parent, may_move=True, now=2)


def _stock(name: str) -> Change:
    return lambda conn: provider_inventories.add(conn, name, "VCPU", STOCK, None, 2)


def _make(conn: sa.Connection) -> None:
    node_reports.record(conn, {"h": [a_node()]}, 1)
    for name, parent in (("a", None), ("b", None), ("c", "a"), ("d", UUID)):
        providers.create(conn, name, name, parent, 1)


def _read(conn: sa.Connection) -> dict[str, tuple[str | None, str]]:
    """Return parent and root of each provider; check that the trees are whole."""
    found = {row.uuid: (row.parent_uuid, row.root_uuid) for row in conn.execute(sa.select(resource_providers))}
    for uuid, (_, root) in found.items():
        top, steps = uuid, 0
        while (above := found[top][0]) is not None:
            top, steps = above, steps + 1
            assert steps <= len(found), f"{uuid} is below itself"
        assert top == root
    with_stock = set(conn.execute(sa.select(inventories.c.node_uuid)).scalars())
    assert with_stock <= found.keys()
    return found


@pytest.mark.parametrize(
    ("first", "second", "refusal", "left"),
    [
        (_delete("c"), _child("e", "c"), "parent provider UUID does not exist", {"c": None, "e": None}),
        (_child("e", "c"), _delete("c"), "It has child resource providers", {"e": ("c", "a")}),
        (_delete("d"), _child("e", "d"), "parent provider UUID does not exist", {"d": None, "e": None}),
        (_delete("c"), _stock("c"), "generation conflict", {"c": None}),
        (_stock("c"), _delete("c"), None, {"c": None}),
        (_move("a", "b"), _move("b", "a"), "creating loop in the provider tree", {"a": ("b", "b"), "c": ("a", "b")}),
        (_move("a", "b"), _child("e", "c"), None, {"e": ("c", "b")}),
        (_move("c", "b"), _delete("b"), "It has child resource providers", {"c": ("b", "b")}),
        (_move("a", "d"), _move("b", "c"), None, {"b": ("c", UUID), "c": ("a", UUID)}),
        (_child("e", "d"), lambda conn: nodes.delete_of_host(conn, "h"), None, {"d": None, "e": None, UUID: None}),
        (lambda conn: nodes.delete_of_host(conn, "h"), _stock("d"), "generation conflict", {"d": None, UUID: None}),
        (lambda conn: nodes.delete_of_host(conn, "h"), _child("e", "d"), "does not exist", {"d": None, "e": None}),
    ],
)
async def test_the_second_sees_the_first(
    database_url: str,
    first: Change,
    second: Change,
    refusal: str | None,
    left: dict[str, tuple[str | None, str] | None],
) -> None:
    slow, other = open_database(database_url), open_database(database_url)
    try:
        await make_tables(other)
        await other.write(_make)
        async with open_transaction(slow) as transaction:
            await transaction.run(first)
            later = asyncio.create_task(other.write(second))
            await waits_for_a_lock(other)
        if refusal is None:
            await later
        else:
            with pytest.raises((Conflict, Invalid), match=refusal):
                await later
        found = await other.read(_read)
        assert {name: found.get(name) for name in left} == left
    finally:
        await slow.close()
        await other.close()


async def test_trees_stay_whole_whatever_races(database_url: str) -> None:
    database = open_database(database_url)
    chance = random.Random(7)
    names = [f"p{number}" for number in range(6)]

    async def worker(number: int) -> int:
        done = 0
        for turn in range(25):
            name, parent = chance.sample([*names, UUID], 2)
            change = chance.choice(
                [
                    _child(name, parent),
                    _child(f"{name[:8]}-{number}-{turn}", parent),
                    _delete(name),
                    _move(name, parent),
                    _move(name, None),
                    _stock(name),
                ]
            )
            try:
                await database.write(change)
                done += 1
            except MicronovaError:  # the tree, as it is by then, does not allow it
                await asyncio.sleep(0)
        return done

    try:
        await make_tables(database)
        await database.write(_make)
        for name in names:
            await database.write(providers.create, name, name, None, 1)
        assert sum(await asyncio.gather(*map(worker, range(6)))) > 40
        await database.read(_read)
    finally:
        await database.close()


async def test_a_change_of_a_tree_does_not_wait_for_another_tree(database_url: str) -> None:
    slow, other = open_database(database_url), open_database(database_url)
    try:
        await make_tables(other)
        await other.write(_make)
        async with open_transaction(slow) as transaction:
            await transaction.run(_child("e", "a"))
            await asyncio.wait_for(other.write(_child("f", "b")), 4)
        assert (await other.read(_read))["f"] == ("b", "b")
    finally:
        await slow.close()
        await other.close()
