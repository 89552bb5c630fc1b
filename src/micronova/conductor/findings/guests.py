"""Guests, as hosts really have them, compared with servers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor import power_changes
from micronova.conductor.findings.finding import Finding, RepairDependencies, RepairKind, Repairs, offer, refuse_busy
from micronova.conductor.findings.servers import RecordedServer, RecordedServers, set_to_error
from micronova.conductor.host_guests import Answers, answered, guests_of_all, no_progress
from micronova.db import instances as instance_rows
from micronova.db.engine import Database
from micronova.db.listed import one_of
from micronova.db.tables import instance_actions, instances
from micronova.objects import power_state, states
from micronova.objects.clock import Clock
from micronova.objects.context import Context
from micronova.objects.errors import Conflict
from micronova.objects.host_limits import LARGEST_ADOPTED_EPOCH
from micronova.objects.orders import Guest, PowerChange


class GuestOnHost(msgspec.Struct, frozen=True):
    """A server, and the host that it is recorded on."""

    server: str
    host: str


ReadServers = Callable[[sa.Connection, float], RecordedServers]
"""Returns what the database knows of servers; they are left alone if they have changed since a time."""


def compare_guests(host: str, guests: tuple[Guest, ...], servers: RecordedServers) -> list[Finding]:
    """Return servers without a guest on this host, guests that it has lost, and those newer than their servers.

    Guests that do not belong to the host are in `misplaced_guests.py`.
    """
    recorded, busy = servers.by_host.get(host, {}), servers.busy
    held = {guest.uuid: guest.epoch for guest in guests}
    findings = [
        Finding(
            kind="guest",
            subject=uuid,
            message=f"{host} has lost the guest to which a resize can be reverted.",
            advice="Confirm the resize.",
        )
        for uuid in sorted(servers.kept.get(host, set()) - held.keys() - busy)
    ]
    for uuid, server in recorded.items():
        if uuid not in held and uuid not in busy and server.vm_state in states.NEEDS_GUEST:
            repair = offer("lost_guest", GuestOnHost(uuid, host), "Set the server to ERROR, with this as the reason.")
            message = f"{host} has no guest for a server that is {server.vm_state}."
            findings.append(Finding(kind="guest", subject=uuid, message=message, repairs=(repair,)))
        if held.get(uuid, 0) > server.epoch and uuid not in busy:
            message = f"{host} has a guest that was made after what the database says of its server."
            text = "Let the server go on with this guest, which may have another image than is recorded."
            repair = offer("newer_guest", GuestOnHost(uuid, host), text)
            findings.append(Finding(kind="guest", subject=uuid, message=message, repairs=(repair,)))
    return findings


def not_removed(host: str, guests: tuple[Guest, ...], servers: RecordedServers, before: int) -> list[Finding]:
    """Return guests of servers that left a host before a time: it removes them with its next heartbeats, if it can.

    They are named whatever else works on these servers: a move is not undone before they are removed.
    """
    findings = []
    for guest in guests:
        epoch, since = servers.leaving.get((host, guest.uuid), (-1, before))
        if guest.epoch <= epoch and since < before:
            message = f"{host} has not removed the guest of a server that has left it."
            advice = f"The log of the agent on {host} says why; it is repeated with each heartbeat."
            findings.append(Finding(kind="guest", subject=guest.uuid, message=message, advice=advice))
    return findings


class PowerStateComparison:
    """Compares guests with their servers, and looks twice: hosts report power changes a moment after they happen."""

    def __init__(
        self,
        database: Database,
        compute: ComputeAPI,
        clock: Clock,
        service_down_time: float,
        read_servers: ReadServers,
    ) -> None:
        self._database = database
        self._compute = compute
        self._clock = clock
        self._pause = service_down_time / 4  # hosts send several heartbeats meanwhile
        self._read_servers = read_servers

    async def differing(self, answers: Answers, servers: RecordedServers) -> list[Finding]:
        """Return guests that differ from their servers for longer than a report takes."""
        first = _differing(answers, servers)
        if not first:
            return []
        await self._clock.sleep(self._pause)
        begun = self._clock.now()
        again = await guests_of_all(self._compute, sorted({host for host, _ in first}), no_progress)
        then = await self._database.snapshot(self._read_servers, begun)
        second = _differing(again, then)
        by_hand = await self._database.read(_set_by_hand, sorted({uuid for _, uuid in second}))
        return [
            Finding(
                kind="guest",
                subject=uuid,
                message=difference.message,
                repairs=(offer("power", GuestOnHost(uuid, host), "Record the power state that the guest has."),)
                if difference.can_be_recorded
                else (),
                advice="" if difference.can_be_recorded else difference.advice,
            )
            for (host, uuid), difference in second.items()
            if first.get((host, uuid)) == difference and not (difference.may_be_set_by_admin and uuid in by_hand)
        ]


class _Difference(NamedTuple):
    """In what a guest differs from its server."""

    message: str
    may_be_set_by_admin: bool  # the power state is known, and the vm state is another
    can_be_recorded: bool = False  # the server can be set to what its guest is
    advice: str = "Reboot the server with the type HARD."


def _set_by_hand(conn: sa.Connection, servers: Sequence[str]) -> set[str]:
    """Return those of the servers whose state an administrator has set since their guests were made."""
    reset = instance_actions.c.action == "resetState"
    query = sa.select(instances.c.uuid).join(instance_actions, instance_actions.c.instance_uuid == instances.c.uuid)
    since = query.where(one_of(instances.c.uuid, "servers"), reset)
    since = since.where(instance_actions.c.start_time >= instances.c.launched_at)
    return set(conn.execute(since, {"servers": list(servers)}).scalars())


def _differing(answers: Answers, servers: RecordedServers) -> dict[tuple[str, str], _Difference]:
    """Return in what guests differ from their servers, by host and server, if no operation works on them."""
    found: dict[tuple[str, str], _Difference] = {}
    for host, guests in answered(answers):
        recorded = servers.by_host.get(host, {})
        for guest in guests:
            server = recorded.get(guest.uuid)
            if server is None or guest.uuid in servers.busy:
                continue
            difference = _difference(host, guest, server)
            if difference is not None:
                found[host, guest.uuid] = difference
    return found


def _difference(host: str, guest: Guest, server: RecordedServer) -> _Difference | None:
    """Return in what a guest differs from its server: in its size, if it has one or uses it, or in its power state."""
    size, needed = (guest.vcpus + guest.pcpus, guest.memory_mb), server.vm_state in states.NEEDS_GUEST
    runs = guest.power_state in (power_state.RUNNING, power_state.PAUSED)
    # Not all drivers tell the size. A guest that runs uses it, whatever its server is: the claim is the flavor's.
    if (needed or runs) and all(size) and size != server.size:
        return _Difference(
            f"The guest on {host} has {size[0]} CPUs and {size[1]} MB, and a guest of the server's flavor has "
            f"{server.size.cpus} CPUs and {server.size.memory_mb} MB.",
            may_be_set_by_admin=False,
            advice="Migrate the server, or resize it: its guest is then built as its flavor says.",
        )
    if server.vm_state == states.SOFT_DELETED and runs:
        return _Difference(
            f"The guest on {host} is {power_state.NAMES[guest.power_state]}, and the server is soft-deleted.",
            may_be_set_by_admin=False,
            advice=f"`openstack server restore {guest.uuid}` makes it a server again, as its owner may have done after "
            "a backup that was restored. If it has to go, delete it after that.",
        )
    follows = states.after_power_change(server.vm_state, guest.power_state) == server.vm_state
    if not needed or (follows and guest.power_state != power_state.NOSTATE):
        return None
    power = power_state.NAMES.get(guest.power_state, str(guest.power_state))
    return _Difference(
        f"The guest on {host} is {power}, and the server is {server.vm_state}.",
        may_be_set_by_admin=guest.power_state == server.power_state,
        can_be_recorded=not follows,
    )


# --- repairs ---


async def guest_on(dependencies: RepairDependencies, host: str, server: str) -> Guest | None:
    """Ask a host for its guest of a server; raise Unavailable if it does not answer."""
    for guest in await dependencies.hosts().list_guests(Context(request_id="req-repair"), host):
        if guest.uuid == server:
            return guest
    return None


async def _set_to_error(dependencies: RepairDependencies, about: GuestOnHost) -> str:
    server, host, now = about.server, about.host, dependencies.now()

    def record(conn: sa.Connection, epoch: int) -> str:
        row = instance_rows.lock_existing(conn, server)
        refuse_busy(conn, server)
        if row["host"] != host or row["epoch"] != epoch or row["vm_state"] not in states.NEEDS_GUEST:
            return ""
        return set_to_error(conn, server, f"Its host {host} has no guest of this server any more.", now)

    before = await dependencies.database.read(instance_rows.get_existing, server)
    if await guest_on(dependencies, host, server) is not None:
        return ""
    return await dependencies.database.write(record, before["epoch"])


async def _record_power_state(dependencies: RepairDependencies, about: GuestOnHost) -> str:
    server, host = about.server, about.host
    guest = await guest_on(dependencies, host, server)
    if guest is None:
        raise Conflict(f"{host} has no guest of server {server} any more.")
    return await dependencies.database.write(_follow_guest, host, guest, dependencies.now())


def _follow_guest(conn: sa.Connection, host: str, guest: Guest, now: int) -> str:
    """Record the power state of a guest, as its host's report of a change does."""
    row = instance_rows.lock_existing(conn, guest.uuid)
    refuse_busy(conn, guest.uuid)
    if row["host"] != host:
        return ""
    change = PowerChange(guest.uuid, guest.epoch, guest.power_state)
    power_changes.record(conn, power_changes.compare(conn, [(host, change)]), now)
    follows = states.after_power_change(row["vm_state"], guest.power_state)
    instance_rows.update(conn, guest.uuid, now, {"vm_state": follows, "power_state": guest.power_state})
    return f"server {guest.uuid} is {follows}, as its guest on {host} is"


async def _go_on_with_newer(dependencies: RepairDependencies, about: GuestOnHost) -> str:
    guest = await guest_on(dependencies, about.host, about.server)
    if guest is None:
        raise Conflict(f"{about.host} has no guest of server {about.server} any more.")
    return await dependencies.database.write(_raise_epoch, about.host, guest, dependencies.now())


def _raise_epoch(conn: sa.Connection, host: str, guest: Guest, now: int) -> str:
    """Raise the epoch of a server above that of its guest, which the host keeps else from older orders."""
    row = instance_rows.lock_existing(conn, guest.uuid)
    refuse_busy(conn, guest.uuid)
    if row["host"] != host or row["epoch"] >= guest.epoch:
        return ""
    instance_rows.update(conn, guest.uuid, now, {"epoch": epoch_after(guest, host)})
    return f"server {guest.uuid} goes on with the guest that {host} has"


def epoch_after(guest: Guest, host: str) -> int:
    """Return an epoch after that of a guest; raise Conflict if it is none that a server can have reached.

    A stolen host can report any: one near the end of the column would end all work on the server.
    """
    if guest.epoch > LARGEST_ADOPTED_EPOCH:
        raise Conflict(f"What {host} says of its guest of server {guest.uuid} cannot be: its epoch is {guest.epoch}.")
    return guest.epoch + 1


REPAIRS: Repairs = {
    "lost_guest": RepairKind(GuestOnHost, _set_to_error),
    "newer_guest": RepairKind(GuestOnHost, _go_on_with_newer),
    "power": RepairKind(GuestOnHost, _record_power_state),
}
