"""Rebuilding a real guest on a host: new disks in the place of the old ones, also if agents die on the way."""

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from micronova.objects import power_state
from micronova.objects.errors import Conflict, MicronovaError
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.driver import LibvirtDriver
from tests.e2e.host import TIMEOUT, Host, console

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

READY = "MICRONOVA-GUEST-READY"


def _next(plan: GuestPlan, epoch: int, **changes: Any) -> GuestPlan:
    """Return the plan of the same server at another epoch."""
    return GuestPlan(
        instance=msgspec.structs.replace(plan.instance, **changes),
        epoch=epoch,
        plugged=plan.plugged,
        image_url=plan.image_url,
        admin_password=plan.admin_password,
    )


async def _nothing() -> None: ...


def _disk(host: Host, plan: GuestPlan) -> Path:
    return host.root / "instances" / plan.instance.uuid / "disk"


async def _is(driver: LibvirtDriver, plan: GuestPlan, epoch: int, power: int) -> None:
    (guest,) = await driver.list_guests()
    assert (guest.uuid, guest.epoch, guest.power_state) == (plan.instance.uuid, epoch, power)


async def test_a_guest_is_rebuilt_and_keeps_its_place(host: Host) -> None:
    plan = host.plan(epoch=3, hostname="old")
    uuid = plan.instance.uuid
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        record = driver._records.load(uuid)
        assert record is not None
        changed = _next(plan, 5, hostname="new", config_drive=True)
        with _disk(host, plan).open("rb") as old:
            await driver.rebuild(changed, start=True, timeout=TIMEOUT, stopping=_nothing, removed=_nothing)
            assert os.fstat(old.fileno()).st_nlink == 0, "the old disk is gone"
        await _is(driver, plan, 5, power_state.RUNNING)
        assert "hostname=new" in await console(driver, uuid, READY)
        assert (await driver.get_console_output(uuid, None)).count(READY) == 1, "it has a new console log"
        after = driver._records.load(uuid)
        assert after is not None
        assert (after.uid, after.pins, after.complete) == (record.uid, record.pins, True)
        assert _disk(host, plan).exists()
        assert len(host.qemus()) == 1

        await driver.power_off(uuid, 0)
        await driver.rebuild(_next(plan, 6), start=False, timeout=TIMEOUT, stopping=_nothing, removed=_nothing)
        await _is(driver, plan, 6, power_state.SHUTDOWN)
        assert host.qemus() == []
        assert sorted(file.name for file in _disk(host, plan).parent.iterdir()) == ["disk", "disk.base", "guest.json"]
        await driver.power_on(_next(plan, 6))
        await console(driver, uuid, READY)

        # A guest that is suspended has memory on disk, which must not meet the new disk.
        await driver.suspend(uuid)
        await driver.rebuild(_next(plan, 7), start=True, timeout=TIMEOUT, stopping=_nothing, removed=_nothing)
        await _is(driver, plan, 7, power_state.RUNNING)
        await console(driver, uuid, READY)
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_a_guest_that_is_gone_is_made(host: Host) -> None:
    plan = host.plan(epoch=2)
    async with host.agent() as (driver, _):
        for epoch, start, power in ((2, False, power_state.SHUTDOWN), (3, True, power_state.RUNNING)):
            await driver.rebuild(_next(plan, epoch), start=start, timeout=0, stopping=_nothing, removed=_nothing)
            await _is(driver, plan, epoch, power)
            await driver.destroy(plan.instance.uuid)
    assert host.leftovers() == []


async def test_an_image_that_cannot_be_had_leaves_the_guest_as_it_is(host: Host) -> None:
    plan = host.plan()
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        qemu = host.qemus()
        missing = msgspec.structs.replace(host.images.image, id=str(uuid4()))
        broken = _next(plan, 2, image=missing)
        broken.image_url = f"{host.images.ticket}-missing"
        with pytest.raises(MicronovaError):
            await driver.rebuild(broken, start=True, timeout=0, stopping=_nothing, removed=_nothing)
        await _is(driver, plan, 1, power_state.RUNNING)
        assert host.qemus() == qemu
        await driver.destroy(plan.instance.uuid)
    assert host.leftovers() == []


@pytest.mark.parametrize("where", ["undefine", "renew", "disks", "launch", "complete"])
async def test_a_rebuild_that_is_interrupted_is_repeated(
    host: Host, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = host.plan(epoch=1)
    uuid = plan.instance.uuid

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        with monkeypatch.context() as dying:
            if where == "undefine":  # the old guest is removed, and nothing is written
                dying.setattr(driver._records, "renew", killed)
            elif where == "renew":  # the new record is written, and the old disks are there
                dying.setattr(driver._records, "_remove_outside", killed)
            elif where == "disks":
                dying.setattr(driver._disks, "make", killed)
            elif where == "launch":
                dying.setattr(driver._launcher, "launch", killed)
            else:  # it runs, and its record does not say so
                dying.setattr(driver._records, "save", _only_first(driver._records.save, killed))
            with pytest.raises(Killed):
                await driver.rebuild(_next(plan, 2), start=True, timeout=0, stopping=_nothing, removed=_nothing)
    async with host.agent() as (driver, _):
        (guest,) = await driver.list_guests()
        if where == "undefine":
            assert (guest.epoch, guest.power_state) == (1, power_state.SHUTDOWN)
        else:
            assert (guest.epoch, guest.power_state) == (2, power_state.NOSTATE)
            for refused in (driver.power_on(plan), driver.reboot(plan, "HARD")):
                with pytest.raises(Conflict, match="not made completely"):
                    await refused
        await driver.rebuild(_next(plan, 2), start=True, timeout=0, stopping=_nothing, removed=_nothing)
        await _is(driver, plan, 2, power_state.RUNNING)
        assert len(host.qemus()) == 1
        await console(driver, uuid, READY)
        await driver.destroy(uuid)
    assert host.leftovers() == []


def _only_first(save: Any, killed: Any) -> Any:
    """Return a function that works for the records of guests that are not complete."""

    def run(record: Any) -> None:
        if record.complete:
            killed()
        save(record)

    return run
