"""All hosts as a table that changes update, so that nothing is read or rebuilt for a request.

The feed brings changes from the database. A decision counts the instances that it places, before their claims are in
the database, and can undo that.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Set

import numpy as np

from micronova.objects.bounded_search import StepMeter
from micronova.objects.fitting import fit, taken
from micronova.objects.scheduling import HostState, NodeAmount, ServiceState
from micronova.objects.topology import TopologyRequest, encode
from micronova.scheduler.host_columns import HostColumns, Rows
from micronova.scheduler.host_view import HostView

log = logging.getLogger(__name__)


class HostTable(HostColumns):
    """The hosts that the scheduler knows."""

    def __init__(self, monotonic: Callable[[], float] | None = None) -> None:
        """Measure by `monotonic`, if given, how long it takes to compare requests with topologies of hosts."""
        super().__init__(monotonic)
        self._left_out: set[str] = set()
        self._taken: list[tuple[int, str, str]] = []  # rows whose topology was consumed, with what it was before

    @property
    def left_out(self) -> Set[str]:
        """The uuids of nodes that have no row, because what was read of them cannot be taken into the table."""
        return self._left_out

    def view(self, rows: Rows | None = None) -> HostView:
        """Return a view of all rows or of some, for filters and weighers."""
        return HostView(self, slice(0, len(self)) if rows is None else rows)

    # --- changes from the database ---

    def update(self, states: Iterable[HostState]) -> None:
        """Add or replace nodes."""
        for state in states:
            try:
                encoded = self.encode(state)
            except Exception as error:  # a host reports what the columns cannot hold: it alone gets no servers
                self._leave_out(state.node_uuid, error)
                continue
            self._left_out.discard(state.node_uuid)
            self.put(state, encoded)

    def remove(self, node_uuids: Iterable[str]) -> None:
        """Remove nodes; unknown ones are ignored."""
        for uuid in node_uuids:
            self._left_out.discard(uuid)
            self.drop(uuid)

    def set_amounts(self, amounts: Iterable[NodeAmount]) -> set[str]:
        """Set amounts of resources; return the nodes that are not in the table."""
        unknown: set[str] = set()
        for uuid, name, total, reserved, capacity, used, max_unit, ratio in amounts:
            row = self._index.get(uuid)
            if row is None:
                unknown.add(uuid)
                continue
            if name not in self.free:
                self.add_class(name)
            self.total[name][row] = total
            self.reserved[name][row] = reserved
            self.capacity[name][row] = capacity
            self.free[name][row] = capacity - used
            self.ratio[name][row] = ratio
            self.set_max_unit(row, name, max_unit)
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
                self.set_topology(row, topology, held)
            except Exception as error:
                self._leave_out(uuid, error)
        return unknown

    def set_services(self, services: Iterable[ServiceState]) -> None:
        """Set which hosts are enabled, and when they sent their last heartbeat."""
        columns = self.columns
        for host, enabled, forced_down, last_seen in services:
            for row in self._rows_of_host.get(host, ()):
                columns["enabled"][row] = enabled
                columns["forced_down"][row] = forced_down
                columns["last_seen"][row] = last_seen

    def set_heard_since(self, moment: float, *, but: Iterable[str] = ()) -> None:
        """Record that all hosts but these have sent a heartbeat since a time."""
        last_seen = self.columns["last_seen"]
        rows = [row for host in but for row in self._rows_of_host.get(host, ())]
        silent = last_seen[rows]
        np.maximum(last_seen, moment, out=last_seen)
        last_seen[rows] = silent

    # --- for decisions ---

    def fits(self, row: int, resources: Mapping[str, int]) -> bool:
        """Return whether a host has these amounts free."""
        return all(n <= 0 or (name in self.free and self.free[name][row] >= n) for name, n in resources.items())

    def consume(self, row: int, resources: Mapping[str, int], request: TopologyRequest | None = None) -> None:
        """Count an instance on a host before its claim is in the database."""
        if request is not None:
            self._consume_topology(row, request)
        for name, amount in resources.items():
            if name not in self.free:
                self.add_class(name)
            self.free[name][row] -= amount
        self.columns["num_instances"][row] += 1
        self.columns["num_io_ops"][row] += 1

    def release(self, row: int, resources: Mapping[str, int]) -> None:
        """Undo `consume`."""
        for name, amount in resources.items():
            self.free[name][row] += amount
        self.columns["num_instances"][row] -= 1
        self.columns["num_io_ops"][row] -= 1

    def begin_consuming(self) -> None:
        """Begin a decision: what is consumed from now on can be undone, and steps are counted anew."""
        self._taken.clear()
        self.topologies.begin_decision()

    def undo_topologies(self) -> None:
        """Undo what `consume` has done to topologies since the decision began."""
        while self._taken:
            self.set_topology(*self._taken.pop())

    def _consume_topology(self, row: int, request: TopologyRequest) -> None:
        code = int(self.columns["topology"][row])
        topology, use = self.topologies.value(code)
        meter = StepMeter()
        assignment = fit(topology, use, request, meter)
        self.topologies.count_steps(meter)
        if assignment is not None:
            before = self.topologies.texts(code)
            self._taken.append((row, *before))
            self.set_topology(row, before[0], encode(taken(use, assignment, topology)))

    def _leave_out(self, uuid: str, error: Exception) -> None:
        """Remove a node of which something was read that the table cannot hold; log it the first time."""
        if uuid not in self._left_out:
            log.error(
                "node %s gets no servers: what it has reported cannot be used (%s: %s)",
                uuid,
                type(error).__name__,
                error,
            )
        self.remove([uuid])
        self._left_out.add(uuid)
