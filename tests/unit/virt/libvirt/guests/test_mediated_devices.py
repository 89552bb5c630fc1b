"""Which mediated devices guests get, and when they are made and removed."""

from typing import Any

from micronova.objects.topology import AssignedMdev, Assignment
from micronova.virt.libvirt.client.node_devices import Mdev
from micronova.virt.libvirt.guests.mediated_devices import MediatedDevices
from micronova.virt.libvirt.storage.records import PinRecord
from tests.unit.virt.libvirt.node_devices import Direct, NodeDevices
from tests.unit.virt.libvirt.world import UUID, guest_record, plan

PARENT, TYPE = "pci_0000_84_00_0", "nvidia-35"
ONE = Assignment(mdevs=(AssignedMdev(parent=PARENT, mdev_type=TYPE),))
TWO = Assignment(mdevs=ONE.mdevs * 2)


def _mdev(number: int, mdev_type: str = TYPE) -> Mdev:
    return Mdev(uuid=f"0000000{number}-1b54-4048-85b3-a6a62d165c01", parent=PARENT, mdev_type=mdev_type)


def _devices(host: NodeDevices) -> MediatedDevices:
    connection: Any = Direct(host)
    return MediatedDevices(connection, "cloud-1")


async def test_devices_that_nobody_has_are_taken_first() -> None:
    """Of four that exist one is another guest's by its record, one by libvirt, and one has another type."""
    host = NodeDevices(6, _mdev(1), _mdev(2), _mdev(3, "nvidia-36"), _mdev(4), used=_mdev(2).uuid)
    first, second = await _devices(host).choose(plan(assignment=TWO), {_mdev(1).uuid})
    assert (first.uuid, first.made) == (_mdev(4).uuid, False)
    assert second.made and second.uuid not in host.mdevs
    assert await _devices(host).choose(plan(assignment=TWO), {_mdev(1).uuid}) == (first, second)
    assert await _devices(host).choose(plan(), set()) == ()


async def test_they_are_made_at_each_start_if_they_are_not_there() -> None:
    host = NodeDevices(2, _mdev(1))
    devices = _devices(host)
    chosen = await devices.choose(plan(assignment=TWO), set())
    record = guest_record(pins=PinRecord(mdevs=chosen))
    await devices.make(record)
    await devices.make(record)
    assert set(host.mdevs) == {each.uuid for each in chosen}
    host.mdevs.clear()  # the machine was restarted
    await devices.make(record)
    assert set(host.mdevs) == {each.uuid for each in chosen}
    await devices.make(guest_record())


async def test_those_that_were_made_for_a_guest_are_removed() -> None:
    host = NodeDevices(3, _mdev(1))
    devices = _devices(host)
    pins = PinRecord(mdevs=await devices.choose(plan(assignment=TWO), set()))
    await devices.make(guest_record(pins=pins))
    kept = PinRecord(
        mdevs=await devices.choose(plan(assignment=ONE, uuid="another"), {each.uuid for each in pins.mdevs})
    )
    await devices.make(guest_record(pins=kept))
    assert len(host.mdevs) == 3
    await devices.remove(UUID, pins, None)
    assert set(host.mdevs) == {_mdev(1).uuid, kept.mdevs[0].uuid}
    await devices.remove(UUID, pins, kept)
    assert set(host.mdevs) == {_mdev(1).uuid}
