"""Servers that are shelved and have not left their hosts yet; the time after which they do."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.clients.network.calls import Calls
from micronova.conductor.operations import engine
from micronova.db.tables import departures, instances, operations
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import network, ok, ports_of
from tests.functional.servers.gates import Gate
from tests.functional.servers.killable_host import KillableHost, killable_host
from tests.functional.servers.test_server_images import image_gone, last_action
from tests.functional.servers.test_shelve import boot, claims_of, images_of, row_of

__all__ = ["killable_host"]

pytestmark = only_in_one_process(
    "has settings of its own, kills hosts, and watches the notifier of the cloud's process"
)
CLOUD = CloudOptions(
    hosts=2,
    roles=("network", "image"),
    settings={
        "default": {
            "report_interval": 0.1, "service_down_time": 2.0,
            "shelved_offload_time": 3600, "shelved_poll_interval": 0.2,
        },
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)  # fmt: skip


@pytest_asyncio.fixture(loop_scope="module")
async def shelved(user: Caller) -> AsyncIterator[tuple[str, str]]:
    """A server with a port that is shelved, and its image."""
    net = await network(user)
    id = await boot(user, name=user.project, networks=[{"uuid": net["id"]}])
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED")
    [made] = await images_of(user, id)
    yield id, made["id"]


async def test_a_server_that_has_not_left_is_started(
    cloud: OneProcess, user: Caller, shelved: tuple[str, str], notifications: Any
) -> None:
    id, made = shelved
    host = await user.host_of(id)
    assert host in cloud.hosts and await claims_of(cloud, id) == {(await row_of(cloud, id)).node_uuid}
    assert (await user.show(id))["OS-EXT-STS:power_state"] == 4
    assert await last_action(user, id) == ("shelve", None, [("compute_shelve_instance", "Success")])
    await cloud.assert_clean()
    notifications.clear()
    for wanted in ({"availability_zone": "nova"}, {"availability_zone": None}, {"host": host}):
        body = {"unshelve": wanted}
        assert (
            'with status "shelved" is not supported. The server status must be SHELVED_OFFLOADED.'
            in await user.admin.refused(409, "POST", f"/servers/{id}/action", body)
        )
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == host
    assert [port["binding:host_id"] for port in await ports_of(user, id)] == [host]
    await image_gone(user, made)
    assert await last_action(user, id) == ("unshelve", None, [("compute_start_instance", "Success")])
    assert [event for event, _, _ in notifications] == ["power_on.start", "power_on.end"]
    await cloud.assert_clean()


async def test_an_admin_offloads_it(
    cloud: OneProcess, user: Caller, notifications: Any, shelved: tuple[str, str]
) -> None:
    id, made = shelved
    await user.refused(403, "POST", f"/servers/{id}/action", {"shelveOffload": None})
    assert [event for event, _, _ in notifications][-2:] == ["shelve.start", "shelve.end"]
    notifications.clear()
    await user.admin.act(id, "shelveOffload")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    assert await claims_of(cloud, id) == set()
    assert [port["binding:host_id"] for port in await ports_of(user, id)] == [""]
    expected = ("shelveOffload", None, [("compute_shelve_offload_instance", "Success")])
    assert await last_action(user, id) == expected
    assert [event for event, _, _ in notifications] == ["shelve_offload.start", "shelve_offload.end"]
    await cloud.assert_clean()
    notifications.clear()
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    assert [event for event, _, _ in notifications] == ["unshelve.start", "unshelve.end"]
    await image_gone(user, made)


async def test_it_leaves_its_host_when_its_time_is_over(cloud: Cloud, user: Caller, shelved: tuple[str, str]) -> None:
    id, _ = shelved
    await user.act(id, "lock")
    known = {**(await row_of(cloud, id)).system_metadata, "shelved_at": "2001-01-01T00:00:00.000000"}
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(sa.update(instances).where(instances.c.uuid == id).values(system_metadata=known))
    )
    await user.wait_for(id, "SHELVED_OFFLOADED")
    [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (last["action"], last["user_id"], last["message"]) == ("shelveOffload", None, None)
    await user.act(id, "unlock")
    await cloud.assert_clean()


async def test_it_stays_if_its_image_is_gone(cloud: Cloud, user: Caller, shelved: tuple[str, str]) -> None:
    id, made = shelved
    host = await user.host_of(id)
    await ok(user, "DELETE", f"/image/v2/images/{made}")
    await user.admin.act(id, "shelveOffload")
    await user.wait_for(id, "SHELVED")
    await cloud.settled()
    assert (await last_action(user, id))[1] == "Error"
    assert [port["binding:host_id"] for port in await ports_of(user, id)] == [host]
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_ports_that_are_bound_late_do_not_stay_on_a_host_that_the_server_leaves(
    cloud: OneProcess, user: Caller, shelved: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offload fails while the network service does not answer. When it does, another one has unbound the ports."""
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    id, made = shelved
    gate = Gate()
    monkeypatch.setattr(Calls, "update_port", gate.before(Calls.update_port))
    await ok(user, "POST", f"/image/v2/images/{made}/actions/deactivate")
    await user.admin.act(id, "shelveOffload")
    await user.wait_for(id, "SHELVED")
    await asyncio.wait_for(gate.reached.wait(), 60)
    await ok(user, "POST", f"/image/v2/images/{made}/actions/reactivate")
    bound = sa.select(operations).where(operations.c.instance_uuid == id, operations.c.kind == "bind_ports")

    async def tried() -> bool | None:
        return any(row.finished_at is not None or row.leases > 1 for row in await cloud.read(bound)) or None

    async with cloud.faults({"operation": "destroy", "kind": "fail", "name": user.project}):
        await user.admin.act(id, "shelveOffload")
        await cloud.fault_struck()
        gate.open.set()
        await cloud.until(tried, "the ports to be bound")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    await cloud.assert_clean()
    assert [port["binding:host_id"] for port in await ports_of(user, id)] == [""]


async def test_a_host_that_is_down_is_not_waited_for(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, notifications: Any
) -> None:
    await killable_host.start()
    id = await boot(user)
    assert await user.host_of(id) == killable_host.name
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED")
    await killable_host.kill()
    await killable_host.wait_until_down()
    notifications.clear()
    await user.admin.act(id, "shelveOffload")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    assert [row.host for row in await cloud.read(sa.select(departures))] == [killable_host.name]
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    assert [event for event, _, _ in notifications][:2] == ["shelve_offload.start", "shelve_offload.end"]
    assert await user.host_of(id) in cloud.hosts
    await killable_host.start()
    await killable_host.guest_removed(id)
    await user.wait_for(id, "ACTIVE")


async def test_a_reset_of_the_state_leaves_the_image_to_the_next_action(
    cloud: Cloud, user: Caller, shelved: tuple[str, str]
) -> None:
    id, made = shelved
    await user.admin.act(id, "os-resetState", {"state": "active"})
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED")
    await image_gone(user, made)
    [second] = await images_of(user, id)
    await user.admin.act(id, "os-resetState", {"state": "error"})
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await image_gone(user, second["id"])
    await cloud.assert_clean()


@pytest.mark.parametrize("step", ["power_off", "upload"])
async def test_a_host_that_dies_shelves_the_server_when_it_is_back(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, step: str
) -> None:
    await killable_host.start({"operation": step, "kind": "hang"})
    id = await boot(user)
    assert await user.host_of(id) == killable_host.name
    await user.act(id, "shelve")
    await user.wait_for(id, "ACTIVE", task="shelving" if step == "power_off" else "shelving_image_uploading")
    await killable_host.kill()
    await killable_host.wait_until_down()
    await killable_host.start()
    await user.wait_for(id, "SHELVED")
    assert len(await images_of(user, id)) == 1
    await cloud.assert_clean()


@pytest.mark.parametrize("end", ["failure", "reset"])
async def test_a_guest_that_was_switched_off_is_known_to_be_off(cloud: OneProcess, user: Caller, end: str) -> None:
    """A host without room for a copy gets its order again later; its heartbeats tell meanwhile of the guest."""
    id = await boot(user, name=user.project)
    lack: dict[str, Any] = {"operation": "snapshot", "kind": "unavailable", "name": user.project}
    rules = [{**lack, "count": 1}, {**lack, "kind": "fail"}] if end == "failure" else [lack]
    async with cloud.faults(*rules):
        await user.act(id, "shelve")
        if end == "failure":
            await cloud.settled()
        else:
            await _leased_again(cloud, id)
            await user.admin.act(id, "os-resetState", {"state": "active"})
        assert (await user.wait_for(id, "SHUTOFF"))["OS-EXT-STS:power_state"] == 4
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def _leased_again(cloud: Cloud, id: str) -> None:
    """Wait until a shelve has begun again after the pause that follows a failure."""
    query = sa.select(operations.c.leases).where(operations.c.instance_uuid == id, operations.c.kind == "shelve")

    async def again() -> bool | None:
        return any(row.leases > 1 for row in await cloud.read(query)) or None

    await cloud.until(again, "another attempt")


async def test_an_unshelve_does_not_wait_for_a_host_that_dies(
    cloud: OneProcess, user: Caller, shelved: tuple[str, str], killable_host: KillableHost
) -> None:
    id, made = shelved
    await user.admin.act(id, "shelveOffload")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    await killable_host.start({"operation": "spawn", "kind": "hang"})
    await user.act(id, "unshelve")
    await user.wait_for(id, "SHELVED_OFFLOADED", task="spawning")
    assert await user.host_of(id) == killable_host.name
    await killable_host.kill()
    await user.wait_for(id, "ACTIVE")
    host = await user.host_of(id)
    assert host in cloud.hosts
    assert [port["binding:host_id"] for port in await ports_of(user, id)] == [host]
    await killable_host.start()
    await killable_host.guest_removed(id)
    await image_gone(user, made)
    await user.wait_for(id, "ACTIVE")
