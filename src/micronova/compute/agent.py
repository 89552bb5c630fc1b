"""The agent of one host: it carries out the orders of the host and fills in the host's part of a heartbeat."""

import asyncio
import functools
import itertools
import logging
import traceback
from typing import Protocol

from micronova.compute.handlers.restored import would_cost_newer_guest
from micronova.compute.handlers.table import HANDLERS, UNDO
from micronova.compute.host import Host
from micronova.compute.work import REMOVES, InstanceWork, Outcome, Phase, Refusal, Work
from micronova.objects.context import Context
from micronova.objects.errors import MicronovaError, NotSupported, resource_exhausted
from micronova.objects.host_limits import MOST_REPORTED
from micronova.objects.orders import (
    Departure,
    GuestAtEpoch,
    Heartbeat,
    HeartbeatReply,
    HostBeat,
    HostReply,
    Progress,
    ProgressReply,
    RemovedGuest,
    Report,
    ReportReply,
    WorkOrder,
)
from micronova.telemetry.logs import request_id, server_id
from micronova.telemetry.spans import span

log = logging.getLogger(__name__)

NEWER_GUEST = (
    "What the server's host did is newer than what the database says of the server: the database was restored from a "
    "backup. An administrator can repair this with `micronova audit --repair`."
)
STARTED_TOGETHER = 50
"""Guests that one message asks to be started after a boot of the host."""


class Conductor(Protocol):
    """The messages that agents send to a conductor; `micronova.conductor.rpcapi` implements them."""

    async def report(self, report: Report, context: Context) -> ReportReply:
        """Report how an order ended; repeat it until a conductor replies."""

    async def progress(self, progress: Progress, context: Context) -> ProgressReply:
        """Report the task state that an order has reached; repeat it until a conductor replies."""

    async def plugged_ports(self, host: str, instance_uuid: str, ports: tuple[str, ...]) -> frozenset[str]:
        """Return those of an instance's ports that the network service has plugged on this host."""

    async def start_guests_after_host_boot(self, host: str, guests: tuple[GuestAtEpoch, ...]) -> tuple[str, ...]:
        """Ask that guests which are off and should run are started; return their instances."""

    async def heartbeat(self, beat: Heartbeat, timeout: float = ...) -> HeartbeatReply:
        """Send the state of the hosts, and return the orders and departures that the conductor has for them."""


class HostAgent:
    """Carries out the orders of one host."""

    def __init__(self, host: Host, conductor: Conductor) -> None:
        self.host = host
        self._conductor = conductor
        self._registry = host.work_registry
        self._stopping = False
        self._synchronised_at: float | None = None
        self._to_remove: dict[str, Departure] = {}  # by instance; its guest is still here
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._removed: dict[str, int] = {}  # the guest was removed; the conductor does not know that yet
        self._send_all_nodes = True
        self._last_listed: dict[str, Work] = {}  # the work that the last heartbeat lists
        # Orders (operation, epoch) that were refused as stale or finished: since the last heartbeat, and before it.
        self._refused: set[tuple[str, int]] = set()
        self._refused_before_beat: set[tuple[str, int]] = set()

    # --- orders ---

    def accept_sent(self, order: WorkOrder, context: Context) -> None:
        """Accept an order that came as a message, unless it is older than the first reply to a heartbeat.

        That reply brings all orders that are valid. A message from before may be out of date: a broker can deliver it
        to a new agent after a newer order was carried out by the agent before. The same holds of the reply by which an
        agent learned that the database was restored.
        """
        since = self._synchronised_at
        if since is None or 0.0 < order.issued_at <= since:
            log.info(
                "host %s: order %s was issued before this agent asked for all orders and is ignored",
                self.host.name,
                order.operation_id,
            )
        else:
            self.begin(order, context)

    def begin(self, order: WorkOrder, context: Context | None = None, *, database_is_behind: bool = False) -> None:
        """Begin to carry out an order, unless it is a duplicate or stale."""
        if context is None:
            context = Context(request_id=order.request_id, traceparent=order.traceparent)
        host = self.host
        if self._stopping:
            reason: str | None = "is ignored: the agent stops"
        elif order.host != host.name:
            reason = f"is ignored: it is for host {order.host}"
        elif (refusal := self._registry.admit(order, database_is_behind=database_is_behind)) is not None:
            reason = refusal.value
            if refusal is not Refusal.RUNNING:
                self._refused.add((order.operation_id, order.epoch))
        else:
            reason = None
        if reason is not None:
            log.info("host %s: order %s (%s) %s", host.name, order.operation_id, order.kind, reason)
            return
        plugged_ports = functools.partial(self._conductor.plugged_ports, host.name, order.instance.uuid)
        plug_wait = host.plug_events.watch(order.instance.uuid, order.wait_for_plugs, plugged_ports)
        work = Work(
            order,
            context,
            plug_wait,
            host.clock.now(),
            self._conductor.progress,
            database_is_behind=database_is_behind,
        )
        instance_work = self._registry.add(work)
        host.boots.order_accepted(order.instance.uuid)
        work.task = asyncio.get_running_loop().create_task(self._run(work, instance_work))
        # Not in the task itself: a task that is cancelled before its first step never runs.
        work.task.add_done_callback(lambda _: self._finished(work))

    async def _run(self, work: Work, instance_work: InstanceWork) -> None:
        request_id.set(work.context.request_id)
        server_id.set(work.order.instance.uuid)
        async with instance_work.lock:
            began = self.host.clock.monotonic()
            with span(work.order.kind, host=self.host.name, instance=work.order.instance.uuid):
                outcome = await self._carry_out(work)
            if outcome is None and work.database_is_behind:
                work.unchanged = True
                outcome = Outcome(outcome="error", message=NEWER_GUEST)
            if work.cancelled:
                said = "is withdrawn"
            elif outcome is None:
                said = "has done nothing: the guest is at a newer epoch"
            else:
                said = f"ends with {outcome.outcome}"
            took = self.host.clock.monotonic() - began
            order = work.order
            log.info("host %s: order %s (%s) %s after %.2f s", order.host, order.operation_id, order.kind, said, took)
            if outcome is None or work.cancelled:
                return
            work.phase = Phase.REPORTING
            self.host.plug_events.close(work.plug_wait, used=True)
            reply = await self._conductor.report(work.report(outcome, self.host.clock.now()), work.context)
            if outcome.outcome == "done":
                if reply.accepted:
                    # A refused report means that a conductor has the operation now, and may send the order again.
                    self._registry.remember_finished(work)
                # The conductor asks for it after builds only. It is checked again, because a guest cannot be restored.
                if reply.destroy and work.order.kind == "build":
                    self._depart(Departure(work.order.instance.uuid, work.order.epoch))
                undo = UNDO.get(work.order.kind)
                if undo is not None and not reply.accepted:
                    await undo(self.host, work)

    async def _carry_out(self, work: Work) -> Outcome | None:
        """Run the handler of the order's kind; return an error as an outcome.

        The code of Unavailable makes the conductor give the order out again later.
        """
        order = work.order
        handler = HANDLERS.get(order.kind)
        try:
            if handler is None:
                raise NotSupported(
                    f"The server's host runs an older version, which knows no {order.kind} orders: upgrade it."
                )
            if await would_cost_newer_guest(self.host, work):
                return None
            return await handler(self.host, work)
        except MicronovaError as error:
            return Outcome(outcome="error", error_code=error.code, message=error.message)
        except Exception as error:
            log.exception("host %s: %s of instance %s failed", self.host.name, order.kind, order.instance.uuid)
            lack = resource_exhausted(error)
            if lack is not None:
                return Outcome(outcome="error", error_code=lack.code, message=lack.message)
            return Outcome(
                outcome="error",
                error_code=MicronovaError.code,
                message="The hypervisor failed unexpectedly.",
                details="".join(traceback.format_exception(error)),
            )

    def _finished(self, work: Work) -> None:
        self.host.plug_events.close(work.plug_wait, used=False)
        self._registry.remove(work)
        uuid = work.order.instance.uuid
        if not self._registry.of_instance(uuid):
            self.host.work_ended(uuid)
        task = work.task
        if task is not None and not task.cancelled() and task.exception() is not None:
            log.error(
                "host %s: order %s failed by an error in Micronova itself and is sent again; report this traceback",
                self.host.name,
                work.order.operation_id,
                exc_info=task.exception(),
            )

    # --- departures: guests that an agent removes without an order, because such a record says so ---

    def _depart(self, departure: Departure) -> None:
        uuid = departure.instance_uuid
        known = self._to_remove.get(uuid, departure)
        self._to_remove[uuid] = departure = Departure(
            uuid, max(departure.epoch, known.epoch), departure.deleted or known.deleted
        )
        self._registry.epochs.leave(uuid, departure.epoch)
        self._start_removal(uuid)

    def _start_removal(self, uuid: str) -> None:
        if uuid not in self._removals and not self._stopping:
            task = asyncio.get_running_loop().create_task(self._remove_guest(uuid, self._to_remove[uuid]))
            self._removals[uuid] = task
            task.add_done_callback(lambda _: self._removals.pop(uuid, None))

    async def _remove_guest(self, uuid: str, departure: Departure) -> None:
        epoch = departure.epoch
        instance_work = self._registry.acquire(uuid)
        try:
            for work in instance_work.works:
                if work.order.epoch <= epoch and work.order.kind not in REMOVES:
                    work.cancel()
            async with instance_work.lock:
                guest = await self.host.driver.info(uuid)
                # A newer guest: the instance has returned to this host. One that is deleted never does.
                if guest is None or guest.epoch <= epoch or departure.deleted:
                    await self.host.destroy(uuid)
            self._removed[uuid] = epoch
            if self._to_remove.get(uuid) == departure:
                del self._to_remove[uuid]
        except Exception as error:  # drivers may raise anything
            log.warning(
                "host %s: the guest of instance %s, which left the host, could not be removed; the next heartbeat tries"
                " again: %s",
                self.host.name,
                uuid,
                error,
            )
        finally:
            self._registry.release(uuid)

    async def stop_guest(self, uuid: str, epoch: int) -> None:
        """Switch a guest off that has at most this epoch; it stays where it is."""
        instance_work = self._registry.acquire(uuid)
        try:
            async with instance_work.lock:
                guest = await self.host.driver.info(uuid)
                if guest is not None and guest.epoch <= epoch:
                    await self.host.driver.power_off(uuid, 0)
        finally:
            self._registry.release(uuid)

    # --- heartbeats ---

    async def start_guests_after_host_boot(self) -> None:
        """Ask for a start of guests that are off and should run; until then no heartbeat reports them as off."""
        found = self.host.found_off()
        for part in (found[begin : begin + STARTED_TOGETHER] for begin in range(0, len(found), STARTED_TOGETHER)):
            try:
                to_start = await self._conductor.start_guests_after_host_boot(self.host.name, part)
            except Exception as error:  # asked again after the next heartbeat
                log.warning(
                    "host %s: no conductor answered which of %d guests should run; this is repeated: %s",
                    self.host.name,
                    len(part),
                    error,
                )
                return
            self.host.start_decided(part, frozenset(to_start))

    def beat(self) -> HostBeat:
        """Return this host's part of a heartbeat."""
        for uuid in self._to_remove:
            self._start_removal(uuid)
        self._last_listed = self._registry.by_operation()
        self._refused_before_beat |= self._refused
        self._refused.clear()
        nodes = self.host.nodes(include_unchanged=self._send_all_nodes)
        self._send_all_nodes = False
        return HostBeat(
            host=self.host.name,
            # What does not fit is in the next heartbeat. Orders that are not listed come again and are ignored.
            running_orders=self._registry.running_orders()[:MOST_REPORTED],
            removed_guests=tuple(
                RemovedGuest(uuid, epoch) for uuid, epoch in itertools.islice(self._removed.items(), MOST_REPORTED)
            ),
            nodes=nodes,
            power_changes=self.host.power_changes()[:MOST_REPORTED],
            boots=self.host.boots.results()[:MOST_REPORTED],
            metrics=None if self.host.cpu_monitor is None else self.host.cpu_monitor.take(),
            connect_error=self.host.take_connect_error(),
        )

    def beat_failed(self, beat: HostBeat) -> None:
        """Note that no conductor replied to a heartbeat: the next one repeats what it said."""
        self._send_all_nodes = self._send_all_nodes or bool(beat.nodes)
        self.host.power_changes_uncertain(beat.power_changes)
        if beat.connect_error:
            self.host.connection_failed(beat.connect_error)

    def beat_answered(self, beat: HostBeat, reply: HostReply | None, now: float = 0.0) -> None:
        """Do what the reply to a heartbeat asks for; `now` is the time of the conductor's clock in the reply."""
        if self._synchronised_at is None:
            self._synchronised_at = now
        for removed in beat.removed_guests:
            if self._removed.get(removed.instance_uuid) == removed.epoch:
                del self._removed[removed.instance_uuid]
        again = frozenset(() if reply is None else reply.repeat_power)
        self.host.power_changes_uncertain(tuple(c for c in beat.power_changes if c.instance_uuid in again))
        self.host.power_changes_received(tuple(c for c in beat.power_changes if c.instance_uuid not in again))
        self.host.boots.results_received(beat.boots, () if reply is None else reply.repeat_boots)
        if reply is None:
            return
        self._send_all_nodes = self._send_all_nodes or reply.resend_nodes
        self.host.set_allocation_ratios(reply.allocation_ratios)
        for operation_id in reply.drop:
            work = self._registry.find(operation_id)
            # The reply is only about work that the heartbeat listed: an order for the same operation may have arrived
            # since. Work that is being reported goes on: the reply to the report decides about the guest.
            if work is not None and work is self._last_listed.get(operation_id) and work.phase is not Phase.REPORTING:
                work.cancel()
        for departure in reply.departures:
            self._depart(departure)
        refused, self._refused_before_beat = self._refused_before_beat, set()
        for order in reply.orders:
            waits = self._stopping or order.instance.uuid in self._to_remove
            behind = (order.operation_id, order.epoch) in refused and not waits
            if behind:
                self._note_database_is_behind(order, now)
            self.begin(order, database_is_behind=behind)

    def _note_database_is_behind(self, order: WorkOrder, now: float) -> None:
        """Note that the database has forgotten what this host did: it was restored from a backup.

        This order was refused before the heartbeat was sent, because of a newer order, guest or departure, or because
        its report was accepted. The database had each of these before this host did. It was read after the heartbeat
        was sent, and still says that the host has to carry out the order: what the host remembers is void. What the
        broker still has from before is void, too.
        """
        log.warning(
            "host %s: the database is behind this host and was restored: order %s (%s) of instance %s is accepted,"
            " although the host has seen epoch %d, and the order has epoch %d; run `micronova audit`",
            self.host.name,
            order.operation_id,
            order.kind,
            order.instance.uuid,
            self._registry.epochs.highest(order.instance.uuid),
            order.epoch,
        )
        self._synchronised_at = max(now, self._synchronised_at or 0.0)

    @property
    def synchronised(self) -> bool:
        """Whether a conductor has replied to a heartbeat; orders are accepted from then on."""
        return self._synchronised_at is not None

    @property
    def nodes_requested(self) -> bool:
        """Whether the conductor asked for the nodes, so that the next heartbeat should follow at once."""
        return self._send_all_nodes

    # --- stopping ---

    def refuse_orders(self) -> None:
        """Accept no more orders; the conductor sends them again after the restart."""
        self._stopping = True

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of all orders and removals that are under way."""
        return [*self._registry.tasks(), *self._removals.values()]

    def cancel(self) -> None:
        """Stop all work and undo what is half done; a guest that is complete stays."""
        for work in self._registry.all():
            work.cancel()

    def abandon(self) -> None:
        """Cancel every task, including those that undo work: the next agent finds what they leave."""
        for task in self.tasks():
            task.cancel()
