"""Starting guests: reserving CPUs, defining them, and running them once the network has confirmed their ports."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from micronova.objects.errors import Conflict, MicronovaError
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.definition.compose import HostProfile, compose, memory_limit
from micronova.virt.libvirt.definition.guest_xml import domain_xml
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.storage.guest_users import free_id
from micronova.virt.libvirt.storage.records import GuestRecord, GuestRecords, PinRecord

log = logging.getLogger(__name__)

START_TIMEOUT: Final = 180.0
SAVE_SECONDS_PER_GB: Final = 60.0
"""Time for saving or restoring memory on a slow disk, in addition to the timeout of any call."""


class Launcher:
    """Starts guests on one host."""

    def __init__(
        self,
        host: HostProfile,
        connection: Connection,
        guests: GuestAccess,
        records: GuestRecords,
        files: ThreadPool,
        cloud: str,
        ids: range,
    ) -> None:
        self._host = host
        self._ids = ids
        self._connection = connection
        self._guests = guests
        self._records = records
        self._files = files
        self._cloud = cloud
        self._placing = asyncio.Lock()

    async def reserve(self, plan: GuestPlan, record: GuestRecord) -> GuestRecord:
        """Check that the guest can be defined here, reserve its CPUs, and write its record."""
        # One at a time: two guests must not get the same CPU.
        async with self._placing:
            taken = await self._files.run(self._taken_cpus)
            cpus = compose(self._host, plan.instance, record, plan.network_info, taken).cpus
            places = {cell.id: cell.host for cell in cpus.cells if cell.host is not None}
            pins = PinRecord(vcpus=cpus.pins, cells=places, emulator=cpus.emulator)
            record = msgspec.structs.replace(record, pins=pins, uid=await self._files.run(self._free_id))
            try:
                await self._files.run(self._records.create, record)
            except FileExistsError:
                raise Conflict(f"A guest {record.uuid} exists already on {record.host}.") from None
        return record

    async def launch(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Define a guest by its plan, and start it."""
        record = await self._admit(record, resumed=False)
        xml = domain_xml(compose(self._host, plan.instance, record, plan.network_info))
        await self._connection.change(
            record.uuid, lambda connection: domains.define(connection, xml), "define the guest"
        )
        await self._start(plan, START_TIMEOUT, domains.power_off)

    async def relaunch(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Stop a guest, if it runs, and launch it."""

        def off(connection: Connect) -> None:
            domain = domains.find_ours(connection, record.uuid, self._cloud)
            if domain is not None:
                domains.power_off(domain)

        await self._connection.change(record.uuid, off, "stop the guest", timeout=START_TIMEOUT)
        await self.launch(plan, record)

    async def restore(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Start a guest from its saved memory, with the interfaces that it had when it was saved."""
        record = await self._admit(record, resumed=True)
        timeout = START_TIMEOUT + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
        # If the network does not confirm, the memory is saved again, not lost.
        await self._start(plan, timeout, domains.save)

    async def resume(self, uuid: str) -> None:
        """Let the CPUs of a paused guest run."""
        await self._files.run(self._host.layout.seal, uuid)
        await self._guests.change(uuid, domains.resume, "resume the guest")

    async def _start(self, plan: GuestPlan, timeout: float, undo: Callable[[Domain], None]) -> None:
        """Start a defined guest; it is paused until the network has confirmed its interfaces."""
        uuid = plan.instance.uuid
        await self._guests.change(uuid, domains.start, "start the guest", timeout=timeout)
        most = memory_limit(plan.instance.flavor.ram)
        try:
            if not await self._guests.change(
                uuid, lambda domain: domains.limit_memory(domain, most), "limit the guest's memory"
            ):
                log.debug("guest %s has no limit of memory: its libvirt has no control groups", uuid)
            await plan.plugged()
            await self.resume(uuid)
        except BaseException:
            try:
                await self._guests.change(uuid, undo, "stop the guest", timeout=timeout)
            except MicronovaError as error:
                log.warning("guest %s could not be stopped after a failed start: %s", uuid, error)
            raise

    async def _admit(self, record: GuestRecord, *, resumed: bool) -> GuestRecord:
        """Write down how a guest is started, and let its user use its files; one of an older version gets a user."""
        async with self._placing:
            uid = await self._files.run(self._free_id) if record.uid is None else record.uid
            started = msgspec.structs.replace(record, resumed=resumed, uid=uid)
            if started != record:
                await self._files.run(self._records.save, started)
        await self._files.run(self._share, started)
        return started

    def _share(self, record: GuestRecord) -> None:
        layout = self._host.layout
        for disk in record.disks:
            if disk.backing is not None:
                layout.link_base(record.uuid, disk.backing)
        if record.uid is not None:
            files = {disk.file: disk.device != "cdrom" for disk in record.disks}
            layout.admit(record.uuid, record.uid, files)

    def _free_id(self) -> int | None:
        return free_id(self._ids, self._records.taken_ids()) if self._host.facts.is_qemu else None

    def _taken_cpus(self) -> frozenset[int]:
        pins = [record.pins for record in self._records if record.pins is not None]
        return frozenset(cpu for pin in pins for cpu in (*pin.vcpus.values(), *pin.emulator))
