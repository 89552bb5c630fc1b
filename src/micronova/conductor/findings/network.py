"""Ports of servers that are gone, ports without what they ask for, and what network agents cannot do."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.finding import Finding, RepairDependencies, RepairKind, Repairs, offer, refuse_busy
from micronova.conductor.findings.servers import RecordedServers
from micronova.db import instances, port_claims
from micronova.db.engine import Database
from micronova.objects.errors import Conflict, Unavailable
from micronova.objects.network import NetworkAgent
from micronova.objects.port_resources import BoundPort

MOST_FAULTS = 100
"""Faults of one agent that are findings."""
LONGEST_FAULT = 1000
"""Characters of a fault that are shown."""


class PortsOfServer(msgspec.Struct, frozen=True):
    """The ports of a server that is gone."""

    server: str


class AuditedNetwork(Protocol):
    """The part of the network client that the audit uses."""

    async def servers_of_ports(self) -> dict[str, str]:
        """Return the server of each port that belongs to one, by the port's id."""

    async def bound_ports(self) -> list[BoundPort]:
        """Return the bound ports of servers that ask for resources, or are bound with a provider of them."""

    async def list_network_agents(self) -> list[NetworkAgent]:
        """Return our own network agents."""


async def compare_ports(
    database: Database, servers_of_ports: Mapping[str, str], servers: RecordedServers
) -> list[Finding]:
    """Return the ports of servers that are gone.

    If the database was restored from a backup, a server that it does not know may be newer, and its guest may use its
    ports.
    """
    known = servers.known | servers.busy
    gone = {port: server for port, server in servers_of_ports.items() if server not in known}
    if not gone:
        return []
    deleted = await database.read(instances.get_many_deleted, sorted(set(gone.values())))
    return [
        Finding(
            kind="port",
            subject=id,
            message=f"The port belongs to server {server}, which "
            f"{'is gone' if server in deleted else 'the database does not know: it may be newer'}.",
            repairs=(
                offer(
                    "ports",
                    PortsOfServer(server),
                    f"Remove the ports of server {server}: those made for it are deleted, others are unbound.",
                    destroys=server not in deleted,
                ),
            ),
        )
        for id, server in gone.items()
    ]


def compare_bound_ports(conn: sa.Connection, bound: Iterable[BoundPort], servers: RecordedServers) -> list[Finding]:
    """Return the ports for which their servers do not hold what they ask for, or are bound with."""
    compared = [port for port in bound if port.server in servers.known and port.server not in servers.busy]
    findings = []
    for each in port_claims.unheld(conn, compared):
        if each.resource_class:
            where = f" of resource provider {each.provider}" if each.provider else ""
            text = f"holds {each.held} of the {each.wanted} {each.resource_class}{where} that its ports ask for."
        else:
            text = f"holds nothing of resource provider {each.provider}, which the port is bound with."
        findings.append(
            Finding(
                kind="port",
                subject=each.port_id,
                message=f"Server {each.server} {text}",
                advice="Migrate the server: the new claim has what its ports ask for, and they are bound with it.",
            )
        )
    return findings


def compare_agents(agents: Iterable[NetworkAgent], up: Sequence[str]) -> list[Finding]:
    """Return agents that do not report although their host is up, and what agents cannot do."""
    findings, hosts_up = [], set(up)
    for agent in agents:
        if not agent.alive and agent.host in hosts_up:
            findings.append(
                Finding(
                    kind="network",
                    subject=agent.host,
                    message="The network agent does not report.",
                    advice="Look at its log on the host, and start it again.",
                )
            )
        findings += [
            Finding(kind="network", subject=agent.host, message=fault[:LONGEST_FAULT])
            for fault in agent.faults[:MOST_FAULTS]
        ]
    return findings


async def _remove_ports(dependencies: RepairDependencies, about: PortsOfServer) -> str:
    server = about.server

    def refuse_known(conn: sa.Connection) -> None:
        refuse_busy(conn, server)
        if instances.get(conn, server) is not None:
            raise Conflict(f"There is a server {server}: its ports stay.")

    async def check() -> None:
        await dependencies.database.read(refuse_known)

    if dependencies.network_client is None:
        raise Unavailable("There is no network service.")
    await check()
    await dependencies.network_client.deallocate(server, check=check)
    return f"removed the ports of server {server}"


REPAIRS: Repairs = {"ports": RepairKind(PortsOfServer, _remove_ports)}
