"""Guests on hosts to which, as far as the database knows, their servers do not belong.

Such a guest is what a delete or a move has left behind, or it is newer than the database: that was restored from a
backup, and the server was made, or moved, afterwards. Then it may be the only copy of somebody's data. So a guest is
removed without a question about just this guest only if the database proves that its server is deleted or lives
elsewhere.
"""

from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.claims import claim_anew, ports_of
from micronova.conductor.findings.finding import (
    Finding,
    Repair,
    RepairDependencies,
    RepairKind,
    Repairs,
    offer,
    refuse_busy,
)
from micronova.conductor.findings.guests import epoch_after, guest_on
from micronova.conductor.findings.servers import RecordedServers, guest_size_of
from micronova.conductor.host_guests import Answers, answered
from micronova.db import departures, server_migrations
from micronova.db import instances as instance_rows
from micronova.db.engine import Database
from micronova.db.listed import one_of
from micronova.db.tables import compute_nodes, deleted_instances, instances
from micronova.objects import states
from micronova.objects.errors import Conflict
from micronova.objects.ids import new_uuid
from micronova.objects.orders import Guest


class RemoveGuest(msgspec.Struct, frozen=True):
    """Remove the guest of a server that a host has, if it is still the one that was built at this epoch."""

    server: str
    host: str
    epoch: int


class AdoptGuest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Let a server belong to the host that has its guest."""

    server: str
    host: str
    replaces: int | None = None  # the epoch of the older guest on the server's own host


class _Owner(NamedTuple):
    """What the database knows of the server of a guest."""

    project: str
    host: str | None
    epoch: int
    deleted: bool


def _owners(conn: sa.Connection, uuids: list[str]) -> dict[str, _Owner]:
    found = {}
    for table, deleted in ((deleted_instances, True), (instances, False)):
        query = sa.select(table.c.uuid, table.c.project_id, table.c.host, table.c.epoch)
        for row in conn.execute(query.where(one_of(table.c.uuid, "uuids")), {"uuids": uuids}):
            found[row.uuid] = _Owner(row.project_id, row.host, row.epoch, deleted)
    return found


async def misplaced_guests(database: Database, answers: Answers, servers: RecordedServers) -> list[Finding]:
    """Return guests of servers that are not, or not any more, on the hosts that have them."""
    found = [
        (host, guest)
        for host, guests in answered(answers)
        for guest in guests
        if guest.uuid not in servers.by_host.get(host, {})
        and guest.uuid not in servers.kept.get(host, set())
        and guest.uuid not in servers.busy
        and (host, guest.uuid) not in servers.leaving
    ]
    if not found:
        return []
    owners = await database.read(_owners, sorted({guest.uuid for _, guest in found}))
    return [_finding(host, guest, owners.get(guest.uuid), answers) for host, guest in found]


def _finding(host: str, guest: Guest, owner: _Owner | None, answers: Answers) -> Finding:
    project = (owner.project if owner else guest.project_id) or "unknown"

    def found(reason: str, *repairs: Repair, advice: str = "") -> Finding:
        message = f"{host} has a guest of a server that is not there. Its project is {project}; {reason}"
        return Finding(kind="guest", subject=guest.uuid, message=message, repairs=repairs, advice=advice)

    def remove(text: str, *, destroys: bool) -> Repair:
        return offer("remove_guest", RemoveGuest(guest.uuid, host, guest.epoch), text, destroys=destroys)

    removal = remove(f"Remove the guest from {host}, with its disks.", destroys=True)
    if owner is None:
        reason = "the database does not know the server. It may be newer than the database."
        advice = "It cannot be adopted, because its record has no flavor and no ports: copy its disks if needed."
        return found(reason, removal, advice=advice)
    if owner.deleted:
        safe = guest.epoch <= owner.epoch
        repair = remove(f"Remove the guest from {host}: its server is deleted.", destroys=False) if safe else removal
        return found("the server is deleted.", repair)
    reason = f"the server is on {owner.host or 'no host'}."
    text = f"Adopt the guest: record that the server is on {host}."
    if owner.host is None:
        text += " Nothing but this host says that it has the server's guest."  # a stolen host can say it of any server
        return found(reason, offer("adopt_guest", AdoptGuest(guest.uuid, host), text, destroys=True), removal)
    there = answers.get(owner.host)
    if not isinstance(there, tuple):  # whether that host has the server's guest is not known
        advice = f"Repeat the audit when {owner.host} answers: only then it is known which guest is the server's."
        return found(reason, removal, advice=advice)
    other = next((each for each in there if each.uuid == guest.uuid), None)
    if other is not None and other.epoch >= guest.epoch:
        repair = remove(f"Remove the guest from {host}: the server's guest on {owner.host} is newer.", destroys=False)
        return found(reason, repair)
    if other is not None:  # a host can report any epoch, also of a guest that it does not have
        text += f" {owner.host} has an older guest of the server, and removes it, with its disks."
    about = AdoptGuest(guest.uuid, host, None if other is None else other.epoch)
    adopt = offer("adopt_guest", about, text, destroys=other is not None)
    return found(reason, adopt, removal)


async def _remove_guest(dependencies: RepairDependencies, about: RemoveGuest) -> str:
    server, host, epoch = about.server, about.host, about.epoch
    guest = await guest_on(dependencies, host, server)
    if guest is None:
        return ""
    if guest.epoch != epoch:
        raise Conflict(f"The guest of server {server} on {host} is another one by now.")

    def record(conn: sa.Connection) -> str:
        row = instance_rows.lock(conn, server)
        _refuse_own(conn, server, host, row["host"] if row is not None else None)
        departures.record(conn, host, server, epoch, dependencies.now())
        return f"{host} removes its guest of server {server} with its next heartbeat"

    return await dependencies.database.write(record)


def _refuse_own(conn: sa.Connection, server: str, host: str, own: str | None) -> None:
    """Raise Conflict if a server is on this host, or has a guest there for a while."""
    refuse_busy(conn, server)
    migration = server_migrations.open_of(conn, server)
    if own == host or (migration is not None and host in (migration["source_compute"], migration["dest_compute"])):
        raise Conflict(f"Server {server} is on {host} by now: its guest stays.")


async def _adopt_guest(dependencies: RepairDependencies, about: AdoptGuest) -> str:
    server, host = about.server, about.host
    guest = await guest_on(dependencies, host, server)
    if guest is None:
        raise Conflict(f"{host} has no guest of server {server} any more.")
    before = await dependencies.database.read(instance_rows.get_existing, server)
    if before["host"] is not None:
        other = await guest_on(dependencies, before["host"], server)
        if other is not None and other.epoch >= guest.epoch:
            raise Conflict(f"{before['host']} has a newer guest of server {server}.")
        if other is not None and other.epoch != about.replaces:
            raise Conflict(f"{before['host']} has a guest of server {server}, which was not there before.")
    ports, operation = await ports_of(dependencies, server), new_uuid(dependencies.random)

    def adopt(conn: sa.Connection) -> str:
        row = instance_rows.lock_existing(conn, server)
        _refuse_own(conn, server, host, row["host"])
        if (row["host"], row["epoch"]) != (before["host"], before["epoch"]):
            raise Conflict(f"Server {server} has changed meanwhile.")
        if instance_rows.volumes_of(conn, server):
            raise Conflict(f"Server {server} has volumes, which are connected to another host: evacuate it.")
        size = guest.vcpus + guest.pcpus, guest.memory_mb
        if all(size) and size != guest_size_of(row["flavor"]):
            raise Conflict(f"The guest on {host} has another size than the flavor of server {server}.")
        node = conn.execute(
            sa.select(compute_nodes.c.uuid, compute_nodes.c.hypervisor_hostname).where(
                compute_nodes.c.host == host, compute_nodes.c.hypervisor_hostname == guest.node
            )
        ).first()
        if node is None:
            raise Conflict(f"The node {guest.node} of {host} has not been reported yet.")
        # A soft-deleted server stays that, without a charge to its quota; a rescued one needs to be unrescued.
        kept = row["vm_state"] in (states.SOFT_DELETED, states.RESCUED)
        before_power = row["vm_state"] if kept else states.ACTIVE
        if row["host"] is not None:  # that host may come back with an older guest
            departures.record(conn, row["host"], server, row["epoch"], dependencies.now())
        instance_rows.update(
            conn,
            server,
            dependencies.now(),
            {
                "host": host,
                "node": node.hypervisor_hostname,
                "node_uuid": node.uuid,
                # Later orders have higher epochs than what the guest was built at.
                "epoch": max(row["epoch"] + 1, epoch_after(guest, host)),
                "vm_state": states.after_power_change(before_power, guest.power_state),
                "power_state": guest.power_state,
                "fault": None,
            },
        )
        claim_anew(conn, server, ports, operation, dependencies.pci_aliases, dependencies.now())
        return f"server {server} is on {host}, with the guest that is there"

    return await dependencies.database.write(adopt)


REPAIRS: Repairs = {
    "remove_guest": RepairKind(RemoveGuest, _remove_guest),
    "adopt_guest": RepairKind(AdoptGuest, _adopt_guest),
}
