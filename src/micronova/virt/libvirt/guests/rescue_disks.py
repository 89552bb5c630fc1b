"""Rescue disks: what is made for a guest that boots from a rescue image, and its record of that.

The record says first that a rescue begins, then the disks are made, and last the record says that the guest runs from
them. Whatever an agent that dies leaves is found by the record, and the next attempt makes all of it again. Removing
goes the other way: the record is changed last.
"""

import logging

import msgspec

from micronova.conf.libvirt import LibvirtSettings
from micronova.metadata.vendordata import VendorDataSource
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.guests.launcher import Launcher
from micronova.virt.libvirt.storage.config_drive import make_config_drive
from micronova.virt.libvirt.storage.disks import RESCUE_CONFIG_DRIVE, DiskMaker, plan_boot, plan_rescue_disks
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecord, GuestRecords, RescueRecord

log = logging.getLogger(__name__)


class RescueDisks:
    """Makes and removes the rescue disks of guests."""

    def __init__(
        self,
        layout: Layout,
        records: GuestRecords,
        disks: DiskMaker,
        files: ThreadPool,
        settings: LibvirtSettings,
        vendor_data: VendorDataSource,
    ) -> None:
        self._layout = layout
        self._records = records
        self._disks = disks
        self._files = files
        self._settings = settings
        self._vendor_data = vendor_data

    async def make(self, plan: GuestPlan, record: GuestRecord, launcher: Launcher) -> GuestRecord:
        """Make the rescue disk, and a config drive if the guest has one; return the record with which it is started.

        The guest may run from its own disks meanwhile. What this host cannot do is refused before anything is made.
        """
        assert plan.rescue_image is not None
        disks = plan_rescue_disks(record.disks, plan.rescue_image, self._settings)
        boot = plan_boot(plan.rescue_image, rescue=True)
        rescued = msgspec.structs.replace(record, rescue=RescueRecord(epoch=plan.epoch, disks=disks, boot=boot))
        launcher.check(plan, rescued)
        await self._files.run(self._records.save, rescued)
        await self._files.run(self._disks.remove_rescue_files, record.uuid)
        await self._disks.make_rescue_disk(plan, disks, boot)
        if any(disk.file == RESCUE_CONFIG_DRIVE for disk in disks):
            await make_config_drive(plan, self._vendor_data, self._layout, self._files, RESCUE_CONFIG_DRIVE)
        return rescued

    async def complete(self, uuid: str) -> None:
        """Note that the guest runs from its rescue disk."""
        await self._files.run(self._complete, uuid)

    async def remove(self, record: GuestRecord) -> GuestRecord:
        """Remove what was made for a rescue; return the record with which the guest is started from its own disks."""
        await self._files.run(self._disks.remove_rescue_files, record.uuid)
        own = msgspec.structs.replace(record, rescue=None)
        await self._files.run(self._records.save, own)
        return own

    async def remove_after_failure(self, uuid: str) -> None:
        """Remove what was made for a rescue that has failed; if that fails, the next start of the guest does it."""
        try:
            record = await self._files.run(self._records.load, uuid)
            if record is not None and record.rescue is not None:
                await self.remove(record)
        except Exception as error:  # the caller raises why the rescue has failed
            log.warning("the rescue disk of guest %s is not removed before its next start: %s", uuid, error)

    def _complete(self, uuid: str) -> None:
        record = self._records.load(uuid)
        if record is not None and record.rescue is not None:
            rescue = msgspec.structs.replace(record.rescue, complete=True)
            self._records.save(msgspec.structs.replace(record, rescue=rescue))
