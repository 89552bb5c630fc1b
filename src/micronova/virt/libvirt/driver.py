"""The libvirt driver: real guests, under QEMU or another hypervisor of libvirt's.

The driver is the contract of `virt/driver.py`. A class of `guests` does the work of each group of methods. The driver
surrounds what changes a guest, so that its power state is reported once when the order ends.

The sub-packages, from the top (pyproject.toml holds the order):

    daemon       the libvirtd that runs the guests: a private one, or an existing one
    guests       finding, making, starting, watching and changing guests
    definition   what a guest's definition contains, and its XML
    storage      the guests' files: records, disks, image cache, config drive
    client       the connection to libvirt, its events, and threads for calls that block
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from micronova.conf.libvirt import LibvirtSettings
from micronova.exporter.client import ExporterClient, VolumeAccess
from micronova.http.image_downloads import stream
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.image import ImageMeta
from micronova.objects.mediated_devices import NO_TYPES, MdevTypes
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, NodeResources
from micronova.objects.pci_devices import DeviceSpec
from micronova.objects.volume import AttachedVolume
from micronova.virt.driver import (
    BootSign,
    CPUTimes,
    DriverEvents,
    GuestPlan,
    RebootType,
    do_nothing,
    implemented,
)
from micronova.virt.libvirt import resources
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.events import EventQueues, GuestEvent
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.daemon.existing import check_reachable, explain_failure
from micronova.virt.libvirt.daemon.private import PrivateLibvirtd
from micronova.virt.libvirt.definition.compose import HostProfile
from micronova.virt.libvirt.definition.guest_cpu import with_all_features
from micronova.virt.libvirt.guests import agent, diagnostics, domains, hotplug
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.boot_signs import boot_signs
from micronova.virt.libvirt.guests.builder import GuestBuilder
from micronova.virt.libvirt.guests.consoles import Consoles
from micronova.virt.libvirt.guests.graceful import GracefulPower
from micronova.virt.libvirt.guests.launcher import START_TIMEOUT, Launcher
from micronova.virt.libvirt.guests.lifecycle import LifecycleReporter
from micronova.virt.libvirt.guests.power import GuestPower
from micronova.virt.libvirt.guests.rescue import Rescuer
from micronova.virt.libvirt.guests.rescue_disks import RescueDisks
from micronova.virt.libvirt.guests.resizing import Resizer
from micronova.virt.libvirt.guests.snapshots import CopiedDisk, Snapshots
from micronova.virt.libvirt.guests.volumes import GuestVolumes
from micronova.virt.libvirt.host import HostFacts, cpu_flags, kvm_group, read_facts
from micronova.virt.libvirt.storage import sandbox
from micronova.virt.libvirt.storage.disks import DiskMaker
from micronova.virt.libvirt.storage.fetch import fetch
from micronova.virt.libvirt.storage.guest_users import guest_ids
from micronova.virt.libvirt.storage.image_cache import ImageCache
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecords
from micronova.virt.libvirt.topology import read_topology

log = logging.getLogger(__name__)

FILE_THREADS: Final = 4


class LibvirtDriver:
    """The driver of one host."""

    verifies_signatures = True
    boots_kernels = True

    def __init__(
        self,
        host: str,
        *,
        settings: LibvirtSettings,
        layout: Layout,
        uri: str,
        daemon: PrivateLibvirtd | None,
        cloud_id: str,
        clock: Clock,
        vendor_data: VendorDataSource,
        image_service: str = "",
        image_ca_file: str = "",
        device_specs: Sequence[DeviceSpec] = (),
        mdev_types: MdevTypes = NO_TYPES,
        volume_access: Path | None = None,
    ) -> None:
        """`volume_access` is the socket of the exporter, which serves volumes to guests of this machine."""
        self.host = host
        self._device_specs = device_specs
        self._mdev_types = mdev_types
        self._vendor_data = vendor_data
        self._settings = settings
        self._layout = layout
        self._daemon = daemon
        self._cloud = cloud_id
        self._clock = clock
        self._files = ThreadPool("libvirt-files", FILE_THREADS)
        self._records = GuestRecords(layout)
        self._queues = EventQueues()
        self._events: DriverEvents | None = None
        self._connection = Connection(
            uri,
            clock,
            on_event=self._on_event,
            on_restored=self._on_restored,
            on_failed=self._on_failed,
            prepare=self._ensure_daemon,
            timeout=settings.call_timeout,
            explain=explain_failure if daemon is None else None,
        )
        self._guests = GuestAccess(self._connection, self._records, self._files, host=host, cloud=cloud_id)
        self._reporter = LifecycleReporter(self._guests, clock)
        self._images = ImageCache(
            layout,
            self._files,
            clock,
            fetcher=partial(fetch, source=partial(stream, service=image_service, ca_file=image_ca_file)),
            max_bytes=partial(layout.part_of_disk, settings.image_cache_max_percent),
            used_by_disks=self._records.backing_files,
            evict=settings.remove_unused_base_images,
        )
        self._disks = DiskMaker(layout, self._images, self._files)
        rescue_disks = RescueDisks(layout, self._records, self._disks, self._files, settings, vendor_data)
        volumes = None if volume_access is None else VolumeAccess(ExporterClient(volume_access))
        self._launcher = Launcher(self._connection, self._guests, self._records, self._files, volumes)
        self._volumes = GuestVolumes(self._connection, self._queues, clock, self._guests, self._launcher)
        graceful = GracefulPower(self._connection, self._queues, clock, cloud_id)
        self._power = GuestPower(self._launcher, self._guests, graceful, rescue_disks, settings)
        self._builder = GuestBuilder(
            self._launcher,
            self._power,
            self._guests,
            self._records,
            self._disks,
            layout,
            self._files,
            settings,
            vendor_data,
            logs=None if daemon is None else daemon.directory / "log" / "qemu",
        )
        self._rescuer = Rescuer(self._launcher, self._power, self._guests, rescue_disks)
        self._resizer = Resizer(self._launcher, self._guests, self._records, self._disks, layout, self._files, settings)
        self._snapshots = Snapshots(self._guests, self._records, layout, self._files, clock)
        self._cleaning: asyncio.Task[None] | None = None
        self._has_qemu_uri = uri.startswith("qemu")
        self._consoles = Consoles(
            self._guests, self._connection, layout, self._files, settings, sockets=self._has_qemu_uri
        )

    # --- the host ---

    async def init_host(self, events: DriverEvents) -> None:
        """Connect, read what the host can do, and remove guests and images that were only partly made."""
        self._events = events
        await self._connection.open()
        missing = sandbox.obstacle()
        if missing is not None:
            raise LibvirtMissing(f"Guests' disks cannot be made safely: {missing}.")
        if self._daemon is None and self._has_qemu_uri:
            await self._files.run(check_reachable, self._layout.root.parent)
        await self._files.run(self._layout.prepare)
        if self._has_qemu_uri:
            await self._files.run(self._layout.check_sharing)
        await self._files.run(self._images.remove_incomplete)
        flags = await self._files.run(cpu_flags)
        own_cgroups = self._daemon is not None and self._daemon.has_cgroups
        cgroups = own_cgroups or self._daemon is None
        if not cgroups:
            log.warning("guests of this host have no limits of memory and CPU: the machine has no control groups")
        facts = await self._connection.read(
            lambda connection: with_all_features(
                connection,
                read_facts(connection, self._settings, flags=flags, cgroups=cgroups, folder=self._layout.base),
                self._settings,
            ),
            "tell what it can do",
            timeout=START_TIMEOUT,
        )
        profile = HostProfile(
            facts=facts,
            settings=self._settings,
            layout=self._layout,
            vnc_on_socket=self._consoles.vnc_on_socket,
            weighs_cpus=own_cgroups,
            kvm_group=kvm_group(facts.virt_type),
        )
        self._launcher.prepare(profile, guest_ids(self._settings.guest_uids, self._cloud))
        await self._snapshots.clear_all()
        self._reporter.start(events)
        if self._settings.remove_unused_base_images:
            self._cleaning = keep_running(self._remove_unused_images, name="libvirt-images", clock=self._clock)
        log.info("host %s runs %s guests with libvirt at %s", self.host, facts.virt_type, self._connection.uri)

    async def close(self) -> None:
        """Disconnect from libvirt; the guests and a private libvirtd continue to run."""
        await end_tasks(self._cleaning)
        await self._snapshots.close()
        await self._reporter.stop()
        await self._consoles.close()
        await self._connection.close()
        await self._vendor_data.close()
        self._files.close()

    def capabilities(self) -> frozenset[str]:
        """Return what is implemented, without what this host cannot do."""
        found = implemented(self)
        if not self._settings.vnc_enabled:
            found -= {"vnc_console"}
        if not self._settings.spice_enabled:
            found -= {"spice_console"}
        if self._launcher.is_ready and not self._facts.is_qemu:
            found -= {
                "serial_console",
                "console_log",
                "boot_signs",
                "snapshot",
                "quiesce",
                "admin_password",
                "crash_dump",
                "volumes",
            }
        return found

    async def get_available_resources(self) -> list[NodeResources]:
        """Return the host as one node."""
        defined = await self._connection.read(domains.describe_all, "list its guests")
        running = {info.uuid: (info.vcpus, info.memory_mb) for info in defined if info.active}
        topology = await self._connection.read(
            lambda connection: read_topology(connection, self._settings, self._device_specs, self._mdev_types),
            "describe its NUMA nodes and devices",
        )
        found = await self._files.run(
            lambda: resources.node_resources(
                self.host,
                self._cloud,
                self._facts,
                self._settings,
                self._layout,
                records=self._records,
                running=running,
                topology=topology,
            )
        )
        return [found]

    async def get_host_cpu_stats(self) -> CPUTimes:
        """Return the times of the machine's processors."""
        return await self._connection.read(resources.cpu_times, "measure its processors")

    async def get_host_uptime(self) -> str:
        """Return the uptime of the machine."""
        return await self._files.run(resources.uptime)

    # --- guests ---

    async def list_guests(self) -> list[Guest]:
        """Return the guests that have a record or are known to libvirt as this cloud's."""
        return await self._guests.all()

    async def info(self, uuid: str) -> Guest | None:
        """Return a guest, or None."""
        return await self._guests.get(uuid)

    async def spawn(self, plan: GuestPlan) -> None:
        """Make a guest and start it."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._builder.spawn(plan)

    async def rebuild(
        self,
        plan: GuestPlan,
        *,
        start: bool,
        timeout: float,
        stopping: Callable[[], Awaitable[None]],
        removed: Callable[[], Awaitable[None]],
    ) -> None:
        """Make a guest anew in the place of the old one."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._builder.rebuild(plan, start=start, timeout=timeout, stopping=stopping, removed=removed)

    async def destroy(self, uuid: str) -> None:
        """Remove a guest with its definition, disks and logs."""
        async with self._reporter.changing(uuid):
            await self._builder.destroy(uuid)
        self._reporter.forget(uuid)

    # --- power ---

    async def power_on(self, plan: GuestPlan) -> None:
        """Start a guest that does not run, or resume one that is paused."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._power.on(plan)

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Ask a guest to shut down, and stop it if it does not."""
        async with self._reporter.changing(uuid):
            await self._power.off(uuid, timeout)

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Restart a guest; one that does not react to a soft reboot gets a hard one."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._power.reboot(plan, kind)

    async def pause(self, uuid: str) -> None:
        """Stop the guest's CPUs."""
        async with self._reporter.changing(uuid):
            await self._power.pause(uuid)

    async def unpause(self, uuid: str) -> None:
        """Let the guest's CPUs run again."""
        async with self._reporter.changing(uuid):
            await self._power.unpause(uuid)

    async def suspend(self, uuid: str) -> None:
        """Save the guest's memory to disk and stop it."""
        async with self._reporter.changing(uuid):
            await self._power.suspend(uuid)

    async def resume(self, plan: GuestPlan) -> None:
        """Restore the guest's memory from disk; it has the interfaces that it had when it was suspended."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._power.resume(plan)

    # --- images and repair ---

    async def snapshot(self, plan: GuestPlan) -> CopiedDisk:
        """Copy the guest's root disk; a guest that runs goes on."""
        return await self._snapshots.take(plan)

    async def quiesce(self, uuid: str) -> None:
        """Have the guest's agent freeze its file systems."""
        await self._snapshots.quiesce(uuid)

    async def unquiesce(self, uuid: str) -> None:
        """Have the guest's agent thaw its file systems."""
        await self._snapshots.unquiesce(uuid)

    async def rescue(self, plan: GuestPlan, timeout: float, *, stopping: Callable[[], None] = do_nothing) -> None:
        """Boot a guest from a rescue disk; its own disks are as its record has them, and nothing else is changed."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._rescuer.rescue(plan, timeout, stopping)

    async def unrescue(self, plan: GuestPlan) -> None:
        """Boot a guest from its own disks, unless it runs from them, and remove the rescue disk."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._rescuer.unrescue(plan)

    async def set_admin_password(self, plan: GuestPlan, password: str) -> None:
        """Have the guest's agent set the password of its administrator."""
        user = agent.administrator(plan.instance)
        await self._guests.change(
            plan.instance.uuid,
            lambda domain: agent.set_password(domain, user, password),
            "set a password in the guest",
            lane="agent",
        )

    async def trigger_crash_dump(self, uuid: str) -> None:
        """Send a guest a non-maskable interrupt."""
        await self._guests.change(uuid, domains.inject_nmi, "interrupt the guest")

    # --- size ---

    async def resize(self, plan: GuestPlan) -> None:
        """Give a guest that is off another size; what it was is kept."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._resizer.resize(plan)

    async def confirm_resize(self, uuid: str) -> None:
        """Remove what a guest was before it was resized."""
        await self._resizer.confirm(uuid)

    async def revert_resize(self, plan: GuestPlan) -> None:
        """Make a guest what it was before it was resized."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._resizer.revert(plan)

    # --- interfaces ---

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface; it has no link before the network has confirmed it."""
        uuid = plan.instance.uuid
        async with self._reporter.changing(uuid):
            await self._guests.require(uuid)
            linked = self._settings.interfaces_linked
            await hotplug.attach(self._connection, self._cloud, plan, vif, self._facts.virt_type, linked=linked)

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Unplug an interface."""
        async with self._reporter.changing(uuid):
            await self._guests.require(uuid)
            await hotplug.detach(self._connection, self._queues, self._clock, self._cloud, uuid, vif.mac_address)

    # --- volumes ---

    async def attach_volume(self, plan: GuestPlan, volume: AttachedVolume) -> None:
        """Give a guest a volume."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._volumes.attach(plan, volume)

    async def detach_volume(self, uuid: str, volume: AttachedVolume) -> None:
        """Take a volume from a guest, which has to release it."""
        async with self._reporter.changing(uuid):
            await self._volumes.detach(uuid, volume)

    async def swap_volume(self, plan: GuestPlan, old: AttachedVolume, new: AttachedVolume) -> None:
        """Copy a volume to another one, which the guest uses from then on."""
        async with self._reporter.changing(plan.instance.uuid):
            await self._volumes.swap(plan, old, new)

    async def extend_volume(self, uuid: str, volume: AttachedVolume, size: int) -> None:
        """Let a guest see the new size of a volume."""
        await self._volumes.extend(uuid, volume, size)

    # --- consoles and measurements ---

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Return what the guest wrote to its first serial port."""
        return await self._consoles.output(uuid, length)

    async def get_vnc_console(self, uuid: str) -> ConsoleEndpoint:
        """Return where the guest's VNC console is."""
        return await self._consoles.vnc(uuid)

    async def get_spice_console(self, uuid: str) -> ConsoleEndpoint:
        """Return where the guest's SPICE console is."""
        return await self._consoles.spice(uuid)

    async def get_serial_console(self, uuid: str, number: int = 0) -> ConsoleEndpoint:
        """Return where the console of one of the guest's serial ports is."""
        return await self._consoles.serial(uuid, number)

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Return the guest's statistics."""
        hypervisor = self._facts.virt_type
        return await self._guests.read(
            uuid, lambda domain: diagnostics.diagnose(domain, hypervisor=hypervisor), "measure the guest"
        )

    async def cache_image(self, image: ImageMeta, url: str | None) -> bool:
        """Fetch an image to the cache."""
        return await self._images.fetch(image, url)

    async def boot_signs(self, uuids: Collection[str]) -> dict[str, BootSign]:
        """Return which guests have begun to boot, as their disks and networks show."""
        return await boot_signs(self._connection, self._records, self._files, self._cloud, uuids)

    # --- internal ---

    @property
    def _facts(self) -> HostFacts:
        return self._launcher.profile.facts

    async def _ensure_daemon(self) -> None:
        if self._daemon is not None:
            await self._files.run(self._daemon.ensure)

    def _on_event(self, event: GuestEvent) -> None:
        self._queues.put(event)
        self._reporter.check_soon(event.uuid)

    def _on_restored(self) -> None:
        # Events were lost while there was no connection.
        self._reporter.check_all_soon()

    def _on_failed(self, message: str) -> None:
        if self._events is not None:
            self._events.connection_failed(message)

    async def _remove_unused_images(self) -> None:
        while True:
            await self._clock.sleep(self._settings.image_cache_manager_interval)
            try:
                await self._images.remove_unused(self._settings.remove_unused_original_minimum_age_seconds)
            except Exception:
                log.exception("unused images could not be removed from the cache; trying again later")
