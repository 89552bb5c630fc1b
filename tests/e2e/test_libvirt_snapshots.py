"""Copies of the root disks of real guests: while they run, paused, suspended and at rest."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from micronova.objects import power_state
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Conflict
from micronova.virt.driver import DiskCopy
from micronova.virt.libvirt.driver import LibvirtDriver
from micronova.virt.libvirt.guests.snapshots import COPY
from tests.e2e.host import FLAVOR, Host, ImageServer, console
from tests.e2e.test_libvirt_guest import READY, _power, _type

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PLACE = 100  # MiB, behind the boot partition


async def _save(copy: DiskCopy, path: Path) -> Path:
    """Write a copy to a file, as an upload does, and check that it depends on no other file."""
    with path.open("wb") as file:
        async for chunk in copy.chunks():
            file.write(chunk)
    assert path.stat().st_size == copy.size
    await copy.close()
    told = subprocess.run(["qemu-img", "info", str(path)], check=True, capture_output=True, text=True).stdout
    assert "file format: qcow2" in told and "virtual size: 1 GiB" in told and "backing" not in told
    subprocess.run(["qemu-img", "check", "-q", str(path)], check=True)
    return path


async def _write(driver: LibvirtDriver, uuid: str, text: str) -> None:
    command = f"echo {text} | dd of=/dev/vda bs=1M seek={PLACE} conv=sync 2>/dev/null; sync; echo $?-{text}"
    await _type(driver, uuid, command, expect=f"0-{text}")


def _written(path: Path) -> str:
    raw = path.with_suffix(".raw")
    subprocess.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(path), str(raw)], check=True)
    with raw.open("rb") as file:
        file.seek(PLACE << 20)
        found = file.read(64).rstrip(b"\0\n").decode()
    raw.unlink()
    return found


async def test_a_guest_is_copied_in_each_state_and_the_copy_boots(host: Host, tmp_path: Path) -> None:
    plan = host.plan()
    uuid = plan.instance.uuid
    async with host.agent() as (driver, events):
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        await _write(driver, uuid, "first")
        live = await _save(await driver.snapshot(plan), tmp_path / "live")
        assert _written(live) == "first"
        assert await _power(driver, uuid) == power_state.RUNNING
        await _write(driver, uuid, "second")  # it goes on

        await driver.pause(uuid)
        assert _written(await _save(await driver.snapshot(plan), tmp_path / "paused")) == "second"
        assert await _power(driver, uuid) == power_state.PAUSED
        await driver.unpause(uuid)
        await _write(driver, uuid, "third")
        await driver.suspend(uuid)
        assert _written(await _save(await driver.snapshot(plan), tmp_path / "suspended")) == "third"
        await driver.resume(plan)
        await _write(driver, uuid, "fourth")
        await driver.power_off(uuid, 0)
        cold = await _save(await driver.snapshot(plan), tmp_path / "cold")
        assert _written(cold) == "fourth"
        assert events.of(uuid) == ["started", "paused", "resumed", "suspended", "resumed", "stopped"]
        await driver.destroy(uuid)
        images = ImageServer(live)
        try:
            again = host.plan(image=images.image)
            again.image_url = images.ticket
            await driver.spawn(again)
            await console(driver, again.instance.uuid, READY)
            command = f"dd if=/dev/vda bs=1M skip={PLACE} count=1 2>/dev/null | head -c 5"
            await _type(driver, again.instance.uuid, command, expect="first")
            await driver.destroy(again.instance.uuid)
        finally:
            images.stop()
    assert host.leftovers() == []


async def test_a_killed_agent_leaves_no_copy(host: Host) -> None:
    plan = host.plan()
    uuid = plan.instance.uuid
    leftover = host.root / "instances" / uuid / COPY
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        snapshots: Any = driver._snapshots

        async def never(_: str) -> None:
            await asyncio.get_running_loop().create_future()

        snapshots._wait = never
        copying = asyncio.create_task(driver.snapshot(plan))
        async with asyncio.timeout(60):
            while not leftover.exists() or not leftover.stat().st_blocks:
                await asyncio.sleep(0.1)
        snapshots.clear = never
        copying.cancel()
    assert leftover.exists()
    async with host.agent() as (driver, _):
        assert not leftover.exists()
        assert await _power(driver, uuid) == power_state.RUNNING
        copy = await driver.snapshot(plan)
        again = asyncio.create_task(driver.snapshot(plan))  # a copy that nobody has fetched is replaced
        assert (await again).size
        await copy.close()
        # A copy that is given up while it is made is removed at once.
        copying = asyncio.create_task(driver.snapshot(plan))
        async with asyncio.timeout(60):
            while not leftover.exists():
                await asyncio.sleep(0.01)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        assert not leftover.exists()
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_the_agent_in_a_guest_freezes_its_file_systems(host: Host) -> None:
    properties = {"os_require_quiesce": "yes", "hw_qemu_guest_agent": "yes"}
    image = msgspec.structs.replace(host.images.image, properties=properties)
    plan = host.plan(image=image, flavor=msgspec.structs.replace(FLAVOR, ephemeral=1))
    plan.block_devices = (
        BlockDevice(uuid=str(uuid4()), boot_index=0, image_id=image.id),
        BlockDevice(uuid=str(uuid4()), source_type="blank", boot_index=-1, size_gb=1, guest_format="ext4"),
    )
    uuid = plan.instance.uuid
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        await _type(driver, uuid, "mkdir /tmp/d; mount /dev/vdb /tmp/d; echo $?-mounted", expect="0-mounted")
        await (await driver.snapshot(plan)).close()
        log = await console(driver, uuid, "MICRONOVA-GUEST-AGENT --unfreeze")
        done = [line for line in log.splitlines() if "GUEST-AGENT" in line]
        assert [line.split()[-2:] for line in done] == [["--freeze", "1"], ["--unfreeze", "1"]]
        await _type(driver, uuid, "echo alive >/tmp/d/file; sync; echo $?-wrote", expect="0-wrote")

        await driver.pause(uuid)
        with pytest.raises(Conflict, match="it is paused"):
            await driver.snapshot(plan)
        await driver.unpause(uuid)
        await _type(driver, uuid, "kill -KILL $(pidof agent); echo $?-killed", expect="0-killed")
        with pytest.raises(Conflict, match="os_require_quiesce"):
            await driver.snapshot(plan)
        await driver.power_off(uuid, 0)
        await (await driver.snapshot(plan)).close()  # at rest there is nothing to freeze
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_a_guest_is_frozen_for_snapshots_of_its_volumes(host: Host) -> None:
    """The next agent thaws what a killed one has left frozen."""
    image = msgspec.structs.replace(host.images.image, properties={"hw_qemu_guest_agent": "yes"})
    plan = host.plan(image=image, flavor=msgspec.structs.replace(FLAVOR, ephemeral=1))
    plan.block_devices = (
        BlockDevice(uuid=str(uuid4()), boot_index=0, image_id=image.id),
        BlockDevice(uuid=str(uuid4()), source_type="blank", boot_index=-1, size_gb=1, guest_format="ext4"),
    )
    uuid = plan.instance.uuid
    write = "echo alive >/tmp/d/file; sync; echo $?-wrote"
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        await _type(driver, uuid, "mkdir /tmp/d; mount /dev/vdb /tmp/d; echo $?-mounted", expect="0-mounted")
        await driver.quiesce(uuid)
        log = await console(driver, uuid, "MICRONOVA-GUEST-AGENT")
        assert "MICRONOVA-GUEST-AGENT --freeze 1" in log and "--unfreeze" not in log
        await driver.unquiesce(uuid)
        await driver.unquiesce(uuid)  # it is thawed
        log = await console(driver, uuid, "MICRONOVA-GUEST-AGENT --unfreeze 1")
        assert log.count("--unfreeze") == 1
        await _type(driver, uuid, write, expect="0-wrote")
        await driver.quiesce(uuid)
    async with host.agent() as (driver, _):
        await _type(driver, uuid, write.replace("wrote", "again"), expect="0-again")
        await driver.pause(uuid)
        with pytest.raises(Conflict, match="does not run"):
            await driver.quiesce(uuid)
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_an_image_that_requires_an_agent_and_has_none(host: Host) -> None:
    image = msgspec.structs.replace(host.images.image, properties={"os_require_quiesce": "yes"})
    plan = host.plan(image=image)
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        with pytest.raises(Conflict, match="does not say that it has an agent"):
            await driver.snapshot(plan)
        plan.instance = msgspec.structs.replace(plan.instance, image=host.images.image)
        await (await driver.snapshot(plan)).close()
        await driver.destroy(plan.instance.uuid)
    assert host.leftovers() == []
