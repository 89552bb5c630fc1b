"""The libvirt driver: real guests, under QEMU or whatever else libvirt runs.

What is on disk is the record of a guest (`layout`); what runs is libvirt's. A guest is made in this order, so that
whatever point an agent dies at, `list_guests` finds it and `destroy` removes it:

    record → disks → config drive → definition → started, paused → network confirms → runs → record says complete
"""

import asyncio
import logging
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from micronova.conf.libvirt import LibvirtSettings
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import Conflict, InstanceNotFound, MicronovaError
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, NodeResources
from micronova.virt import power_state
from micronova.virt.driver import (
    BootSign,
    DriverEvents,
    DriverFailed,
    GuestPlan,
    Picture,
    RebootType,
    implemented,
)
from micronova.virt.libvirt import diagnostics, domains, hotplug, resources
from micronova.virt.libvirt.boot_signs import boot_signs
from micronova.virt.libvirt.compose import Workshop, domain_name
from micronova.virt.libvirt.config_drive import make_config_drive
from micronova.virt.libvirt.connection import Connection
from micronova.virt.libvirt.console import forget_pool, from_files, pool_of, read_console, through_libvirt
from micronova.virt.libvirt.disks import DiskMaker, plan_disks
from micronova.virt.libvirt.events import GuestEvent, Watchers
from micronova.virt.libvirt.guests import Guests
from micronova.virt.libvirt.host import HostFacts, ask, cpu_flags
from micronova.virt.libvirt.image_cache import ImageCache
from micronova.virt.libvirt.launcher import SAVE_SECONDS_PER_GB, START_TIMEOUT, Launcher
from micronova.virt.libvirt.layout import GuestRecord, GuestStore, Layout
from micronova.virt.libvirt.observer import Observer
from micronova.virt.libvirt.pool import Pool
from micronova.virt.libvirt.power import Requests
from micronova.virt.libvirt.private import PrivateLibvirtd
from micronova.virt.libvirt.running import share_files, why_not

log = logging.getLogger(__name__)

FILE_THREADS: Final = 4


class LibvirtDriver:
    """One host with libvirt."""

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
    ) -> None:
        self.host = host
        self._vendor_data = vendor_data
        self._settings = settings
        self._layout = layout
        self._daemon = daemon
        self._cloud = cloud_id
        self._clock = clock
        self._files = Pool("libvirt-files", FILE_THREADS)
        self._store = GuestStore(layout)
        self._watchers = Watchers()
        self._connection = Connection(
            uri,
            clock,
            on_event=self._happened,
            on_restored=self._restored,
            prepare=self._prepare,
            timeout=settings.call_timeout,
            explain=why_not if daemon is None else None,
        )
        self._guests = Guests(self._connection, self._store, self._files, host=host, cloud=cloud_id)
        self._observer = Observer(self._guests)
        self._requests = Requests(self._connection, self._watchers, clock, cloud_id)
        self._images = ImageCache(layout, self._files, clock)
        self._disks = DiskMaker(layout, self._images, self._files)
        self._ready: tuple[HostFacts, Launcher] | None = None
        self._ageing: asyncio.Task[None] | None = None
        self._log_pool = pool_of(layout.root)
        self._log_pool_used = False
        self._log_lock = asyncio.Lock()

    # --- the host ---

    async def init_host(self, events: DriverEvents) -> None:
        """Connect, learn what the host can do, and remove what was half done."""
        await self._connection.open()
        if self._daemon is None:
            capabilities = await self._connection.read(lambda connection: connection.getCapabilities())
            await self._files.run(share_files, self._layout, capabilities)
        await self._files.run(self._layout.prepare)
        await self._files.run(self._images.sweep)
        flags = await self._files.run(cpu_flags)
        facts = await self._connection.read(
            lambda connection: ask(
                connection, self._settings, flags=flags, cgroups=self._daemon is None, folder=self._layout.base
            ),
            "tell what it can do",
            timeout=START_TIMEOUT,
        )
        shop = Workshop(
            facts=facts,
            settings=self._settings,
            layout=self._layout,
            vnc_on_socket=self._vnc_on_socket,
            relabels=self._daemon is None and facts.is_qemu,
        )
        launcher = Launcher(shop, self._connection, self._guests, self._store, self._files, self._cloud)
        self._ready = facts, launcher
        self._observer.start(events)
        self._ageing = asyncio.get_running_loop().create_task(self._age_images())
        log.info("host %s runs %s guests with libvirt at %s", self.host, facts.virt_type, self._connection.uri)

    async def close(self) -> None:
        """Let go of libvirt; the guests run on, and so does a private libvirtd."""
        if self._ageing is not None:
            self._ageing.cancel()
            await asyncio.gather(self._ageing, return_exceptions=True)
        await self._observer.stop()
        if self._log_pool_used:
            try:
                await self._connection.read(lambda connection: forget_pool(connection, self._log_pool), "let go")
            except MicronovaError as error:
                log.warning("the storage pool %s is left in libvirt: %s", self._log_pool, error)
        await self._connection.close()
        await self._vendor_data.close()
        self._files.close()

    def capabilities(self) -> frozenset[str]:
        """What is implemented and what this host can do."""
        found = implemented(self)
        if not self._settings.vnc_enabled:
            found -= {"vnc_console"}
        if not self._settings.spice_enabled:
            found -= {"spice_console"}
        if not (self._settings.vnc_enabled or self._settings.spice_enabled):
            found -= {"screenshot"}
        if self._ready is not None and not self._facts.is_qemu:
            found -= {"serial_console", "console_log", "screenshot", "boot_signs"}
        return found

    async def get_available_resources(self) -> list[NodeResources]:
        """Describe the host as one node."""
        seen = await self._connection.read(domains.look_at_all, "list its guests")
        running = {guest.uuid: (guest.vcpus, guest.memory_mb) for guest in seen if guest.active}
        found = await self._files.run(
            lambda: resources.node_resources(
                self.host,
                self._cloud,
                self._facts,
                self._settings,
                self._layout,
                records=self._store,
                running=running,
            )
        )
        return [found]

    async def get_host_uptime(self) -> str:
        """Ask the kernel."""
        return await self._files.run(resources.uptime)

    # --- what there is ---

    async def list_guests(self) -> list[Guest]:
        """List the guests that have a record or are known to libvirt as this cloud's."""
        return await self._guests.all()

    async def info(self, uuid: str) -> Guest | None:
        """Describe a guest."""
        return await self._guests.one(uuid)

    # --- coming and going ---

    async def spawn(self, plan: GuestPlan) -> None:
        """Make a guest and let it run."""
        instance = plan.instance
        uuid = instance.uuid
        async with self._observer.changing(uuid):
            if await self._connection.read(lambda connection: domains.find(connection, uuid), "find the guest"):
                raise Conflict(f"A guest {uuid} exists already on {self.host}.")
            # Whatever this host cannot give is refused before anything is made.
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
            record = await self._launcher.admit(plan, record)
            await self._disks.make(plan, record, lambda percent: self._observer.progress(uuid, percent))
            if any(disk.role == "config" for disk in record.disks):
                await make_config_drive(plan, self._vendor_data, self._layout, self._files)
            await self._launcher.launch(plan, record)
            await self._files.run(self._store.save, msgspec.structs.replace(record, complete=True))

    async def destroy(self, uuid: str) -> None:
        """Remove a guest, what libvirt knows of it, its disks and its logs."""
        record = await self._files.run(self._store.load, uuid)
        if record is not None and not self._guests.owns(record):
            log.warning("guest %s belongs to another cloud or host and is left alone", uuid)
            return

        def remove(connection: Any) -> None:
            domain = domains.find_ours(connection, uuid, self._cloud)
            if domain is not None:
                domains.remove(domain)

        async with self._observer.changing(uuid):
            await self._connection.work(uuid, remove, "remove the guest", timeout=START_TIMEOUT)
            # The record goes last: by it an agent that comes after us knows that there is something to remove.
            await self._files.run(self._remove_logs, uuid)
            if record is not None:
                await self._files.run(self._store.remove, uuid)
        self._observer.gone(uuid)

    # --- power ---

    async def power_on(self, plan: GuestPlan) -> None:
        """Let a guest run that does not."""
        uuid = plan.instance.uuid
        async with self._observer.changing(uuid):
            record, power = await self._guests.known(uuid)
            if power == power_state.PAUSED:
                # Perhaps an agent died while this guest waited for the network.
                await plan.plugged()
                await self._guests.change(uuid, domains.resume, "let the guest go on")
            elif power != power_state.RUNNING:
                await self._launcher.relaunch(plan, record)

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Have a guest shut itself down, and cut its power when it does not."""
        async with self._observer.changing(uuid):
            _, power = await self._guests.known(uuid)
            if power == power_state.SHUTDOWN:
                return
            if power == power_state.RUNNING and timeout > 0 and await self._requests.shut_down(uuid, timeout):
                return
            if power == power_state.RUNNING and timeout > 0:
                log.info("guest %s did not shut down within %g s and is switched off", uuid, timeout)
            await self._guests.change(uuid, domains.switch_off, "switch the guest off")

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Restart a guest; one that does not react to a soft request is restarted the hard way."""
        uuid = plan.instance.uuid
        async with self._observer.changing(uuid):
            record, power = await self._guests.known(uuid)
            if kind == "SOFT" and power == power_state.RUNNING:
                if await self._requests.restart(uuid, self._settings.wait_soft_reboot_seconds):
                    return
                log.info("guest %s did not restart by itself", uuid)
            await self._launcher.relaunch(plan, record)

    async def pause(self, uuid: str) -> None:
        """Stop the guest's CPUs."""
        async with self._observer.changing(uuid):
            _, power = await self._guests.known(uuid)
            if power != power_state.PAUSED:
                await self._guests.change(uuid, domains.pause, "pause the guest")

    async def unpause(self, uuid: str) -> None:
        """Let the guest's CPUs go on."""
        async with self._observer.changing(uuid):
            _, power = await self._guests.known(uuid)
            if power == power_state.PAUSED:
                await self._guests.change(uuid, domains.resume, "let the guest go on")
            elif power != power_state.RUNNING:
                raise Conflict(f"The guest {uuid} does not run: it cannot go on.")

    async def suspend(self, uuid: str) -> None:
        """Put the guest's memory away on disk."""
        async with self._observer.changing(uuid):
            record, power = await self._guests.known(uuid)
            if power == power_state.SUSPENDED:
                return
            if power not in (power_state.RUNNING, power_state.PAUSED):
                raise Conflict(f"The guest {uuid} does not run: it cannot be suspended.")
            timeout = self._settings.call_timeout + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
            await self._guests.change(uuid, domains.save, "suspend the guest", timeout=timeout)

    async def resume(self, plan: GuestPlan) -> None:
        """Take the guest's memory back from disk; what was plugged when it was suspended is plugged again."""
        uuid = plan.instance.uuid
        async with self._observer.changing(uuid):
            record, power = await self._guests.known(uuid)
            if power == power_state.RUNNING:
                return
            if power == power_state.PAUSED:
                await plan.plugged()
                await self._guests.change(uuid, domains.resume, "let the guest go on")
                return
            await self._launcher.restore(plan, record)

    # --- interfaces ---

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface in; nothing passes through it before the network has confirmed."""
        uuid = plan.instance.uuid
        async with self._observer.changing(uuid):
            await self._guests.known(uuid)
            linked = self._settings.wire
            await hotplug.attach(self._connection, self._cloud, plan, vif, self._facts.virt_type, linked=linked)

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Pull an interface out."""
        async with self._observer.changing(uuid):
            await self._guests.known(uuid)
            await hotplug.detach(self._connection, self._watchers, self._clock, self._cloud, uuid, vif.mac_address)

    # --- looking at a guest ---

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Give what the guest wrote to its first serial port."""
        await self._guests.known(uuid)
        folder, name = self._layout.console, self._layout.console_log(uuid).name
        try:
            return await self._files.run(read_console, from_files(folder), name, length)
        except PermissionError:
            pass

        def read(connection: Any) -> str:
            return read_console(through_libvirt(connection, self._layout.seen(folder), self._log_pool), name, length)

        async with self._log_lock:
            self._log_pool_used = True
            return await self._connection.read(read, "read the console log")

    async def get_vnc_console(self, uuid: str) -> ConsoleEndpoint:
        """Say where the guest's screen is."""
        if not self._settings.vnc_enabled:
            raise Conflict("This host shows no screens: its setting vnc_enabled is off.")
        await self._guests.expect_running(uuid)
        if self._vnc_on_socket:
            return ConsoleEndpoint(path=str(self._layout.socket(uuid, "vnc")))
        return await self._screen_port(uuid, "vnc")

    async def get_spice_console(self, uuid: str) -> ConsoleEndpoint:
        """Say where the guest's screen is shown by SPICE."""
        if not self._settings.spice_enabled:
            raise Conflict("This host shows no screens by SPICE: its setting spice_enabled is off.")
        await self._guests.expect_running(uuid)
        if not self._layout.private:
            return await self._screen_port(uuid, "spice")
        path = self._layout.socket(uuid, "spice")
        if not await self._files.run(path.exists):
            raise Conflict("The guest was started without SPICE: it has it once it is started anew.")
        return ConsoleEndpoint(path=str(path))

    async def get_serial_console(self, uuid: str, number: int = 0) -> ConsoleEndpoint:
        """Say where one of the guest's serial ports is."""
        await self._guests.expect_running(uuid)
        path = self._layout.socket(uuid, f"serial{number}")
        if not await self._files.run(path.exists):
            raise InstanceNotFound(f"The guest {uuid} has no serial port {number}.")
        if not await self._files.run(os.access, path, os.W_OK):
            raise Conflict("This host's agent may not use its guests' serial ports: it has to be in their group.")
        return ConsoleEndpoint(path=str(path))

    async def get_screenshot(self, uuid: str) -> Picture:
        """Take a picture of the guest's screen."""
        await self._guests.expect_running(uuid)

        def take(connection: Any) -> Picture:
            return diagnostics.screenshot(connection, self._guests.find(connection, uuid))

        return await self._connection.read(take, "take a picture of the guest's screen")

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Give the guest's figures."""
        hypervisor = self._facts.virt_type
        return await self._guests.ask(
            uuid, lambda domain: diagnostics.diagnose(domain, hypervisor=hypervisor), "measure the guest"
        )

    async def boot_signs(self, uuids: Collection[str]) -> dict[str, BootSign]:
        """Tell from their disks and networks which guests have begun to boot."""
        return await boot_signs(self._connection, self._store, self._files, self._cloud, uuids)

    # --- what goes on behind ---

    async def _screen_port(self, uuid: str, protocol: str) -> ConsoleEndpoint:
        find = partial(hotplug.screen_address, protocol=protocol)
        host, port = await self._guests.ask(uuid, find, "say where its screen is")
        return ConsoleEndpoint(host=host, port=port)

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

    @property
    def _vnc_on_socket(self) -> bool:
        # QEMU makes the socket itself, which it can only in directories that were made for it.
        return self._layout.private and not self._settings.vnc_server_listen

    async def _prepare(self) -> None:
        if self._daemon is not None:
            await self._files.run(self._daemon.ensure)

    def _happened(self, event: GuestEvent) -> None:
        self._watchers.tell(event)
        self._observer.hint(event.uuid)

    def _restored(self) -> None:
        # The connection is back; what happened meanwhile nobody told us.
        self._observer.hint_all()

    def _remove_logs(self, uuid: str) -> None:
        """Remove QEMU's own log of a guest; that of a libvirt which is not ours is not ours either."""
        if self._daemon is not None:
            for file in (self._daemon.directory / "log" / "qemu").glob(f"{domain_name(uuid)}.log*"):
                file.unlink(missing_ok=True)

    async def _age_images(self) -> None:
        while True:
            await self._clock.sleep(self._settings.image_cache_manager_interval)
            if not self._settings.remove_unused_base_images:
                continue
            try:
                records = await self._files.run(self._store.all)
                used = {disk.backing for record in records for disk in record.disks if disk.backing}
                age = self._settings.remove_unused_original_minimum_age_seconds
                await self._images.remove_unused(used, age)
            except Exception:
                log.exception("the image cache could not be looked through")


def state_root(state_dir: Path, settings: LibvirtSettings) -> Path:
    """Say where this host keeps its guests."""
    return Path(settings.instances_path) if settings.instances_path else state_dir / "libvirt"
