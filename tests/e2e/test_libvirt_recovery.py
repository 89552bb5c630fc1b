"""Agents and libvirtds that die, hang, and find guests that are not theirs."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from micronova.objects import power_state
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.virt.libvirt.client.connection import ConnectionLost
from micronova.virt.libvirt.daemon.qemu_user import find_qemu_user
from micronova.virt.libvirt.driver import LibvirtDriver
from tests.e2e.existing_libvirt import DistributionLibvirtd
from tests.e2e.host import TIMEOUT, Host

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

KILLS = 10
BY_HAND = """
<domain type='qemu'><name>by-hand</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type></os></domain>
"""


@asynccontextmanager
async def made_by_hand(driver: LibvirtDriver) -> AsyncIterator[str]:
    """Have a guest on the same libvirtd that no cloud made."""
    uuid = str(uuid4())
    await driver._connection.change(
        uuid, lambda connection: connection.defineXMLFlags(BY_HAND.format(uuid=uuid)).createWithFlags(), "make it"
    )
    try:
        yield uuid
    finally:

        def remove(connection: Any) -> None:
            domain = connection.lookupByUUIDString(uuid)
            domain.destroy()
            domain.undefine()

        await driver._connection.change(uuid, remove, "remove it")
        for log in (driver._layout.root / "log" / "qemu").glob("by-hand.log*"):
            log.unlink()


async def active(driver: LibvirtDriver, uuid: str) -> bool:
    return bool(await driver._connection.read(lambda connection: connection.lookupByUUIDString(uuid).isActive()))


async def test_an_agent_killed_at_any_moment_leaves_nothing_for_ever(host: Host) -> None:
    random = Random(20)
    async with host.agent() as (driver, _):
        async with made_by_hand(driver) as foreign:
            for _ in range(KILLS):
                await _kill_one(host, random.uniform(0.0, 2.0))
            # Whatever was under way is found, with its epoch, and can be removed.
            for guest in await driver.list_guests():
                assert guest.epoch >= 1
                assert guest.uuid != foreign
                await driver.destroy(guest.uuid)
            assert await driver.list_guests() == []
            await driver.destroy(foreign)
            assert await active(driver, foreign)
            # Like a new start: half-made and half-removed files go.
            async with host.agent():
                pass
            ours = [left for left in host.leftovers() if "by-hand" not in left]
            assert [left for left in ours if not left.startswith("process")] == []
            assert len(host.qemus()) == 1
    assert host.leftovers() == []


async def _kill_one(host: Host, after: float) -> None:
    image = msgspec.json.encode(host.images.image).decode()
    arguments = [str(host.state_dir), host.namespace, host.images.ticket, image]
    agent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.e2e.killed_agent",
        *arguments,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert agent.stdout is not None
    async with asyncio.timeout(TIMEOUT):
        assert await agent.stdout.readline() == b"ready\n"
    await asyncio.sleep(after)
    agent.kill()
    await agent.wait()


async def test_a_half_made_guest_is_known_as_such(host: Host) -> None:
    async with host.agent() as (driver, _):
        plan = host.plan(epoch=4)
        uuid = plan.instance.uuid
        await driver.spawn(plan)
        record = driver._records.load(uuid)
        assert record is not None
        driver._records.save(msgspec.structs.replace(record, complete=False))
    async with host.agent() as (driver, _):
        (guest,) = await driver.list_guests()
        assert (guest.uuid, guest.epoch, guest.power_state) == (uuid, 4, power_state.NOSTATE)
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_an_interrupted_removal_is_known_to_the_next_agent(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(uuid: str) -> None:
        raise RuntimeError("killed")

    plan = host.plan()
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        monkeypatch.setattr(driver._builder, "_remove_logs", interrupted)
        with pytest.raises(RuntimeError, match="killed"):
            await driver.destroy(plan.instance.uuid)
    async with host.agent() as (driver, _):
        assert [guest.uuid for guest in await driver.list_guests()] == [plan.instance.uuid]
        await driver.destroy(plan.instance.uuid)
    assert host.leftovers() == []


async def test_two_clouds_on_a_libvirt_that_runs_already(host: Host) -> None:
    # Under /var/tmp, because the driver's files have to be reachable under their own names.
    directory = Path(tempfile.mkdtemp(prefix="mn-e2e-", dir="/var/tmp"))
    directory.chmod(0o711)
    daemon = DistributionLibvirtd(directory / "daemon", host_uuid=str(uuid4()), user=find_qemu_user())
    daemon.ensure()
    try:
        options: dict[str, Any] = {"connection_uri": daemon.uri, "network_namespace": ""}
        async with (
            host.agent("cloud-1", instances_path=str(directory / "one"), **options) as (mine, _),
            host.agent("cloud-2", instances_path=str(directory / "two"), **options) as (theirs, _),
        ):
            plan = host.plan(config_drive=True)
            uuid = plan.instance.uuid
            await theirs.spawn(plan)
            assert [guest.uuid for guest in await theirs.list_guests()] == [uuid]
            assert (await theirs.get_vnc_console(uuid)).path == str(directory / "two" / "sockets" / uuid / "vnc")

            assert await mine.list_guests() == [] and await mine.info(uuid) is None
            await mine.destroy(uuid)
            for refused in (mine.power_off(uuid, 0), mine.pause(uuid), mine.get_console_output(uuid, None)):
                with pytest.raises(MicronovaError):
                    await refused
            assert await active(theirs, uuid)
            for driver in (mine, theirs):
                (node,) = await driver.get_available_resources()
                assert (node.memory_mb_used, node.running_vms) == (128, 1)

            await theirs.reboot(plan, "HARD")
            await theirs.destroy(uuid)
            assert await theirs._connection.read(lambda connection: connection.listAllDomains()) == []
            assert list((directory / "two" / "instances").iterdir()) == []
    finally:
        daemon.stop()
        shutil.rmtree(directory)


async def test_a_libvirtd_that_dies_comes_back(host: Host) -> None:
    async with host.agent() as (driver, events):
        assert driver._daemon is not None
        running, doomed = host.plan(), host.plan()
        for plan in (running, doomed):
            await driver.spawn(plan)
        # One of the guests goes while nobody can tell us.
        pids = {plan.instance.uuid: pid for plan in (running, doomed) for pid in host.qemus(plan.instance.uuid)}
        daemon = driver._daemon._owner("libvirtd")
        assert daemon is not None
        os.kill(daemon, signal.SIGKILL)
        os.kill(pids[doomed.instance.uuid], signal.SIGKILL)
        await events.wait(doomed.instance.uuid, "stopped")
        assert driver._daemon._owner("libvirtd") not in (None, daemon)
        guest = await driver.info(running.instance.uuid)
        assert guest is not None and guest.power_state == power_state.RUNNING
        assert host.qemus() == [pids[running.instance.uuid]]
        for plan in (running, doomed):
            await driver.destroy(plan.instance.uuid)
    assert host.leftovers() == []


async def test_a_libvirtd_that_hangs_does_not_hang_the_agent(host: Host) -> None:
    async with host.agent(call_timeout=1.0) as (driver, _):
        assert driver._daemon is not None
        daemon = driver._daemon._owner("libvirtd")
        assert daemon is not None
        os.kill(daemon, signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):
                for _ in range(3):
                    with pytest.raises(Unavailable):
                        await driver.list_guests()
        finally:
            os.kill(daemon, signal.SIGCONT)
        async with asyncio.timeout(TIMEOUT):
            while True:
                try:
                    assert await driver.list_guests() == []
                    break
                except Unavailable:
                    await asyncio.sleep(0.2)
    assert host.leftovers() == []


async def test_a_call_that_may_last_ends_when_libvirtd_hangs(host: Host) -> None:
    """Else the order would be at work, and its guest busy, until the timeout of the call."""
    async with host.agent() as (driver, _):
        assert driver._daemon is not None
        daemon = driver._daemon._owner("libvirtd")
        assert daemon is not None

        async def save() -> None:
            await driver._connection.change("a", lambda it: it.getCapabilities(), "x", timeout=3600, lane="memory")

        await save()
        os.kill(daemon, signal.SIGSTOP)
        try:
            async with asyncio.timeout(TIMEOUT):
                with pytest.raises(ConnectionLost):
                    await save()
        finally:
            os.kill(daemon, signal.SIGCONT)
        async with asyncio.timeout(TIMEOUT):
            while True:
                try:
                    await save()
                    break
                except Unavailable:
                    await asyncio.sleep(0.2)
    assert host.leftovers() == []


async def test_a_failed_build_is_undone_and_the_next_works(host: Host) -> None:
    async with host.agent() as (driver, _):
        wrong = msgspec.structs.replace(host.images.image, id="wrong", disk_format="vmdk")
        plan = host.plan(image=wrong)
        with pytest.raises(MicronovaError, match="declared as 'vmdk'"):
            await driver.spawn(plan)
        await driver.destroy(plan.instance.uuid)
        assert host.leftovers() == []
        plan = host.plan()
        await driver.spawn(plan)
        await driver.destroy(plan.instance.uuid)
    assert host.leftovers() == []
