"""Changing the size of a guest on its host, with what is needed to revert that.

    copies of record and disks → disks grow → record with the new size and epoch

The guest gets its new definition when it is started. If an agent dies in between, the same order continues: the copies
and the growth may be repeated, and the record, which comes last, says that the guest has its new size.
"""

import msgspec

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects import power_state
from micronova.objects.errors import Conflict
from micronova.placement import extra_specs
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.launcher import START_TIMEOUT, Launcher
from micronova.virt.libvirt.storage.disks import DiskMaker, plan_disks
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.previous import PreviousGuests
from micronova.virt.libvirt.storage.records import DiskRecord, GuestRecord, GuestRecords


class Resizer:
    """Changes the sizes of the guests of one host."""

    def __init__(
        self,
        launcher: Launcher,
        guests: GuestAccess,
        records: GuestRecords,
        disks: DiskMaker,
        layout: Layout,
        files: ThreadPool,
        settings: LibvirtSettings,
    ) -> None:
        self._launcher = launcher
        self._guests = guests
        self._records = records
        self._disks = disks
        self._files = files
        self._settings = settings
        self._previous = PreviousGuests(layout, records, files)

    async def resize(self, plan: GuestPlan) -> None:
        """Give a guest that is off the size of the plan; keep what it was."""
        record, power = await self._guests.require(plan.instance.uuid)
        if record.epoch == plan.epoch:
            return
        if power != power_state.SHUTDOWN:
            raise Conflict(f"The guest {record.uuid} is not off: it cannot be resized.")
        disks = self._new_disks(plan, record)
        await self._previous.keep(record)
        await self._disks.grow(plan, disks)
        flavor = plan.instance.flavor
        larger = msgspec.structs.replace(
            record,
            epoch=plan.epoch,
            vcpus=flavor.vcpus,
            memory_mb=flavor.ram,
            local_gb=flavor.resources().get("DISK_GB", 0),
            claimed=extra_specs.node_resources(flavor, plan.instance.image),
            disks=disks,
            kept_pins=record.pins,
        )
        await self._launcher.reserve_again(plan, larger)

    async def confirm(self, uuid: str) -> None:
        """Remove what a guest was before it was resized."""
        record, _ = await self._guests.require(uuid)
        if record.kept_pins is not None:
            await self._launcher.mdevs.remove(uuid, record.kept_pins)
            record = msgspec.structs.replace(record, kept_pins=None)
            await self._files.run(self._records.save, record)
        await self._previous.forget(record)

    async def revert(self, plan: GuestPlan) -> None:
        """Make a guest what it was before it was resized; one that was not resized stays as it is."""
        uuid = plan.instance.uuid
        record, power = await self._guests.require(uuid)
        if record.epoch == plan.epoch:  # this order has done it, and may have started the guest
            await self._previous.forget(record)
            return
        if power != power_state.SHUTDOWN:
            await self._guests.change(uuid, domains.power_off, "stop the guest", timeout=START_TIMEOUT)
        if record.kept_pins is not None:  # else it was not resized
            await self._launcher.mdevs.remove(uuid, record.pins)
        await self._previous.restore(record, plan.epoch)

    def _new_disks(self, plan: GuestPlan, record: GuestRecord) -> tuple[DiskRecord, ...]:
        """Return the disks of the new size: those that the guest has stay what they are."""
        known = {disk.file: disk for disk in record.disks}
        config = [disk for disk in record.disks if disk.role == "config"]
        planned = [disk for disk in plan_disks(plan, self._settings) if disk.role != "config"]
        return (*(known.get(disk.file, disk) for disk in planned), *config)
