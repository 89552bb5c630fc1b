"""A guest that never boots: its server says so, can be looked at, tried again and deleted, and harms no other."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor.rpcapi import HEARTBEAT
from micronova.db.tables import instances
from micronova.objects.orders import BootVerdict, Heartbeat, HostBeat
from micronova.rpc.contract import Context
from tests.functional.cloud import Caller, OneProcess, Wanted
from tests.functional.servers.mortal import MortalHost

CLOUD = Wanted(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1},
        "compute": {"boot_timeout": 0.4},
    },
)
HANGS = {"operation": "boot", "kind": "hang", "name": "hangs"}


async def test_a_guest_that_never_boots(cloud: OneProcess, user: Caller, caplog: pytest.LogCaptureFixture):
    async with cloud.faults(HANGS):
        id = await user.create(name="hangs")
        server = await user.wait_for(id, "ERROR")
        fault = server["fault"]
        assert fault["code"] == 500 and "details" not in fault
        assert fault["message"].startswith("The guest has not begun to boot: within 0.4 s it read 512 bytes")
        assert "a hard reboot tries again" in fault["message"]
        # It runs on, to be looked at.
        assert server["OS-EXT-STS:power_state"] == 1
        assert "Booting from" in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
        assert "Linux" not in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
        assert [line for line in caplog.messages if id in line and "has not begun to boot" in line]
        # Nobody asked for that: there is nothing in its history but the build, which went well.
        actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        assert [(action["action"], action["message"]) for action in actions] == [("create", None)]
        # The next one works, and a hard reboot tries again: in vain, as long as nothing is mended.
        await user.boot(name="works")
        await user.act(id, "reboot", {"type": "HARD"})
        assert (await user.wait_for(id, "ERROR"))["fault"]["message"] == fault["message"]
    await cloud.assert_clean()
    await user.act(id, "reboot", {"type": "HARD"})
    assert "fault" not in await user.wait_for(id, "ACTIVE")
    await cloud.delete_all()


@pytest.mark.parametrize(("action", "status"), [("os-stop", "SHUTOFF"), ("delete", "")])
async def test_the_ways_out(cloud: OneProcess, user: Caller, action: str, status: str):
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


async def test_a_guest_that_is_only_slow(cloud: OneProcess, user: Caller):
    async with cloud.faults({"operation": "boot", "kind": "delay", "name": "slow", "delay": 1.5}):
        id = await user.create(name="slow")
        await user.wait_for(id, "ERROR")
        await _boots_after_all(user, id)
        server = await user.show(id)
        assert "fault" not in server and server["OS-EXT-STS:power_state"] == 1
    await cloud.delete_all()


async def test_another_fault_is_not_taken_away(cloud: OneProcess, user: Caller):
    rules = (
        {"operation": "boot", "kind": "delay", "name": "slow", "delay": 1.5},
        {"operation": "reboot", "kind": "fail", "name": "slow", "message": "no power"},
    )
    async with cloud.faults(*rules):
        id = await user.create(name="slow")
        await user.wait_for(id, "ERROR")
        await user.act(id, "reboot", {"type": "HARD"})
        assert (await user.wait_for(id, "ERROR"))["fault"]["message"] == "no power"
        later = await user.create(name="slow-too")
        await user.wait_for(later, "ERROR")
        await _boots_after_all(user, later)  # by now the first has done so, too
        assert (await user.show(id))["fault"]["message"] == "no power"
    await cloud.delete_all()


async def test_what_an_admin_says_stands(cloud: OneProcess, user: Caller):
    async with cloud.faults(HANGS):
        ids = [await user.create(name=f"hangs-{number}") for number in range(2)]
        for id in ids:
            await user.wait_for(id, "ERROR")
        await user.admin.act(ids[0], "os-resetState", {"state": "active"})
        await user.admin.act(ids[1], "reboot", {"type": "HARD"})
        await user.wait_for(ids[1], "ERROR")  # the watch has looked again, and has not told of the first once more
        assert (await user.show(ids[0]))["status"] == "ACTIVE"
    await cloud.delete_all()


async def test_an_agent_that_is_killed_meanwhile(cloud: OneProcess, user: Caller, tmp_path: Path):
    host = MortalHost(cloud, "boots", tmp_path)
    await host.start(HANGS)
    id = await user.admin.create(name="hangs", availability_zone="nova:boots")
    await user.wait_for(id, "ACTIVE", "ERROR")
    await host.kill()
    await host.start(HANGS)
    await user.wait_for(id, "ERROR")
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    slow = {"operation": "boot", "kind": "delay", "name": "slow", "delay": 1.5}
    host.driver.set_fault_rules([slow])
    id = await user.admin.create(name="slow", availability_zone="nova:boots")
    await user.wait_for(id, "ERROR")
    await host.kill()
    await host.start()
    await _boots_after_all(user, id)
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()
    await cloud.assert_clean()


async def test_a_verdict_counts_only_for_a_server_at_rest_at_its_epoch(cloud: OneProcess, user: Caller):
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    [[epoch]] = await cloud.read(sa.select(instances.c.epoch).where(instances.c.uuid == id))
    assert cloud.process.bus is not None
    bus = cloud.process.bus

    async def tell(host: str = host, id: str = id, **fields: Any) -> tuple[str, ...]:
        beat = HostBeat(host=host, boots=(BootVerdict(instance_uuid=id, **fields),))
        sent = Heartbeat(hosts=(beat,))
        reply = await bus.call(HEARTBEAT.interface.target(), HEARTBEAT, sent, context=Context(), timeout=10.0)
        return reply.hosts[0].boots_again

    async def status() -> str:
        return str((await user.show(id))["status"])

    for stale in (
        {"epoch": epoch - 1}, {"epoch": epoch + 1}, {"epoch": epoch + 1, "found": True}, {"epoch": epoch, "id": "gone"},
        {"epoch": epoch, "host": next(other for other in cloud.hosts if other != host)},
    ):  # fmt: skip
        assert await tell(fault="It hangs.", **stale) == ()
        assert await status() == "ACTIVE"
    assert await tell(epoch=epoch, fault="It hangs.") == ()
    assert (await user.show(id))["fault"]["message"] == "It hangs."
    assert await tell(epoch=epoch - 1) == () and await status() == "ERROR"
    assert await tell(epoch=epoch) == () and await status() == "ACTIVE"
    # An agent that has started since does not know the newest epoch.
    assert await tell(epoch=epoch - 1, found=True, fault="It hangs.") == () and await status() == "ERROR"
    assert await tell(epoch=epoch - 1, found=True) == () and await status() == "ACTIVE"
    async with cloud.faults({"operation": "reboot", "kind": "hang"}):
        await user.act(id, "reboot", {"type": "HARD"})
        assert await tell(epoch=epoch, fault="It hangs.") == (id,), "to be told again after that"
    await cloud.delete_all()


async def _boots_after_all(user: Caller, id: str) -> None:
    async def probe() -> bool | None:
        return (await user.show(id))["status"] == "ACTIVE" or None

    await user.cloud.until(probe, f"{id} to boot after all")
