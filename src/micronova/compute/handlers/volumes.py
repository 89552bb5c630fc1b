"""The handlers of orders about volumes of guests that exist."""

import logging

from micronova.compute import volume_statistics
from micronova.compute.handlers.shared import capable, guest_of, guest_plan
from micronova.compute.host import Host
from micronova.compute.work import Outcome, Work
from micronova.objects.errors import Invalid, MicronovaError
from micronova.objects.volume import AttachedVolume, VolumeStatistics
from micronova.virt.driver import Volumes

log = logging.getLogger(__name__)


async def attach_volume(host: Host, work: Work) -> Outcome:
    """Give the guest a volume."""
    driver = capable(host, Volumes)
    await guest_of(host, work)
    await driver.attach_volume(guest_plan(work), _required_volume(work))
    return Outcome(outcome="done")


async def detach_volume(host: Host, work: Work) -> Outcome:
    """Take a volume from the guest; one without a connection was never given to it."""
    driver = capable(host, Volumes)
    guest = await guest_of(host, work)
    volume = _volume(work)
    if volume is None:
        return Outcome(outcome="done")
    statistics = await _statistics(host, guest.uuid, volume)
    await driver.detach_volume(guest.uuid, volume)
    return Outcome(outcome="done", volume_statistics=statistics)


async def extend_volume(host: Host, work: Work) -> Outcome:
    """Let the guest see that a volume is larger."""
    driver = capable(host, Volumes)
    guest = await guest_of(host, work)
    volume = _volume(work)
    if volume is not None:
        await driver.extend_volume(guest.uuid, volume, int(work.order.parameters["size_gb"]) << 30)
    return Outcome(outcome="done")


async def swap_volume(host: Host, work: Work) -> Outcome:
    """Copy a volume to another one, which takes its place. The order has both."""
    driver = capable(host, Volumes)
    await guest_of(host, work)
    old, new = _required_volume(work), _required_volume(work, "new_volume_id")
    plan = guest_plan(work)
    plan.volumes = tuple(volume for volume in plan.volumes if volume.volume_id != old.volume_id)
    await driver.swap_volume(plan, old, new)
    return Outcome(outcome="done")


async def _statistics(host: Host, uuid: str, volume: AttachedVolume) -> VolumeStatistics | None:
    """Return what the guest has read and written, if it can be measured: the volume is detached in any case."""
    try:
        found = await volume_statistics.of_guest(host.driver, uuid)
    except MicronovaError as error:
        log.warning("the use of volume %s by guest %s could not be measured: %s", volume.volume_id, uuid, error)
        return None
    return next((each for each in found if each.volume_id == volume.volume_id), None)


def _required_volume(work: Work, parameter: str = "volume_id") -> AttachedVolume:
    volume = _volume(work, parameter)
    if volume is None:
        raise Invalid(f"The order {work.order.operation_id} does not describe the volume that it is about.")
    return volume


def _volume(work: Work, parameter: str = "volume_id") -> AttachedVolume | None:
    wanted = work.order.parameters.get(parameter)
    return next((volume for volume in work.order.volumes if volume.volume_id == wanted), None)
