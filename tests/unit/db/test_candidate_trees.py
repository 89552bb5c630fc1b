"""The trees that may serve a request for allocation candidates are chosen by the database, as far as it can."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db import provider_trees, tables
from micronova.db.engine import Database
from micronova.placement.candidates import find
from micronova.placement.model import RequestGroup, ResourceRequest
from micronova.placement.standard import SHARES_VIA_AGGREGATE
from tests.unit.db.databases import KINDS, compute_database


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


def _add(
    conn: sa.Connection, uuid: str, root: str, amounts: dict[str, int], traits: str = "", members: str = ""
) -> None:
    parent = None if root == uuid else root
    row = {"uuid": uuid, "name": uuid, "parent_uuid": parent, "root_uuid": root, "generation": 0}
    conn.execute(tables.resource_providers.insert(), row | {"created_at": 1, "updated_at": 1})
    for name, total in amounts.items():
        stock = {"node_uuid": uuid, "resource_class": name, "total": total, "capacity": total, "changed_at": 1}
        conn.execute(tables.inventories.insert(), stock)
    for trait in traits.split():
        conn.execute(tables.provider_traits.insert(), {"provider_uuid": uuid, "trait": trait})
    for aggregate in members.split():
        conn.execute(tables.provider_aggregates.insert(), {"provider_uuid": uuid, "aggregate_uuid": aggregate})


def _fill(conn: sa.Connection) -> None:
    _add(conn, "plain", "plain", {"VCPU": 4})
    _add(conn, "fast", "fast", {"VCPU": 4}, "FAST", "east")
    _add(conn, "below", "below", {"VCPU": 4}, "", "west")
    _add(conn, "card", "below", {"TRAFFIC": 9}, "FAST", "east")


def _share(conn: sa.Connection) -> None:
    """Let a provider share disks with `plain` and `fast`."""
    _add(conn, "disks", "disks", {"DISK_GB": 99}, f"SSD {SHARES_VIA_AGGREGATE}", "rack")
    for uuid in ("plain", "fast"):
        conn.execute(tables.provider_aggregates.insert(), {"provider_uuid": uuid, "aggregate_uuid": "rack"})


def _wanted(resources: dict[str, int], **group: Any) -> ResourceRequest:
    of_request = {name: group.pop(name) for name in ("root_required", "root_forbidden") if name in group}
    return ResourceRequest(groups=(RequestGroup(resources=resources, **group),), **of_request)


FAST, EAST = (frozenset({"FAST"}),), (frozenset({"east", "north"}),)


@pytest.mark.parametrize(
    ("wanted", "roots"),
    [
        (_wanted({"VCPU": 1}), {"plain", "fast", "below"}),
        (_wanted({"VCPU": 1}, required=FAST), {"fast", "below"}),
        (_wanted({"VCPU": 1}, suffix="A", required=FAST, member_of=EAST), {"fast", "below"}),
        (_wanted({"VCPU": 1}, member_of=EAST), {"fast", "below"}),
        (_wanted({"VCPU": 1}, required=(frozenset({"SLOW"}),)), set()),
        (_wanted({"VCPU": 1}, root_required=frozenset({"FAST"})), {"fast"}),
        (_wanted({"VCPU": 1}, root_forbidden=frozenset({"FAST"})), {"plain", "below"}),
        (_wanted({"VCPU": 1, "TRAFFIC": 1}, required=FAST), {"below"}),
    ],
)
async def test_trees_without_the_traits_or_aggregates_are_not_read(
    database: Database, wanted: ResourceRequest, roots: set[str]
) -> None:
    await database.write(_fill)
    assert set(await database.read(provider_trees.roots_of, wanted, [])) == roots


async def test_what_a_sharing_provider_has_need_not_be_in_the_tree(database: Database) -> None:
    await database.write(_fill)
    await database.write(_share)
    sharing = await database.read(provider_trees.load_sharing)
    for wanted, expected in (
        (_wanted({"VCPU": 1, "DISK_GB": 1}, required=(frozenset({"SSD"}),)), {"plain", "fast"}),
        (_wanted({"VCPU": 1, "DISK_GB": 1}, member_of=(frozenset({"rack"}),)), {"plain", "fast"}),
        (_wanted({"DISK_GB": 1}, member_of=(frozenset({"rack"}),)), {"disks"}),
    ):
        roots = await database.read(provider_trees.roots_of, wanted, sharing)
        trees = await database.read(provider_trees.load_trees, roots)
        found = find(wanted, [*trees, *sharing], roots)
        assert expected <= {uuid for each in found for uuid in each.allocations}
