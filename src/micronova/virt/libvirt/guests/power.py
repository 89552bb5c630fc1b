"""Starting and stopping guests that exist: power, pause, suspend.

Guests that do not run are started from their own disks. A rescue disk is removed: no order to start a guest comes for
one that is to stay rescued.
"""

import logging

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects import power_state
from micronova.objects.errors import Conflict, NotSupported
from micronova.virt.driver import GuestPlan, RebootType
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.graceful import GracefulPower
from micronova.virt.libvirt.guests.launcher import SAVE_SECONDS_PER_GB, Launcher
from micronova.virt.libvirt.guests.rescue_disks import RescueDisks
from micronova.virt.libvirt.storage.records import GuestRecord

log = logging.getLogger(__name__)


class GuestPower:
    """Changes the power states of the guests of one host."""

    def __init__(
        self,
        launcher: Launcher,
        guests: GuestAccess,
        graceful: GracefulPower,
        rescue_disks: RescueDisks,
        settings: LibvirtSettings,
    ) -> None:
        self._launcher = launcher
        self._guests = guests
        self._graceful = graceful
        self._rescue_disks = rescue_disks
        self._settings = settings

    async def on(self, plan: GuestPlan) -> None:
        """Start a guest that does not run, or resume one that is paused."""
        uuid = plan.instance.uuid
        record, power = await self._guests.require_complete(uuid)
        if power == power_state.PAUSED:
            # An agent may have died while this guest waited for the network.
            await plan.plugged()
            await self._launcher.resume(uuid)
        elif power != power_state.RUNNING:
            await self.boot_from_own_disks(plan, record)

    async def off(self, uuid: str, timeout: float) -> None:
        """Ask a guest to shut down, and stop it if it does not."""
        _, power = await self._guests.require(uuid)
        if power != power_state.SHUTDOWN and not await self.has_shut_down(uuid, power, timeout):
            await self._guests.change(uuid, domains.power_off, "stop the guest")

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Restart a guest; one that does not react to a soft reboot gets a hard one."""
        uuid = plan.instance.uuid
        record, power = await self._guests.require_complete(uuid)
        if kind == "SOFT" and power == power_state.RUNNING:
            if await self._graceful.reboot(uuid, self._settings.wait_soft_reboot_seconds):
                return
            log.info("guest %s did not react to a soft reboot and gets a hard one", uuid)
        await self.boot_from_own_disks(plan, record)

    async def pause(self, uuid: str) -> None:
        """Stop the guest's CPUs."""
        _, power = await self._guests.require(uuid)
        if power != power_state.PAUSED:
            await self._guests.change(uuid, domains.pause, "pause the guest")

    async def unpause(self, uuid: str) -> None:
        """Let the guest's CPUs run again."""
        _, power = await self._guests.require(uuid)
        if power == power_state.PAUSED:
            await self._launcher.resume(uuid)
        elif power != power_state.RUNNING:
            raise Conflict(f"The guest {uuid} does not run: it cannot be resumed.")

    async def suspend(self, uuid: str) -> None:
        """Save the guest's memory to disk and stop it."""
        record, power = await self._guests.require(uuid)
        if power == power_state.SUSPENDED:
            return
        if power not in (power_state.RUNNING, power_state.PAUSED):
            raise Conflict(f"The guest {uuid} does not run: it cannot be suspended.")
        if record.pins is not None and record.pins.devices:
            raise NotSupported(f"The guest {uuid} has PCI devices of the host, whose state cannot be saved.")
        if record.pins is not None and record.pins.mdevs:
            raise NotSupported(f"The guest {uuid} has mediated devices of the host, whose state cannot be saved.")
        timeout = self._settings.call_timeout + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
        await self._guests.change(uuid, domains.save, "suspend the guest", timeout=timeout, lane="memory")

    async def resume(self, plan: GuestPlan) -> None:
        """Restore the guest's memory from disk; it has the interfaces that it had when it was suspended."""
        uuid = plan.instance.uuid
        record, power = await self._guests.require(uuid)
        if power == power_state.RUNNING:
            return
        if power == power_state.PAUSED:
            await plan.plugged()
            await self._launcher.resume(uuid)
            return
        await self._launcher.restore(plan, record)

    async def boot_from_own_disks(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Stop a guest, if it runs, and start it from its own disks; a rescue disk is removed."""
        await self._launcher.stop(record.uuid)
        if record.rescue is not None:
            record = await self._rescue_disks.remove(record)
        await self._launcher.launch(plan, record)

    async def has_shut_down(self, uuid: str, power: int, timeout: float) -> bool:
        """Ask a guest to shut down if it runs; return whether it has."""
        if power != power_state.RUNNING or timeout <= 0:
            return False
        if await self._graceful.shut_down(uuid, timeout):
            return True
        log.info("guest %s did not shut down within %g s and is stopped", uuid, timeout)
        return False
