"""What a host does with a guest that it has: remove, stop, start, reboot.

Each may be repeated: after a crash of the agent the order comes again. A reboot that had been done but not
reported is done twice then; its owner asked for a restart and gets two, which no record could rule out.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from micronova.compute.build import build, guest_plan
from micronova.compute.host import Host
from micronova.compute.undo import destroy
from micronova.compute.work import Outcome, Work
from micronova.objects.errors import InstanceNotFound
from micronova.objects.orders import Guest
from micronova.virt import power_state

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
    return _switched(host, guest, power_state.RUNNING)


async def reboot(host: Host, work: Work) -> Outcome:
    """Restart the guest."""
    guest = await _guest(host, work)
    hard = work.order.parameters.get("type", "HARD").upper() == "HARD"
    await host.driver.reboot(guest_plan(work), "HARD" if hard else "SOFT")
    return _switched(host, guest, power_state.RUNNING)


ACTIONS: Final[dict[str, Action]] = {
    "build": build,
    "delete": terminate,
    "stop": stop,
    "start": start,
    "reboot": reboot,
}
"""By the order's kind."""


async def _guest(host: Host, work: Work) -> Guest:
    uuid = work.order.instance.uuid
    guest = await host.driver.info(uuid)
    if guest is None:
        raise InstanceNotFound(f"The host {host.name} has no guest of the server {uuid}.")
    host.expect(uuid)
    return guest


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
