"""A guest that does not boot: its server goes to ERROR with the reason, and can be rebooted and deleted."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor.rpcapi import HEARTBEAT
from micronova.db.tables import instances
from micronova.objects.context import Context
from micronova.objects.orders import BootResult, Heartbeat, HostBeat
from tests.functional.cloud import (
    ON_CLUSTER,
    Caller,
    Cloud,
    CloudOptions,
    OneProcess,
    SeparateProcesses,
    only_in_one_process,
)
from tests.functional.servers.killable_host import KillableHost

CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1},
        "compute": {"boot_timeout": 0.4},
    },
)
HANGS = {"operation": "boot", "kind": "hang", "name": "hangs"}
# The delay is longer than the timeout and the time until the next heartbeat.
SLOW = {"operation": "boot", "kind": "delay", "name": "slow", "delay": 4.0 if ON_CLUSTER else 1.5}


async def test_a_guest_that_never_boots(cloud: Cloud, user: Caller, caplog: pytest.LogCaptureFixture) -> None:
    async with cloud.faults(HANGS):
        id = await user.create(name="hangs")
        server = await user.wait_for(id, "ERROR")
        fault = server["fault"]
        assert fault["code"] == 500 and "details" not in fault
        assert fault["message"].startswith("The guest has not begun to boot: within 0.4 s it read 512 bytes")
        assert "a hard reboot tries again" in fault["message"]
        # It continues to run, so that its console can be read.
        assert server["OS-EXT-STS:power_state"] == 1
        assert "Booting from" in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
        assert "Linux" not in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
        logged = cloud.logged() if isinstance(cloud, SeparateProcesses) else caplog.text
        assert [line for line in logged.splitlines() if id in line and "has not begun to boot" in line]
        # No request caused this: the only instance action is the build, which succeeded.
        actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        assert [(action["action"], action["message"]) for action in actions] == [("create", None)]
        # Other actions work. A hard reboot tries again and fails again while the fault lasts.
        await user.boot(name="works")
        await user.act(id, "reboot", {"type": "HARD"})
        assert (await user.wait_for(id, "ERROR"))["fault"]["message"] == fault["message"]
    await cloud.assert_clean()
    await user.act(id, "reboot", {"type": "HARD"})
    assert "fault" not in await user.wait_for(id, "ACTIVE")
    await cloud.delete_all()


@pytest.mark.parametrize(("action", "status"), [("os-stop", "SHUTOFF"), ("delete", "")])
async def test_it_can_be_stopped_and_deleted(cloud: Cloud, user: Caller, action: str, status: str) -> None:
    async with cloud.faults(HANGS):
        id = await user.create(name="hangs")
        await user.wait_for(id, "ERROR")
        if status:
            await user.act(id, action)
            assert "fault" not in await user.wait_for(id, status)
            await user.act(id, "os-start")
            await user.wait_for(id, "ERROR")
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


async def test_a_guest_that_is_only_slow(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults(SLOW):
        id = await user.create(name="slow")
        await user.wait_for(id, "ERROR")
        await _wait_until_booted(user, id)
        server = await user.show(id)
        assert "fault" not in server and server["OS-EXT-STS:power_state"] == 1
    await cloud.delete_all()


async def test_another_fault_is_not_taken_away(cloud: Cloud, user: Caller) -> None:
    broken = {"operation": "reboot", "kind": "fail", "name": "slow", "message": "no power"}
    async with cloud.faults(SLOW, broken):
        id = await user.create(name="slow")
        await user.wait_for(id, "ERROR")
        await user.act(id, "reboot", {"type": "HARD"})
        assert (await user.wait_for(id, "ERROR"))["fault"]["message"] == "no power"
        later = await user.create(name="slow-too")
        await user.wait_for(later, "ERROR")
        await _wait_until_booted(user, later)  # the first has booted by now, too
        assert (await user.show(id))["fault"]["message"] == "no power"
    await cloud.delete_all()


async def test_a_state_reset_by_an_admin_stands(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults(HANGS):
        ids = [await user.create(name=f"hangs-{number}") for number in range(2)]
        for id in ids:
            await user.wait_for(id, "ERROR")
        await user.admin.act(ids[0], "os-resetState", {"state": "active"})
        await user.admin.act(ids[1], "reboot", {"type": "HARD"})
        await user.wait_for(ids[1], "ERROR")  # there was another check, and the first was not reported again
        assert (await user.show(ids[0]))["status"] == "ACTIVE"
    await cloud.delete_all()


@only_in_one_process("kills a host within the process")
async def test_an_agent_that_is_killed_meanwhile(cloud: OneProcess, user: Caller, tmp_path: Path) -> None:
    host = KillableHost(cloud, "boots", tmp_path)
    await host.start(HANGS)
    id = await user.admin.create(name="hangs", availability_zone="nova:boots")
    await user.wait_for(id, "ACTIVE", "ERROR")
    await host.kill()
    await host.start(HANGS)
    await user.wait_for(id, "ERROR")
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    host.driver.set_fault_rules([SLOW])
    id = await user.admin.create(name="slow", availability_zone="nova:boots")
    await user.wait_for(id, "ERROR")
    await host.kill()
    await host.start()
    await _wait_until_booted(user, id)
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()
    await cloud.assert_clean()


async def test_a_result_counts_only_for_a_server_at_rest_at_its_epoch(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    [[epoch]] = await cloud.read(sa.select(instances.c.epoch).where(instances.c.uuid == id))
    assert cloud.process.bus is not None
    bus = cloud.process.bus
    numbers = itertools.count(1 << 60, 1 << 20)  # the agent of the host learns each, and goes on from there

    async def send_result(host: str = host, id: str = id, **fields: Any) -> tuple[str, ...]:
        beat = HostBeat(host=host, boots=(BootResult(instance_uuid=id, **fields),))
        sent = Heartbeat(hosts=(beat,), number=next(numbers))
        reply = await bus.call(HEARTBEAT.interface.target(), HEARTBEAT, sent, context=Context(), timeout=10.0)
        return reply.hosts[0].repeat_boots

    async def status() -> str:
        return str((await user.show(id))["status"])

    for stale in (
        {"epoch": epoch - 1}, {"epoch": epoch + 1}, {"epoch": epoch + 1, "found": True}, {"epoch": epoch, "id": "gone"},
        {"epoch": epoch, "host": next(other for other in cloud.hosts if other != host)},
    ):  # fmt: skip
        assert await send_result(fault="It hangs.", **stale) == ()
        assert await status() == "ACTIVE"
    assert await send_result(epoch=epoch, fault="It hangs.") == ()
    assert (await user.show(id))["fault"]["message"] == "It hangs."
    assert await send_result(epoch=epoch - 1) == () and await status() == "ERROR"
    assert await send_result(epoch=epoch) == () and await status() == "ACTIVE"
    # An agent that has just started does not know the newest epoch.
    assert await send_result(epoch=epoch - 1, found=True, fault="It hangs.") == () and await status() == "ERROR"
    assert await send_result(epoch=epoch - 1, found=True) == () and await status() == "ACTIVE"
    async with cloud.faults({"operation": "reboot", "kind": "hang"}):
        await user.act(id, "reboot", {"type": "HARD"})
        assert await send_result(epoch=epoch, fault="It hangs.") == (id,), "the host is to report it again"
    await cloud.delete_all()


async def _wait_until_booted(user: Caller, id: str) -> None:
    async def probe() -> bool | None:
        return (await user.show(id))["status"] == "ACTIVE" or None

    await user.cloud.until(probe, f"{id} to boot after all")
