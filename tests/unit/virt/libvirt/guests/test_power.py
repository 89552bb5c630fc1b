"""What the power of guests cannot do."""

from typing import Any, cast

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects import power_state
from micronova.objects.errors import NotSupported
from micronova.virt.libvirt.guests.power import GuestPower
from micronova.virt.libvirt.storage.records import GuestRecord, MdevRecord, PinRecord
from tests.unit.virt.libvirt.world import UUID, guest_record


class OneGuest:
    """A host with one guest, which runs."""

    def __init__(self, record: GuestRecord) -> None:
        self._record = record

    async def require(self, uuid: str) -> tuple[GuestRecord, int]:
        return self._record, power_state.RUNNING


async def test_a_guest_with_devices_of_its_host_is_not_suspended() -> None:
    guests: Any = OneGuest(guest_record(pins=PinRecord(devices=("0000:0a:00.0",))))
    power = GuestPower(cast(Any, None), guests, cast(Any, None), cast(Any, None), LibvirtSettings())
    with pytest.raises(NotSupported, match="PCI devices of the host"):
        await power.suspend(UUID)
    mdev = MdevRecord(uuid="m", parent="pci_0000_84_00_0", mdev_type="nvidia-35")
    guests = OneGuest(guest_record(pins=PinRecord(mdevs=(mdev,))))
    power = GuestPower(cast(Any, None), guests, cast(Any, None), cast(Any, None), LibvirtSettings())
    with pytest.raises(NotSupported, match="mediated devices of the host"):
        await power.suspend(UUID)
