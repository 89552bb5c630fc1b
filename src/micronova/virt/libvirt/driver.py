"""The libvirt driver: real guests, under QEMU or whatever else libvirt runs.

What is on disk is the record of a guest (`layout`); what runs is libvirt's. A guest is made in this order, so that
whatever point an agent dies at, `list_guests` finds it and `destroy` removes it:

    record → disks → config drive → definition → started, paused → network confirms → runs → record says complete
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict, InstanceNotFound, MicronovaError
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, NodeResources
from micronova.virt import power_state
from micronova.virt.driver import (
    ConsoleEndpoint,
    DriverEvents,
    DriverFailed,
    GuestDiagnostics,
    GuestPlan,
    Lifecycle,
    Picture,
    RebootType,
    implemented,
)
from micronova.virt.libvirt import diagnostics, domains, hotplug, resources
from micronova.virt.libvirt.compose import CONSOLE_LOG, Workshop, compose, domain_name
from micronova.virt.libvirt.config_drive import make_config_drive
from micronova.virt.libvirt.connection import Connection
from micronova.virt.libvirt.console import read_console
from micronova.virt.libvirt.disks import DiskMaker, plan_disks
from micronova.virt.libvirt.events import GuestEvent, Watchers
from micronova.virt.libvirt.guest_xml import domain_xml
from micronova.virt.libvirt.host import HostFacts, ask, cpu_flags
from micronova.virt.libvirt.image_cache import ImageCache
from micronova.virt.libvirt.layout import GuestRecord, GuestStore, Layout, PinRecord
from micronova.virt.libvirt.pool import Pool
from micronova.virt.libvirt.power import Requests
from micronova.virt.libvirt.private import PrivateLibvirtd
from micronova.virt.libvirt.settings import LibvirtSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE_THREADS = 4
START_TIMEOUT = 180.0
SAVE_SECONDS_PER_GB = 60.0
"""How long putting memory away on a slow disk may take, besides the time of any call."""

_EVENTS: dict[int, Lifecycle] = {
    power_state.RUNNING: "started",
    power_state.PAUSED: "paused",
    power_state.SHUTDOWN: "stopped",
    power_state.CRASHED: "crashed",
    power_state.SUSPENDED: "suspended",
}


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
    ) -> None:
        self.host = host
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
        )
        self._requests = Requests(self._connection, self._watchers, clock, cloud_id)
        self.images = ImageCache(layout, self._files, clock)
        self._disks = DiskMaker(layout, self.images, self._files)
        self._events: DriverEvents | None = None
        self._facts: HostFacts | None = None
        self._busy: Counter[str] = Counter()  # guests that an order is changing just now
        self._told: dict[str, int] = {}  # the power state that the manager knows from us
        self._pinning = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks: set[str] = set()

    # --- the host ---

    async def init_host(self, events: DriverEvents) -> None:
        """Connect, learn what the host can do, and remove what was half done."""
        await self._files.run(self._layout.prepare)
        await self._files.run(self.images.sweep)
        await self._connection.open()
        flags = await self._files.run(cpu_flags)
        self._facts = await self._connection.read(
            lambda connection: ask(
                connection,
                self._settings,
                flags=flags,
                cgroups=self._daemon is None,
                folder=self._layout.base,
            ),
            "tell what it can do",
            timeout=START_TIMEOUT,
        )
        self._events = events
        self._spawn_task(self._age_images())
        log.info("host %s runs %s guests with libvirt at %s", self.host, self._facts.virt_type, self._connection.uri)

    async def close(self) -> None:
        """Let go of libvirt; the guests run on, and so does a private libvirtd."""
        self._events = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()
        self._files.close()

    def capabilities(self) -> frozenset[str]:
        """What is implemented and what this host can do."""
        found = implemented(self)
        if not self._settings.vnc_enabled:
            found -= {"vnc_console", "screenshot"}
        if self._facts is not None and not self._facts.is_qemu:
            found -= {"serial_console", "console_log", "screenshot"}
        return found

    async def get_available_resources(self) -> list[NodeResources]:
        """Describe the host as one node."""
        seen = await self._connection.read(domains.look_at_all, "list its guests")
        running = {guest.uuid: (guest.vcpus, guest.memory_mb) for guest in seen if guest.active}
        found = await self._files.run(
            lambda: resources.node_resources(
                self.host,
                self._cloud,
                self._known_facts,
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
        every = await self._files.run(self._store.all)
        records = {record.uuid: record for record in every if self._ours(record)}
        seen = {guest.uuid: guest for guest in await self._connection.read(domains.look_at_all, "list its guests")}
        found = [self._view(uuid, records.get(uuid), seen.get(uuid)) for uuid in {**records, **seen}]
        return [guest for guest in found if guest is not None]

    async def info(self, uuid: str) -> Guest | None:
        """Describe a guest."""
        record = await self._files.run(self._store.load, uuid)
        seen = await self._connection.read(lambda connection: domains.look(connection, uuid), "find the guest")
        return self._view(uuid, record, seen)

    # --- coming and going ---

    async def spawn(self, plan: GuestPlan) -> None:
        """Make a guest and let it run."""
        instance = plan.instance
        uuid = instance.uuid
        async with self._changing(uuid):
            if await self._connection.read(lambda connection: domains.look(connection, uuid), "find the guest"):
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
            record = await self._admit(plan, record)
            await self._disks.make(plan, record, lambda percent: self._progress(uuid, percent))
            if any(disk.role == "config" for disk in record.disks):
                await make_config_drive(plan, self._layout, self._files)
            await self._launch(plan, record)
            await self._files.run(self._store.save, msgspec.structs.replace(record, complete=True))

    async def destroy(self, uuid: str) -> None:
        """Remove a guest, what libvirt knows of it, its disks and its logs."""
        record = await self._files.run(self._store.load, uuid)
        if record is not None and not self._ours(record):
            log.warning("guest %s belongs to another cloud or host and is left alone", uuid)
            return

        def remove(connection: Any) -> None:
            domain = domains.find_ours(connection, uuid, self._cloud)
            if domain is not None:
                domains.remove(domain)

        self._busy[uuid] += 1
        try:
            await self._connection.work(uuid, remove, "remove the guest", timeout=START_TIMEOUT)
            if record is not None:
                await self._files.run(self._store.remove, uuid)
            await self._files.run(self._remove_logs, uuid)
        finally:
            self._free(uuid)
        self._told.pop(uuid, None)

    # --- power ---

    async def power_on(self, plan: GuestPlan) -> None:
        """Let a guest run that does not."""
        uuid = plan.instance.uuid
        async with self._changing(uuid):
            record, power = await self._state(uuid)
            if power == power_state.PAUSED:
                await self._work(uuid, lambda domain: domain.resume(), "let the guest go on")
            elif power != power_state.RUNNING:
                await self._off_and_on(plan, record)

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Have a guest shut itself down, and cut its power when it does not."""
        async with self._changing(uuid):
            _, power = await self._state(uuid)
            if power == power_state.SHUTDOWN:
                return
            if power == power_state.RUNNING and timeout > 0 and await self._requests.shut_down(uuid, timeout):
                return
            if power == power_state.RUNNING and timeout > 0:
                log.info("guest %s did not shut down within %g s and is switched off", uuid, timeout)
            await self._work(uuid, domains.switch_off, "switch the guest off")

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Restart a guest; one that does not react to a soft request is restarted the hard way."""
        uuid = plan.instance.uuid
        async with self._changing(uuid):
            record, power = await self._state(uuid)
            if kind == "SOFT" and power == power_state.RUNNING:
                if await self._requests.restart(uuid, self._settings.wait_soft_reboot_seconds):
                    return
                log.info("guest %s did not restart by itself", uuid)
            await self._off_and_on(plan, record)

    async def pause(self, uuid: str) -> None:
        """Stop the guest's CPUs."""
        async with self._changing(uuid):
            _, power = await self._state(uuid)
            if power != power_state.PAUSED:
                await self._work(uuid, lambda domain: domain.suspend(), "pause the guest")

    async def unpause(self, uuid: str) -> None:
        """Let the guest's CPUs go on."""
        async with self._changing(uuid):
            _, power = await self._state(uuid)
            if power == power_state.PAUSED:
                await self._work(uuid, lambda domain: domain.resume(), "let the guest go on")
            elif power != power_state.RUNNING:
                raise Conflict(f"The guest {uuid} does not run: it cannot go on.")

    async def suspend(self, uuid: str) -> None:
        """Put the guest's memory away on disk."""
        async with self._changing(uuid):
            record, power = await self._state(uuid)
            if power == power_state.SUSPENDED:
                return
            if power not in (power_state.RUNNING, power_state.PAUSED):
                raise Conflict(f"The guest {uuid} does not run: it cannot be suspended.")
            timeout = self._settings.call_timeout + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
            running = self._library_flag("VIR_DOMAIN_SAVE_RUNNING")
            await self._work(uuid, lambda domain: domain.managedSave(running), "suspend the guest", timeout=timeout)

    async def resume(self, plan: GuestPlan) -> None:
        """Take the guest's memory back from disk; what was plugged when it was suspended is plugged again."""
        uuid = plan.instance.uuid
        async with self._changing(uuid):
            record, power = await self._state(uuid)
            if power == power_state.RUNNING:
                return
            if power == power_state.PAUSED:
                await self._work(uuid, lambda domain: domain.resume(), "let the guest go on")
                return
            timeout = START_TIMEOUT + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
            await self._start(plan, timeout=timeout)

    # --- interfaces ---

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface in; nothing passes through it before the network has confirmed."""
        uuid = plan.instance.uuid
        async with self._changing(uuid):
            await self._state(uuid)
            await hotplug.attach(self._connection, self._cloud, plan, vif, self._known_facts.virt_type)

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Pull an interface out."""
        async with self._changing(uuid):
            await self._state(uuid)
            await hotplug.detach(self._connection, self._watchers, self._clock, self._cloud, uuid, vif.mac_address)

    # --- looking at a guest ---

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Give what the guest wrote to its first serial port."""
        await self._state(uuid)
        return await self._files.run(read_console, self._layout.guest(uuid) / CONSOLE_LOG, length)

    async def get_vnc_console(self, uuid: str) -> ConsoleEndpoint:
        """Say where the guest's screen is."""
        if not self._settings.vnc_enabled:
            raise Conflict("This host shows no screens: its setting vnc_enabled is off.")
        await self._running(uuid)
        if self._shop.vnc_on_socket:
            return ConsoleEndpoint(path=str(self._layout.socket(uuid, "vnc")))
        host, port = await self._read(uuid, hotplug.vnc_address, "say where its screen is")
        return ConsoleEndpoint(host=host, port=port)

    async def get_serial_console(self, uuid: str, number: int = 0) -> ConsoleEndpoint:
        """Say where one of the guest's serial ports is."""
        await self._running(uuid)
        path = self._layout.socket(uuid, f"serial{number}")
        if not await self._files.run(path.exists):
            raise InstanceNotFound(f"The guest {uuid} has no serial port {number}.")
        return ConsoleEndpoint(path=str(path))

    async def get_screenshot(self, uuid: str) -> Picture:
        """Take a picture of the guest's screen."""
        await self._running(uuid)

        def take(connection: Any) -> Picture:
            return diagnostics.screenshot(connection, self._find(connection, uuid))

        return await self._connection.read(take, "take a picture of the guest's screen")

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Give the guest's figures."""
        hypervisor = self._known_facts.virt_type
        return await self._read(
            uuid, lambda domain: diagnostics.diagnose(domain, hypervisor=hypervisor), "measure the guest"
        )

    # --- making a guest run ---

    @property
    def _known_facts(self) -> HostFacts:
        if self._facts is None:
            raise DriverFailed("The driver is not ready.")
        return self._facts

    @property
    def _shop(self) -> Workshop:
        return Workshop(
            facts=self._known_facts,
            settings=self._settings,
            layout=self._layout,
            vnc_on_socket=self._daemon is not None and not self._settings.vnc_server_listen,
        )

    async def _admit(self, plan: GuestPlan, record: GuestRecord) -> GuestRecord:
        """See that the guest can be defined here, give it its CPUs, and write its record."""
        # One at a time: two guests must not be given the same CPU.
        async with self._pinning:
            taken = await self._files.run(self._taken_cpus)
            definition = compose(self._shop, plan.instance, record, plan.network_info, taken)
            cpus = definition.cpus
            record = msgspec.structs.replace(record, pins=PinRecord(vcpus=cpus.pins, emulator=cpus.emulator))
            try:
                await self._files.run(self._store.create, record)
            except FileExistsError:
                raise Conflict(f"A guest {record.uuid} exists already on {self.host}.") from None
        return record

    def _taken_cpus(self) -> frozenset[int]:
        return frozenset(cpu for record in self._store for cpu in (*record.pins.vcpus.values(), *record.pins.emulator))

    async def _off_and_on(self, plan: GuestPlan, record: GuestRecord) -> None:
        def off(connection: Any) -> None:
            domain = domains.find_ours(connection, record.uuid, self._cloud)
            if domain is not None:
                domains.switch_off(domain)

        await self._connection.work(record.uuid, off, "switch the guest off", timeout=START_TIMEOUT)
        await self._launch(plan, record)

    async def _launch(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Define a guest as it is to be now, and start it."""
        kept = msgspec.structs.replace(record, complete=True)  # its CPUs are given already
        xml = domain_xml(compose(self._shop, plan.instance, kept, plan.network_info))
        await self._connection.work(record.uuid, lambda connection: domains.define(connection, xml), "define the guest")
        await self._start(plan, timeout=START_TIMEOUT)

    async def _start(self, plan: GuestPlan, *, timeout: float) -> None:
        """Start a defined guest; with interfaces it stands still until the network has confirmed them."""
        uuid = plan.instance.uuid
        wait = bool(plan.network_info)
        if not wait:
            await plan.plugged()
        await self._work(uuid, lambda domain: domains.start(domain, paused=wait), "start the guest", timeout=timeout)
        if wait:
            try:
                await plan.plugged()
                await self._work(uuid, lambda domain: domain.resume(), "let the guest run")
            except BaseException:
                await self._switch_off_quietly(uuid)
                raise

    async def _switch_off_quietly(self, uuid: str) -> None:
        try:
            await self._work(uuid, lambda domain: domains.switch_off(domain, forget=False), "switch the guest off")
        except MicronovaError as error:
            log.warning("guest %s could not be switched off: %s", uuid, error)

    # --- helpers ---

    async def _work(self, uuid: str, function: Callable[[Any], T], what: str, *, timeout: float | None = None) -> T:
        return await self._connection.work(
            uuid, lambda connection: function(self._find(connection, uuid)), what, timeout=timeout
        )

    async def _read(self, uuid: str, function: Callable[[Any], T], what: str) -> T:
        return await self._connection.read(lambda connection: function(self._find(connection, uuid)), what)

    def _find(self, connection: Any, uuid: str) -> Any:
        domain = domains.find_ours(connection, uuid, self._cloud)
        if domain is None:
            raise InstanceNotFound(f"There is no guest {uuid} on {self.host}.")
        return domain

    async def _state(self, uuid: str) -> tuple[GuestRecord, int]:
        """Find a guest that is ours, with its record."""
        record = await self._files.run(self._store.load, uuid)
        if record is None or not self._ours(record):
            raise InstanceNotFound(f"There is no guest {uuid} on {self.host}.")
        seen = await self._connection.read(lambda connection: domains.look(connection, uuid), "find the guest")
        return record, power_state.SHUTDOWN if seen is None or seen.owner is None else seen.power

    async def _running(self, uuid: str) -> None:
        _, power = await self._state(uuid)
        if power not in (power_state.RUNNING, power_state.PAUSED):
            raise Conflict(f"The guest {uuid} does not run: it has no console.")

    def _ours(self, record: GuestRecord) -> bool:
        return record.cloud == self._cloud and record.host == self.host

    def _view(self, uuid: str, record: GuestRecord | None, seen: domains.Seen | None) -> Guest | None:
        owner = seen.owner if seen is not None else None
        if owner is not None and owner.cloud != self._cloud:
            owner = None
        if record is not None and self._ours(record):
            power = power_state.SHUTDOWN if owner is None or seen is None else seen.power
            return Guest(
                uuid=uuid,
                node=record.node,
                epoch=record.epoch,
                power_state=power if record.complete else power_state.NOSTATE,
                name=record.name,
                vcpus=record.vcpus,
                memory_mb=record.memory_mb,
                local_gb=record.local_gb,
            )
        if owner is None or seen is None or record is not None:
            return None
        return Guest(
            uuid=uuid,
            node=self.host,
            epoch=owner.epoch,
            power_state=seen.power,
            name=owner.name,
            vcpus=seen.vcpus,
            memory_mb=seen.memory_mb,
        )

    def _remove_logs(self, uuid: str) -> None:
        """Remove QEMU's own log of a guest; that of a libvirt which is not ours is not ours either."""
        if self._daemon is not None:
            for file in (self._daemon.directory / "log" / "qemu").glob(f"{domain_name(uuid)}.log*"):
                file.unlink(missing_ok=True)

    async def _prepare(self) -> None:
        if self._daemon is not None:
            await self._files.run(self._daemon.ensure)

    @staticmethod
    def _library_flag(name: str) -> int:
        from micronova.virt.libvirt.library import load

        return int(getattr(load(), name, 0))

    async def _age_images(self) -> None:
        while True:
            await self._clock.sleep(self._settings.image_cache_manager_interval)
            if not self._settings.remove_unused_base_images:
                continue
            try:
                records = await self._files.run(self._store.all)
                used = {disk.backing for record in records for disk in record.disks if disk.backing}
                age = self._settings.remove_unused_original_minimum_age_seconds
                await self.images.remove_unused(used, age)
            except Exception:
                log.exception("the image cache could not be looked through")

    # --- events ---

    @asynccontextmanager
    async def _changing(self, uuid: str) -> AsyncIterator[None]:
        """Hold events back while an order changes a guest, and tell in the end what has become of it.

        Events come late and one by one; told as they come, those that an order caused would pass for the guest's
        own doing. So an event is only a hint to look, and what is told is what was found.
        """
        self._busy[uuid] += 1
        try:
            yield
            await self._look(uuid)
        except BaseException:
            # Not waited for: a libvirt that hangs should not hold a failure up.
            self._look_soon(uuid)
            raise
        finally:
            self._free(uuid)

    def _free(self, uuid: str) -> None:
        self._busy[uuid] -= 1
        if not self._busy[uuid]:
            del self._busy[uuid]

    def _happened(self, event: GuestEvent) -> None:
        self._watchers.tell(event)
        if not self._busy[event.uuid]:
            self._look_soon(event.uuid)

    def _look_soon(self, uuid: str) -> None:
        if uuid not in self._looks and self._events is not None:
            self._looks.add(uuid)
            self._spawn_task(self._look_later(uuid))

    def _restored(self) -> None:
        """The connection is back: whatever happened meanwhile is found by looking at all guests."""
        self._spawn_task(self._look_at_all())

    async def _look_at_all(self) -> None:
        try:
            for guest in await self.list_guests():
                if not self._busy[guest.uuid]:
                    self._tell(guest)
        except MicronovaError as error:
            log.warning("the guests cannot be looked at: %s", error)

    async def _look_later(self, uuid: str) -> None:
        self._looks.discard(uuid)  # an event from now on means another look
        try:
            guest = await self.info(uuid)
        except MicronovaError as error:
            log.warning("guest %s cannot be looked at: %s", uuid, error)
            return
        if guest is not None and not self._busy[uuid]:
            self._tell(guest)

    async def _look(self, uuid: str) -> None:
        guest = await self.info(uuid)
        if guest is not None:
            self._tell(guest)

    def _tell(self, guest: Guest) -> None:
        power = guest.power_state
        if power == power_state.NOSTATE or self._told.get(guest.uuid) == power or self._events is None:
            return
        before = self._told.get(guest.uuid)
        self._told[guest.uuid] = power
        event = _EVENTS[power]
        if power == power_state.RUNNING and before in (power_state.PAUSED, power_state.SUSPENDED):
            event = "resumed"
        self._events.lifecycle(guest.uuid, event)

    def _progress(self, uuid: str, percent: int) -> None:
        if self._events is not None:
            self._events.progress(uuid, percent)

    def _spawn_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def state_root(state_dir: Path, settings: LibvirtSettings) -> Path:
    """Say where this host keeps its guests."""
    return Path(settings.instances_path) if settings.instances_path else state_dir / "libvirt"
