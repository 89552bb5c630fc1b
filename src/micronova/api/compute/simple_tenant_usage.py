"""Usage of projects: hours of servers, multiplied by their memory, CPUs and disks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api import inputs
from micronova.api.inputs import Paged
from micronova.api.links import LINKS, Links
from micronova.db import usages
from micronova.db.engine import Database
from micronova.db.usages import ProjectTotals, UsedServer
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.instance import FlavorData

RULE = "os_compute_api:os-simple-tenant-usage"
PAGED = since(40)
FOUR_WEEKS = 28 * 24 * 3600 * 1_000_000
HOUR = 3600 * 1_000_000
PART = 1_000  # servers that are read at a time

_SERVER = {
    "instance_id": str, "name": str, "tenant_id": str, "flavor": str, "memory_mb": int, "vcpus": int, "local_gb": int,
    "hours": float, "started_at": str, "ended_at": str | None, "state": str, "uptime": int,
}  # fmt: skip
USAGE = {
    "tenant_id": str, "start": str, "stop": str, "total_hours": float, "total_memory_mb_usage": float,
    "total_vcpus_usage": float, "total_local_gb_usage": float, "server_usages?": [_SERVER],
}  # fmt: skip


class UsageQuery(Paged):
    """The time span, by default the last four weeks."""

    versions = {"limit": PAGED, "marker": PAGED}

    start: str | UnsetType = UNSET
    end: str | UnsetType = UNSET
    detailed: str | UnsetType = UNSET


class Span(msgspec.Struct, frozen=True):
    """A time span in microseconds since 1970 (UTC)."""

    begin: int
    end: int
    now: int


class SimpleTenantUsage:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, max_limit: int) -> None:
        self._database = database
        self._clock = clock
        self._max_limit = max_limit

    async def index(self, request: Request) -> dict[str, Any]:
        """Show what every project used."""
        # Nova accepts only "1" here.
        detailed = request.query.detailed == "1"
        if not detailed and request.minor not in PAGED:
            span = self._span(request.query)
            sums = await self._database.read(usages.totals, span.begin, span.end, span.now)
            return {"tenant_usages": [_shown(span, usage) for usage in sums]}
        span, rows, links = await self._used(request, "os-simple-tenant-usage", None)
        by_project: dict[str, list[UsedServer]] = {}
        for row in rows:
            by_project.setdefault(row.project_id, []).append(row)
        shown = [_total(project, of, span, detailed) for project, of in by_project.items()]
        return {"tenant_usages": shown, **({"tenant_usages_links": links} if links else {})}

    async def show(self, request: Request, project: str) -> dict[str, Any]:
        """Show what one project used."""
        request.authorize({"project_id": project})
        span, rows, links = await self._used(request, f"os-simple-tenant-usage/{project}", project)
        shown = _total(project, rows, span, True) if rows else {}
        return {"tenant_usage": shown, **({"tenant_usage_links": links} if links else {})}

    async def _used(
        self, request: Request, path: str, project: str | None
    ) -> tuple[Span, Sequence[UsedServer], list[dict[str, str]]]:
        query: UsageQuery = request.query
        span = self._span(query)
        used = partial(usages.used, begin=span.begin, end=span.end, project_id=project)
        if request.minor not in PAGED:
            return span, await self._read_all(used), []
        limit, marker = query.page(self._max_limit)

        def read(conn: sa.Connection) -> Sequence[UsedServer]:
            return used(conn, after=None if marker is None else usages.find_mark(conn, marker, project), limit=limit)

        try:
            rows = await self._database.read(read)
        except NotFound as error:
            raise Invalid(str(error)) from None
        more = bool(limit) and len(rows) == limit
        return span, rows, Links(request).next(request, path, rows[-1].uuid) if more else []

    async def _read_all(self, used: Callable[..., Sequence[UsedServer]]) -> list[UsedServer]:
        """Read all servers of a span in parts, so that other requests are answered in between."""
        rows: list[UsedServer] = []
        while True:
            after = (rows[-1].created_at, rows[-1].uuid) if rows else None
            page = await self._database.read(lambda conn, mark: used(conn, after=mark, limit=PART), after)
            rows += page
            if len(page) < PART:
                return rows

    def _span(self, query: UsageQuery) -> Span:
        now = micros(self._clock.now())
        end = now if isinstance(query.end, UnsetType) else inputs.moment(query.end, "end")
        begin = end - FOUR_WEEKS if isinstance(query.start, UnsetType) else inputs.moment(query.start, "start")
        if begin > end:
            raise Invalid("Invalid start time. The start time cannot occur after the end time.")
        return Span(begin, end, now)


def _hours(row: UsedServer, span: Span) -> float:
    """Return how long a server existed within the span."""
    ended = span.now if row.ended_at is None else row.ended_at
    began = max(span.begin, row.launched_at)
    return max(0, min(span.end, ended) - began) / HOUR


def _shown(span: Span, usage: ProjectTotals) -> dict[str, Any]:
    return {
        "tenant_id": usage.project_id,
        "start": iso_micros(span.begin),
        "stop": iso_micros(span.end),
        "total_hours": usage.hours,
        "total_memory_mb_usage": usage.memory_mb,
        "total_vcpus_usage": usage.vcpus,
        "total_local_gb_usage": usage.local_gb,
    }


def _total(project: str, rows: Sequence[UsedServer], span: Span, detailed: bool) -> dict[str, Any]:
    used = [(row, _hours(row, span)) for row in rows]
    usage = ProjectTotals(
        project,
        hours=sum(hours for _, hours in used),
        memory_mb=sum(hours * row.flavor["ram"] for row, hours in used),
        vcpus=sum(hours * row.flavor["vcpus"] for row, hours in used),
        local_gb=sum(hours * _local_gb(row.flavor) for row, hours in used),
    )
    total = _shown(span, usage)
    if detailed:
        total["server_usages"] = [_server(row, hours, span) for row, hours in used]
    return total


def _local_gb(flavor: FlavorData) -> int:
    return flavor["disk"] + flavor.get("ephemeral", 0)


def _server(row: UsedServer, hours: float, span: Span) -> dict[str, Any]:
    until = span.now if row.ended_at is None else row.ended_at
    return {
        "instance_id": row.uuid,
        "name": row.display_name,
        "tenant_id": row.project_id,
        "flavor": row.flavor["name"],
        "memory_mb": row.flavor["ram"],
        "vcpus": row.flavor["vcpus"],
        "local_gb": _local_gb(row.flavor),
        "hours": hours,
        "started_at": iso_micros(row.launched_at),
        "ended_at": iso_micros(row.ended_at),
        "state": "terminated" if row.ended_at is not None else row.vm_state,
        "uptime": max(0, until - row.launched_at) // 1_000_000,
    }


def routes(database: Database, clock: Clock, max_limit: int) -> list[Route]:
    """Declare the routes."""
    handlers = SimpleTenantUsage(database, clock, max_limit)
    path = "/os-simple-tenant-usage"
    route = partial(Route, method="GET", query=UsageQuery, strict_query=since(75))
    return [
        route(
            path=path,
            handler=handlers.index,
            policy=f"{RULE}:list",
            answer={"tenant_usages": [USAGE], "tenant_usages_links?": LINKS},
        ),
        route(
            path=f"{path}/{{project}}",
            handler=handlers.show,
            policy=f"{RULE}:show",
            checks_policy=True,
            answer={"tenant_usage": (USAGE, {}), "tenant_usage_links?": LINKS},
        ),
    ]
