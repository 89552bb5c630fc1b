"""Diagnostics: what a server's hypervisor measures; each hypervisor has its own form until 2.47, all one since 2.48."""

from functools import partial
from typing import Any, get_type_hints

import msgspec

from micronova.api import inputs
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects.diagnostics import (
    CpuDiagnostics,
    DiskDiagnostics,
    GuestDiagnostics,
    MemoryDiagnostics,
    NicDiagnostics,
)
from micronova.servers.guest_queries import GuestQueries

STANDARD = 48  # the minor version from which on all hypervisors use the same fields
KIB_PER_MIB = 1024
UNSHOWN = ("device", "serial")  # of a disk: the first is in the older form, both are for compute itself

_STANDARD = {
    **get_type_hints(GuestDiagnostics),
    "cpu_details": [get_type_hints(CpuDiagnostics)],
    "nic_details": [get_type_hints(NicDiagnostics)],
    "disk_details": [{name: kind for name, kind in get_type_hints(DiskDiagnostics).items() if name not in UNSHOWN}],
    "memory_details": get_type_hints(MemoryDiagnostics),
    "config_drive": bool,
    "num_nics": int,
    "num_disks": int,
}


def standard(found: GuestDiagnostics, config_drive: bool) -> dict[str, Any]:
    """Return the figures in the form of all hypervisors, since 2.48."""
    shown: dict[str, Any] = msgspec.to_builtins(found)
    for disk in shown["disk_details"]:
        for name in UNSHOWN:
            del disk[name]
    return {
        **shown,
        "config_drive": config_drive,
        "num_nics": len(found.nic_details),
        "num_disks": len(found.disk_details),
    }


def plain(found: GuestDiagnostics) -> dict[str, int]:
    """Return the figures as one flat list of numbers in libvirt's form, until 2.47."""
    shown: dict[str, int | None] = {f"cpu{cpu.id}_time": cpu.time for cpu in found.cpu_details}
    for disk in found.disk_details:
        shown |= {
            f"{disk.device}_read": disk.read_bytes,
            f"{disk.device}_read_req": disk.read_requests,
            f"{disk.device}_write": disk.write_bytes,
            f"{disk.device}_write_req": disk.write_requests,
            f"{disk.device}_errors": disk.errors_count,
        }
    for number, nic in enumerate(found.nic_details):
        shown |= {
            f"vnet{number}_{way}{suffix}": getattr(nic, f"{way}_{figure}")
            for way in ("rx", "tx")
            for suffix, figure in (("", "octets"), ("_packets", "packets"), ("_errors", "errors"), ("_drop", "drop"))
        }
    memory = found.memory_details
    if memory.maximum is not None:
        shown["memory"] = memory.maximum * KIB_PER_MIB
    if memory.used is not None:
        shown["memory-rss"] = memory.used * KIB_PER_MIB
    return {name: value for name, value in shown.items() if value is not None}


def routes(database: Database, guests: GuestQueries) -> list[Route]:
    """Return the route."""

    async def show(request: Request, id: str) -> dict[str, Any]:
        """Show a server's figures."""
        row = await authorized_server(database, request, id)
        found = await guests.diagnostics(request.context, row)
        return standard(found, bool(row["config_drive"])) if request.minor >= STANDARD else plain(found)

    route = partial(
        Route,
        method="GET",
        path="/servers/{id}/diagnostics",
        handler=show,
        policy="os_compute_api:os-server-diagnostics",
        checks_policy=True,
        query=inputs.NoQuery,
        strict_query=STRICT,
        errors=(501,),
    )
    return [
        route(versions=until(STANDARD - 1), answer=dict[str, int]),
        route(versions=since(STANDARD), answer=_STANDARD),
    ]
