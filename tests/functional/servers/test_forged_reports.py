"""A host that lies in its reports: it reaches no server but those of its own operations."""

import sqlalchemy as sa

from micronova.conductor.rpcapi import HOSTS, REPORT
from micronova.db.tables import departures
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
