"""The NUMA topology of servers (since 2.78): what flavor and image ask for.

Where on its host a guest is (host_node and cpu_pinning, which Nova shows to admins) only the host knows.
"""

from typing import Any

import msgspec

from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT, NoQuery
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import GuestCell, cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceRow

_NODE = {"vcpu_set": list[int], "siblings": list[list[int]], "memory_mb": int}
_ANSWER = {"nodes": [_NODE], "pagesize_kb": int | None}


def routes(database: Database) -> list[Route]:
    """Declare the route."""

    async def show(request: Request, id: str) -> dict[str, Any]:
        """Show the NUMA nodes of a server."""
        return _topology(await authorized_server(database, request, id))

    return [
        Route(
            method="GET", path="/servers/{id}/topology", handler=show, policy="compute:server:topology:index",
            checks_policy=True, query=NoQuery, strict_query=STRICT, versions=since(78), answer=_ANSWER,
        )
    ]  # fmt: skip


def _topology(row: InstanceRow) -> dict[str, Any]:
    flavor = msgspec.convert(row["flavor"], Flavor)
    image = msgspec.convert(row["image"], ImageMeta) if row["image"] else None
    wanted = cpu_request(GuestProperties(flavor, image), flavor.vcpus, flavor.ram)

    def siblings(cell: GuestCell) -> list[list[int]]:
        threads = wanted.threads if wanted.pinned and wanted.threads > 1 else 0
        return [list(cell.vcpus[at : at + threads]) for at in range(0, len(cell.vcpus), threads)] if threads else []

    return {
        "nodes": [
            {"vcpu_set": list(cell.vcpus), "siblings": siblings(cell), "memory_mb": cell.memory_mb}
            for cell in wanted.cells
        ],
        "pagesize_kb": wanted.page_size if isinstance(wanted.page_size, int) else None,
    }
