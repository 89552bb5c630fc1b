"""Handlers of orders on a guest that exists; `compute/handlers/table.py` lists all.

A handler may run twice for an order: after a crash of the agent the conductor sends the order again. A reboot that
was done but not reported is then repeated; no record could prevent that.
"""

import asyncio
import dataclasses
from contextlib import nullcontext
from typing import Final

from micronova.compute.handlers.shared import (
    begin_power_change,
    capable,
    check_driver_boots,
    end_power_change,
    guest_of,
    guest_plan,
    note_if_newer,
)
from micronova.compute.host import Host
from micronova.compute.work import Outcome, Work
from micronova.objects import power_state, states
from micronova.objects.errors import Conflict, Invalid, NotSupported
from micronova.objects.image import CANNOT_UPLOAD
from micronova.objects.network import VIF
from micronova.virt.driver import AdminPassword, CrashDump, DiskCopy, HotPlug, Pause, Rescue, Snapshot, Suspend

LONGEST_UNREPORTED_COPY: Final = 0.05
"""Seconds that a copy of a disk may take before its task state is reported."""


async def delete(host: Host, work: Work) -> Outcome | None:
    """Remove the guest and everything that was made for it: the server is deleted.

    Nobody can withdraw a delete, so the host does not ask whether it still stands. If the database was restored from a
    backup, a guest may be newer than the delete of its server.
    """
    newer = note_if_newer(await host.driver.info(work.order.instance.uuid), host, work)
    if newer and not work.database_is_behind:
        return None
    return await _destroy(host, work)


async def remove(host: Host, work: Work) -> Outcome | None:
    """Remove the guest of a server that goes on without it: it is offloaded, or has a guest on another host."""
    if note_if_newer(await host.driver.info(work.order.instance.uuid), host, work):
        return None
    await work.check_stands()
    return await _destroy(host, work)


async def _destroy(host: Host, work: Work) -> Outcome:
    await host.destroy(work.order.instance.uuid)
    return Outcome(outcome="done", power_state=power_state.NOSTATE)


async def stop(host: Host, work: Work) -> Outcome:
    """Shut the guest down; image and settings limit the time that the guest has for it."""
    guest = await begin_power_change(host, work)
    if guest.power_state != power_state.SHUTDOWN:
        await host.driver.power_off(guest.uuid, host.shutdown_timeout(work.order.instance.image))
    return end_power_change(host, guest.uuid, power_state.SHUTDOWN)


async def start(host: Host, work: Work) -> Outcome:
    """Start the guest."""
    guest = await begin_power_change(host, work)
    if guest.power_state != power_state.RUNNING:
        # After a boot of the host all its guests start: not more at once than are built.
        after_boot = work.order.parameters.get("cause") == "host_boot"
        async with host.build_slots.one(work.order.instance.project_id) if after_boot else nullcontext():
            await host.driver.power_on(guest_plan(work))
    host.boots.guest_started(guest.uuid)
    return end_power_change(host, guest.uuid, power_state.RUNNING)


async def soft_delete(host: Host, work: Work) -> Outcome:
    """Switch the guest off at once, if there is one."""
    guest = await host.driver.info(work.order.instance.uuid)
    if guest is None:
        return Outcome(outcome="done", power_state=power_state.NOSTATE)
    host.power_change_begins(guest.uuid)
    if guest.power_state != power_state.SHUTDOWN:
        await host.driver.power_off(guest.uuid, 0)
    return end_power_change(host, guest.uuid, power_state.SHUTDOWN)


async def reboot(host: Host, work: Work) -> Outcome:
    """Restart the guest."""
    guest = await begin_power_change(host, work)
    hard = work.order.parameters.get("type", "HARD").upper() == "HARD"
    await host.driver.reboot(guest_plan(work), "HARD" if hard else "SOFT")
    host.boots.guest_started(guest.uuid)
    return end_power_change(host, guest.uuid, power_state.RUNNING)


async def pause(host: Host, work: Work) -> Outcome:
    """Pause the guest."""
    driver = capable(host, Pause)
    guest = await begin_power_change(host, work)
    await driver.pause(guest.uuid)
    return end_power_change(host, guest.uuid, power_state.PAUSED)


async def unpause(host: Host, work: Work) -> Outcome:
    """Unpause the guest."""
    driver = capable(host, Pause)
    guest = await begin_power_change(host, work)
    await driver.unpause(guest.uuid)
    return end_power_change(host, guest.uuid, power_state.RUNNING)


async def suspend(host: Host, work: Work) -> Outcome:
    """Suspend the guest: its memory is saved to disk."""
    driver = capable(host, Suspend)
    async with host.memory_slots.one(work.order.instance.project_id):
        guest = await begin_power_change(host, work)
        await driver.suspend(guest.uuid)
    return end_power_change(host, guest.uuid, power_state.SUSPENDED)


async def resume(host: Host, work: Work) -> Outcome:
    """Resume the guest from its saved memory."""
    driver = capable(host, Suspend)
    async with host.memory_slots.one(work.order.instance.project_id):
        guest = await begin_power_change(host, work)
        await driver.resume(guest_plan(work))
    return end_power_change(host, guest.uuid, power_state.RUNNING)


async def rescue(host: Host, work: Work) -> Outcome:
    """Boot the guest from the rescue image."""
    driver = capable(host, Rescue)
    check_driver_boots(host, work.order.rescue_image)
    guest = await begin_power_change(host, work)
    timeout = host.shutdown_timeout(work.order.instance.image)
    # It downloads and converts an image, as a build does.
    async with host.build_slots.one(work.order.instance.project_id) as slot:
        await driver.rescue(guest_plan(work), timeout, stopping=slot.release)
    host.boots.guest_started(guest.uuid)
    return end_power_change(host, guest.uuid, power_state.RUNNING)


async def unrescue(host: Host, work: Work) -> Outcome:
    """Boot the guest from its own disks again."""
    driver = capable(host, Rescue)
    guest = await begin_power_change(host, work)
    await driver.unrescue(guest_plan(work))
    host.boots.guest_started(guest.uuid)
    return end_power_change(host, guest.uuid, power_state.RUNNING)


async def change_password(host: Host, work: Work) -> Outcome:
    """Set the password of the guest's administrator."""
    driver = capable(host, AdminPassword)
    async with host.agent_slots.one(work.order.instance.project_id):
        guest = await guest_of(host, work)
        if guest.power_state != power_state.RUNNING:
            raise Conflict("The guest does not run.")
        await driver.set_admin_password(guest_plan(work), work.order.admin_password or "")
    return Outcome(outcome="done")


async def trigger_crash_dump(host: Host, work: Work) -> Outcome:
    """Send the guest a non-maskable interrupt."""
    driver = capable(host, CrashDump)
    guest = await guest_of(host, work)
    await driver.trigger_crash_dump(guest.uuid)
    return Outcome(outcome="done")


async def attach_interface(host: Host, work: Work) -> Outcome:
    """Plug an interface into the guest."""
    driver = capable(host, HotPlug)
    guest = await guest_of(host, work)
    plan = guest_plan(work)
    if guest.power_state not in (power_state.RUNNING, power_state.PAUSED):
        # Nothing is plugged before the guest starts, so the network has nothing to confirm.
        plan = dataclasses.replace(plan, plugged=_return_at_once)
    await driver.attach_interface(plan, _vif(work))
    return Outcome(outcome="done")


async def detach_interface(host: Host, work: Work) -> Outcome:
    """Unplug an interface of the guest."""
    driver = capable(host, HotPlug)
    guest = await guest_of(host, work)
    await driver.detach_interface(guest.uuid, _vif(work))
    return Outcome(outcome="done")


async def create_image(host: Host, work: Work) -> Outcome:
    """Copy the guest's root disk and upload the copy.

    At most default.max_concurrent_snapshots run at once, because copies keep disk and network busy; one fewer of one
    project.
    """
    driver = capable(host, Snapshot)
    async with host.snapshot_slots.one(work.order.instance.project_id):
        await guest_of(host, work)
        await _upload(host, work, driver, states.IMAGE_PENDING_UPLOAD, states.IMAGE_UPLOADING)
    return Outcome(outcome="done")


async def shelve(host: Host, work: Work) -> Outcome:
    """Switch the guest off, copy its root disk and upload the copy; the guest stays."""
    driver = capable(host, Snapshot)
    guest = await guest_of(host, work)
    # The guest shuts down before the slot is taken: its image sets the timeout, and copies of other guests do not wait.
    if guest.power_state != power_state.SHUTDOWN:
        host.power_change_begins(guest.uuid)
        running = guest.power_state == power_state.RUNNING
        timeout = host.shutdown_timeout(work.order.instance.image) if running else 0
        await host.driver.power_off(guest.uuid, timeout)
    work.power_state = power_state.SHUTDOWN  # even if an earlier attempt has switched it off
    async with host.snapshot_slots.one(work.order.instance.project_id):
        pending, uploading = states.ACTIONS["shelve"].then
        await _upload(host, work, driver, pending, uploading)
    return end_power_change(host, guest.uuid, power_state.SHUTDOWN)


async def _upload(host: Host, work: Work, driver: Snapshot, pending: str, uploading: str) -> None:
    """Copy the guest's root disk and upload the copy; the task states are those before and during the upload."""
    copy = await _copy_root_disk(work, driver, pending)
    try:
        upload_url = (await work.progress(uploading)).upload_url
        if upload_url is None:
            raise NotSupported(CANNOT_UPLOAD)
        url = f"{upload_url}&disk_format={copy.disk_format}&container_format=bare"
        await host.uploads.put(url, copy.chunks(), copy.size)
    finally:
        await copy.close()


async def _copy_root_disk(work: Work, driver: Snapshot, pending: str) -> DiskCopy:
    """Return a copy of the guest's root disk; report the task state `pending` only if the copy takes a while.

    A report costs a message and a transaction, and a quick copy is complete before a user could see the state.
    """
    copying = asyncio.ensure_future(driver.snapshot(guest_plan(work)))
    try:
        await asyncio.wait({copying}, timeout=LONGEST_UNREPORTED_COPY)
        if not copying.done():
            await work.progress(pending)
        return await copying
    except BaseException:
        copying.cancel()
        await asyncio.wait({copying})
        if not copying.cancelled() and copying.exception() is None:
            await copying.result().close()
        raise


async def _return_at_once() -> None:
    pass


def _vif(work: Work) -> VIF:
    order = work.order
    port = order.parameters.get("port_id")
    for vif in order.network_info:
        if vif.port_id == port:
            return vif
    raise Invalid(f"The order {order.operation_id} does not describe the port {port} that it is about.")
