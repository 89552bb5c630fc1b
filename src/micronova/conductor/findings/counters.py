"""Counters that drifted: of claims, of NUMA cells and devices, of server groups, and of quotas.

A periodic job of the conductors and `micronova audit --repair` make the same repairs (`CORRECTIONS`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.finding import Finding, Repair, RepairDependencies, RepairKind, Repairs, offer
from micronova.db import allocation_audit, port_claims, quotas, server_migrations, topologies
from micronova.db import allocations as allocation_rows
from micronova.db import instances as instance_rows
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.db.tables import consumers, instances
from micronova.objects import migration_states
from micronova.objects.topology import TopologyUse

MOST_PARTS: Final = 20
"""NUMA cells and devices that a message names."""


class Orphan(msgspec.Struct, frozen=True):
    """A consumer that is gone and holds resources."""

    consumer: str


class NodeCounter(msgspec.Struct, frozen=True):
    """The counters of a node."""

    node: str


class GroupCounter(msgspec.Struct, frozen=True):
    """The counters of a server group."""

    group: str


class StrayPort(msgspec.Struct, frozen=True):
    """A port that a server does not have, and for which it holds resources."""

    server: str
    port: str


class ProjectUsage(msgspec.Struct, frozen=True):
    """The quota usage of a project, or that of the key pairs of all users: they belong to no project, ""."""

    project: str


def drifted_counters(conn: sa.Connection, busy: set[str]) -> list[Finding]:
    """Return counters of claims and quotas that are wrong, and what is held by nobody."""
    findings = [
        Finding(
            kind="allocation",
            subject=drift.where,
            message=f"{drift.kind} {drift.what}: {drift.recorded} is recorded, {drift.actual} is true.",
            repairs=(_repair_of(drift),),
        )
        for drift in allocation_audit.audit(conn)
        if drift.where not in busy
    ]
    findings += [
        Finding(
            kind="allocation",
            subject=server,
            message=f"The server holds resources for port {port}, which it does not have.",
            repairs=(offer("port", StrayPort(server, port), "Release them."),),
        )
        for server, strays in port_claims.strays(conn)
        if server not in busy
        for port in strays
    ]
    findings += [
        Finding(
            kind="quota",
            subject=usage.project_id or usage.user_id,
            message=f"{usage.resource}: {usage.recorded} are charged, {usage.actual} exist.",
            repairs=(
                offer(
                    "quota",
                    ProjectUsage(usage.project_id),
                    f"Count what project {usage.project_id} has, and record that."
                    if usage.project_id
                    else "Count the key pairs that users have, and record that.",
                ),
            ),
        )
        for usage in quotas.drift(conn)
    ]
    return findings


def _repair_of(drift: allocation_audit.Drift) -> Repair:
    where = drift.where
    if drift.kind == "used":
        return offer("used", NodeCounter(where), f"Add up the allocations of node {where}, and record that.")
    if drift.kind == "group":
        return offer("group", GroupCounter(where), "Count the members of the server group anew.")
    text = f"Release what {where} holds: it is not a server, an open migration or another consumer."
    return offer("orphan", Orphan(where), text)


def wrong_topology(node: topologies.NodeClaims, subject: str) -> Finding:
    """Say that what is recorded as held of a node's NUMA cells and devices is not what its claims add up to."""
    parts = _differing_parts(node.held, node.claimed)
    text = "Add up the claims of NUMA cells and devices, and record that."
    return Finding(
        kind="topology",
        subject=subject,
        message=f"The record of held NUMA cells and devices differs from the claims: {parts}.",
        repairs=(offer("held", NodeCounter(node.node_uuid), text),),
    )


def _differing_parts(held: TopologyUse, claimed: TopologyUse) -> str:
    """Name the first of the cells and devices for which the two uses differ."""
    cells = {id for id in held.cells.keys() | claimed.cells.keys() if held.cells.get(id) != claimed.cells.get(id)}
    devices = set(held.devices) ^ set(claimed.devices)
    for mine, other in ((held.parents, claimed.parents), (held.mdevs, claimed.mdevs)):
        devices |= {id for id in mine.keys() | other.keys() if mine.get(id) != other.get(id)}
    parts = [*(f"NUMA cell {id}" for id in sorted(cells)), *(f"device {id}" for id in sorted(devices))]
    more = f" and {len(parts) - MOST_PARTS} more" if len(parts) > MOST_PARTS else ""
    return f"{', '.join(parts[:MOST_PARTS])}{more}"


async def repair_counters(database: Database, now: int) -> list[str]:
    """Correct counters that drifted; return what was corrected. Servers with open operations are left alone.

    Each counter is corrected in a transaction of its own, which locks what it counts and then counts again: what was
    found without locks may have been a change under way. Nothing that we do makes counters drift. A restored backup or
    a manual change of the database can.
    """
    corrected = []
    for repair in await database.read(_needed_repairs):
        correction = CORRECTIONS[repair.name]
        about = msgspec.convert(repair.about, correction.about)
        corrected += await database.write(correction.transaction, about, now)
    return corrected


def _needed_repairs(conn: sa.Connection) -> list[Repair]:
    """Return the repairs of what has drifted, each once."""
    findings = drifted_counters(conn, operation_rows.busy_server_ids(conn))
    findings += [
        wrong_topology(each, each.node_uuid) for each in topologies.all_claims(conn) if each.held != each.claimed
    ]
    repairs = {(repair.name, *repair.about.values()): repair for finding in findings for repair in finding.repairs}
    order = list(CORRECTIONS)
    return sorted(repairs.values(), key=lambda repair: order.index(repair.name))


def _count_used(conn: sa.Connection, about: NodeCounter, now: int) -> list[str]:
    return _described(allocation_audit.repair_used(conn, about.node, now))


def _count_members(conn: sa.Connection, about: GroupCounter, now: int) -> list[str]:
    return _described(allocation_audit.repair_group(conn, about.group))


def _count_held(conn: sa.Connection, about: NodeCounter, now: int) -> list[str]:
    changed = topologies.repair_held(conn, about.node, now)
    return [f"what is held of the NUMA cells and devices of node {about.node}"] if changed else []


def _release_port(conn: sa.Connection, about: StrayPort, now: int) -> list[str]:
    """Give back what a server holds for a port that it still does not have."""
    row = instance_rows.lock(conn, about.server)
    if row is None or operation_rows.open_of(conn, about.server):
        return []
    own = {vif["port_id"] for vif in row["network_info"]}
    released = port_claims.remove(conn, about.server, [about.port] if about.port not in own else [], now=now)
    return [f"what server {about.server} holds for port {port}, which it does not have" for port in released]


def _count_usage(conn: sa.Connection, about: ProjectUsage, now: int) -> list[str]:
    return [
        f"quota usage of {f'project {about.project}' if about.project else f'user {usage.user_id}'}, "
        f"{usage.resource}: {usage.recorded} → {usage.actual}"
        for usage in quotas.recount(conn, about.project)
    ]


def _described(found: Sequence[allocation_audit.Drift]) -> list[str]:
    return [
        f"allocation {drift.kind} of {drift.where} {drift.what}: {drift.recorded} → {drift.actual}" for drift in found
    ]


def _release_orphan(conn: sa.Connection, about: Orphan, now: int) -> list[str]:
    """Release what a consumer holds that is not an instance, an open migration or a consumer of another service."""
    consumer_uuid = about.consumer
    for table in (instances, consumers):
        if conn.execute(sa.select(table.c.uuid).where(table.c.uuid == consumer_uuid)).first() is not None:
            return []
    migration = server_migrations.get(conn, consumer_uuid)
    if migration is not None and migration["status"] in migration_states.OPEN:
        return []
    held = {
        each.node_uuid: len(each.resources)
        for each in allocation_rows.get_many(conn, [consumer_uuid]).get(consumer_uuid, [])
    }
    for node, _ in topologies.assignments_of(conn, [consumer_uuid]).values():
        held[node] = held.get(node, 0) + 1
    allocation_rows.release(conn, consumer_uuid, now=now)
    return _described(
        [
            allocation_audit.Drift(kind="orphan", where=consumer_uuid, what=node, recorded=parts, actual=0)
            for node, parts in held.items()
        ]
    )


class Correction(NamedTuple):
    """The repair of a kind of counters."""

    about: type[msgspec.Struct]
    transaction: Callable[[sa.Connection, Any, int], list[str]]  # returns what was corrected


CORRECTIONS: Final = {
    "orphan": Correction(Orphan, _release_orphan),
    "used": Correction(NodeCounter, _count_used),
    "group": Correction(GroupCounter, _count_members),
    "port": Correction(StrayPort, _release_port),
    "held": Correction(NodeCounter, _count_held),
    "quota": Correction(ProjectUsage, _count_usage),
}
"""By the name of the repair, in the order in which the job makes them."""


async def _correct(correction: Correction, dependencies: RepairDependencies, about: msgspec.Struct) -> str:
    return "; ".join(await dependencies.database.write(correction.transaction, about, dependencies.now()))


REPAIRS: Repairs = {name: RepairKind(each.about, partial(_correct, each)) for name, each in CORRECTIONS.items()}
