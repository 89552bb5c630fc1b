"""Who holds what in a simulated fleet, by the rules of `db/allocations.py` and `db/topologies.py`, without a database.

A claim takes all or nothing and never passes a capacity. What changes without a decision (a build ends, a server is
deleted) reaches the scheduler's table as the feed brings it: before the next decision.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from micronova.objects.fitting import fit, given_back, taken
from micronova.objects.scheduling import HostState
from micronova.objects.topology import Assignment, TopologyRequest, decode_topology, decode_use, encode
from micronova.scheduler.host_table import HostTable


class Oversold(Exception):
    """The scheduler chose a host that has no room: an error of the scheduler, never of a trace."""


@dataclass(slots=True)
class _Node:
    state: HostState
    used: dict[str, int]
    servers: int = 0
    building: int = 0
    held: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """What the servers of a request hold."""

    resources: dict[str, int]  # of each server
    nodes: tuple[str, ...]
    assignments: tuple[Assignment, ...] = ()  # NUMA cells and devices, in the order of the nodes; empty: none
    group: str | None = None


class Claims:
    """The claims of all servers."""

    def __init__(self, states: Iterable[HostState], table: HostTable) -> None:
        self._nodes = {each.node_uuid: _Node(each, dict.fromkeys(each.capacity, 0)) for each in states}
        self._table = table
        self._changed: set[str] = set()
        self._members: dict[str, Counter[str]] = {}
        self.used: Counter[str] = Counter()
        self.servers = 0
        self.occupied = 0  # hosts that have servers
        self.capacity: Counter[str] = Counter()
        for each in self._nodes.values():
            self.capacity.update(each.state.capacity)
        table.update(each.state for each in self._nodes.values())

    def hosts_of_group(self, group: str) -> dict[str, int]:
        """Return how many members of a server group each host has."""
        return dict(self._members.get(group, ()))

    def hosts_of(self, held: Held) -> set[str]:
        """Return the hosts of the servers of a request."""
        return {self._nodes[node].state.host for node in held.nodes}

    def claim(
        self, nodes: tuple[str, ...], resources: dict[str, int], topology: TopologyRequest | None, group: str | None
    ) -> Held:
        """Count the servers of a request, which the table counts already; raise Oversold if one does not fit."""
        assignments = []
        for uuid in nodes:
            node = self._nodes[uuid]
            self._take(node, resources)
            if topology is not None:
                assignments.append(self._assign(node, topology))
            node.servers += 1
            node.building += 1
            self.occupied += node.servers == 1
            if group is not None:
                self._members.setdefault(group, Counter())[node.state.host] += 1
        self.servers += len(nodes)
        return Held(resources, nodes, tuple(assignments), group)

    def built(self, held: Held) -> None:
        """Count that the hosts have built these servers."""
        for uuid in held.nodes:
            self._nodes[uuid].building -= 1
        self._changed.update(held.nodes)

    def release(self, held: Held, *, building: bool) -> None:
        """Give back what servers hold; `building` says whether their hosts still work on them."""
        for position, uuid in enumerate(held.nodes):
            node = self._nodes[uuid]
            for name, amount in held.resources.items():
                node.used[name] -= amount
                self.used[name] -= amount
            if held.assignments:
                topology = decode_topology(node.state.topology)
                node.held = encode(given_back(decode_use(node.held), held.assignments[position], topology))
            node.servers -= 1
            node.building -= building
            self.occupied -= node.servers == 0
            if held.group is not None:
                members = self._members[held.group]
                members[node.state.host] -= 1
                if not members[node.state.host]:
                    del members[node.state.host]
        if held.group is not None and not self._members[held.group]:
            del self._members[held.group]
        self.servers -= len(held.nodes)
        self._changed.update(held.nodes)

    def feed(self) -> None:
        """Bring the table up to date with what has changed since the last decision."""
        if self._changed:
            self._table.update(self._state(self._nodes[uuid]) for uuid in sorted(self._changed))
            self._changed.clear()

    def _take(self, node: _Node, resources: Mapping[str, int]) -> None:
        for name, amount in resources.items():
            used = node.used.get(name, 0) + amount
            if used > node.state.capacity.get(name, 0):
                raise Oversold(f"{node.state.host} has {node.state.capacity.get(name, 0)} of {name}, not {used}.")
            most = node.state.max_unit.get(name, amount)
            if amount > most:
                raise Oversold(f"{node.state.host} gives one server {most} of {name}, not {amount}.")
            node.used[name] = used
            self.used[name] += amount

    def _assign(self, node: _Node, request: TopologyRequest) -> Assignment:
        topology, use = decode_topology(node.state.topology), decode_use(node.held)
        place = fit(topology, use, request)
        if place is None:
            raise Oversold(f"{node.state.host} has no place for the NUMA nodes and devices of a server.")
        node.held = encode(taken(use, place, topology))
        return place

    def _state(self, node: _Node) -> HostState:
        return msgspec.structs.replace(
            node.state, used=node.used, num_instances=node.servers, num_io_ops=node.building, held=node.held
        )
