"""Counters that drifted: of claims, of NUMA cells and devices, of server groups, and of quotas."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from micronova.conductor.findings.finding import Finding, Means, Repair, Repairer
from micronova.db import allocation_audit, port_claims, quotas, server_migrations, topologies
from micronova.db import allocations as allocation_rows
from micronova.db import instances as instance_rows
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.db.tables import consumers, instances, operations
from micronova.objects import migration_states


def drifted_counters(conn: sa.Connection, busy: set[str]) -> list[Finding]:
    """Return counters of claims and quotas that are wrong, and what is held by nobody."""
    findings = [
        Finding(
            kind="allocation",
            subject=drift.where,
            message=f"{drift.kind} {drift.what}: {drift.recorded} is recorded, {drift.actual} is true.",
            repairs=(_REPAIR_OF[drift.kind](drift.where),),
        )
        for drift in allocation_audit.audit(conn)
        if drift.where not in busy
    ]
    findings += [
        Finding(
            kind="allocation",
            subject=server,
            message=f"The server holds resources for port {port}, which it does not have.",
            repairs=(Repair(name="port", text="Release them.", about={"server": server, "port": port}),),
        )
        for server, strays in port_claims.strays(conn).items()
        if server not in busy
        for port in strays
    ]
    findings += [
        Finding(
            kind="quota",
            subject=usage.project_id or usage.user_id,
            message=f"{usage.resource}: {usage.recorded} are charged, {usage.actual} exist.",
            repairs=(
                Repair(
                    name="quota",
                    text=f"Count what project {usage.project_id} has, and record that.",
                    about={"project": usage.project_id},
                ),
            ),
        )
        for usage in quotas.drift(conn)
    ]
    return findings


def held_repair(node: str) -> Repair:
    """Return the repair of what is held of the NUMA cells and devices of a node."""
    return Repair(
        name="held", text="Add up the claims of NUMA cells and devices, and record that.", about={"node": node}
    )


def _used(node: str) -> Repair:
    return Repair(name="used", text=f"Add up the allocations of node {node}, and record that.", about={"node": node})


def _group(group: str) -> Repair:
    return Repair(name="group", text="Count the members of the server group anew.", about={"group": group})


def _orphan(consumer: str) -> Repair:
    text = f"Release what {consumer} holds: it is no server, no open migration and no other consumer."
    return Repair(name="orphan", text=text, about={"consumer": consumer})


_REPAIR_OF = {"used": _used, "group": _group, "orphan": _orphan}


async def mend(database: Database, now: int) -> list[str]:
    """Correct counters that drifted; return what was corrected. Servers with open operations are left alone.

    Each counter is corrected in a transaction of its own, which locks what it counts and then counts again: what was
    found without locks may have been a change under way. Nothing that we do makes counters drift; a restored backup or
    a hand in the database can.
    """
    consumers, nodes, groups, projects = await database.read(_drifted)
    mended = [each for uuid in consumers for each in await _mend_orphan(database, uuid, now)]
    mended += [each for uuid in nodes for each in await _mend_used(database, uuid, now)]
    mended += [each for uuid in groups for each in await _mend_group(database, uuid)]
    mended += [
        each
        for server, ports in (await database.read(_stray_ports)).items()
        for each in await _mend_ports(database, server, ports, now)
    ]
    mended += [
        each for node in await database.read(_wrong_topologies) for each in await _mend_held(database, node, now)
    ]
    return mended + [each for project in projects for each in await _recount(database, project)]


async def _mend_orphan(database: Database, consumer: str, now: int) -> list[str]:
    return _described(await database.write(_release_orphan, consumer, now))


async def _mend_used(database: Database, node: str, now: int) -> list[str]:
    return _described(await database.write(allocation_audit.mend, node, now))


async def _mend_group(database: Database, group: str) -> list[str]:
    return _described(await database.write(allocation_audit.mend_group, group))


async def _mend_ports(database: Database, server: str, ports: Sequence[str], now: int) -> list[str]:
    released = await database.write(_release_strays, server, ports, now)
    return [f"what server {server} holds for port {port}, which it does not have" for port in released]


async def _mend_held(database: Database, node: str, now: int) -> list[str]:
    changed = await database.write(topologies.mend, node, now)
    return [f"what is held of the NUMA cells and devices of node {node}"] if changed else []


async def _recount(database: Database, project: str) -> list[str]:
    return [
        f"quota usage of project {project}, {usage.resource}: {usage.recorded} → {usage.actual}"
        for usage in await database.write(quotas.recount, project)
    ]


def _described(found: list[allocation_audit.Drift]) -> list[str]:
    return [
        f"allocation {drift.kind} of {drift.where} {drift.what}: {drift.recorded} → {drift.actual}" for drift in found
    ]


async def _repair_orphan(means: Means, about: dict[str, Any]) -> str:
    return "; ".join(await _mend_orphan(means.database, about["consumer"], means.now()))


async def _repair_used(means: Means, about: dict[str, Any]) -> str:
    return "; ".join(await _mend_used(means.database, about["node"], means.now()))


async def _repair_group(means: Means, about: dict[str, Any]) -> str:
    return "; ".join(await _mend_group(means.database, about["group"]))


async def _repair_port(means: Means, about: dict[str, Any]) -> str:
    return "; ".join(await _mend_ports(means.database, about["server"], [about["port"]], means.now()))


async def _repair_held(means: Means, about: dict[str, Any]) -> str:
    return "; ".join(await _mend_held(means.database, about["node"], means.now()))


async def _repair_quota(means: Means, about: dict[str, Any]) -> str:
    return "; ".join(await _recount(means.database, about["project"]))


REPAIRS: dict[str, Repairer] = {
    "orphan": _repair_orphan,
    "used": _repair_used,
    "group": _repair_group,
    "port": _repair_port,
    "held": _repair_held,
    "quota": _repair_quota,
}


def _drifted(conn: sa.Connection) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return consumers that are gone and hold resources; nodes, server groups and projects with wrong counters."""
    busy = set(conn.execute(sa.select(operations.c.instance_uuid).where(operations.c.finished_at.is_(None))).scalars())
    drifts = [drift for drift in allocation_audit.audit(conn) if drift.where not in busy]
    return (
        sorted({drift.where for drift in drifts if drift.kind == "orphan"}),
        sorted({drift.where for drift in drifts if drift.kind == "used"}),
        sorted({drift.where for drift in drifts if drift.kind == "group"}),
        sorted({usage.project_id for usage in quotas.drift(conn) if usage.project_id}),
    )


def _stray_ports(conn: sa.Connection) -> dict[str, list[str]]:
    """Return servers, with no open operation, that hold something for ports that they do not have."""
    busy = set(conn.execute(sa.select(operations.c.instance_uuid).where(operations.c.finished_at.is_(None))).scalars())
    return {server: ports for server, ports in port_claims.strays(conn).items() if server not in busy}


def _release_strays(conn: sa.Connection, server: str, ports: Sequence[str], now: int) -> list[str]:
    """Give back what a server holds for ports that it still does not have; return these ports."""
    row = instance_rows.lock(conn, server)
    if row is None or operation_rows.open_of(conn, server):
        return []
    own = {vif["port_id"] for vif in row["network_info"]}
    return port_claims.remove(conn, server, [each for each in ports if each not in own], now=now)


def _wrong_topologies(conn: sa.Connection) -> list[str]:
    return [each.node_uuid for each in topologies.all_claims(conn) if each.held != each.claimed]


def _release_orphan(conn: sa.Connection, consumer_uuid: str, now: int) -> list[allocation_audit.Drift]:
    """Release what a consumer holds that is no instance, no open migration and no consumer of another service."""
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
    return [
        allocation_audit.Drift(kind="orphan", where=consumer_uuid, what=node, recorded=parts, actual=0)
        for node, parts in held.items()
    ]
