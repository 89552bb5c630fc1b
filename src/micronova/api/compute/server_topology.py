"""The NUMA topology of servers (since 2.78): what flavor and image ask for, and the memory pages that it got.

Where on its host a server is (host_node and cpu_pinning) those see whom policy allows it. A server without a host is
nowhere.
"""

from typing import Any

import msgspec

from micronova.api.compute.server_lookup import authorized_server, server_target
from micronova.api.inputs import STRICT, NoQuery
from micronova.db import topologies
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import GuestCell, cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceRow
from micronova.objects.topology import Assignment

_NODE = {
    "vcpu_set": list[int],
    "siblings": list[list[int]],
    "memory_mb": int,
    "host_node?": int,
    "cpu_pinning?": dict[str, int],
}
_ANSWER = {"nodes": [_NODE], "pagesize_kb": int | None}
_HOST_RULE = "compute:server:topology:host:index"


def routes(database: Database) -> list[Route]:
    """Declare the route."""

    async def show(request: Request, id: str) -> dict[str, Any]:
        """Show the NUMA nodes of a server."""
        row = await authorized_server(database, request, id)
        found = await database.read(topologies.assignments_of, [row["uuid"]])
        assignment = found[row["uuid"]][1] if row["uuid"] in found else None
        return _topology(row, assignment, shows_host=request.allows(server_target(row), _HOST_RULE))

    return [
        Route(
            method="GET", path="/servers/{id}/topology", handler=show, policy="compute:server:topology:index",
            checks_policy=True, query=NoQuery, strict_query=STRICT, versions=since(78), answer=_ANSWER,
        )
    ]  # fmt: skip


def _topology(row: InstanceRow, assignment: Assignment | None, *, shows_host: bool) -> dict[str, Any]:
    flavor = msgspec.convert(row["flavor"], Flavor)
    image = msgspec.convert(row["image"], ImageMeta) if row["image"] else None
    wanted = cpu_request(GuestProperties(flavor, image), flavor.vcpus, flavor.ram)

    def siblings(cell: GuestCell) -> list[list[int]]:
        threads = wanted.threads if wanted.pinned and wanted.threads > 1 else 0
        return [list(cell.vcpus[at : at + threads]) for at in range(0, len(cell.vcpus), threads)] if threads else []

    placed = {} if assignment is None else {cell.id: cell for cell in assignment.cells}

    def place(cell: GuestCell) -> dict[str, Any]:
        if not shows_host or cell.id not in placed:
            return {}
        found = placed[cell.id]
        return {"host_node": found.host, "cpu_pinning": {str(vcpu): cpu for vcpu, cpu in found.pins.items()}}

    pages = [cell.page_kib for cell in placed.values() if cell.page_kib is not None]
    if not pages and isinstance(wanted.page_size, int):
        pages = [wanted.page_size]
    return {
        "nodes": [
            {"vcpu_set": list(cell.vcpus), "siblings": siblings(cell), "memory_mb": cell.memory_mb, **place(cell)}
            for cell in wanted.cells
        ],
        "pagesize_kb": pages[0] if pages else None,
    }
