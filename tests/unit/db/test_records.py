"""Actions, flavors, services and nodes: written twice is written once, on both databases."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.db import (
    aggregates,
    flavors,
    node_reports,
    nodes,
    placement_names,
    provider_inventories,
    providers,
    services,
)
from micronova.db import instance_actions as actions
from micronova.db.engine import Database
from micronova.db.provider_inventories import InventoryFields
from micronova.db.tables import (
    inventories,
    node_topologies,
    provider_traits,
    resource_classes,
    resource_providers,
    traits,
)
from micronova.objects import mediated_devices
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.flavor import Flavor
from micronova.objects.host_limits import LONGEST_DESCRIPTIONS
from micronova.objects.orders import HostBeat, NodeResources
from micronova.objects.topology import MOST_MDEV_PARENTS, HostCell, MdevParent, NodeTopology, usable_topology
from micronova.placement.model import MOST_UNITS
from tests.unit.db.databases import KINDS, compute_database


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def test_an_action_is_recorded_once_and_its_first_end_counts(database: Database) -> None:
    for _ in range(2):
        await database.write(actions.start, ["i1", "i2"], "req-1", "create", "u", "p", 100)
        await database.write(actions.event_start, "i1", "req-1", 1, "compute_build", 110, "h1")
    await database.write(actions.event_finish, "i1", "req-1", 1, "compute_build", 120, "Error", "h1", "no disk")
    await database.write(actions.event_finish, "i1", "req-1", 1, "compute_build", 130, "Success", "h2")
    await database.write(actions.event_finish, "i1", "req-1", 2, "compute_build", 140, start_time=135)
    await database.write(actions.finish, "i1", "req-1", 150)
    await database.write(actions.finish, "i1", "req-1", 160, "later")
    action = await database.read(actions.get, "i1", "req-1")
    assert action is not None
    assert (action.message, action.finish_time, action.updated_at) == ("Error", 150, 150)
    second, first = await database.read(actions.events, "i1", "req-1")
    assert (first.start_time, first.finish_time, first.result, first.host, first.details) == (
        110, 120, "Error", "h1", "no disk",
    )  # fmt: skip
    assert (second.start_time, second.finish_time, second.result) == (135, 140, "Success")
    other = await database.read(actions.get, "i2", "req-1")
    assert other is not None and other.finish_time is None


async def test_actions_are_paged_newest_first(database: Database) -> None:
    for number in range(5):
        await database.write(actions.start, "i1", f"req-{number}", "stop", "u", "p", 100 + number)
    page = await database.read(actions.list_for, "i1", limit=2)
    assert page is not None and [row.request_id for row in page] == ["req-4", "req-3"]
    page = await database.read(actions.list_for, "i1", limit=2, marker="req-3")
    assert page is not None and [row.request_id for row in page] == ["req-2", "req-1"]
    assert await database.read(actions.list_for, "i1", marker="nothing") is None
    page = await database.read(actions.list_for, "i1", changes_since=101, changes_before=102)
    assert page is not None and [row.request_id for row in page] == ["req-2", "req-1"]


async def test_flavors_are_seen_by_whom_they_are_for(database: Database) -> None:
    await database.write(flavors.insert, Flavor(id="1", name="one", ram=1, vcpus=1, disk=1), 1)
    await database.write(flavors.insert, Flavor(id="2", name="two", ram=2, vcpus=1, disk=1, is_public=False), 2)
    with pytest.raises(Conflict):
        await database.write(flavors.insert, Flavor(id="1", name="other", ram=1, vcpus=1, disk=1), 1)
    with pytest.raises(Conflict):
        await database.write(flavors.insert, Flavor(id="3", name="one", ram=1, vcpus=1, disk=1), 1)
    with pytest.raises(NotFound):
        await database.read(flavors.get, "2", "p")
    await database.write(flavors.grant, "2", "p")
    assert (await database.read(flavors.get, "2", "p")).ram == 2
    assert [row.flavorid for row in await database.read(flavors.list_, project_id="q")] == ["1"]
    await database.write(flavors.set_extra_specs, "1", {"a": "b"})
    assert (await database.read(flavors.get, "1")).extra_specs == {"a": "b"}


@pytest.mark.parametrize("descending", [False, True])
async def test_flavors_are_paged_by_any_key_even_one_that_is_empty(database: Database, descending: bool) -> None:
    for number in range(6):
        about = None if number % 2 else f"d{number % 3}"
        flavor = Flavor(id=f"f{number}", name=f"n{number}", ram=1, vcpus=1, disk=1, description=about)
        await database.write(flavors.insert, flavor, 1)
    everything = [
        row.flavorid for row in await database.read(flavors.list_, sort_key="description", descending=descending)
    ]
    paged: list[str] = []
    while True:
        marker = paged[-1] if paged else None
        page = await database.read(flavors.list_, sort_key="description", descending=descending, marker=marker, limit=2)
        if not page:
            break
        paged += [row.flavorid for row in page]
    assert paged == everything and len(paged) == 6


async def test_heartbeats_register_each_host_once(database: Database) -> None:
    hosts = [f"h{number}" for number in range(20)]
    await asyncio.gather(
        *(database.write(services.heartbeat, "nova-compute", hosts[n % 3 :: 3], 10 + n) for n in range(12))
    )
    rows = await database.read(services.list_)
    assert sorted(row.host for row in rows) == sorted(hosts)
    assert sorted(row.id for row in rows) == list(range(1, 21))
    assert await database.write(services.heartbeat, "nova-compute", hosts, 99) == set()
    assert {row.last_seen_at for row in await database.read(services.list_)} == {99}


def _node(name: str, **more: Any) -> NodeResources:
    return NodeResources(
        node=name, node_uuid=f"uuid-{name}", hypervisor_type="fake", hypervisor_version=1, vcpus=8,
        memory_mb=8192, local_gb=100, reserved={"MEMORY_MB": 512}, **more,
    )  # fmt: skip


async def test_nodes_are_recorded_with_their_capacity_and_keep_what_is_used(database: Database) -> None:
    await database.write(node_reports.record, {"h1": [_node("n1"), _node("n2")]}, 10, ratios={"VCPU": 4.0})
    await database.write(node_reports.record, {"h1": [_node("n1", running_vms=3)]}, 20, ratios={"VCPU": 2.0})
    first, second = await database.read(nodes.list_)
    assert (first.id, second.id, first.running_vms, first.changed_at) == (1, 2, 3, 20)
    assert (first.vcpus_total, first.memory_mb_total, first.memory_mb_reserved) == (8, 8192, 512)
    with pytest.raises(Conflict):
        await database.write(node_reports.record, {"h2": [_node("n1")]}, 30)
    again = msgspec.structs.replace(_node("n1"), node_uuid="another")
    assert (await database.write(node_reports.record, {"h1": [again]}, 30)).refused.keys() == {"another"}
    await database.write(nodes.delete_of_host, "h1")
    assert await database.read(nodes.list_) == []


async def test_a_ratio_that_no_setting_fixes_stays_as_the_placement_api_has_it(database: Database) -> None:
    cells = NodeTopology(cells=(HostCell(id=0, memory_mb=8192, shared=(0, 1)),))

    async def report(**more: Any) -> dict[str, dict[str, float]]:
        node = _node("n1", topology=cells, initial_allocation_ratios={"VCPU": 4.0}, **more)
        ratios = {"VCPU": 3.0, "MEMORY_MB": 1.5}
        found = await database.write(node_reports.record, {"h1": [node]}, 10, ratios=ratios)
        return {uuid: dict(of_node) for uuid, of_node in found.ratios.items()}

    async def shown() -> dict[str, tuple[float, int]]:
        rows = await database.read(provider_inventories.list_, "uuid-n1")
        return {row.resource_class: (row.allocation_ratio, row.capacity) for row in rows}

    async def of_cells() -> tuple[float, float]:
        text = sa.select(node_topologies.c.topology)
        topology = usable_topology(await database.read(lambda conn: conn.execute(text).scalar_one()))
        return topology.cpu_allocation_ratio, topology.ram_allocation_ratio

    initial = {"VCPU": 4.0, "MEMORY_MB": 1.5, "DISK_GB": 1.0}
    assert await report() == {"uuid-n1": initial}
    assert await shown() == {"VCPU": (4.0, 32), "MEMORY_MB": (1.5, 11520), "DISK_GB": (1.0, 100)}
    wanted: InventoryFields = {
        "total": 8, "reserved": 0, "min_unit": 1, "max_unit": 8, "step_size": 1, "allocation_ratio": 16.0
    }  # fmt: skip
    await database.write(provider_inventories.change, "uuid-n1", "VCPU", wanted, None, 20)
    assert await of_cells() == (16.0, 1.5)  # at once: the host may not report for long
    assert await report(running_vms=1) == {"uuid-n1": {**initial, "VCPU": 16.0}}
    assert (await shown())["VCPU"] == (16.0, 128) and await of_cells() == (16.0, 1.5)
    await database.write(provider_inventories.change, "uuid-n1", "VCPU", {**wanted, "allocation_ratio": 0}, None, 30)
    assert await report() == {"uuid-n1": {**initial, "VCPU": 0.0}}
    assert 0 < (await of_cells())[0] < 1e-9  # what schedulers can read
    # The setting of the host counts for everything, also after that.
    fixed = await report(allocation_ratios={"VCPU": 2.0})
    assert fixed == {"uuid-n1": {"MEMORY_MB": 1.5, "DISK_GB": 1.0}} and (await shown())["VCPU"] == (2.0, 16)


async def test_a_capacity_is_never_larger_than_a_column_holds(database: Database) -> None:
    """A host's setting may be any number; PostgreSQL would refuse the report of all hosts of the batch."""
    large = _node("n1", allocation_ratios={"MEMORY_MB": 1e9, "DISK_GB": 1e300})
    await database.write(node_reports.record, {"h1": [large]}, 10, ratios={"VCPU": 4.0})
    query = sa.select(inventories.c.resource_class, inventories.c.capacity)
    rows = await database.read(lambda conn: conn.execute(query).all())
    found = {row.resource_class: row.capacity for row in rows}
    assert found == {"VCPU": 32, "MEMORY_MB": MOST_UNITS, "DISK_GB": MOST_UNITS}


async def test_the_nodes_of_a_host_have_bounded_descriptions_together(database: Database) -> None:
    """A host may report other nodes each time; schedulers have all of them in memory."""
    cells = tuple(HostCell(id=id, memory_mb=1, dedicated=tuple(range(1000, 2500))) for id in range(64))
    large = _node("n0", topology=NodeTopology(cells=cells))
    size = len(msgspec.json.encode(large.topology))
    fitting = LONGEST_DESCRIPTIONS // (size + 1000)
    for number in range(fitting):
        one = msgspec.structs.replace(large, node=f"n{number}", node_uuid=f"u{number}")
        await database.write(node_reports.record, {"h1": [one]}, 10)
    for number in range(fitting, fitting + 2):
        one = msgspec.structs.replace(large, node=f"n{number}", node_uuid=f"u{number}")
        with pytest.raises(Conflict, match="descriptions of the nodes of host h1"):
            await database.write(node_reports.record, {"h1": [one], "h2": [_node("other")]}, 10)
    await database.write(node_reports.record, {"h1": [_node("small")]}, 10)


async def test_a_host_cannot_take_the_provider_of_another_service(database: Database) -> None:
    await database.write(providers.create, "uuid-storage", "STORAGE", None, 5)
    found = await database.write(node_reports.record, {"h1": [_node("storage")]}, 10)
    assert "uuid-storage, which is a resource provider of another service" in found.refused["uuid-storage"]
    assert await database.read(nodes.list_) == []
    await database.write(node_reports.record, {"h1": [_node("n1")]}, 10)
    with pytest.raises(Conflict, match="already exists"):
        await database.write(providers.create, "uuid-n1", "other", None, 20)


async def test_a_host_cannot_take_the_name_of_another_node_or_provider(database: Database) -> None:
    """Servers that an administrator sent to a node by its name went to the host that reported the same name."""
    await database.write(providers.create, "uuid-storage", "storage", None, 5)
    await database.write(node_reports.record, {"h1": [_node("n1")]}, 10)
    for name, message in (
        ("n1", "another node or resource provider has this name"),
        ("storage", "another node or resource provider has this name"),
        ("compute-9:Open vSwitch agent:br-ex", "names have letters, digits and . - _ only"),
    ):
        wrong = msgspec.structs.replace(_node(name), node_uuid="uuid-evil")
        refused = await database.write(node_reports.record, {"evil": [wrong]}, 20)
        assert message in refused.refused["uuid-evil"] and refused.refused_by == {"evil"}
        assert [node.uuid for node in await database.read(nodes.list_)] == ["uuid-n1"]
    # A node that is named as its host is always taken; its provider has another name.
    await database.write(
        node_reports.record, {"storage": [msgspec.structs.replace(_node("storage"), node_uuid="uuid-host")]}, 30
    )
    found = await database.read(providers.get, "uuid-host")
    assert found.name == "storage (uuid-host)"


async def test_a_host_gives_its_nodes_only_traits_of_hosts(database: Database) -> None:
    await database.write(placement_names.create_trait, "CUSTOM_TRUSTED", 5)

    async def reported(*names: str) -> set[str]:
        await database.write(node_reports.record, {"h1": [_node("n1", traits=names)]}, 10)
        found: dict[str, set[str]] = await database.read(providers.traits_of, ["uuid-n1"])
        return found.get("uuid-n1", set())

    async def custom() -> set[str]:
        found = await database.read(placement_names.list_traits, names=None, prefix="CUSTOM_", associated=None)
        return set(found)

    allowed = {"HW_CPU_X86_AVX", "COMPUTE_NODE", "OWNER_NOVA", "CUSTOM_HOST_RACK_7"}
    refused = {
        "COMPUTE_STATUS_DISABLED",
        "CUSTOM_TRUSTED",
        "CUSTOM_NEW",
        "MISC_SHARES_VIA_AGGREGATE",
        "OWNER_CYBORG",
        "CUSTOM_HOST_\n",
        "HW_NONE",
    }
    assert await reported(*allowed, *refused) == allowed
    assert await custom() == {"CUSTOM_TRUSTED", "CUSTOM_HOST_RACK_7"}
    for turn in range(3):
        assert len(await reported(*(f"CUSTOM_HOST_{turn}_{number}" for number in range(999)))) == 66
        assert len(await custom()) == 65
    assert await reported() == {"COMPUTE_NODE", "OWNER_NOVA"} and await custom() == {"CUSTOM_TRUSTED"}


async def test_the_nodes_of_many_hosts_take_few_statements(database: Database) -> None:
    reports = {f"h{number}": [_node(f"n{number}")] for number in range(50)}
    counted = []
    for now in (10, 20):

        def upsert(conn: sa.Connection, now: int = now) -> int:
            statements: list[str] = []
            listener = lambda *args: statements.append(args[2])  # noqa: E731
            sa.event.listen(conn, "before_cursor_execute", listener)
            try:
                node_reports.record(conn, reports, now)
            finally:
                sa.event.remove(conn, "before_cursor_execute", listener)
            return len(statements)

        counted.append(await database.write(upsert))
    assert counted == [12, 4]
    assert sorted(row.id for row in await database.read(nodes.list_)) == list(range(1, 51))


async def test_a_class_that_devices_of_hosts_have_is_not_renamed(database: Database) -> None:
    """The next report made an empty inventory of the old name, and the devices were given away a second time."""
    device = MdevParent(name="pci_0000_01_00_0", mdev_type="t-1", total=2, resource_class="CUSTOM_GPU")
    await database.write(node_reports.record, {"h1": [_node("n1", topology=NodeTopology(mdevs=(device,)))]}, 10)
    with pytest.raises(Conflict, match="CUSTOM_GPU cannot be renamed: devices of hosts"):
        await database.write(placement_names.rename_class, "CUSTOM_GPU", "CUSTOM_VGPU")
    await database.write(placement_names.create_class, "CUSTOM_GP", 20)
    await database.write(placement_names.rename_class, "CUSTOM_GP", "CUSTOM_VGPU")


async def test_reports_of_very_many_devices_cost_little(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stolen host kept the heartbeats of all hosts waiting, by names of many parts that were tried one by one."""
    named: list[str] = []
    real = mediated_devices.provider_uuid

    def counted(node: str, device: str) -> str:
        named.append(device)
        return real(node, device)

    monkeypatch.setattr("micronova.db.mediated_devices.provider_uuid", counted)
    uuids = [f"{number}1111111-1111-4111-8111-111111111111" for number in range(2)]
    tables = (resource_providers, inventories, provider_traits, traits, resource_classes)

    def devices(kind: int) -> NodeTopology:
        return NodeTopology(
            mdevs=tuple(
                MdevParent(
                    name=f"{'_' * 55}d{number}",
                    mdev_type=f"t{kind}-{number % 16}",
                    total=1,
                    resource_class=f"CUSTOM_R{kind}_{number % 16}",
                )
                for number in range(MOST_MDEV_PARENTS)
            )
        )

    def upsert(conn: sa.Connection, kind: int, now: int) -> tuple[int, list[int]]:
        statements: list[str] = []
        listener = lambda *args: statements.append(args[2])  # noqa: E731
        node = _node("_" * 189, topology=devices(kind))
        changed = [
            msgspec.structs.replace(node, node=f"{number}{node.node}", node_uuid=uuid)
            for number, uuid in enumerate(uuids)
        ]
        assert HostBeat(host="h", nodes=tuple(changed)).entries == 2 + 2 * MOST_MDEV_PARENTS
        sa.event.listen(conn, "before_cursor_execute", listener)
        try:
            node_reports.record(conn, {"h": changed}, now)
        finally:
            sa.event.remove(conn, "before_cursor_execute", listener)
        counts = [conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() for table in tables]
        return len(statements), counts

    await database.write(upsert, 0, 1)
    for now, kind in enumerate((0, 0, 1, 2), 2):
        named.clear()
        statements, counts = await database.write(upsert, kind, now)
        assert len(named) <= 4 * MOST_MDEV_PARENTS  # of two nodes: those of this report and of the last
        assert statements <= (12 if kind == 0 else 60)
        # No trait or class is left of what is no longer reported. Each node has COMPUTE_NODE and OWNER_NOVA besides.
        assert counts == [2 + 2 * MOST_MDEV_PARENTS, 6 + 2 * MOST_MDEV_PARENTS, 4 + 2 * MOST_MDEV_PARENTS, 16, 16]


async def test_traits_and_classes_of_former_devices_stay_if_others_have_them(database: Database) -> None:
    uuid = "11111111-1111-4111-8111-111111111111"
    device = MdevParent(name="gpu", mdev_type="nvidia-35", total=2, resource_class="CUSTOM_GPU")
    node = msgspec.structs.replace(_node("n1"), node_uuid=uuid)

    async def report(*mdevs: MdevParent, now: int) -> None:
        changed = msgspec.structs.replace(node, topology=NodeTopology(mdevs=mdevs))
        await database.write(node_reports.record, {"h": [changed]}, now)

    async def known() -> tuple[bool, bool]:
        def find(conn: sa.Connection) -> tuple[bool, bool]:
            trait, _ = placement_names.find_trait(conn, "CUSTOM_NVIDIA_35")
            return trait, placement_names.find_class(conn, "CUSTOM_GPU")[0]

        return await database.read(find)

    def of_another(conn: sa.Connection) -> None:
        other = "22222222-2222-4222-8222-222222222222"
        providers.create(conn, other, "another", None, 2)
        providers.set_traits(conn, other, ["CUSTOM_NVIDIA_35"])
        row = {"node_uuid": other, "resource_class": "CUSTOM_GPU", "total": 1, "capacity": 1, "changed_at": 2}
        conn.execute(inventories.insert(), row)

    await report(device, now=1)
    await database.write(of_another)
    await report(now=3)
    assert await known() == (True, True)
    await report(device, now=4)
    await database.write(providers.delete, "22222222-2222-4222-8222-222222222222", 5)
    assert await known() == (True, True)
    await report(now=6)
    assert await known() == (False, False)


async def test_a_change_of_an_aggregate_is_noted_when_its_hosts_are_locked(database: Database) -> None:
    """What was decided while it waited for them knows nothing of it; the aggregate's own time is earlier."""
    await database.write(services.heartbeat, "nova-compute", ["h1"], 5)
    await database.write(node_reports.record, {"h1": [_node("n1")]}, 10)
    made = await database.write(aggregates.insert, "aggregate", "name", None, 20)
    for change, moments in ((aggregates.add_host, (30, 40)), (aggregates.remove_host, (50, 60))):
        await database.write(change, made.id, "h1", iter(moments).__next__)
        assert (await database.read(providers.get, "uuid-n1")).updated_at == moments[-1]
