"""NUMA nodes, dedicated CPUs, memory pages and PCI devices of servers, on simulated hosts."""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import sqlalchemy as sa

from micronova.cli.audit import run_audit, run_repair
from micronova.compute.manager import ComputeManager
from micronova.db.tables import instances, node_topologies, topology_claims
from micronova.objects.errors import Conflict
from micronova.objects.topology import CellUse, TopologyUse, decode_use, encode
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import call, image, ok

GPU = {"vendor_id": "10de", "product_id": "1eb8"}
NIC = {"vendor_id": "8086", "product_id": "1889"}
# Two hosts with two NUMA nodes of 8 CPUs, of which 6 are for pinned servers, and one GPU at each node. Each has two
# network cards, one of which can be live migrated.
CLOUD = CloudOptions(
    hosts=2,
    roles=("image",),
    settings={
        "fake": {
            "vcpus": 16,
            "memory_mb": 8192,
            "numa_nodes": 2,
            "threads_per_core": 2,
            "cpu_dedicated_set": "2-7,10-15",
            "pages_2mb": 512,
            "rules": [{"operation": "destroy", "kind": "delay", "delay": [1.0, 1.0], "metadata": {"leaves": "slowly"}}],
            "pci_devices": [
                *({"address": f"0000:0{node}:00.0", "numa_node": node, **GPU} for node in (0, 1)),
                {"address": "0000:02:00.0", **NIC},
                {"address": "0000:03:00.0", "live_migratable": True, **NIC},
            ],
        },
        "pci": {
            "alias": [
                {"name": "gpu", **GPU},
                {"name": "nic", **NIC},
                {"name": "mobile-nic", "live_migratable": "yes", **NIC},
                {"name": "fixed-nic", "live_migratable": "no", **NIC},
            ]
        },
        "default": {"allow_resize_to_same_host": True},
        "compute": {"resource_interval": 0.2},
    },
)
pytestmark = only_in_one_process("the shared cloud has hosts without dedicated CPUs")
DEDICATED = {"hw:cpu_policy": "dedicated"}


async def _flavor(user: Caller, specs: Mapping[str, str], vcpus: int = 4, ram: int = 256) -> str:
    known = (await user.admin.get("/flavors"))["flavors"]
    flavor = {"name": f"f{len(known)}-{user.project}", "ram": ram, "vcpus": vcpus, "disk": 1}
    id: str = (await user.admin.post("/flavors", {"flavor": flavor}, 200))["flavor"]["id"]
    if specs:
        await user.admin.post(f"/flavors/{id}/os-extra_specs", {"extra_specs": dict(specs)}, 200)
    return id


async def _image(user: Caller) -> str:
    known = (await ok(user, "GET", "/image/v2/images?visibility=private"))["images"]
    return str(known[0]["id"]) if known else await image(user)


async def _boot(user: Caller, flavor: str, **fields: Any) -> str:
    return str((await user.boot(flavorRef=flavor, imageRef=await _image(user), **fields))["id"])


async def _not_placed(user: Caller, flavor: str, **fields: Any) -> None:
    id = await user.create(flavorRef=flavor, imageRef=await _image(user), **fields)
    refused = await user.wait_for(id, "ERROR")
    assert "No valid host was found" in refused["fault"]["message"]


async def _cpus(user: Caller, id: str) -> set[int]:
    nodes = (await user.admin.get(f"/servers/{id}/topology"))["nodes"]
    return {cpu for node in nodes for cpu in node["cpu_pinning"].values()}


@pytest.mark.parametrize(
    ("specs", "nodes", "places", "page"),
    [
        ({}, [], [], None),
        (
            {"hw:numa_nodes": "2"},
            [
                {"vcpu_set": [0, 1], "siblings": [], "memory_mb": 128},
                {"vcpu_set": [2, 3], "siblings": [], "memory_mb": 128},
            ],
            [{"host_node": 0, "cpu_pinning": {}}, {"host_node": 1, "cpu_pinning": {}}],
            None,
        ),
        (
            DEDICATED | {"hw:cpu_threads": "2", "hw:mem_page_size": "2048"},
            [{"vcpu_set": [0, 1, 2, 3], "siblings": [[0, 1], [2, 3]], "memory_mb": 256}],
            [{"host_node": 0, "cpu_pinning": {"0": 2, "1": 3, "2": 4, "3": 5}}],
            2048,
        ),
        (
            {"hw:mem_page_size": "large"},
            [{"vcpu_set": [0, 1], "siblings": [], "memory_mb": 256}],
            [{"host_node": 0, "cpu_pinning": {}}],
            2048,
        ),
    ],
)
async def test_what_is_shown(
    cloud: Cloud,
    user: Caller,
    specs: dict[str, str],
    nodes: list[dict[str, Any]],
    places: list[dict[str, Any]],
    page: int | None,
) -> None:
    vcpus = sum(len(node["vcpu_set"]) for node in nodes) or 1
    server = await _boot(user, await _flavor(user, specs, vcpus))
    path = f"/servers/{server}/topology"
    assert await user.get(path) == {"nodes": nodes, "pagesize_kb": page}
    with_places = [{**node, **place} for node, place in zip(nodes, places, strict=True)]
    assert await user.admin.get(path) == {"nodes": with_places, "pagesize_kb": page}
    await cloud.caller().refused(404, "GET", path)
    await user.at(78).get(f"{path}?zork=1")
    await user.refused(400, "GET", f"{path}?zork=1")
    await user.at(77).refused(404, "GET", path)
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_dedicated_cpus_belong_to_one_server(cloud: Cloud, user: Caller) -> None:
    """24 CPUs in nodes of 6: a server of 4 leaves 2, which others of 2 get."""
    large, small = await _flavor(user, DEDICATED), await _flavor(user, DEDICATED, vcpus=2)
    servers = [await _boot(user, large) for _ in range(4)]
    servers += [await _boot(user, small) for _ in range(4)]
    held = [(await user.host_of(id), cpu) for id in servers for cpu in await _cpus(user, id)]
    assert len(held) == len(set(held)) == 24
    await _not_placed(user, small)
    shown = (await user.admin.at(87).get("/os-hypervisors/detail"))["hypervisors"]
    assert [(each["vcpus"], each["vcpus_used"]) for each in shown] == [(16, 12)] * 2
    total = (await user.admin.at(87).get("/os-hypervisors/statistics"))["hypervisor_statistics"]
    assert (total["vcpus"], total["vcpus_used"]) == (32, 24)
    await cloud.assert_clean()
    await user.delete(f"/servers/{servers[0]}")
    await user.gone(servers[0])
    again = await _boot(user, large)
    assert len(await _cpus(user, again)) == 4
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_several_servers_of_one_request_share_no_cpu(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, DEDICATED | {"hw:emulator_threads_policy": "isolate"}, vcpus=2)
    body = user.body(flavorRef=flavor, imageRef=await _image(user), min_count=8, max_count=8)
    await user.post("/servers", body)
    servers = [each["id"] for each in (await user.get("/servers"))["servers"]]
    held = []
    for id in servers:
        await user.wait_for(id, "ACTIVE")
        held += [(await user.host_of(id), cpu) for cpu in await _cpus(user, id)]
    assert len(servers) == 8 and len(held) == len(set(held)) == 16
    await _not_placed(user, flavor)  # 8 CPUs are left, two on each node: 3 are needed
    await cloud.assert_clean()
    await cloud.delete_all()


async def test_a_resize_holds_both_places_until_it_is_confirmed_or_reverted(cloud: Cloud, user: Caller) -> None:
    small, large = await _flavor(user, DEDICATED, vcpus=2), await _flavor(user, DEDICATED, vcpus=6)
    id = await _boot(user, small)
    before, first_host = await _cpus(user, id), await user.host_of(id)
    await user.act(id, "resize", {"flavorRef": large})
    await user.wait_for(id, "VERIFY_RESIZE")
    assert len(await _cpus(user, id)) == 6
    await cloud.assert_clean()
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert (await _cpus(user, id), await user.host_of(id)) == (before, first_host)
    await cloud.assert_clean()
    await user.act(id, "resize", {"flavorRef": large})
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    assert len(await _cpus(user, id)) == 6
    await cloud.assert_clean()
    # What the server had before is free again: three more of the same size fit.
    for _ in range(3):
        await _boot(user, large)
    await cloud.assert_clean()
    await cloud.delete_all()


async def test_a_migrated_server_gets_cpus_of_its_new_host(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, DEDICATED, vcpus=6)
    id = await _boot(user, flavor)
    source = await user.host_of(id)
    await user.admin.act(id, "migrate", None)
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) != source and len(await _cpus(user, id)) == 6
    await cloud.assert_clean()
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    shown = await user.admin.get(f"/servers/{id}/topology")
    assert shown["nodes"] == [{"vcpu_set": list(range(6)), "siblings": [], "memory_mb": 256}]
    await cloud.assert_clean()
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    assert len(await _cpus(user, id)) == 6
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_live_migration_and_evacuation_claim_on_the_destination(cloud: Cloud, user: Caller) -> None:
    specs = DEDICATED | {"hw:numa_nodes": "2", "hw:mem_page_size": "large"}
    id = await _boot(user, await _flavor(user, specs, vcpus=8))
    source = await user.host_of(id)
    await user.admin.act(id, "os-migrateLive", {"host": None, "block_migration": "auto"})
    await user.wait_for(id, "ACTIVE")
    destination = await user.host_of(id)
    assert destination != source and len(await _cpus(user, id)) == 8
    await cloud.assert_clean()
    [service] = (await user.admin.get(f"/os-services?binary=nova-compute&host={destination}"))["services"]
    await user.admin.put(f"/os-services/{service['id']}", {"forced_down": True})
    await user.admin.act(id, "evacuate", {}, status=200)
    await user.wait_for(id, "SHUTOFF")
    assert await user.host_of(id) == source and len(await _cpus(user, id)) == 8
    await user.admin.put(f"/os-services/{service['id']}", {"forced_down": False})
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_cpus_of_a_guest_that_still_has_to_leave_are_waited_for(cloud: Cloud, user: Caller) -> None:
    """After a live migration the source removes its guest later; nobody else has what is claimed there meanwhile."""
    whole = await _flavor(user, DEDICATED | {"hw:numa_nodes": "2"}, vcpus=12)
    first = await _boot(user, whole, metadata={"leaves": "slowly"})
    source = await user.host_of(first)
    await user.admin.act(first, "os-migrateLive", {"host": None, "block_migration": "auto"})
    await user.wait_for(first, "ACTIVE")
    assert await user.host_of(first) != source
    second = await _boot(user, whole)
    assert await user.host_of(second) == source and len(await _cpus(user, second)) == 12
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_pci_devices_belong_to_one_server(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, {"pci_passthrough:alias": "gpu:1"}, vcpus=1)
    for _ in range(4):
        await _boot(user, flavor)
    await _not_placed(user, flavor)
    await cloud.assert_clean()
    await cloud.delete_all()
    near = await _flavor(
        user, DEDICATED | {"pci_passthrough:alias": "gpu:1", "hw:pci_numa_affinity_policy": "required"}, vcpus=4
    )
    for _ in range(4):
        await _boot(user, near)
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_a_server_with_pci_devices_is_not_moved_while_it_runs(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, {"pci_passthrough:alias": "gpu:1"}, vcpus=1)
    id = await _boot(user, flavor)
    source = await user.host_of(id)
    body = {"host": None, "block_migration": "auto"}
    message = "has PCI devices that were not requested as live_migratable, so it cannot be moved while it runs"
    assert message in await user.admin.at(33).refused(400, "POST", f"/servers/{id}/action", {"os-migrateLive": body})
    await user.admin.act(id, "os-migrateLive", body)
    await user.wait_for(id, "ACTIVE")
    [action, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (action["action"], action["message"]) == ("live-migration", "Error")
    [*_, migration] = (await user.admin.get(f"/os-migrations?instance_uuid={id}"))["migrations"]
    assert migration["status"] == "error" and await user.host_of(id) == source
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) != source
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_a_server_with_live_migratable_devices_is_moved_while_it_runs(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, {"pci_passthrough:alias": "mobile-nic:1"}, vcpus=1)
    first = await _boot(user, flavor)
    source = await user.host_of(first)
    await user.admin.act(first, "os-migrateLive", {"host": None, "block_migration": "auto"})
    await user.wait_for(first, "ACTIVE")
    assert await user.host_of(first) != source
    await cloud.assert_clean()
    # Each host has one such device, and none that it calls fixed.
    await _boot(user, flavor)
    await _not_placed(user, flavor)
    await _not_placed(user, await _flavor(user, {"pci_passthrough:alias": "fixed-nic:1"}, vcpus=1))
    await cloud.delete_all()
    any_nic = await _flavor(user, {"pci_passthrough:alias": "nic:2"}, vcpus=1)
    await _boot(user, any_nic)
    await cloud.delete_all()
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"pci_passthrough:alias": "fpga:1"}, "PCI alias fpga is not defined"),
        ({"pci_passthrough:alias": "gpu:99"}, "NAME:COUNT"),
        ({"resources:PCPU": "2"}, "resources:PCPU is 2: it should be 1, the number of the flavor's CPUs"),
        ({"resources:PCPU": "1", "hw:emulator_threads_policy": "isolate"}, "it should be 2"),
        ({"resources:PCPU": "1", "resources:VCPU": "1"}, "both resources:VCPU and resources:PCPU"),
        ({"resources1:PCPU": "1"}, "resources1:PCPU of flavor"),
        ({"trait:HW_CPU_HYPERTHREADING": "required"}, "trait:HW_CPU_HYPERTHREADING needs dedicated CPUs"),
        (
            DEDICATED | {"trait:HW_CPU_HYPERTHREADING": "required", "hw:cpu_thread_policy": "require"},
            "trait:HW_CPU_HYPERTHREADING and a cpu_thread_policy",
        ),
        ({"resources:VCPU": "1"} | DEDICATED, "resources:VCPU of flavor"),
        ({"resources1:VCPU": "1", "hw:cpu_policy": "shared"}, "contradicts the CPU policy shared"),
        ({"resources:PCPU": "1"} | DEDICATED, "contradicts the CPU policy dedicated"),
    ],
)
async def test_what_cannot_be_asked_for(user: Caller, specs: dict[str, str], message: str) -> None:
    body = user.body(flavorRef=await _flavor(user, specs, vcpus=1), imageRef=await _image(user))
    assert message in await user.refused(400, "POST", "/servers", body)


async def test_a_host_that_an_admin_names_needs_room_too(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, DEDICATED, vcpus=6)
    for _ in range(2):
        await _boot(user.admin, flavor, availability_zone="nova:fake-1")
    await _not_placed(user.admin, flavor, availability_zone="nova:fake-1")
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_an_amount_of_dedicated_cpus_and_a_trait_ask_for_what_policies_do(cloud: Cloud, user: Caller) -> None:
    """Nova's newer form of `hw:cpu_policy` and `hw:cpu_thread_policy`; the hosts have two threads in each core."""
    amounts = {"resources:PCPU": "3", "resources:VCPU": "0", "hw:emulator_threads_policy": "isolate"}
    id = await _boot(user, await _flavor(user, amounts, vcpus=2))
    assert len(await _cpus(user, id)) == 2
    [held] = (await ok(user.admin, "GET", f"/placement/allocations/{id}"))["allocations"].values()
    assert held["resources"] == {"PCPU": 3, "MEMORY_MB": 256, "DISK_GB": 1}
    threads = {"resources:PCPU": "2", "trait:HW_CPU_HYPERTHREADING": "required"}
    paired = await _boot(user, await _flavor(user, threads, vcpus=2))
    first, second = sorted(await _cpus(user, paired))
    assert second - first == 1  # threads of one core
    await _not_placed(user, await _flavor(user, {**DEDICATED, "trait:HW_CPU_HYPERTHREADING": "forbidden"}, vcpus=1))
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_placement_shows_dedicated_cpus(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, DEDICATED, vcpus=3)
    id = await _boot(user, flavor)
    shown = await ok(user.admin, "GET", f"/placement/allocations/{id}")
    [(node, held)] = shown["allocations"].items()
    assert held["resources"] == {"PCPU": 3, "MEMORY_MB": 256, "DISK_GB": 1}
    stock = await ok(user.admin, "GET", f"/placement/resource_providers/{node}/inventories")
    totals = {name: each["total"] for name, each in stock["inventories"].items()}
    assert (totals["VCPU"], totals["PCPU"]) == (4, 12)
    assert stock["inventories"]["PCPU"]["allocation_ratio"] == 1.0
    usages = await ok(user.admin, "GET", f"/placement/resource_providers/{node}/usages")
    assert usages["usages"]["PCPU"] >= 3
    # Another service may hold an amount of them: the audit asks for no names.
    other = {"allocations": [{"resource_provider": {"uuid": node}, "resources": {"PCPU": 1}}]}
    path = f"/placement/allocations/{uuid4()}"
    assert (await call(user.admin, "PUT", path, other)).status == 204
    await cloud.assert_clean()
    assert (await call(user.admin, "DELETE", path)).status == 204
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_the_audit_names_what_a_host_has_lost(cloud: Cloud, user: Caller) -> None:
    specs = DEDICATED | {"pci_passthrough:alias": "gpu:1", "hw:pci_numa_affinity_policy": "required"}
    id = await _boot(user, await _flavor(user, specs, vcpus=6))
    host = await user.host_of(id)
    await cloud.assert_clean()
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    simulated = manager._agents[host].host.driver._simulated  # type: ignore[attr-defined]
    whole = simulated._topology
    [lost] = [cell for cell in whole.cells if min(await _cpus(user, id)) in cell.dedicated]
    fewer = msgspec.structs.replace(lost, dedicated=lost.dedicated[1:], shared=(*lost.shared, lost.dedicated[0]))
    cells = tuple(fewer if cell is lost else cell for cell in whole.cells)
    devices = tuple(each for each in whole.devices if each.numa_node != lost.id)
    simulated._topology = msgspec.structs.replace(whole, cells=cells, devices=devices)
    expected = {
        f"The host lacks what its servers hold: NUMA node {lost.id} no longer has the dedicated CPUs "
        f"{lost.dedicated[0]}.",
        f"The host lacks what its servers hold: The PCI device 0000:0{lost.id}:00.0 is gone.",
    }

    async def found() -> bool | None:
        findings = [each for each in await run_audit(cloud.process) if each["kind"] == "topology"]
        return True if {(each["subject"], each["message"]) for each in findings} == {
            (host, message) for message in expected
        } else None  # fmt: skip

    await cloud.until(found, "the audit to name what is lost")
    simulated._topology = whole

    async def clean() -> bool | None:
        return None if await run_audit(cloud.process) else True

    await cloud.until(clean, "the host to have everything again")
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_the_audit_names_the_cells_and_devices_whose_record_is_wrong(cloud: Cloud, user: Caller) -> None:
    """The record has one more GPU than the claims, and a CPU of a cell that no claim has."""
    id = await _boot(user, await _flavor(user, DEDICATED, vcpus=6))
    host = await user.host_of(id)
    await cloud.assert_clean()
    [row] = await cloud.read(
        sa.select(node_topologies).join(instances, instances.c.node_uuid == node_topologies.c.node_uuid).where(
            instances.c.uuid == id
        )
    )  # fmt: skip
    held = decode_use(row.held)
    [cell] = set(held.cells)
    other = 1 - cell
    wrong = TopologyUse(cells={**held.cells, other: CellUse(pinned=(2,))}, devices=("0000:00:00.0",))

    def plant(conn: sa.Connection) -> None:
        of_node = node_topologies.c.node_uuid == row.node_uuid
        conn.execute(node_topologies.update().where(of_node).values(held=encode(wrong)))

    assert cloud.process.database is not None
    await cloud.process.database.write(plant)
    [finding] = await run_audit(cloud.process)
    assert (finding["kind"], finding["subject"]) == ("topology", host)
    assert finding["message"] == (
        f"The record of held NUMA cells and devices differs from the claims: NUMA cell {other}, device 0000:00:00.0."
    )
    assert "NUMA cells and devices" in await run_repair(cloud.process, finding["repairs"][0])
    await cloud.assert_clean()
    await cloud.delete_all()


async def test_a_guest_with_a_cpu_for_its_emulator_has_the_size_of_its_flavor(cloud: Cloud, user: Caller) -> None:
    """It is adopted, or refused, as any other one."""
    specs = DEDICATED | {"hw:emulator_threads_policy": "isolate"}
    id = await _boot(user, await _flavor(user, specs, vcpus=2))
    await cloud.settled()
    await cloud.assert_clean()
    [before] = await cloud.read(sa.select(instances.c.host, instances.c.node, instances.c.node_uuid).where(
        instances.c.uuid == id
    ))  # fmt: skip

    async def set_host(**values: Any) -> None:
        def write(conn: sa.Connection) -> None:
            conn.execute(instances.update().where(instances.c.uuid == id).values(**values, updated_at=1))

        assert cloud.process.database is not None
        await cloud.process.database.write(write)

    await set_host(host=None, node=None, node_uuid=None)
    repairs = [repair for each in await run_audit(cloud.process) for repair in each.get("repairs", ())]
    [adopt] = [each for each in repairs if each["name"] == "adopt_guest"]
    with pytest.raises(Conflict, match="CPUs or devices of its own"):
        await run_repair(cloud.process, adopt)
    await set_host(**before._mapping)
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_the_audit_names_a_host_that_has_less_than_is_used(cloud: Cloud, user: Caller) -> None:
    """A host comes back with half of its memory, and gets the other half again."""
    id = await _boot(user, await _flavor(user, {}, vcpus=1, ram=2048))
    host = await user.host_of(id)
    await cloud.assert_clean()
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    simulated = manager._agents[host].host.driver._simulated  # type: ignore[attr-defined]
    whole = simulated._settings
    simulated._settings = msgspec.structs.replace(whole, memory_mb=2000)

    async def found() -> list[dict[str, Any]] | None:
        return await run_audit(cloud.process) or None

    try:
        findings = await cloud.until(found, "the audit to name the host")
    finally:
        simulated._settings = whole
    reserved = 512  # MB, unless the settings say something else
    assert findings == [
        {
            "kind": "oversold",
            "subject": host,
            "message": f"The node {host} has a capacity of {2000 - reserved} MEMORY_MB (total 2000, reserved "
            f"{reserved}, allocation ratio 1), and 2048 are used.",
            "advice": "Migrate servers away, give the host back what it lost, or raise the allocation ratio.",
        }
    ]

    async def clean() -> bool | None:
        return None if await run_audit(cloud.process) else True

    await cloud.until(clean, "the host to have its memory again")
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_the_audit_names_a_provider_that_has_less_than_is_used(cloud: Cloud, user: Caller) -> None:
    """Another service keeps it, and lowers its allocation ratio below what consumers hold."""
    provider, consumer, name = str(uuid4()), str(uuid4()), f"provider-{user.project}"
    path, version = f"/placement/resource_providers/{provider}", {"openstack-api-version": "placement 1.39"}
    stock = {"total": 10, "allocation_ratio": 2.0}
    held = {
        "allocations": {provider: {"resources": {"CUSTOM_LICENSE": 20}}}, "consumer_generation": None,
        "project_id": "p", "user_id": "u", "consumer_type": "RESERVATION",
    }  # fmt: skip
    for method, where, body in (
        ("PUT", "/placement/resource_classes/CUSTOM_LICENSE", None),
        ("POST", "/placement/resource_providers", {"name": name, "uuid": provider}),
        ("PUT", f"{path}/inventories", {"resource_provider_generation": 0, "inventories": {"CUSTOM_LICENSE": stock}}),
        ("PUT", f"/placement/allocations/{consumer}", held),
    ):
        answer = await call(user.admin, method, where, body, version)
        assert answer.status in (200, 201, 204), answer.body
    await cloud.assert_clean()
    shown = (await call(user.admin, "GET", f"{path}/inventories/CUSTOM_LICENSE", None, version)).json()
    answer = await call(
        user.admin, "PUT", f"{path}/inventories/CUSTOM_LICENSE", {**shown, "allocation_ratio": 1.5}, version
    )
    assert answer.status == 200, answer.body
    [finding] = await run_audit(cloud.process)
    assert (finding["kind"], finding["subject"]) == ("oversold", name)
    assert f"The resource provider {name} has a capacity of 15 CUSTOM_LICENSE" in finding["message"]
    assert "allocation ratio 1.5), and 20 are used." in finding["message"]
    assert (await call(user.admin, "DELETE", f"/placement/allocations/{consumer}", None, version)).status == 204
    await cloud.assert_clean()
    assert (await call(user.admin, "DELETE", path, None, version)).status == 204


async def test_a_flavor_that_claims_nothing_of_its_node(cloud: Cloud, user: Caller) -> None:
    """Its device is given back, and the audit is clean, although it has no amounts."""
    nothing = {"resources:VCPU": "0", "resources:MEMORY_MB": "0", "resources:DISK_GB": "0"}
    id = await _boot(user, await _flavor(user, {**nothing, "pci_passthrough:alias": "gpu:1"}, vcpus=1))
    await cloud.assert_clean()
    shown = await call(user.admin, "GET", f"/placement/allocations/{id}")
    assert shown.json()["allocations"] == {}
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
    await cloud.delete_all()
    assert await cloud.read(sa.select(topology_claims)) == []
    await cloud.assert_clean()


@pytest.mark.parametrize("deleted", ["migration", "server"])
async def test_a_revert_gives_back_what_placement_has_forgotten(cloud: Cloud, user: Caller, deleted: str) -> None:
    id = await _boot(user, await _flavor(user, DEDICATED, vcpus=6))
    source = await user.host_of(id)
    if deleted == "server":
        assert (await call(user.admin, "DELETE", f"/placement/allocations/{id}")).status == 204
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    if deleted == "migration":
        [migration] = (await user.admin.get(f"/os-migrations?instance_uuid={id}"))["migrations"]
        assert (await call(user.admin, "DELETE", f"/placement/allocations/{migration['uuid']}")).status == 204
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source
    [claim] = await cloud.read(sa.select(topology_claims))
    assert claim.consumer_uuid == id
    await cloud.delete_all()
    assert await cloud.read(sa.select(topology_claims)) == []
