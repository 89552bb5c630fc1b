"""Building a guest, and what follows from each way in which that can fail.

| what                                                  | outcome    |
|-------------------------------------------------------|------------|
| the order was withdrawn (delete, drop, agent stopped) | none       |
| the guest is at a newer epoch: nothing is done        | none       |
| not enough resources, or the driver failed            | reschedule |
| it cannot succeed on any host (BuildAborted)          | abort      |
| an error in our own code                              | error      |

What this order made on the host is undone first. Without an outcome nothing is reported. If the host lacks something
for the moment, the error code is that of Unavailable: the conductor then waits, and counts no attempt.
"""

import asyncio
import logging
import traceback

import msgspec

from micronova.compute.host import Host
from micronova.compute.work import Outcome, Phase, Work
from micronova.objects import power_state
from micronova.objects.errors import BuildAborted, BuildFailed, MicronovaError, Unavailable, resource_exhausted
from micronova.telemetry.spans import span
from micronova.virt.driver import GuestPlan

log = logging.getLogger(__name__)


def guest_plan(work: Work) -> GuestPlan:
    """Return what the driver needs of an order."""
    order = work.order
    return GuestPlan(
        instance=order.instance,
        epoch=order.epoch,
        plugged=work.plug_wait.wait,
        network_info=order.network_info,
        block_devices=order.block_devices,
        image_ticket=order.image_ticket,
        admin_password=order.admin_password,
        injected_files=order.injected_files,
    )


async def build(host: Host, work: Work) -> Outcome | None:
    """Build the guest of an order; return None if the guest is at a newer epoch, so that nothing is reported."""
    async with host.build_slots:
        found, outcome = await _check_existing(host, work)
        if found:
            return outcome
        return await _spawn(host, work)


async def _check_existing(host: Host, work: Work) -> tuple[bool, Outcome | None]:
    """Return whether a guest of an earlier agent or attempt settles the order, and how; remove it if it does not."""
    order = work.order
    uuid = order.instance.uuid
    try:
        guest = await host.driver.info(uuid)
        if guest is None:
            return False, None
        if guest.epoch > order.epoch:
            host.work_registry.epochs.note(uuid, guest.epoch)
            return True, None
        if guest.epoch == order.epoch and guest.power_state != power_state.NOSTATE:
            # It was built and the report was lost. It is kept also if it has stopped since: it may hold data.
            host.guest_present(uuid, guest.epoch, guest.node, guest.power_state)
            return True, Outcome(
                outcome="done", power_state=guest.power_state, config_drive=_wants_config_drive(host, work)
            )
        await host.destroy(uuid)
    except Exception as error:  # drivers may raise anything
        log.warning(
            "host %s: an earlier guest of instance %s could not be read or removed; the build goes to another host: %s",
            host.name,
            uuid,
            error,
        )
        return True, _outcome(_driver_error(error), left_behind=True)
    return False, None


async def _spawn(host: Host, work: Work) -> Outcome:
    order = work.order
    uuid = order.instance.uuid
    begun = False
    try:
        tracker = host.tracker(order.instance.node)
        with tracker.instance_claim(order):
            begun = True
            host.guest_present(uuid, order.epoch, tracker.node)
            try:
                with span("spawn", host=host.name, instance=uuid):
                    plan = guest_plan(work)
                    plan.instance = msgspec.structs.replace(plan.instance, config_drive=_wants_config_drive(host, work))
                    await host.driver.spawn(plan)
            except MicronovaError:
                raise
            except Exception as error:
                log.exception("host %s: instance %s could not be built", host.name, uuid)
                raise _driver_error(error) from error
        host.boots.guest_started(uuid)
        host.power_change_ended(uuid, power_state.RUNNING)
    except (Exception, asyncio.CancelledError) as error:
        work.phase = Phase.UNDOING
        left_behind = begun and not await _undo(host, uuid)
        if work.cancelled or isinstance(error, asyncio.CancelledError):
            raise asyncio.CancelledError from error
        log.info("host %s: instance %s was not built: %s", host.name, uuid, error)
        return _outcome(error, left_behind=left_behind)
    return Outcome(outcome="done", power_state=power_state.RUNNING, config_drive=_wants_config_drive(host, work))


def _wants_config_drive(host: Host, work: Work) -> bool:
    return work.order.instance.config_drive or host.settings.force_config_drive


async def _undo(host: Host, uuid: str) -> bool:
    try:
        await host.destroy(uuid)
    except Exception:
        log.exception("host %s: a half-built guest of instance %s is left behind", host.name, uuid)
        return False
    return True


def _driver_error(error: Exception) -> MicronovaError:
    if isinstance(error, MicronovaError):
        return error
    lack = resource_exhausted(error)
    if lack is not None:
        return lack
    return BuildFailed("The hypervisor failed to build the server.", details="".join(traceback.format_exception(error)))


def _outcome(error: BaseException, *, left_behind: bool) -> Outcome:
    error = resource_exhausted(error) or error
    if not isinstance(error, MicronovaError):
        log.error("a build failed by an error in Micronova's own code", exc_info=error)
        return Outcome(
            outcome="error",
            message="The build failed unexpectedly.",
            details="".join(traceback.format_exception(error)),
            left_behind=left_behind,
        )
    details = error.details.get("details")
    return Outcome(
        outcome="abort" if isinstance(error, BuildAborted) else "reschedule",
        # The only code that decides about a build (`Report.temporary`); the others follow from the outcome.
        error_code=error.code if isinstance(error, Unavailable) else None,
        message=error.message,
        details=details if isinstance(details, str) else None,
        left_behind=left_behind,
    )
