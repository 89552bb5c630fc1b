"""Booting guests from rescue images. A guest's own disks stay as its record has them."""

from collections.abc import Callable

from micronova.objects import power_state
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.launcher import Launcher
from micronova.virt.libvirt.guests.power import GuestPower
from micronova.virt.libvirt.guests.rescue_disks import RescueDisks


class Rescuer:
    """Rescues and unrescues the guests of one host."""

    def __init__(self, launcher: Launcher, power: GuestPower, guests: GuestAccess, disks: RescueDisks) -> None:
        self._launcher = launcher
        self._power = power
        self._guests = guests
        self._disks = disks

    async def rescue(self, plan: GuestPlan, timeout: float, stopping: Callable[[], None]) -> None:
        """Boot a guest from a rescue disk, unless this order has done that."""
        uuid = plan.instance.uuid
        record, power = await self._guests.require_complete(uuid)
        if record.rescue is not None:
            if record.rescue.complete and record.rescue.epoch == plan.epoch and power == power_state.RUNNING:
                return
            # An earlier attempt was interrupted: the guest may run from the disk that is made again.
            await self._power.has_shut_down(uuid, power, timeout)
            await self._launcher.stop(uuid)
            record, power = await self._disks.remove(record), power_state.SHUTDOWN
        try:
            rescued = await self._disks.make(plan, record, self._launcher)
            stopping()
            await self._power.has_shut_down(uuid, power, timeout)
            await self._launcher.stop(uuid)
            await self._launcher.launch(plan, rescued)
        except Exception:
            await self._disks.remove_after_failure(uuid)
            raise
        await self._disks.complete(uuid)

    async def unrescue(self, plan: GuestPlan) -> None:
        """Boot a guest from its own disks, unless it runs from them, and remove the rescue disk."""
        record, power = await self._guests.require_complete(plan.instance.uuid)
        if record.rescue is not None or power != power_state.RUNNING:
            await self._power.boot_from_own_disks(plan, record)
