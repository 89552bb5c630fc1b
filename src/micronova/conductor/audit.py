"""The audit: compares what should be with what is, and lists every leak and contradiction.

It reads the database (operations, instances, allocations, quota usage), asks every living host what its hypervisor
really holds, asks a conductor for how long it has worked undisturbed, asks the network service for the ports of
servers, for what these ask for, and for what its agents cannot do, asks the volume service for the attachments of
servers, and asks the image service for images that could not be made, and for those of servers that have no other disk.
Whatever has a running operation is left alone: there the two sides may differ for a moment. What does not answer is a
finding of the kind "unasked", and the rest is compared without it. `findings/` has a module for each thing that is
compared, with its repairs.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.findings.claims import misplaced, oversold, topologies_of
from micronova.conductor.findings.counters import drifted_counters
from micronova.conductor.findings.finding import UNASKED, Finding
from micronova.conductor.findings.guests import PowerStateComparison, compare_guests, not_removed
from micronova.conductor.findings.images import AuditedImages, compare_images
from micronova.conductor.findings.misplaced_guests import misplaced_guests
from micronova.conductor.findings.network import AuditedNetwork, compare_agents, compare_bound_ports, compare_ports
from micronova.conductor.findings.servers import RecordedServers, compare_servers, late_operations
from micronova.conductor.findings.volumes import AuditedVolumes, compare_volumes
from micronova.conductor.host_guests import Answers, ReportProgress, answered, guests_of_all, hosts_up, no_progress
from micronova.conductor.rpcapi import ProbeAPI
from micronova.db import allocation_audit
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import MicronovaError
from micronova.objects.network import NetworkAgent
from micronova.objects.port_resources import BoundPort

CONDUCTOR_TIMEOUT = 10.0
"""Seconds in which a conductor has to answer."""

T = TypeVar("T")


async def audit(
    database: Database,
    compute: ComputeAPI | None,
    conductor: ProbeAPI | None,
    clock: Clock,
    *,
    service_down_time: float,
    network: AuditedNetwork | None = None,
    images: AuditedImages | None = None,
    volumes: AuditedVolumes | None = None,
    progress: ReportProgress = no_progress,
    image_progress: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Return all findings; the list is empty if nothing is wrong.

    `progress` is told how many hosts have answered, `image_progress` about how many images the image service has.
    Without a broker there is neither `compute` nor `conductor`.
    """
    begun = clock.now()
    unasked: list[Finding] = []
    alive = await hosts_up(database, clock, service_down_time)
    answers: Answers = {}
    if compute is not None:
        answers = await guests_of_all(compute, alive, progress)
        unasked += [
            Finding(kind=UNASKED, subject=host, message=f"The host does not answer: {guests}", advice=_HOST_SILENT)
            for host, guests in answers.items()
            if isinstance(guests, str)
        ]
    servers_of_ports: dict[str, str] = {}
    agents: list[NetworkAgent] = []
    bound: list[BoundPort] = []
    if network is not None:
        servers_of_ports = await _asked("network", network.servers_of_ports, unasked, servers_of_ports)
        bound = await _asked("network", network.bound_ports, [], bound)
        agents = await _asked("network", network.list_network_agents, [], agents)
    # Hypervisors and ports are read before the database, which then knows what was built meanwhile.
    undisturbed, no_answer = await _undisturbed(conductor) if conductor is not None else (0.0, [])
    findings, servers = await database.snapshot(compare_records, begun, undisturbed, bound)
    findings += no_answer
    if images is not None:
        findings += await _asked("image", lambda: compare_images(database, images, image_progress), unasked, [])
    if volumes is not None:
        findings += await _asked("volume", lambda: compare_volumes(database, clock, volumes, answers), unasked, [])
    for host, guests in answered(answers):
        findings += compare_guests(host, guests, servers)
        findings += not_removed(host, guests, servers, micros(begun - service_down_time))
    findings += await misplaced_guests(database, answers, servers)
    if compute is not None:
        power_states = PowerStateComparison(database, compute, clock, service_down_time, _read_servers)
        findings += await power_states.differing(answers, servers)
    findings += await compare_ports(database, servers_of_ports, servers)
    return findings + compare_agents(agents, alive) + unasked


def compare_records(
    conn: sa.Connection, begun: float, undisturbed: float, bound: Sequence[BoundPort] = ()
) -> tuple[list[Finding], RecordedServers]:
    """Return the contradictions within the database, and with bound ports, and what it knows of servers."""
    since = micros(begun)
    findings, servers = compare_servers(conn, since)
    findings += late_operations(conn, since, undisturbed)
    findings += drifted_counters(conn, servers.busy)
    findings += [oversold(each) for each in allocation_audit.oversold(conn)]
    findings += topologies_of(conn, servers.busy)
    findings += misplaced(conn, servers.busy)
    findings += compare_bound_ports(conn, bound, servers)
    return findings, servers


def _read_servers(conn: sa.Connection, begun: float) -> RecordedServers:
    return compare_servers(conn, micros(begun))[1]


_START = "Start one, or look at its log."
_AGAIN = "Repeat the audit when it answers."
_HOST_SILENT = "Look at its log, and repeat the audit when it answers."


async def _asked(service: str, ask: Callable[[], Awaitable[T]], unasked: list[Finding], without: T) -> T:
    """Return what a service answers; if it does not, note that and return `without`."""
    try:
        return await ask()
    except MicronovaError as error:
        message = f"The {service} service was not compared: {error.message}"
        unasked.append(Finding(kind=UNASKED, subject=service, message=message, advice=_AGAIN))
        return without


async def _undisturbed(conductor: ProbeAPI) -> tuple[float, list[Finding]]:
    """Return for how many seconds a conductor has worked without an outage; 0 and a finding if none answers."""
    try:
        return (await conductor.ping(CONDUCTOR_TIMEOUT)).undisturbed, []
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        finding = Finding(
            kind="conductor",
            subject="all",
            message=f"No conductor answers: {error}",
            advice=_START,
        )
        return 0.0, [finding]
