"""What a host does with a guest that it has: remove, stop, start, reboot, pause, suspend, plug and unplug.

Each may be repeated: after a crash of the agent the order comes again. A reboot that had been done but not
reported is done twice then; its owner asked for a restart and gets two, which no record could rule out.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Final

from micronova.compute.build import build, guest_plan
from micronova.compute.host import Host
from micronova.compute.undo import destroy
from micronova.compute.work import Outcome, Work
from micronova.objects.errors import InstanceNotFound, Invalid, NotSupported
from micronova.objects.network import VIF
from micronova.objects.orders import Guest
from micronova.virt import power_state
from micronova.virt.driver import HotPlug, Pause, Suspend

Action = Callable[[Host, Work], Awaitable[Outcome | None]]


async def terminate(host: Host, work: Work) -> Outcome | None:
    """Remove the guest, and whatever may be left of it."""
    uuid = work.order.instance.uuid
    guest = await host.driver.info(uuid)
    if guest is not None and guest.epoch > work.order.epoch:
        host.book.epochs.note(uuid, guest.epoch)
        return None
    await destroy(host, uuid)
    return Outcome(outcome="done", power_state=power_state.NOSTATE)


async def stop(host: Host, work: Work) -> Outcome:
    """Shut the guest down, as gently as its image and the settings say."""
    guest = await _guest(host, work)
    if guest.power_state != power_state.SHUTDOWN:
        await host.driver.power_off(guest.uuid, _shutdown_timeout(host, work))
    return _switched(host, guest, power_state.SHUTDOWN)


async def start(host: Host, work: Work) -> Outcome:
    """Let the guest run."""
    guest = await _guest(host, work)
    if guest.power_state != power_state.RUNNING:
        await host.driver.power_on(guest_plan(work))
    host.boots.started(guest.uuid)
    return _switched(host, guest, power_state.RUNNING)


async def reboot(host: Host, work: Work) -> Outcome:
    """Restart the guest."""
    guest = await _guest(host, work)
    hard = work.order.parameters.get("type", "HARD").upper() == "HARD"
    await host.driver.reboot(guest_plan(work), "HARD" if hard else "SOFT")
    host.boots.started(guest.uuid)
    return _switched(host, guest, power_state.RUNNING)


async def pause(host: Host, work: Work) -> Outcome:
    """Let the guest run no further."""
    driver = _pausing(host)
    guest = await _guest(host, work)
    await driver.pause(guest.uuid)
    return _switched(host, guest, power_state.PAUSED)


async def unpause(host: Host, work: Work) -> Outcome:
    """Let the guest go on."""
    driver = _pausing(host)
    guest = await _guest(host, work)
    await driver.unpause(guest.uuid)
    return _switched(host, guest, power_state.RUNNING)


async def suspend(host: Host, work: Work) -> Outcome:
    """Put the guest's memory away."""
    driver = _suspending(host)
    guest = await _guest(host, work)
    await driver.suspend(guest.uuid)
    return _switched(host, guest, power_state.SUSPENDED)


async def resume(host: Host, work: Work) -> Outcome:
    """Let the guest go on where it was suspended."""
    driver = _suspending(host)
    guest = await _guest(host, work)
    await driver.resume(guest_plan(work))
    return _switched(host, guest, power_state.RUNNING)


async def attach_interface(host: Host, work: Work) -> Outcome:
    """Plug one more interface in."""
    driver = _plugging(host)
    guest = await _present(host, work)
    plan = guest_plan(work)
    if guest.power_state not in (power_state.RUNNING, power_state.PAUSED):
        # Nothing is plugged before the guest starts, so the network has nothing to confirm.
        plan = dataclasses.replace(plan, plugged=_at_once)
    await driver.attach_interface(plan, _vif(work))
    return Outcome(outcome="done")


async def detach_interface(host: Host, work: Work) -> Outcome:
    """Unplug an interface."""
    driver = _plugging(host)
    guest = await _present(host, work)
    await driver.detach_interface(guest.uuid, _vif(work))
    return Outcome(outcome="done")


ACTIONS: Final[dict[str, Action]] = {
    "build": build,
    "delete": terminate,
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
"""By the order's kind."""

UNWANTED: Final[dict[str, Action]] = {"attach_interface": detach_interface}
"""By the order's kind: what undoes work that came to its end too late, when the conductor does not take its report."""


async def _at_once() -> None:
    pass


async def _guest(host: Host, work: Work) -> Guest:
    """Find the guest whose power state is about to change."""
    guest = await _present(host, work)
    host.expect(guest.uuid)
    return guest


async def _present(host: Host, work: Work) -> Guest:
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


def _pausing(host: Host) -> Pause:
    if not isinstance(host.driver, Pause):
        raise NotSupported(f"The host {host.name} cannot pause guests.")
    return host.driver


def _suspending(host: Host) -> Suspend:
    if not isinstance(host.driver, Suspend):
        raise NotSupported(f"The host {host.name} cannot suspend guests.")
    return host.driver


def _plugging(host: Host) -> HotPlug:
    if not isinstance(host.driver, HotPlug):
        raise NotSupported(f"The host {host.name} cannot plug interfaces into guests that exist already.")
    return host.driver


def _switched(host: Host, guest: Guest, power: int) -> Outcome:
    host.switched(guest.uuid, power)
    return Outcome(outcome="done", power_state=power)


def _shutdown_timeout(host: Host, work: Work) -> float:
    image = work.order.instance.image
    wanted = None if image is None else image.properties.get("os_shutdown_timeout")
    try:
        return host.settings.shutdown_timeout if wanted is None else max(0.0, float(wanted))
    except (TypeError, ValueError):
        return host.settings.shutdown_timeout
