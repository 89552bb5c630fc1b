"""NUMA cells, PCI devices and mediated devices of nodes, and which parts of them instances hold.

A node has one row: what its host reports, and the sum of what instances hold. A claim locks the rows of its nodes,
finds an assignment for each instance by what they say then (`objects/fitting.py`), and records it with the claim. So
no two instances get the same CPU, page or device, however many schedulers race; and a claim fails only if nothing fits.

What a server holds for its ports is recorded with the cells and devices, because both belong to the same claim: amounts
of other providers, which the sum of the node does not count.

Mediated devices are amounts of resource providers below the node. A claim of such amounts locks the row of the node,
too, and looks for providers with room only then: so it finds the last one, and no other claim takes it meanwhile.

ARCHITECTURE.md has the order of locks.
"""

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.listed import one_of
from micronova.db.prepared import Prepared
from micronova.db.tables import node_topologies, topology_claims
from micronova.db.upsert import PerDialect
from micronova.objects.fitting import fit, given_back, taken, total_use
from micronova.objects.mediated_devices import assigned
from micronova.objects.port_resources import ServedPort
from micronova.objects.topology import (
    NOTHING_USED,
    Assignment,
    NodeTopology,
    TopologyRequest,
    TopologyUse,
    decode_use,
    encode,
    usable_topology,
)

log = logging.getLogger(__name__)

_t, _c = node_topologies.c, topology_claims.c


class TopologyClaim(Protocol):
    """The part of a claim that is about topologies."""

    @property
    def consumer_uuid(self) -> str:
        """The consumer of the claim."""

    @property
    def node_uuid(self) -> str:
        """The node that it claims."""

    @property
    def topology(self) -> TopologyRequest | None:
        """The NUMA cells and devices that it asks for; None if the instance may be anywhere on the node."""

    @property
    def resource_request(self) -> object | None:
        """What it asks for of other providers of the node's tree; None if nothing."""


@dataclass(slots=True)
class Plan:
    """What a claim changes: the assignments of its instances, and what the nodes' instances hold then."""

    refused: list[str] = field(default_factory=list)  # nodes that cannot take what was asked for
    assignments: dict[str, tuple[str, Assignment]] = field(default_factory=dict)  # consumer -> node, assignment
    released: list[str] = field(default_factory=list)  # consumers
    held: dict[str, TopologyUse] = field(default_factory=dict)  # node -> what is held
    before: dict[str, TopologyUse] = field(default_factory=dict)  # node -> what was held
    topologies: dict[str, NodeTopology] = field(default_factory=dict)  # node -> what it has

    def add_mdevs(self, consumer: str, node: str, amounts: Mapping[str, Mapping[str, int]]) -> None:
        """Give a consumer the mediated devices that its amounts of each resource provider are."""
        topology = self.topologies.get(node)
        devices = () if topology is None else assigned(node, topology, amounts)
        if topology is not None and devices:
            _, assignment = self.assignments.get(consumer, (node, Assignment()))
            self.assignments[consumer] = node, msgspec.structs.replace(assignment, mdevs=devices)
            self.held[node] = taken(self.held[node], Assignment(mdevs=devices), topology)

    def add_ports(self, consumer: str, node: str, ports: tuple[ServedPort, ...]) -> None:
        """Record which providers serve the ports of a consumer."""
        if ports:
            _, assignment = self.assignments.get(consumer, (node, Assignment()))
            self.assignments[consumer] = node, msgspec.structs.replace(assignment, ports=ports)


EMPTY = encode(NOTHING_USED)


def _upsert(insert: Any) -> sa.Executable:
    statement = insert(node_topologies)
    new = statement.excluded
    kept: sa.Executable = statement.on_conflict_do_update(
        index_elements=[_t.node_uuid],
        set_={"topology": new.topology, "changed_at": new.changed_at},
        where=_t.topology != new.topology,
    )
    return kept


_UPSERT = PerDialect(_upsert)
_LOCK = (
    sa.select(_t.node_uuid, _t.topology, _t.held)
    .where(one_of(_t.node_uuid, "uuids"))
    .order_by(_t.node_uuid)
    .with_for_update()
)
_HELD_BY = Prepared(sa.select(topology_claims).where(one_of(_c.consumer_uuid, "uuids")).order_by(_c.consumer_uuid))
_UPDATE = (
    node_topologies.update()
    .where(_t.node_uuid == bindparam("b_node"))
    .values(held=bindparam("b_held"), changed_at=bindparam("b_now"))
)
_INSERT = topology_claims.insert()
_DELETE = topology_claims.delete().where(one_of(_c.consumer_uuid, "uuids"))
_REWRITE = (
    topology_claims.update()
    .where(_c.consumer_uuid == bindparam("b_consumer"))
    .values(assignment=bindparam("b_assignment"))
)
_CLAIMS_ON = sa.select(topology_claims).where(one_of(_c.node_uuid, "uuids"))
_RECORDED_OF = sa.select(_t.node_uuid, _t.topology, _t.held).where(one_of(_t.node_uuid, "uuids"))
PART = 500
"""Nodes that are read at once."""


_NODES = sa.union(sa.select(_t.node_uuid).where(_t.held != EMPTY), sa.select(_c.node_uuid)).order_by("node_uuid")
_RENAME = topology_claims.update().where(_c.consumer_uuid == bindparam("b_old")).values(
    consumer_uuid=bindparam("b_new")
)  # fmt: skip


def report(conn: sa.Connection, topologies: Mapping[str, NodeTopology], now: int) -> None:
    """Record what nodes have; rows that say the same already are left alone."""
    rows = [
        {"node_uuid": node, "topology": encode(topology), "held": EMPTY, "changed_at": now}
        for node, topology in sorted(topologies.items())
    ]
    if rows:
        conn.execute(_UPSERT.on(conn), rows)


def with_ratios(topology: NodeTopology, ratios: Mapping[str, float]) -> NodeTopology:
    """Return what a node has with the allocation ratios of its inventories, by resource class.

    The Placement API takes ratios of 0 and less, by which nothing is left; that of a topology is larger.
    """
    fields = {"VCPU": "cpu_allocation_ratio", "MEMORY_MB": "ram_allocation_ratio"}
    changed = {fields[name]: max(ratio, sys.float_info.min) for name, ratio in ratios.items() if name in fields}
    return msgspec.structs.replace(topology, **changed)


def follow_ratios(conn: sa.Connection, uuid: str, ratios: Mapping[str, float], now: int) -> None:
    """Give a compute node the ratios of inventories that are about to be written; other providers have no topology."""
    if ratios.keys().isdisjoint(("VCPU", "MEMORY_MB")):
        return
    for row in conn.execute(_LOCK, {"uuids": [uuid]}):
        report(conn, {uuid: with_ratios(usable_topology(row.topology), ratios)}, now)


def plan(conn: sa.Connection, wanted: Sequence[TopologyClaim], leaving: Collection[str]) -> Plan:
    """Lock the nodes and find an assignment for each consumer.

    `leaving` are consumers whose assignments are free for that. Nothing is written: `record` does that.
    """
    found = Plan()
    before = assignments_of(conn, leaving) if leaving else {}
    asking = [each for each in wanted if each.topology is not None]
    nodes = {node for node, _ in before.values()} | {each.node_uuid for each in asking}
    nodes |= {each.node_uuid for each in wanted if each.resource_request is not None}
    if not nodes:
        return found
    topologies = found.topologies
    for row in conn.execute(_LOCK, {"uuids": sorted(nodes)}):
        topologies[row.node_uuid], found.before[row.node_uuid] = usable_topology(row.topology), decode_use(row.held)
    found.held = dict(found.before)
    for consumer, (node, assignment) in before.items():
        found.released.append(consumer)
        if node in topologies:
            held, found.held[node] = found.held[node], given_back(found.held[node], assignment, topologies[node])
            if taken(found.held[node], assignment, topologies[node]) != held:
                log.warning("node %s holds less than %s gives back; the audit corrects what it holds", node, consumer)
    for each in asking:
        node = each.node_uuid
        assert each.topology is not None
        fitted = fit(topologies[node], found.held[node], each.topology) if node in topologies else None
        if fitted is None:
            found.refused.append(node)
            continue
        found.assignments[each.consumer_uuid] = node, fitted
        found.held[node] = taken(found.held[node], fitted, topologies[node])
    return found


def record(conn: sa.Connection, planned: Plan, now: int) -> None:
    """Write what was planned in the same transaction."""
    if planned.released:
        conn.execute(_DELETE, {"uuids": planned.released})
    changed = {node: held for node, held in sorted(planned.held.items()) if held != planned.before[node]}
    if changed:
        rows = [{"b_node": node, "b_held": encode(held), "b_now": now} for node, held in changed.items()]
        conn.execute(_UPDATE, rows)
    if planned.assignments:
        conn.execute(
            _INSERT,
            [
                {"consumer_uuid": consumer, "node_uuid": node, "assignment": encode(assignment)}
                for consumer, (node, assignment) in planned.assignments.items()
            ],
        )


def release(conn: sa.Connection, consumer_uuid: str, now: int) -> None:
    """Give back all that a consumer holds; holding nothing is not an error."""
    record(conn, plan(conn, (), [consumer_uuid]), now)


def rename(conn: sa.Connection, old: str, new: str) -> None:
    """Let another consumer hold what a consumer holds."""
    conn.execute(_RENAME, {"b_old": old, "b_new": new})


def lock_assignment(conn: sa.Connection, consumer: str, node: str) -> Assignment:
    """Lock a node, and return what a consumer holds of it; nothing if it holds nothing."""
    conn.execute(_LOCK, {"uuids": [node]}).all()
    return assignments_of(conn, [consumer]).get(consumer, (node, Assignment()))[1]


def replace_assignment(conn: sa.Connection, consumer: str, node: str, assignment: Assignment) -> None:
    """Write what a consumer holds of a node that is locked; cells and devices are as before."""
    conn.execute(_DELETE, {"uuids": [consumer]})
    if assignment != Assignment():
        row = {"consumer_uuid": consumer, "node_uuid": node, "assignment": encode(assignment)}
        conn.execute(_INSERT, [row])


def rewrite(conn: sa.Connection, consumer: str, assignment: Assignment) -> None:
    """Write which providers serve the ports of a consumer, whose server is locked; cells and devices are as before."""
    conn.execute(_REWRITE, {"b_consumer": consumer, "b_assignment": encode(assignment)})


def assignments_of(conn: sa.Connection, consumers: Collection[str]) -> dict[str, tuple[str, Assignment]]:
    """Return what consumers hold, by consumer: the node, and the parts of it."""
    rows = _HELD_BY.records(conn, {"uuids": sorted(consumers)})
    return {row.consumer_uuid: (row.node_uuid, msgspec.json.decode(row.assignment, type=Assignment)) for row in rows}


@dataclass(frozen=True, slots=True)
class NodeClaims:
    """A node with what is recorded of it."""

    node_uuid: str
    topology: NodeTopology
    held: TopologyUse  # by its row
    claimed: TopologyUse  # by the claims of instances
    consumers: tuple[str, ...]


def repair_held(conn: sa.Connection, node_uuid: str, now: int) -> bool:
    """Set what is held of a node to what its claims add up to; return whether that was wrong."""
    row = conn.execute(_LOCK, {"uuids": [node_uuid]}).first()
    if row is None:
        return False
    rows = conn.execute(sa.select(topology_claims).where(_c.node_uuid == node_uuid))
    claims = {each.consumer_uuid: msgspec.json.decode(each.assignment, type=Assignment) for each in rows}
    held = encode(total_use(usable_topology(row.topology), claims))
    if held == row.held:
        return False
    conn.execute(_UPDATE, {"b_node": node_uuid, "b_held": held, "b_now": now})
    return True


def all_claims(conn: sa.Connection) -> Iterator[NodeClaims]:
    """Yield the nodes of which instances hold parts, or should hold parts, in the order of their uuids.

    They are read in parts: between two of them a conductor does other work.
    """
    nodes = conn.execute(_NODES).scalars().all()
    for first in range(0, len(nodes), PART):
        part = nodes[first : first + PART]
        claims: dict[str, dict[str, Assignment]] = {node: {} for node in part}
        for row in conn.execute(_CLAIMS_ON, {"uuids": part}):
            assignment = msgspec.json.decode(row.assignment, type=Assignment)
            claims[row.node_uuid][row.consumer_uuid] = assignment
        recorded = {row.node_uuid: row for row in conn.execute(_RECORDED_OF, {"uuids": part})}
        for node in part:
            known, of_node = recorded.get(node), claims[node]
            topology = NodeTopology() if known is None else usable_topology(known.topology)
            held = NOTHING_USED if known is None else decode_use(known.held)
            yield NodeClaims(node, topology, held, total_use(topology, of_node), tuple(sorted(of_node)))
