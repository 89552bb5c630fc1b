"""The columns of the host table: one row per compute node, one array per thing that is known of nodes.

Rows are dense and unordered; removing a node moves the last row into the gap. Each resource class has its own columns.
Facts that hosts have in common (hypervisor, CPU, capabilities) are stored once, and so is each combination of
aggregates: a column has their codes.
"""

import contextlib
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from micronova.objects.scheduling import HostState, Selection
from micronova.placement.model import MOST_UNITS
from micronova.scheduler.interning import Interner, SharedValues
from micronova.scheduler.topologies import Topologies

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]  # amounts too: they are exact up to 2**53, and weighers need no conversion
Column: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = slice | npt.NDArray[np.intp]
Aggregates: TypeAlias = tuple[tuple[str, dict[str, str]], ...]  # name and metadata of each

_CODES = ("zone", "facts", "aggregates", "topology")  # columns
_FIRST_SIZE = 64


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change with use, and is equal for many hosts."""

    hypervisor_type: str = ""
    hypervisor_version: int = 0
    cpu_info: dict[str, object] = {}
    supported: tuple[tuple[str, str, str], ...] = ()
    capabilities: dict[str, str] = {}
    traits: frozenset[str] = frozenset()


class Encoded(NamedTuple):
    """A node as the columns hold it: numbers by column, and the codes of what other nodes may have, too."""

    numbers: Mapping[str, Any]
    codes: tuple[int, int, int, int]  # in the order of `_CODES`


class HostColumns:
    """The rows of all nodes. `HostTable` changes them; a `HostView` reads them for filters and weighers."""

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
        # By resource class. What is free is the capacity without what is used.
        self.free: dict[str, Column] = {}
        self.capacity: dict[str, Column] = {}
        self.total: dict[str, Column] = {}
        self.reserved: dict[str, Column] = {}
        self.max_unit: dict[str, Column] = {}
        self.ratio: dict[str, Column] = {}
        self.least_unit: dict[str, float] = {}  # no host has a smaller max unit
        self.columns: dict[str, Column] = {
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
        self.zones: Interner[str] = Interner()
        self.facts: SharedValues[Facts] = SharedValues()
        self.aggregates: SharedValues[Aggregates] = SharedValues()
        self.metrics: dict[str, Column] = {}
        self.topologies = Topologies(monotonic)

    def __len__(self) -> int:
        return len(self.selections)

    def __contains__(self, node_uuid: str) -> bool:
        return node_uuid in self._index

    @property
    def uuids(self) -> Iterable[str]:
        """The uuids of all nodes."""
        return self._index.keys()

    def index(self, node_uuid: str) -> int | None:
        """Return the row of a node."""
        return self._index.get(node_uuid)

    def rows_of_host(self, host: str) -> list[int]:
        """Return the rows of all nodes of a host."""
        return self._rows_of_host.get(host, [])

    def find_rows(self, host: str | None, node: str | None) -> npt.NDArray[np.intp]:
        """Return the rows that have this host name, this node name, or both, in the order that a ranking needs.

        Another host may name a node like a host that has a node of its own name: that one is meant.
        """
        # Those of a host are in another order after other hosts were removed.
        rows: Iterable[int] = range(len(self)) if host is None else sorted(self.rows_of_host(host))
        found = [r for r in rows if node is None or self.selections[r].node == node]
        own = [r for r in found if self.selections[r].host == node]
        return np.array(own or found, np.intp)

    def encode(self, state: HostState) -> Encoded:
        """Return what the columns hold of a node, for `put`; raise an error if they cannot hold what its host reports.

        The codes are taken then: `put` has to follow.
        """
        return Encoded(self._numbers(state), self._take_codes(state))

    def put(self, state: HostState, encoded: Encoded) -> None:
        """Add or replace a node. All that can be wrong with a state was found when it was encoded."""
        row = self._index.get(state.node_uuid)
        before = None if row is None else self._codes(row)
        if row is None:
            row = self._append(state)
        elif self.selections[row].host != state.host:
            self._unlist_host(row)
            self._rows_of_host.setdefault(state.host, []).append(row)
        self._fill(row, state, encoded)
        if before is not None:
            # After the new codes are taken: what a host keeps is not forgotten, though no other host has it.
            self._release_codes(before)

    def drop(self, node_uuid: str) -> None:
        """Remove a node; an unknown one is ignored."""
        row = self._index.pop(node_uuid, None)
        if row is None:
            return
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

    def add_class(self, name: str) -> None:
        """Add the columns of a resource class."""
        for columns in self._amounts():
            columns[name] = np.zeros(self._size, np.float64)

    def set_max_unit(self, row: int, name: str, max_unit: float) -> None:
        """Set the most of a resource class that one instance may have of a node."""
        self.max_unit[name][row] = max_unit
        self.least_unit[name] = min(max_unit, self.least_unit.get(name, max_unit))

    def set_topology(self, row: int, topology: str, held: str) -> None:
        """Set the NUMA cells and devices of a node, and what is held of them, as they are stored."""
        column = self.columns["topology"]
        before = int(column[row])
        column[row] = self.topologies.take(topology, held)
        self.topologies.release(before)

    def state(self, row: int) -> HostState:
        """Return one host as an object, for filters that get one host at a time."""
        selection, columns = self.selections[row], self.columns
        facts = self.facts.value(columns["facts"][row])
        capacity = {name: int(column[row]) for name, column in self.capacity.items()}
        return HostState(
            host=selection.host,
            node=selection.node,
            node_uuid=selection.node_uuid,
            zone=selection.zone,
            enabled=bool(columns["enabled"][row]),
            forced_down=bool(columns["forced_down"][row]),
            last_seen=float(columns["last_seen"][row]),
            total={name: int(column[row]) for name, column in self.total.items()},
            reserved={name: int(column[row]) for name, column in self.reserved.items()},
            capacity=capacity,
            max_unit={name: int(column[row]) for name, column in self.max_unit.items()},
            allocation_ratio={name: float(column[row]) for name, column in self.ratio.items()},
            used={name: capacity[name] - int(column[row]) for name, column in self.free.items()},
            num_instances=int(columns["num_instances"][row]),
            num_io_ops=int(columns["num_io_ops"][row]),
            failed_builds=int(columns["failed_builds"][row]),
            aggregates=self.aggregates.value(columns["aggregates"][row]),
            host_ip=self.host_ip(row),
            metrics={name: float(column[row]) for name, column in self.metrics.items() if column[row] == column[row]},
            hypervisor_type=facts.hypervisor_type,
            hypervisor_version=facts.hypervisor_version,
            cpu_info=facts.cpu_info,
            supported=facts.supported,
            capabilities=facts.capabilities,
            traits=tuple(sorted(facts.traits)),
            topology=(texts := self.topologies.texts(int(columns["topology"][row])))[0],
            held=texts[1],
        )

    def host_ip(self, row: int) -> str:
        """Return the address of a host, "" if it is unknown."""
        columns = self.columns
        number = int(columns["ip_high"][row]) << 64 | int(columns["ip_low"][row])
        match int(columns["ip_version"][row]):
            case 4:
                return str(ipaddress.IPv4Address(number))
            case 6:
                return str(ipaddress.IPv6Address(number))
            case _:
                return ""

    def _amounts(self) -> tuple[dict[str, Column], ...]:
        """Return all columns that are by resource class."""
        return self.free, self.capacity, self.total, self.reserved, self.max_unit, self.ratio

    def _all_columns(self) -> Iterable[Column]:
        for columns in (self.columns, *self._amounts(), self.metrics):
            yield from columns.values()

    def _append(self, state: HostState) -> int:
        row = len(self.selections)
        if row == self._size:
            self._size *= 2
            for columns in (self.columns, *self._amounts(), self.metrics):
                for name, column in columns.items():
                    larger = np.zeros(self._size, column.dtype)
                    larger[:row] = column
                    columns[name] = larger
        self._index[state.node_uuid] = row
        self._rows_of_host.setdefault(state.host, []).append(row)
        self.selections.append(Selection(host=state.host, node=state.node, node_uuid=state.node_uuid, zone=state.zone))
        return row

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
        return {name: self.columns[name].dtype.type(number) for name, number in numbers.items()}

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
        aggregates = b""
        if state.aggregates:
            aggregates = msgspec.msgpack.encode(state.aggregates, enc_hook=str, order="deterministic")
        topology = self.topologies.take(state.topology, state.held)
        # What follows cannot fail.
        return (
            self.zones.take(state.zone, state.zone),
            self.facts.take(key, facts),
            self.aggregates.take(aggregates, state.aggregates),
            topology,
        )

    def _fill(self, row: int, state: HostState, encoded: Encoded) -> None:
        known = self.selections[row]
        if (known.host, known.node, known.zone) != (state.host, state.node, state.zone):
            self.selections[row] = Selection(
                host=state.host, node=state.node, node_uuid=state.node_uuid, zone=state.zone
            )
        for name, number in encoded.numbers.items():
            self.columns[name][row] = number
        for name, code in zip(_CODES, encoded.codes, strict=True):
            self.columns[name][row] = code
        self._fill_metrics(row, state.metrics)
        for name in state.capacity.keys() - self.free.keys():
            self.add_class(name)
        for name, free in self.free.items():
            capacity = state.capacity.get(name, 0)
            self.total[name][row] = state.total.get(name, 0)
            self.reserved[name][row] = state.reserved.get(name, 0)
            self.capacity[name][row] = capacity
            free[row] = capacity - state.used.get(name, 0)
            self.ratio[name][row] = self.max_unit[name][row] = 0
            if name in state.capacity:
                self.ratio[name][row] = state.allocation_ratio.get(name, 1.0)
                self.set_max_unit(row, name, state.max_unit.get(name, MOST_UNITS))

    def _fill_metrics(self, row: int, metrics: Mapping[str, float]) -> None:
        for name in metrics.keys() - self.metrics.keys():
            self.metrics[name] = np.full(self._size, np.nan)
        for name, column in self.metrics.items():
            column[row] = metrics.get(name, np.nan)

    def _codes(self, row: int) -> tuple[int, int, int, int]:
        zone, facts, of_aggregates, topology = (int(self.columns[name][row]) for name in _CODES)
        return zone, facts, of_aggregates, topology

    def _release_codes(self, codes: tuple[int, int, int, int]) -> None:
        zone, facts, of_aggregates, topology = codes
        self.zones.release(zone)
        self.facts.release(facts)
        self.aggregates.release(of_aggregates)
        self.topologies.release(topology)

    def _unlist_host(self, row: int) -> None:
        host = self.selections[row].host
        siblings = self._rows_of_host[host]
        siblings.remove(row)
        if not siblings:
            del self._rows_of_host[host]


def halves(address: int) -> tuple[int, int]:
    """Return the upper and lower 64 bits of an address as a number."""
    return address >> 64, address & 0xFFFF_FFFF_FFFF_FFFF
