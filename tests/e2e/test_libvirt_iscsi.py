"""Volumes behind an iSCSI target, to which the QEMU of a real guest logs in by itself."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
import pytest_asyncio

from micronova.objects.errors import Invalid
from micronova.objects.volume import AttachedVolume, ISCSIConnection, initiator_of
from micronova.virt.driver import DriverFailed
from tests.e2e.guests import run
from tests.e2e.host import Host
from tests.e2e.test_libvirt_volumes import boot, listens, shell, with_volumes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODULE = Path("/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so")
NAME = "iqn.2010-10.org.openstack:volume-1"
USER, PASSWORD = "user-1", "secret-password-1"
HOST = "host-1"
MIB = 1 << 20


@pytest_asyncio.fixture
async def volume(host: Host, tmp_path: Path) -> AsyncIterator[AttachedVolume]:
    """A volume of a target that lets one host and one user in; its data is in `tmp_path / "lun"`."""
    if shutil.which("tgtd") is None or not MODULE.exists():
        pytest.skip("needs an iSCSI target and QEMU's module (Debian: tgt, qemu-block-extra)")
    data, environ = tmp_path / "lun", {**os.environ, "TGT_IPC_SOCKET": str(tmp_path / "tgtd")}
    data.touch()
    os.truncate(data, 64 * MIB)
    target = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", host.namespace, "tgtd", "-f", env=environ, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        for command in (
            f"--op new --mode target --tid 1 -T {NAME}",
            f"--op new --mode logicalunit --tid 1 --lun 1 -b {data}",
            f"--op bind --mode target --tid 1 -Q {initiator_of(HOST)}",
            f"--op new --mode account --user {USER} --password {PASSWORD}",
            f"--op bind --mode account --tid 1 --user {USER}",
        ):
            for _ in range(50):
                told = await asyncio.create_subprocess_exec(
                    "tgtadm", "--lld", "iscsi", *command.split(), env=environ, stderr=asyncio.subprocess.DEVNULL
                )
                if await told.wait() == 0:
                    break
                await asyncio.sleep(0.1)
            else:
                raise AssertionError(f"tgtadm {command} failed")
        yield AttachedVolume(
            volume_id=str(uuid4()),
            attachment_id=str(uuid4()),
            device_uuid=str(uuid4()),
            device_name="/dev/vdb",
            secret=PASSWORD,
            connection=ISCSIConnection(
                target_iqn=NAME,
                target_portal="127.0.0.1:3260",
                target_lun=1,
                auth_username=USER,
                initiator=initiator_of(HOST),
            ),
        )
    finally:
        target.kill()
        await target.wait()


async def test_a_guest_uses_a_volume_of_a_target(host: Host, volume: AttachedVolume, tmp_path: Path) -> None:
    async with host.agent() as (driver, _):
        plan = await boot(driver, host.plan())
        uuid = plan.instance.uuid
        with_volumes(plan, volume)
        for wrong in (
            msgspec.structs.replace(volume, secret="wrong-password-1"),
            msgspec.structs.replace(
                volume, connection=msgspec.structs.replace(volume.connection, initiator=initiator_of("elsewhere"))
            ),
        ):
            with pytest.raises(DriverFailed):
                await driver.attach_volume(plan, wrong)
        with pytest.raises(Invalid):
            await driver.attach_volume(plan, msgspec.structs.replace(volume, secret=None))
        assert await shell(driver, plan, "test -e /sys/block/vdb || echo none") == "none"

        await driver.attach_volume(plan, volume)
        await driver.attach_volume(plan, volume)  # the order may come twice
        seen = "until test -e /sys/block/vdb/serial; do sleep 1; done; cat /sys/block/vdb/serial"
        assert await shell(driver, plan, seen) == volume.volume_id[:20]
        assert await shell(driver, plan, "cat /sys/block/vdb/size") == str(64 * MIB // 512)
        said = await shell(driver, plan, "printf persistent | dd of=/dev/vdb bs=512 conv=sync 2>&1; sync; echo done")
        assert said.endswith("done")
        assert (tmp_path / "lun").read_bytes()[:10] == b"persistent"

        await driver.power_off(uuid, 0)
        await driver.power_on(plan)
        await listens(driver, plan)
        assert await shell(driver, plan, "head -c 10 /dev/vdb") == "persistent"
        lines = str((await run("ps", "-ww", "-eo", "args")).stdout).splitlines()
        assert [PASSWORD in line for line in lines if f"instance-{uuid}" in line] == [False]
        await driver.detach_volume(uuid, volume)
        await driver.detach_volume(uuid, volume)
        assert await shell(driver, plan, "test -e /sys/block/vdb || echo none") == "none"
        await driver.destroy(uuid)
    assert host.leftovers() == []
