"""A host that lies in its reports: it reaches no server but those of its own operations."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.conductor.rpcapi import HOSTS, REPORT
from micronova.db.tables import departures, instance_action_events, operations
from micronova.objects.context import Context
from micronova.objects.orders import OrderOutcome, Report
from tests.functional.cloud import Caller, Cloud, CloudOptions

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
