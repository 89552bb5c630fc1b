"""One handler for each kind of order on an existing guest; `compute/build.py` has the one that builds a guest.

A handler may run twice for an order: after a crash of the agent the conductor sends the order again. A reboot that
was done but not reported is then repeated; no record could prevent that.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Final

from micronova.compute.build import build, guest_plan
from micronova.compute.host import Host
from micronova.compute.work import Outcome, Work
from micronova.objects import power_state
from micronova.objects.errors import InstanceNotFound, Invalid, NotSupported
from micronova.objects.network import VIF
from micronova.objects.orders import Guest
from micronova.virt.driver import HotPlug, Pause, Suspend

Handler = Callable[[Host, Work], Awaitable[Outcome | None]]
"""Returns how the order ended, or None if the guest belongs to a newer epoch: then nothing is reported."""


async def delete(host: Host, work: Work) -> Outcome | None:
    """Remove the guest and everything that was made for it."""
    uuid = work.order.instance.uuid
    guest = await host.driver.info(uuid)
    if guest is not None and guest.epoch > work.order.epoch:
        host.work_registry.epochs.note(uuid, guest.epoch)
        return None
    await host.destroy(uuid)
    return Outcome(outcome="done", power_state=power_state.NOSTATE)


async def stop(host: Host, work: Work) -> Outcome:
    """Shut the guest down; image and settings limit the time that the guest has for it."""
    guest = await _guest_to_switch(host, work)
    if guest.power_state != power_state.SHUTDOWN:
        await host.driver.power_off(guest.uuid, _shutdown_timeout(host, work))
    return _switched(host, guest, power_state.SHUTDOWN)


async def start(host: Host, work: Work) -> Outcome:
    """Start the guest."""
    guest = await _guest_to_switch(host, work)
    if guest.power_state != power_state.RUNNING:
        # After a boot of the host all its guests start: not more at once than are built.
        together = host.build_slots if work.order.parameters.get("cause") == "host_boot" else nullcontext()
        async with together:
            await host.driver.power_on(guest_plan(work))
    host.boots.guest_started(guest.uuid)
    return _switched(host, guest, power_state.RUNNING)


async def reboot(host: Host, work: Work) -> Outcome:
    """Restart the guest."""
    guest = await _guest_to_switch(host, work)
    hard = work.order.parameters.get("type", "HARD").upper() == "HARD"
    await host.driver.reboot(guest_plan(work), "HARD" if hard else "SOFT")
    host.boots.guest_started(guest.uuid)
    return _switched(host, guest, power_state.RUNNING)


async def pause(host: Host, work: Work) -> Outcome:
    """Pause the guest."""
    driver = _pause_driver(host)
    guest = await _guest_to_switch(host, work)
    await driver.pause(guest.uuid)
    return _switched(host, guest, power_state.PAUSED)


async def unpause(host: Host, work: Work) -> Outcome:
    """Unpause the guest."""
    driver = _pause_driver(host)
    guest = await _guest_to_switch(host, work)
    await driver.unpause(guest.uuid)
    return _switched(host, guest, power_state.RUNNING)


async def suspend(host: Host, work: Work) -> Outcome:
    """Suspend the guest: its memory is saved to disk."""
    driver = _suspend_driver(host)
    guest = await _guest_to_switch(host, work)
    await driver.suspend(guest.uuid)
    return _switched(host, guest, power_state.SUSPENDED)


async def resume(host: Host, work: Work) -> Outcome:
    """Resume the guest from its saved memory."""
    driver = _suspend_driver(host)
    guest = await _guest_to_switch(host, work)
    await driver.resume(guest_plan(work))
    return _switched(host, guest, power_state.RUNNING)


async def attach_interface(host: Host, work: Work) -> Outcome:
    """Plug an interface into the guest."""
    driver = _hot_plug_driver(host)
    guest = await _guest(host, work)
    plan = guest_plan(work)
    if guest.power_state not in (power_state.RUNNING, power_state.PAUSED):
        # Nothing is plugged before the guest starts, so the network has nothing to confirm.
        plan = dataclasses.replace(plan, plugged=_return_at_once)
    await driver.attach_interface(plan, _vif(work))
    return Outcome(outcome="done")


async def detach_interface(host: Host, work: Work) -> Outcome:
    """Unplug an interface of the guest."""
    driver = _hot_plug_driver(host)
    guest = await _guest(host, work)
    await driver.detach_interface(guest.uuid, _vif(work))
    return Outcome(outcome="done")


HANDLERS: Final[dict[str, Handler]] = {
    "build": build,
    "delete": delete,
    "stop": stop,
    "start": start,
    "reboot": reboot,
    "pause": pause,
    "unpause": unpause,
    "suspend": suspend,
    "resume": resume,
    "attach_interface": attach_interface,
    "detach_interface": detach_interface,
}
"""By the kind of the order."""

UNDO: Final[dict[str, Handler]] = {"attach_interface": detach_interface}
"""By the kind of the order: undoes work whose report came too late, so that the conductor refused it."""


async def _return_at_once() -> None:
    pass


async def _guest_to_switch(host: Host, work: Work) -> Guest:
    """Return the guest, and note that its power state is about to change."""
    guest = await _guest(host, work)
    host.power_change_begins(guest.uuid)
    return guest


async def _guest(host: Host, work: Work) -> Guest:
    uuid = work.order.instance.uuid
    guest = await host.driver.info(uuid)
    if guest is None:
        raise InstanceNotFound(f"The host {host.name} has no guest of the server {uuid}.")
    return guest


def _vif(work: Work) -> VIF:
    order = work.order
    port = order.parameters.get("port_id")
    for vif in order.network_info:
        if vif.port_id == port:
            return vif
    raise Invalid(f"The order {order.operation_id} does not describe the port {port} that it is about.")


def _pause_driver(host: Host) -> Pause:
    if not isinstance(host.driver, Pause):
        raise NotSupported(f"The host {host.name} cannot pause guests.")
    return host.driver


def _suspend_driver(host: Host) -> Suspend:
    if not isinstance(host.driver, Suspend):
        raise NotSupported(f"The host {host.name} cannot suspend guests.")
    return host.driver


def _hot_plug_driver(host: Host) -> HotPlug:
    if not isinstance(host.driver, HotPlug):
        raise NotSupported(f"The host {host.name} cannot plug interfaces into guests that exist already.")
    return host.driver


def _switched(host: Host, guest: Guest, power: int) -> Outcome:
    host.power_change_ended(guest.uuid, power)
    return Outcome(outcome="done", power_state=power)


def _shutdown_timeout(host: Host, work: Work) -> float:
    image = work.order.instance.image
    wanted = None if image is None else image.properties.get("os_shutdown_timeout")
    try:
        return host.settings.shutdown_timeout if wanted is None else max(0.0, float(wanted))
    except (TypeError, ValueError):
        return host.settings.shutdown_timeout
