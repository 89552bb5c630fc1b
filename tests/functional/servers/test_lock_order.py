"""The order in which transactions lock rows, recorded while servers are created, changed, moved off hosts and deleted.

Two transactions that lock the same rows in different orders wait for each other. So all of them lock tables in one
order, and the rows of a table in the order of their keys.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from micronova.http.client import Answer
from tests.functional.cloud import IMAGE, CloudOptions, OneProcess
from tests.functional.servers.embedded_services import call, image, make, network, ok
from tests.functional.servers.killable_host import KillableHost
from tests.lock_recorder import LockRecorder, Transaction

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]
# As ARCHITECTURE.md has it.
ORDER = (
    "instances", "operations", "compute_nodes", "server_groups", "server_group_hosts", "node_topologies",
    "resource_providers", "traits", "provider_traits", "inventories", "quota_usages", "services",
)  # fmt: skip


class RecordedCloud(OneProcess):
    """A cloud whose locks are recorded from its first transaction on."""

    recorders: dict[str, LockRecorder]

    async def start(self) -> None:
        open_database = self.process.open_database
        self.recorders = {}

        async def recorded(name: str) -> Any:
            database = await open_database(name)
            if name != "image":
                self.recorders[name] = LockRecorder(database)
            return database

        self.process.open_database = recorded  # type: ignore[method-assign]
        await super().start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, list[Transaction]]]:
    """Return all transactions of a run of the main flows, by service."""
    place = tmp_path_factory.mktemp("cloud")
    rules = place / "placement.json"
    rules.write_text('{"placement:reshaper:reshape": "role:admin"}')
    gpus = [{"address": f"0000:8{number}:00.0", "types": {"nvidia-35": 2}} for number in range(2)]
    settings: dict[str, dict[str, Any]] = {
        "default": {"report_interval": 0.2}, "conductor": {"sweep_interval": 0.2}, "fake": {"mdev_devices": gpus},
        "devices": {"enabled_mdev_types": ["nvidia-35"]}, "placement": {"policy_file": str(rules)},
    }  # fmt: skip
    cloud = RecordedCloud(place, CloudOptions(hosts=3, roles=("network", "image"), settings=settings))
    await cloud.start()
    try:
        await image(cloud.caller().admin, id=IMAGE, visibility="public")
        await _live(cloud)
        await _make_images(cloud)
        await _change_interfaces(cloud)
        await _stop_hosts(cloud, place)
        await _use_networks(cloud)
        await _use_providers(cloud)
        await cloud.delete_all()
        await cloud.assert_clean()
    finally:
        await cloud.stop()
        for recorder in reversed(cloud.recorders.values()):
            recorder.close()
    yield {name: recorder.transactions for name, recorder in cloud.recorders.items()}


@pytest.fixture
def transactions(recorded: dict[str, list[Transaction]]) -> list[Transaction]:
    """Return the transactions of compute."""
    return recorded["compute"]


async def _live(cloud: RecordedCloud) -> None:
    user = cloud.caller()
    group = (await user.post("/os-server-groups", {"server_group": {"name": "g", "policy": "soft-affinity"}}, 200))[
        "server_group"
    ]["id"]
    ids = await user.boot_many(6)
    ids += [await user.create({"group": group}) for _ in range(4)]
    await asyncio.gather(*(user.wait_for(id, "ACTIVE") for id in ids))
    async with cloud.faults({"operation": "spawn", "kind": "fail", "count": 1}):
        await user.boot({"group": group})
    first, *rest = ids
    for action in ("os-stop", "os-start", "pause", "unpause", "trigger_crash_dump", "lock", "unlock"):
        await user.act(first, action)
        await cloud.settled()
    await user.act(first, "reboot", {"type": "HARD"})
    await cloud.settled()
    await user.put(f"/servers/{first}", {"server": {"name": "new"}})
    await user.put(f"/servers/{first}/tags", {"tags": ["a"]})
    await user.post(f"/servers/{first}/metadata", {"metadata": {"a": "b"}}, 200)
    await asyncio.gather(*(user.act(id, "os-stop") for id in rest))
    await cloud.settled()
    building = await user.create()
    await user.delete(f"/servers/{building}")
    await user.gone(building)
    await user.delete(f"/os-server-groups/{group}")
    await asyncio.gather(*(user.delete(f"/servers/{id}") for id in ids))
    await asyncio.gather(*(user.gone(id) for id in ids))


async def _make_images(cloud: RecordedCloud) -> None:
    """Make images of servers, one that fails, and one of a server that is deleted meanwhile."""
    user = cloud.caller()
    first, second, third = await user.boot_many(3, name=user.project)
    wanted: dict[str, Any] = {"name": "b", "backup_type": "daily", "rotation": 1}
    for action, value in (("createImage", {"name": "i"}), ("createBackup", wanted), ("createBackup", wanted)):
        await asyncio.gather(*(user.act(id, action, value) for id in (first, second)))
        await cloud.settled()
    async with cloud.faults({"operation": "snapshot", "kind": "fail", "name": user.project}):
        await user.act(first, "createImage", {"name": "i"})
        await cloud.settled()
    async with cloud.faults({"operation": "upload", "kind": "hang", "name": user.project}):
        await user.act(third, "createBackup", wanted)
        await user.wait_for(third, "ACTIVE", task="image_uploading")
        await user.delete(f"/servers/{third}")
        await user.gone(third)
    for action in ("shelve", "unshelve", "shelve"):
        await asyncio.gather(*(user.act(id, action) for id in (first, second)))
        await cloud.settled()
    await user.act(first, "unshelve")
    await user.delete(f"/servers/{first}")
    await user.gone(first)


async def _change_interfaces(cloud: RecordedCloud) -> None:
    """Attach and detach interfaces, several at the same time, and delete a server meanwhile."""
    user = cloud.caller()
    first, second = await network(user), await network(user, cidr="10.8.0.0/24")
    ids = await user.boot_many(3, networks=[{"uuid": first["id"]}])
    wanted = {"interfaceAttachment": {"net_id": second["id"]}}
    made = await asyncio.gather(*(user.post(f"/servers/{id}/os-interface", wanted, 200) for id in ids))
    ports = [each["interfaceAttachment"]["port_id"] for each in made]
    await asyncio.gather(
        *(user.delete(f"/servers/{id}/os-interface/{port}", 202) for id, port in zip(ids, ports, strict=True))
    )
    await cloud.settled()
    await user.post(f"/servers/{ids[0]}/os-interface", wanted, 200)
    await asyncio.gather(*(user.delete(f"/servers/{id}") for id in ids))
    await asyncio.gather(*(user.gone(id) for id in ids))


async def _stop_hosts(cloud: RecordedCloud, place: Path) -> None:
    """Stop a host that builds several servers, kill it while it builds others, and start it again."""
    user = cloud.caller()
    group = {"server_group": {"name": "h", "policy": "soft-affinity"}}
    group_id = (await user.post("/os-server-groups", group, 200))["server_group"]["id"]
    host = KillableHost(cloud, "stops", place, vcpus=1000, memory_mb=1 << 20, local_gb=10_000)
    await host.start({"operation": "spawn", "kind": "hang"})
    ids = [await user.create({"group": group_id}) for _ in range(4)]
    for id in ids:
        await user.wait_for(id, "BUILD", task="spawning")
    assert {await user.host_of(id) for id in ids} == {"stops"}
    await host.stop()
    await asyncio.gather(*(user.wait_for(id, "ACTIVE") for id in ids))
    await host.start()
    await cloud.settled()
    await host.stop()


async def _use_networks(cloud: RecordedCloud) -> None:
    """Change what the embedded network service holds."""
    user = cloud.caller()
    made = await network(user, cidr="10.9.0.0/24")
    groups = [await make(user, "security_group", name=f"g{number}") for number in range(3)]
    for group in groups:
        rule = {"direction": "ingress", "ethertype": "IPv4", "protocol": "icmp", "remote_group_id": groups[0]["id"]}
        rules = [
            await make(user, "security_group_rule", security_group_id=group["id"], port_range_min=n, **rule)
            for n in (1, 2)
        ]
        await call(user, "DELETE", f"/network/v2.0/security-group-rules/{rules[0]['id']}")
    wanted = [group["id"] for group in groups]
    ports = [await make(user, "port", network_id=made["id"], security_groups=wanted) for _ in range(3)]
    for port in ports:
        change = {"port": {"security_groups": wanted[:1], "name": "new"}}
        await ok(user, "PUT", f"/network/v2.0/ports/{port['id']}", change)
    for port in ports:
        await call(user, "DELETE", f"/network/v2.0/ports/{port['id']}")
    for group in groups:
        await call(user, "DELETE", f"/network/v2.0/security-groups/{group['id']}")
    await call(user, "DELETE", f"/network/v2.0/networks/{made['id']}")


async def _use_providers(cloud: RecordedCloud) -> None:
    """Give servers of a group virtual GPUs, and move some of their allocations to other providers."""
    user = cloud.caller()
    group = (
        await user.post("/os-server-groups", {"server_group": {"name": "g", "policy": "soft-anti-affinity"}}, 200)
    )["server_group"]["id"]
    flavor = {"name": f"gpu-{user.project}", "ram": 64, "vcpus": 1, "disk": 1}
    id = (await user.admin.post("/flavors", {"flavor": flavor}, 200))["flavor"]["id"]
    await user.admin.post(f"/flavors/{id}/os-extra_specs", {"extra_specs": {"resources:VGPU": "1"}}, 200)
    servers = [await user.create({"group": group}, flavorRef=id) for _ in range(4)]
    await asyncio.gather(*(user.wait_for(each, "ACTIVE") for each in servers))
    reshaped = await _reshape(cloud, servers)
    assert reshaped.status == 204, reshaped
    await asyncio.gather(*(user.delete(f"/servers/{each}") for each in servers))
    await asyncio.gather(*(user.gone(each) for each in servers))


async def _reshape(cloud: RecordedCloud, servers: list[str]) -> Answer:
    """Give each node that servers are on a provider below it, with as much memory, which the servers hold then."""
    admin, version = cloud.caller().admin, {"openstack-api-version": "placement 1.39"}

    async def placement(method: str, path: str, body: Any = None) -> Any:
        answer = await call(admin, method, f"/placement{path}", body, version)
        assert answer.status < 300, answer
        return answer.json() if answer.body else None

    inventories: dict[str, Any] = {}
    allocations = {}
    below: dict[str, str] = {}
    for server in servers:
        held = await placement("GET", f"/allocations/{server}")
        for provider, each in list(held["allocations"].items()):
            if "MEMORY_MB" not in each["resources"]:
                continue
            if provider not in below:
                made = {"name": f"memory of {provider}", "parent_provider_uuid": provider}
                below[provider] = (await placement("POST", "/resource_providers", made))["uuid"]
                stock = await placement("GET", f"/resource_providers/{provider}/inventories")
                memory = stock["inventories"]["MEMORY_MB"]
                inventories[provider] = stock
                inventories[below[provider]] = {"inventories": {"MEMORY_MB": memory}, "resource_provider_generation": 0}
            amount = each["resources"].pop("MEMORY_MB")
            held["allocations"][below[provider]] = {"resources": {"MEMORY_MB": amount}}
        allocations[server] = held
    return await call(
        admin, "POST", "/placement/reshaper", {"inventories": inventories, "allocations": allocations}, version
    )


async def test_statements_lock_rows_in_the_order_of_their_keys(transactions: list[Transaction]) -> None:
    wrong = {each for transaction in transactions for each in transaction.unordered}
    assert "\n".join(sorted(wrong)) == ""


async def test_transactions_lock_the_rows_of_a_table_in_the_order_of_their_keys(
    transactions: list[Transaction],
) -> None:
    wrong = set()
    for transaction in transactions:
        for table in ORDER:
            keys = [lock.key for lock in transaction.locked if lock.table == table]
            if keys != sorted(keys):
                wrong.add(f"{transaction.name}: {table}")
    # A new provider is the last row of its transaction, after its tree: who has inserted one waits for nobody any more.
    wrong.discard("create: resource_providers")
    assert "\n".join(sorted(wrong)) == ""


async def test_all_transactions_lock_tables_in_one_order(transactions: list[Transaction]) -> None:
    wrong = set()
    for transaction in transactions:
        tables = [lock.table for lock in transaction.locked if lock.instance is None]
        if len(set(tables)) > 1:
            wrong |= {f"{transaction.name}: {table} has no place" for table in set(tables) - set(ORDER)}
            placed = [table for table in tables if table in ORDER]
            wrong |= {
                f"{transaction.name}: {second} after {first}"
                for first, second in itertools.pairwise(placed)
                if ORDER.index(first) > ORDER.index(second)
            }
    assert "\n".join(sorted(wrong)) == ""


async def test_what_belongs_to_an_instance_is_changed_under_its_lock(transactions: list[Transaction]) -> None:
    """So these tables need no place in the order.

    An operation may end after its instance is deleted: then its own lock, which it takes first, is enough.
    """
    wrong = set()
    for transaction in transactions:
        held = {lock.key[0] for lock in transaction.inserted if lock.table == "instances"} | transaction.gone
        for lock in transaction.locked:
            if lock.table == "instances":
                held.add(lock.key[0])
            elif lock.instance is not None and lock.instance not in held:
                wrong.add(f"{transaction.name}: {lock.table}")
    assert "\n".join(sorted(wrong)) == ""


async def test_the_recorder_sees_what_it_should(transactions: list[Transaction]) -> None:
    assert {lock.table for transaction in transactions for lock in transaction.locked} >= set(ORDER)


async def test_the_embedded_network_service_locks_rows_and_tables_in_one_order(
    recorded: dict[str, list[Transaction]],
) -> None:
    """No document has the order of its tables; the order of its transactions must have no circle."""
    # The first start of the service alone knows the rows that it makes.
    transactions = [each for each in recorded["network"] if each.name != "Builder.first_networks"]
    assert {"ports", "networks"} <= {lock.table for transaction in transactions for lock in transaction.locked}
    # The groups of a port are changed under the lock of the port, so their order does not matter.
    of_port = "DELETE FROM port_security_groups WHERE port_security_groups.port_id = ?"
    wrong = {each for transaction in transactions for each in transaction.unordered if not each.endswith(of_port)}
    follows: dict[str, set[str]] = {}
    seen: dict[tuple[str, str], str] = {}
    for transaction in transactions:
        tables = [lock.table for lock in transaction.locked]
        ports = {lock.key[0] for lock in transaction.locked if lock.table == "ports"}
        assert {lock.key[0] for lock in transaction.locked if lock.table == "port_security_groups"} <= ports
        for table in set(tables):
            keys = [lock.key for lock in transaction.locked if lock.table == table]
            if keys != sorted(keys):
                wrong.add(f"{transaction.name}: {table}")
        for first, second in itertools.combinations(dict.fromkeys(tables), 2):
            follows.setdefault(second, set()).add(first)
            seen[first, second] = transaction.name
    assert "\n".join(sorted(wrong)) == ""
    try:
        TopologicalSorter(follows).prepare()
    except CycleError as error:
        circle = error.args[1]
        pytest.fail("; ".join(f"{a} before {b} in {seen.get((a, b))}" for a, b in itertools.pairwise(circle)))
