"""The libvirt driver: real guests, under QEMU or another hypervisor of libvirt's.

A guest is made in this order, so that `list_guests` finds it and `destroy` removes it wherever an agent dies:

    record → disks → config drive → definition → started, paused → network confirms → runs → record says complete

The sub-packages, from the top (pyproject.toml holds the order):

    daemon       the libvirtd that runs the guests: a private one, or an existing one
    guests       finding, starting, watching and changing guests
    definition   what a guest's definition contains, and its XML
    storage      the guests' files: records, disks, image cache, config drive
    client       the connection to libvirt, its events, and threads for calls that block
"""

import asyncio
import logging
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from micronova.conf.libvirt import LibvirtSettings
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import Conflict
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, NodeResources
from micronova.virt.driver import (
    BootSign,
    DriverEvents,
    DriverFailed,
    GuestPlan,
    RebootType,
    implemented,
)
from micronova.virt.libvirt import resources
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.events import EventQueues, GuestEvent
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.daemon.existing import check_way, explain_failure
from micronova.virt.libvirt.daemon.private import PrivateLibvirtd
from micronova.virt.libvirt.definition.compose import HostProfile, domain_name
from micronova.virt.libvirt.guests import diagnostics, domains, hotplug
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.boot_signs import boot_signs
from micronova.virt.libvirt.guests.consoles import Consoles
from micronova.virt.libvirt.guests.graceful import GracefulPower
from micronova.virt.libvirt.guests.launcher import SAVE_SECONDS_PER_GB, START_TIMEOUT, Launcher
from micronova.virt.libvirt.guests.lifecycle import LifecycleReporter
from micronova.virt.libvirt.host import HostFacts, cpu_flags, kvm_group, read_facts
from micronova.virt.libvirt.storage import sandbox
from micronova.virt.libvirt.storage.config_drive import make_config_drive
from micronova.virt.libvirt.storage.disks import DiskMaker, plan_disks
from micronova.virt.libvirt.storage.fetch import fetch, stream
from micronova.virt.libvirt.storage.guest_users import guest_ids
from micronova.virt.libvirt.storage.image_cache import ImageCache
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecord, GuestRecords

log = logging.getLogger(__name__)

FILE_THREADS: Final = 4


class LibvirtDriver:
    """The driver of one host."""

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
    ) -> None:
        self.host = host
        self._vendor_data = vendor_data
        self._settings = settings
        self._layout = layout
        self._daemon = daemon
        self._cloud = cloud_id
        self._clock = clock
        self._files = ThreadPool("libvirt-files", FILE_THREADS)
        self._records = GuestRecords(layout)
        self._queues = EventQueues()
        self._connection = Connection(
            uri,
            clock,
            on_event=self._on_event,
            on_restored=self._on_restored,
            prepare=self._ensure_daemon,
            timeout=settings.call_timeout,
            explain=explain_failure if daemon is None else None,
        )
        self._guests = GuestAccess(self._connection, self._records, self._files, host=host, cloud=cloud_id)
        self._reporter = LifecycleReporter(self._guests, clock)
        self._graceful = GracefulPower(self._connection, self._queues, clock, cloud_id)
        self._images = ImageCache(
            layout,
            self._files,
            clock,
            fetcher=partial(fetch, source=partial(stream, service=image_service)),
            max_bytes=self._max_cache,
            used_by_disks=self._backing_files,
            evict=settings.remove_unused_base_images,
        )
        self._disks = DiskMaker(layout, self._images, self._files)
        self._ready: tuple[HostFacts, Launcher] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._is_qemu = uri.startswith("qemu")
        self._consoles = Consoles(self._guests, self._connection, layout, self._files, settings, sockets=self._is_qemu)

    # --- the host ---

    async def init_host(self, events: DriverEvents) -> None:
        """Connect, read what the host can do, and remove guests and images that were only partly made."""
        await self._connection.open()
        missing = sandbox.obstacle()
        if missing is not None:
            raise LibvirtMissing(f"Guests' disks cannot be made safely: {missing}.")
        if self._daemon is None and self._is_qemu:
            await self._files.run(check_way, self._layout.root.parent)
        await self._files.run(self._layout.prepare)
        if self._is_qemu:
            await self._files.run(self._layout.check_sharing)
        await self._files.run(self._images.remove_incomplete)
        flags = await self._files.run(cpu_flags)
        own_cgroups = self._daemon is not None and self._daemon.has_cgroups
        cgroups = own_cgroups or self._daemon is None
        if not cgroups:
            log.warning("guests of this host have no limits of memory and CPU: the machine has no control groups")
        facts = await self._connection.read(
            lambda connection: read_facts(
                connection, self._settings, flags=flags, cgroups=cgroups, folder=self._layout.base
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
        ids = guest_ids(self._settings.guest_uids, self._cloud)
        launcher = Launcher(profile, self._connection, self._guests, self._records, self._files, self._cloud, ids)
        self._ready = facts, launcher
        self._reporter.start(events)
        self._cleaning = asyncio.get_running_loop().create_task(self._remove_unused_images())
        log.info("host %s runs %s guests with libvirt at %s", self.host, facts.virt_type, self._connection.uri)

    async def close(self) -> None:
        """Disconnect from libvirt; the guests and a private libvirtd continue to run."""
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)
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
        if self._ready is not None and not self._facts.is_qemu:
            found -= {"serial_console", "console_log", "boot_signs"}
        return found

    async def get_available_resources(self) -> list[NodeResources]:
        """Return the host as one node."""
        defined = await self._connection.read(domains.describe_all, "list its guests")
        running = {info.uuid: (info.vcpus, info.memory_mb) for info in defined if info.active}
        found = await self._files.run(
            lambda: resources.node_resources(
                self.host,
                self._cloud,
                self._facts,
                self._settings,
                self._layout,
                records=self._records,
                running=running,
            )
        )
        return [found]

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
        instance = plan.instance
        uuid = instance.uuid
        async with self._reporter.changing(uuid):
            if await self._connection.read(lambda connection: domains.find(connection, uuid), "find the guest"):
                raise Conflict(f"A guest {uuid} exists already on {self.host}.")
            # `reserve` refuses what this host cannot give before anything is made.
            record = GuestRecord(
                uuid=uuid,
                cloud=self._cloud,
                host=self.host,
                node=instance.node or self.host,
                epoch=plan.epoch,
                name=instance.name,
                vcpus=instance.flavor.vcpus,
                memory_mb=instance.flavor.ram,
                local_gb=instance.flavor.resources().get("DISK_GB", 0),
                disks=plan_disks(plan, self._settings),
            )
            record = await self._launcher.reserve(plan, record)
            await self._disks.make(plan, record)
            if any(disk.role == "config" for disk in record.disks):
                await make_config_drive(plan, self._vendor_data, self._layout, self._files)
            await self._launcher.launch(plan, record)
            await self._files.run(self._records.save, msgspec.structs.replace(record, complete=True))

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

        def remove(connection: Connect) -> None:
            domain = domains.find_ours(connection, uuid, self._cloud)
            if domain is not None:
                domains.remove(domain)

        async with self._reporter.changing(uuid):
            await self._connection.change(uuid, remove, "remove the guest", timeout=START_TIMEOUT)
            # The record is removed last: if this agent dies, the next one finds the guest by it.
            await self._files.run(self._remove_logs, uuid)
            if record is not None:
                await self._files.run(self._records.remove, uuid)
        self._reporter.forget(uuid)

    # --- power ---

    async def power_on(self, plan: GuestPlan) -> None:
        """Start a guest that does not run, or resume one that is paused."""
        uuid = plan.instance.uuid
        async with self._reporter.changing(uuid):
            record, power = await self._guests.require(uuid)
            if power == power_state.PAUSED:
                # An agent may have died while this guest waited for the network.
                await plan.plugged()
                await self._launcher.resume(uuid)
            elif power != power_state.RUNNING:
                await self._launcher.relaunch(plan, record)

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Ask a guest to shut down, and stop it if it does not."""
        async with self._reporter.changing(uuid):
            _, power = await self._guests.require(uuid)
            if power == power_state.SHUTDOWN:
                return
            if power == power_state.RUNNING and timeout > 0 and await self._graceful.shut_down(uuid, timeout):
                return
            if power == power_state.RUNNING and timeout > 0:
                log.info("guest %s did not shut down within %g s and is stopped", uuid, timeout)
            await self._guests.change(uuid, domains.power_off, "stop the guest")

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Restart a guest; one that does not react to a soft reboot gets a hard one."""
        uuid = plan.instance.uuid
        async with self._reporter.changing(uuid):
            record, power = await self._guests.require(uuid)
            if kind == "SOFT" and power == power_state.RUNNING:
                if await self._graceful.reboot(uuid, self._settings.wait_soft_reboot_seconds):
                    return
                log.info("guest %s did not react to a soft reboot and gets a hard one", uuid)
            await self._launcher.relaunch(plan, record)

    async def pause(self, uuid: str) -> None:
        """Stop the guest's CPUs."""
        async with self._reporter.changing(uuid):
            _, power = await self._guests.require(uuid)
            if power != power_state.PAUSED:
                await self._guests.change(uuid, domains.pause, "pause the guest")

    async def unpause(self, uuid: str) -> None:
        """Let the guest's CPUs run again."""
        async with self._reporter.changing(uuid):
            _, power = await self._guests.require(uuid)
            if power == power_state.PAUSED:
                await self._launcher.resume(uuid)
            elif power != power_state.RUNNING:
                raise Conflict(f"The guest {uuid} does not run: it cannot be resumed.")

    async def suspend(self, uuid: str) -> None:
        """Save the guest's memory to disk and stop it."""
        async with self._reporter.changing(uuid):
            record, power = await self._guests.require(uuid)
            if power == power_state.SUSPENDED:
                return
            if power not in (power_state.RUNNING, power_state.PAUSED):
                raise Conflict(f"The guest {uuid} does not run: it cannot be suspended.")
            timeout = self._settings.call_timeout + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
            await self._guests.change(uuid, domains.save, "suspend the guest", timeout=timeout)

    async def resume(self, plan: GuestPlan) -> None:
        """Restore the guest's memory from disk; it has the interfaces that it had when it was suspended."""
        uuid = plan.instance.uuid
        async with self._reporter.changing(uuid):
            record, power = await self._guests.require(uuid)
            if power == power_state.RUNNING:
                return
            if power == power_state.PAUSED:
                await plan.plugged()
                await self._launcher.resume(uuid)
                return
            await self._launcher.restore(plan, record)

    # --- interfaces ---

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface; it has no link before the network has confirmed it."""
        uuid = plan.instance.uuid
        async with self._reporter.changing(uuid):
            await self._guests.require(uuid)
            linked = self._settings.wire
            await hotplug.attach(self._connection, self._cloud, plan, vif, self._facts.virt_type, linked=linked)

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Unplug an interface."""
        async with self._reporter.changing(uuid):
            await self._guests.require(uuid)
            await hotplug.detach(self._connection, self._queues, self._clock, self._cloud, uuid, vif.mac_address)

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

    async def boot_signs(self, uuids: Collection[str]) -> dict[str, BootSign]:
        """Return which guests have begun to boot, judged by their disks and networks."""
        return await boot_signs(self._connection, self._records, self._files, self._cloud, uuids)

    # --- internal ---

    @property
    def _facts(self) -> HostFacts:
        if self._ready is None:
            raise DriverFailed("The driver is not ready.")
        return self._ready[0]

    @property
    def _launcher(self) -> Launcher:
        if self._ready is None:
            raise DriverFailed("The driver is not ready.")
        return self._ready[1]

    async def _ensure_daemon(self) -> None:
        if self._daemon is not None:
            await self._files.run(self._daemon.ensure)

    def _on_event(self, event: GuestEvent) -> None:
        self._queues.put(event)
        self._reporter.check_soon(event.uuid)

    def _on_restored(self) -> None:
        # Events were lost while there was no connection.
        self._reporter.check_all_soon()

    def _remove_logs(self, uuid: str) -> None:
        """Remove QEMU's log of a guest; the logs of an existing libvirt are not ours."""
        if self._daemon is not None:
            for file in (self._daemon.directory / "log" / "qemu").glob(f"{domain_name(uuid)}.log*"):
                file.unlink(missing_ok=True)

    def _backing_files(self) -> set[str]:
        """Return the names of the cached images that disks are based on. Blocks."""
        return {disk.backing for record in self._records.all() for disk in record.disks if disk.backing}

    def _max_cache(self) -> int:
        """Return how many bytes the image cache may take. Blocks."""
        numbers = os.statvfs(self._layout.base)
        return numbers.f_blocks * numbers.f_frsize * self._settings.image_cache_max_percent // 100

    async def _remove_unused_images(self) -> None:
        while True:
            await self._clock.sleep(self._settings.image_cache_manager_interval)
            if not self._settings.remove_unused_base_images:
                continue
            try:
                await self._images.remove_unused(self._settings.remove_unused_original_minimum_age_seconds)
            except Exception:
                log.exception("unused images could not be removed from the cache; trying again later")


def state_root(state_dir: Path, settings: LibvirtSettings) -> Path:
    """Return the directory of this host's guests."""
    return Path(settings.instances_path) if settings.instances_path else state_dir / "libvirt"
