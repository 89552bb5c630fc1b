"""One guest of a whole cloud through everything that happens to its power, and what it notices of it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud
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


@pytest.mark.parametrize("kind", ["SOFT", "HARD"])
async def test_reboot(guest: Guest, kind: str) -> None:
    boots, life = await _boots(guest), await _boot_id(guest)
    await guest.act("reboot", {"type": kind}, status="ACTIVE")
    await guest.ready(boots + 1)
    assert await _boot_id(guest) != life


async def test_stop(guest: Guest) -> None:
    farewells = (await guest.log()).count("MICRONOVA-GUEST-SHUTDOWN")
    await guest.act("os-stop", status="SHUTOFF")
    assert not await guest.answers_ping()
    await guest.shows("MICRONOVA-GUEST-SHUTDOWN", farewells + 1)  # it was asked, not cut off
