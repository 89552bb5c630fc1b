"""Repair of real guests: rescue with the old disk beside, passwords by the guest agent, and non-maskable interrupts."""

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from micronova.objects import power_state
from micronova.objects.errors import BuildFailed, Conflict, MicronovaError, NotSupported
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.driver import LibvirtDriver
from tests.e2e.host import Host, console
from tests.e2e.test_libvirt_guest import _power, _type

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

READY = "MICRONOVA-GUEST-READY"
# At each boot the guest tells which of its disks has the mark.
LOOK = """#!/bin/sh
for disk in vda vdb sda; do
    [ -b /dev/${disk}1 ] || continue
    mount /dev/${disk}1 /mnt
    if [ -e /mnt/mark ]; then echo "MARK-ON-$disk"; else echo "NO-MARK-ON-$disk"; fi
    umount /mnt
done >/dev/console
grep -q first-aid /mnt/config/openstack/latest/meta_data.json && echo FIRST-AID >/dev/console
echo LOOKED >/dev/console
"""
MARK = "mount /dev/vda1 /mnt; touch /mnt/mark; umount /mnt; sync; echo MARK$((6*7))"


class Killed(BaseException):
    """Ends an agent's work as if it had been killed."""


def _kill(*_: Any) -> None:
    raise Killed


def _rescue(host: Host, plan: GuestPlan, epoch: int, ticket: str | None = None, **properties: str) -> GuestPlan:
    """Return the plan of a rescue with another image, which has the same content."""
    image = msgspec.structs.replace(host.images.image, id=f"rescue-{epoch}", properties=dict(properties))
    return GuestPlan(
        instance=plan.instance,
        epoch=epoch,
        plugged=plan.plugged,
        image_url=ticket or plan.image_url,
        rescue_image=image,
        admin_password="first-aid",
    )


def _guest(host: Host, **changes: Any) -> GuestPlan:
    return host.plan(config_drive=True, user_data=base64.b64encode(LOOK.encode()).decode(), **changes)


async def _boot(driver: LibvirtDriver, uuid: str, count: int) -> list[str]:
    """Wait until the guest has booted so many times; return what the last boot has found."""
    log = await console(driver, uuid, "LOOKED", count)
    lines = log.replace("\r", "").split("LOOKED")[count - 1].splitlines()
    return [line for line in lines if line.startswith(("MARK-ON", "NO-MARK", "FIRST-AID"))]


async def _marked(driver: LibvirtDriver, plan: GuestPlan) -> None:
    """Build the guest and put the mark on its disk."""
    await driver.spawn(plan)
    assert await _boot(driver, plan.instance.uuid, 1) == ["NO-MARK-ON-vda"]
    await _type(driver, plan.instance.uuid, MARK, expect="MARK42")


def _files(host: Host, uuid: str) -> set[str]:
    return {file.name for file in (host.root / "instances" / uuid).iterdir()}


async def test_a_rescue_and_its_reverse(host: Host) -> None:
    plan = _guest(host)
    uuid = plan.instance.uuid
    async with host.agent() as (driver, _):
        await _marked(driver, plan)
        own = _files(host, uuid)

        await driver.rescue(_rescue(host, plan, 2), 30)
        assert await _power(driver, uuid) == power_state.RUNNING
        assert await _boot(driver, uuid, 2) == ["NO-MARK-ON-vda", "MARK-ON-vdb", "FIRST-AID"]
        assert _files(host, uuid) - own == {"disk.rescue", "disk.rescue.base", "disk.config.rescue"}
        await driver.rescue(_rescue(host, plan, 2), 30)  # the report was lost: the guest runs on
        assert len(driver._records.backing_files()) == 2, "no cached image is removed that the guest uses"

        await driver.unrescue(plan)
        assert await _boot(driver, uuid, 3) == ["MARK-ON-vda"]
        assert _files(host, uuid) == own
        await driver.unrescue(plan)

        # An administrator has reset the state of the rescued server: a hard reboot uses its own disk.
        await driver.rescue(_rescue(host, plan, 4), 30)
        assert await _boot(driver, uuid, 4) == ["NO-MARK-ON-vda", "MARK-ON-vdb", "FIRST-AID"]
        await driver.reboot(plan, "HARD")
        assert await _boot(driver, uuid, 5) == ["MARK-ON-vda"]
        assert _files(host, uuid) == own
        await driver.rescue(_rescue(host, plan, 6), 0)
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_a_stable_rescue_leaves_the_disks_in_their_places(host: Host) -> None:
    plan = _guest(host)
    uuid = plan.instance.uuid
    async with host.agent() as (driver, _):
        await _marked(driver, plan)
        await driver.power_off(uuid, 0)
        await driver.rescue(_rescue(host, plan, 2, hw_rescue_device="disk", hw_rescue_bus="scsi"), 0)
        assert await _boot(driver, uuid, 2) == ["MARK-ON-vda", "NO-MARK-ON-sda", "FIRST-AID"]
        record = driver._records.load(uuid)
        assert record is not None
        assert [(disk.role, disk.boot_index) for disk in record.attached] == [
            ("root", -1), ("config", -1), ("rescue", 0),
        ]  # fmt: skip
        await driver.unrescue(plan)
        assert await _boot(driver, uuid, 3) == ["MARK-ON-vda"]
        # A bus that this host does not have is refused before anything changes.
        with pytest.raises(MicronovaError, match="xen"):
            await driver.rescue(_rescue(host, plan, 4, hw_rescue_bus="xen"), 0)
        # As is an image that cannot be had; the guest runs on.
        with pytest.raises(BuildFailed, match="404"):
            await driver.rescue(_rescue(host, plan, 5, ticket=f"{plan.image_url}.no"), 0)
        assert await _power(driver, uuid) == power_state.RUNNING
        record = driver._records.load(uuid)
        assert record is not None and record.rescue is None
        assert not [name for name in _files(host, uuid) if "rescue" in name]
        await driver.destroy(uuid)
    assert host.leftovers() == []


POINTS: dict[str, Callable[[LibvirtDriver], tuple[object, str]]] = {
    "the disk is not made": lambda driver: (driver._disks, "make_rescue_disk"),
    "the guest waits for the network": lambda driver: (driver._launcher, "resume"),
    "the guest runs": lambda driver: (driver._rescuer._disks, "complete"),
}


async def test_an_agent_that_is_killed_in_the_middle(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _guest(host)
    uuid = plan.instance.uuid
    boots = 1
    async with host.agent() as (driver, _):
        await _marked(driver, plan)
    for epoch, point in enumerate(POINTS.values(), 2):
        order = _rescue(host, plan, epoch)
        async with host.agent() as (driver, _):
            with monkeypatch.context() as patch:
                patch.setattr(*point(driver), _kill)
                with pytest.raises(Killed):
                    await driver.rescue(order, 0)
        async with host.agent() as (driver, _):
            await driver.rescue(order, 0)
            boots = (await driver.get_console_output(uuid, None)).count("LOOKED") + 1
            assert await _boot(driver, uuid, boots) == ["NO-MARK-ON-vda", "MARK-ON-vdb", "FIRST-AID"]
    async with host.agent() as (driver, _):
        with monkeypatch.context() as patch:
            patch.setattr(driver._launcher, "launch", _kill)
            with pytest.raises(Killed):
                await driver.unrescue(plan)
    async with host.agent() as (driver, _):
        await driver.unrescue(plan)
        assert await _boot(driver, uuid, boots + 1) == ["MARK-ON-vda"]
        assert not [name for name in _files(host, uuid) if "rescue" in name]
        with monkeypatch.context() as patch:
            patch.setattr(driver._rescuer._disks, "complete", _kill)
            with pytest.raises(Killed):
                await driver.rescue(_rescue(host, plan, 9), 0)
    async with host.agent() as (driver, _):
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_passwords_and_interrupts(host: Host) -> None:
    properties = {"hw_qemu_guest_agent": "yes"}
    image = msgspec.structs.replace(host.images.image, properties=properties)
    plan = host.plan(image=image)
    uuid = plan.instance.uuid
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        secret = 'p"ss\\nwörd $1 %s /'
        await driver.set_admin_password(plan, secret)
        shown = await _type(driver, uuid, "grep ^root: /etc/shadow; echo shad$((6*7))", expect="shad42")
        assert "root:$6$" in shown

        other = msgspec.structs.replace(image, properties={**properties, "os_admin_user": "nobody-here"})
        stranger = GuestPlan(
            instance=msgspec.structs.replace(plan.instance, image=other), epoch=1, plugged=plan.plugged
        )
        with pytest.raises(Conflict, match="nobody-here"):
            await driver.set_admin_password(stranger, secret)
        without = GuestPlan(
            instance=msgspec.structs.replace(plan.instance, image=host.images.image), epoch=1, plugged=plan.plugged
        )
        with pytest.raises(Conflict, match="not enabled"):
            await driver.set_admin_password(without, secret)

        await driver.trigger_crash_dump(uuid)
        await console(driver, uuid, "NMI received for unknown reason")

        # The agent hangs, and then it is gone.
        await _type(driver, uuid, "kill -STOP $(pidof agent); echo stop$((6*7))", expect="stop42")
        with pytest.raises(NotSupported, match="does not answer"):
            await driver.set_admin_password(plan, secret)
        await _type(driver, uuid, "kill -KILL $(pidof agent); echo kill$((6*7))", expect="kill42")
        with pytest.raises(NotSupported, match="does not answer"):
            await driver.set_admin_password(plan, secret)
        assert await _power(driver, uuid) == power_state.RUNNING

        await driver.power_off(uuid, 0)
        with pytest.raises(Conflict, match="does not run"):
            await driver.set_admin_password(plan, secret)
        with pytest.raises(Conflict, match="does not run"):
            await driver.trigger_crash_dump(uuid)
        await driver.destroy(uuid)
    assert host.leftovers() == []
