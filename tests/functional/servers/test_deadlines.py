"""What hangs ends at its deadline, and the host lets go of it."""

import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.tables import allocations
from tests.functional.cloud import Caller, Cloud, Wanted

CLOUD = Wanted(
    settings={
        "default": {"instance_build_timeout": 1.0, "report_interval": 0.1},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    }
)


def _name() -> str:
    return f"h{uuid.uuid4().hex[:10]}"


async def test_a_build(cloud: Cloud, user: Caller):
    name = _name()
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": name}):
        id = await user.create(name=name)
        server = await user.wait_for(id, "ERROR")
        assert "in time" in server["fault"]["message"]

        async def undone() -> bool | None:
            held = [host for host in cloud.hosts if id in await cloud.guests(host)]
            return None if held else True

        await cloud.until(undone, "the host to let go of the guest")
    assert not await cloud.read(sa.select(allocations).where(allocations.c.consumer_uuid == id))
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("operation", "action", "value", "after"),
    [
        ("power_off", "os-stop", None, "ACTIVE"),
        ("reboot", "reboot", {"type": "SOFT"}, "ACTIVE"),
        ("reboot", "reboot", {"type": "HARD"}, "ERROR"),
    ],
)
async def test_an_action(cloud: Cloud, user: Caller, operation: str, action: str, value: Any, after: str):
    name = _name()
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": operation, "kind": "hang", "name": name, "count": 1}):
        await user.act(id, action, value)
        await user.wait_for(id, after)
        [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        assert last["message"] == "Error"
        # The host has one place for each server: what hung there must be gone before anything else can be done.
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_delete_has_no_deadline(cloud: Cloud, user: Caller):
    name = _name()
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": "destroy", "kind": "delay", "delay": 2.5, "name": name, "count": 1}):
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()
