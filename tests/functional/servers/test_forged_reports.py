"""A host that lies in its reports: it reaches no server but those of its own operations."""

import logging
import uuid
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.conductor.rpcapi import HEARTBEAT, HOSTS, REPORT
from micronova.db import node_reports
from micronova.db.tables import compute_nodes, departures, instance_action_events, node_topologies, operations
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.orders import NodeResources, OrderOutcome, Report
from micronova.objects.topology import NodeTopology
from micronova.rpc.errors import InvalidMessage
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

CLOUD = CloudOptions(hosts=2)


async def _report(cloud: Cloud, instance_uuid: str, outcome: OrderOutcome) -> bool:
    """Report on an instance with the operation of another one; return whether it was accepted."""
    [operation] = await cloud.open_operations()
    assert operation.instance_uuid != instance_uuid
    report = Report(
        operation_id=operation.id,
        epoch=operation.epoch,
        instance_uuid=instance_uuid,
        host=operation.owner.removeprefix("host:"),
        outcome=outcome,
        message="forged",
    )
    assert cloud.process.bus is not None
    reply = await cloud.process.bus.call(HOSTS.target(), REPORT, report, context=Context(), timeout=10.0)
    assert not reply.destroy
    return reply.accepted


async def _is_untouched(cloud: Cloud, victim: Caller, id: str, host: str | None) -> None:
    server = await victim.show(id)
    assert (server["status"], await victim.host_of(id)) == ("ACTIVE", host)
    assert not await cloud.read(sa.select(departures).where(departures.c.instance_uuid == id))
    assert host is not None and id in await cloud.guests(host)


@only_in_one_process("reads the log of the conductor")
async def test_the_log_says_why_a_report_is_refused(
    cloud: Cloud, user: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "micronova.conductor.manager")
    victim = (await user.boot())["id"]
    async with cloud.faults({"operation": "spawn", "kind": "hang"}):
        own = await user.create()
        await user.wait_for(own, "BUILD", task="spawning")
        [operation] = await cloud.open_operations()
        host = operation.owner.removeprefix("host:")
        late = Report(
            operation_id=operation.id, epoch=operation.epoch - 1, instance_uuid=own, host=host, outcome="done"
        )
        for report, line in (
            (late, f"host {host} reports build of instance {own}: done, too late: refused"),
            (
                msgspec.structs.replace(late, epoch=operation.epoch, instance_uuid=victim),
                f"host {host} reported on instance {victim} with an operation of instance {own}: the report is refused",
            ),
            (
                msgspec.structs.replace(late, operation_id=str(uuid.UUID(int=1))),
                f"host {host} reports on operation {uuid.UUID(int=1)}, which is not known: ignored",
            ),
        ):
            caplog.clear()
            assert cloud.process.bus is not None
            reply = await cloud.process.bus.call(HOSTS.target(), REPORT, report, context=Context(), timeout=10.0)
            assert not reply.accepted
            said = [record.getMessage() for record in caplog.records if record.name == "micronova.conductor.manager"]
            assert said == [line]
        await user.delete(f"/servers/{own}")
        await user.gone(own)
    await cloud.assert_clean()


async def test_a_build_says_nothing_of_another_server(cloud: Cloud, user: Caller) -> None:
    victim = cloud.caller()
    id = (await victim.boot())["id"]
    host = await victim.host_of(id)
    async with cloud.faults({"operation": "spawn", "kind": "hang"}):
        own = await user.create()
        await user.wait_for(own, "BUILD", task="spawning")
        for outcome in ("done", "abort", "reschedule", "error"):
            assert not await _report(cloud, id, outcome)
        await _is_untouched(cloud, victim, id, host)
        await user.delete(f"/servers/{own}")
        await user.gone(own)
    await cloud.assert_clean()


async def test_a_delete_removes_no_other_server(cloud: Cloud, user: Caller) -> None:
    victim = cloud.caller()
    id = (await victim.boot())["id"]
    host = await victim.host_of(id)
    own = (await user.boot())["id"]
    async with cloud.faults({"operation": "destroy", "kind": "delay", "delay": 3.0}):
        await user.delete(f"/servers/{own}")
        await cloud.fault_struck()
        assert not await _report(cloud, id, "done")
        await _is_untouched(cloud, victim, id, host)
    await user.gone(own)
    await cloud.assert_clean()


@pytest.mark.parametrize(("kind", "code"), [("spawn", "unavailable"), ("spawn", "failed"), ("destroy", "unavailable")])
async def test_a_report_stores_little_and_logs_one_line(
    cloud: Cloud, user: Caller, caplog: pytest.LogCaptureFixture, kind: str, code: str
) -> None:
    delayed = {"operation": kind, "kind": "delay", "delay": 3.0}
    own = "" if kind == "spawn" else (await user.boot())["id"]
    async with cloud.faults(delayed):
        if kind == "spawn":
            own = await user.create()
        else:
            await user.delete(f"/servers/{own}")
        await cloud.fault_struck()
        [operation] = await cloud.open_operations()
        # Not by the class, which cuts what an honest agent sends.
        report: Any = {
            "operation_id": operation.id,
            "epoch": operation.epoch,
            "instance_uuid": own,
            "host": operation.owner.removeprefix("host:"),
            "outcome": "reschedule" if kind == "spawn" else "error",
            "error_code": code,
            "left_behind": True,  # the agent, which does not lie, removes what it has built
            "message": "x\nFORGED " + "y" * 10_000_000,
            "details": "z" * 1_000_000,
        }
        assert cloud.process.bus is not None
        await cloud.process.bus.call(HOSTS.target(), REPORT, report, context=Context(), timeout=10.0)
    if kind == "spawn":
        await user.wait_for(own, "ACTIVE")
        assert len(msgspec.json.encode(await user.get(f"/servers/{own}/os-instance-actions"))) < 10_000
        await user.delete(f"/servers/{own}")
    await user.gone(own)
    stored = (operations.c.payload, instance_action_events.c.details)
    for column in stored:
        [(longest,)] = await cloud.read(sa.select(sa.func.max(sa.func.length(column))))
        assert longest is None or longest < 50_000
    assert all(len(record.getMessage()) < 10_000 for record in caplog.records)


async def test_a_number_that_no_scheduler_can_read_is_refused(cloud: Cloud, user: Caller) -> None:
    """Every build of every project failed, and no scheduler could start."""
    host = (await cloud.read(sa.select(compute_nodes.c.host)))[0].host
    node = {
        "node": "forged",
        "node_uuid": str(uuid.uuid4()),
        "hypervisor_type": "x",
        "hypervisor_version": 1,
        "vcpus": 4,
        "memory_mb": 4096,
        "local_gb": 10,
        "topology": {"cells": [{"id": 0, "memory_mb": 2**63}]},
    }
    beat: Any = {"hosts": [{"host": host, "nodes": [node]}], "number": 2**62}
    assert cloud.process.bus is not None
    with pytest.raises(InvalidMessage):
        await cloud.process.bus.call(HOSTS.target(), HEARTBEAT, beat, context=Context(), timeout=10.0)
    await user.boot()


@only_in_one_process("stores a node that no host reports")
async def test_a_number_that_an_earlier_version_has_stored_stops_nobody(cloud: Cloud, user: Caller) -> None:
    host = (await cloud.read(sa.select(compute_nodes.c.host)))[0].host
    node = NodeResources(
        node="stored",
        node_uuid=str(uuid.uuid4()),
        hypervisor_type="x",
        hypervisor_version=1,
        vcpus=400,
        memory_mb=400_000,
        local_gb=1000,
        topology=NodeTopology(),
    )
    text = f'{{"cells": [{{"id": 0, "memory_mb": {2**63}}}]}}'

    def store(conn: sa.Connection) -> None:
        now = micros(cloud.process.clock.now())
        node_reports.record(conn, {host: [node]}, now)
        stored = node_topologies.update().where(node_topologies.c.node_uuid == node.node_uuid)
        conn.execute(stored.values(topology=text, changed_at=now))

    assert cloud.process.database is not None
    await cloud.process.database.write(store)
    for _ in range(2):
        shown = await user.admin.show((await user.boot())["id"])
        assert shown["OS-EXT-SRV-ATTR:hypervisor_hostname"] != "stored"
