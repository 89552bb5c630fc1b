"""The hosts that filters and weighers are asked about: some rows of the table, column by column.

A question about facts, aggregates or topologies is answered once per kind of host, not once per host.
"""

import ipaddress
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from micronova.objects.scheduling import HostState, Selection
from micronova.objects.topology import DeviceRequest, TopologyRequest
from micronova.scheduler.host_columns import (
    Aggregates,
    Bools,
    Column,
    Facts,
    Floats,
    HostColumns,
    Ints,
    Rows,
    halves,
)
from micronova.scheduler.topologies import Passes

_FEW = 8  # up to this many rows a Python loop is faster than a vector over the whole table


def spread_over(mask: Bools, among: Bools) -> Bools:
    """Return a mask over hosts from one over those of them that are among these; the others fail."""
    spread = among.copy()
    spread[among] = mask
    return spread


class HostView:
    """Some rows of the table, column by column. The vectors that methods return are as long as the view."""

    __slots__ = ("_rows", "_table")

    def __init__(self, table: HostColumns, rows: Rows) -> None:
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
        return self._amounts(self._table.free, resource_class)

    def capacity(self, resource_class: str) -> Floats:
        """Return the capacity: total without reserved, times the allocation ratio."""
        return self._amounts(self._table.capacity, resource_class)

    def total(self, resource_class: str) -> Floats:
        """Return what the hosts physically have."""
        return self._amounts(self._table.total, resource_class)

    def reserved(self, resource_class: str) -> Floats:
        """Return what the hosts keep for themselves."""
        return self._amounts(self._table.reserved, resource_class)

    def allocation_ratio(self, resource_class: str) -> Floats:
        """Return how often the hosts give out what they have, 0 for hosts without the class."""
        return self._amounts(self._table.ratio, resource_class)

    def may_give(self, resource_class: str, amount: int) -> Bools | None:
        """Return which hosts may give one instance this amount, however much is free; None if all may."""
        if amount <= self._table.least_unit.get(resource_class, amount):
            return None
        mask: Bools = self._amounts(self._table.max_unit, resource_class) >= amount
        return mask

    def used(self, resource_class: str) -> Floats:
        """Return what is used."""
        return self.capacity(resource_class) - self.free(resource_class)

    def column(self, name: str) -> Column:
        """Return a column of `HostColumns.columns`, such as last_seen, num_instances or failed_builds."""
        return self._values(self._table.columns[name])

    def up_since(self, moment: float) -> Bools:
        """Return which hosts have sent a heartbeat since a time and are not forced down: `db.services.is_up`."""
        up: Bools = self.column("last_seen") >= moment
        return np.greater(up, self.column("forced_down"), out=up)  # a and not b, in one operation

    def uniform(self, name: str) -> bool:
        """Return whether all hosts of the table have the same number in a column; faster than to take it."""
        column = self._table.columns[name][: len(self._table)]
        return not len(column) or bool(column.min() == column.max())

    def in_zone(self, zone: str) -> Bools:
        """Return which hosts are in this availability zone."""
        mask: Bools = self._values(self._table.columns["zone"]) == self._table.zones.find(zone)
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
        return self._table.facts.passing(key, passes).take(self._values(self._table.columns["facts"]))

    def objects_by_facts(self, key: Hashable, find: Callable[[Facts], object]) -> Column:
        """Return an object per host from its facts."""
        found = self._table.facts.objects(key, find)
        return found.take(self._values(self._table.columns["facts"]))

    def by_aggregates(self, key: Hashable, passes: Callable[[Aggregates], bool]) -> Bools:
        """Return which hosts' aggregates pass; `passes` is called once per combination of aggregates, as `by_facts`."""
        return self._table.aggregates.passing(key, passes).take(self._values(self._table.columns["aggregates"]))

    def numbers_by_aggregates(self, key: Hashable, number: Callable[[Aggregates], float]) -> Floats | float:
        """Return a number per host from its aggregates, or one number if it is the same for all hosts."""
        by_code = self._table.aggregates.numbers(key, number)
        return by_code if isinstance(by_code, float) else by_code.take(self._values(self._table.columns["aggregates"]))

    def metric(self, name: str) -> Floats:
        """Return what the monitors of the hosts measured, NaN for hosts without this metric."""
        column = self._table.metrics.get(name)
        return np.full(len(self), np.nan) if column is None else self._values(column)

    def in_network(self, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> Bools:
        """Return which hosts have their address in a network; hosts with an unknown address are in none."""
        table = self._table.columns
        mask: Bools = self._values(table["ip_version"]) == network.version
        first, bits = halves(int(network.network_address)), halves(int(network.netmask))
        for name, wanted, relevant in zip(("ip_high", "ip_low"), first, bits, strict=True):
            mask &= (self._values(table[name]) & np.uint64(relevant)) == np.uint64(wanted)
        return mask

    def with_cells(self, request: TopologyRequest) -> Bools:
        """Return which hosts have NUMA cells that suit a request; `cell_columns.decides` says whether this decides."""
        return self._table.topologies.suit(request, self._values(self._table.columns["topology"]))

    def by_topology(
        self, key: bytes, passes: Passes, among: Bools | None, devices: Sequence[DeviceRequest] = ()
    ) -> tuple[Bools, Bools | None]:
        """Return which hosts' NUMA cells and devices pass, with what is held of them; results are kept by key.

        The second are the hosts that were left out, because it would take long to compare them; None if there are none.
        `passes` is called once per kind of host. Hosts that are not `among` these fail without being asked, and so do
        those with too few of these devices.
        """
        codes = self._values(self._table.columns["topology"])
        if among is None:
            return self._table.topologies.passing(key, passes, codes, devices)
        passing, unasked = self._table.topologies.passing(key, passes, codes[among], devices)
        return spread_over(passing, among), None if unasked is None else spread_over(unasked, among)

    async def ask_topologies(
        self, key: bytes, passes: Passes, among: Bools | None, devices: Sequence[DeviceRequest] = ()
    ) -> None:
        """Find the results of `by_topology` beforehand, with pauses in which other tasks may change the table."""
        codes = self._values(self._table.columns["topology"])
        await self._table.topologies.ask(key, passes, codes.copy() if among is None else codes[among], devices)

    def has_devices(self) -> bool:
        """Return False if no host of the table has a free PCI device; faster than to count them."""
        return self._table.topologies.has_devices()

    def free_devices(self) -> Ints:
        """Return how many PCI devices the hosts have free."""
        return self._table.topologies.devices(self._values(self._table.columns["topology"]))

    def state(self, position: int) -> HostState:
        """Return one host as an object."""
        return self._table.state(self.row(position))

    def selections(self) -> Iterable[Selection]:
        """Return the names of the hosts and nodes."""
        rows, all_of_them = self._rows, self._table.selections
        return all_of_them[rows] if isinstance(rows, slice) else (all_of_them[row] for row in rows)

    def addresses(self) -> Iterable[str]:
        """Return the IP addresses of the hosts, "" if one is unknown."""
        return (self._table.host_ip(self.row(position)) for position in range(len(self)))

    def _amounts(self, columns: dict[str, Column], resource_class: str) -> Floats:
        column = columns.get(resource_class)
        if column is None:
            return np.zeros(len(self))
        return self._values(column)

    def _values(self, column: Column) -> Column:
        rows = self._rows
        # Rows are never out of range; the check for it would take a third of the time.
        return column[rows] if isinstance(rows, slice) else column.take(rows, mode="clip")
