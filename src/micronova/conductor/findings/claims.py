"""Claims: what hosts have less than their servers hold, and servers that hold it elsewhere."""

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.counters import wrong_topology
from micronova.conductor.findings.finding import Finding, RepairDependencies, RepairKind, Repairs, offer, refuse_busy
from micronova.db import allocation_audit, topologies
from micronova.db import allocations as allocation_rows
from micronova.db import instances as instance_rows
from micronova.db import operations as operation_rows
from micronova.db.claims import Claim, claim
from micronova.db.tables import allocations, compute_nodes, consumers, instances
from micronova.objects.context import Context
from micronova.objects.errors import Conflict, Unavailable
from micronova.objects.fitting import lacking
from micronova.objects.ids import new_uuid
from micronova.objects.operations import BIND_PORTS
from micronova.objects.pci_devices import Alias
from micronova.objects.port_resources import PortResources
from micronova.objects.scheduling import Selection


class PartsOf(msgspec.Struct, frozen=True):
    """The CPUs and devices that a consumer holds without a claim."""

    consumer: str


class ClaimOf(msgspec.Struct, frozen=True):
    """The claim of a server."""

    server: str


def oversold(each: allocation_audit.Oversold) -> Finding:
    """Say of what a node has less than is used. Operations do not matter: no claim takes what is not there."""
    if each.host is not None:
        where, advice = "node", "Migrate servers away, give the host back what it lost, or raise the allocation ratio."
    else:
        where, advice = "resource provider", "Move its consumers away, or give it back what it lost."
    message = (
        f"The {where} {each.provider} has a capacity of {each.capacity} {each.resource_class} (total {each.total}, "
        f"reserved {each.reserved}, allocation ratio {each.ratio:g}), and {each.used} are used."
    )
    return Finding(kind="oversold", subject=each.host or each.provider, message=message, advice=advice)


def topologies_of(conn: sa.Connection, busy: set[str]) -> list[Finding]:
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
            Finding(
                kind="topology",
                subject=subject,
                message=f"The host lacks what its servers hold: {each}",
                advice="Give the host back what it lost, or migrate these servers.",
            )
            for each in lacking(node.topology, node.claimed)
        ]
        if node.held != node.claimed:
            findings.append(wrong_topology(node, subject))
        findings += [
            Finding(
                kind="topology",
                subject=uuid,
                message=f"CPUs or devices of {subject} are held without a claim.",
                repairs=(offer("parts", PartsOf(uuid), "Release these CPUs and devices."),),
            )
            for uuid in node.consumers
            if (uuid, node.node_uuid) not in holding and uuid not in busy
        ]
    # What other services take through the Placement API are amounts only.
    dedicated = sa.select(allocations.c.consumer_uuid).where(
        allocations.c.resource_class == "PCPU", allocations.c.consumer_uuid.not_in(sa.select(consumers.c.uuid))
    )
    findings += [
        Finding(
            kind="topology",
            subject=uuid,
            message="The server holds dedicated CPUs, and none is named.",
            advice="Migrate the server: the new claim names its CPUs.",
        )
        for uuid in conn.execute(dedicated).scalars()
        if uuid not in placed and uuid not in busy
    ]
    return findings


def misplaced(conn: sa.Connection, busy: set[str]) -> list[Finding]:
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
            wanted = f"Claim on {node} what the flavor and the ports need, and release everything else."
            findings.append(
                Finding(
                    kind="allocation",
                    subject=uuid,
                    message=f"The server is on {node or 'no node'} and holds resources on "
                    f"{', '.join(sorted(held.get(uuid, ()))) or 'none'}.",
                    repairs=(offer("claim", ClaimOf(uuid), wanted if node else "Release what the server holds."),),
                )
            )
    return findings


async def _release_parts(dependencies: RepairDependencies, about: PartsOf) -> str:
    consumer = about.consumer

    def release(conn: sa.Connection) -> bool:
        allocation_rows.lock_instances(conn, [consumer])
        refuse_busy(conn, consumer)
        if allocation_rows.get_many(conn, [consumer]) or not topologies.assignments_of(conn, [consumer]):
            return False
        topologies.release(conn, consumer, dependencies.now())
        return True

    return f"released CPUs and devices of {consumer}" if await dependencies.database.write(release) else ""


async def _claim_anew(dependencies: RepairDependencies, about: ClaimOf) -> str:
    server = about.server
    ports, operation = await ports_of(dependencies, server), new_uuid(dependencies.random)
    return await dependencies.database.write(
        claim_anew, server, ports, operation, dependencies.pci_aliases, dependencies.now()
    )


async def ports_of(dependencies: RepairDependencies, server: str) -> tuple[PortResources, ...]:
    """Return what the ports of a server ask of its host now; raise Unavailable if there is no service to ask."""
    row = await dependencies.database.read(instance_rows.get_existing, server)
    if not row["network_info"]:
        return ()
    if dependencies.network_client is None:
        raise Unavailable(f"Server {server} has ports, and no network service is configured here to ask about them.")
    return await dependencies.network_client.resources_of_server(server)


def claim_anew(
    conn: sa.Connection,
    server: str,
    ports: tuple[PortResources, ...],
    operation: str,
    aliases: Mapping[str, Alias],
    now: int,
) -> str:
    """Let a server hold of the node that it is on what its flavor and its ports ask for, and nothing else.

    Record the operation with this id, by which a conductor binds its ports to the host, with the providers that serve
    them. Return what was done.
    """
    row = instance_rows.lock_existing(conn, server)
    refuse_busy(conn, server)
    if row["host"] is None or row["node_uuid"] is None:
        allocation_rows.release(conn, server, now=now, group_uuid=row["server_group_id"])
        return f"released what server {server} held"
    spec = instance_rows.request_spec(conn, server)
    if spec is None:
        raise Conflict(f"The request of server {server} is not recorded: migrate it, or build it anew.")
    selected = Selection(
        host=row["host"], node=row["node"] or "", node_uuid=row["node_uuid"], zone=row["availability_zone"] or ""
    )
    flavor = msgspec.convert(row["flavor"], type(spec.flavor))
    spec = msgspec.structs.replace(spec, flavor=flavor, ignore_status=True, ports=ports)
    wanted = Claim.of(server, selected, spec, row["epoch"], aliases=aliases)
    if wanted.topology is not None:
        raise Conflict(f"Server {server} has CPUs or devices of its own: migrate it, so that they are claimed anew.")
    result = claim(conn, [wanted], now=now)
    if not result.claimed:
        lack = ", ".join(str(each.resource_class or each.reason) for each in result.failures)
        raise Conflict(f"Host {row['host']} lacks room for server {server} ({lack}): migrate it, or another one.")
    if instance_rows.has_ports_or_volumes(conn, row) and operation_rows.get(conn, operation) is None:
        context = Context(request_id="req-repair", project_id=row["project_id"], user_id=row["user_id"])
        operation_rows.follow_up(
            conn, row["uuid"], BIND_PORTS, id=operation, epoch=row["epoch"], now=now, context=context
        )
    return f"server {server} holds what it asks for of node {row['node_uuid']}"


REPAIRS: Repairs = {"parts": RepairKind(PartsOf, _release_parts), "claim": RepairKind(ClaimOf, _claim_anew)}
