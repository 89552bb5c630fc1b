"""Simulated guests that change their size or their host: their disks are where they are."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from micronova.conf.hosts import FakeSettings
from micronova.objects import power_state
from micronova.objects.errors import Conflict
from micronova.objects.flavor import Flavor
from micronova.objects.orders import InstanceSpec
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.fake.driver import FakeDriver
from micronova.virt.fake.faults import FaultRule, FaultRules
from micronova.virt.fake.guests import FakeDisk, GuestStore
from tests.clocks import ManualClock

UUID = "6b0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"
SMALL = Flavor(id="1", name="small", ram=512, vcpus=1, disk=10)
LARGE = Flavor(id="2", name="large", ram=1024, vcpus=2, disk=20, ephemeral=5, swap=1024)


async def _plugged() -> None:
    pass


def _plan(flavor: Flavor, epoch: int) -> GuestPlan:
    instance = InstanceSpec(uuid=UUID, project_id="p", user_id="u", name="n", hostname="h", flavor=flavor)
    return GuestPlan(instance=instance, epoch=epoch, plugged=_plugged)


def _driver(host: str = "h1", path: Path | None = None, *rules: FaultRule) -> Any:
    return FakeDriver(
        host,
        settings=FakeSettings(),
        store=GuestStore(path),
        faults=FaultRules(Random(1), rules),
        cloud_id="c",
        clock=ManualClock(),
    )


async def _off(driver: Any) -> None:
    await driver.spawn(_plan(SMALL, 3))
    driver.guest_writes(UUID, "old")
    await driver.power_off(UUID, 0)


async def test_a_resize_keeps_what_was(tmp_path: Path) -> None:
    driver = _driver(path=tmp_path / "guests")
    await _off(driver)
    await driver.resize(_plan(LARGE, 5))
    await driver.resize(_plan(LARGE, 5))
    again = _driver(path=tmp_path / "guests")  # another agent reads it from the file
    guest = again._store.get(UUID)
    assert (guest.epoch, guest.vcpus, guest.memory_mb, guest.local_gb) == (5, 2, 1024, 26)
    assert [(disk.name, disk.size_gb, disk.text) for disk in guest.disks] == [
        ("root", 20, "old"), ("ephemeral", 5, ""), ("swap", 1, ""),
    ]  # fmt: skip
    await again.power_on(_plan(LARGE, 5))
    again.guest_writes(UUID, "new")
    await again.revert_resize(_plan(SMALL, 7))
    await again.revert_resize(_plan(SMALL, 7))
    guest = again._store.get(UUID)
    assert (guest.epoch, guest.vcpus, guest.power_state, guest.previous) == (7, 1, power_state.SHUTDOWN, None)
    assert guest.disks == (FakeDisk(name="root", size_gb=10, boots=1, text="old"),)
    await again.power_on(_plan(SMALL, 7))
    await again.revert_resize(_plan(SMALL, 7))  # the report was lost, and the order comes again
    assert again._store.get(UUID).power_state == power_state.RUNNING


async def test_what_is_claimed_for_a_guest_stays_with_it(tmp_path: Path) -> None:
    """Extra specs may let a server claim something else than its guest uses; the next agent has to know."""
    driver = _driver(path=tmp_path / "guests")
    await driver.spawn(_plan(msgspec.structs.replace(SMALL, extra_specs={"resources:MEMORY_MB": "0"}), 3))
    await driver.power_off(UUID, 0)

    async def seen() -> tuple[int, dict[str, int] | None]:
        [guest] = await _driver(path=tmp_path / "guests").list_guests()
        return guest.memory_mb, guest.claimed

    assert await seen() == (512, {"VCPU": 1, "DISK_GB": 10})
    await driver.resize(_plan(msgspec.structs.replace(LARGE, extra_specs={"resources:VCPU": "1"}), 5))
    assert await seen() == (1024, {"VCPU": 1, "MEMORY_MB": 1024, "DISK_GB": 26})
    await driver.revert_resize(_plan(SMALL, 7))
    assert await seen() == (512, {"VCPU": 1, "DISK_GB": 10})


async def test_a_confirmed_resize_cannot_be_reverted() -> None:
    driver = _driver()
    await _off(driver)
    await driver.resize(_plan(LARGE, 5))
    await driver.confirm_resize(UUID)
    await driver.confirm_resize(UUID)
    await driver.revert_resize(_plan(SMALL, 7))
    assert driver._store.get(UUID).vcpus == 2


async def test_a_guest_moves_with_its_disks() -> None:
    source, destination = _driver("h1"), _driver("h2")
    await _off(source)
    sent = await source.export_disks(UUID)
    await destination.import_guest(_plan(LARGE, 6), sent)
    with pytest.raises(Conflict):
        await destination.import_guest(_plan(LARGE, 6), sent)
    guest = destination._store.get(UUID)
    assert (guest.node, guest.epoch, guest.power_state) == ("h2", 6, power_state.SHUTDOWN)
    assert guest.disks[0] == FakeDisk(name="root", size_gb=20, boots=1, text="old")
    assert source._store.get(UUID).disks == (FakeDisk(name="root", size_gb=10, boots=1, text="old"),)


async def test_a_running_guest_is_not_moved() -> None:
    driver = _driver()
    await driver.spawn(_plan(SMALL, 3))
    for call in (driver.export_disks(UUID), driver.resize(_plan(LARGE, 5))):
        with pytest.raises(Conflict):
            await call


async def test_a_guest_that_does_not_arrive_is_partly_made() -> None:
    driver = _driver("h2", None, FaultRule(operation="import_guest"))
    with pytest.raises(DriverFailed):
        await driver.import_guest(_plan(LARGE, 6), msgspec.json.encode(()))
    guest = await driver.info(UUID)
    assert guest is not None and guest.power_state == power_state.NOSTATE
    await driver.destroy(UUID)
    assert await driver.info(UUID) is None
