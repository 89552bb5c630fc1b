"""The audit: compares what should be with what is, and lists every leak and contradiction.

It reads the database (operations, instances, allocations, quota usage), asks every living host what its hypervisor
really holds, and asks the network service for the ports of servers. Whatever has a running operation is left alone:
there the two sides may differ for a moment.
"""

import asyncio
import logging
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.db import allocation_audit, quotas, services
from micronova.db import allocations as allocation_rows
from micronova.db.engine import Database
from micronova.db.tables import allocations, departures, instances, operations
from micronova.objects.clock import Clock
from micronova.objects.orders import Guest
from micronova.rpc.contract import Context

log = logging.getLogger(__name__)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be."""

    kind: str
    subject: str  # what it is about: a server, a host, a project…
    message: str


class Ports(Protocol):
    """What the audit needs of the network service."""

    async def list_server_ports(self) -> list[dict[str, Any]]:
        """Return every port that belongs to a server: id and device_id."""


async def audit(
    database: Database, compute: ComputeAPI, clock: Clock, *, service_down_time: float, ports: Ports | None = None
) -> list[Finding]:
    """Return everything that is wrong; an empty list is what one hopes for."""
    begun = clock.now()
    alive = await _living_hosts(database, clock, service_down_time)
    answers = await asyncio.gather(*(_guests_of(compute, host) for host in alive))
    listed = await ports.list_server_ports() if ports is not None else []
    # The database is read after the outside: what was built meanwhile is known to it.
    # As a write, although it writes nothing: all of it sees one snapshot.
    findings, busy, known = await database.write(_inside, begun)
    for host, guests in zip(alive, answers, strict=True):
        if isinstance(guests, str):
            findings.append(Finding(kind="host", subject=host, message=f"The host does not answer: {guests}"))
            continue
        findings += await database.read(_compare_guests, host, guests, busy)
    for port in listed:
        device = port["device_id"]
        if device not in known and device not in busy:
            findings.append(
                Finding(kind="port", subject=port["id"], message=f"The port belongs to server {device}, which is gone.")
            )
    return findings


async def _living_hosts(database: Database, clock: Clock, down_time: float) -> list[str]:
    found = await database.read(services.list_, binary="nova-compute")
    now = clock.now()
    return [row.host for row in found if not row.forced_down and now - row.last_seen_at / 1e6 < down_time]


async def _guests_of(compute: ComputeAPI, host: str) -> tuple[Guest, ...] | str:
    try:
        return await compute.list_guests(Context(request_id="req-audit"), host)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return str(error)


def _inside(conn: sa.Connection, begun: float) -> tuple[list[Finding], set[str], set[str]]:
    """Look for contradictions within the database; also return the busy servers and all of them."""
    findings: list[Finding] = []
    if conn.dialect.name == "postgresql":  # one snapshot for all that follows; SQLite's readers always have one
        conn.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    busy = set(conn.execute(sa.select(operations.c.instance_uuid).where(operations.c.finished_at.is_(None))).scalars())
    known = set()
    columns = (
        instances.c.uuid,
        instances.c.vm_state,
        instances.c.task_state,
        instances.c.host,
        instances.c.node_uuid,
        instances.c.fault,
    )
    for row in conn.execute(sa.select(*columns)):
        known.add(row.uuid)
        if row.uuid in busy:
            continue
        if row.task_state is not None or row.vm_state == "building":
            findings.append(
                Finding(
                    kind="stuck",
                    subject=row.uuid,
                    message=f"The server is {row.vm_state}/{row.task_state} and no operation works on it.",
                )
            )
        elif row.vm_state == "error" and not row.fault:
            findings.append(Finding(kind="fault", subject=row.uuid, message="The server is in ERROR without a fault."))
        elif row.vm_state in ("active", "stopped") and row.host is None:
            findings.append(
                Finding(kind="host", subject=row.uuid, message=f"The server is {row.vm_state} and has no host.")
            )
    late = sa.select(operations).where(operations.c.finished_at.is_(None), operations.c.deadline < int(begun * 1e6))
    findings += [
        Finding(kind="operation", subject=row.id, message=f"{row.kind} of {row.instance_uuid} is past its deadline.")
        for row in conn.execute(late)
    ]
    findings += [
        Finding(
            kind="allocation",
            subject=drift.where,
            message=f"{drift.kind} {drift.what}: {drift.recorded} is recorded, {drift.actual} is true.",
        )
        for drift in allocation_audit.audit(conn)
        if drift.where not in busy
    ]
    findings += _misplaced(conn, busy)
    for usage in quotas.drift(conn):
        findings.append(
            Finding(
                kind="quota",
                subject=usage.project_id or usage.user_id,
                message=f"{usage.resource}: {usage.recorded} are charged, {usage.actual} exist.",
            )
        )
    return findings, busy, known


def mend(conn: sa.Connection, now: int) -> list[str]:
    """Put right what drifted in the database, leaving alone whatever an operation works on; say what it was.

    Nothing that we do makes counters drift; a restored backup or a hand in the database can.
    """
    busy = set(conn.execute(sa.select(operations.c.instance_uuid).where(operations.c.finished_at.is_(None))).scalars())
    mended = []
    for drift in allocation_audit.audit(conn):
        if drift.where in busy:
            continue
        if drift.kind == "orphan":
            allocation_rows.release(conn, drift.where, now=now)
        elif drift.kind == "used":
            allocation_audit.mend(conn, [drift.where], now)
        else:
            continue
        mended.append(f"allocation {drift.kind} of {drift.where} {drift.what}: {drift.recorded} → {drift.actual}")
    for project in sorted({usage.project_id for usage in quotas.drift(conn) if usage.project_id}):
        quotas.recount(conn, project)
        mended.append(f"quota usage of project {project}")
    return mended


def _misplaced(conn: sa.Connection, busy: set[str]) -> list[Finding]:
    """Servers hold resources exactly where they are."""
    held: dict[str, set[str]] = {}
    for consumer, node in conn.execute(sa.select(allocations.c.consumer_uuid, allocations.c.node_uuid).distinct()):
        held.setdefault(consumer, set()).add(node)
    findings = []
    for uuid, node in conn.execute(sa.select(instances.c.uuid, instances.c.node_uuid)):
        expected = {node} if node else set()
        if uuid not in busy and held.get(uuid, set()) != expected:
            findings.append(
                Finding(
                    kind="allocation",
                    subject=uuid,
                    message=f"The server is on {node or 'no node'} and holds resources on "
                    f"{', '.join(sorted(held.get(uuid, ()))) or 'none'}.",
                )
            )
    return findings


def _compare_guests(conn: sa.Connection, host: str, guests: tuple[Guest, ...], busy: set[str]) -> list[Finding]:
    rows = {
        row.uuid: row
        for row in conn.execute(
            sa.select(instances.c.uuid, instances.c.vm_state, instances.c.host).where(instances.c.host == host)
        )
    }
    leaving = set(conn.execute(sa.select(departures.c.instance_uuid).where(departures.c.host == host)).scalars())
    held = {guest.uuid for guest in guests}
    findings = [
        Finding(kind="guest", subject=guest.uuid, message=f"{host} has a guest of a server that is not there.")
        for guest in guests
        if guest.uuid not in rows and guest.uuid not in busy and guest.uuid not in leaving
    ]
    for uuid, row in rows.items():
        if uuid not in held and uuid not in busy and row.vm_state in ("active", "stopped", "paused", "suspended"):
            findings.append(
                Finding(kind="guest", subject=uuid, message=f"{host} has no guest for a server that is {row.vm_state}.")
            )
    return findings
