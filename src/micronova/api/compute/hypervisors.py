"""Hypervisors: the nodes that guests run on."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api import inputs
from micronova.api.compute.services import status
from micronova.api.inputs import HostName, NoQuery, Paged, Query
from micronova.api.links import LINKS, Links
from micronova.api.view import OMIT, Field, View
from micronova.db import nodes, services
from micronova.db.engine import Database
from micronova.db.listed import one_of
from micronova.db.nodes import NodeRow
from micronova.db.services import ServiceRow
from micronova.db.tables import instances
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.objects.clock import Clock, micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound, NotSupported
from micronova.objects.service_names import COMPUTE

PART = 500  # nodes that one read of all nodes takes
OLD = until(87)  # since 2.88 clients ask placement for amounts of resources


class Host(msgspec.Struct, frozen=True):
    """What the view of a node needs besides its row: the host's service and, if requested, the servers."""

    service: ServiceRow
    up: bool
    servers: list[dict[str, str]] | None = None
    uptime: str | None = None  # only when one node is shown: a list does not ask every host


UptimeOf = Callable[[RequestContext, str], Awaitable[str | None]]


def _service(row: NodeRow, host: Host, key: str) -> dict[str, Any]:
    found = host.service
    return {"id": getattr(found, key), "host": row.host, "disabled_reason": found.disabled_reason}


def _servers(row: NodeRow, host: Host, none: Any = OMIT) -> Any:
    return OMIT if host.servers is None else host.servers or none


_SERVICE = {"host": str, "disabled_reason": str | None}
_BRIEF = (
    Field("id", "id", until(52), type=int),
    Field("id", "uuid", since(53), type=str),
    Field("hypervisor_hostname", "hypervisor_hostname", type=str),
    Field("state", lambda row, host: "up" if host.up else "down", type=Literal["up", "down"]),
    Field("status", lambda row, host: status(host.service), type=Literal["enabled", "disabled"]),
    Field("servers", _servers, until(74), optional=True, type=[{"uuid": str, "name": str}]),
    # Since 2.75 a requested list of servers is shown even if it is empty.
    Field(
        "servers",
        lambda row, host: _servers(row, host, []),
        since(75),
        optional=True,
        type=[{"uuid": str, "name": str}],
    ),
)
BRIEF = View(*_BRIEF)
UPTIME = View(*_BRIEF, Field("uptime", lambda row, host: host.uptime, type=str))
FULL = View(
    *_BRIEF,
    Field("hypervisor_type", "hypervisor_type", type=str),
    Field("hypervisor_version", "hypervisor_version", type=int),
    Field("host_ip", "host_ip", type=str | None),
    Field("service", lambda row, host: _service(row, host, "id"), until(52), type={**_SERVICE, "id": int}),
    Field("service", lambda row, host: _service(row, host, "uuid"), since(53), type={**_SERVICE, "id": str}),
    Field("vcpus", "vcpus_total", OLD, type=int),
    Field("memory_mb", "memory_mb_total", OLD, type=int),
    Field("local_gb", "local_gb_total", OLD, type=int),
    Field("vcpus_used", lambda row, _: _used(row, "vcpus"), OLD, type=int),
    Field("memory_mb_used", lambda row, _: _used(row, "memory_mb"), OLD, type=int),
    Field("local_gb_used", lambda row, _: _used(row, "local_gb"), OLD, type=int),
    Field("free_ram_mb", lambda row, _: row.memory_mb_total - _used(row, "memory_mb"), OLD, type=int),
    Field("free_disk_gb", lambda row, _: row.local_gb_total - _used(row, "local_gb"), OLD, type=int),
    Field("current_workload", "current_workload", OLD, type=int),
    Field("running_vms", "guests", OLD, type=int),
    Field("disk_available_least", "disk_available_gb", OLD, type=int | None),
    Field("cpu_info", lambda row, _: msgspec.json.encode(row.cpu_info).decode(), until(27), type=str),
    Field("cpu_info", "cpu_info", Range(28, 87), type=dict[str, Any]),
    Field("uptime", lambda row, host: host.uptime, since(88), type=str | None),
)


_STATISTICS = dict.fromkeys(
    (
        "count",
        "current_workload",
        "disk_available_least",
        "free_disk_gb",
        "free_ram_mb",
        "local_gb",
        "local_gb_used",
        "memory_mb",
        "memory_mb_used",
        "running_vms",
        "vcpus",
        "vcpus_used",
    ),
    int,
)


def _used(row: NodeRow, resource: str) -> int:
    """Return the sum of what is claimed of a resource and what is reserved for the host."""
    claimed: int = getattr(row, f"{resource}_claimed")
    reserved: int = getattr(row, f"{resource}_reserved")
    return claimed + reserved


class ListQuery(Paged):
    """Filters and the page of a list."""

    versions = {
        "limit": since(33),
        "marker": since(33),
        "hypervisor_hostname_pattern": since(53),
        "with_servers": since(53),
    }
    once = since(53)

    hypervisor_hostname_pattern: HostName | UnsetType = UNSET
    with_servers: str | UnsetType = UNSET


class ShowQuery(Query):
    """Whether to list a node's servers, too."""

    versions = {"with_servers": since(53)}
    once = since(53)

    with_servers: str | UnsetType = UNSET


class Hypervisors:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, down_time: float, max_limit: int, uptime_of: UptimeOf) -> None:
        self._database = database
        self._uptime_of = uptime_of
        self._clock = clock
        self._down_time = down_time
        self._max_limit = max_limit

    async def index(self, request: Request) -> dict[str, Any]:
        """List nodes by name."""
        return await self._list(request, BRIEF, "os-hypervisors")

    async def detail(self, request: Request) -> dict[str, Any]:
        """List nodes with all fields."""
        return await self._list(request, FULL, "os-hypervisors/detail")

    async def _list(self, request: Request, view: View, path: str) -> dict[str, Any]:
        query: ListQuery = request.query
        pattern = query.hypervisor_hostname_pattern
        with_servers = _with_servers(query.with_servers)
        limit, marker = query.page(self._max_limit) if request.minor >= 33 else (None, None)
        if not isinstance(pattern, UnsetType):
            if marker is not None or not isinstance(query.limit, UnsetType):
                raise Invalid("Paging with the hypervisor_hostname_pattern query parameter is not supported.")
            found = await self._matching(pattern, with_servers)
            limit = None
        else:
            key = _marker(marker, request.minor)
            try:
                if limit is None:
                    found = await self._read_all(None, with_servers)
                else:
                    found, _ = await self._database.read(self._read, None, key, limit, with_servers)
            except NotFound:
                raise Invalid(f"marker [{marker}] not found") from None
        shape = view.at(request.minor)
        body: dict[str, Any] = {"hypervisors": [shape(row, host) for row, host in found]}
        if limit and len(found) == limit:
            last = found[-1][0]
            marker = last.uuid if request.minor >= 53 else str(last.id)
            body["hypervisors_links"] = Links(request).next(request, path, marker)
        return body

    async def _matching(self, pattern: str, with_servers: bool) -> list[tuple[NodeRow, Host]]:
        found = await self._read_all(pattern, with_servers)
        if not found:
            raise NotFound(f"No hypervisor matching '{pattern}' could be found.")
        return found

    async def _read_all(self, pattern: str | None, servers: bool) -> list[tuple[NodeRow, Host]]:
        """Read all nodes, or those that match, in parts, so that other requests are answered in between."""
        found: list[tuple[NodeRow, Host]] = []
        mark: int | None = None
        while True:
            part, mark = await self._database.read(self._read, pattern, mark, PART, servers)
            found += part
            if mark is None:
                return found

    def _read(
        self,
        conn: sa.Connection,
        pattern: str | None,
        marker: str | int | None,
        limit: int,
        servers: bool,
    ) -> tuple[list[tuple[NodeRow, Host]], int | None]:
        """Return nodes after a marker, and the number of the last one if more may follow."""
        rows = nodes.list_(conn, pattern=pattern, marker=marker, limit=limit)
        return self._with_hosts(conn, rows, servers), rows[-1].id if rows and len(rows) == limit else None

    def _with_hosts(self, conn: sa.Connection, rows: Sequence[NodeRow], servers: bool) -> list[tuple[NodeRow, Host]]:
        """Pair nodes with their hosts' services; nodes without a service are left out."""
        now = micros(self._clock.now())
        known = services.on_hosts(conn, COMPUTE, [row.host for row in rows])
        held = _servers_of(conn, rows) if servers else {}
        return [
            (
                row,
                Host(
                    known[row.host],
                    services.is_up(known[row.host], now, self._down_time),
                    held.get(row.uuid, []) if servers else None,
                ),
            )
            for row in rows
            if row.host in known
        ]

    async def _one(self, request: Request, id: str, servers: bool = False) -> tuple[NodeRow, Host]:
        key: str | int | None = id if request.minor >= 53 else inputs.numeric_id(id)
        if key is None:
            raise NotFound(f"Hypervisor with ID '{id}' could not be found.")
        if isinstance(key, str) and not inputs.is_uuid(key):
            raise Invalid(f"Invalid uuid {id[:64]}")
        found = await self._database.read(lambda conn: self._with_hosts(conn, [nodes.get(conn, key)], servers))
        if not found:
            raise NotFound(f"Hypervisor with ID '{id}' could not be found.")
        return found[0]

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a node."""
        row, host = await self._one(request, id, _with_servers(request.query.with_servers))
        if request.minor >= 88 and host.up:
            host = msgspec.structs.replace(host, uptime=await self._uptime_of(request.context, row.host))
        return {"hypervisor": FULL.at(request.minor)(row, host)}

    async def uptime(self, request: Request, id: str) -> dict[str, Any]:
        """Show a node's uptime (until 2.87)."""
        row, host = await self._one(request, id)
        if not host.up:
            raise Invalid(f"Compute service of {row.host} is unavailable at this time.")
        uptime = await self._uptime_of(request.context, row.host)
        if uptime is None:
            raise NotSupported("The hypervisor does not tell its uptime.")
        host = msgspec.structs.replace(host, uptime=uptime)
        return {"hypervisor": UPTIME.at(request.minor)(row, host)}

    async def search(self, request: Request, id: str) -> dict[str, Any]:
        """List nodes whose names contain a text (until 2.52)."""
        shape = BRIEF.at(request.minor)
        return {"hypervisors": [shape(row, host) for row, host in await self._matching(id, False)]}

    async def servers(self, request: Request, id: str) -> dict[str, Any]:
        """List nodes whose names contain a text, with their servers (until 2.52)."""
        shape = BRIEF.at(request.minor)
        return {"hypervisors": [shape(row, host) for row, host in await self._matching(id, True)]}

    async def statistics(self, request: Request) -> dict[str, Any]:
        """Show the sums over all nodes (until 2.87)."""
        sums = await self._database.read(nodes.statistics)
        free = {
            "free_disk_gb": sums["local_gb"] - sums["local_gb_used"],
            "free_ram_mb": sums["memory_mb"] - sums["memory_mb_used"],
        }
        return {"hypervisor_statistics": {**sums, **free}}


def _with_servers(value: str | UnsetType) -> bool:
    return False if isinstance(value, UnsetType) else inputs.boolean(value, "with_servers")


def _marker(marker: str | None, minor: int) -> str | int | None:
    if marker is None or minor >= 53:
        return marker
    number = inputs.numeric_id(marker)
    if number is None:
        raise Invalid(f"marker [{marker[:64]}] not found")
    return number


_SERVERS_OF_HOSTS = (
    sa.select(instances.c.node_uuid, instances.c.uuid)
    .where(one_of(instances.c.host, "hosts"), instances.c.node_uuid.is_not(None))
    .order_by(instances.c.created_at, instances.c.uuid)
)


def _servers_of(conn: sa.Connection, nodes: Sequence[NodeRow]) -> dict[str, list[dict[str, str]]]:
    """Return the servers on nodes, by node; the index of instances is by host."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in conn.execute(_SERVERS_OF_HOSTS, {"hosts": sorted({node.host for node in nodes})}):
        # The guest's name on the hypervisor, not the one that the user gave.
        found.setdefault(row.node_uuid, []).append({"uuid": row.uuid, "name": f"instance-{row.uuid[:8]}"})
    return found


def routes(
    database: Database, clock: Clock, uptime_of: UptimeOf, service_down_time: float, max_limit: int
) -> list[Route]:
    """Declare the routes of hypervisors; `uptime_of` asks a host for its uptime, None if the host has none."""
    handlers = Hypervisors(database, clock, service_down_time, max_limit, uptime_of)
    root, rule = "/os-hypervisors", "os_compute_api:os-hypervisors"
    one = f"{root}/{{id}}"
    listed = partial(Route, method="GET", query=ListQuery, strict_query=since(53))
    old = partial(Route, method="GET", query=NoQuery)
    return [
        listed(
            path=root,
            handler=handlers.index,
            policy=f"{rule}:list",
            answer={"hypervisors": [BRIEF], "hypervisors_links?": LINKS},
        ),
        listed(
            path=f"{root}/detail",
            handler=handlers.detail,
            policy=f"{rule}:list-detail",
            answer={"hypervisors": [FULL], "hypervisors_links?": LINKS},
        ),
        old(
            path=f"{root}/statistics",
            handler=handlers.statistics,
            policy=f"{rule}:statistics",
            versions=OLD,
            answer={"hypervisor_statistics": _STATISTICS},
        ),
        Route(
            method="GET",
            path=one,
            handler=handlers.show,
            policy=f"{rule}:show",
            query=ShowQuery,
            strict_query=since(53),
            answer={"hypervisor": FULL},
            errors=(500,),  # the hypervisor does not tell its uptime
        ),
        old(
            path=f"{one}/uptime",
            handler=handlers.uptime,
            policy=f"{rule}:uptime",
            versions=OLD,
            answer={"hypervisor": UPTIME},
            errors=(500, 501),
        ),
        old(
            path=f"{one}/search",
            handler=handlers.search,
            policy=f"{rule}:search",
            versions=until(52),
            answer={"hypervisors": [BRIEF]},
        ),
        old(
            path=f"{one}/servers",
            handler=handlers.servers,
            policy=f"{rule}:servers",
            versions=until(52),
            answer={"hypervisors": [BRIEF]},
        ),
    ]
