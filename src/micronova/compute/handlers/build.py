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

import logging
import traceback

import msgspec

from micronova.compute.handlers.shared import (
    check_driver_boots,
    guest_plan,
    new_guest,
    note_if_made,
    note_if_newer,
    reschedule_outcome,
    undo_on_failure,
)
from micronova.compute.host import Host
from micronova.compute.slots import Slot
from micronova.compute.work import Outcome, Work
from micronova.objects import power_state
from micronova.objects.errors import BuildAborted, BuildFailed, MicronovaError, resource_exhausted
from micronova.telemetry.spans import span

log = logging.getLogger(__name__)


async def build(host: Host, work: Work) -> Outcome | None:
    """Build the guest of an order; return None if the guest is at a newer epoch, so that nothing is reported."""
    async with host.build_slots.one(work.order.instance.project_id) as slot:
        found, outcome = await _check_existing(host, work)
        if found:
            return outcome
        return await _spawn(host, work, slot)


async def _check_existing(host: Host, work: Work) -> tuple[bool, Outcome | None]:
    """Return whether a guest of an earlier agent or attempt settles the order, and how; remove it if it does not."""
    uuid = work.order.instance.uuid
    try:
        guest = await host.driver.info(uuid)
        if guest is None:
            return False, None
        if note_if_newer(guest, host, work):
            return True, None
        if note_if_made(guest, host, work):
            return True, Outcome(
                outcome="done", power_state=guest.power_state, config_drive=wants_config_drive(host, work)
            )
        await host.destroy(uuid)
    except Exception as error:  # drivers may raise anything
        log.warning(
            "host %s: an earlier guest of instance %s could not be read or removed; the build goes to another host: %s",
            host.name,
            uuid,
            error,
        )
        return True, _outcome(host, work, _driver_error(error), left_behind=True)
    return False, None


async def _spawn(host: Host, work: Work, slot: Slot) -> Outcome:
    uuid = work.order.instance.uuid
    begun = left_behind = False

    async def undo() -> None:
        nonlocal left_behind
        left_behind = begun and not await _remove(host, uuid)

    try:
        async with undo_on_failure(work, undo):
            with new_guest(host, work.order):
                begun = True
                await _make_guest(host, work, slot)
            host.boots.guest_started(uuid)
            host.power_change_ended(uuid, power_state.RUNNING)
    except Exception as error:
        log.info("host %s: instance %s was not built: %s", host.name, uuid, error)
        return _outcome(host, work, error, left_behind=left_behind)
    return Outcome(outcome="done", power_state=power_state.RUNNING, config_drive=wants_config_drive(host, work))


async def _make_guest(host: Host, work: Work, slot: Slot) -> None:
    uuid = work.order.instance.uuid
    check_driver_boots(host, work.order.instance.image)
    plan = guest_plan(work)

    async def plugged() -> None:
        # The guest is made. Its owner can keep the network from ever confirming: other builds do not wait for that.
        slot.release()
        await work.plug_wait.wait()

    plan.plugged = plugged
    plan.instance = msgspec.structs.replace(plan.instance, config_drive=wants_config_drive(host, work))
    try:
        with span("spawn", host=host.name, instance=uuid):
            await host.driver.spawn(plan)
    except MicronovaError:
        raise
    except Exception as error:
        log.exception("host %s: instance %s could not be built", host.name, uuid)
        raise _driver_error(error) from error


def wants_config_drive(host: Host, work: Work) -> bool:
    """Return whether a guest gets a config drive: its server asks for it, or the host's settings do."""
    return work.order.instance.config_drive or host.settings.force_config_drive


async def _remove(host: Host, uuid: str) -> bool:
    """Remove what exists of a guest; return whether that has succeeded."""
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


def _outcome(host: Host, work: Work, error: Exception, *, left_behind: bool) -> Outcome:
    error = resource_exhausted(error) or error
    if not isinstance(error, MicronovaError):
        log.error(
            "host %s: the build of instance %s failed by an error in Micronova itself; report it with this traceback",
            host.name,
            work.order.instance.uuid,
            exc_info=error,
        )
        return Outcome(
            outcome="error",
            message="The build failed unexpectedly.",
            details="".join(traceback.format_exception(error)),
            left_behind=left_behind,
        )
    details = error.details.get("details")
    outcome = reschedule_outcome(error, details=details if isinstance(details, str) else None, left_behind=left_behind)
    return msgspec.structs.replace(outcome, outcome="abort") if isinstance(error, BuildAborted) else outcome
