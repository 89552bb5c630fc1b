"""Heartbeats of compute hosts: what they report of themselves, and what they get in return.

A heartbeat renews the leases of the operations that the host works on. The reply has the orders that the host should
have and does not, the operations that it should drop, the guests that it should destroy, and the time until the next
heartbeat.

The heartbeats that arrive within `WINDOW` share one transaction, whose number of statements does not depend on the
number of hosts. The first one after a pause does not wait. The transaction leaves out heartbeats that are older than
what their hosts sent since. A sender whose heartbeat was refused for another reason shares no transaction for
`REFUSED_ALONE`, and its heartbeats wait behind those of the others. So does a heartbeat that names very many guests,
orders, nodes or devices. A heartbeat for whose reply nobody waits any more is not applied.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.conductor import boots, power_changes
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import HostKind, known_kind
from micronova.conductor.operations.operation_kind import OperationKind
from micronova.conductor.operations.orders import size_of
from micronova.db import departures as departure_rows
from micronova.db import instances, nodes, server_migrations, services
from micronova.db import operations as operation_rows
from micronova.notifications import resources
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import Invalid, OperationFailed, StaleHeartbeat, Unavailable
from micronova.objects.operations import OperationRow
from micronova.objects.orders import Departure, Heartbeat, HeartbeatReply, HostBeat, HostMetrics, HostReply, WorkOrder
from micronova.objects.service_names import COMPUTE

log = logging.getLogger(__name__)

JUST_SENT = 1_000_000  # microseconds: an order that was sent less than this ago is not sent again
WINDOW = 0.1  # seconds between two transactions
MOST_HOSTS = 500  # of one transaction; a single heartbeat may have more
MOST_ENTRIES = 2000  # of the lists of heartbeats in one transaction; a heartbeat with more shares no transaction
REFUSED_ALONE = 60.0  # seconds for which the heartbeats of a sender share no transaction after one was refused
MOST_REFUSED = 1000  # senders of refused heartbeats that a conductor remembers
MOST_ORDERS = 8 << 20  # bytes of orders in one reply; the next reply has the others
MOST_LOGGED = 10  # hosts of one transaction that the log names

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


class _Applied(NamedTuple):
    """What a transaction found and did."""

    newer: Mapping[str, int]  # the numbers of newer heartbeats that were applied before, by host
    replies: Sequence[HostReply] = ()
    continued: Sequence[Operation] = ()  # operations that this conductor continues without hosts that are stopping
    back: Mapping[str, float] = {}  # the hosts that are back, with the seconds for which they counted as down
    notifications: Sequence[power_changes.PowerChangeNotifications] = ()
    registered: Sequence[services.ServiceRow] = ()  # of hosts that were not known before
    metrics: Sequence[tuple[str, HostMetrics]] = ()  # of nodes that the hosts have


class Heartbeats:
    """Handles heartbeats."""

    def __init__(
        self,
        dependencies: ConductorDependencies,
        kinds: dict[str, OperationKind],
        ratios: dict[str, float],
        stored_metrics: Collection[str] = (),
    ) -> None:
        """`ratios` are the allocation ratios of hosts that report none, by resource class.

        `stored_metrics` are those by which the scheduler places servers.
        """
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._kinds = kinds
        self._ratios = ratios
        self._stored_metrics = frozenset(stored_metrics)
        self.interval = 0.0  # seconds until the next heartbeat, for the replies; 0: as the agents are set
        self._waiting: dict[_Key, _Waiting] = {}
        self._worker: asyncio.Task[None] | None = None
        self._applied_at = float("-inf")
        self._begun_at: float | None = None  # the transaction that runs
        self._refused: dict[_Key, float] = {}  # until when their heartbeats share no transaction, soonest first

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
            applied = await self._engine.write_for_host(self._apply, [waiting.beat for waiting in batch])
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
        for context, notifications in applied.notifications:
            for name, row in notifications:
                self._dependencies.notifier.instance(name, row, context=context)
        for service in applied.registered:
            self._dependencies.notifier.announce(Context(), partial(resources.service, "create", service))
        for host, metrics in applied.metrics:
            self._dependencies.notifier.announce(Context(), partial(resources.metrics, host, metrics))
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

    def _apply(self, conn: sa.Connection, heartbeats: Sequence[Heartbeat]) -> _Applied:
        """Apply heartbeats, except those of hosts of which newer ones were applied.

        Raise StaleHeartbeat, which undoes all, if a newer one is applied at the same moment. It locks in the order of
        all transactions: instances, operations, inventories, services.
        """
        numbers = {each.host: heartbeat.number for heartbeat in heartbeats for each in heartbeat.hosts}
        newer = services.newer_heartbeats(conn, numbers)
        beats = [
            each
            for heartbeat in heartbeats
            if newer.keys().isdisjoint(each.host for each in heartbeat.hosts)
            for each in heartbeat.hosts
        ]
        if not beats:
            return _Applied(newer)
        now, until = self._engine.now(), self._engine.until()
        names = [each.host for each in beats]
        reported_changes = ((each.host, change) for each in beats for change in each.power_changes)
        power = power_changes.compare(conn, reported_changes)
        owned: dict[str, list[OperationRow]] = {name: [] for name in names}
        owners = {operation_rows.host_owner(name): name for name in names}
        for row in operation_rows.owned(conn, owners):
            owned[owners[row["owner"] or ""]].append(row)
        departures: dict[str, list[Departure]] = {name: [] for name in names}
        for departure in departure_rows.of_hosts(conn, names):
            departures[departure["host"]].append(Departure(departure["instance_uuid"], departure["epoch"]))
        # Only of departures that are recorded: a host can name any number of guests.
        removed = {each.host: _removed(each, departures[each.host]) for each in beats}
        left = {gone.instance_uuid for each in removed.values() for gone in each}
        boot_results = boots.of_own_servers(conn, beats)
        _lock(conn, beats, owned, {*power.differing, *left, *(each.instance_uuid for _, each in boot_results)})
        recorded = power_changes.record(conn, power, now)
        repeat_boots = boots.apply(conn, boot_results, now)
        running = [each for each in beats if not each.stopping]
        renewed = [row["id"] for each in running for row in owned[each.host]]
        operation_rows.renew_of_hosts(
            conn,
            renewed,
            [operation_rows.host_owner(each.host) for each in running],
            now,
            until,
            undisturbed=self._engine.undisturbed(),
        )
        departure_rows.delete(
            conn, [(host, gone.instance_uuid, gone.epoch) for host, each in removed.items() for gone in each]
        )
        held_back = departure_rows.held_back(conn, names) if any(departures.values()) else set()
        departures = {
            host: [
                each
                for each in departures[host]
                if each not in removed[host] and (host, each.instance_uuid, each.epoch) not in held_back
            ]
            for host in names
        }
        server_migrations.complete_evacuations(
            conn, [(host, gone.instance_uuid) for host, each in removed.items() for gone in each], now
        )
        void = self._void(conn, beats, owned)
        again = self._orders_again(conn, running, owned)
        replies = [
            HostReply(host=each.host)
            if each.stopping
            else _reply(
                each,
                owned[each.host],
                again,
                departures[each.host],
                void,
                repeat_boots=repeat_boots.get(each.host, ()),
                repeat_power=recorded.repeat.get(each.host, ()),
            )
            for each in beats
        ]
        continued = self._continue_without(conn, [row for each in beats if each.stopping for row in owned[each.host]])
        with_nodes = nodes.hosts_with_nodes(conn, names)
        nodes.upsert_all(conn, {each.host: each.nodes for each in beats}, now, ratios=self._ratios)
        down_since = now - micros(self._dependencies.service_down_time)
        silent = services.silent(conn, COMPUTE, [each.host for each in running], down_since)
        back = {host: (down_since - seen) / 1e6 for host, seen in silent.items()}
        alive = {each.host: _alive_at(heartbeat, now) for heartbeat in heartbeats for each in heartbeat.hosts}
        versions = {each.host: heartbeat.service_version for heartbeat in heartbeats for each in heartbeat.hosts}
        new = services.compute_heartbeats(
            conn,
            {name: numbers[name] for name in names},
            {name: alive[name] for name in names},
            now,
            {name: versions[name] for name in names},
        )
        # A host that is stopping counts as down at once.
        stopping = [each.host for each in beats if each.stopping]
        services.compute_hosts_stopped(conn, stopping, now, self._dependencies.service_down_time)
        asked = {each.host for each in running if not each.nodes} - with_nodes
        metrics = _metrics(conn, beats)
        if self._stored_metrics:
            nodes.note_metrics(conn, {(host, each.node): self._stored(each) for host, each in metrics}, now)
        return _Applied(
            newer,
            [msgspec.structs.replace(reply, resend_nodes=True) if reply.host in asked else reply for reply in replies],
            continued,
            back,
            recorded.notifications,
            [*services.on_hosts(conn, COMPUTE, new).values()] if new else (),
            metrics,
        )

    def _stored(self, measured: HostMetrics) -> dict[str, float]:
        return {name: value for name, value in measured.values.items() if name in self._stored_metrics}

    def _void(
        self, conn: sa.Connection, beats: Iterable[HostBeat], owned: dict[str, list[OperationRow]]
    ) -> set[tuple[str, int]]:
        """Return which of the orders that hosts work on they should drop: purged, overtaken, cancelled, or failed."""
        unknown = set()
        for beat in beats:
            known = {row["id"] for row in owned[beat.host]}
            unknown |= {
                (each.operation_id, each.epoch) for each in beat.running_orders if each.operation_id not in known
            }
        if not unknown:
            return set()
        found = operation_rows.get_many(conn, [id for id, _ in unknown])
        return {
            (id, epoch)
            for id, epoch in unknown
            if (row := found.get(id)) is None or row["epoch"] != epoch or row["result"] in ("cancelled", "error")
        }

    def _orders_again(
        self, conn: sa.Connection, beats: Iterable[HostBeat], owned: dict[str, list[OperationRow]]
    ) -> dict[str, WorkOrder]:
        """Return by operation the orders that hosts should have and do not, unless they are late or were just sent."""
        missing = []
        for beat in beats:
            reported = {each.operation_id: each.epoch for each in beat.running_orders}
            # Newer conductors send the orders that only they can make.
            for row in owned[beat.host]:
                kind = known_kind(self._kinds, row)
                if reported.get(row["id"]) != row["epoch"] and isinstance(kind, HostKind):
                    missing.append((kind, Operation.of(row)))
        if not missing:
            return {}
        found = instances.get_many(conn, [operation.instance_uuid for _, operation in missing])
        orders = {}
        for kind, operation in missing:
            instance, now = found.get(operation.instance_uuid), self._engine.now()
            if instance is None or instance["host"] is None or instance["epoch"] != operation.epoch:
                continue
            if operation.is_late(now, self._engine.undisturbed()) or instance["updated_at"] > now - JUST_SENT:
                continue
            try:
                orders[operation.id] = kind.order(conn, operation, instance)
            except (Unavailable, OperationFailed) as error:
                # The image service is not known yet, or the server has grown; the next heartbeat asks again.
                log.warning("the order of operation %s cannot be made now: %s", operation.id, error)
        return orders

    def _continue_without(self, conn: sa.Connection, owned: list[OperationRow]) -> list[Operation]:
        """Take the operations of stopping hosts that can continue elsewhere; the hosts get the others again later."""
        taken = []
        for row in owned:
            if isinstance(kind := known_kind(self._kinds, row), HostKind):
                result = kind.host_stops(conn, Operation.of(row))
                if result is not None:
                    taken.append(result.operation)
        return taken


def _alive_at(heartbeat: Heartbeat, now: int) -> int:
    """Return when the sender is known to have been alive: the heartbeat itself may have been sent long ago.

    An agent of an earlier version does not tell which reply it got last: there the arrival has to count.
    """
    return now if heartbeat.answered_at is None else min(now, micros(heartbeat.answered_at))


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


def _reply(
    beat: HostBeat,
    owned: list[OperationRow],
    again: dict[str, WorkOrder],
    departures: list[Departure],
    void: set[tuple[str, int]],
    *,
    repeat_boots: tuple[str, ...],
    repeat_power: tuple[str, ...],
) -> HostReply:
    operations = {row["id"] for row in owned}
    return HostReply(
        host=beat.host,
        orders=tuple(again[row["id"]] for row in owned if row["id"] in again),
        drop=tuple(
            each.operation_id
            for each in beat.running_orders
            if each.operation_id not in operations and (each.operation_id, each.epoch) in void
        ),
        departures=tuple(departures),
        repeat_boots=repeat_boots,
        repeat_power=repeat_power,
    )


def _removed(beat: HostBeat, departures: Iterable[Departure]) -> frozenset[Departure]:
    """Return the departures whose guests a host has removed."""
    removed = {gone.instance_uuid: gone.epoch for gone in beat.removed_guests}
    return frozenset(each for each in departures if each.epoch <= removed.get(each.instance_uuid, -1))


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


def _lock(
    conn: sa.Connection,
    beats: Sequence[HostBeat],
    owned: Mapping[str, Sequence[OperationRow]],
    named: Iterable[str],
) -> None:
    """Lock the instances and the operations that heartbeats change."""
    uuids = set(named)
    for beat in beats:
        if beat.stopping:
            uuids |= {row["instance_uuid"] for row in owned[beat.host]}
    if uuids:
        instances.lock_many(conn, uuids)
    if ids := [row["id"] for each in owned.values() for row in each]:
        operation_rows.lock_many(conn, ids)


def _metrics(conn: sa.Connection, beats: Iterable[HostBeat]) -> list[tuple[str, HostMetrics]]:
    """Return what hosts have measured on nodes of their own, with the recorded addresses of these."""
    measured = [(each.host, each.metrics) for each in beats if each.metrics is not None]
    if not measured:
        return []
    known = nodes.addresses(conn, [host for host, _ in measured])
    return [
        (host, msgspec.structs.replace(metrics, host_ip=known[host, metrics.node] or ""))
        for host, metrics in measured
        if (host, metrics.node) in known
    ]
