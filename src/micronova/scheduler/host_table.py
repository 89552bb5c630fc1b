"""All hosts as columns, so that a filter or a weigher is one operation over arrays, however many hosts there are.

Rows are dense and unordered; removing a host moves the last row into the gap. Each resource class has its own columns.
Facts that hosts have in common (hypervisor, CPU, capabilities) are stored once, and so is each combination of
aggregates: a question about them is answered once per kind of host, not once per host.
"""

import contextlib
import ipaddress
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from micronova.objects.bounded_search import StepMeter
from micronova.objects.fitting import fit, taken
from micronova.objects.scheduling import HostState, Selection
from micronova.objects.topology import DeviceRequest, TopologyRequest, encode
from micronova.placement.model import MOST_UNITS
from micronova.scheduler.interning import Interner, Shared
from micronova.scheduler.topologies import Passes, Topologies

log = logging.getLogger(__name__)

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]  # amounts too: they are exact up to 2**53, and weighers need no conversion
Column: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = slice | npt.NDArray[np.intp]

# node uuid, resource class, total, reserved, capacity, used, max unit, allocation ratio
Amount: TypeAlias = tuple[str, str, int, int, int, int, int, float]
ServiceState: TypeAlias = tuple[str, bool, bool, float]  # host, enabled, forced down, last seen

Aggregates: TypeAlias = tuple[tuple[str, dict[str, str]], ...]  # name and metadata of each

_CODES = ("zone", "facts", "aggregates", "topology")  # columns
_FIRST_SIZE = 64
_FEW = 8  # up to this many rows a Python loop is faster than a vector over the whole table


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change with use, and is equal for many hosts."""

    hypervisor_type: str = ""
    hypervisor_version: int = 0
    cpu_info: dict[str, object] = {}
    supported: tuple[tuple[str, str, str], ...] = ()
    capabilities: dict[str, str] = {}
    traits: frozenset[str] = frozenset()


class HostTable:
    """The hosts that the scheduler knows. Changes update it; nothing is rebuilt for a request."""

    def __init__(self, monotonic: Callable[[], float] | None = None) -> None:
        """Measure by `monotonic`, if given, how long it takes to compare requests with topologies of hosts."""
        # After one large block was freed, glibc keeps freed memory of that size. Otherwise the heap would shrink and
        # grow for nearly every vector, which doubles the time of a decision among 10,000 hosts.
        np.empty(1 << 18)
        self.now = 0.0  # the time of the decision; the scheduler sets it
        self.selections: list[Selection] = []
        self._index: dict[str, int] = {}
        self._rows_of_host: dict[str, list[int]] = {}
        self._size = _FIRST_SIZE
        self._free: dict[str, Column] = {}
        self._capacity: dict[str, Column] = {}
        self._total: dict[str, Column] = {}
        self._reserved: dict[str, Column] = {}
        self._max_unit: dict[str, Column] = {}
        self._ratio: dict[str, Column] = {}
        self._least_unit: dict[str, float] = {}  # no host has a smaller max unit
        self._columns: dict[str, Column] = {
            "enabled": np.zeros(self._size, np.bool_),
            "forced_down": np.zeros(self._size, np.bool_),
            "last_seen": np.zeros(self._size, np.float64),
            "zone": np.zeros(self._size, np.int32),
            "facts": np.zeros(self._size, np.intp),
            "aggregates": np.zeros(self._size, np.intp),
            "ip_version": np.zeros(self._size, np.int8),  # 0 if the address of the host is unknown
            "ip_high": np.zeros(self._size, np.uint64),
            "ip_low": np.zeros(self._size, np.uint64),
            "topology": np.zeros(self._size, np.intp),
            "num_instances": np.zeros(self._size, np.int64),
            "num_io_ops": np.zeros(self._size, np.int64),
            "failed_builds": np.zeros(self._size, np.int64),
            "hypervisor_version": np.zeros(self._size, np.int64),
        }
        self._zones = Interner()
        self._facts = Shared()
        self._aggregates = Shared()
        self._metrics: dict[str, Column] = {}
        self._topologies = Topologies(monotonic)
        self._left_out: set[str] = set()
        self._taken: list[tuple[int, str, str]] = []  # rows whose topology was consumed, with what it was before

    def __len__(self) -> int:
        return len(self.selections)

    def __contains__(self, node_uuid: str) -> bool:
        return node_uuid in self._index

    @property
    def uuids(self) -> Iterable[str]:
        """The uuids of all nodes."""
        return self._index.keys()

    @property
    def left_out(self) -> Set[str]:
        """The uuids of nodes that have no row, because what was read of them cannot be taken into the table."""
        return self._left_out

    def index(self, node_uuid: str) -> int | None:
        """Return the row of a node."""
        return self._index.get(node_uuid)

    def rows_of_host(self, host: str) -> list[int]:
        """Return the rows of all nodes of a host."""
        return self._rows_of_host.get(host, [])

    def find_rows(self, host: str | None, node: str | None) -> npt.NDArray[np.intp]:
        """Return the rows that have this host name, this node name, or both, in the order that a ranking needs."""
        # Those of a host are in another order after other hosts were removed.
        rows: Iterable[int] = range(len(self)) if host is None else sorted(self.rows_of_host(host))
        return np.array([r for r in rows if node is None or self.selections[r].node == node], np.intp)

    def view(self, rows: Rows | None = None) -> "HostView":
        """Return a view of all rows or of some, for filters and weighers."""
        return HostView(self, slice(0, len(self)) if rows is None else rows)

    # --- changes from the database ---

    def update(self, states: Iterable[HostState]) -> None:
        """Add or replace hosts."""
        for state in states:
            try:
                numbers, codes = self._numbers(state), self._take_codes(state)
            except Exception as error:  # a host chose what cannot be taken: it alone gets no servers
                self._leave_out(state.node_uuid, error)
                continue
            self._left_out.discard(state.node_uuid)
            row = self._index.get(state.node_uuid)
            before = None if row is None else self._codes(row)
            if row is None:
                row = self._append(state)
            elif self.selections[row].host != state.host:
                self._unlist_host(row)
                self._rows_of_host.setdefault(state.host, []).append(row)
            self._fill(row, state, numbers, codes)
            if before is not None:
                # After the new codes are taken: what a host keeps is not forgotten, though no other host has it.
                self._release_codes(before)

    def remove(self, node_uuids: Iterable[str]) -> None:
        """Remove hosts; unknown ones are ignored."""
        for uuid in node_uuids:
            self._left_out.discard(uuid)
            row = self._index.pop(uuid, None)
            if row is None:
                continue
            self._release_codes(self._codes(row))
            self._unlist_host(row)
            last = len(self.selections) - 1
            if row != last:
                moved = self.selections[last]
                for column in self._all_columns():
                    column[row] = column[last]
                self.selections[row] = moved
                self._index[moved.node_uuid] = row
                siblings = self._rows_of_host[moved.host]
                siblings[siblings.index(last)] = row
            self.selections.pop()

    def set_amounts(self, amounts: Iterable[Amount]) -> set[str]:
        """Set amounts of resources; return the nodes that are not in the table."""
        unknown: set[str] = set()
        for uuid, name, total, reserved, capacity, used, max_unit, ratio in amounts:
            row = self._index.get(uuid)
            if row is None:
                unknown.add(uuid)
                continue
            if name not in self._free:
                self._add_class(name)
            self._total[name][row] = total
            self._reserved[name][row] = reserved
            self._capacity[name][row] = capacity
            self._free[name][row] = capacity - used
            self._ratio[name][row] = ratio
            self._set_max_unit(row, name, max_unit)
        return unknown

    def set_topologies(self, topologies: Iterable[tuple[str, str, str]]) -> set[str]:
        """Set NUMA cells and devices of nodes, and what is held of them; return the nodes that are not in the table."""
        unknown: set[str] = set()
        for uuid, topology, held in topologies:
            row = self._index.get(uuid)
            if row is None:
                unknown.add(uuid)
                continue
            try:
                self._set_topology(row, topology, held)
            except Exception as error:
                self._leave_out(uuid, error)
        return unknown

    def set_services(self, services: Iterable[ServiceState]) -> None:
        """Set which hosts are enabled, and when they sent their last heartbeat."""
        columns = self._columns
        for host, enabled, forced_down, last_seen in services:
            for row in self._rows_of_host.get(host, ()):
                columns["enabled"][row] = enabled
                columns["forced_down"][row] = forced_down
                columns["last_seen"][row] = last_seen

    def set_heard_since(self, moment: float) -> None:
        """Record that all hosts have sent a heartbeat since a time; `set_services` then names those that have not."""
        last_seen = self._columns["last_seen"]
        np.maximum(last_seen, moment, out=last_seen)

    # --- for decisions ---

    def fits(self, row: int, resources: Mapping[str, int]) -> bool:
        """Return whether a host has these amounts free."""
        return all(n <= 0 or (name in self._free and self._free[name][row] >= n) for name, n in resources.items())

    def consume(self, row: int, resources: Mapping[str, int], request: TopologyRequest | None = None) -> None:
        """Count an instance on a host before its claim is in the database."""
        if request is not None:
            self._consume_topology(row, request)
        for name, amount in resources.items():
            if name not in self._free:
                self._add_class(name)
            self._free[name][row] -= amount
        self._columns["num_instances"][row] += 1
        self._columns["num_io_ops"][row] += 1

    def release(self, row: int, resources: Mapping[str, int]) -> None:
        """Undo `consume`."""
        for name, amount in resources.items():
            self._free[name][row] += amount
        self._columns["num_instances"][row] -= 1
        self._columns["num_io_ops"][row] -= 1

    def begin_consuming(self) -> None:
        """Begin a decision: what is consumed from now on can be undone, and steps are counted anew."""
        self._taken.clear()
        self._topologies.begin_decision()

    def undo_topologies(self) -> None:
        """Undo what `consume` has done to topologies since the decision began."""
        while self._taken:
            self._set_topology(*self._taken.pop())

    def state(self, row: int) -> HostState:
        """Return one host as an object, for filters that get one host at a time."""
        selection, columns = self.selections[row], self._columns
        facts: Facts = self._facts.values[columns["facts"][row]][1]
        capacity = {name: int(column[row]) for name, column in self._capacity.items()}
        return HostState(
            host=selection.host,
            node=selection.node,
            node_uuid=selection.node_uuid,
            zone=selection.zone,
            enabled=bool(columns["enabled"][row]),
            forced_down=bool(columns["forced_down"][row]),
            last_seen=float(columns["last_seen"][row]),
            total={name: int(column[row]) for name, column in self._total.items()},
            reserved={name: int(column[row]) for name, column in self._reserved.items()},
            capacity=capacity,
            max_unit={name: int(column[row]) for name, column in self._max_unit.items()},
            allocation_ratio={name: float(column[row]) for name, column in self._ratio.items()},
            used={name: capacity[name] - int(column[row]) for name, column in self._free.items()},
            num_instances=int(columns["num_instances"][row]),
            num_io_ops=int(columns["num_io_ops"][row]),
            failed_builds=int(columns["failed_builds"][row]),
            aggregates=self._aggregates.values[columns["aggregates"][row]][1],
            host_ip=self._host_ip(row),
            metrics={name: float(column[row]) for name, column in self._metrics.items() if column[row] == column[row]},
            hypervisor_type=facts.hypervisor_type,
            hypervisor_version=facts.hypervisor_version,
            cpu_info=facts.cpu_info,
            supported=facts.supported,
            capabilities=facts.capabilities,
            traits=tuple(sorted(facts.traits)),
            topology=(texts := self._topologies.texts(int(columns["topology"][row])))[0],
            held=texts[1],
        )

    # --- internal ---

    def _groups(self) -> tuple[dict[str, Column], ...]:
        amounts = (self._free, self._capacity, self._total, self._reserved, self._max_unit, self._ratio)
        return self._columns, *amounts, self._metrics

    def _set_topology(self, row: int, topology: str, held: str) -> None:
        column = self._columns["topology"]
        before = int(column[row])
        column[row] = self._topologies.take(topology, held)
        self._topologies.release(before)

    def _consume_topology(self, row: int, request: TopologyRequest) -> None:
        code = int(self._columns["topology"][row])
        topology, use = self._topologies.value(code)
        meter = StepMeter()
        assignment = fit(topology, use, request, meter)
        self._topologies.count_steps(meter)
        if assignment is not None:
            before = self._topologies.texts(code)
            self._taken.append((row, *before))
            self._set_topology(row, before[0], encode(taken(use, assignment, topology)))

    def _all_columns(self) -> Iterable[Column]:
        for group in self._groups():
            yield from group.values()

    def _add_class(self, name: str) -> None:
        for group in (self._free, self._capacity, self._total, self._reserved, self._max_unit, self._ratio):
            group[name] = np.zeros(self._size, np.float64)

    def _set_max_unit(self, row: int, name: str, max_unit: float) -> None:
        self._max_unit[name][row] = max_unit
        self._least_unit[name] = min(max_unit, self._least_unit.get(name, max_unit))

    def _append(self, state: HostState) -> int:
        row = len(self.selections)
        if row == self._size:
            self._size *= 2
            for group in self._groups():
                for name, column in group.items():
                    larger = np.zeros(self._size, column.dtype)
                    larger[:row] = column
                    group[name] = larger
        self._index[state.node_uuid] = row
        self._rows_of_host.setdefault(state.host, []).append(row)
        self.selections.append(Selection(host=state.host, node=state.node, node_uuid=state.node_uuid, zone=state.zone))
        return row

    def _leave_out(self, uuid: str, error: Exception) -> None:
        """Remove a node, of which something was read that the table cannot hold; the first time is logged."""
        if uuid not in self._left_out:
            log.error(
                "node %s gets no servers: what it has reported cannot be used (%s: %s)",
                uuid,
                type(error).__name__,
                error,
            )
        self.remove([uuid])
        self._left_out.add(uuid)

    def _numbers(self, state: HostState) -> dict[str, Any]:
        """Return the numbers of a row as their columns hold them; raise an error if one does not fit."""
        high, low, version = 0, 0, 0
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(state.host_ip)
            version, (high, low) = address.version, halves(int(address))
        numbers = {
            "enabled": state.enabled,
            "forced_down": state.forced_down,
            "last_seen": state.last_seen,
            "num_instances": state.num_instances,
            "num_io_ops": state.num_io_ops,
            "failed_builds": state.failed_builds,
            "hypervisor_version": state.hypervisor_version,
            "ip_version": version,
            "ip_high": high,
            "ip_low": low,
        }
        for amounts in (state.total, state.reserved, state.capacity, state.used, state.metrics):
            for amount in amounts.values():
                float(amount)
        return {name: self._columns[name].dtype.type(number) for name, number in numbers.items()}

    def _take_codes(self, state: HostState) -> tuple[int, int, int, int]:
        """Take the codes of a row's zone, facts, aggregates and topology; if one cannot be taken, none is."""
        facts = Facts(
            hypervisor_type=state.hypervisor_type,
            hypervisor_version=state.hypervisor_version,
            cpu_info=state.cpu_info,
            supported=state.supported,
            capabilities=state.capabilities,
            traits=frozenset(state.traits),
        )
        key = msgspec.msgpack.encode(facts, enc_hook=str, order="deterministic")
        groups = b""
        if state.aggregates:
            groups = msgspec.msgpack.encode(state.aggregates, enc_hook=str, order="deterministic")
        topology = self._topologies.take(state.topology, state.held)
        # What follows cannot fail.
        return (
            self._zones.take(state.zone, state.zone),
            self._facts.take(key, facts),
            self._aggregates.take(groups, state.aggregates),
            topology,
        )

    def _fill(self, row: int, state: HostState, numbers: Mapping[str, Any], codes: tuple[int, int, int, int]) -> None:
        """Write a row. All that can be wrong with a state was found when its numbers and codes were taken."""
        known = self.selections[row]
        if (known.host, known.node, known.zone) != (state.host, state.node, state.zone):
            self.selections[row] = Selection(
                host=state.host, node=state.node, node_uuid=state.node_uuid, zone=state.zone
            )
        for name, number in numbers.items():
            self._columns[name][row] = number
        for name, code in zip(_CODES, codes, strict=True):
            self._columns[name][row] = code
        self._fill_metrics(row, state.metrics)
        for name in state.capacity.keys() - self._free.keys():
            self._add_class(name)
        for name, free in self._free.items():
            capacity = state.capacity.get(name, 0)
            self._total[name][row] = state.total.get(name, 0)
            self._reserved[name][row] = state.reserved.get(name, 0)
            self._capacity[name][row] = capacity
            free[row] = capacity - state.used.get(name, 0)
            self._ratio[name][row] = self._max_unit[name][row] = 0
            if name in state.capacity:
                self._ratio[name][row] = state.allocation_ratio.get(name, 1.0)
                self._set_max_unit(row, name, state.max_unit.get(name, MOST_UNITS))

    def _host_ip(self, row: int) -> str:
        columns = self._columns
        number = int(columns["ip_high"][row]) << 64 | int(columns["ip_low"][row])
        match int(columns["ip_version"][row]):
            case 4:
                return str(ipaddress.IPv4Address(number))
            case 6:
                return str(ipaddress.IPv6Address(number))
            case _:
                return ""

    def _fill_metrics(self, row: int, metrics: Mapping[str, float]) -> None:
        for name in metrics.keys() - self._metrics.keys():
            self._metrics[name] = np.full(self._size, np.nan)
        for name, column in self._metrics.items():
            column[row] = metrics.get(name, np.nan)

    def _codes(self, row: int) -> tuple[int, int, int, int]:
        zone, facts, of_aggregates, topology = (int(self._columns[name][row]) for name in _CODES)
        return zone, facts, of_aggregates, topology

    def _release_codes(self, codes: tuple[int, int, int, int]) -> None:
        zone, facts, of_aggregates, topology = codes
        self._zones.release(zone)
        self._facts.release(facts)
        self._aggregates.release(of_aggregates)
        self._topologies.release(topology)

    def _unlist_host(self, row: int) -> None:
        host = self.selections[row].host
        siblings = self._rows_of_host[host]
        siblings.remove(row)
        if not siblings:
            del self._rows_of_host[host]


def halves(address: int) -> tuple[int, int]:
    """Return the upper and lower 64 bits of an address as a number."""
    return address >> 64, address & 0xFFFF_FFFF_FFFF_FFFF


class HostView:
    """Some rows of the table, column by column. The vectors that methods return are as long as the view."""

    __slots__ = ("_rows", "_table")

    def __init__(self, table: HostTable, rows: Rows) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        rows = self._rows
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    @property
    def rows(self) -> Rows:
        """The rows of the table in this view."""
        return self._rows

    @property
    def now(self) -> float:
        """The time of the decision."""
        return self._table.now

    def row(self, position: int) -> int:
        """Return the table's row at a position of this view."""
        rows = self._rows
        return rows.start + position if isinstance(rows, slice) else int(rows[position])

    def only(self, mask: Bools) -> "HostView":
        """Return a view of the rows of the mask."""
        return self.at(np.flatnonzero(mask))

    def at(self, chosen: npt.NDArray[np.intp]) -> "HostView":
        """Return a view of the rows at these positions."""
        rows = self._rows
        if isinstance(rows, slice):
            return HostView(self._table, chosen + rows.start if rows.start else chosen)
        return HostView(self._table, rows.take(chosen))

    def free(self, resource_class: str) -> Floats:
        """Return the unused capacity in units of the class, 0 for hosts without the class."""
        return self._amounts(self._table._free, resource_class)

    def capacity(self, resource_class: str) -> Floats:
        """Return the capacity: total without reserved, times the allocation ratio."""
        return self._amounts(self._table._capacity, resource_class)

    def total(self, resource_class: str) -> Floats:
        """Return what the hosts physically have."""
        return self._amounts(self._table._total, resource_class)

    def reserved(self, resource_class: str) -> Floats:
        """Return what the hosts keep for themselves."""
        return self._amounts(self._table._reserved, resource_class)

    def allocation_ratio(self, resource_class: str) -> Floats:
        """Return how often the hosts give out what they have, 0 for hosts without the class."""
        return self._amounts(self._table._ratio, resource_class)

    def may_give(self, resource_class: str, amount: int) -> Bools | None:
        """Return which hosts may give one instance this amount, however much is free; None if all may."""
        if amount <= self._table._least_unit.get(resource_class, amount):
            return None
        mask: Bools = self._amounts(self._table._max_unit, resource_class) >= amount
        return mask

    def used(self, resource_class: str) -> Floats:
        """Return what is used."""
        return self.capacity(resource_class) - self.free(resource_class)

    def column(self, name: str) -> Column:
        """Return a column: enabled, forced_down, last_seen, num_instances, num_io_ops, failed_builds or a code."""
        return self._take(self._table._columns[name])

    def uniform(self, name: str) -> bool:
        """Return whether all hosts of the table have the same number in a column; faster than to take it."""
        column = self._table._columns[name][: len(self._table)]
        return not len(column) or bool(column.min() == column.max())

    def in_zone(self, zone: str) -> Bools:
        """Return which hosts are in this availability zone."""
        mask: Bools = self._take(self._table._columns["zone"]) == self._table._zones.find(zone)
        return mask

    def by_host(self, values: Mapping[str, Any], default: int = 0, dtype: npt.DTypeLike = np.int64) -> Column:
        """Return a value for each row from a value per host name."""
        table, rows = self._table, self._rows
        if len(self) <= _FEW:
            names = (table.selections[self.row(p)].host for p in range(len(self)))
            return np.array([values.get(name, default) for name in names], dtype)
        spread = np.full(len(table), default, dtype)
        for host, value in values.items():
            for row in table.rows_of_host(host):
                spread[row] = value
        return spread[rows]

    def on_nodes(self, uuids: Iterable[str]) -> Bools:
        """Return True for each of these nodes; unknown ones are ignored."""
        found = np.zeros(len(self._table), np.bool_)
        for uuid in uuids:
            row = self._table.index(uuid)
            if row is not None:
                found[row] = True
        return found[self._rows]

    def on_hosts(self, names: Iterable[str]) -> Bools:
        """Return which rows belong to one of these hosts."""
        mask: Bools = self.by_host(dict.fromkeys(names, 1)) > 0
        return mask

    def by_facts(self, key: Hashable, passes: Callable[[Facts], bool]) -> Bools:
        """Return which hosts' facts pass; `passes` is called once per kind of host, and results are cached by key."""
        return self._table._facts.passing(key, passes).take(self._take(self._table._columns["facts"]))

    def objects_by_facts(self, key: Hashable, find: Callable[[Facts], object]) -> Column:
        """Return an object per host from its facts."""
        found = self._table._facts.objects(key, find)
        return found.take(self._take(self._table._columns["facts"]))

    def by_aggregates(self, key: Hashable, passes: Callable[[Aggregates], bool]) -> Bools:
        """Return which hosts' aggregates pass; `passes` is called once per combination of aggregates, as `by_facts`."""
        return self._table._aggregates.passing(key, passes).take(self._take(self._table._columns["aggregates"]))

    def numbers_by_aggregates(self, key: Hashable, number: Callable[[Aggregates], float]) -> Floats | float:
        """Return a number per host from its aggregates, or one number if it is the same for all hosts."""
        by_code = self._table._aggregates.numbers(key, number)
        return by_code if isinstance(by_code, float) else by_code.take(self._take(self._table._columns["aggregates"]))

    def metric(self, name: str) -> Floats:
        """Return what the monitors of the hosts measured, NaN for hosts without this metric."""
        column = self._table._metrics.get(name)
        return np.full(len(self), np.nan) if column is None else self._take(column)

    def in_network(self, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> Bools:
        """Return which hosts have their address in a network; hosts with an unknown address are in none."""
        table = self._table._columns
        mask: Bools = self._take(table["ip_version"]) == network.version
        first, bits = halves(int(network.network_address)), halves(int(network.netmask))
        for name, wanted, relevant in zip(("ip_high", "ip_low"), first, bits, strict=True):
            mask &= (self._take(table[name]) & np.uint64(relevant)) == np.uint64(wanted)
        return mask

    def with_cells(self, request: TopologyRequest) -> Bools:
        """Return which hosts have NUMA cells that suit a request; `cell_columns.decides` says whether this decides."""
        return self._table._topologies.suit(request, self._take(self._table._columns["topology"]))

    def by_topology(
        self, key: bytes, passes: Passes, among: Bools | None, devices: Sequence[DeviceRequest] = ()
    ) -> tuple[Bools, Bools | None]:
        """Return which hosts' NUMA cells and devices pass, with what is held of them; results are kept by key.

        The second are the hosts that were left out, because it would take long to compare them; None if there are none.
        `passes` is called once per kind of host. Hosts that are not `among` these fail without being asked, and so do
        those with too few of these devices.
        """
        codes = self._take(self._table._columns["topology"])
        if among is None:
            return self._table._topologies.passing(key, passes, codes, devices)
        passing, unasked = self._table._topologies.passing(key, passes, codes[among], devices)
        mask, left_out = among.copy(), None
        mask[among] = passing
        if unasked is not None:
            left_out = among.copy()
            left_out[among] = unasked
        return mask, left_out

    async def ask_topologies(
        self, key: bytes, passes: Passes, among: Bools | None, devices: Sequence[DeviceRequest] = ()
    ) -> None:
        """Find the results of `by_topology` beforehand, with pauses in which other tasks may change the table."""
        codes = self._take(self._table._columns["topology"])
        await self._table._topologies.ask(key, passes, codes.copy() if among is None else codes[among], devices)

    def has_devices(self) -> bool:
        """Return False if no host of the table has a free PCI device; faster than to count them."""
        return self._table._topologies.has_devices()

    def free_devices(self) -> Ints:
        """Return how many PCI devices the hosts have free."""
        return self._table._topologies.devices(self._take(self._table._columns["topology"]))

    def state(self, position: int) -> HostState:
        """Return one host as an object."""
        return self._table.state(self.row(position))

    def selections(self) -> Iterable[Selection]:
        """Return the names of the hosts and nodes."""
        rows, all_of_them = self._rows, self._table.selections
        return all_of_them[rows] if isinstance(rows, slice) else (all_of_them[row] for row in rows)

    def addresses(self) -> Iterable[str]:
        """Return the IP addresses of the hosts, "" if one is unknown."""
        return (self._table._host_ip(self.row(position)) for position in range(len(self)))

    def _amounts(self, columns: dict[str, Column], resource_class: str) -> Floats:
        column = columns.get(resource_class)
        if column is None:
            return np.zeros(len(self))
        return self._take(column)

    def _take(self, column: Column) -> Column:
        rows = self._rows
        # Rows are never out of range; the check for it would take a third of the time.
        return column[rows] if isinstance(rows, slice) else column.take(rows, mode="clip")
