"""Building a guest, and what follows from each way in which that can fail.

| what                                                  | outcome    |
|-------------------------------------------------------|------------|
| the order was withdrawn (delete, drop, agent stopped) | none: undone quietly |
| not enough resources, or the driver failed            | reschedule |
| it cannot succeed on any host (BuildAborted)          | abort      |
| an error in our own code                              | error      |

Whatever was made on this host is undone first.
"""

import asyncio
import logging
import traceback

from micronova.compute.host import Host
from micronova.compute.undo import destroy
from micronova.compute.work import Outcome, Phase, Work
from micronova.objects.errors import BuildAborted, BuildFailed, InsufficientResources, MicronovaError
from micronova.telemetry.spans import span
from micronova.virt import power_state
from micronova.virt.driver import GuestPlan

log = logging.getLogger(__name__)


def guest_plan(work: Work) -> GuestPlan:
    """Give what the driver needs of an order."""
    order = work.order
    return GuestPlan(
        instance=order.instance,
        epoch=order.epoch,
        plugged=work.gate.wait,
        network_info=order.network_info,
        block_devices=order.block_devices,
        image_ticket=order.image_ticket,
        admin_password=order.admin_password,
        injected_files=order.injected_files,
    )


async def build(host: Host, work: Work) -> Outcome | None:
    """Build the guest of an order; None: a newer owner has it, nothing is to be said."""
    async with host.build_slots:
        found, outcome = await _look(host, work)
        if found:
            return outcome
        return await _make(host, work)


async def _look(host: Host, work: Work) -> tuple[bool, Outcome | None]:
    """See what an earlier agent, or an earlier attempt, left here; say whether that settles the order."""
    order = work.order
    uuid = order.instance.uuid
    try:
        guest = await host.driver.info(uuid)
        if guest is None:
            return False, None
        if guest.epoch > order.epoch:
            host.book.epochs.note(uuid, guest.epoch)
            return True, None
        if guest.epoch == order.epoch and guest.power_state != power_state.NOSTATE:
            # Built already, its report was lost. Also if it has stopped since: its owner may have data on it.
            host.present(uuid, guest.epoch, guest.node, guest.power_state)
            return True, Outcome(outcome="done", power_state=guest.power_state)
        await destroy(host, uuid)
    except Exception as error:  # drivers may raise anything
        log.warning("host %s: what there is of instance %s cannot be told: %s", host.name, uuid, error)
        return True, _outcome(_driver_error(error), left_behind=True)
    return False, None


async def _make(host: Host, work: Work) -> Outcome:
    order = work.order
    uuid = order.instance.uuid
    begun = False
    try:
        tracker = host.tracker(order.instance.node)
        with tracker.instance_claim(order):
            begun = True
            host.present(uuid, order.epoch, tracker.node)
            try:
                with span("spawn", host=host.name, instance=uuid):
                    await host.driver.spawn(guest_plan(work))
            except MicronovaError:
                raise
            except Exception as error:
                log.exception("host %s: instance %s could not be built", host.name, uuid)
                raise _driver_error(error) from error
        host.boots.started(uuid)
        host.switched(uuid, power_state.RUNNING)
    except (Exception, asyncio.CancelledError) as error:
        work.phase = Phase.UNDOING
        left_behind = begun and not await _undo(host, uuid)
        if work.cancelled or isinstance(error, asyncio.CancelledError):
            raise asyncio.CancelledError from error
        log.info("host %s: instance %s was not built: %s", host.name, uuid, error)
        return _outcome(error, left_behind=left_behind)
    return Outcome(outcome="done", power_state=power_state.RUNNING)


async def _undo(host: Host, uuid: str) -> bool:
    try:
        await destroy(host, uuid)
    except Exception:
        log.exception("host %s: a half-built guest of instance %s is left behind", host.name, uuid)
        return False
    return True


def _driver_error(error: Exception) -> MicronovaError:
    if isinstance(error, MicronovaError):
        return error
    return BuildFailed("The hypervisor failed to build the server.", details="".join(traceback.format_exception(error)))


def _outcome(error: BaseException, *, left_behind: bool) -> Outcome:
    if isinstance(error, BuildAborted):
        outcome = "abort"
    elif isinstance(error, MicronovaError):
        outcome = "reschedule"
    else:
        log.error("building failed in our own code", exc_info=error)
        return Outcome(
            outcome="error",
            error_code=MicronovaError.code,
            message="The build failed unexpectedly.",
            details="".join(traceback.format_exception(error)),
            left_behind=left_behind,
        )
    code = error.code if isinstance(error, (BuildAborted, InsufficientResources)) else BuildFailed.code
    details = error.details.get("details")
    return Outcome(
        outcome=outcome,
        error_code=code,
        message=error.message,
        details=details if isinstance(details, str) else None,
        left_behind=left_behind,
    )
