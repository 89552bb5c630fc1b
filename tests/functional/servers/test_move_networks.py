"""Ports of servers that move: they are bound to the host where the guest is."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.clients.network.calls import Calls
from micronova.conductor.operations import engine
from micronova.db import operations as operation_rows
from micronova.db.tables import operations
from micronova.objects.errors import Unavailable
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import network, ports_of
from tests.functional.servers.gates import Gate

CLOUD = CloudOptions(
    hosts=3, roles=("network",), settings={"default": {"allow_resize_to_same_host": False, "report_interval": 0.1}}
)
pytestmark = only_in_one_process("has the embedded network service in the same process")


async def _booted(user: Caller, **fields: Any) -> tuple[str, str]:
    nets = [await network(user, cidr=cidr) for cidr in ("10.7.0.0/24", "10.8.0.0/24")]
    wanted = [{"uuid": net["id"]} for net in nets]
    id = (await user.boot(networks=wanted, flavorRef="2", **fields))["id"]
    return id, await user.host_of(id)


async def _bound_to(user: Caller, id: str) -> set[str]:
    return {port["binding:host_id"] for port in await ports_of(user, id)}


async def test_ports_follow_the_server(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user)
    before = await user.show(id)
    await user.act(id, "resize", {"flavorRef": "3"})
    after = await user.wait_for(id, "VERIFY_RESIZE")
    assert await _bound_to(user, id) == {await user.host_of(id)} != {source}
    assert after["addresses"] == before["addresses"]
    interfaces = (await user.get(f"/servers/{id}/os-interface"))["interfaceAttachments"]
    assert len(interfaces) == 2
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert await _bound_to(user, id) == {source}
    assert (await user.show(id))["addresses"] == before["addresses"]
    await cloud.assert_clean()


async def test_ports_return_when_a_move_fails(cloud: Cloud, user: Caller) -> None:
    id, source = await _booted(user, name="does-not-arrive")
    async with cloud.faults({"operation": "import_guest", "kind": "fail", "name": "does-not-arrive"}):
        await user.act(id, "resize", {"flavorRef": "3"})
        await cloud.settled()
    await user.wait_for(id, "ACTIVE")
    assert await _bound_to(user, id) == {source}
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["export_disks", "import_guest", "destroy"])
async def test_ports_return_when_the_state_is_reset(cloud: Cloud, user: Caller, call: str) -> None:
    id, source = await _booted(user, name=f"hangs-{call}")
    if call == "destroy":
        await user.act(id, "resize", {"flavorRef": "3"})
        await user.wait_for(id, "VERIFY_RESIZE")
    async with cloud.faults({"operation": call, "kind": "hang", "name": f"hangs-{call}", "count": 1}):
        if call == "destroy":
            await user.act(id, "revertResize")
        else:
            await user.act(id, "resize", {"flavorRef": "3"})
        await cloud.fault_struck()
        await user.admin.act(id, "os-resetState", {"state": "active"})
        await cloud.settled()
    assert await user.host_of(id) == source
    assert await _bound_to(user, id) == {source}
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def _binding(cloud: Cloud, id: str, *, tried: bool = False) -> None:
    """Wait until the operation has ended that binds the ports of a server, or with `tried` until it was tried twice."""

    async def probe() -> bool | None:
        of_server = sa.and_(operations.c.instance_uuid == id, operations.c.kind == "bind_ports")
        [row] = await cloud.read(sa.select(operations).where(of_server))
        return True if row.finished_at is not None or (tried and row.leases > 1) else None

    await cloud.until(probe, "the ports to be bound")


async def test_a_slow_move_that_is_overtaken_takes_no_port_with_it(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network service that hangs is a reason to reset the state. When it answers, the move is not continued."""
    id, source = await _booted(user)
    gate = Gate()
    monkeypatch.setattr(Calls, "update_port", gate.before(Calls.update_port))
    await user.act(id, "resize", {"flavorRef": "3"})
    await asyncio.wait_for(gate.reached.wait(), 10)
    await user.admin.act(id, "os-resetState", {"state": "active"})
    await _binding(cloud, id)
    gate.open.set()
    await cloud.settled()
    assert await _bound_to(user, id) == {await user.host_of(id)} == {source}
    await cloud.assert_clean()


@pytest.mark.parametrize("when", ["while the server moves", "when it has moved"])
async def test_ports_that_are_bound_late_do_not_leave_a_later_move(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The network service does not answer after a reset of the state. When it does, the server moves again."""
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    name, moves = f"again-{when[:4]}", when == "while the server moves"
    id, source = await _booted(user, name=name)
    gate = Gate()
    async with cloud.faults({"operation": "import_guest", "kind": "hang", "name": name, "count": 2 if moves else 1}):
        await user.act(id, "resize", {"flavorRef": "3"})
        await user.wait_for(id, "RESIZE", task="resize_finish")
        monkeypatch.setattr(Calls, "update_port", gate.before(Calls.update_port))
        await user.admin.act(id, "os-resetState", {"state": "active"})
        await asyncio.wait_for(gate.reached.wait(), 10)
        await user.wait_for(id, "ACTIVE", "SHUTOFF")
        await user.act(id, "resize", {"flavorRef": "3"})
        if moves:
            await user.wait_for(id, "RESIZE", task="resize_finish")
        else:
            await user.wait_for(id, "VERIFY_RESIZE")
        moved_to = await _bound_to(user, id)
        assert source not in moved_to
        gate.open.set()
        await _binding(cloud, id, tried=moves)
        assert await _bound_to(user, id) == moved_to
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


async def test_a_revert_waits_for_the_network_service(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for longer than its deadline: with its ports elsewhere the server would have no network."""
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    id, source = await _booted(user)
    await user.act(id, "resize", {"flavorRef": "3"})
    await user.wait_for(id, "VERIFY_RESIZE")
    of_server = sa.and_(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))

    async def no_answer(*_: Any, **__: Any) -> None:
        raise Unavailable("The network service does not answer.")

    async def tried(times: int) -> None:
        async def probe() -> bool | None:
            [row] = await cloud.read(sa.select(operations).where(of_server))
            return True if row.step == "bind" and row.leases >= times else None

        await cloud.until(probe, "the ports to be bound")

    with monkeypatch.context() as away:
        away.setattr(Calls, "update_port", no_answer)
        await user.act(id, "revertResize")
        await tried(2)
        late = sa.update(operations).where(of_server, operations.c.deadline < operation_rows.NO_DEADLINE)
        assert cloud.process.database is not None
        await cloud.process.database.write(lambda conn: conn.execute(late.values(deadline=operations.c.created_at)))
        await tried(4)
    await user.wait_for(id, "ACTIVE")
    assert await _bound_to(user, id) == {source}
    await cloud.assert_clean()
