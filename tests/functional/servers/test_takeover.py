"""Two conductors and one operation: the one that has lost the lease changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.cli.roles.conductor import make as make_conductor
from micronova.clients.network.calls import Calls
from micronova.conductor.manager import ConductorManager
from micronova.conductor.operations.engine import Crash
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import operations as operation_rows
from micronova.db.operations import new_row
from micronova.db.tables import operations
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost
from micronova.scheduler.manager import SchedulerManager
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import make, network, ports_left, ports_of
from tests.functional.servers.gates import Gate


class Crashes:
    """Crashes an operation after a step, a number of times."""

    step: tuple[str, str] | None = None
    times = 0

    def __call__(self, kind: str, step: str) -> None:
        if self.times and self.step == (kind, step):
            self.times -= 1
            raise Crash(f"{kind} {step}")


crashes = Crashes()
pytestmark = [pytest.mark.thorough, only_in_one_process("stops a conductor between two of its steps")]

CLOUD = CloudOptions(
    hosts=2,
    roles=("network",),
    after_commit=crashes,
    settings={
        "default": {"report_interval": 0.1},
        "conductor": {"lease": 60.0, "sweep_interval": 0.05},
    },
)
Hold = Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(loop_scope="module")
async def second(cloud: OneProcess) -> AsyncIterator[ConductorManager]:
    """Run another conductor of the same cloud."""
    made: Any = await make_conductor(cloud.process)
    await made.start()
    yield made
    await made.stop()


async def _expire(cloud: OneProcess, *servers: str) -> None:
    """Let the leases of the servers' operations expire, as if their owner had been paused."""
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(
            sa.update(operations)
            .where(operations.c.instance_uuid.in_(servers), operations.c.finished_at.is_(None))
            .values(lease_until=0)
        )
    )


@pytest.mark.parametrize("ending", ["places it", "finds no host", "fails"])
async def test_a_paused_conductor_comes_back_to_a_build_that_is_done(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    error = {"places it": None, "finds no host": NoValidHost("none"), "fails": RuntimeError("broken")}[ending]
    gate = Gate()
    monkeypatch.setattr(SchedulerManager, "_place", gate.around(SchedulerManager._place, error))
    id = await user.create()
    await asyncio.wait_for(gate.reached.wait(), 10)
    await _expire(cloud, id)
    await user.wait_for(id, "ACTIVE")
    host = await user.host_of(id)
    gate.open.set()
    await gate.left.wait()
    await _idle(cloud, second)
    assert (await user.show(id))["status"] == "ACTIVE"
    assert await user.host_of(id) == host
    await cloud.assert_clean()


async def test_a_paused_conductor_leaves_the_ports_of_the_other_one_alone(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = await network(user)
    gate = Gate()
    monkeypatch.setattr(SchedulerManager, "_place", gate.around(SchedulerManager._place))
    id = await user.create(networks=[{"uuid": net["id"]}])
    await asyncio.wait_for(gate.reached.wait(), 10)
    await _expire(cloud, id)
    await user.wait_for(id, "ACTIVE")
    [port] = await ports_of(user, id)
    gate.open.set()
    await gate.left.wait()
    await _idle(cloud, second)
    assert [each["id"] for each in await ports_of(user, id)] == [port["id"]]
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["create_ports", "update_port"])
async def test_a_conductor_that_is_paused_before_it_changes_a_port(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The port of the other conductor stays bound to its host; the one that is created too late is deleted."""
    net = await network(user)
    own = await make(user, "port", network_id=net["id"])
    gate = Gate()
    monkeypatch.setattr(Calls, call, gate.before(getattr(Calls, call)))
    wanted = {"uuid": net["id"]} if call == "create_ports" else {"port": own["id"]}
    id = await user.create(networks=[wanted])
    await asyncio.wait_for(gate.reached.wait(), 10)
    await _expire(cloud, id)
    await user.wait_for(id, "ACTIVE")
    [port] = await ports_of(user, id)
    gate.open.set()
    await gate.left.wait()
    await _idle(cloud, second)
    [left] = await ports_of(user, id)
    assert (left["id"], left["binding:host_id"]) == (port["id"], await user.host_of(id))
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    assert await ports_left(user) == []
    await cloud.assert_clean()


@pytest.mark.parametrize("paused", ["before it creates the port", "after it has created the port"])
async def test_a_paused_conductor_comes_back_to_an_interface_that_is_attached(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch, paused: str
) -> None:
    """The server has had another action meanwhile. It keeps its port; a port that is created too late is deleted."""
    net = await network(user)
    id = (await user.boot())["id"]
    gate = Gate()
    hold = gate.before if paused.startswith("before") else gate.around
    monkeypatch.setattr(Calls, "create_ports", hold(Calls.create_ports))
    body = {"interfaceAttachment": {"net_id": net["id"]}}
    attaching = asyncio.ensure_future(user.post(f"/servers/{id}/os-interface", body, status=200))
    await asyncio.wait_for(gate.reached.wait(), 10)
    await _expire(cloud, id)
    port = (await attaching)["interfaceAttachment"]["port_id"]
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "reboot", {"type": "SOFT"})
    await user.wait_for(id, "ACTIVE")
    await cloud.settled()
    gate.open.set()
    await gate.left.wait()
    await _idle(cloud, second)
    assert [each["id"] for each in await ports_of(user, id)] == [port]
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    assert await ports_left(user) == []
    await cloud.assert_clean()


@pytest.mark.parametrize("ending", ["places it", "finds no host"])
async def test_a_paused_conductor_comes_back_while_the_other_one_is_at_it(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    gate = Gate()
    error = NoValidHost("none") if ending == "finds no host" else None
    monkeypatch.setattr(SchedulerManager, "_place", gate.around(SchedulerManager._place, error))
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": user.project}):
        id = await user.create(name=user.project)
        await asyncio.wait_for(gate.reached.wait(), 10)
        await _expire(cloud, id)
        await user.wait_for(id, "BUILD", task="spawning")
        gate.open.set()
        await gate.left.wait()
        await _idle(cloud, second)
        shown = await user.show(id)
        assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("BUILD", "spawning")
        [operation] = await cloud.open_operations()
        assert operation.owner == f"host:{await user.host_of(id)}"
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


async def test_both_place_before_either_dispatches(
    cloud: OneProcess, user: Caller, second: ConductorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paused conductor continues and dispatches just before the other does: that changes nothing."""
    gates = [Gate(), Gate()]
    place = gates[1].around(SchedulerManager._place)
    monkeypatch.setattr(SchedulerManager, "_place", gates[0].around(place))
    id = await user.create()
    # The first call goes through both gates; the inner one blocks first, so it is the later gate.
    await asyncio.wait_for(gates[1].reached.wait(), 10)
    await _expire(cloud, id)

    async def taken_over() -> bool | None:
        [row] = await cloud.open_operations()
        return True if row.leases == 2 else None

    await cloud.until(taken_over, "the other conductor to take over")
    gates[1].open.set()
    gates[0].open.set()
    await user.wait_for(id, "ACTIVE")
    await _idle(cloud, second)
    await cloud.assert_clean()


async def test_each_server_of_a_request_has_tried_its_own_hosts(cloud: OneProcess, user: Caller) -> None:
    """Two servers fail on one host each and are taken over together: each may go to the host where the other failed."""
    crashes.step, crashes.times = ("build", "schedule"), 2
    rule = {"operation": "spawn", "kind": "fail", "name": user.project, "count": 2}
    async with cloud.faults(rule):
        several = user.body(name=user.project, min_count=2, max_count=2, return_reservation_id=True)
        reservation = (await user.post("/servers", several))["reservation_id"]

        async def both_wait() -> list[Any] | None:
            rows = [row for row in await cloud.open_operations() if row.batch_id == reservation]
            failed = [row for row in rows if row.step == "schedule" and row.epoch == 3]
            return failed if len(failed) == 2 and not crashes.times else None

        waiting = await cloud.until(both_wait, "both to have failed once")
        tried = [msgspec.msgpack.decode(row.payload)["tried"] for row in waiting]
        assert sorted(tried) == [["fake-1"], ["fake-2"]]
        await _expire(cloud, *(row.instance_uuid for row in waiting))
        servers = [await user.wait_for(row.instance_uuid, "ACTIVE") for row in waiting]
    for server, [failed_on] in zip(servers, tried, strict=True):
        assert await user.host_of(server["id"]) != failed_on
    await cloud.assert_clean()


async def test_operations_of_unknown_kinds_and_versions_are_left_alone(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when there are many of them: the sweep still finds the kinds that it knows."""
    database = cloud.process.database
    assert database is not None
    unknown = []
    for number, (kind, version) in enumerate([("build", 99), ("teleport", 1)] * 150):
        row = new_row(
            id=f"{user.project}-{number}", kind="build", instance_uuid=f"none-{number}", batch_id="g",
            step="new", epoch=1, now=0, deadline=1 << 60, context=Context(request_id="req-test"),
        )  # fmt: skip
        row["kind"], row["version"] = kind, version
        unknown.append(row)
    await database.write(operation_rows.insert, unknown)

    async def lost(*_: Any) -> None:
        """Lose the message about a new operation, so that only the sweep finds it."""

    monkeypatch.setattr(ConductorAPI, "run_operations", lost)
    try:
        for _ in range(3):
            await user.boot()
        ours = operations.c.id.like(f"{user.project}-%")
        left = await cloud.read(sa.select(operations.c.owner, operations.c.leases).where(ours))
        assert len(left) == 300 and set(left) == {(None, 0)}
    finally:
        await database.write(lambda conn: conn.execute(sa.delete(operations).where(operations.c.batch_id == "g")))


async def _idle(cloud: OneProcess, second: ConductorManager) -> None:
    """Wait until neither conductor runs an operation."""
    [first] = [role for role in cloud.process.started if isinstance(role, ConductorManager)]
    for _ in range(3):
        await first.engine.idle()
        await second.engine.idle()
        await asyncio.sleep(0)
