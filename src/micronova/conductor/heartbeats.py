"""Heartbeats of compute hosts: which of them share a transaction, in which order they wait, and who gets a reply.

The heartbeats that arrive within `WINDOW` share one transaction (`conductor/heartbeat_transaction.py`). The first one
after a pause does not wait. The transaction leaves out heartbeats that are older than what their hosts sent since. A
sender whose heartbeat was refused for another reason shares no transaction for `REFUSED_ALONE`, and its heartbeats wait
behind those of the others. So does a heartbeat that names very many guests, orders, nodes or devices. A heartbeat for
whose reply nobody waits any more is not applied.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from micronova.conductor import power_changes
from micronova.conductor.heartbeat_transaction import HeartbeatTransaction
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.move_types import ROLLED_BACK
from micronova.conductor.operations.orders import size_of
from micronova.notifications import resources
from micronova.objects.context import Context
from micronova.objects.errors import Invalid, StaleHeartbeat, Unavailable
from micronova.objects.orders import Heartbeat, HeartbeatReply, HostReply

log = logging.getLogger(__name__)

WINDOW = 0.1  # seconds between two transactions
MOST_HOSTS = 500  # of one transaction; a single heartbeat may have more
MOST_ENTRIES = 2000  # of the lists of heartbeats in one transaction; a heartbeat with more shares no transaction
REFUSED_ALONE = 60.0  # seconds for which the heartbeats of a sender share no transaction after one was refused
MOST_REFUSED = 1000  # senders of refused heartbeats that a conductor remembers
MOST_ORDERS = 8 << 20  # bytes of orders in one reply; the next reply has the others
MOST_TOLD = 1000  # refused nodes of which a conductor remembers that it has logged them
MOST_LOGGED = 10  # hosts, or refused nodes, of one transaction that the log names

_Key = tuple[str, tuple[str, ...]]
"""The broker user that sent a heartbeat, and the hosts that the heartbeat is of.

A host with a broker user of its own has one key. Agents that share a broker user are told apart by their hosts.
"""


class _Waiting:
    """A heartbeat whose sender waits for the reply."""

    __slots__ = ("beat", "callers", "entries", "hosts", "key", "number", "reply")

    def __init__(self, sender: str, beat: Heartbeat) -> None:
        self.beat = beat
        self.number = beat.number
        self.hosts = frozenset(each.host for each in beat.hosts)
        if not beat.hosts or len(self.hosts) < len(beat.hosts):
            raise Invalid("A heartbeat names at least one host, and each host once.")
        self.key: _Key = (sender, tuple(sorted(self.hosts)))
        self.entries = sum(each.entries for each in beat.hosts)
        self.callers = 0  # several if the message was delivered several times
        self.reply: asyncio.Future[HeartbeatReply] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # marks it as retrieved: the sender may have given up


class Heartbeats:
    """Handles heartbeats."""

    def __init__(self, dependencies: ConductorDependencies, transaction: HeartbeatTransaction) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._transaction = transaction
        self.interval = 0.0  # seconds until the next heartbeat, for the replies; 0: as the agents are set
        self._waiting: dict[_Key, _Waiting] = {}
        self._worker: asyncio.Task[None] | None = None
        self._applied_at = float("-inf")
        self._begun_at: float | None = None  # the transaction that runs
        self._refused: dict[_Key, float] = {}  # until when their heartbeats share no transaction, soonest first
        self._told: dict[str, None] = {}  # what was logged of refused nodes, which hosts report again and again

    async def handle(self, sender: str, beat: Heartbeat) -> HeartbeatReply:
        """Apply a heartbeat of a broker user and return the reply.

        Raise Unavailable if the database does not answer, and Invalid if the heartbeat names no host or one twice.
        """
        waiting = _Waiting(sender, beat)
        older = self._waiting.get(waiting.key)
        if older is not None and older.beat == beat:  # the message was delivered twice
            return await self._reply_to(older)
        if older is not None and older.number > waiting.number:
            raise StaleHeartbeat("A newer heartbeat of the same hosts arrived earlier.", newest=older.number)
        if older is not None:
            # A host sends one heartbeat at a time: nobody waits for the older one, or the host sends too many.
            older.fail(Unavailable("A newer heartbeat of the same hosts has replaced this one."))
        self._waiting[waiting.key] = waiting
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="conductor-heartbeats")
        return await self._reply_to(waiting)

    async def _reply_to(self, waiting: _Waiting) -> HeartbeatReply:
        """Wait for the reply; remove the heartbeat if its last caller gives up before it is taken."""
        waiting.callers += 1
        try:
            return await asyncio.shield(waiting.reply)
        finally:
            waiting.callers -= 1
            if not waiting.callers and self._waiting.get(waiting.key) is waiting:
                del self._waiting[waiting.key]

    @property
    def oldest_wait(self) -> float:
        """The seconds for which the transaction that runs has kept heartbeats waiting; 0 if none runs."""
        return 0.0 if self._begun_at is None else self._engine.clock.monotonic() - self._begun_at

    async def stop(self) -> None:
        """Stop; heartbeats that wait get no reply, and their hosts send them again."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for waiting in self._waiting.values():
            waiting.fail(Unavailable("The conductor stops."))
        self._waiting.clear()

    async def _work(self) -> None:
        try:
            while self._waiting:
                pause = self._applied_at + WINDOW - self._engine.clock.monotonic()
                if pause > 0:
                    await self._engine.clock.sleep(pause)
                self._applied_at = self._engine.clock.monotonic()
                self._forget_refusals()
                apart = [key for key, waiting in self._waiting.items() if self._is_apart(waiting)]
                if batch := self._next_batch():
                    await self._take(batch)
                # The others wait for these at most until their next transaction is due.
                for key in apart:
                    if key in self._waiting:  # its sender has not given up
                        await self._take([self._waiting.pop(key)])
                    if self._engine.clock.monotonic() >= self._applied_at + WINDOW:
                        break
        finally:
            self._worker = None

    async def _take(self, batch: Sequence[_Waiting]) -> None:
        self._begun_at = self._engine.clock.monotonic()
        try:
            await self._apply_together(batch)
        except Exception:  # of what follows the transaction: the heartbeats that wait are the next ones
            log.exception("%d heartbeats were applied, but not answered", len(batch))
        finally:
            self._begun_at = None
            for waiting in batch:
                waiting.fail(Unavailable("The heartbeat could not be applied."))

    def _is_apart(self, waiting: _Waiting) -> bool:
        """Return whether a heartbeat waits behind the others and shares no transaction."""
        return waiting.key in self._refused or waiting.entries > MOST_ENTRIES

    def _next_batch(self) -> list[_Waiting]:
        """Take heartbeats that can share a transaction."""
        batch: list[_Waiting] = []
        names: set[str] = set()
        entries = 0
        for key, waiting in list(self._waiting.items()):
            if self._is_apart(waiting):
                continue
            if batch and (len(names) + len(waiting.hosts) > MOST_HOSTS or not names.isdisjoint(waiting.hosts)):
                continue
            if batch and entries + waiting.entries > MOST_ENTRIES:
                continue
            names |= waiting.hosts
            entries += waiting.entries
            batch.append(self._waiting.pop(key))
        return batch

    def _refuse(self, waiting: _Waiting, error: Exception) -> None:
        self._refused.pop(waiting.key, None)
        self._refused[waiting.key] = self._engine.clock.monotonic() + REFUSED_ALONE
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        waiting.fail(error)

    def _forget_refusals(self) -> None:
        """Let senders share transactions again whose last refused heartbeat was long ago."""
        while self._refused:
            key, until = next(iter(self._refused.items()))
            if until > self._engine.clock.monotonic():
                return
            del self._refused[key]

    async def _apply_together(self, batch: Sequence[_Waiting]) -> None:
        now = self._engine.clock.now()  # before the transaction reads: orders issued earlier are in the reply
        try:
            applied = await self._engine.write_for_host(self._transaction.apply, [waiting.beat for waiting in batch])
        except Unavailable as error:
            for waiting in batch:
                waiting.fail(error)
            return
        except Exception as error:
            if len(batch) > 1:  # one of them is wrong, such as a host that reports the node of another one
                half = len(batch) // 2
                await self._apply_together(batch[:half])
                await self._apply_together(batch[half:])
                return
            if isinstance(error, StaleHeartbeat):  # another conductor has applied a newer one at the same moment
                batch[0].fail(error)
            else:
                self._refuse(batch[0], error)
            return
        _log_hosts_that_are_back(applied.back)
        self._log_refused_nodes(applied.refused_nodes)
        power_changes.log_changes(applied.state_changes)
        notifier = self._dependencies.notifier
        for context, notifications in applied.notifications:
            for name, row in notifications:
                notifier.instance(name, row, context=context)
        for host, context, row in applied.rolled_back:
            for phase in ("start", "end"):
                notifier.instance(f"{ROLLED_BACK}.{phase}", row, context=context, sender=host)
        for service in applied.registered:
            notifier.announce(Context(), partial(resources.service, "create", service))
        for host, metrics in applied.metrics:
            notifier.announce(Context(), partial(resources.metrics, host, metrics))
        for lost in applied.lost_hypervisors:
            notifier.announce(Context(), partial(resources.hypervisor_lost, *lost))
        for operation in applied.continued:
            self._engine.committed(operation.kind, operation.step)
            self._engine.run([operation])
        by_host = {reply.host: reply for reply in applied.replies}
        for waiting in batch:
            if newer := {host: applied.newer[host] for host in waiting.hosts & applied.newer.keys()}:
                hosts = ", ".join(sorted(newer)[:MOST_LOGGED])
                message = f"A newer heartbeat was applied already of: {hosts}."
                waiting.fail(StaleHeartbeat(message, newest=max(newer.values())))
            elif not waiting.reply.done():
                own = [by_host[each.host] for each in waiting.beat.hosts]
                waiting.reply.set_result(HeartbeatReply(hosts=_cut(own), now=now, interval=self.interval))

    def _log_refused_nodes(self, messages: Iterable[str]) -> None:
        """Log why nodes are not recorded, once for each node."""
        for message in [each for each in messages if each not in self._told][:MOST_LOGGED]:
            log.warning("A compute node is not recorded. %s", message)
            self._told[message] = None
            if len(self._told) > MOST_TOLD:
                del self._told[next(iter(self._told))]


def _log_hosts_that_are_back(hosts: Mapping[str, float]) -> None:
    """Log each host, or their number if a large part of the fleet is back."""
    if len(hosts) > MOST_LOGGED:
        log.info(
            "%d hosts are back after they were down for up to %.0f s; one is %s",
            len(hosts),
            max(hosts.values()),
            min(hosts),
        )
        return
    for host, seconds in hosts.items():
        log.info("host %s is back after it was down for %.0f s", host, seconds)


def _cut(replies: Iterable[HostReply]) -> tuple[HostReply, ...]:
    """Return the replies of one message with as many orders as it may have: orders of large servers come later."""
    left, cut = MOST_ORDERS, []
    for reply in replies:
        kept = []
        for order in reply.orders:
            left -= size_of(order)
            if left < 0:
                break
            kept.append(order)
        cut.append(reply if len(kept) == len(reply.orders) else msgspec.structs.replace(reply, orders=tuple(kept)))
    return tuple(cut)
