"""How a host carries out its orders, and what its heartbeat says of them."""

import asyncio
import logging
import traceback
from typing import Any

from micronova.compute.actions import ACTIONS, UNWANTED
from micronova.compute.conductor_client import ConductorClient
from micronova.compute.host import Host
from micronova.compute.undo import destroy
from micronova.compute.work import Outcome, Phase, Slot, Work
from micronova.objects.errors import MicronovaError, NotSupported
from micronova.objects.orders import Departed, HostBeat, HostReply, PowerChange, WorkOrder
from micronova.rpc.contract import Context
from micronova.telemetry.logs import request_id
from micronova.telemetry.spans import span

log = logging.getLogger(__name__)


class HostAgent:
    """Works for one host."""

    def __init__(self, host: Host, conductor: ConductorClient) -> None:
        self.host = host
        self._conductor = conductor
        self._book = host.book
        self._stopping = False
        self._synchronised_at: float | None = None
        self._departing: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, int] = {}  # instance -> epoch at which it left; its guest is to go
        self._departed: dict[str, int] = {}  # and is gone, which the conductor is to hear
        self._casts: set[asyncio.Task[None]] = set()
        self._send_all_nodes = True
        self._listed: dict[str, Work] = {}  # what the beat under way lists: its answer speaks of that
        host.on_power_change = self._tell_at_once

    # --- orders ---

    def receive(self, order: WorkOrder, context: Context) -> None:
        """Take an order that was sent to this host, unless it is older than the first answer to a heartbeat.

        A message that was sent, or that a broker delivers again, to an agent that has just started may be long
        overtaken, and only the agent before knew. That answer brings all orders that count.
        """
        since = self._synchronised_at
        if since is None or 0.0 < order.issued_at <= since:
            log.info("host %s: order %s is older than this agent", self.host.name, order.operation_id)
        else:
            self.accept(order, context)

    def accept(self, order: WorkOrder, context: Context | None = None) -> None:
        """Take an order in hand and begin with it, unless it is a double or too old."""
        if context is None:
            context = Context(request_id=order.request_id, traceparent=order.traceparent)
        host = self.host
        if self._stopping or order.host != host.name:
            log.info("host %s: order %s (%s) is not taken", host.name, order.operation_id, order.kind)
            return
        reason = self._book.refusal(order)
        if reason is not None:
            log.info("host %s: order %s (%s) %s", host.name, order.operation_id, order.kind, reason)
            return
        gate = host.plugs.gate(order.instance.uuid, order.wait_for_plugs)
        work = Work(order, context, gate, host.clock.now())
        slot = self._book.add(work)
        host.boots.ordered(order.instance.uuid)
        work.task = asyncio.get_running_loop().create_task(self._run(work, slot))
        # Not in the task itself: one that is cancelled before its first step never runs.
        work.task.add_done_callback(lambda _: self._finished(work))

    async def _run(self, work: Work, slot: Slot) -> None:
        request_id.set(work.context.request_id)
        async with slot.lock:
            with span(work.order.kind, host=self.host.name, instance=work.order.instance.uuid):
                outcome = await self._carry_out(work)
            if outcome is None or work.cancelled:
                return
            work.phase = Phase.REPORTING
            work.gate.close(served=True)
            reply = await self._conductor.report(work.report(outcome, self.host.clock.now()), work.context)
            if outcome.outcome == "done":
                self._book.acknowledged(work)
                if reply.destroy and work.order.kind == "build":
                    self._depart(Departed(work.order.instance.uuid, work.order.epoch))
                undo = UNWANTED.get(work.order.kind)
                if undo is not None and not reply.accepted:
                    await undo(self.host, work)

    async def _carry_out(self, work: Work) -> Outcome | None:
        """Do what the order says; an error becomes a report."""
        order = work.order
        action = ACTIONS.get(order.kind)
        try:
            if action is None:
                raise NotSupported(f"The host {self.host.name} does not know how to {order.kind} a server.")
            return await action(self.host, work)
        except MicronovaError as error:
            return Outcome(outcome="error", error_code=error.code, message=error.message)
        except Exception as error:
            log.exception("host %s: %s of instance %s failed", self.host.name, order.kind, order.instance.uuid)
            return Outcome(
                outcome="error",
                error_code=MicronovaError.code,
                message="The hypervisor failed unexpectedly.",
                details="".join(traceback.format_exception(error)),
            )

    def _finished(self, work: Work) -> None:
        work.gate.close(served=False)
        self._book.remove(work)
        uuid = work.order.instance.uuid
        if not self._book.on(uuid):
            self.host.idle(uuid)
        task = work.task
        if task is not None and not task.cancelled() and task.exception() is not None:
            log.error("order %s ended badly", work.order.operation_id, exc_info=task.exception())

    # --- departures: the only record on which a guest is removed without an order ---

    def _depart(self, departure: Departed) -> None:
        uuid = departure.instance_uuid
        self._leaving[uuid] = max(departure.epoch, self._leaving.get(uuid, departure.epoch))
        self._book.epochs.leave(uuid, self._leaving[uuid])
        self._see_off(uuid)

    def _see_off(self, uuid: str) -> None:
        if uuid not in self._departing and not self._stopping:
            task = asyncio.get_running_loop().create_task(self._leave(uuid, self._leaving[uuid]))
            self._departing[uuid] = task
            task.add_done_callback(lambda _: self._departing.pop(uuid, None))

    async def _leave(self, uuid: str, epoch: int) -> None:
        slot = self._book.enter(uuid)
        try:
            for work in slot.works:
                if work.order.epoch <= epoch and work.order.kind != "delete":
                    work.cancel()
            async with slot.lock:
                guest = await self.host.driver.info(uuid)
                if guest is None or guest.epoch <= epoch:  # else it has come back since
                    await destroy(self.host, uuid)
            self._departed[uuid] = epoch
            if self._leaving.get(uuid) == epoch:
                del self._leaving[uuid]
        except Exception as error:  # drivers may raise anything; the next beat tries again
            log.warning("host %s: instance %s left, its guest cannot be removed: %s", self.host.name, uuid, error)
        finally:
            self._book.exit(uuid)

    # --- heartbeats ---

    def beat(self) -> HostBeat:
        """Give this host's part of a heartbeat."""
        for uuid in self._leaving:
            self._see_off(uuid)
        self._listed = self._book.listed()
        nodes = self.host.nodes(everything=self._send_all_nodes)
        self._send_all_nodes = False
        return HostBeat(
            host=self.host.name,
            in_hand=self._book.in_hand(),
            departed=tuple(Departed(uuid, epoch) for uuid, epoch in self._departed.items()),
            nodes=nodes,
            power_changes=self.host.power_changes(),
            boots=self.host.boots.verdicts(),
        )

    def beat_lost(self, beat: HostBeat) -> None:
        """The beat was not heard: what it told is to be told again."""
        self._send_all_nodes = self._send_all_nodes or bool(beat.nodes)

    def beat_heard(self, beat: HostBeat, reply: HostReply | None, now: float = 0.0) -> None:
        """Take the conductor's answer, given at this time of its clock."""
        if self._synchronised_at is None:
            self._synchronised_at = now
        for gone in beat.departed:
            if self._departed.get(gone.instance_uuid) == gone.epoch:
                del self._departed[gone.instance_uuid]
        self.host.told(beat.power_changes)
        self.host.boots.told(beat.boots, () if reply is None else reply.boots_again)
        if reply is None:
            return
        self._send_all_nodes = self._send_all_nodes or reply.resend_nodes
        for operation_id in reply.drop:
            work = self._book.find(operation_id)
            # Only what the beat listed: the same operation may have come again meanwhile. And not what is
            # being reported, because the answer to the report says what is to become of the guest.
            if work is not None and work is self._listed.get(operation_id) and work.phase is not Phase.REPORTING:
                work.cancel()
        for departure in reply.departures:
            self._depart(departure)
        for order in reply.orders:
            self.accept(order)

    @property
    def synchronised(self) -> bool:
        """Whether a conductor has said which orders are this host's."""
        return self._synchronised_at is not None

    @property
    def wants_beat(self) -> bool:
        """Whether the conductor asked for something that it should not wait for."""
        return self._send_all_nodes

    def _tell_at_once(self, change: PowerChange) -> None:
        """Give the conductor a hint ahead of the next heartbeat, which tells it reliably."""
        task = asyncio.get_running_loop().create_task(self._conductor.guest_event(self.host.name, change))
        self._casts.add(task)
        task.add_done_callback(self._casts.discard)

    # --- the end ---

    def refuse_orders(self) -> None:
        """Take no more orders; they come again after the restart."""
        self._stopping = True

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Everything that is under way."""
        return [*self._book.tasks(), *self._departing.values(), *self._casts]

    def cancel(self) -> None:
        """Have all work stopped, and undone where it is half done; a guest that was built stays."""
        for work in self._book.all():
            work.cancel()

    def abandon(self) -> None:
        """Let go of whatever is still under way, also of undoing: the restart finds what is left."""
        for task in self.tasks():
            task.cancel()
