"""Rebuilding a guest: its disks are made again from the image of the order, on the same host.

The order may run twice. A guest that is complete at the order's epoch was rebuilt before, and only the report was lost.
Anything else is rebuilt again: the old guest, which an agent may have stopped already, or a part of the new one. What a
failed or interrupted rebuild leaves on the host stays there for the next rebuild or for the delete.
"""

import logging

import msgspec

from micronova.compute.handlers.build import wants_config_drive
from micronova.compute.handlers.shared import capable, check_driver_boots, guest_plan, note_if_made, note_if_newer
from micronova.compute.host import Host
from micronova.compute.work import Outcome, Work
from micronova.objects import power_state, states
from micronova.telemetry.spans import span
from micronova.virt.driver import Rebuild

log = logging.getLogger(__name__)


async def rebuild(host: Host, work: Work) -> Outcome | None:
    """Rebuild the guest of an order; return None if the guest is at a newer epoch, so that nothing is reported."""
    driver = capable(host, Rebuild)
    order = work.order
    uuid = order.instance.uuid
    check_driver_boots(host, order.instance.image)
    config_drive = wants_config_drive(host, work)
    guest = await host.driver.info(uuid)
    if note_if_newer(guest, host, work):
        return None
    if note_if_made(guest, host, work):
        return Outcome(outcome="done", power_state=guest.power_state, config_drive=config_drive)
    start = order.parameters.get("start") != "no"

    # The slot is free while the guest shuts down: its image sets the timeout, and builds of other guests do not wait.
    slot = host.build_slots.one(order.instance.project_id)

    async def stopping() -> None:
        await work.check_stands()
        slot.release()

    async def removed() -> None:
        await slot.acquire()
        for task_state in states.ACTIONS["rebuild"].then:
            await work.progress(task_state)

    async with slot:
        tracker = host.tracker(order.instance.node)
        tracker.keep(order)  # even if the rebuild fails: the server keeps its resources
        host.guest_present(uuid, order.epoch, tracker.node)
        plan = guest_plan(work)
        plan.instance = msgspec.structs.replace(plan.instance, config_drive=config_drive)
        timeout = host.shutdown_timeout(order.instance.image)
        try:
            with span("rebuild", host=host.name, instance=uuid):
                await driver.rebuild(plan, start=start, timeout=timeout, stopping=stopping, removed=removed)
        except Exception:
            await _note_what_is_left(host, work)
            raise
    power = power_state.RUNNING if start else power_state.SHUTDOWN
    if start:
        host.boots.guest_started(uuid)
    host.power_change_ended(uuid, power)
    return Outcome(outcome="done", power_state=power, config_drive=config_drive)


async def _note_what_is_left(host: Host, work: Work) -> None:
    """Note whether the old guest is as it was, after a rebuild that failed."""
    uuid = work.order.instance.uuid
    try:
        guest = await host.driver.info(uuid)
    except Exception as error:  # drivers may raise anything; the error of the rebuild is the one to report
        log.warning("host %s: what is left of the guest of instance %s is not known: %s", host.name, uuid, error)
        return
    if guest is not None and guest.epoch < work.order.epoch:
        host.guest_present(uuid, guest.epoch, guest.node, guest.power_state)
        work.unchanged = True
