"""Starting guests: reserving their CPUs, defining them, and running them once the network has confirmed their ports."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from micronova.exporter.client import VolumeAccess
from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.errors import (
    BuildAborted,
    InsufficientResources,
    Invalid,
    MicronovaError,
    NotSupported,
    Unavailable,
)
from micronova.objects.volume import AttachedVolume, NBDConnection
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.libvirt.client.binding import Domain
from micronova.virt.libvirt.client.connection import Connection, Lane
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.definition.compose import HostProfile, compose, memory_limit
from micronova.virt.libvirt.definition.guest_xml import domain_xml
from micronova.virt.libvirt.definition.topology import pins_of
from micronova.virt.libvirt.definition.volumes import volume_source
from micronova.virt.libvirt.guests import domains, reconnecting
from micronova.virt.libvirt.guests.access import GuestAccess, exists_already
from micronova.virt.libvirt.guests.mediated_devices import MediatedDevices
from micronova.virt.libvirt.guests.volume_secrets import known_secrets
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
        connection: Connection,
        guests: GuestAccess,
        records: GuestRecords,
        files: ThreadPool,
        volumes: VolumeAccess | None,
    ) -> None:
        """`volumes` lets guests use volumes of this machine; None if nothing serves any."""
        self._volumes = volumes
        self._profile: HostProfile | None = None
        self._ids = range(0)
        self._connection = connection
        self._guests = guests
        self._records = records
        self._files = files
        self._reserving = asyncio.Lock()
        self.mdevs = MediatedDevices(connection, guests.cloud)

    def prepare(self, profile: HostProfile, ids: range) -> None:
        """Set the profile of the host and the range of user ids of guests. No guest is started before."""
        self._profile = profile
        self._ids = ids

    @property
    def is_ready(self) -> bool:
        """Whether the profile of the host is set."""
        return self._profile is not None

    @property
    def profile(self) -> HostProfile:
        """The profile of the host; raise DriverFailed if it is not set yet."""
        if self._profile is None:
            raise DriverFailed("The driver is not ready.")
        return self._profile

    async def reserve(self, plan: GuestPlan, record: GuestRecord) -> GuestRecord:
        """Check that the guest can be defined here, reserve its CPUs, and write its record."""
        # One at a time: two guests must not get the same CPU.
        async with self._reserving:
            pins = await self._checked_pins(plan, record)
            record = msgspec.structs.replace(record, pins=pins, uid=await self._files.run(self._free_id))
            try:
                await self._files.run(self._records.create, record)
            except FileExistsError:
                raise exists_already(record.uuid) from None
        return record

    def check(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Raise an error if a guest cannot be started here with these disks."""
        compose(self.profile, plan.instance, record, plan.network_info, plan.volumes)

    def renew(self, plan: GuestPlan, record: GuestRecord, before: GuestRecord) -> GuestRecord:
        """Return the record of a guest that takes the CPUs and the user of the one before; check that it fits here."""
        record = msgspec.structs.replace(record, pins=before.pins, uid=before.uid)
        self.check(plan, record)
        return record

    async def reserve_again(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Reserve the CPUs of a guest that was resized, and replace its record."""
        async with self._reserving:
            pins = await self._checked_pins(plan, msgspec.structs.replace(record, pins=None))
            await self._files.run(self._records.save, msgspec.structs.replace(record, pins=pins))

    async def _checked_pins(self, plan: GuestPlan, record: GuestRecord) -> PinRecord:
        """Return the CPUs and devices that the order names; raise an error if the guest cannot have them."""
        try:
            pins = pins_of(plan.instance)
        except Invalid as error:
            raise BuildAborted(error.message) from error
        cpus, devices, mdevs = await self._files.run(self._taken, record)
        wanted = {*pins.vcpus.values(), *pins.emulator}
        # They are claimed for this guest, so the other one is about to leave, such as after a live migration.
        if both := sorted(wanted & cpus):
            log.warning("CPUs %s of guest %s belong to another one", both, record.uuid)
            raise Unavailable("CPUs of the server belong to another guest, which has to leave.")
        if unknown := sorted(wanted - set(parse_cpus(self.profile.settings.cpu_dedicated_set))):
            raise InsufficientResources(
                "CPUs of the server are no longer for pinned guests.", details=f"CPUs {', '.join(map(str, unknown))}"
            )
        if same := sorted({*pins.devices} & devices):
            log.warning("PCI devices %s of guest %s belong to another one", same, record.uuid)
            raise Unavailable("PCI devices of the server belong to another guest, which has to leave.")
        pins = msgspec.structs.replace(pins, mdevs=await self.mdevs.choose(plan, mdevs))
        compose(
            self.profile, plan.instance, msgspec.structs.replace(record, pins=pins), plan.network_info, plan.volumes
        )
        return pins

    async def launch(self, plan: GuestPlan, record: GuestRecord, *, start: bool = True) -> GuestRecord:
        """Define a guest by its plan, and start it unless told otherwise; return its record as it is then."""
        record = await self._admit(record, resumed=False)
        await self.admit_to_volumes(record, plan.volumes)
        xml = domain_xml(compose(self.profile, plan.instance, record, plan.network_info, plan.volumes))
        await self.mdevs.make(record)
        await self._connection.change(
            record.uuid, lambda connection: domains.define(connection, xml), "define the guest"
        )
        if start:
            await self._start(plan, START_TIMEOUT, domains.power_off)
        return record

    async def admit_to_volumes(self, record: GuestRecord, volumes: Iterable[AttachedVolume]) -> None:
        """Let a guest's user connect to volumes that are served on this machine."""
        for volume in volumes:
            if not isinstance(volume.connection, NBDConnection) or volume.connection.socket_path is None:
                continue  # a server elsewhere decides itself
            if self._volumes is None or record.uid is None:
                raise NotSupported("Nothing serves volumes to guests of this host.")
            await self._volumes.allow(volume.volume_id, record.uid, encrypted=volume.connection.encrypted)

    async def bar_from_volumes(self, record: GuestRecord, volume: AttachedVolume | None = None) -> None:
        """Let a guest's user connect no more: to one volume, or to any."""
        if self._volumes is not None and record.uid is not None:
            await self._volumes.refuse(record.uid, None if volume is None else volume.volume_id)

    async def stop(self, uuid: str) -> None:
        """Stop a guest at once, if it runs, and discard its saved memory."""
        await self._guests.change_if_there(uuid, domains.power_off, "stop the guest", timeout=START_TIMEOUT)

    async def restore(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Start a guest from its saved memory, with the interfaces that it had when it was saved."""
        record = await self._admit(record, resumed=True)
        await self.admit_to_volumes(record, plan.volumes)
        timeout = START_TIMEOUT + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
        # If the network does not confirm, the memory is saved again, not lost.
        await self._start(plan, timeout, domains.save, lane="memory")

    async def resume(self, uuid: str) -> None:
        """Let the CPUs of a paused guest run."""
        await self._files.run(self.profile.layout.seal, uuid)
        await self._guests.change(uuid, domains.resume, "resume the guest")

    async def _start(
        self, plan: GuestPlan, timeout: float, undo: Callable[[Domain], None], *, lane: Lane = "work"
    ) -> None:
        """Start a defined guest; it is paused until the network has confirmed its interfaces."""
        uuid = plan.instance.uuid
        async with known_secrets(self._connection, uuid, plan.volumes):
            await self._guests.change(uuid, domains.start, "start the guest", timeout=timeout, lane=lane)
        most = memory_limit(plan.instance.flavor.ram)
        try:
            if not await self._guests.change(
                uuid, lambda domain: domains.limit_memory(domain, most), "limit the guest's memory"
            ):
                log.debug("guest %s has no limit of memory: its libvirt has no control groups", uuid)
            for volume in plan.volumes:
                await self._keep_connected(uuid, volume)
            await plan.plugged()
            await self.resume(uuid)
        except BaseException:
            try:
                await self._guests.change(uuid, undo, "stop the guest", timeout=timeout, lane=lane)
            except MicronovaError as error:
                log.warning("guest %s could not be stopped after a failed start: %s", uuid, error)
            raise

    async def _keep_connected(self, uuid: str, volume: AttachedVolume) -> None:
        source, readonly = volume_source(volume), volume.read_only
        await self._guests.change(
            uuid,
            lambda domain: reconnecting.wait_for(domain, source, readonly=readonly),
            "keep a volume of the guest connected",
        )

    async def _admit(self, record: GuestRecord, *, resumed: bool) -> GuestRecord:
        """Write down how a guest is started, and let its user use its files; one of an older version gets a user."""
        async with self._reserving:
            uid = await self._files.run(self._free_id) if record.uid is None else record.uid
            started = msgspec.structs.replace(record, resumed=resumed, uid=uid)
            if started != record:
                await self._files.run(self._records.save, started)
        await self._files.run(self._share, started)
        return started

    def _share(self, record: GuestRecord) -> None:
        layout = self.profile.layout
        for disk in record.attached:
            if disk.backing is not None:
                layout.link_base(record.uuid, disk.backing, disk.file)
        if record.uid is not None:
            files = {disk.file: disk.device != "cdrom" for disk in record.attached}
            layout.admit(record.uuid, record.uid, files)

    def _free_id(self) -> int | None:
        return free_id(self._ids, self._records.taken_ids()) if self.profile.facts.is_qemu else None

    def _taken(self, guest: GuestRecord) -> tuple[set[int], set[str], set[str]]:
        """Return the CPUs, PCI devices and mediated devices of others, and those that the guest had before."""
        pins = [pin for record in self._records if record.uuid != guest.uuid for pin in (record.pins, record.kept_pins)]
        known = [pin for pin in (*pins, guest.kept_pins) if pin is not None]
        return (
            {cpu for pin in known for cpu in (*pin.vcpus.values(), *pin.emulator)},
            {device for pin in known for device in pin.devices},
            {mdev.uuid for pin in known for mdev in pin.mdevs},
        )
