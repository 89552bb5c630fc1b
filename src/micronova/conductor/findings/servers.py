"""Servers in the database: those that no operation continues, and what the other comparisons need of servers."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.finding import (
    Finding,
    Repair,
    RepairDependencies,
    RepairKind,
    Repairs,
    offer,
    refuse_busy,
)
from micronova.db import allocations as allocation_rows
from micronova.db import instances as instance_rows
from micronova.db import operations as operation_rows
from micronova.db import server_migrations
from micronova.db.tables import (
    allocations,
    compute_nodes,
    deleted_instances,
    departures,
    instances,
    migrations,
)
from micronova.objects import migration_states, states
from micronova.objects.clock import micros
from micronova.objects.instance import InstanceChanges, fault_of


class StateOf(msgspec.Struct, frozen=True):
    """The state of a server."""

    server: str


class MigrationOf(msgspec.Struct, frozen=True):
    """A migration, and its server."""

    migration: str
    server: str


EMULATOR_THREADS: Final = "hw:emulator_threads_policy"


class GuestSize(NamedTuple):
    """The size of a guest."""

    cpus: int
    memory_mb: int


class RecordedServer(NamedTuple):
    """What the database says of a server that its guest has to be like."""

    vm_state: str
    power_state: int
    size: GuestSize
    epoch: int


def guest_size_of(flavor: Mapping[str, Any]) -> GuestSize:
    """Return the size of a guest of a flavor, as its host reports it."""
    return _guest_size(flavor["vcpus"], flavor["ram"], flavor.get("extra_specs", {}).get(EMULATOR_THREADS))


def _guest_size(vcpus: int, memory_mb: int, emulator_threads: str | None) -> GuestSize:
    """Return the size of a guest: hosts count the CPU that QEMU's own threads may have."""
    return GuestSize(vcpus + (emulator_threads == "isolate"), memory_mb)


class RecordedServers:
    """What the database knows of servers, for the comparison with hypervisors and ports."""

    def __init__(self, conn: sa.Connection, begun: int) -> None:
        gone = sa.select(deleted_instances.c.uuid).where(deleted_instances.c.deleted_at >= begun)
        # Servers that are left alone: an operation works on them, or they changed while others were asked.
        self.busy = operation_rows.busy_server_ids(conn) | set(conn.execute(gone).scalars())
        self.known: set[str] = set()
        self.by_host: dict[str, dict[str, RecordedServer]] = {}  # host -> server
        # (host, server) -> the epoch up to which the host has to remove its guest, and since when
        self.leaving: dict[tuple[str, str], tuple[int, int]] = {
            (row.host, row.instance_uuid): (row.epoch, row.created_at) for row in conn.execute(departures.select())
        }
        self.kept: dict[str, set[str]] = {}  # host -> servers that left it, whose guests it keeps for a revert


def compare_servers(conn: sa.Connection, since: int) -> tuple[list[Finding], RecordedServers]:
    """Return servers and migrations that no operation continues, and what the database knows of servers.

    Servers that have changed since a time are left alone.
    """
    findings: list[Finding] = []
    servers = RecordedServers(conn, since)
    busy = servers.busy
    columns = (
        instances.c.uuid,
        instances.c.vm_state,
        instances.c.task_state,
        instances.c.power_state,
        instances.c.host,
        instances.c.epoch,
        instances.c.node_uuid,
        instances.c.fault,
        instances.c.updated_at,
        instances.c.flavor["vcpus"].as_integer().label("vcpus"),
        instances.c.flavor["ram"].as_integer().label("ram"),
        instances.c.flavor["extra_specs", EMULATOR_THREADS].as_string().label("emulator_threads"),
    )
    for row in conn.execute(sa.select(*columns)):
        servers.known.add(row.uuid)
        if row.updated_at >= since:  # hosts and ports may have been asked before the change
            busy.add(row.uuid)
        if row.host is not None:
            size = _guest_size(row.vcpus, row.ram, row.emulator_threads)
            recorded = RecordedServer(row.vm_state, row.power_state, size, row.epoch)
            servers.by_host.setdefault(row.host, {})[row.uuid] = recorded
        if row.uuid in busy:
            continue
        if row.task_state is not None or row.vm_state == states.BUILDING:
            findings.append(
                Finding(
                    kind="stuck",
                    subject=row.uuid,
                    message=f"The server is {row.vm_state}/{row.task_state} and no operation works on it.",
                    repairs=(_reset(row.uuid, row.vm_state),),
                )
            )
        elif row.vm_state == states.ERROR and not row.fault:
            text = "Record a fault that says that the reason is not known."
            findings.append(
                Finding(
                    kind="fault",
                    subject=row.uuid,
                    message="The server is in ERROR without a fault.",
                    repairs=(offer("fault", StateOf(row.uuid), text),),
                )
            )
        elif row.vm_state in states.NEEDS_GUEST and row.host is None:
            text = "Set the server to ERROR, so that its owner can delete it."
            findings.append(
                Finding(
                    kind="host",
                    subject=row.uuid,
                    message=f"The server is {row.vm_state} and has no host.",
                    repairs=(offer("no_host", StateOf(row.uuid), text),),
                )
            )
    findings += _unfinished_moves(conn, servers)
    return findings, servers


def late_operations(conn: sa.Connection, since: int, undisturbed: float) -> list[Finding]:
    """Return operations past their deadline, although a conductor has worked undisturbed for this many seconds."""
    return [
        Finding(
            kind="operation",
            subject=row["id"],
            message=f"{row['kind']} of {row['instance_uuid']} is past its deadline.",
            advice=f"A conductor ends it; why it has not is in its log and in `micronova operation show {row['id']}`.",
        )
        for row in operation_rows.list_late(conn, since, micros(undisturbed))
    ]


def _unfinished_moves(conn: sa.Connection, servers: RecordedServers) -> list[Finding]:
    """Return open migrations that no operation continues; note the guests that sources keep until the confirmation."""
    findings = []
    held: dict[str, set[str]] = {}
    of_nodes = sa.select(allocations.c.consumer_uuid, allocations.c.node_uuid).distinct()
    of_nodes = of_nodes.join(compute_nodes, compute_nodes.c.uuid == allocations.c.node_uuid)
    for consumer, node in conn.execute(of_nodes.join(migrations, migrations.c.uuid == allocations.c.consumer_uuid)):
        held.setdefault(consumer, set()).add(node)
    for migration in server_migrations.list_open(conn):
        uuid = migration["instance_uuid"]
        if uuid in servers.busy:
            continue
        if migration["status"] != migration_states.FINISHED or uuid not in servers.known:
            message = f"The migration of server {uuid} is {migration['status']} and no operation works on it."
            text = "Set the migration to error, and release what it holds."
            repair = offer("migration", MigrationOf(migration["uuid"], uuid), text)
            findings.append(Finding(kind="migration", subject=migration["uuid"], message=message, repairs=(repair,)))
            continue
        if held.get(migration["uuid"], set()) != {migration["source_node_uuid"]}:
            message = f"The migration of server {uuid} does not hold the resources of its source."
            advice = "Confirm the resize, or revert it."
            findings.append(Finding(kind="allocation", subject=migration["uuid"], message=message, advice=advice))
        if migration["source_compute"] != migration["dest_compute"]:
            servers.kept.setdefault(migration["source_compute"], set()).add(uuid)
    return findings


# --- repairs ---


def _reset(server: str, vm_state: str) -> Repair:
    text = "Set the server to ERROR." if vm_state == states.BUILDING else "Take the task state back."
    return offer("reset", StateOf(server), text)


async def _reset_server(dependencies: RepairDependencies, about: StateOf) -> str:
    return await dependencies.database.write(_take_back_task, about.server, dependencies.now())


def _take_back_task(conn: sa.Connection, server: str, now: int) -> str:
    row = instance_rows.lock_existing(conn, server)
    refuse_busy(conn, server)
    if row["vm_state"] == states.BUILDING:
        return set_to_error(conn, server, "The work on the server ended without a result.", now)
    if row["task_state"] is None:
        return ""
    instance_rows.update(conn, server, now, {"task_state": None})
    return f"server {server} is {row['vm_state']} and has no task state"


def set_to_error(conn: sa.Connection, server: str, reason: str, now: int) -> str:
    """Set a server, whose row is locked, to ERROR with a fault; return what was done."""
    changes: InstanceChanges = {"vm_state": states.ERROR, "task_state": None, "fault": fault_of(reason, now)}
    instance_rows.update(conn, server, now, changes)
    return f"server {server} is in ERROR: {reason}"


async def _record_fault(dependencies: RepairDependencies, about: StateOf) -> str:
    server, now = about.server, dependencies.now()

    def record(conn: sa.Connection) -> str:
        row = instance_rows.lock_existing(conn, server)
        refuse_busy(conn, server)
        if row["vm_state"] != states.ERROR or row["fault"]:
            return ""
        return set_to_error(conn, server, "The reason is not recorded.", now)

    return await dependencies.database.write(record)


async def _end_without_host(dependencies: RepairDependencies, about: StateOf) -> str:
    server, now = about.server, dependencies.now()

    def record(conn: sa.Connection) -> str:
        row = instance_rows.lock_existing(conn, server)
        refuse_busy(conn, server)
        if row["host"] is not None or row["vm_state"] not in states.NEEDS_GUEST:
            return ""
        return set_to_error(conn, server, "The server has no host.", now)

    return await dependencies.database.write(record)


async def _end_migration(dependencies: RepairDependencies, about: MigrationOf) -> str:
    uuid, server, now = about.migration, about.server, dependencies.now()

    def end(conn: sa.Connection) -> str:
        instance_rows.lock(conn, server)
        refuse_busy(conn, server)
        found = server_migrations.get(conn, uuid)
        if found is None or found["status"] not in migration_states.OPEN:
            return ""
        server_migrations.update(conn, uuid, now, {"status": migration_states.ERROR})
        allocation_rows.release(conn, uuid, now=now)
        return f"migration {uuid} is in error and holds nothing"

    return await dependencies.database.write(end)


REPAIRS: Repairs = {
    "reset": RepairKind(StateOf, _reset_server),
    "fault": RepairKind(StateOf, _record_fault),
    "no_host": RepairKind(StateOf, _end_without_host),
    "migration": RepairKind(MigrationOf, _end_migration),
}
