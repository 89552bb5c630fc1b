"""`micronova audit --repair`: each contradiction that is planted is repaired, but none that an operation works on."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy as sa
from click.testing import CliRunner

from micronova.cli import audit as command
from micronova.cli.audit import run_audit, run_repair, run_report
from micronova.cli.main import main
from micronova.clients.network.calls import MARK
from micronova.db.engine import Database
from micronova.db.tables import (
    allocations,
    block_devices,
    compute_nodes,
    deleted_instances,
    instances,
    inventories,
    migrations,
    quota_usages,
    request_specs,
    server_group_hosts,
    topology_claims,
)
from micronova.objects.errors import Conflict
from micronova.objects.instance import fault_of
from micronova.objects.orders import Guest
from tests.functional.cloud import Caller, CloudOptions, OneProcess
from tests.functional.full_cloud import FullCloud, full_cloud
from tests.functional.servers.killable_host import KillableHost

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
FAST = {"default": {"report_interval": 0.1, "service_down_time": 5.0}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OneProcess]:
    found = OneProcess(tmp_path_factory.mktemp("cloud"), CloudOptions(hosts=2, settings=FAST))
    await found.start()
    yield found
    await found.assert_clean()
    await found.stop()


@pytest.fixture
def user(cloud: OneProcess) -> Caller:
    return cloud.caller()


def _database(cloud: OneProcess) -> Database:
    assert cloud.process.database is not None
    return cloud.process.database


async def _write(cloud: OneProcess, *statements: sa.Executable) -> None:
    def write(conn: sa.Connection) -> None:
        for statement in statements:
            conn.execute(statement)

    await _database(cloud).write(write)


async def _audit(
    cloud: OneProcess, monkeypatch: pytest.MonkeyPatch, *options: str, typed: str = "", code: int = 0
) -> str:
    """Run the command beside the cloud, which it asks over the control socket."""
    loop = asyncio.get_running_loop()

    def ask(control: Path, path: str, *, method: str = "GET", body: Any = None) -> Any:
        work = run_report(cloud.process) if path == "/audit" else run_repair(cloud.process, body)
        return json.loads(json.dumps(asyncio.run_coroutine_threadsafe(work, loop).result()))

    monkeypatch.setattr(command, "ask", ask)
    done = await asyncio.to_thread(CliRunner().invoke, main, ["audit", *options], typed)
    assert done.exit_code == code, done.output
    return done.output


async def test_what_is_planted_is_repaired(cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [(await user.boot())["id"] for _ in range(8)]
    stuck, building, faultless, nowhere, misplaced, moving, lost, powered = ids
    host = await user.host_of(lost)
    await cloud.settled()
    [node] = {row.node_uuid for row in await cloud.read(sa.select(instances.c.node_uuid).where(_is(moving)))}
    group, now = str(uuid.uuid4()), 1
    migration: dict[str, Any] = {
        "uuid": str(uuid.uuid4()), "instance_uuid": moving, "status": "migrating", "migration_type": "migration",
        "source_compute": "h", "source_node": "h", "source_node_uuid": node, "old_flavor": {"vcpus": 1, "ram": 1},
        "new_flavor": {"vcpus": 1, "ram": 1}, "created_at": now, "user_id": "u", "project_id": "p",
        "old_vm_state": "active", "updated_at": 1, "request_id": "r",
    }  # fmt: skip
    await _write(
        cloud,
        instances.update().where(_is(stuck)).values(task_state="powering-off", updated_at=now),
        instances.update().where(_is(building)).values(vm_state="building", updated_at=now),
        instances.update().where(_is(faultless)).values(vm_state="error", fault=None, updated_at=now),
        instances.update().where(_is(nowhere)).values(host=None, node=None, node_uuid=None, updated_at=now),
        allocations.delete().where(allocations.c.consumer_uuid == misplaced),
        instances.update().where(_is(powered)).values(vm_state="stopped", power_state=4, updated_at=now),
        migrations.insert().values({name: each for name, each in migration.items() if name in migrations.c}),
        inventories.update().values(used=inventories.c.used + 7),
        quota_usages.update().values(in_use=quota_usages.c.in_use + 3),
        allocations.insert().values(consumer_uuid="gone", node_uuid=node, resource_class="VCPU", used=2),
        server_group_hosts.insert().values(group_uuid=group, host=host, members=3),
    )
    [manager] = [role for role in cloud.process.started if hasattr(role, "_agents")]
    await manager._agents[host].host.driver.destroy(lost)
    kinds = {each["kind"] for each in await run_audit(cloud.process)}
    assert kinds == {"stuck", "fault", "host", "allocation", "quota", "migration", "guest"}

    untouched = await _audit(cloud, monkeypatch, "--repair", typed="n\n" * 100, code=1)
    assert "[y/N]" in untouched
    assert {each["kind"] for each in await run_audit(cloud.process)} == kinds

    first = json.loads(await _audit(cloud, monkeypatch, "--repair", "--yes", "--json", code=1))
    assert {each["subject"] for each in first["findings"]} == {nowhere}  # its guest may be the only copy
    states = {each: (await user.show(each))["status"] for each in ids}
    assert states == {
        stuck: "ACTIVE", building: "ERROR", faultless: "ERROR", nowhere: "ERROR", misplaced: "ACTIVE",
        moving: "ACTIVE", lost: "ERROR", powered: "ACTIVE",
    }  # fmt: skip
    assert "no guest" in (await user.show(lost))["fault"]["message"]
    [ended] = await cloud.read(sa.select(migrations.c.status).where(migrations.c.uuid == migration["uuid"]))
    assert ended.status == "error"
    # The guest of the server without a host is removed only if somebody names it.
    answer = await _audit(cloud, monkeypatch, "--repair", "--yes", "--remove-guest", nowhere)
    assert "removes its guest" in answer and "nothing is wrong" in answer
    await _gone(cloud, nowhere)
    for id in ids:
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


def _is(server: str) -> sa.ColumnElement[bool]:
    return instances.c.uuid == server


async def _gone(cloud: OneProcess, server: str) -> None:
    """Wait until no host has a guest of a server."""

    async def probe() -> bool | None:
        for host in cloud.hosts:
            if server in await cloud.guests(host):
                return None
        return True

    await cloud.until(probe, "the hosts to remove the guest")


async def test_what_an_operation_works_on_is_left_alone(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot(name="busy"))["id"]
    await _write(cloud, instances.update().where(_is(id)).values(task_state="powering-off", updated_at=1))
    [finding] = await run_audit(cloud.process)
    await _write(cloud, instances.update().where(_is(id)).values(task_state=None))
    async with cloud.faults({"operation": "power_off", "kind": "delay", "delay": 3.0, "name": "busy"}):
        await user.act(id, "os-stop")
        with pytest.raises(Exception, match="works on server"):
            await run_repair(cloud.process, finding["repairs"][0])
        await user.wait_for(id, "SHUTOFF")
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_a_server_that_a_restored_database_does_not_know(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing removes its guest unasked; the audit names its host and its project."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    await cloud.settled()
    await _write(
        cloud,
        instances.delete().where(_is(id)),
        request_specs.delete().where(request_specs.c.instance_uuid == id),
        block_devices.delete().where(block_devices.c.instance_uuid == id),
    )
    text = await _audit(cloud, monkeypatch, code=1)
    assert f"{host} has a guest of a server that is not there. Its project is {user.project}; " in text
    json_text = await _audit(cloud, monkeypatch, "--repair", "--yes", "--json", code=1)
    left = json.loads(json_text)["findings"]
    assert [(each["kind"], each["subject"]) for each in left] == [("guest", id)]
    assert id in await cloud.guests(host)
    await _audit(cloud, monkeypatch, "--repair", typed="y\n")
    await _gone(cloud, id)
    await cloud.assert_clean()


async def test_a_guest_of_a_deleted_server_is_removed(cloud: OneProcess, user: Caller) -> None:
    """The database says that its server is deleted, and the guest is not newer."""
    id = (await user.boot())["id"]
    [row] = await _database(cloud).read(lambda conn: conn.execute(instances.select().where(_is(id))).mappings().all())
    columns = {name: each for name, each in row.items() if name in deleted_instances.c}
    await _write(
        cloud,
        instances.delete().where(_is(id)),
        deleted_instances.insert().values({**columns, "deleted_at": 1}),
        allocations.delete().where(allocations.c.consumer_uuid == id),
        topology_claims.delete().where(topology_claims.c.consumer_uuid == id),
    )
    found = [each for each in await run_audit(cloud.process) if each["kind"] == "guest"]
    assert [each["subject"] for each in found] == [id] and "destroys" not in found[0]["repairs"][0]
    for each in await run_audit(cloud.process):
        await run_repair(cloud.process, each["repairs"][0])
    await _gone(cloud, id)
    await cloud.assert_clean()


async def test_a_server_that_moved_after_the_backup_is_adopted(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = (await user.boot())["id"]
    await cloud.settled()
    before = await _database(cloud).read(lambda conn: conn.execute(instances.select().where(_is(id))).mappings().one())
    claims = await cloud.read(allocations.select().where(allocations.c.consumer_uuid == id))
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    await cloud.settled()
    there = await user.host_of(id)
    assert there != before["host"]
    await _write(
        cloud,
        instances.update().where(_is(id)).values(**{**before, "updated_at": 1}),
        allocations.delete().where(allocations.c.consumer_uuid == id),
        *(allocations.insert().values(**row._mapping) for row in claims),
        migrations.delete().where(migrations.c.instance_uuid == id),
    )
    text = await _audit(cloud, monkeypatch, code=1)
    assert f"Adopt the guest: record that the server is on {there}." in text
    await _audit(cloud, monkeypatch, "--repair", "--yes", code=0)
    assert await user.host_of(id) == there
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


async def test_the_guest_of_a_server_without_a_host_is_adopted(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the host says that the guest is the server's: an operator decides."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    await cloud.settled()
    nowhere = {"host": None, "node": None, "node_uuid": None, "vm_state": "error", "updated_at": 1}
    await _write(
        cloud,
        instances.update().where(_is(id)).values(**nowhere, fault=fault_of("lost", 1)),
        allocations.delete().where(allocations.c.consumer_uuid == id),
    )
    text = await _audit(cloud, monkeypatch, "--repair", "--yes", code=1)
    assert f"that is not there. Its project is {user.project}; the server is on no host." in text
    assert f"Adopt the guest: record that the server is on {host}." in text and "None" not in text
    assert (await user.show(id))["status"] == "ERROR"
    await _audit(cloud, monkeypatch, "--repair", typed="y\n" * 10)
    assert await user.host_of(id) == host and (await user.show(id))["status"] == "ACTIVE"
    await cloud.assert_clean()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


async def _row_of(cloud: OneProcess, id: str) -> dict[str, Any]:
    """Return the row of a server, as a backup has it, when nothing works on it."""
    await cloud.settled()
    query = instances.select().where(_is(id))
    return dict(await _database(cloud).read(lambda conn: conn.execute(query).mappings().one()))


async def _restore(cloud: OneProcess, before: dict[str, Any]) -> None:
    """Let the database forget what was done since: the hosts are not restored."""
    await cloud.settled()
    await _write(cloud, instances.update().where(_is(before["uuid"])).values(**{**before, "updated_at": 1}))


async def _stop_and_start(user: Caller, id: str) -> None:
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")


async def _rebuild(user: Caller, id: str) -> None:
    await user.act(id, "rebuild", {"imageRef": (await user.show(id))["image"]["id"]})
    await user.wait_for(id, "ACTIVE", task=None)


async def test_a_server_that_was_acted_on_after_the_backup_is_acted_on_again(cloud: OneProcess, user: Caller) -> None:
    """Its host has seen newer epochs than those of the orders that a restored database makes."""
    id = (await user.boot())["id"]
    before = await _row_of(cloud, id)
    for _ in range(2):
        await _stop_and_start(user, id)
    await _restore(cloud, before)
    assert await run_audit(cloud.process) == []
    await _stop_and_start(user, id)
    assert (await _row_of(cloud, id))["epoch"] == before["epoch"] + 2
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await _gone(cloud, id)


async def test_a_guest_that_is_newer_than_its_server_is_named_and_kept(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = (await user.boot())["id"]
    before = await _row_of(cloud, id)
    await _rebuild(user, id)
    guest = (await cloud.guests(host := await user.host_of(id)))[id]
    await _restore(cloud, before)
    assert guest.epoch > before["epoch"]
    text = await _audit(cloud, monkeypatch, code=1)
    assert f"{host} has a guest that was made after what the database says of its server." in text
    await _audit(cloud, monkeypatch, "--repair", "--yes")
    assert (await _row_of(cloud, id))["epoch"] > guest.epoch
    assert (await cloud.guests(host))[id] == guest
    await _rebuild(user, id)
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await _gone(cloud, id)


async def test_what_a_newer_guest_does_is_recorded_when_it_is_repaired(cloud: OneProcess, user: Caller) -> None:
    """Its host repeats what it reports of the guest until the server's record is as new."""
    id = (await user.boot())["id"]
    before = await _row_of(cloud, id)
    await _rebuild(user, id)
    await _restore(cloud, before)
    [manager] = [role for role in cloud.process.started if hasattr(role, "_agents")]
    manager._agents[await user.host_of(id)].host.driver.guest_becomes(id, "stopped")
    [finding] = [each for each in await run_audit(cloud.process) if "was made after" in each["message"]]
    assert (await user.show(id))["status"] == "ACTIVE"
    await run_repair(cloud.process, finding["repairs"][0])
    await user.wait_for(id, "SHUTOFF")
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_a_newer_guest_that_nobody_has_repaired_is_deleted_with_its_server(
    cloud: OneProcess, user: Caller
) -> None:
    id = (await user.boot())["id"]
    before = await _row_of(cloud, id)
    await _rebuild(user, id)
    await _restore(cloud, before)
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await _gone(cloud, id)
    await cloud.assert_clean()


async def test_a_newer_guest_is_removed_by_a_host_that_was_down_when_its_server_was_deleted(
    cloud: OneProcess, user: Caller, tmp_path: Path
) -> None:
    host = KillableHost(cloud, "behind", tmp_path, memory_mb=1 << 24, vcpus=4096, local_gb=1 << 20)
    await host.start()
    id = (await user.boot())["id"]
    assert await user.host_of(id) == "behind"
    before = await _row_of(cloud, id)
    await _rebuild(user, id)
    await _restore(cloud, before)
    await host.kill()
    await host.wait_until_down()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.start()
    await host.guest_removed(id)
    await host.stop()
    await cloud.assert_clean()


async def test_an_epoch_that_no_server_can_have_reached_is_not_taken_over(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stolen host can report any: it must not end all work on the server."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    before = await _row_of(cloud, id)
    [manager] = [role for role in cloud.process.started if hasattr(role, "_agents")]
    driver = manager._agents[host].host.driver
    guest = (await cloud.guests(host))[id]
    await _write(cloud, instances.update().where(_is(id)).values(updated_at=1))

    async def lies() -> Any:
        return [msgspec.structs.replace(guest, epoch=2**31 - 1)]

    with monkeypatch.context() as patch:
        patch.setattr(driver, "list_guests", lies)
        [finding] = await run_audit(cloud.process)
        with pytest.raises(Conflict, match="cannot be"):
            await run_repair(cloud.process, finding["repairs"][0])
    assert (await _row_of(cloud, id))["epoch"] == before["epoch"]
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_a_soft_deleted_server_whose_guest_runs_is_named(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner restored it after the backup: now a job would delete it some day."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    await _restore(cloud, {**await _row_of(cloud, id), "vm_state": "soft-delete", "deleted_at": 1})
    await _write(cloud, quota_usages.update().where(quota_usages.c.project_id == user.project).values(in_use=0))
    text = await _audit(cloud, monkeypatch, code=1)
    assert f"The guest on {host} is running, and the server is soft-deleted." in text
    assert f"`openstack server restore {id}`" in text
    await user.admin.act(id, "restore")
    await user.wait_for(id, "ACTIVE")
    await cloud.settled()
    await _write(cloud, instances.update().where(_is(id)).values(updated_at=1))
    await _audit(cloud, monkeypatch)
    await user.delete(f"/servers/{id}")
    await user.gone(id)


@pytest.mark.parametrize("state", ["soft-delete", "rescued"])
async def test_an_adopted_server_stays_soft_deleted_or_rescued(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The quota is not charged for a soft-deleted one, and a rescued one has yet to boot from its own disk."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    nowhere = {"host": None, "node": None, "node_uuid": None, "vm_state": state}
    before = {**await _row_of(cloud, id), **nowhere, "deleted_at": 1 if state == "soft-delete" else None}
    await _restore(cloud, before)
    await _write(cloud, allocations.delete().where(allocations.c.consumer_uuid == id))
    found = [each for each in await run_audit(cloud.process) if each["kind"] == "guest"]
    await run_repair(cloud.process, found[0]["repairs"][0])
    row = await _row_of(cloud, id)
    assert (row["host"], row["vm_state"], row["deleted_at"]) == (host, state, before["deleted_at"])
    await _write(cloud, instances.update().where(_is(id)).values(vm_state="active", deleted_at=None))
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await _audit(cloud, monkeypatch, "--repair", "--yes")


async def test_the_quota_of_key_pairs_is_counted_again(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to a user, and to no project."""
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl a"
    await user.post("/os-keypairs", {"keypair": {"name": "k", "public_key": key}}, status=201)
    await _write(cloud, quota_usages.update().where(quota_usages.c.project_id == "").values(in_use=99))
    text = await _audit(cloud, monkeypatch, "--repair", "--yes")
    assert "key_pairs: 99 → 1" in text and "nothing is wrong" in text
    await user.delete("/os-keypairs/k")
    await cloud.assert_clean()


@pytest.mark.parametrize("project", ["{", "{0}", "{x}", "{0.__class__}", "%s%(x)d"])
async def test_what_a_host_says_of_a_project_is_only_shown(
    cloud: OneProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, project: str
) -> None:
    """A stolen host can report any text as the project of a guest: the audit shows it, and is not stopped by it."""
    host, unknown = KillableHost(cloud, "texts", tmp_path), str(uuid.uuid4())
    await host.start()

    async def lies() -> Any:
        [node] = await cloud.read(sa.select(compute_nodes).where(compute_nodes.c.host == "texts"))
        return [Guest(uuid=unknown, node=node.hypervisor_hostname, epoch=1, power_state=1, project_id=project)]

    with monkeypatch.context() as patch:
        patch.setattr(host.driver, "list_guests", lies)
        text = await _audit(cloud, monkeypatch, code=1)
    assert f"Its project is {project}; the database does not know the server." in text
    await host.stop()
    await cloud.assert_clean()


async def test_a_host_that_claims_the_guest_of_another_host_gets_no_server_unasked(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stolen host can report any guest at any epoch: what it says must not remove the guest that the server has."""
    id = (await user.boot())["id"]
    own = await user.host_of(id)
    await cloud.settled()
    guest = (await cloud.guests(own))[id]
    host = KillableHost(cloud, "stolen", tmp_path)
    await host.start()

    async def lies() -> Any:
        [node] = await cloud.read(sa.select(compute_nodes).where(compute_nodes.c.host == "stolen"))
        return [msgspec.structs.replace(guest, node=node.hypervisor_hostname, epoch=guest.epoch + 100)]

    with monkeypatch.context() as patch:
        patch.setattr(host.driver, "list_guests", lies)
        text = await _audit(cloud, monkeypatch, "--repair", "--yes", code=1)
        assert f"Adopt the guest: record that the server is on stolen. {own} has an older guest of the server" in text
        assert await user.host_of(id) == own
        # To remove what it claims to have adopts nothing either.
        await _audit(cloud, monkeypatch, "--repair", "--yes", "--remove-guest", id)
        assert await user.host_of(id) == own and id in await cloud.guests(own)
        # What was found while the other host had no guest is refused when it has one.
        about: dict[str, Any] = {"server": id, "host": "stolen", "epoch": guest.epoch + 100}
        with pytest.raises(Conflict, match="was not there before"):
            await run_repair(cloud.process, {"name": "adopt_guest", "text": "", "about": about})
    await host.stop()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


async def test_a_host_that_does_not_answer_is_named(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The audit goes on without it, and its exit code says that it is incomplete."""
    host = KillableHost(cloud, "silent", tmp_path)
    await host.start()

    async def fails() -> Any:
        raise RuntimeError("the hypervisor is away")

    with monkeypatch.context() as patch:
        patch.setattr(host.driver, "list_guests", fails)
        text = await _audit(cloud, monkeypatch, code=3)
    assert "unasked      silent  The host does not answer" in text
    assert "nothing is wrong in what could be compared" in text
    await host.stop()


async def test_without_the_broker_the_database_is_compared(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _write(cloud, quota_usages.update().values(in_use=quota_usages.c.in_use + 3))
    id = (await user.boot())["id"]
    await _write(cloud, quota_usages.update().values(in_use=quota_usages.c.in_use + 3))
    bus = cloud.process.bus
    with monkeypatch.context() as patch:
        patch.setattr(cloud.process, "bus", None)
        kinds = {each["kind"] for each in await run_audit(cloud.process)}
        assert kinds == {"quota", "unasked"}
        await _audit(cloud, monkeypatch, "--repair", "--yes", code=3)
    assert cloud.process.bus is bus
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


async def test_a_port_of_nobody_is_removed(full_cloud: FullCloud) -> None:
    admin, gone = full_cloud.admin, str(uuid.uuid4())
    network = (await admin.do("POST", "/network/v2.0/networks", {"network": {"name": "n"}}))["network"]["id"]
    client = full_cloud.process.clients.network_client()
    assert client is not None
    mark = {"binding:profile": {MARK: {"server": gone, "created": True}}, "device_id": gone}
    [port] = await client.calls.create_ports([{"network_id": network, "device_owner": "compute:nova", **mark}])
    [finding] = await run_audit(full_cloud.process)
    assert (finding["kind"], finding["subject"]) == ("port", port["id"])
    # The database may be older than the server: then the guest uses the port. So `--yes` leaves it.
    assert finding["repairs"][0]["destroys"] and "may be newer" in finding["message"]
    assert gone in await run_repair(full_cloud.process, finding["repairs"][0])
    await full_cloud.assert_clean()
    assert (await admin.do("GET", f"/network/v2.0/ports?network_id={network}"))["ports"] == []
    await admin.do("DELETE", f"/network/v2.0/networks/{network}")
