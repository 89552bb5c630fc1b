"""The handlers of orders about volumes of guests that exist."""

from micronova.compute.handlers.shared import guest_of, guest_plan
from micronova.compute.host import Host
from micronova.compute.work import Outcome, Work
from micronova.objects.errors import Invalid
from micronova.objects.volume import AttachedVolume
from micronova.virt.driver import Volumes, capable_driver

_LACKING = "The server's host cannot give volumes to guests."


async def attach_volume(host: Host, work: Work) -> Outcome:
    """Give the guest a volume."""
    driver = capable_driver(host.driver, Volumes, _LACKING)
    await guest_of(host, work)
    await driver.attach_volume(guest_plan(work), _required_volume(work))
    return Outcome(outcome="done")


async def detach_volume(host: Host, work: Work) -> Outcome:
    """Take a volume from the guest; one without a connection was never given to it."""
    driver = capable_driver(host.driver, Volumes, _LACKING)
    guest = await guest_of(host, work)
    volume = _volume(work)
    if volume is not None:
        await driver.detach_volume(guest.uuid, volume)
    return Outcome(outcome="done")


async def extend_volume(host: Host, work: Work) -> Outcome:
    """Let the guest see that a volume is larger."""
    driver = capable_driver(host.driver, Volumes, _LACKING)
    guest = await guest_of(host, work)
    volume = _volume(work)
    if volume is not None:
        await driver.extend_volume(guest.uuid, volume, int(work.order.parameters["size_gb"]) << 30)
    return Outcome(outcome="done")


async def swap_volume(host: Host, work: Work) -> Outcome:
    """Copy a volume to another one, which takes its place. The order has both."""
    driver = capable_driver(host.driver, Volumes, _LACKING)
    await guest_of(host, work)
    old, new = _required_volume(work), _required_volume(work, "new_volume_id")
    plan = guest_plan(work)
    plan.volumes = tuple(volume for volume in plan.volumes if volume.volume_id != old.volume_id)
    await driver.swap_volume(plan, old, new)
    return Outcome(outcome="done")


def _required_volume(work: Work, parameter: str = "volume_id") -> AttachedVolume:
    volume = _volume(work, parameter)
    if volume is None:
        raise Invalid(f"The order {work.order.operation_id} does not describe the volume that it is about.")
    return volume


def _volume(work: Work, parameter: str = "volume_id") -> AttachedVolume | None:
    wanted = work.order.parameters.get(parameter)
    return next((volume for volume in work.order.volumes if volume.volume_id == wanted), None)
