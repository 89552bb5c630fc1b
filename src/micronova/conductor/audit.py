"""The audit: compares what should be with what is, and lists every leak and contradiction.

It reads the database (operations, instances, allocations, quota usage), asks every living host what its hypervisor
really holds, asks a conductor for how long it has worked undisturbed, asks the network service for the ports of
servers and for what its agents cannot do, asks the volume service for the attachments of servers, and asks the image
service for images that could not be made, and for those of servers that have no other disk. Whatever
has a running operation is left alone: there the two sides may differ for a moment.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.audit_volumes import Attachments, compare_volumes
from micronova.conductor.host_guests import ReportProgress, guests_of_all, hosts_up, no_progress
from micronova.conductor.rpcapi import ProbeAPI
from micronova.db import allocation_audit, quotas, server_migrations, topologies
from micronova.db import allocations as allocation_rows
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.db.listed import one_of
from micronova.db.tables import (
    allocations,
    block_devices,
    compute_nodes,
    consumers,
    deleted_instances,
    departures,
    instance_actions,
    instances,
    migrations,
    operations,
)
from micronova.objects import migration_states, power_state, shelved, states
from micronova.objects.clock import Clock, micros
from micronova.objects.fitting import lacking
from micronova.objects.operations import IMAGE_KINDS
from micronova.objects.orders import Guest

CONDUCTOR_TIMEOUT = 10.0
"""Seconds in which a conductor has to answer."""

MOST_IMAGES = 1000
"""The newest images of operations that have ended that the image service is asked for; of those that shelved servers
need, it is asked for all."""
IMAGES_TOGETHER = 20
"""Images that it is asked for at the same time."""
PAGE = 1000
"""Shelved servers that are read at once."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One contradiction or leak."""

    kind: str
    subject: str  # a server, a host, a project…
    message: str


class Ports(Protocol):
    """The part of the network client that the audit uses."""

    async def list_server_ports(self) -> list[dict[str, Any]]:
        """Return every port that belongs to a server: id and device_id."""

    async def list_network_agents(self) -> list[dict[str, Any]]:
        """Return host, alive and configurations of each of our network agents."""


class Images(Protocol):
    """The part of the image client that the audit uses."""

    async def status_of_made(self, image_id: str) -> str | None:
        """Return the status of an image that was made of a server; None if there is none."""


async def audit(
    database: Database,
    compute: ComputeAPI,
    conductor: ProbeAPI,
    clock: Clock,
    *,
    service_down_time: float,
    ports: Ports | None = None,
    images: Images | None = None,
    volumes: Attachments | None = None,
    progress: ReportProgress = no_progress,
    image_progress: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Return all findings; the list is empty if nothing is wrong.

    `progress` is told how many hosts have answered, `image_progress` about how many images the image service has.
    """
    begun = clock.now()
    alive = await hosts_up(database, clock, service_down_time)
    answers = await guests_of_all(compute, alive, progress)
    listed = await ports.list_server_ports() if ports is not None else []
    agents = await ports.list_network_agents() if ports is not None else []
    # Hypervisors and ports are read before the database, which then knows what was built meanwhile.
    undisturbed, no_answer = await _undisturbed(conductor)
    findings, servers = await database.snapshot(_inside, begun, undisturbed)
    findings += no_answer
    if images is not None:
        asked = _AskedImages(images, image_progress)
        findings += await _unfilled(asked, await database.read(_failed_images))
        findings += await _wrong_shelved_images(asked, database)
    if volumes is not None:
        different = await compare_volumes(database, clock, volumes, answers)
        findings += [Finding(kind="volume", subject=volume, message=message) for volume, message in different]
    busy, known = servers.busy, servers.known
    for host, guests in answers.items():
        if isinstance(guests, str):
            findings.append(Finding(kind="host", subject=host, message=f"The host does not answer: {guests}"))
        else:
            findings += _compare_guests(host, guests, servers)
            findings += _not_removed(host, guests, servers, micros(begun - service_down_time))
    looks = _Looks(database, compute, clock, service_down_time, undisturbed)
    findings += await looks.differing(answers, servers)
    for port in listed:
        device = port["device_id"]
        if device not in known and device not in busy:
            findings.append(
                Finding(kind="port", subject=port["id"], message=f"The port belongs to server {device}, which is gone.")
            )
    for agent in agents:
        host = agent["host"]
        if not agent["alive"] and host in answers:
            findings.append(Finding(kind="network", subject=host, message="The network agent does not report."))
        for fault in (agent.get("configurations") or {}).get("faults", ()):
            findings.append(Finding(kind="network", subject=host, message=fault))
    return findings


def _failed_images(conn: sa.Connection) -> dict[str, str]:
    """Return the images that the newest failed operations had to make, with their servers; both have one id."""
    failed = sa.and_(operations.c.kind.in_(IMAGE_KINDS), operations.c.result.in_(("error", "cancelled")))
    found = sa.select(operations.c.id, operations.c.instance_uuid).where(failed)
    rows = conn.execute(found.order_by(operations.c.finished_at.desc()).limit(MOST_IMAGES))
    return {row.id: row.instance_uuid for row in rows}


class _AskedImages:
    """Asks the image service for images, several at a time, and tells how many have been answered."""

    def __init__(self, images: Images, progress: Callable[[int], None] | None) -> None:
        self._images = images
        self._progress = progress
        self._done = 0

    async def statuses(self, ids: Iterable[str]) -> dict[str, str | None]:
        """Return the status of each image; None if there is none."""
        found: dict[str, str | None] = {}
        wanted = sorted(set(ids))
        for begin in range(0, len(wanted), IMAGES_TOGETHER):
            part = wanted[begin : begin + IMAGES_TOGETHER]
            found |= dict(zip(part, await asyncio.gather(*map(self._images.status_of_made, part)), strict=True))
            self._done += len(part)
            if self._progress is not None:
                self._progress(self._done)
        return found


async def _unfilled(images: _AskedImages, failed: Mapping[str, str]) -> list[Finding]:
    """Return those of the images that are left without data; one that was complete when its server went may stay."""
    status = await images.statuses(failed)
    return [
        Finding(kind="image", subject=id, message=f"The image of server {server} is left without data.")
        for id, server in failed.items()
        if status[id] not in (None, "active")
    ]


_BUSY = sa.select(operations.c.instance_uuid).where(operations.c.finished_at.is_(None))
_IMAGE = instances.c.system_metadata[shelved.SHELVED_IMAGE].as_string()
_BOOTS_FROM_VOLUME = sa.exists().where(
    block_devices.c.instance_uuid == instances.c.uuid,
    block_devices.c.volume_id.is_not(None),
    block_devices.c.device["boot_index"].as_integer() == 0,
)
_NEEDED = sa.select(instances.c.uuid, _IMAGE.label("image")).where(
    instances.c.vm_state == states.SHELVED_OFFLOADED, instances.c.uuid.not_in(_BUSY), ~_BOOTS_FROM_VOLUME
)


def _needed_images(conn: sa.Connection, after: str) -> dict[str, str | None]:
    """Return the next servers without a host that no operation works on, with the images of their disks."""
    rows = conn.execute(_NEEDED.where(instances.c.uuid > after).order_by(instances.c.uuid).limit(PAGE))
    return {row.uuid: row.image for row in rows}


def _still_needed(conn: sa.Connection, servers: Sequence[str]) -> dict[str, str | None]:
    """Return those of the servers that are still shelved, with their images."""
    still = _NEEDED.where(one_of(instances.c.uuid, "servers"))
    return {row.uuid: row.image for row in conn.execute(still, {"servers": list(servers)})}


def _needless_images(conn: sa.Connection) -> dict[str, str]:
    """Return the newest images of shelves that have ended whose servers do not have them any more, with the servers."""
    made = sa.select(operations.c.id, operations.c.instance_uuid).outerjoin(
        instances, sa.and_(instances.c.uuid == operations.c.instance_uuid, operations.c.id == _IMAGE)
    )
    needless = made.where(
        operations.c.kind == "shelve", instances.c.uuid.is_(None), operations.c.instance_uuid.not_in(_BUSY)
    )
    rows = conn.execute(needless.order_by(operations.c.finished_at.desc()).limit(MOST_IMAGES))
    return {row.id: row.instance_uuid for row in rows}


async def _wrong_shelved_images(images: _AskedImages, database: Database) -> list[Finding]:
    """Return servers whose disk is lost with their image, and images of shelves that nobody needs any more."""
    findings: list[Finding] = []
    after = ""
    while needed := await database.read(_needed_images, after):
        after = max(needed)
        status = await images.statuses(image for image in needed.values() if image)
        lost = [server for server, image in needed.items() if image is None or status[image] != "active"]
        still = await database.read(_still_needed, lost) if lost else {}  # others may have been unshelved since
        findings += [
            Finding(kind="image", subject=id, message=f"The image {image} of the shelved server's disk is gone.")
            for id, image in still.items()
            if needed[id] == image
        ]
    needless = await database.read(_needless_images)
    status = await images.statuses(needless)
    left = await database.read(_needless_images)
    return findings + [
        Finding(kind="image", subject=id, message=f"The image of server {server}, which is not shelved, is left.")
        for id, server in needless.items()
        if id in left and status[id] is not None
    ]


async def _undisturbed(conductor: ProbeAPI) -> tuple[float, list[Finding]]:
    """Return for how many seconds a conductor has worked without an outage; 0 and a finding if none answers."""
    try:
        return (await conductor.ping(CONDUCTOR_TIMEOUT)).undisturbed, []
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return 0.0, [Finding(kind="conductor", subject="all", message=f"No conductor answers: {error}")]


class _Recorded(NamedTuple):
    """What the database says of a server that its guest has to be like."""

    vm_state: str
    power_state: int
    vcpus: int
    memory_mb: int


class _Servers:
    """What the database knows of servers, for the comparison with hypervisors and ports."""

    def __init__(self, conn: sa.Connection, begun: int) -> None:
        open_operations = sa.select(operations.c.instance_uuid).where(operations.c.finished_at.is_(None))
        gone = sa.select(deleted_instances.c.uuid).where(deleted_instances.c.deleted_at >= begun)
        # Servers that are left alone: an operation works on them, or they changed while others were asked.
        self.busy = set(conn.execute(open_operations).scalars()) | set(conn.execute(gone).scalars())
        self.known: set[str] = set()
        self.by_host: dict[str, dict[str, _Recorded]] = {}  # host -> server
        # (host, server) -> the epoch up to which the host has to remove its guest, and since when
        self.leaving: dict[tuple[str, str], tuple[int, int]] = {
            (row.host, row.instance_uuid): (row.epoch, row.created_at) for row in conn.execute(departures.select())
        }
        self.kept: dict[str, set[str]] = {}  # host -> servers that left it, whose guests it keeps for a revert


def _inside(conn: sa.Connection, begun: float, undisturbed: float) -> tuple[list[Finding], _Servers]:
    """Return the contradictions within the database, and what it knows of servers."""
    findings: list[Finding] = []
    since = micros(begun)
    servers = _Servers(conn, since)
    busy = servers.busy
    columns = (
        instances.c.uuid,
        instances.c.vm_state,
        instances.c.task_state,
        instances.c.power_state,
        instances.c.host,
        instances.c.node_uuid,
        instances.c.fault,
        instances.c.updated_at,
        instances.c.flavor["vcpus"].as_integer().label("vcpus"),
        instances.c.flavor["ram"].as_integer().label("ram"),
        instances.c.flavor["extra_specs", "hw:emulator_threads_policy"].as_string().label("emulator"),
    )
    for row in conn.execute(sa.select(*columns)):
        servers.known.add(row.uuid)
        if row.updated_at >= since:  # hosts and ports may have been asked before the change
            busy.add(row.uuid)
        if row.host is not None:
            cpus = row.vcpus + (row.emulator == "isolate")  # hosts count the one of QEMU's own threads
            servers.by_host.setdefault(row.host, {})[row.uuid] = _Recorded(row.vm_state, row.power_state, cpus, row.ram)
        if row.uuid in busy:
            continue
        if row.task_state is not None or row.vm_state == states.BUILDING:
            findings.append(
                Finding(
                    kind="stuck",
                    subject=row.uuid,
                    message=f"The server is {row.vm_state}/{row.task_state} and no operation works on it.",
                )
            )
        elif row.vm_state == states.ERROR and not row.fault:
            findings.append(Finding(kind="fault", subject=row.uuid, message="The server is in ERROR without a fault."))
        elif row.vm_state in states.NEEDS_GUEST and row.host is None:
            findings.append(
                Finding(kind="host", subject=row.uuid, message=f"The server is {row.vm_state} and has no host.")
            )
    findings += [
        Finding(
            kind="operation",
            subject=row["id"],
            message=f"{row['kind']} of {row['instance_uuid']} is past its deadline.",
        )
        for row in operation_rows.list_late(conn, since, micros(undisturbed))
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
    findings += [_oversold(each) for each in allocation_audit.oversold(conn)]
    findings += _topologies(conn, busy)
    findings += _misplaced(conn, busy)
    findings += _unfinished_moves(conn, servers)
    for usage in quotas.drift(conn):
        findings.append(
            Finding(
                kind="quota",
                subject=usage.project_id or usage.user_id,
                message=f"{usage.resource}: {usage.recorded} are charged, {usage.actual} exist.",
            )
        )
    return findings, servers


async def mend(database: Database, now: int) -> list[str]:
    """Correct counters that drifted; return what was corrected. Servers with open operations are left alone.

    Each counter is corrected in a transaction of its own, which locks what it counts and then counts again: what was
    found without locks may have been a change under way. Nothing that we do makes counters drift; a restored backup or
    a hand in the database can.
    """
    consumers, nodes, groups, projects = await database.read(_drifted)
    found = [drift for uuid in consumers for drift in await database.write(_release_orphan, uuid, now)]
    found += [drift for uuid in nodes for drift in await database.write(allocation_audit.mend, uuid, now)]
    found += [drift for uuid in groups for drift in await database.write(allocation_audit.mend_group, uuid)]
    mended = [
        f"allocation {drift.kind} of {drift.where} {drift.what}: {drift.recorded} → {drift.actual}" for drift in found
    ]
    mended += [
        f"what is held of the NUMA cells and devices of node {node}"
        for node in await database.read(_wrong_topologies)
        if await database.write(topologies.mend, node, now)
    ]
    for project in projects:
        mended += [
            f"quota usage of project {project}, {usage.resource}: {usage.recorded} → {usage.actual}"
            for usage in await database.write(quotas.recount, project)
        ]
    return mended


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


def _oversold(each: allocation_audit.Oversold) -> Finding:
    """Say of what a node has less than is used. Operations do not matter: no claim takes what is not there."""
    if each.host is not None:
        where, mend = "node", "Migrate servers away, give the host back what it lost, or raise the allocation ratio."
    else:
        where, mend = "resource provider", "Move its consumers away, or give it back what it lost."
    message = (
        f"The {where} {each.provider} has a capacity of {each.capacity} {each.resource_class} (total {each.total}, "
        f"reserved {each.reserved}, allocation ratio {each.ratio:g}), and {each.used} are used. {mend}"
    )
    return Finding(kind="oversold", subject=each.host or each.provider, message=message)


def _topologies(conn: sa.Connection, busy: set[str]) -> list[Finding]:
    """Return hosts that have less than their servers hold, counters that are wrong, and servers without their part."""
    findings = []
    hosts = {row.uuid: row.host for row in conn.execute(sa.select(compute_nodes.c.uuid, compute_nodes.c.host))}
    holding = {
        (row.consumer_uuid, row.node_uuid)
        for row in conn.execute(sa.select(allocations.c.consumer_uuid, allocations.c.node_uuid).distinct())
    }
    placed = set()
    for node in topologies.all_claims(conn):
        subject = hosts.get(node.node_uuid, node.node_uuid)
        placed |= set(node.consumers)
        findings += [
            Finding(kind="topology", subject=subject, message=f"The host lacks what its servers hold: {each}")
            for each in lacking(node.topology, node.claimed)
        ]
        if node.held != node.claimed:
            message = f"Of the NUMA cells and devices {node.held} is recorded as held, {node.claimed} is true."
            findings.append(Finding(kind="topology", subject=subject, message=message))
        findings += [
            Finding(kind="topology", subject=uuid, message=f"CPUs or devices of {subject} are held without a claim.")
            for uuid in node.consumers
            if (uuid, node.node_uuid) not in holding and uuid not in busy
        ]
    # What other services take through the Placement API are amounts only.
    dedicated = sa.select(allocations.c.consumer_uuid).where(
        allocations.c.resource_class == "PCPU", allocations.c.consumer_uuid.not_in(sa.select(consumers.c.uuid))
    )
    findings += [
        Finding(kind="topology", subject=uuid, message="The server holds dedicated CPUs, and none is named.")
        for uuid in conn.execute(dedicated).scalars()
        if uuid not in placed and uuid not in busy
    ]
    return findings


def _misplaced(conn: sa.Connection, busy: set[str]) -> list[Finding]:
    """Return servers whose allocations are not on the node that they run on."""
    held: dict[str, set[str]] = {}
    # What a server holds of other providers of its node's tree is not where it runs.
    of_nodes = sa.select(allocations.c.consumer_uuid, allocations.c.node_uuid).distinct()
    for consumer, node in conn.execute(of_nodes.join(compute_nodes, compute_nodes.c.uuid == allocations.c.node_uuid)):
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


def _unfinished_moves(conn: sa.Connection, servers: _Servers) -> list[Finding]:
    """Return open migrations that nobody continues; note the guests that sources keep until the confirmation."""
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
            findings.append(Finding(kind="migration", subject=migration["uuid"], message=message))
            continue
        if held.get(migration["uuid"], set()) != {migration["source_node_uuid"]}:
            message = f"The migration of server {uuid} does not hold the resources of its source."
            findings.append(Finding(kind="allocation", subject=migration["uuid"], message=message))
        if migration["source_compute"] != migration["dest_compute"]:
            servers.kept.setdefault(migration["source_compute"], set()).add(uuid)
    return findings


def _compare_guests(host: str, guests: tuple[Guest, ...], servers: _Servers) -> list[Finding]:
    recorded, busy = servers.by_host.get(host, {}), servers.busy
    kept = servers.kept.get(host, set())
    held = {guest.uuid for guest in guests}
    findings = [
        Finding(kind="guest", subject=guest.uuid, message=f"{host} has a guest of a server that is not there.")
        for guest in guests
        if guest.uuid not in {*recorded, *kept} and guest.uuid not in busy and (host, guest.uuid) not in servers.leaving
    ]
    findings += [
        Finding(kind="guest", subject=uuid, message=f"{host} has lost the guest to which a resize can be reverted.")
        for uuid in sorted(kept - held - busy)
    ]
    for uuid, server in recorded.items():
        if uuid not in held and uuid not in busy and server.vm_state in states.NEEDS_GUEST:
            message = f"{host} has no guest for a server that is {server.vm_state}."
            findings.append(Finding(kind="guest", subject=uuid, message=message))
    return findings


def _not_removed(host: str, guests: tuple[Guest, ...], servers: _Servers, before: int) -> list[Finding]:
    """Return guests of servers that left a host before a time: it removes them with its next heartbeats, if it can.

    They are named whatever else works on these servers: a move is not undone before they are removed.
    """
    findings = []
    for guest in guests:
        epoch, since = servers.leaving.get((host, guest.uuid), (-1, before))
        if guest.epoch <= epoch and since < before:
            message = f"{host} has not removed the guest of a server that has left it."
            findings.append(Finding(kind="guest", subject=guest.uuid, message=message))
    return findings


class _Looks:
    """Compares guests with their servers, and looks twice: hosts report power changes a moment after they happen."""

    def __init__(
        self, database: Database, compute: ComputeAPI, clock: Clock, service_down_time: float, undisturbed: float
    ) -> None:
        self._database = database
        self._compute = compute
        self._clock = clock
        self._pause = service_down_time / 4  # hosts send several heartbeats meanwhile
        self._undisturbed = undisturbed

    async def differing(self, answers: Mapping[str, tuple[Guest, ...] | str], servers: _Servers) -> list[Finding]:
        """Return guests that differ from their servers for longer than a report takes."""
        first = _differing(answers, servers)
        if not first:
            return []
        await self._clock.sleep(self._pause)
        begun = self._clock.now()
        again = await guests_of_all(self._compute, sorted({host for host, _ in first}), no_progress)
        _, then = await self._database.snapshot(_inside, begun, self._undisturbed)
        second = _differing(again, then)
        by_hand = await self._database.read(_set_by_hand, sorted({uuid for _, uuid in second}))
        return [
            Finding(kind="guest", subject=uuid, message=difference.message)
            for (host, uuid), difference in second.items()
            if first.get((host, uuid)) == difference and not (difference.of_vm_state and uuid in by_hand)
        ]


class _Difference(NamedTuple):
    """In what a guest differs from its server."""

    message: str
    of_vm_state: bool  # the power state is known, and the vm state is another: somebody may have set it


def _set_by_hand(conn: sa.Connection, servers: Sequence[str]) -> set[str]:
    """Return those of the servers whose state an administrator has set since their guests were made."""
    reset = instance_actions.c.action == "resetState"
    query = sa.select(instances.c.uuid).join(instance_actions, instance_actions.c.instance_uuid == instances.c.uuid)
    since = query.where(one_of(instances.c.uuid, "servers"), reset)
    since = since.where(instance_actions.c.start_time >= instances.c.launched_at)
    return set(conn.execute(since, {"servers": list(servers)}).scalars())


def _differing(answers: Mapping[str, tuple[Guest, ...] | str], servers: _Servers) -> dict[tuple[str, str], _Difference]:
    """Return in what guests differ from their servers, by host and server, if no operation works on them."""
    found: dict[tuple[str, str], _Difference] = {}
    for host, guests in answers.items():
        recorded = servers.by_host.get(host, {})
        for guest in guests if not isinstance(guests, str) else ():
            server = recorded.get(guest.uuid)
            if server is None or guest.uuid in servers.busy:
                continue
            difference = _difference(host, guest, server)
            if difference is not None:
                found[host, guest.uuid] = difference
    return found


def _difference(host: str, guest: Guest, server: _Recorded) -> _Difference | None:
    """Return in what a guest differs from its server: in its size, if it has one or uses it, or in its power state."""
    size, needed = (guest.vcpus + guest.pcpus, guest.memory_mb), server.vm_state in states.NEEDS_GUEST
    runs = guest.power_state in (power_state.RUNNING, power_state.PAUSED)
    # Not all drivers tell the size. A guest that runs uses it, whatever its server is: the claim is the flavor's.
    if (needed or runs) and all(size) and size != (server.vcpus, server.memory_mb):
        return _Difference(
            f"The guest on {host} has {size[0]} CPUs and {size[1]} MB, and the server's flavor "
            f"{server.vcpus} CPUs and {server.memory_mb} MB.",
            of_vm_state=False,
        )
    follows = states.after_power_change(server.vm_state, guest.power_state) == server.vm_state
    if not needed or (follows and guest.power_state != power_state.NOSTATE):
        return None
    power = power_state.NAMES.get(guest.power_state, str(guest.power_state))
    return _Difference(
        f"The guest on {host} is {power}, and the server is {server.vm_state}.",
        of_vm_state=guest.power_state == server.power_state,
    )
