"""What must be true of claims on every database; run by test_claims here and under tests/integration."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor.findings import counters
from micronova.db import (
    allocation_audit,
    allocations,
    group_members,
    placement_names,
    provider_allocations,
    provider_inventories,
    providers,
    tables,
    topologies,
)
from micronova.db import claims as claim_rows
from micronova.db.engine import Database
from micronova.db.provider_allocations import AllocationRequest
from micronova.db.provider_inventories import InventoryFields
from micronova.objects.errors import Conflict
from micronova.objects.fitting import lacking
from micronova.objects.topology import (
    CellRequest,
    DeviceRequest,
    HostCell,
    NodeTopology,
    PciDevice,
    TopologyRequest,
    decode_use,
)
from micronova.placement.model import RequestGroup, ResourceRequest
from tests.plans import recorded
from tests.unit.scheduler.rows import (
    CAPACITY,
    SMALL,
    a_claim,
    a_group,
    add_group,
    add_host,
    add_instances,
    make_tables,
    used,
)


def cloud(conn: sa.Connection, hosts: str = "ab", instances: int = 4, group: str | None = None) -> None:
    """A few hosts with room for four small instances each, and some instances."""
    for number, name in enumerate(hosts):
        add_host(conn, name, number)
    if instances:
        add_instances(conn, *(f"i{number}" for number in range(instances)), group=group)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"disabled": True}, "disabled"),
        ({"forced_down": True}, "down"),
        ({"disabled": True, "forced_down": True}, "disabled"),
    ],
)
async def test_a_host_that_an_admin_has_closed(database: Database, values: dict[str, bool], reason: str) -> None:
    await make_tables(database)
    await database.write(cloud)

    def close(conn: sa.Connection) -> None:
        conn.execute(tables.services.update().where(tables.services.c.host == "a").values(**values))

    await database.write(close)
    result = await database.write(claim_rows.claim, [a_claim("i0", "a"), a_claim("i1", "b")], now=7)
    assert [(each.host, each.reason) for each in result.failures] == [("a", reason)]


async def test_what_is_held_on_a_host_that_was_closed(database: Database) -> None:
    """A conductor that claims an alternate again finds it closed; a request that names its host stays there."""
    await make_tables(database)
    await database.write(cloud)
    assert (await database.write(claim_rows.claim, [a_claim("i0", "a")], now=7)).claimed

    def close(conn: sa.Connection) -> None:
        conn.execute(tables.services.update().where(tables.services.c.host == "a").values(disabled=True))

    await database.write(close)
    again = await database.write(claim_rows.claim, [a_claim("i0", "a")], now=8)
    assert [(each.host, each.reason) for each in again.failures] == [("a", "disabled")]
    assert (await database.write(claim_rows.claim, [a_claim("i0", "a", names_host=True)], now=8)).claimed
    assert (await database.write(claim_rows.claim, [a_claim("i0", "a", ignore_status=True)], now=8)).claimed


async def test_a_claim_takes_and_a_release_gives_back(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud)
    result = await database.write(claim_rows.claim, [a_claim("i0", "a"), a_claim("i1", "b")], now=7)
    assert result.claimed
    assert await database.read(used) == {"a": 1, "b": 1}
    (held,) = (await database.read(allocations.get_many, ["i0"]))["i0"]
    assert (held.node_uuid, held.host, held.resources) == ("node-a", "a", SMALL)
    assert await database.read(allocation_audit.audit) == []
    await database.write(allocations.release, "i0", now=8)
    await database.write(allocations.release, "i0", now=9)  # harmless
    assert await database.read(used) == {"a": 0, "b": 1}
    assert await database.read(allocations.get_many, ["i0"]) == {}
    changed = await database.read(_changed_at)
    assert changed == {"a": 8, "b": 7}


def _changed_at(conn: sa.Connection) -> dict[str, int]:
    i = tables.inventories.c
    rows = conn.execute(sa.select(i.node_uuid, i.changed_at).where(i.resource_class == "VCPU"))
    return {node.removeprefix("node-"): at for node, at in rows}


async def test_all_or_nothing(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud)
    large = SMALL | {"MEMORY_MB": 5000}
    result = await database.write(claim_rows.claim, [a_claim("i0", "a"), a_claim("i1", "b", large)], now=1)
    assert [(f.node_uuid, f.reason, f.resource_class) for f in result.failures] == [("node-b", "capacity", "MEMORY_MB")]
    assert await database.read(used) == {"a": 0, "b": 0}
    assert await database.read(used, "MEMORY_MB") == {"a": 0, "b": 0}
    result = await database.write(claim_rows.claim, [a_claim("i0", "a", {"CUSTOM_GOLD": 1})], now=1)
    assert [f.resource_class for f in result.failures] == ["CUSTOM_GOLD"]
    result = await database.write(claim_rows.claim, [a_claim("i0", "nowhere")], now=1)
    assert {f.node_uuid for f in result.failures} == {"node-nowhere"}
    assert await database.read(allocations.get_many, ["i0", "i1"]) == {}


async def test_a_claim_replaces_and_a_repeated_one_changes_nothing(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud)
    for _ in range(2):
        assert (await database.write(claim_rows.claim, [a_claim("i0", "a")], now=1)).claimed
        assert await database.read(used) == {"a": 1, "b": 0}
    assert (await database.write(claim_rows.claim, [a_claim("i0", "b")], now=1)).claimed
    assert await database.read(used) == {"a": 0, "b": 1}
    three = {name: 3 * amount for name, amount in SMALL.items()}
    assert (await database.write(claim_rows.claim, [a_claim("i0", "b", three)], now=1)).claimed
    assert await database.read(used) == {"a": 0, "b": 3}
    # What it holds itself does not stand in its way: four are there, and three of them are its own.
    four = {name: 4 * amount for name, amount in SMALL.items()}
    assert (await database.write(claim_rows.claim, [a_claim("i0", "b", four)], now=1)).claimed
    assert not (await database.write(claim_rows.claim, [a_claim("i1", "b")], now=1)).claimed
    # A failed replacement leaves what was held.
    five = {name: 5 * amount for name, amount in SMALL.items()}
    assert not (await database.write(claim_rows.claim, [a_claim("i0", "a", five)], now=1)).claimed
    assert await database.read(used) == {"a": 0, "b": 4}
    assert await database.read(allocation_audit.audit) == []


async def test_no_consumer_gets_more_than_the_largest_unit(database: Database) -> None:
    """A node of four CPUs gives out sixteen, to one server four of them at most."""
    await make_tables(database)
    await database.write(cloud, "ab", 6)
    await database.write(_overcommitted, 4)
    amounts = [SMALL | {"VCPU": number, "MEMORY_MB": 1} for number in range(6)]
    three = [a_claim(f"i{number}", "a", amounts[4]) for number in range(3)]
    assert (await database.write(claim_rows.claim, three, now=2)).claimed
    result = await database.write(
        claim_rows.claim, [a_claim("i3", "a", amounts[1]), a_claim("i4", "b", amounts[5])], now=3
    )
    assert [(f.node_uuid, f.reason, f.resource_class) for f in result.failures] == [("node-b", "capacity", "VCPU")]
    assert await database.read(used) == {"a": 12, "b": 0}
    # A server that has more than its host by now, which has become smaller, keeps it, may have less, and can leave.
    await database.write(_overcommitted, 2)
    assert (await database.write(claim_rows.claim, [three[0]], now=4)).claimed
    assert (await database.write(claim_rows.claim, [a_claim("i0", "a", amounts[3])], now=5)).claimed
    assert not (await database.write(claim_rows.claim, [a_claim("i0", "b", amounts[3])], now=6)).claimed
    assert not (await database.write(claim_rows.claim, [a_claim("i0", "a", amounts[4])], now=7)).claimed
    await database.write(allocations.hand_over, "i1", holder="m")
    assert not (await database.write(claim_rows.claim, [a_claim("i1", "a", amounts[4], moving="m")], now=8)).claimed
    await database.write(allocations.take_back, "i1", holder="m", node_uuid="node-a", now=9, group_uuid=None)
    await database.write(allocations.release, "i0", now=10)
    assert await database.read(used) == {"a": 8, "b": 0}
    assert await database.read(allocation_audit.audit) == []


def _overcommitted(conn: sa.Connection, total: int) -> None:
    i = tables.inventories.c
    values = {"total": total, "max_unit": total, "allocation_ratio": 16 / total, "capacity": 16}
    conn.execute(sa.update(tables.inventories).where(i.resource_class == "VCPU").values(values))
    more = {"total": 400, "capacity": 400}
    conn.execute(sa.update(tables.inventories).where(i.resource_class == "DISK_GB").values(more))


async def test_what_is_held_is_kept_when_asked(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud)
    await database.write(claim_rows.claim, [a_claim("i0", "a")], now=1)
    again = [a_claim("i0", "b", keep_held=True), a_claim("i1", "b", keep_held=True)]
    result = await database.write(claim_rows.claim, again, now=1)
    assert result.held == {"i0": "node-a"}
    assert await database.read(used) == {"a": 1, "b": 0}
    moved = [a_claim("i0", "b", keep_held=True, avoid_hosts=("a",))]
    assert (await database.write(claim_rows.claim, moved, now=1)).claimed
    assert await database.read(used) == {"a": 0, "b": 1}


async def test_a_claim_of_another_epoch_is_refused(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud)
    claims = [a_claim("i0", "a", epoch=1), a_claim("i1", "a", epoch=2), a_claim("gone", "a", epoch=1)]
    result = await database.write(claim_rows.claim, claims, now=1)
    assert result.stale == ("i1", "gone")
    assert await database.read(used) == {"a": 0, "b": 0}


async def test_anti_affinity_is_counted_in_the_claim(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud, "ab", 4, "g")
    await database.write(add_group, "g", "anti-affinity")
    group = a_group("g", "anti-affinity")
    assert (await database.write(claim_rows.claim, [a_claim("i0", "a", server_group=group)], now=1)).claimed
    result = await database.write(claim_rows.claim, [a_claim("i1", "a", server_group=group)], now=1)
    assert [(f.host, f.reason) for f in result.failures] == [("a", "group")]
    assert (await database.write(claim_rows.claim, [a_claim("i1", "b", server_group=group)], now=1)).claimed
    assert await database.read(group_members.by_host, "g") == {"a": 1, "b": 1}
    two = a_group("g", "anti-affinity", 2)
    pair = [a_claim("i2", "a", server_group=two), a_claim("i3", "a", server_group=two)]
    assert not (await database.write(claim_rows.claim, pair, now=1)).claimed
    assert (await database.write(claim_rows.claim, pair[:1], now=1)).claimed
    assert await database.read(group_members.by_host, "g") == {"a": 2, "b": 1}
    assert await database.read(allocation_audit.audit) == []
    # Moving a member takes it along; releasing it, even after it became history, gives its place back.
    await database.write(allocations.release, "i1", now=1)
    assert (await database.write(claim_rows.claim, [a_claim("i0", "b", server_group=group)], now=1)).claimed
    assert await database.read(group_members.by_host, "g") == {"a": 1, "b": 1}
    await database.write(_to_history, "i0")
    await database.write(allocations.release, "i0", now=1)
    await database.write(allocations.release, "i2", now=1, group_uuid="g")
    assert await database.read(group_members.by_host, "g") == {}
    assert await database.read(used) == {"a": 0, "b": 0}


async def test_a_group_that_lives_long_keeps_no_rows_of_hosts_without_members(database: Database) -> None:
    """Each claim reads the rows of the group: one of each host that ever had a member was left."""
    await make_tables(database)
    await database.write(cloud, "abc", 4, "g")
    await database.write(add_group, "g", "anti-affinity")
    group = a_group("g", "anti-affinity", 2)
    for host in "abc":  # each claim moves the member
        assert (await database.write(claim_rows.claim, [a_claim("i0", host, server_group=group)], now=1)).claimed
    assert (await database.write(claim_rows.claim, [a_claim("i1", "c", server_group=group)], now=1)).claimed
    await database.write(allocations.release, "i0", now=1)
    assert await database.read(group_members.by_host, "g") == {"c": 1}
    await database.write(allocations.release, "i1", now=1)
    rows = sa.select(sa.func.count()).select_from(tables.server_group_hosts)
    assert await database.read(lambda conn: conn.execute(rows).scalar_one()) == 0


async def test_who_claims_nothing_of_a_node_is_a_member_there(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud, "ab", 4, "g")
    await database.write(add_group, "g", "anti-affinity")
    claim = a_claim("i0", "a", {}, server_group=a_group("g", "anti-affinity"))
    for _ in range(2):  # a repeated claim changes nothing
        assert (await database.write(claim_rows.claim, [claim], now=1)).claimed
        assert await database.read(group_members.by_host, "g") == {"a": 1}
        assert await database.read(allocation_audit.audit) == []
    other = a_claim("i1", "a", {}, server_group=a_group("g", "anti-affinity"))
    assert not (await database.write(claim_rows.claim, [other], now=1)).claimed
    await database.write(allocations.release, "i0", now=2)
    assert await database.read(group_members.by_host, "g") == {}


async def test_members_of_groups_are_repaired(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud, "ab", 4, "g")
    await database.write(add_group, "g", "anti-affinity")
    group = a_group("g", "anti-affinity", 2)
    await database.write(claim_rows.claim, [a_claim("i0", "a", server_group=group)], now=1)
    await database.write(group_members.count, "g", {"a": 1, "b": 1})
    wrong = await database.write(allocation_audit.repair_group, "g")
    assert {(drift.what, drift.recorded, drift.actual) for drift in wrong} == {("a", 2, 1), ("b", 1, 0)}
    assert await database.read(group_members.by_host, "g") == {"a": 1}
    assert await database.read(allocation_audit.audit) == []


def _to_history(conn: sa.Connection, uuid: str) -> None:
    from micronova.db import instances

    row = instances.lock(conn, uuid)
    assert row is not None
    instances.move_to_deleted(conn, row, 5)


async def test_affinity_is_kept_by_the_claim(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud, "ab", 4, "g")
    await database.write(add_group, "g", "affinity")
    group = a_group("g", "affinity")
    apart = [a_claim("i0", "a", server_group=group), a_claim("i1", "b", server_group=group)]
    assert not (await database.write(claim_rows.claim, apart, now=1)).claimed
    assert (await database.write(claim_rows.claim, apart[:1], now=1)).claimed
    result = await database.write(claim_rows.claim, apart[1:], now=1)
    assert [(f.host, f.reason) for f in result.failures] == [("b", "group")]
    # The only member may go elsewhere.
    assert (await database.write(claim_rows.claim, [a_claim("i0", "b", server_group=group)], now=1)).claimed
    assert (await database.write(claim_rows.claim, apart[1:], now=1)).claimed
    assert await database.read(group_members.by_host, "g") == {"b": 2}


async def test_audit_finds_and_repairs_drift(database: Database) -> None:
    await make_tables(database)
    await database.write(cloud, "ab", 1)
    await database.write(claim_rows.claim, [a_claim("i0", "a"), a_claim("stranger", "b")], now=1)
    await database.write(_spoil)
    found = await database.read(allocation_audit.audit)
    assert {(drift.kind, drift.where, drift.what) for drift in found} == {
        ("used", "node-a", "VCPU"),
        ("orphan", "stranger", "node-b"),
    }
    [oversold] = await database.read(allocation_audit.oversold)
    assert (oversold.host, oversold.resource_class, oversold.used, oversold.capacity) == ("a", "VCPU", 77, 4)
    for node in ("node-a", "node-b"):
        await database.write(allocation_audit.repair_used, node, 2)
    assert await database.read(used) == {"a": 1, "b": 1}
    assert {drift.kind for drift in await database.read(allocation_audit.audit)} == {"orphan"}


def _spoil(conn: sa.Connection) -> None:
    i = tables.inventories.c
    conn.execute(tables.inventories.update().where(i.node_uuid == "node-a", i.resource_class == "VCPU").values(used=77))


CELLS = tuple(HostCell(id=n, memory_mb=2048, dedicated=tuple(range(4 * n, 4 * n + 4)), shared=()) for n in (0, 1))
DEVICES = tuple(
    PciDevice(address=f"0000:0{n}:00.0", vendor_id="10de", product_id="1eb8", numa_node=n % 2) for n in range(4)
)
TOPOLOGY = NodeTopology(cells=CELLS, devices=DEVICES)
GPU = DeviceRequest(alias="gpu", count=1, specs=({"vendor_id": "10de"},), policy="required")
PINNED = {"PCPU": 2, "MEMORY_MB": 512}


def pinned(count: int = 2, *devices: DeviceRequest) -> TopologyRequest:
    """Ask for dedicated CPUs in one cell."""
    cell = CellRequest(id=0, memory_mb=512, pinned=tuple(range(count)))
    return TopologyRequest(cells=(cell,), is_pinned=True, has_shared=False, devices=devices)


def numa_cloud(conn: sa.Connection, hosts: str = "ab", instances: int = 4, now: int = 1) -> None:
    """Hosts with two cells of four dedicated CPUs, and four devices."""
    for number, name in enumerate(hosts, 100):
        add_host(conn, name, number, {"PCPU": 8, "MEMORY_MB": 4096}, now)
    topologies.report(conn, {f"node-{name}": TOPOLOGY for name in hosts}, now)
    add_instances(conn, *(f"i{number}" for number in range(instances)))


def held_cpus(conn: sa.Connection) -> dict[str, tuple[int, ...]]:
    """Give the dedicated CPUs that are held, by host."""
    rows = conn.execute(sa.select(tables.node_topologies))
    uses = {row.node_uuid.removeprefix("node-"): decode_use(row.held) for row in rows}
    return {host: tuple(cpu for cell in use.cells.values() for cpu in cell.pinned) for host, use in uses.items()}


def nothing_wrong(conn: sa.Connection) -> bool:
    """Return whether the counters are right, and no host has less than is held."""
    nodes = list(topologies.all_claims(conn))
    counted = all(node.held == node.claimed for node in nodes)
    there = all(lacking(node.topology, node.claimed) == [] for node in nodes)
    return counted and there and allocation_audit.audit(conn) == []


async def test_a_claim_names_cpus_and_devices(database: Database) -> None:
    await make_tables(database)
    await database.write(numa_cloud)
    claims = [a_claim(f"i{n}", "a", PINNED, topology=pinned(2, GPU)) for n in (0, 1)]
    assert (await database.write(claim_rows.claim, claims, now=2)).claimed
    held = await database.read(topologies.assignments_of, ["i0", "i1"])
    assert {node for node, _ in held.values()} == {"node-a"}
    cpus = sorted(cpu for _, each in held.values() for cell in each.cells for cpu in cell.pins.values())
    assert await database.read(held_cpus) == {"a": tuple(cpus), "b": ()} and len(cpus) == 4
    assert len({device.address for _, each in held.values() for device in each.devices}) == 2
    assert await database.read(nothing_wrong)
    # The same claim again changes nothing.
    assert (await database.write(claim_rows.claim, claims, now=3)).claimed
    assert await database.read(topologies.assignments_of, ["i0", "i1"]) == held
    await database.write(allocations.release, "i0", now=4)
    await database.write(allocations.release, "i0", now=4)
    assert len((await database.read(held_cpus))["a"]) == 2
    assert (await database.write(claim_rows.claim, [a_claim("i1", "b", PINNED, topology=pinned())], now=5)).claimed
    assert [len(each) for each in (await database.read(held_cpus)).values()] == [0, 2]
    assert await database.read(nothing_wrong)


async def test_a_claim_without_room_in_a_cell_changes_nothing(database: Database) -> None:
    await make_tables(database)
    await database.write(numa_cloud)
    three = {"PCPU": 3, "MEMORY_MB": 512}
    first = [a_claim(f"i{n}", "a", three, topology=pinned(3)) for n in (0, 1)]
    assert (await database.write(claim_rows.claim, first, now=2)).claimed
    before = await database.read(held_cpus)
    # Two CPUs are left, in different cells.
    last = [a_claim("i2", "b", PINNED, topology=pinned()), a_claim("i3", "a", PINNED, topology=pinned())]
    result = await database.write(claim_rows.claim, last, now=3)
    assert [(each.host, each.reason) for each in result.failures] == [("a", "topology")]
    # A place, but too little memory.
    large = [a_claim("i2", "b", PINNED | {"MEMORY_MB": 5000}, topology=pinned())]
    assert (await database.write(claim_rows.claim, large, now=3)).failures[0].reason == "capacity"
    assert await database.read(held_cpus) == before and await database.read(nothing_wrong)
    # A node that reports no topology has no room.
    await database.write(_add_plain_host)
    result = await database.write(claim_rows.claim, [a_claim("i2", "c", PINNED, topology=pinned())], now=3)
    assert result.failures[0].reason == "topology"


def _add_plain_host(conn: sa.Connection) -> None:
    add_host(conn, "c", 9, {"PCPU": 8, "MEMORY_MB": 4096})


async def test_a_moving_instance_holds_both_places(database: Database) -> None:
    await make_tables(database)
    await database.write(numa_cloud)
    await database.write(claim_rows.claim, [a_claim("i0", "a", PINNED, topology=pinned())], now=2)
    before = (await database.read(topologies.assignments_of, ["i0"]))["i0"]
    await database.write(allocations.hand_over, "i0", holder="migration")
    new = a_claim("i0", "a", {"PCPU": 4, "MEMORY_MB": 512}, topology=pinned(4))
    assert (await database.write(claim_rows.claim, [new], now=3)).claimed
    assert len((await database.read(held_cpus))["a"]) == 6
    await database.write(allocations.take_back, "i0", holder="migration", node_uuid="node-a", now=4, group_uuid=None)
    assert (await database.read(topologies.assignments_of, ["i0", "migration"])) == {"i0": before}
    assert len((await database.read(held_cpus))["a"]) == 2 and await database.read(nothing_wrong)


async def test_wrong_topologies_are_repaired(database: Database) -> None:
    await make_tables(database)
    await database.write(numa_cloud)
    await database.write(claim_rows.claim, [a_claim("i0", "a", PINNED, topology=pinned())], now=2)
    right = await database.read(held_cpus)
    await database.write(_empty_topology)
    assert not await database.read(nothing_wrong)
    assert await database.write(topologies.repair_held, "node-a", 3)
    assert await database.read(held_cpus) == right and await database.read(nothing_wrong)
    assert not await database.write(topologies.repair_held, "node-a", 4)


def _empty_topology(conn: sa.Connection) -> None:
    conn.execute(tables.node_topologies.update().values(held="{}"))


async def test_amounts_groups_and_topologies_are_claimed_together(database: Database) -> None:
    """What cannot be had of one kind is not taken of the others."""
    await make_tables(database)
    await database.write(numa_cloud)
    await database.write(_network_cards)
    traffic = ResourceRequest(groups=(RequestGroup(suffix="_NET", resources={"CUSTOM_TRAFFIC": 5}),))

    def claims(*numbers: int, cpus: int = 2) -> list[claim_rows.Claim]:
        amounts = PINNED | {"PCPU": cpus}
        return [
            a_claim(f"i{number}", "a", amounts, topology=pinned(cpus), resource_request=traffic) for number in numbers
        ]

    assert (await database.write(claim_rows.claim, claims(0), now=2)).claimed
    held = await database.read(provider_allocations.allocations_of_consumers, ["i0"])
    assert held == {"i0": {"node-a": PINNED, "card-a": {"CUSTOM_TRAFFIC": 5}}}
    assert len((await database.read(held_cpus))["a"]) == 2
    before = await database.read(held_cpus), await database.read(used, "CUSTOM_TRAFFIC")
    # Six CPUs and traffic are left, but no cell has five.
    result = await database.write(claim_rows.claim, claims(1, cpus=5), now=3)
    assert result.failures[0].reason == "topology"
    # CPUs for two are left, but traffic for one.
    assert (await database.write(claim_rows.claim, claims(1, 2), now=3)).failures[0].reason == "capacity"
    assert (await database.read(held_cpus), await database.read(used, "CUSTOM_TRAFFIC")) == before
    # The same claim again changes nothing; giving back gives all back.
    assert (await database.write(claim_rows.claim, claims(0), now=4)).claimed
    await database.write(allocations.release, "i0", now=5)
    assert await database.read(held_cpus) == {"a": (), "b": ()}
    assert set((await database.read(used, "CUSTOM_TRAFFIC")).values()) == {0} and await database.read(nothing_wrong)


def _network_cards(conn: sa.Connection) -> None:
    stock: InventoryFields = {
        "total": 10, "reserved": 0, "min_unit": 1, "max_unit": 10, "step_size": 1, "allocation_ratio": 1.0
    }  # fmt: skip
    providers.ensure_nodes(conn, {"node-a": ("a", "a"), "node-b": ("b", "b")}, 1)
    placement_names.create_class(conn, "CUSTOM_TRAFFIC", 1)
    for host in "ab":
        providers.create(conn, f"card-{host}", f"card-{host}", f"node-{host}", 1)
        provider_inventories.add(conn, f"card-{host}", "CUSTOM_TRAFFIC", stock, None, 1)


async def test_the_statements_of_a_claim_with_request_groups_do_not_grow_with_its_servers(database: Database) -> None:
    """Trees and sharing providers were read for each server, while inventories and server groups were locked."""
    await make_tables(database)
    await database.write(numa_cloud, "ab", 20)
    await database.write(_network_cards)
    traffic = ResourceRequest(groups=(RequestGroup(suffix="_NET", resources={"CUSTOM_TRAFFIC": 2}),))
    amounts = {"MEMORY_MB": 1}

    def statements(conn: sa.Connection, first: int, count: int) -> int:
        wanted = [
            a_claim(f"i{number}", "ab"[number % 2], amounts, resource_request=traffic)
            for number in range(first, first + count)
        ]
        with recorded(conn) as found:
            assert claim_rows.claim(conn, wanted, now=2).claimed
        return len(found)

    few = await database.write(statements, 0, 2)
    assert await database.write(statements, 2, 8) == few
    assert await database.read(used, "CUSTOM_TRAFFIC") == {"card-a": 10, "card-b": 10}
    more = a_claim("i10", "a", amounts, resource_request=traffic)
    assert (await database.write(claim_rows.claim, [more], now=3)).failures[0].reason == "capacity"


async def test_the_statements_of_a_write_of_many_consumers_do_not_grow_with_them(database: Database) -> None:
    """Each consumer took two statements, and each provider one, with the inventories locked."""
    await make_tables(database)
    await database.write(numa_cloud)
    await database.write(_network_cards)

    def statements(conn: sa.Connection, count: int, amount: int, generation: int | None) -> int:
        taken = {f"card-{host}": {"CUSTOM_TRAFFIC": amount} for host in "ab"} if amount else {}
        requests = [
            AllocationRequest(
                consumer=f"c{number}", allocations=taken, project_id=f"p{number}", user_id="u", generation=generation
            )
            for number in range(count)
        ]
        with recorded(conn) as found:
            provider_allocations.replace(conn, requests, 2)
        return len(found)

    few = await database.write(statements, 1, 1, None)
    await database.write(statements, 1, 0, 1)
    assert await database.write(statements, 10, 1, None) == few
    assert set((await database.read(used, "CUSTOM_TRAFFIC")).values()) == {10}
    held = await database.read(provider_allocations.allocations_of_consumers, [f"c{number}" for number in range(10)])
    known = await database.read(provider_allocations.consumers_of, held)
    assert {uuid: (each.project_id, each.generation) for uuid, each in known.items()} == {
        f"c{number}": (f"p{number}", 1) for number in range(10)
    }
    assert (await database.read(providers.get, "card-a")).generation == 4, "one inventory and three writes"
    with pytest.raises(Conflict):
        await database.write(statements, 10, 1, 7)
    await database.write(statements, 10, 0, 1)
    assert await database.read(provider_allocations.consumers_of, held) == {}
    assert set((await database.read(used, "CUSTOM_TRAFFIC")).values()) == {0}


async def test_topologies_outlast_allocations_that_placement_gave_back(database: Database) -> None:
    """The server keeps its CPUs until it is placed anew or deleted."""
    await make_tables(database)
    await database.write(numa_cloud)
    await database.write(_network_cards)
    claim = a_claim("i0", "a", PINNED, topology=pinned())
    await database.write(claim_rows.claim, [claim], now=2)
    await database.write(provider_allocations.release, "i0", 3)
    assert len((await database.read(held_cpus))["a"]) == 2
    assert (await database.write(claim_rows.claim, [claim], now=4)).claimed
    assert len((await database.read(held_cpus))["a"]) == 2 and await database.read(nothing_wrong)
    await database.write(provider_allocations.release, "i0", 5)
    await database.write(allocations.release, "i0", now=6)
    assert (await database.read(held_cpus))["a"] == () and await database.read(nothing_wrong)


async def test_topologies_of_nobody_are_released(database: Database) -> None:
    """Such as of a migration that an older conductor has ended."""
    await make_tables(database)
    await database.write(numa_cloud)
    await database.write(claim_rows.claim, [a_claim("stranger", "a", PINNED, topology=pinned())], now=2)
    await database.write(_without_amounts, "stranger")
    assert [line for line in await counters.repair_counters(database, 3) if "orphan of stranger" in line]
    assert (await database.read(held_cpus))["a"] == () and await database.read(nothing_wrong)


def _without_amounts(conn: sa.Connection, consumer: str) -> None:
    conn.execute(tables.allocations.delete().where(tables.allocations.c.consumer_uuid == consumer))


async def race_of_topologies(databases: list[Database], seed: int = 1) -> None:
    """Many claim and release dedicated CPUs and devices at once, and at the end all room is taken."""
    first = databases[0]
    await make_tables(first)
    await first.write(numa_cloud, "abcd", 80)
    chance = random.Random(seed)
    request, placed = pinned(2, GPU), set[int]()

    async def one(number: int) -> None:
        database = databases[number % len(databases)]
        for host in chance.sample("abcd", 4) * 3:
            claim = a_claim(f"i{number}", host, PINNED, topology=request)
            if (await database.write(claim_rows.claim, [claim], now=2)).claimed:
                placed.add(number)
                if chance.random() < 0.3:
                    await database.write(allocations.release, f"i{number}", now=3)
                    placed.discard(number)
                else:
                    return

    await asyncio.gather(*(one(number) for number in range(60)))
    assert await first.read(nothing_wrong)
    # Each host has room for four: two CPUs and a device each.
    for number in range(60, 80):
        for host in "abcd":
            claim = a_claim(f"i{number}", host, PINNED, topology=request)
            if (await first.write(claim_rows.claim, [claim], now=4)).claimed:
                placed.add(number)
                break
    assert len(placed) == 16
    assert {host: len(cpus) for host, cpus in (await first.read(held_cpus)).items()} == dict.fromkeys("abcd", 8)
    assert await first.read(nothing_wrong)


async def race(databases: list[Database], seed: int = 1) -> None:
    """Many claim, move and release at once, with room for fewer than all: nothing oversold, nothing lost."""
    first = databases[0]
    await make_tables(first)
    await first.write(cloud, "abcd", 40)
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()

    async def one(number: int) -> None:
        database = databases[number % len(databases)]
        uuid = f"i{number}"
        for _ in range(6):
            hosts = chance.sample("abcd", 2)
            if chance.random() < 0.3:
                await database.write(allocations.release, uuid, now=1)
                outcomes["released"] += 1
                continue
            # Pairs of consumers, in any order: whoever locks in another order than the others would deadlock.
            other = f"i{(number + 20) % 40}"
            claims = [a_claim(uuid, hosts[0])]
            if chance.random() < 0.5:
                claims.append(a_claim(other, hosts[1]))
            result = await database.write(claim_rows.claim, claims, now=1)
            outcomes["claimed" if result.claimed else "refused"] += 1

    await asyncio.gather(*(one(number) for number in range(40)))
    assert outcomes["claimed"], outcomes
    assert outcomes["refused"], outcomes
    await check(first)


async def check(database: Database) -> dict[str, Any]:
    """No counter is wrong, nothing is oversold, and nobody holds two nodes."""
    assert await database.read(allocation_audit.audit) == []
    assert await database.read(allocation_audit.oversold) == []
    held = await database.read(allocations.get_many, [f"i{number}" for number in range(100)])
    assert all(len(each) == 1 for each in held.values())
    return held


async def race_with_placement(databases: list[Database]) -> None:
    """Schedulers claim while other services take and give back through the Placement API, and change inventories."""
    first = databases[0]
    await make_tables(first)
    await first.write(_providers)
    chance = random.Random(5)
    outcomes: Counter[str] = Counter()

    async def scheduler(number: int) -> None:
        for _ in range(6):
            claims = [a_claim(f"i{number}", chance.choice("abcd"))]
            result = await databases[number % 4].write(claim_rows.claim, claims, now=1)
            outcomes["claimed" if result.claimed else "refused"] += 1
            if chance.random() < 0.3:
                await databases[number % 4].write(allocations.release, f"i{number}", now=1)

    async def service(number: int) -> None:
        for _ in range(6):
            requests = [
                AllocationRequest(
                    consumer=f"c{each}",
                    allocations={f"node-{host}": SMALL} if chance.random() < 0.7 else {},
                    checks_generation=False,
                )
                for each, host in zip((number, (number + 10) % 20), chance.sample("abcd", 2), strict=True)
            ]
            try:
                await databases[number % 4].write(provider_allocations.replace, requests, 1)
                outcomes["replaced"] += 1
            except provider_allocations.CapacityExceeded:
                outcomes["exceeded"] += 1

    async def operator(number: int) -> None:
        stock: InventoryFields = {
            "total": 0, "reserved": 0, "min_unit": 1, "max_unit": 5000, "step_size": 1, "allocation_ratio": 1.0
        }  # fmt: skip
        for total in (4, 5, 4):
            values: dict[str, InventoryFields] = {
                name: {**stock, "total": amount} for name, amount in (CAPACITY | {"VCPU": total}).items()
            }
            await databases[number % 4].write(
                provider_inventories.replace_all, f"node-{'abcd'[number]}", values, None, 1
            )

    await asyncio.gather(
        *(scheduler(number) for number in range(20)),
        *(service(number) for number in range(20)),
        *(operator(number) for number in range(4)),
    )
    assert all(outcomes[each] for each in ("claimed", "refused", "replaced", "exceeded")), outcomes
    assert await first.read(allocation_audit.audit) == []
    for node, counts in (await first.read(_used_by_node)).items():
        assert counts["VCPU"] <= 5 and counts["MEMORY_MB"] <= CAPACITY["MEMORY_MB"], (node, counts)


def _providers(conn: sa.Connection) -> None:
    cloud(conn, "abcd", 20)
    providers.ensure_nodes(conn, {f"node-{name}": (name, name) for name in "abcd"}, 1)


def _used_by_node(conn: sa.Connection) -> dict[str, dict[str, int]]:
    i = tables.inventories.c
    found: dict[str, dict[str, int]] = {}
    for node, name, amount in conn.execute(sa.select(i.node_uuid, i.resource_class, i.used)):
        found.setdefault(node, {})[name] = amount
    return found


async def race_of_doubles(databases: list[Database]) -> None:
    """The same instances are claimed on different hosts at the same moment: each ends up on one host."""
    await make_tables(databases[0])
    await databases[0].write(cloud, "abcd", 16)
    claims = [(f"i{number}", host) for number in range(16) for host in "abcd"]
    random.Random(3).shuffle(claims)

    async def one(number: int, uuid: str, host: str) -> claim_rows.ClaimResult:
        database = databases[number % len(databases)]
        return await database.write(claim_rows.claim, [a_claim(uuid, host, keep_held=True)], now=1)

    results = await asyncio.gather(*(one(number, *each) for number, each in enumerate(claims)))
    held = await check(databases[0])
    assert sum(result.claimed for result in results) == len(held)
    for (uuid, _), result in zip(claims, results, strict=True):
        if result.held:
            assert result.held == {uuid: held[uuid][0].node_uuid}


async def race_of_groups(databases: list[Database]) -> None:
    """Members of groups are claimed at the same moment: no policy is broken."""
    await make_tables(databases[0])
    await databases[0].write(_groups)

    async def one(number: int, host: str) -> bool:
        database = databases[number % len(databases)]
        policy = "affinity" if number % 2 else "anti-affinity"
        claim = a_claim(f"i{number}", host, server_group=a_group(policy, policy))
        return (await database.write(claim_rows.claim, [claim], now=1)).claimed

    won = await asyncio.gather(*(one(number, "abcd"[number // 2 % 4]) for number in range(24)))
    apart = await databases[0].read(group_members.by_host, "anti-affinity")
    together = await databases[0].read(group_members.by_host, "affinity")
    assert apart == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert together is not None and len(together) == 1
    assert sum(won) == 4 + sum(together.values())
    await check(databases[0])


def _groups(conn: sa.Connection) -> None:
    cloud(conn, "abcd", 0)
    for number, policy in enumerate(("anti-affinity", "affinity")):
        add_group(conn, policy, policy)
        add_instances(conn, *(f"i{each}" for each in range(number, 24, 2)), group=policy)
