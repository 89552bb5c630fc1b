"""Volumes of guests that exist: given, taken, exchanged and enlarged, whether the guest runs or not.

A guest gets the volumes of its plan whenever it is started. What is done here changes the running guest and its
definition, so that both agree until then.
"""

import asyncio
import logging
from typing import Final

from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict, MicronovaError, NotSupported, Unavailable
from micronova.objects.volume import AttachedVolume, NBDConnection
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.libvirt.client.binding import Domain
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.events import EventQueues
from micronova.virt.libvirt.client.library import has_code, load
from micronova.virt.libvirt.client.xmltree import child, element, unparse
from micronova.virt.libvirt.definition import device_xml
from micronova.virt.libvirt.definition.compose import volume_bus
from micronova.virt.libvirt.definition.device_xml import disk
from micronova.virt.libvirt.definition.volumes import volume_disk, volume_source, wanted_name
from micronova.virt.libvirt.guests import domains, reconnecting
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.launcher import Launcher
from micronova.virt.libvirt.guests.volume_secrets import known_secrets

log = logging.getLogger(__name__)

ATTEMPTS: Final = 4
ATTEMPT_SECONDS: Final = 15.0
"""How long a guest may take to release a volume before it is asked again."""
PIVOT_SECONDS: Final = 60.0
"""How long both volumes may take to become equal once the copy has caught up."""
COPY_POLL_SECONDS: Final = 0.5


class GuestVolumes:
    """Changes the volumes of the guests of one host."""

    def __init__(
        self, connection: Connection, queues: EventQueues, clock: Clock, guests: GuestAccess, launcher: Launcher
    ) -> None:
        self._connection = connection
        self._queues = queues
        self._clock = clock
        self._guests = guests
        self._launcher = launcher

    async def attach(self, plan: GuestPlan, volume: AttachedVolume) -> None:
        """Give a guest a volume, unless it has it; after a failure it has not got it."""
        uuid, export = plan.instance.uuid, volume.connection.source_name
        record, _ = await self._guests.require(uuid)
        bus = volume_bus(self._launcher.profile, plan.instance, volume)
        had = await self._guests.change(uuid, lambda domain: _has(domain, export), "find the volume")
        await self._launcher.admit_to_volumes(record, (volume,))
        try:
            async with known_secrets(self._connection, uuid, (volume,)):
                await self._guests.change(uuid, lambda domain: self._plug(domain, volume, bus), "attach the volume")
        except BaseException:
            if not had:
                await asyncio.shield(self._take_back(uuid, volume))
            raise

    async def _take_back(self, uuid: str, volume: AttachedVolume) -> None:
        """Take a volume that could not be attached: it will be another guest's."""
        try:
            await self.detach(uuid, volume)
        except MicronovaError as error:
            log.warning("guest %s keeps volume %s, which it should not have: %s", uuid, volume.volume_id, error)

    def _plug(self, domain: Domain, volume: AttachedVolume, bus: str) -> None:
        library, export = load(), volume.connection.source_name
        scopes = {False: library.VIR_DOMAIN_AFFECT_CONFIG, True: library.VIR_DOMAIN_AFFECT_LIVE}
        lacking = [live for live in scopes if not live or domain.isActive()]
        lacking = [live for live in lacking if domains.volume_xml(domain, export, live=live) is None]
        target = wanted_name(volume, bus, domains.disk_targets(domain))
        xml = unparse(disk(volume_disk(volume, bus, target, None), self._launcher.profile.facts.virt_type))
        for live in sorted(lacking, reverse=True):  # the running guest first: it may refuse
            domain.attachDeviceFlags(xml, scopes[live])
        if domain.isActive():
            reconnecting.wait_for(domain, volume_source(volume), readonly=volume.read_only)

    async def detach(self, uuid: str, volume: AttachedVolume) -> None:
        """Take a volume from a guest. One that runs must release it, and is asked several times."""
        record, _ = await self._guests.require(uuid)
        export = volume.connection.source_name
        await self._unplug(uuid, export)
        await self._launcher.bar_from_volumes(record, volume)

    async def _unplug(self, uuid: str, export: str) -> None:
        with self._queues.watch(uuid) as watch:
            for _ in range(ATTEMPTS):
                if not await self._guests.change(uuid, lambda domain: _ask_back(domain, export), "detach the volume"):
                    return
                until = self._clock.monotonic() + ATTEMPT_SECONDS
                while (left := until - self._clock.monotonic()) > 0:
                    await watch.next(min(left, 2.0))
                    if not await self._guests.change(uuid, lambda domain: _has(domain, export), "find the volume"):
                        break
        raise DriverFailed("The guest does not release the volume.")

    async def swap(self, plan: GuestPlan, old: AttachedVolume, new: AttachedVolume) -> None:
        """Copy a volume to another one while the guest uses it, and let the guest use the other one."""
        uuid = plan.instance.uuid
        if old.connection.encrypted or new.connection.encrypted:
            raise NotSupported("This host does not exchange encrypted volumes.")
        larger = old.size_gb != new.size_gb  # the API refuses a smaller one
        if larger and not isinstance(new.connection, NBDConnection):
            raise NotSupported("This host exchanges such a volume for one of the same size only.")
        record, _ = await self._guests.require(uuid)
        before, after = old.connection.source_name, new.connection.source_name
        await self._launcher.admit_to_volumes(record, (new,))
        bus = volume_bus(self._launcher.profile, plan.instance, new)
        target = await self._guests.change(
            uuid, lambda domain: domains.volume_target(domain, before), "find the volume"
        )
        if target is not None:
            try:
                async with known_secrets(self._connection, uuid, (new,)):
                    await self._copy(uuid, target, new, larger=larger)
            except BaseException:
                await asyncio.shield(self._give_up(uuid, target))
                await self._launcher.bar_from_volumes(record, new)
                raise
        elif not await self._guests.change(uuid, lambda domain: _has(domain, after), "find the volume"):
            raise Conflict(f"The guest {uuid} does not use the volume, or does not run: it cannot be copied.")
        try:
            await self._guests.change(uuid, lambda domain: _keep_connected(domain, new), "keep the volume connected")
            await self._guests.change(
                uuid, lambda domain: self._redefine(domain, before, new, bus), "define the new volume"
            )
            if larger and new.size_gb is not None:
                size = new.size_gb << 30
                await self._guests.change(uuid, lambda domain: _resize(domain, new, size), "extend the new volume")
        except MicronovaError as error:
            # The guest uses the new volume: a failure would let it be taken from the guest. The order is repeated.
            raise Unavailable(f"The new volume of the guest cannot be defined now: {error.message}") from error
        await self._launcher.bar_from_volumes(record, old)

    async def _copy(self, uuid: str, target: str, new: AttachedVolume, *, larger: bool) -> None:
        library = load()
        destination, source = element("disk", type="network"), device_xml.volume_source(volume_source(new))
        if larger:  # QEMU copies to a disk of the same size only: to the beginning of this one
            size = (await self._guests.change(uuid, lambda domain: domain.blockInfo(target), "measure the volume"))[0]
            child(child(source, "slices"), "slice", type="storage", offset=0, size=size)
        destination.append(source)
        child(destination, "driver", type="raw")
        flags = library.VIR_DOMAIN_BLOCK_COPY_REUSE_EXT | library.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
        await self._guests.change(
            uuid, lambda domain: domain.blockCopy(target, unparse(destination), {}, flags), "copy the volume"
        )
        while True:
            job = await self._guests.change(uuid, lambda domain: domain.blockJobInfo(target, 0), "follow the copy")
            if not job:
                raise DriverFailed("The copy of the volume failed.")
            if job["end"] and job["cur"] == job["end"]:
                break
            await self._clock.sleep(COPY_POLL_SECONDS)
        pivot, after = library.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT, new.connection.source_name
        until = self._clock.monotonic() + PIVOT_SECONDS
        while True:
            try:
                await self._guests.change(
                    uuid, lambda domain: domain.blockJobAbort(target, pivot), "change to the new volume"
                )
            except MicronovaError:  # both are not equal yet, or the answer was lost
                if await self._guests.change(uuid, lambda domain: _has(domain, after), "find the volume"):
                    break
                if self._clock.monotonic() > until:
                    raise
                await self._clock.sleep(COPY_POLL_SECONDS)
            else:
                break

    async def _give_up(self, uuid: str, target: str) -> None:
        try:
            await self._guests.change(uuid, lambda domain: domain.blockJobAbort(target, 0), "end the copy")
        except MicronovaError as error:
            log.info("guest %s: there was no copy of %s to end: %s", uuid, target, error)

    def _redefine(self, domain: Domain, before: str, new: AttachedVolume, bus: str) -> None:
        config = load().VIR_DOMAIN_AFFECT_CONFIG
        defined = domains.volume_xml(domain, before, live=False)
        if defined is not None:
            domain.detachDeviceFlags(defined, config)
        if domain.isActive():
            reconnecting.forget(domain, before)
        if domains.volume_xml(domain, new.connection.source_name, live=False) is None:
            target = domains.volume_target(domain, new.connection.source_name) or wanted_name(new, bus, ())
            xml = unparse(disk(volume_disk(new, bus, target, None), self._launcher.profile.facts.virt_type))
            domain.attachDeviceFlags(xml, config)

    async def extend(self, uuid: str, volume: AttachedVolume, size: int) -> None:
        """Let a guest that runs see the new size of a volume; another one sees it when it is started."""
        await self._guests.require(uuid)
        await self._guests.change(uuid, lambda domain: _resize(domain, volume, size), "extend the volume")


def _ask_back(domain: Domain, export: str) -> bool:
    """Ask a guest for a volume, and take it from its definition if it has none; return whether it runs with it."""
    library = load()
    running = domains.volume_xml(domain, export, live=True) if domain.isActive() else None
    if running is not None:
        try:
            domain.detachDeviceFlags(running, library.VIR_DOMAIN_AFFECT_LIVE)
        except Exception as error:
            # It is being removed, or was removed.
            if not has_code(error, "VIR_ERR_DEVICE_MISSING", "VIR_ERR_OPERATION_FAILED", "VIR_ERR_OPERATION_INVALID"):
                raise
        if _has(domain, export):
            return True
    if domain.isActive():
        reconnecting.forget(domain, export)
    defined = domains.volume_xml(domain, export, live=False)
    if defined is not None:
        domain.detachDeviceFlags(defined, library.VIR_DOMAIN_AFFECT_CONFIG)
    return False


def _keep_connected(domain: Domain, volume: AttachedVolume) -> None:
    if domain.isActive():
        reconnecting.wait_for(domain, volume_source(volume), readonly=volume.read_only)


def _has(domain: Domain, export: str) -> bool:
    return bool(domain.isActive()) and domains.volume_xml(domain, export, live=True) is not None


def _resize(domain: Domain, volume: AttachedVolume, size: int) -> None:
    target = domains.volume_target(domain, volume.connection.source_name) if domain.isActive() else None
    if target is not None:
        # A client learns the size of a volume only when it connects.
        reconnecting.wait_for(domain, volume_source(volume), readonly=volume.read_only, again=True)
        domain.blockResize(target, size, load().VIR_DOMAIN_BLOCK_RESIZE_BYTES)
