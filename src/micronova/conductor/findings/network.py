"""Ports of servers that are gone, ports without what they ask for, and what network agents cannot do."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.finding import Finding, RepairDependencies, RepairKind, Repairs, offer, refuse_busy
from micronova.conductor.findings.servers import Servers
from micronova.db import instances, port_claims
from micronova.db.engine import Database
from micronova.objects.errors import Conflict, Unavailable
from micronova.objects.port_resources import BoundPort

MOST, LONGEST = 100, 1000
"""Faults of one agent that are findings, and characters of each."""


class PortsOfServer(msgspec.Struct, frozen=True):
    """The ports of a server that is gone."""

    server: str


class Ports(Protocol):
    """The part of the network client that the audit uses."""

    async def list_server_ports(self) -> list[dict[str, Any]]:
        """Return every port that belongs to a server: id and device_id."""

    async def bound_ports(self) -> list[BoundPort]:
        """Return the bound ports of servers that ask for resources, or are bound with a provider of them."""

    async def list_network_agents(self) -> list[dict[str, Any]]:
        """Return host, alive and configurations of each of our network agents."""


async def compare_ports(database: Database, listed: Sequence[dict[str, Any]], servers: Servers) -> list[Finding]:
    """Return the ports of servers that are gone.

    One that the database does not know may be newer than the database, which was restored: its guest may use them.
    """
    known = servers.known | servers.busy
    gone = [(port["id"], port["device_id"]) for port in listed if port["device_id"] not in known]
    if not gone:
        return []
    deleted = await database.read(instances.get_many_deleted, sorted({server for _, server in gone}))
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
        for id, server in gone
    ]


def compare_bound_ports(conn: sa.Connection, bound: Iterable[BoundPort], servers: Servers) -> list[Finding]:
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


async def _remove_ports(dependencies: RepairDependencies, about: PortsOfServer) -> str:
    server = about.server

    def refuse_known(conn: sa.Connection) -> None:
        refuse_busy(conn, server)
        if instances.get(conn, server) is not None:
            raise Conflict(f"There is a server {server}: its ports stay.")

    async def check() -> None:
        await dependencies.database.read(refuse_known)

    if dependencies.network is None:
        raise Unavailable("There is no network service.")
    await check()
    await dependencies.network.deallocate(server, check=check)
    return f"removed the ports of server {server}"


REPAIRS: Repairs = {"ports": RepairKind(PortsOfServer, _remove_ports)}


def compare_agents(agents: Sequence[dict[str, Any]], up: Sequence[str]) -> list[Finding]:
    """Return agents that do not report although their host is up, and what agents cannot do."""
    findings, hosts_up = [], set(up)
    for agent in agents:
        host = agent["host"]
        if not agent["alive"] and host in hosts_up:
            findings.append(
                Finding(
                    kind="network",
                    subject=host,
                    message="The network agent does not report.",
                    advice="Look at its log on the host, and start it again.",
                )
            )
        faults = (agent.get("configurations") or {}).get("faults", ())
        if isinstance(faults, list | tuple):  # a host can report anything
            findings += [Finding(kind="network", subject=host, message=str(each)[:LONGEST]) for each in faults[:MOST]]
    return findings
