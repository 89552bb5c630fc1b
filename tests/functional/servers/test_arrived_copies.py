"""The guest of a server has arrived and its source is dead: nothing removes the last copy of its disks."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.clients.network.client import NetworkClient
from micronova.conductor import heartbeat_transaction
from micronova.db.tables import migrations, operations
from micronova.objects.errors import Conflict
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import network
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = [pytest.mark.thorough, only_in_one_process("kills hosts")]
CLOUD = CloudOptions(
    hosts=2,
    roles=("network",),
    settings={
        "default": {
            "report_interval": 0.1,
            "service_down_time": 1.0,
            "allow_resize_to_same_host": False,
            "reclaim_instance_interval": 3600,
        },
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def _destination(cloud: OneProcess, id: str) -> str:
    [found] = await cloud.read(sa.select(migrations.c.dest_compute).where(migrations.c.instance_uuid == id))
    return str(found.dest_compute)


async def _delete(user: Caller, id: str) -> None:
    await user.act(id, "forceDelete")
    await user.gone(id)


async def _leased(cloud: OneProcess, id: str, times: int) -> None:
    """Wait until a conductor has leased the operation of a server so many times more."""
    query = sa.select(operations.c.leases).where(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))
    [before] = await cloud.read(query)

    async def probe() -> bool | None:
        [now] = await cloud.read(query)
        return True if now.leases >= before.leases + times else None

    await cloud.until(probe, "a conductor to lease the operation")


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("action", {"os-resetState": {"state": "active"}}),
    ("action", {"evacuate": {}}),
    ("", {}),  # a delete that can be restored
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_no_request_removes_what_has_arrived(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, path: str, body: dict[str, Any]
) -> None:
    await killable_host.start()
    name = f"arrives-{next(iter(body), 'delete')}"
    id = (await user.boot(flavorRef="2", name=name))["id"]
    assert await user.host_of(id) == killable_host.name
    async with cloud.faults({"operation": "power_on", "kind": "hang", "name": name, "count": 1}):
        await user.act(id, "resize", {"flavorRef": "3"})
        await cloud.fault_struck()
        await killable_host.kill()
        await killable_host.wait_until_down()
        destination = await _destination(cloud, id)
        if path:
            message = await user.admin.refused(409, "POST", f"/servers/{id}/action", body)
        else:
            message = await user.refused(409, "DELETE", f"/servers/{id}")
        assert "only another one has its disks" in message
        assert killable_host.name not in message and destination not in message
        assert id in await cloud.guests(destination)
    await _delete(user, id)


async def test_a_guest_that_cannot_be_started(cloud: OneProcess, user: Caller, killable_host: KillableHost) -> None:
    """Its destination keeps it, tries again, and removes it when the source is back and can have it."""
    await killable_host.start()
    id = (await user.boot(flavorRef="2", name="fails"))["id"]
    assert await user.host_of(id) == killable_host.name
    rules = [{"operation": "power_on", "kind": "delay", "delay": 2.0, "name": "fails", "count": 1}]
    rules += [{"operation": "power_on", "kind": "fail", "name": "fails"}]
    async with cloud.faults(*rules):
        await user.act(id, "resize", {"flavorRef": "3"})
        await cloud.fault_struck()
        await killable_host.kill()
        await killable_host.wait_until_down()
        await _leased(cloud, id, 2)
        destination = await _destination(cloud, id)
        assert id in await cloud.guests(destination)
        await killable_host.start()
        await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name

    async def removed() -> bool | None:
        return None if id in await cloud.guests(destination) else True

    await cloud.until(removed, "the destination to remove the guest")
    await _delete(user, id)


async def test_a_destination_whose_agent_is_restarted(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    id = (await user.boot(flavorRef="2"))["id"]
    source = await user.host_of(id)
    await killable_host.start({"operation": "power_on", "kind": "hang", "count": 1})
    await user.admin.act(id, "migrate", {"host": killable_host.name})

    async def struck() -> bool | None:
        return True if any(rule["hits"] for rule in killable_host.driver.fault_rules()) else None

    await cloud.until(struck, "the guest to arrive")
    async with cloud.forced_down(source):
        driver = killable_host.driver
        await killable_host.stop()
        assert await driver.info(id) is not None
        await killable_host.start()
        await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) == killable_host.name
    await _delete(user, id)


async def test_ports_that_cannot_be_bound(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lease of the operation makes one attempt, with a pause that grows."""
    net = await network(user, cidr="10.7.0.0/24")
    await killable_host.start()
    id = (await user.boot(networks=[{"uuid": net["id"]}], flavorRef="2"))["id"]
    assert await user.host_of(id) == killable_host.name
    reached, dead, attempts = asyncio.Event(), asyncio.Event(), 0
    original = NetworkClient.rebind

    async def rebind(self: Any, **values: Any) -> Any:
        nonlocal attempts
        if values["host"] == killable_host.name:
            return await original(self, **values)
        attempts += 1
        reached.set()
        await dead.wait()
        raise Conflict("Binding failed for port.")

    monkeypatch.setattr(NetworkClient, "rebind", rebind)
    await user.act(id, "resize", {"flavorRef": "3"})
    await asyncio.wait_for(reached.wait(), 20)
    await killable_host.kill()
    await killable_host.wait_until_down()
    dead.set()
    [before] = await cloud.read(
        sa.select(operations.c.leases).where(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))
    )
    await _leased(cloud, id, 2)
    [after] = await cloud.read(
        sa.select(operations.c.leases).where(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))
    )
    assert attempts <= 2 + after.leases - before.leases
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name
    await _delete(user, id)
