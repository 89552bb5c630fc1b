"""The transaction that applies heartbeats of compute hosts: what hosts report of themselves, and what they get for it.

A heartbeat renews the leases of the operations that the host works on. The reply has the orders that the host should
have and does not, the operations that it should drop, and the guests that it should destroy. The number of statements
does not depend on the number of hosts.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.conductor import boots, power_changes
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import HostKind, known_kind
from micronova.conductor.operations.operation_kind import OperationKind
from micronova.db import departures as departure_rows
from micronova.db import instances, node_reports, nodes, server_migrations, services
from micronova.db import operations as operation_rows
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import MicronovaError, SecretNotReadable
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import OperationRow
from micronova.objects.orders import Departure, Heartbeat, HostBeat, HostMetrics, HostReply, WorkOrder
from micronova.objects.service_names import COMPUTE

log = logging.getLogger(__name__)

JUST_SENT = 1_000_000  # microseconds: an order that was sent less than this ago is not sent again


class RolledBack(NamedTuple):
    """A live migration of which the destination has nothing any more: it failed or was aborted."""

    host: str
    context: Context
    instance: InstanceRow


class LostHypervisor(NamedTuple):
    """A host that has lost its hypervisor and could not connect to it again."""

    host: str
    host_ip: str
    message: str


class Applied(NamedTuple):
    """What the transaction found and did."""

    newer: Mapping[str, int]  # the numbers of newer heartbeats that were applied before, by host
    replies: Sequence[HostReply] = ()
    continued: Sequence[Operation] = ()  # operations that this conductor continues without hosts that are stopping
    back: Mapping[str, float] = {}  # the hosts that are back, with the seconds for which they counted as down
    notifications: Sequence[power_changes.PowerChangeNotifications] = ()
    state_changes: Sequence[power_changes.StateChange] = ()
    registered: Sequence[services.ServiceRow] = ()  # of hosts that were not known before
    metrics: Sequence[tuple[str, HostMetrics]] = ()  # of nodes that the hosts have
    rolled_back: Sequence[RolledBack] = ()
    lost_hypervisors: Sequence[LostHypervisor] = ()
    refused_nodes: Sequence[str] = ()  # why nodes of these hosts are not recorded


class HeartbeatTransaction:
    """Applies the heartbeats of a batch."""

    def __init__(
        self,
        dependencies: ConductorDependencies,
        kinds: Mapping[str, OperationKind],
        ratios: Mapping[str, float],
        stored_metrics: Collection[str] = (),
    ) -> None:
        """`ratios` are the allocation ratios with which hosts begin that report none, by resource class.

        `stored_metrics` are those by which the scheduler places servers.
        """
        self._engine = dependencies.engine
        self._service_down_time = dependencies.service_down_time
        self._kinds = kinds
        self._ratios = ratios
        self._stored_metrics = frozenset(stored_metrics)

    def apply(self, conn: sa.Connection, heartbeats: Sequence[Heartbeat]) -> Applied:
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
            return Applied(newer)
        now = self._engine.now()
        names = [each.host for each in beats]
        reported_changes = ((each.host, change) for each in beats for change in each.power_changes)
        power = power_changes.compare(conn, reported_changes)
        owned = _owned(conn, names)
        departures = _recorded_departures(conn, names)
        # Only of departures that are recorded: a host can name any number of guests.
        removed = {each.host: _removed(each, departures[each.host]) for each in beats}
        left = {gone.instance_uuid for each in removed.values() for gone in each}
        boot_results = boots.of_own_servers(conn, beats)
        _lock(conn, beats, owned, {*power.differing, *left, *(each.instance_uuid for _, each in boot_results)})
        recorded = power_changes.record(conn, power, now)
        repeat_boots = boots.apply(conn, boot_results, now)
        running = [each for each in beats if not each.stopping]
        self._renew(conn, running, owned, now)
        gone = [(host, each.instance_uuid, each.epoch) for host, guests in removed.items() for each in guests]
        rolled_back = _rolled_back(conn, gone)
        departure_rows.delete(conn, gone)
        to_remove = _departures_to_tell(conn, departures, removed)
        server_migrations.complete_evacuations(conn, [(host, uuid) for host, uuid, _ in gone], now)
        dropped = self._dropped(conn, beats, owned)
        again = self._orders_again(conn, running, owned)
        replies = [
            HostReply(host=each.host)
            if each.stopping
            else _reply(
                each,
                owned[each.host],
                again,
                to_remove[each.host],
                dropped,
                repeat_boots=repeat_boots.get(each.host, ()),
                repeat_power=recorded.repeat.get(each.host, ()),
            )
            for each in beats
        ]
        continued = self._continue_without(conn, [row for each in beats if each.stopping for row in owned[each.host]])
        with_nodes = nodes.hosts_with_nodes(conn, names)
        reports = node_reports.record(conn, {each.host: each.nodes for each in beats}, now, ratios=self._ratios)
        ratios = reports.ratios
        of_nodes = {
            each.host: {node.node: dict(ratios[node.node_uuid]) for node in each.nodes if node.node_uuid in ratios}
            for each in beats
        }
        down_since = now - micros(self._service_down_time)
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
        services.compute_hosts_stopped(conn, stopping, now, self._service_down_time)
        asked = {each.host for each in running if not each.nodes} - with_nodes
        asked |= reports.refused_by  # the names may be free later
        metrics = _metrics(conn, beats)
        if self._stored_metrics:
            nodes.note_metrics(conn, {(host, each.node): self._stored(each) for host, each in metrics}, now)
        return Applied(
            newer,
            [
                msgspec.structs.replace(reply, resend_nodes=reply.host in asked, allocation_ratios=of_nodes[reply.host])
                for reply in replies
            ],
            continued,
            back,
            recorded.notifications,
            recorded.changed,
            [*services.on_hosts(conn, COMPUTE, new).values()] if new else (),
            metrics,
            rolled_back,
            _lost_hypervisors(conn, beats),
            tuple(reports.refused.values()),
        )

    def _stored(self, measured: HostMetrics) -> dict[str, float]:
        return {name: value for name, value in measured.values.items() if name in self._stored_metrics}

    def _renew(
        self, conn: sa.Connection, beats: Sequence[HostBeat], owned: Mapping[str, Sequence[OperationRow]], now: int
    ) -> None:
        """Renew the leases of the operations that belong to hosts."""
        operation_rows.renew_of_hosts(
            conn,
            [row["id"] for each in beats for row in owned[each.host]],
            [operation_rows.host_owner(each.host) for each in beats],
            now,
            self._engine.until(),
            undisturbed=self._engine.undisturbed(),
        )

    def _dropped(
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
                orders[operation.id] = kind.order_again(conn, operation, instance)
            except (MicronovaError, msgspec.MsgspecError, ValueError) as error:
                # The image service is not known yet, the server has grown, this process has another secret key, or what
                # is stored of the operation is damaged. The next heartbeat asks again; this one is also about other
                # servers, and proves that the host lives.
                if isinstance(error, SecretNotReadable) and not operation_rows.note_error(
                    conn, operation.id, operation.payload, str(error)
                ):
                    continue  # it was logged, and the owner reads it if the operation does not end in time
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


def _owned(conn: sa.Connection, hosts: Sequence[str]) -> dict[str, list[OperationRow]]:
    """Return the operations that belong to each host."""
    found: dict[str, list[OperationRow]] = {host: [] for host in hosts}
    owners = {operation_rows.host_owner(host): host for host in hosts}
    for row in operation_rows.owned(conn, owners):
        found[owners[row["owner"] or ""]].append(row)
    return found


def _recorded_departures(conn: sa.Connection, hosts: Sequence[str]) -> dict[str, list[Departure]]:
    """Return the departures that are recorded for each host."""
    found: dict[str, list[Departure]] = {host: [] for host in hosts}
    for row in departure_rows.of_hosts(conn, hosts):
        found[row["host"]].append(Departure(row["instance_uuid"], row["epoch"], row["deleted"]))
    return found


def _rolled_back(conn: sa.Connection, gone: Sequence[tuple[str, str, int]]) -> list[RolledBack]:
    """Return the live migrations that end when destinations have removed these guests (host, instance, epoch)."""
    migrations = departure_rows.rolled_back(conn, gone)
    rows = instances.get_many(conn, [each["instance_uuid"] for each in migrations]) if migrations else {}
    return [
        RolledBack(each["dest_compute"] or "", server_migrations.context_of(each), row)
        for each in migrations
        if (row := rows.get(each["instance_uuid"])) is not None
    ]


def _departures_to_tell(
    conn: sa.Connection, recorded: Mapping[str, Sequence[Departure]], removed: Mapping[str, Collection[Departure]]
) -> dict[str, list[Departure]]:
    """Return the departures of which each host has to remove the guest: not those that are held back, or are done."""
    held_back = departure_rows.held_back(conn, list(recorded)) if any(recorded.values()) else set()
    return {
        host: [
            each
            for each in departures
            if each not in removed[host] and (host, each.instance_uuid, each.epoch) not in held_back
        ]
        for host, departures in recorded.items()
    }


def _alive_at(heartbeat: Heartbeat, now: int) -> int:
    """Return when the sender is known to have been alive: the heartbeat itself may have been sent long ago.

    An agent of an earlier version does not tell which reply it got last: there the arrival has to count.
    """
    return now if heartbeat.answered_at is None else min(now, micros(heartbeat.answered_at))


def _reply(
    beat: HostBeat,
    owned: list[OperationRow],
    again: dict[str, WorkOrder],
    departures: list[Departure],
    dropped: set[tuple[str, int]],
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
            if each.operation_id not in operations and (each.operation_id, each.epoch) in dropped
        ),
        departures=tuple(departures),
        repeat_boots=repeat_boots,
        repeat_power=repeat_power,
    )


def _removed(beat: HostBeat, departures: Iterable[Departure]) -> frozenset[Departure]:
    """Return the departures whose guests a host has removed."""
    removed = {gone.instance_uuid: gone.epoch for gone in beat.removed_guests}
    return frozenset(each for each in departures if each.epoch <= removed.get(each.instance_uuid, -1))


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


def _lost_hypervisors(conn: sa.Connection, beats: Iterable[HostBeat]) -> list[LostHypervisor]:
    """Return the hosts that say that they have lost their hypervisors, with their recorded addresses."""
    messages = {each.host: each.connect_error for each in beats if each.connect_error}
    if not messages:
        return []
    known = {host: address or "" for (host, _), address in nodes.addresses(conn, list(messages)).items()}
    return [LostHypervisor(host, known.get(host, ""), message) for host, message in messages.items()]
