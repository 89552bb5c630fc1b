"""One guest of a whole cloud through everything that happens to its power, and what it notices of it."""

import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud, processes
from tests.e2e.guests import Guest, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(cloud: RealCloud) -> AsyncIterator[Guest]:
    tenant = await cloud.tenant("10.78.0.0/24")
    try:
        made = await tenant.boot("carol")
        await made.ready()
        yield made
    finally:
        await tenant.clear()
    assert cloud.guest_leftovers() == []


async def _boots(guest: Guest) -> int:
    return (await guest.log()).count("MICRONOVA-GUEST-READY")


async def _boot_id(guest: Guest) -> str:
    """Return what is another after each boot and the same as long as the guest lives."""
    return await guest.ssh("cat /proc/sys/kernel/random/boot_id")


async def test_pause_and_suspend_stop_time_and_nothing_else(guest: Guest) -> None:
    life = await _boot_id(guest)
    await guest.ssh("echo kept >/tmp/memory")
    for stop, stopped, go_on in (("pause", "PAUSED", "unpause"), ("suspend", "SUSPENDED", "resume")):
        assert await guest.answers_ping()
        await guest.act(stop, status=stopped)
        assert not await guest.answers_ping()
        await guest.act(go_on, status="ACTIVE")
        await until(guest.answers_ping, f"an answer after {go_on}")
        assert await _boot_id(guest) == life
        assert await guest.ssh("cat /tmp/memory") == "kept\n"


async def test_a_guest_that_shuts_itself_down_is_noticed_and_started_again(guest: Guest) -> None:
    boots, life = await _boots(guest), await _boot_id(guest)
    await guest.ssh("poweroff")
    await guest.wait("SHUTOFF")
    assert (await guest.show())["OS-EXT-STS:power_state"] == 4
    await guest.act("os-start", status="ACTIVE")
    said = await guest.ready(boots + 1)
    assert (said["hostname"], said["uuid"]) == ("carol", guest.id)
    assert await _boot_id(guest) != life


async def _last_action(cloud: RealCloud, guest: Guest) -> tuple[str, str]:
    """Return the newest action of the server, and the details of its event."""
    path = f"{guest.path}/os-instance-actions"
    action = (await cloud.admin.do("GET", path))["instanceActions"][0]
    [event] = (await cloud.admin.do("GET", f"{path}/{action['request_id']}"))["instanceAction"]["events"]
    return action["action"], event["details"]


async def test_a_guest_that_panics_is_a_fault_of_its_server(guest: Guest, cloud: RealCloud) -> None:
    boots = await _boots(guest)
    await guest.ssh("setsid sh -c 'sleep 1; echo c >/proc/sysrq-trigger' </dev/null >/dev/null 2>&1 &")
    shown = await guest.wait("ERROR", 240)  # an emulated kernel takes its time to say what happened
    assert "operating system panicked" in shown["fault"]["message"]
    assert "Kernel panic" in await guest.log()
    action, details = await _last_action(cloud, guest)
    assert action == "stop" and "operating system panicked" in details
    assert f"server {guest.id} is error" in cloud.log

    await guest.act("reboot", {"type": "HARD"})

    async def runs() -> bool:
        return bool((await guest.show())["status"] == "ACTIVE")

    await until(runs, "the guest to run again")
    assert (await guest.ready(boots + 1))["hostname"] == "carol"


async def test_a_guest_whose_qemu_is_killed_is_off_and_its_history_says_so(guest: Guest, cloud: RealCloud) -> None:
    boots = await _boots(guest)
    [line] = [line for line in processes(guest.id) if "qemu-system" in line]
    os.kill(int(line.split()[0]), signal.SIGKILL)
    await guest.wait("SHUTOFF")
    action, details = await _last_action(cloud, guest)
    assert action == "stop" and "its process on the host ended" in details
    assert f"server {guest.id} is stopped" in cloud.log
    await guest.act("os-start", status="ACTIVE")
    await guest.ready(boots + 1)


@pytest.mark.parametrize("kind", ["SOFT", "HARD"])
async def test_reboot(guest: Guest, kind: str) -> None:
    boots, life = await _boots(guest), await _boot_id(guest)
    await guest.act("reboot", {"type": kind}, status="ACTIVE")
    await guest.ready(boots + 1)
    assert await _boot_id(guest) != life


async def test_a_guest_that_is_rebooted_and_paused_while_it_boots_is_reached(guest: Guest) -> None:
    boots, life = await _boots(guest), await _boot_id(guest)
    for _ in range(2):
        await guest.act("reboot", {"type": "HARD"}, status="ACTIVE")
    await guest.act("pause", status="PAUSED")
    assert await _boots(guest) == boots  # it was still booting
    await guest.act("unpause", status="ACTIVE")
    assert (await guest.ready(boots + 1))["ip"].startswith("10.78.0.")
    assert await _boot_id(guest) != life


async def test_stop(guest: Guest) -> None:
    farewells = (await guest.log()).count("MICRONOVA-GUEST-SHUTDOWN")
    await guest.act("os-stop", status="SHUTOFF")
    assert not await guest.answers_ping()
    await guest.shows("MICRONOVA-GUEST-SHUTDOWN", farewells + 1)  # it was asked, not cut off
