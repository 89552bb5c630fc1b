"""The mediated devices of guests: choosing them, making them, and removing them.

The order says of which device and of which type a guest gets one. One that exists and that no guest has is taken, such
as one that the operator has made. Otherwise one is made when the guest is started, and removed with the guest. The
guest's record has them, so that it gets the same again whenever it is started; after a restart of the machine, which
ends all mediated devices, they are made again.
"""

import logging
from functools import partial
from typing import Final
from uuid import UUID, uuid5

from micronova.objects.errors import MicronovaError
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client import node_devices
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.node_devices import Mdev
from micronova.virt.libvirt.storage.records import GuestRecord, MdevRecord, PinRecord

log = logging.getLogger(__name__)

_MDEVS: Final = UUID("5b6f1d0c-3e1a-4c7e-9d42-6d6963726f6e")
"""Namespace of the uuids of mediated devices: an order that is repeated asks for the same."""


class MediatedDevices:
    """The mediated devices of the guests of one host."""

    def __init__(self, connection: Connection, cloud: str) -> None:
        self._connection = connection
        self._cloud = cloud

    async def choose(self, plan: GuestPlan, taken: set[str]) -> tuple[MdevRecord, ...]:
        """Return the devices that a guest gets; `taken` are those that records of guests have. Nothing is made."""
        assignment = plan.instance.assignment
        if assignment is None or not assignment.mdevs:
            return ()
        existing = await self._connection.read(node_devices.list_mdevs, "list its mediated devices")
        used = await self._connection.read(node_devices.used_by_guests, "list the devices of its guests")
        free = [each for each in existing if each.uuid not in taken | used]
        chosen = []
        for number, wanted in enumerate(assignment.mdevs):
            kind = wanted.parent, wanted.mdev_type
            found = next((each for each in free if (each.parent, each.mdev_type) == kind), None)
            if found is not None:
                free.remove(found)
                uuid = found.uuid
            else:
                uuid = str(uuid5(_MDEVS, f"{self._cloud}/{plan.instance.uuid}/{plan.epoch}/{number}"))
            chosen.append(MdevRecord(uuid=uuid, parent=wanted.parent, mdev_type=wanted.mdev_type, made=found is None))
        return tuple(chosen)

    async def make(self, record: GuestRecord) -> None:
        """Make those devices of a guest that do not exist."""
        wanted = () if record.pins is None else record.pins.mdevs
        if not wanted:
            return
        existing = await self._connection.read(node_devices.list_mdevs, "list its mediated devices")
        for each in wanted:
            mdev = Mdev(uuid=each.uuid, parent=each.parent, mdev_type=each.mdev_type)
            if mdev not in existing:
                await self._connection.change(
                    record.uuid, partial(node_devices.make, wanted=mdev), "make a mediated device of the guest"
                )

    async def remove(self, guest: str, *pins: PinRecord | None) -> None:
        """Remove the devices that were made for a guest. One that cannot be removed is free for the next guest."""
        made = {each.uuid for pin in pins if pin is not None for each in pin.mdevs if each.made}
        if not made:
            return
        try:
            await self._connection.change(
                guest, partial(node_devices.remove, uuids=made), "remove the mediated devices of the guest"
            )
        except MicronovaError as error:
            log.warning("mediated devices of guest %s could not be removed: %s", guest, error)
