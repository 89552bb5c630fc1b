"""The part of the audit about volumes: the volume service's attachments, the servers' devices, and what guests have."""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple, Protocol

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.finding import Finding, RepairDependencies, RepairKind, Repairs, offer, refuse_busy
from micronova.conductor.host_guests import Answers, answered
from micronova.db import instances as instance_rows
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.db.listed import one_of
from micronova.db.tables import block_devices, instances
from micronova.objects.block_device import BlockDevice
from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict, Unavailable
from micronova.objects.orders import Guest

ACCEPTED_WITHIN = 2.0
"""Seconds after which a request that reserves a volume is accepted or refused; then its reservation is looked for."""


class Attachment(msgspec.Struct, frozen=True):
    """An attachment of a volume to a server."""

    attachment: str
    server: str
    volume: str


class AuditedVolumes(Protocol):
    """The part of the volume client that the audit uses."""

    async def server_attachments(self) -> dict[str, tuple[str, str]]:
        """Return volume and server of every attachment of a server, by its id."""


class Devices(NamedTuple):
    """What the database knows of the volumes of servers."""

    known: Mapping[str, str | None]  # servers with attachments, or whose guests have volumes, with their hosts
    gone: Set[str]  # servers that have attachments, and are deleted
    busy: Set[str]  # servers with an operation, which are left alone
    by_server: Mapping[str, list[BlockDevice]]


def _devices(conn: sa.Connection, attached: Set[str], using: Set[str]) -> Devices:
    """Return what is known of servers that have volumes, that attachments name, or whose guests are `using` volumes."""
    by_server: dict[str, list[BlockDevice]] = {}
    rows = conn.execute(
        sa.select(block_devices.c.instance_uuid, block_devices.c.device).where(block_devices.c.volume_id.is_not(None))
    )
    for server, device in rows:
        by_server.setdefault(server, []).append(msgspec.convert(device, BlockDevice))
    named = {"uuids": sorted(attached | using)}
    hosts = conn.execute(sa.select(instances.c.uuid, instances.c.host).where(one_of(instances.c.uuid, "uuids")), named)
    known = {row.uuid: row.host for row in hosts}
    gone = set(instance_rows.get_many_deleted(conn, sorted(attached - known.keys())))
    return Devices(known, gone, operation_rows.busy_server_ids(conn), by_server)


async def compare_volumes(database: Database, clock: Clock, volumes: AuditedVolumes, answers: Answers) -> list[Finding]:
    """Return volumes whose attachments, devices and guests disagree.

    The API reserves volumes before it records their server. So the comparison is repeated after a while, and only what
    both find is returned.
    """

    using = {guest.uuid for _, guests in answered(answers) for guest in guests if guest.volumes}

    async def look() -> list[Finding]:
        attachments = await volumes.server_attachments()
        devices = await database.snapshot(_devices, {server for _, server in attachments.values()}, using)
        return _differences(attachments, devices, answers)

    first = await look()
    if not first:
        return []
    await clock.sleep(ACCEPTED_WITHIN)
    before = {(each.subject, each.message): each for each in first}
    return [each for each in await look() if before.get((each.subject, each.message)) == each]


def _differences(attachments: Mapping[str, tuple[str, str]], devices: Devices, answers: Answers) -> list[Finding]:
    found: list[Finding] = []
    recorded = {device.attachment_id for each in devices.by_server.values() for device in each}
    guests = _guests_of_servers(answers)
    for id, (volume, server) in attachments.items():
        # Users may write any id into an attachment of their own: one without a server of that id is not compared.
        if server in devices.busy or id in recorded or not (server in devices.known or server in devices.gone):
            continue
        why = "which does not have the volume" if server in devices.known else "which is gone"
        text = f"Delete attachment {id} of the volume."
        # The guest uses the volume, if the database was restored and the volume was attached after the backup.
        used = _may_use(server, volume, devices, answers, guests.get(server, ()))
        if used:
            text += f" {used}, and others can get the volume then."
        found.append(
            Finding(
                kind="volume",
                subject=volume,
                message=f"The volume has attachment {id} of server {server}, {why}.",
                repairs=(offer("attachment", Attachment(id, server, volume), text, destroys=bool(used)),),
            )
        )
    for server, held in devices.by_server.items():
        if server in devices.busy:
            continue
        for device in held:
            if device.attachment_id not in attachments:
                text = f"Server {server} has the volume, and the volume service has no such attachment."
                advice = f"Detach the volume: openstack server remove volume {server} {device.volume_id}"
                found.append(Finding(kind="volume", subject=str(device.volume_id), message=text, advice=advice))
    attached: dict[str, set[str]] = {}
    for volume, server in attachments.values():
        attached.setdefault(server, set()).add(volume)
    for of_server in guests.values():
        for host, guest in of_server:
            found += _of_guest(host, guest, devices, attached.get(guest.uuid, set()))
    return found


def _guests_of_servers(answers: Answers) -> dict[str, list[tuple[str, Guest]]]:
    """Return the guests of each server, with their hosts."""
    found: dict[str, list[tuple[str, Guest]]] = {}
    for host, guests in answered(answers):
        for guest in guests:
            found.setdefault(guest.uuid, []).append((host, guest))
    return found


def _may_use(
    server: str, volume: str, devices: Devices, answers: Answers, guests: Iterable[tuple[str, Guest]]
) -> str | None:
    """Return who may use a volume by an attachment that is not recorded; None if nobody does.

    `guests` are those of the server.
    """
    if volume in {device.volume_id for device in devices.by_server.get(server, ())}:
        return None  # it is used by the attachment that is recorded
    own = devices.known.get(server)
    if own is not None and not isinstance(answers.get(own), tuple):
        return f"The server's host {own} has not said whether the guest uses it"
    for host, guest in guests:
        if guest.volumes is None or volume in guest.volumes:
            return f"The guest on {host} uses it" if guest.volumes else f"The guest on {host} may use it"
    return None


def _of_guest(host: str, guest: Guest, devices: Devices, attached: Set[str]) -> list[Finding]:
    """Compare the volumes of a guest with those that its server has on this host, or that are `attached` to it.

    A host that a server has left keeps a guest for a while, whose volumes count for nothing.
    """
    held = devices.by_server.get(guest.uuid, ())
    if guest.volumes is None or guest.uuid in devices.busy or any(each.connected_host != host for each in held):
        return []
    wanted, has = {str(each.volume_id) for each in held}, set(guest.volumes)
    where = f"The guest of server {guest.uuid} on host {host}"
    found = [
        Finding(
            kind="volume",
            subject=each,
            message=f"{where} does not have the volume.",
            advice="Reboot the server with the type HARD.",
        )
        for each in sorted(wanted - has)
    ]
    if held or devices.known.get(guest.uuid) == host:
        found += [
            Finding(
                kind="volume",
                subject=each,
                message=f"{where} has the volume, which the server does not have.",
                advice="Stop the server, and start it.",
            )
            for each in sorted(has - wanted - attached)  # an attachment without a record is told of already
        ]
    return found


async def _delete_attachment(dependencies: RepairDependencies, about: Attachment) -> str:
    id, server = about.attachment, about.server
    if dependencies.volume_client is None:
        raise Unavailable("There is no volume service.")
    if id not in await dependencies.volume_client.attachments_of(server):
        return ""

    def refuse_held(conn: sa.Connection) -> None:
        refuse_busy(conn, server)
        if any(device.attachment_id == id for device in instance_rows.volumes_of(conn, server)):
            raise Conflict(f"Server {server} has attachment {id}: it stays.")

    await dependencies.database.read(refuse_held)
    await dependencies.volume_client.delete_attachment(id)
    return f"deleted attachment {id} of volume {about.volume}"


REPAIRS: Repairs = {"attachment": RepairKind(Attachment, _delete_attachment)}
