"""What the handlers of orders share: the guest of an order, whether a host boots its image, undoing failed work."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeGuard, TypeVar

from micronova.compute.host import Host
from micronova.compute.work import Outcome, Phase, Work
from micronova.objects import power_state
from micronova.objects.errors import BuildAborted, InstanceNotFound, MicronovaError, Unavailable
from micronova.objects.image import ImageMeta
from micronova.objects.orders import Guest, WorkOrder
from micronova.virt.driver import (
    AdminPassword,
    CrashDump,
    GuestPlan,
    HotPlug,
    KernelBoot,
    LiveMigrate,
    Migrate,
    Pause,
    Rebuild,
    Rescue,
    Resize,
    Snapshot,
    Suspend,
    Volumes,
    capable_driver,
    if_capable,
    verifies,
)

T = TypeVar("T")
CANNOT: Final[dict[type, str]] = {
    AdminPassword: "set passwords in guests",
    CrashDump: "make guests dump their memory",
    HotPlug: "plug interfaces into guests that exist already",
    LiveMigrate: "exchange running guests with other hosts",
    Migrate: "exchange guests with other hosts",
    Pause: "pause guests",
    Rebuild: "rebuild guests",
    Rescue: "rescue guests",
    Resize: "change the size of guests",
    Snapshot: "make images of guests",
    Suspend: "suspend guests",
    Volumes: "give volumes to guests",
}
"""What a host cannot do whose driver lacks a capability."""

Handler = Callable[[Host, Work], Awaitable[Outcome | None]]
"""Returns how the order ended, or None if the guest belongs to a newer epoch: then nothing is reported."""


def guest_plan(work: Work) -> GuestPlan:
    """Return what the driver needs of an order."""
    order = work.order
    return GuestPlan(
        instance=order.instance,
        epoch=order.epoch,
        plugged=work.plug_wait.wait,
        network_info=order.network_info,
        block_devices=order.block_devices,
        volumes=order.volumes,
        image_url=order.image_url,
        kernel_url=order.kernel_url,
        ramdisk_url=order.ramdisk_url,
        rescue_image=order.rescue_image,
        admin_password=order.admin_password,
        injected_files=order.injected_files,
    )


def check_driver_boots(host: Host, image: ImageMeta | None) -> None:
    """Raise BuildAborted if an image has to be verified, or has a kernel, and the host's driver ignores that."""
    if image is None:
        return
    if not all(verifies(host.driver, each) for each in (image, image.kernel, image.ramdisk) if each is not None):
        raise BuildAborted(
            f"The server's host does not verify signatures of images, and image {image.id} has to be verified."
        )
    if image.kernel is not None and if_capable(host.driver, KernelBoot) is None:
        raise BuildAborted(f"The server's host boots disks only, and image {image.id} has a kernel.")


def capable(host: Host, capability: type[T]) -> T:
    """Return the host's driver, which has a capability; raise NotSupported if it has not."""
    return capable_driver(host.driver, capability, f"The server's host cannot {CANNOT[capability]}.")


async def guest_of(host: Host, work: Work) -> Guest:
    """Return the guest of the order's server; raise InstanceNotFound if the host has none."""
    uuid = work.order.instance.uuid
    guest = await host.driver.info(uuid)
    if guest is None:
        raise InstanceNotFound(f"The server's host has no guest of the server {uuid}.")
    return guest


async def begin_power_change(host: Host, work: Work) -> Guest:
    """Note that the order changes the power state of its server's guest, which `end_power_change` ends; return it."""
    guest = await guest_of(host, work)
    host.power_change_begins(guest.uuid)
    return guest


def end_power_change(host: Host, uuid: str, power: int) -> Outcome:
    """Note the power state that the order has given the guest; return the outcome."""
    host.power_change_ended(uuid, power)
    return Outcome(outcome="done", power_state=power)


@contextmanager
def new_guest(host: Host, order: WorkOrder) -> Iterator[None]:
    """Hold the resources of an order, and note the guest that the body makes; release them if the body fails."""
    tracker = host.tracker(order.instance.node)
    with tracker.instance_claim(order):
        host.guest_present(order.instance.uuid, order.epoch, tracker.node)
        yield


def note_if_newer(guest: Guest | None, host: Host, work: Work) -> bool:
    """Return whether the guest is at a newer epoch than the order, which the host then notes: nothing is done then."""
    if guest is None or guest.epoch <= work.order.epoch:
        return False
    host.work_registry.epochs.note(guest.uuid, guest.epoch)
    return True


def note_if_made(guest: Guest | None, host: Host, work: Work) -> TypeGuard[Guest]:
    """Return whether this order has made the guest before, so that only its report was lost; the host then notes it.

    The guest is kept even if it has stopped since: it may hold data.
    """
    if guest is None or guest.epoch != work.order.epoch or guest.power_state == power_state.NOSTATE:
        return False
    host.guest_present(guest.uuid, guest.epoch, guest.node, guest.power_state)
    return True


def reschedule_outcome(error: MicronovaError, *, details: str | None = None, left_behind: bool = False) -> Outcome:
    """Return the outcome of an order that another host may carry out."""
    return Outcome(
        outcome="reschedule",
        # The only code that decides what follows (`Report.temporary`).
        error_code=error.code if isinstance(error, Unavailable) else None,
        message=error.message,
        details=details,
        left_behind=left_behind,
    )


@asynccontextmanager
async def undo_on_failure(work: Work, undo: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Undo what the body did if it fails or is cancelled; cancelled work ends cancelled, whatever its error."""
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        work.phase = Phase.UNDOING
        await undo()
        if work.cancelled or isinstance(error, asyncio.CancelledError):
            raise asyncio.CancelledError from error
        raise
