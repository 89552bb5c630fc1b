"""What becomes of a running guest when its cloud is killed, and when it is stopped."""

import os
import signal

import pytest

from tests.e2e.cloud import RealCloud, nothing, processes, real_cloud
from tests.e2e.guest_view import process_of
from tests.e2e.guests import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]


async def test_a_guest_outlives_a_cloud_that_is_killed_and_runs_again_after_one_that_was_stopped(
    can_run_guests: None,
) -> None:
    async with real_cloud() as cloud:
        tenant = await cloud.tenant("10.84.0.0/24")
        guest = await tenant.boot("erna")
        await guest.ready()
        life = await guest.ssh("cat /proc/sys/kernel/random/boot_id")
        user = process_of(guest.id).uid

        await kill(cloud)
        assert await guest.answers_ping(), "its network needs no cloud"
        await cloud.up()
        assert await guest.ssh("cat /proc/sys/kernel/random/boot_id") == life
        await guest.wait("ACTIVE")
        rule = await tenant.allow(protocol="tcp", port_range_min=80, port_range_max=80)
        await until(guest.answers_http, "the new cloud to rule the old guest's network")
        await tenant.forbid(rule)

        stopped = await tenant.boot("otto")
        await stopped.wait("ACTIVE")
        assert process_of(stopped.id).uid != user == process_of(guest.id).uid, "the new cloud knows whose it is"
        await stopped.act("os-stop", status="SHUTOFF")
        boots = (await guest.log()).count("MICRONOVA-GUEST-READY")
        await cloud.down()
        nothing("of the cloud", cloud.leftovers())
        await cloud.up()
        assert (await guest.ready(boots + 1))["hostname"] == "erna"
        await guest.wait("ACTIVE")
        assert await guest.ssh("cat /proc/sys/kernel/random/boot_id") != life
        assert process_of(guest.id).uid == user
        await stopped.wait("SHUTOFF")
        await tenant.clear()


async def kill(cloud: RealCloud) -> None:
    """Kill every process of the cloud itself, as no guest's or libvirt's."""
    await cloud.transport.close()

    def ours() -> list[int]:
        return [int(line.split()[0]) for line in processes(str(cloud.directory)) if "micronova.cli.main up" in line]

    for pid in ours():
        os.kill(pid, signal.SIGKILL)

    async def gone() -> bool:
        return not ours()

    await until(gone, "the cloud to be dead")
