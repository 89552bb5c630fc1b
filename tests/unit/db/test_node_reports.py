"""Reports of one host that two conductors record at the same moment, on PostgreSQL."""

import asyncio

import sqlalchemy as sa

from micronova.db import node_reports, provider_inventories
from micronova.db.engine import Database, open_database
from micronova.db.tables import inventories, node_topologies, provider_traits
from micronova.objects.orders import NodeResources
from micronova.objects.topology import HostCell, NodeTopology, usable_topology
from tests.unit.db.databases import open_transaction
from tests.unit.scheduler.rows import make_tables

_WAITING = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
_VCPUS = sa.select(inventories).where(inventories.c.resource_class == "VCPU")
UUID = "11111111-1111-4111-8111-111111111111"


def a_node(*traits: str) -> NodeResources:
    """Return what a host reports of its node."""
    return NodeResources(
        node="n",
        node_uuid=UUID,
        hypervisor_type="fake",
        hypervisor_version=1,
        vcpus=4,
        memory_mb=4096,
        local_gb=40,
        traits=traits,
        topology=NodeTopology(cells=(HostCell(id=0, memory_mb=4096, shared=(0, 1, 2, 3)),)),
    )


async def waits_for_a_lock(database: Database) -> None:
    """Return when a transaction waits for another one."""
    async with asyncio.timeout(20):
        while not await database.read(lambda conn: conn.execute(_WAITING).scalar_one()):
            await asyncio.sleep(0)


async def test_the_later_report_takes_a_trait_away(database_url: str) -> None:
    """It begins before the report that brings the trait is committed, and is recorded after it."""
    slow, other = open_database(database_url), open_database(database_url)
    try:
        await make_tables(other)
        await other.write(node_reports.record, {"h": [a_node()]}, 1)
        async with open_transaction(slow) as transaction:
            await transaction.run(node_reports.record, {"h": [a_node("HW_CPU_X86_AVX2")]}, 2)
            later = asyncio.create_task(other.write(node_reports.record, {"h": [a_node()]}, 3))
            await waits_for_a_lock(other)
        await later
        traits = await other.read(lambda conn: conn.execute(sa.select(provider_traits.c.trait)).scalars().all())
        assert sorted(traits) == ["COMPUTE_NODE", "OWNER_NOVA"]
    finally:
        await slow.close()
        await other.close()


async def test_a_report_leaves_a_ratio_that_is_changed_at_the_same_moment(database_url: str) -> None:
    """It reads the ratio before the change is committed, and writes the inventory after it."""
    slow, other = open_database(database_url), open_database(database_url)
    try:
        await make_tables(other)
        await other.write(node_reports.record, {"h": [a_node()]}, 1)
        [row] = await other.read(lambda conn: conn.execute(_VCPUS).all())
        wanted = {name: getattr(row, name) for name in provider_inventories.FIELDS} | {"allocation_ratio": 16.0}
        async with open_transaction(slow) as transaction:
            await transaction.run(provider_inventories.change, UUID, "VCPU", wanted, None, 2)
            report = asyncio.create_task(other.write(node_reports.record, {"h": [a_node()]}, 3))
            await waits_for_a_lock(other)
        assert (await report).ratios[UUID]["VCPU"] == 16.0  # what the host is told
        [row] = await other.read(lambda conn: conn.execute(_VCPUS).all())
        assert (row.allocation_ratio, row.capacity) == (16.0, 64)
        text = await other.read(lambda conn: conn.execute(sa.select(node_topologies.c.topology)).scalar_one())
        assert usable_topology(text).cpu_allocation_ratio == 16.0
    finally:
        await slow.close()
        await other.close()
