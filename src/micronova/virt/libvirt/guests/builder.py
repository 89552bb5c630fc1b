"""Making guests, rebuilding them, and removing them.

A guest is made in this order, so that it is found and can be removed wherever an agent dies:

    record → disks → config drive → definition → started, paused → network confirms → runs → record says complete
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from micronova.conf.libvirt import LibvirtSettings
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects.errors import Conflict
from micronova.placement import extra_specs
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.definition.compose import domain_name
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.launcher import START_TIMEOUT, Launcher
from micronova.virt.libvirt.guests.power import GuestPower
from micronova.virt.libvirt.storage.config_drive import make_config_drive
from micronova.virt.libvirt.storage.disks import DiskMaker, plan_boot, plan_disks
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecord, GuestRecords

log = logging.getLogger(__name__)


class GuestBuilder:
    """Makes and removes the guests of one host."""

    def __init__(
        self,
        launcher: Launcher,
        power: GuestPower,
        guests: GuestAccess,
        records: GuestRecords,
        disks: DiskMaker,
        layout: Layout,
        files: ThreadPool,
        settings: LibvirtSettings,
        vendor_data: VendorDataSource,
        *,
        logs: Path | None,
    ) -> None:
        """Build guests; `logs` is the directory of QEMU's logs, if they are this cloud's."""
        self._launcher = launcher
        self._power = power
        self._guests = guests
        self._records = records
        self._disks = disks
        self._layout = layout
        self._files = files
        self._settings = settings
        self._vendor_data = vendor_data
        self._logs = logs

    async def spawn(self, plan: GuestPlan, *, start: bool = True) -> None:
        """Make a guest, and start it unless told otherwise."""
        await self._guests.require_unknown(plan.instance.uuid)
        # `reserve` refuses what this host cannot give before anything is made.
        record = await self._launcher.reserve(plan, self._planned(plan))
        await self._make(plan, record, start=start)

    async def rebuild(
        self,
        plan: GuestPlan,
        *,
        start: bool,
        timeout: float,
        stopping: Callable[[], Awaitable[None]],
        removed: Callable[[], Awaitable[None]],
    ) -> None:
        """Make a guest anew in the place of the old one: it keeps its CPUs and its user.

        The new record is written before the old disks are removed, so the epoch of the record says which disks the
        guest has. The image is downloaded before, because it may take long or fail.
        """
        uuid = plan.instance.uuid
        before = await self._files.run(self._records.load, uuid)
        if before is None:
            await stopping()
            await self.destroy(uuid)  # what a removal that was interrupted has left
            await removed()
            await self.spawn(plan, start=start)
            return
        if not self._guests.owns(before):
            raise Conflict(f"The guest {uuid} belongs to another cloud or host.")
        record = self._launcher.renewed(plan, self._planned(plan), before)
        async with self._disks.image_cached(plan, record):
            await stopping()
            await self._power.off(uuid, timeout)
            await self._undefine(uuid)
            await self._files.run(self._records.renew, record)
            await removed()
            await self._make(plan, record, start=start)

    async def destroy(self, uuid: str) -> None:
        """Remove a guest with its definition, disks and logs."""
        record = await self._files.run(self._records.load, uuid)
        if record is None:
            if await self._files.run(self._layout.guest(uuid).exists):
                raise DriverFailed(f"The record of guest {uuid} is damaged, so its files are not removed.")
            record = await self._files.run(self._records.load_removed, uuid)
        if record is not None and not self._guests.owns(record):
            log.warning("guest %s is not removed: its record names another cloud or host", uuid)
            return
        await self._undefine(uuid)
        if record is not None:
            await self._launcher.mdevs.remove(uuid, record.pins, record.kept_pins)
            await self._launcher.revoke_volumes(record)  # before its user's number is free for another guest
        # The record is removed last: if this agent dies, the next one finds the guest by it.
        await self._files.run(self._remove_logs, uuid)
        if record is not None:
            await self._files.run(self._records.remove, uuid)

    def _planned(self, plan: GuestPlan) -> GuestRecord:
        """Return the record of a guest that is to be made."""
        instance = plan.instance
        return GuestRecord(
            uuid=instance.uuid,
            cloud=self._guests.cloud,
            host=self._guests.host,
            node=instance.node or self._guests.host,
            epoch=plan.epoch,
            name=instance.name,
            vcpus=instance.flavor.vcpus,
            memory_mb=instance.flavor.ram,
            local_gb=instance.flavor.resources().get("DISK_GB", 0),
            claimed=extra_specs.node_resources(instance.flavor, instance.image),
            disks=plan_disks(plan, self._settings),
            boot=plan_boot(instance.image),
        )

    async def _make(self, plan: GuestPlan, record: GuestRecord, *, start: bool) -> None:
        """Make everything of a guest that has a record, and perhaps start it."""
        await self._disks.make(plan, record)
        if any(disk.role == "config" for disk in record.disks):
            await make_config_drive(plan, self._vendor_data, self._layout, self._files)
        record = await self._launcher.launch(plan, record, start=start)
        await self._files.run(self._records.save, msgspec.structs.replace(record, complete=True))

    async def _undefine(self, uuid: str) -> None:
        """Stop a guest and remove its definition, if there is one."""
        await self._guests.change_if_there(uuid, domains.remove, "remove the guest", timeout=START_TIMEOUT)

    def _remove_logs(self, uuid: str) -> None:
        """Remove QEMU's log of a guest. Blocks."""
        if self._logs is not None:
            for file in self._logs.glob(f"{domain_name(uuid)}.log*"):
                file.unlink(missing_ok=True)
