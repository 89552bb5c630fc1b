"""The fake driver: a simulator of one compute host, with capacity, latencies and faults."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from micronova.conf.hosts import FakeSettings
from micronova.http.image_downloads import ImageDownloads
from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import (
    Conflict,
    InstanceNotFound,
)
from micronova.objects.image import ImageMeta
from micronova.objects.mediated_devices import NO_TYPES, MdevTypes
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, NodeResources
from micronova.objects.volume import AttachedVolume
from micronova.virt.driver import (
    POWER_AFTER,
    BootSign,
    CPUTimes,
    DriverEvents,
    GuestPlan,
    Lifecycle,
    RebootType,
    do_nothing,
    implemented,
    last_lines,
)
from micronova.virt.fake import moves
from micronova.virt.fake.console_log import console_text
from micronova.virt.fake.diagnostics import boot_sign, diagnose
from micronova.virt.fake.faults import FaultRules
from micronova.virt.fake.guests import FakeGuest, GuestStore
from micronova.virt.fake.host import SimulatedHost, expect, kernel_of
from micronova.virt.fake.signed_images import SignedImages
from micronova.virt.fake.snapshots import FakeDiskCopy, disk_content


class FakeDriver:
    """One simulated host."""

    verifies_signatures = True
    rescues_from_lun = True
    boots_kernels = True

    def __init__(
        self,
        host: str,
        *,
        settings: FakeSettings,
        store: GuestStore,
        faults: FaultRules,
        cloud_id: str,
        clock: Clock,
        images: ImageDownloads | None = None,
        mdev_types: MdevTypes = NO_TYPES,
    ) -> None:
        self.host = host
        self._signed = SignedImages(images or ImageDownloads())
        self._simulated = SimulatedHost(host, settings, store, faults, cloud_id, clock, mdev_types)
        self._store = store
        self._faults = faults
        self._clock = clock
        self._forced: dict[str, asyncio.Event] = {}  # live migrations that run
        self._up_since = clock.monotonic()
        self._images: set[str] = set()  # ids of the images in the cache
        self._capabilities = implemented(self)

    async def init_host(self, events: DriverEvents) -> None:
        """Remember the agent's callbacks; thaw the guests that an earlier agent has left frozen."""
        self._simulated.events = events
        for guest in self._simulated:
            self._simulated.set_frozen(guest, frozen=False)

    async def close(self) -> None:
        """Leave the guests as they are."""
        self._simulated.events = None
        await self._simulated.consoles.close()

    def capabilities(self) -> frozenset[str]:
        """Return everything that is implemented."""
        return self._capabilities

    async def get_available_resources(self) -> list[NodeResources]:
        """Return the node of the host."""
        return [self._simulated.node()]

    async def list_guests(self) -> list[Guest]:
        """Return this cloud's guests."""
        return [_view(guest) for guest in self._simulated]

    async def info(self, uuid: str) -> Guest | None:
        """Return a guest, or None."""
        guest = self._simulated.find(uuid)
        return None if guest is None else _view(guest)

    async def spawn(self, plan: GuestPlan) -> None:
        """Make a guest."""
        self._simulated.require_unknown(plan.instance.uuid)
        guest = self._simulated.new(plan)
        # Stored before a fault can occur, as a real hypervisor has disks by now: `destroy` must find it.
        self._store.put(guest)
        await self._signed.verify_all(plan.instance.image, plan)
        crash = await self._simulated.call("spawn", guest)
        if plan.instance.image is not None:
            self._images.add(plan.instance.image.id)
        await plan.plugged()
        self._simulated.boot(guest, crash=crash)

    async def destroy(self, uuid: str) -> None:
        """Remove a guest."""
        guest = self._simulated.find(uuid)
        if guest is not None:
            await self._simulated.call("destroy", guest)
            self._simulated.remove(uuid)

    async def power_on(self, plan: GuestPlan) -> None:
        """Boot a guest that does not run."""
        guest = self._simulated.require(plan.instance.uuid)
        crash = await self._simulated.call("power_on", guest)
        if guest.power_state != power_state.RUNNING:
            guest.rescue_epoch = None
            self._simulated.give_volumes(guest, plan)
            await plan.plugged()
            self._simulated.boot(guest)
        if crash:
            self._simulated.crash(guest)

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Shut a guest down; one with a `shutdown` fault does not react and is stopped after the timeout."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("power_off", guest)
        if guest.power_state != power_state.SHUTDOWN:
            await self._simulated.shut_down(guest, timeout)

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Boot a guest again."""
        guest = self._simulated.require(plan.instance.uuid)
        crash = await self._simulated.call("reboot", guest)
        if kind == "HARD":
            guest.rescue_epoch = None
            self._simulated.give_volumes(guest, plan)
            await plan.plugged()
        self._simulated.boot(guest, crash=crash)

    async def pause(self, uuid: str) -> None:
        """Pause a guest."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("pause", guest)
        if guest.power_state != power_state.PAUSED:
            expect(guest, power_state.RUNNING, "paused")
            self._simulated.set_power(guest, power_state.PAUSED, "paused")

    async def unpause(self, uuid: str) -> None:
        """Let a paused guest run again."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("unpause", guest)
        if guest.power_state != power_state.RUNNING:
            expect(guest, power_state.PAUSED, "unpaused")
            self._simulated.set_power(guest, power_state.RUNNING, "resumed")

    async def suspend(self, uuid: str) -> None:
        """Suspend a guest."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("suspend", guest)
        if guest.power_state != power_state.SUSPENDED:
            expect(guest, power_state.RUNNING, "suspended")
            self._simulated.set_power(guest, power_state.SUSPENDED, "suspended")

    async def resume(self, plan: GuestPlan) -> None:
        """Resume a suspended guest."""
        guest = self._simulated.require(plan.instance.uuid)
        await self._simulated.call("resume", guest)
        if guest.power_state != power_state.RUNNING:
            expect(guest, power_state.SUSPENDED, "resumed")
            await plan.plugged()
            self._simulated.set_power(guest, power_state.RUNNING, "resumed")

    async def snapshot(self, plan: GuestPlan) -> FakeDiskCopy:
        """Return an image that says what it was made from."""
        guest = self._simulated.require(plan.instance.uuid)
        if await self._simulated.call("snapshot", guest):
            self._simulated.crash(guest)

        async def during_upload() -> None:
            await self._simulated.call("upload", guest)

        return FakeDiskCopy(disk_content(guest), during_upload)

    async def quiesce(self, uuid: str) -> None:
        """Freeze the file systems of a guest."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("quiesce", guest)
        expect(guest, power_state.RUNNING, "quiesced")
        self._simulated.set_frozen(guest, frozen=True)

    async def unquiesce(self, uuid: str) -> None:
        """Thaw the file systems of a guest."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("unquiesce", guest)
        self._simulated.set_frozen(guest, frozen=False)

    async def rescue(self, plan: GuestPlan, timeout: float, *, stopping: Callable[[], None] = do_nothing) -> None:
        """Boot a guest from its rescue image, unless this order has done that."""
        assert plan.rescue_image is not None
        guest = self._simulated.require(plan.instance.uuid)
        await self._signed.verify_all(plan.rescue_image, plan)
        crash = await self._simulated.call("rescue", guest)
        if guest.rescue_epoch == plan.epoch and guest.power_state == power_state.RUNNING:
            return
        if guest.power_state == power_state.RUNNING:
            stopping()
            await self.power_off(guest.uuid, timeout)
        await plan.plugged()
        guest.rescue_epoch = plan.epoch
        guest.rescues = (*guest.rescues, (guest.boots + 1, plan.rescue_image.name or plan.rescue_image.id))
        if kernel := kernel_of(plan.rescue_image):
            guest.rescue_kernels = (*guest.rescue_kernels, (guest.boots + 1, kernel))
        self._simulated.boot(guest, crash=crash)

    async def unrescue(self, plan: GuestPlan) -> None:
        """Boot a guest from its own disk, unless it has."""
        guest = self._simulated.require(plan.instance.uuid)
        crash = await self._simulated.call("unrescue", guest)
        if guest.rescue_epoch is None and guest.power_state == power_state.RUNNING:
            return
        await plan.plugged()
        guest.rescue_epoch = None
        self._simulated.boot(guest, crash=crash)

    async def set_admin_password(self, plan: GuestPlan, password: str) -> None:
        """Accept any password; a simulated guest has no users."""
        guest = self._simulated.require(plan.instance.uuid)
        await self._simulated.call("set_admin_password", guest)
        expect(guest, power_state.RUNNING, "given a password")

    async def trigger_crash_dump(self, uuid: str) -> None:
        """Send a guest a non-maskable interrupt, of which its console tells; with a `crash` fault the guest panics."""
        guest = self._simulated.require(uuid)
        crash = await self._simulated.call("trigger_crash_dump", guest)
        if guest.power_state not in (power_state.RUNNING, power_state.PAUSED):
            raise Conflict(f"The guest {uuid} does not run: it cannot dump its memory.")
        guest.interrupts += 1
        self._store.put(guest)
        if crash:
            self._simulated.crash(guest)

    async def rebuild(
        self,
        plan: GuestPlan,
        *,
        start: bool,
        timeout: float,
        stopping: Callable[[], Awaitable[None]],
        removed: Callable[[], Awaitable[None]],
    ) -> None:
        """Replace a guest by a new one, which boots if it is to be started."""
        uuid = plan.instance.uuid
        await self._signed.verify_all(plan.instance.image, plan)
        old = self._simulated.find(uuid)
        if old is None:
            self._simulated.require_unknown(uuid)
        await stopping()
        if old is not None and old.power_state == power_state.RUNNING:
            await self._simulated.shut_down(old, timeout)
        guest = self._simulated.new(plan)
        if old is not None:
            guest.mdevs = old.mdevs
        # Stored before a fault can occur, as a real hypervisor has removed the old disks by now.
        self._store.put(guest)
        self._simulated.consoles.end(uuid)
        await removed()
        crash = await self._simulated.call("rebuild", guest)
        if not start:
            self._simulated.set_power(guest, power_state.SHUTDOWN, "stopped")
            return
        await plan.plugged()
        self._simulated.boot(guest, crash=crash)

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface; unplug it if the network does not confirm it."""
        guest = self._simulated.require(plan.instance.uuid)
        await self._simulated.call("attach_interface", guest)
        self._simulated.plug(guest, vif)
        try:
            await plan.plugged()
        except BaseException:
            self._simulated.unplug(guest, vif)
            raise

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Unplug an interface."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("detach_interface", guest)
        self._simulated.unplug(guest, vif)

    async def attach_volume(self, plan: GuestPlan, volume: AttachedVolume) -> None:
        """Give a guest a volume."""
        guest = self._simulated.require(plan.instance.uuid)
        await self._simulated.call("attach_volume", guest)
        self._simulated.give_volume(guest, volume)

    async def detach_volume(self, uuid: str, volume: AttachedVolume) -> None:
        """Take a volume from a guest."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("detach_volume", guest)
        self._simulated.take_volume(guest, volume)

    async def swap_volume(self, plan: GuestPlan, old: AttachedVolume, new: AttachedVolume) -> None:
        """Give a guest another volume in the place of one that it has; nothing is copied."""
        guest = self._simulated.require(plan.instance.uuid)
        await self._simulated.call("swap_volume", guest)
        self._simulated.give_volume(guest, new, instead=old)

    async def extend_volume(self, uuid: str, volume: AttachedVolume, size: int) -> None:
        """Let a guest see the new size of a volume."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("extend_volume", guest)
        self._simulated.extend_volume(guest, volume, size)

    async def resize(self, plan: GuestPlan) -> None:
        """Give a guest another size; its disks grow."""
        guest = self._simulated.require(plan.instance.uuid)
        if guest.epoch == plan.epoch:
            return
        expect(guest, power_state.SHUTDOWN, "resized")
        await self._simulated.call("resize", guest)
        before = moves.size_of(guest)
        self._simulated.check_free(plan, keeps_old=True)
        moves.give_size(guest, plan)
        guest.previous = before
        self._store.put(guest)

    async def confirm_resize(self, uuid: str) -> None:
        """Forget what a guest was before it was resized."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("confirm_resize", guest)
        guest.previous = None
        self._store.put(guest)

    async def revert_resize(self, plan: GuestPlan) -> None:
        """Make a guest what it was before it was resized; what it has written since is lost."""
        guest = self._simulated.require(plan.instance.uuid)
        await self._simulated.call("revert_resize", guest)
        if guest.epoch == plan.epoch:  # this order has done it
            return
        if guest.power_state not in (power_state.SHUTDOWN, power_state.CRASHED):
            self._simulated.set_power(guest, power_state.SHUTDOWN, "stopped")
        moves.restore_size(guest, plan)
        self._store.put(guest)

    async def export_disks(self, uuid: str) -> bytes:
        """Return the disks: they are small enough to be sent as they are."""
        guest = self._simulated.require(uuid)
        expect(guest, power_state.SHUTDOWN, "moved")
        await self._simulated.call("export_disks", guest)
        return moves.encode_disks(guest.disks)

    async def import_guest(self, plan: GuestPlan, disks: bytes) -> None:
        """Make a guest with the disks of one on another host."""
        self._simulated.require_unknown(plan.instance.uuid)
        guest = self._simulated.new(plan)
        guest.disks = moves.decode_disks(disks)
        self._store.put(guest)
        await self._simulated.call("import_guest", guest)
        moves.give_size(guest, plan)
        guest.power_state = power_state.SHUTDOWN
        self._store.put(guest)

    async def check_live_migration(self, plan: GuestPlan) -> None:
        """Fail by rule only: simulated hosts receive every guest."""
        await self._simulated.call("check_live_migration", self._simulated.new(plan))

    async def live_migrate(self, uuid: str) -> bytes:
        """Send a guest; it takes as long as the rules of the simulation say, or until it is forced to end."""
        guest = self._simulated.require(uuid)
        if guest.sent is None:
            if guest.power_state not in (power_state.RUNNING, power_state.PAUSED):
                raise Conflict(f"The guest {uuid} does not run: it cannot be sent.")
            forced = self._forced[uuid] = asyncio.Event()
            copying = asyncio.ensure_future(self._simulated.call("live_migrate", guest))
            ended = asyncio.ensure_future(forced.wait())
            try:
                await asyncio.wait({copying, ended}, return_when=asyncio.FIRST_COMPLETED)
                if copying.done():
                    copying.result()
            finally:
                del self._forced[uuid]
                for each in (copying, ended):
                    each.cancel()
            guest.sent, guest.power_state = guest.power_state, power_state.PAUSED
            self._store.put(guest)
        return moves.encode_state(guest)

    async def force_complete_live_migration(self, uuid: str) -> None:
        """End the copy of a guest's memory at once."""
        if uuid not in self._forced:
            raise Conflict(f"The guest {uuid} is not being sent.")
        self._forced[uuid].set()

    async def rollback_live_migration(self, uuid: str) -> int:
        """Let a guest that was sent continue here."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("rollback_live_migration", guest)
        if guest.sent is not None:
            guest.power_state, guest.sent = guest.sent, None
            self._store.put(guest)
        return guest.power_state

    async def receive_live_guest(self, plan: GuestPlan, state: bytes) -> int:
        """Continue a guest that was sent."""
        self._simulated.require_unknown(plan.instance.uuid)
        guest = self._simulated.new(plan)
        self._store.put(guest)
        await self._simulated.call("receive_live_guest", guest)
        moves.give_state(guest, state)
        self._store.put(guest)
        return guest.power_state

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Return invented statistics that grow with the guest's age."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("diagnostics", guest)
        return diagnose(guest, self._clock.now())

    async def cache_image(self, image: ImageMeta, url: str | None) -> bool:
        """Keep an image; a simulated host needs its data only to verify it. Rules match its name as a guest's."""
        await self._signed.verify(image, url)
        if image.id in self._images:
            return False
        await self._simulated.fail_by_rule("cache_image", image.name, {})
        self._images.add(image.id)
        return True

    async def boot_signs(self, uuids: Collection[str]) -> dict[str, BootSign]:
        """Return whether guests have begun to boot; those with a `boot` fault have not, or only after its delay."""
        now = self._clock.now()
        found = [guest for uuid in uuids if (guest := self._simulated.find(uuid)) is not None]
        return {guest.uuid: boot_sign(guest, now) for guest in found if guest.power_state == power_state.RUNNING}

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Return an invented console log."""
        guest = self._simulated.require(uuid)
        await self._simulated.call("console", guest)
        return last_lines(console_text(guest), length)

    async def get_vnc_console(self, uuid: str) -> ConsoleEndpoint:
        """Return where a picture that reacts to keys is shown."""
        return await self._simulated.console("vnc", uuid)

    async def get_spice_console(self, uuid: str) -> ConsoleEndpoint:
        """Return where the console of a guest's screen is by SPICE."""
        return await self._simulated.console("spice", uuid)

    async def get_serial_console(self, uuid: str, number: int = 0) -> ConsoleEndpoint:
        """Return where a small shell answers; there is one serial port."""
        if number:
            raise InstanceNotFound(f"The guest {uuid} has no serial port {number}.")
        return await self._simulated.console("serial", uuid)

    async def get_host_cpu_stats(self) -> CPUTimes:
        """Return the times of simulated processors: each running guest keeps one of them busy for a tenth."""
        passed = int((self._clock.monotonic() - self._up_since) * 1e9)
        busy = passed * sum(guest.power_state == power_state.RUNNING for guest in self._simulated) // 10
        idle = max(0, passed * self._simulated.node().vcpus - busy)
        return CPUTimes(user=busy, kernel=0, idle=idle, iowait=0, frequency=1000)

    async def get_host_uptime(self) -> str:
        """Return the time since the driver was made."""
        minutes = int(self._clock.monotonic() - self._up_since) // 60
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        return f"up {days} days, {hours}:{minutes:02d}, 0 users, load average: 0.00, 0.00, 0.00"

    def fault_rules(self) -> list[dict[str, Any]]:
        """Return the rules, which all simulated hosts of the process share."""
        return self._faults.listed()

    def set_fault_rules(self, rules: list[dict[str, Any]]) -> None:
        """Replace the rules."""
        self._faults.replace(rules)

    def guest_stops(self, uuid: str, *, crashed: bool = False) -> None:
        """Stop a guest as if its owner had shut it down from inside."""
        self.guest_becomes(uuid, "crashed" if crashed else "stopped")

    def guest_writes(self, uuid: str, text: str) -> None:
        """Write to a guest's root disk, as its user could."""
        guest = self._simulated.require(uuid)
        guest.disks = moves.written(guest.disks, text)
        self._store.put(guest)

    def guest_becomes(self, uuid: str, event: Lifecycle) -> None:
        """Change a guest's power state without an order, as somebody at the hypervisor could."""
        self._simulated.set_power(self._simulated.require(uuid), POWER_AFTER[event], event)


def _view(guest: FakeGuest) -> Guest:
    return Guest(
        uuid=guest.uuid,
        node=guest.node,
        epoch=guest.epoch,
        power_state=guest.power_state,
        name=guest.name,
        vcpus=guest.shared_vcpus,
        pcpus=guest.pcpus,
        memory_mb=guest.memory_mb,
        local_gb=guest.local_gb,
        claimed=guest.claimed,
        volumes=tuple(volume.volume_id for volume in guest.volumes),
        project_id=guest.project_id,
    )
