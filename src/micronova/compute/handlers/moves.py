"""Handlers of the orders of a move: resize, cold migration, their confirmation and revert, live migration.

The order says which host is the source and which is the destination. If they are the same, the driver keeps what the
guest was before the resize (`Resize`). Else the guest itself stays on the source, stopped, until the move is confirmed,
and the destination makes another one from its disks (`Migrate`). A handler may run twice for an order.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from micronova.compute.handlers.guests import remove
from micronova.compute.handlers.shared import (
    begin_power_change,
    capable,
    end_power_change,
    guest_plan,
    new_guest,
    note_if_made,
    note_if_newer,
    reschedule_outcome,
    undo_on_failure,
)
from micronova.compute.host import Host
from micronova.compute.work import Outcome, Phase, Work
from micronova.objects import power_state, states
from micronova.objects.errors import Invalid, MicronovaError, NotSupported, Stale
from micronova.objects.flavor import Flavor
from micronova.objects.host_limits import LARGEST_MIGRATE_DATA
from micronova.objects.orders import Guest, InstanceSpec, MoveOrder
from micronova.virt.driver import LiveMigrate, Migrate, Resize

log = logging.getLogger(__name__)


async def prep_resize(host: Host, work: Work) -> Outcome:
    """Check, on the destination, that the guest can come, and hold its resources; no guest is made yet."""
    order, move = work.order, _move(work)
    reason = _why_disks_do_not_fit(move.old_flavor, order.instance.flavor, has_root=order.instance.image is not None)
    if reason is not None:
        return Outcome(outcome="abort", error_code=Invalid.code, message=reason)
    try:
        if move.stays:
            capable(host, Resize)
        else:
            capable(host, Migrate)
        host.tracker(order.instance.node).hold(order)
    except MicronovaError as error:
        return reschedule_outcome(error)
    return Outcome(outcome="done")


async def resize_instance(host: Host, work: Work) -> Outcome:
    """Stop the guest on the source, and return what the destination needs of its disks."""
    guest = await begin_power_change(host, work)
    stays = _move(work).stays
    if stays:  # an earlier resize may have left what it kept
        await capable(host, Resize).confirm_resize(guest.uuid)
    if guest.power_state != power_state.SHUTDOWN:
        await host.driver.power_off(guest.uuid, host.shutdown_timeout(work.order.instance.image))
    host.power_change_ended(guest.uuid, power_state.SHUTDOWN)
    data = b""
    if not stays:
        async with host.build_slots.one(work.order.instance.project_id):  # it reads whole disks
            data = await capable(host, Migrate).export_disks(guest.uuid)
    return Outcome(outcome="done", power_state=power_state.SHUTDOWN, migrate_data=_within_limit(data))


async def finish_resize(host: Host, work: Work) -> Outcome | None:
    """Make the guest on the destination, with the new flavor, and start it if it ran before."""
    uuid, move = work.order.instance.uuid, _move(work)
    async with host.build_slots.one(work.order.instance.project_id):
        if move.stays:
            await _change_size(host, work)
            return await _start_if_it_ran(host, work)
        guest = await host.driver.info(uuid)
        if note_if_newer(guest, host, work):
            return None
        async with _remove_on_failure(host, work):
            await _receive(host, work, guest)
            return await _start_if_it_ran(host, work)


async def finish_revert_resize(host: Host, work: Work) -> Outcome:
    """Make the guest on the source what it was before the move, and start it if it ran then."""
    guest = await begin_power_change(host, work)
    if _move(work).stays and _move(work).sent:
        await work.check_stands()
        await capable(host, Resize).revert_resize(guest_plan(work))
        host.tracker(guest.node).keep(work.order)
        host.guest_present(guest.uuid, work.order.epoch, guest.node)
    return await _start_if_it_ran(host, work)


async def confirm_resize(host: Host, work: Work) -> Outcome | None:
    """Remove what the source still has of the guest."""
    if not _move(work).stays:
        return await remove(host, work)
    uuid = work.order.instance.uuid
    await work.check_stands()
    await capable(host, Resize).confirm_resize(uuid)
    return Outcome(outcome="done")


async def check_can_live_migrate_destination(host: Host, work: Work) -> Outcome:
    """Check, on the destination, that the guest can come while it runs, and hold its resources."""
    order = work.order
    try:
        driver = capable(host, LiveMigrate)
        _check_mdev_types(order.instance, _move(work))
        host.tracker(order.instance.node).hold(order)
        await driver.check_live_migration(guest_plan(work))
    except MicronovaError as error:
        return reschedule_outcome(error)
    return Outcome(outcome="done")


def _check_mdev_types(instance: InstanceSpec, move: MoveOrder) -> None:
    """Raise NotSupported if the guest would have mediated devices of other types: their state cannot be sent."""
    here = () if instance.assignment is None else instance.assignment.mdevs
    types = sorted(each.mdev_type for each in here)
    if types != sorted(move.mdev_types):
        raise NotSupported(
            f"The guest has mediated devices of the types {', '.join(move.mdev_types) or 'none'}; this host would give "
            f"it {', '.join(types) or 'none'}. A running guest needs the same types."
        )


async def live_migration(host: Host, work: Work) -> Outcome:
    """Send the guest from the source to the destination while it runs.

    At most default.max_concurrent_live_migrations guests are sent at once, because they share the host's link.
    """
    uuid, driver = work.order.instance.uuid, capable(host, LiveMigrate)
    async with host.live_migration_slots.one(work.order.instance.project_id):
        await work.progress(states.MIGRATING)  # the migration is not queued any more
        guest = await begin_power_change(host, work)

        async def undo() -> None:
            host.power_change_ended(uuid, await driver.rollback_live_migration(uuid))

        async with undo_on_failure(work, undo):
            data = _within_limit(await driver.live_migrate(uuid))
        host.power_change_ended(uuid, guest.power_state)
    return Outcome(outcome="done", migrate_data=data)


async def rollback_live_migration(host: Host, work: Work) -> Outcome:
    """Let the guest continue on the source."""
    guest = await begin_power_change(host, work)
    return end_power_change(host, guest.uuid, await capable(host, LiveMigrate).rollback_live_migration(guest.uuid))


async def post_live_migration_at_destination(host: Host, work: Work) -> Outcome | None:
    """Let the guest that was sent continue on the destination."""
    order = work.order
    uuid, driver = order.instance.uuid, capable(host, LiveMigrate)
    guest = await host.driver.info(uuid)
    if note_if_newer(guest, host, work):
        return None
    if note_if_made(guest, host, work):
        return Outcome(outcome="done", power_state=guest.power_state)
    async with _remove_on_failure(host, work):
        if guest is not None:  # of an earlier attempt
            await host.destroy(uuid)
        with new_guest(host, order):
            power = await driver.receive_live_guest(guest_plan(work), _move(work).migrate_data)
    return end_power_change(host, uuid, power)


async def _change_size(host: Host, work: Work) -> None:
    """Give the guest, which stays on its host, the new flavor."""
    guest = await begin_power_change(host, work)
    host.tracker(guest.node).hold(work.order)
    await capable(host, Resize).resize(guest_plan(work))
    host.guest_present(guest.uuid, work.order.epoch, guest.node)


async def _receive(host: Host, work: Work, guest: Guest | None) -> None:
    """Make the guest from the disks that the source sent, unless an earlier agent has made it."""
    order = work.order
    uuid = order.instance.uuid
    if note_if_made(guest, host, work):
        host.power_change_begins(uuid)
        return
    if guest is not None:  # of an earlier attempt
        await host.destroy(uuid)
    driver = capable(host, Migrate)
    with new_guest(host, order):
        await driver.import_guest(guest_plan(work), _move(work).migrate_data)


async def _start_if_it_ran(host: Host, work: Work) -> Outcome:
    """Start the guest if it ran before the move; return the outcome."""
    uuid = work.order.instance.uuid
    power = power_state.SHUTDOWN
    if _move(work).power_on:
        await host.driver.power_on(guest_plan(work))
        host.boots.guest_started(uuid)
        power = power_state.RUNNING
    return end_power_change(host, uuid, power)


@asynccontextmanager
async def _remove_on_failure(host: Host, work: Work) -> AsyncIterator[None]:
    """Remove the arriving guest if the body fails and a conductor allows it, because it may be the only copy left.

    Work that is cancelled leaves the guest. The next order goes on with it, or a record of its departure removes it.
    """
    try:
        yield
    except Exception as error:
        if work.cancelled:
            raise asyncio.CancelledError from error
        work.phase = Phase.UNDOING
        await _remove_arriving_guest(host, work)
        raise


async def _remove_arriving_guest(host: Host, work: Work) -> None:
    """Remove a guest that did not arrive as a whole; the conductor records a departure in case this fails."""
    uuid = work.order.instance.uuid
    try:
        await work.check_stands()
    except Stale:
        log.warning("host %s: the guest of instance %s could not be started, and is kept", host.name, uuid)
        work.left_behind = True
        return
    try:
        await host.destroy(uuid)
    except Exception:
        log.exception("host %s: a part of the guest of instance %s is left; it is removed later", host.name, uuid)
        work.left_behind = True


def _why_disks_do_not_fit(old: Flavor, new: Flavor, *, has_root: bool) -> str | None:
    """Return why the disks of the old flavor do not fit into the new one, or None if they do."""
    if has_root and new.disk < old.disk:
        return f"The root disk has {old.disk} GB and cannot be made smaller: the flavor {new.name} has {new.disk} GB."
    if new.ephemeral < old.ephemeral:
        return f"Ephemeral disks cannot be made smaller: the flavor {new.name} has {new.ephemeral} GB."
    return None


def _move(work: Work) -> MoveOrder:
    if work.order.move is None:
        raise Invalid(f"The order {work.order.operation_id} does not describe the move that it is about.")
    return work.order.move


def _within_limit(data: bytes) -> bytes:
    """Return what a source sends, unless it is too large for a report."""
    if len(data) > LARGEST_MIGRATE_DATA:
        raise Invalid(f"What the destination needs of the guest does not fit into {LARGEST_MIGRATE_DATA} bytes.")
    return data
