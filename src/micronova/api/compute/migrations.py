"""GET /os-migrations: the moves of servers, of all projects."""

import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec import UNSET, UnsetType, field

from micronova.api import inputs
from micronova.api.inputs import Paged
from micronova.api.links import LINKS, Links
from micronova.api.view import OMIT, Field, View
from micronova.db import server_migrations
from micronova.db.engine import Database
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects.errors import Invalid
from micronova.objects.migration import MigrationRow
from micronova.objects.migration_states import IN_PROGRESS_LIVE, LIVE_MIGRATION

RULE = "os_compute_api:os-migrations:index"
FILTERS: Final = ("instance_uuid", "source_compute", "status", "migration_type", "user_id", "project_id", "uuid")
"""Query parameters that compare a column."""
PART: Final = 1_000  # migrations that are read at a time, before 2.59


def flavor_number(flavor: Mapping[str, Any]) -> int:
    """Return the number of a flavor that migrations show.

    Nova shows a number of its database that no other request shows. Equal numbers mean the same flavor here, too.
    """
    return zlib.crc32(flavor["id"].encode()) & 0x7FFFFFFF


class Shown(NamedTuple):
    """What a view of a migration needs besides its row."""

    hosts: bool  # the caller may see hosts; else they are null
    links: Links | None = None


def _links(row: MigrationRow, shown: Shown) -> Any:
    """Return the links of a live migration that is in progress; others are not shown anywhere else."""
    if shown.links is None or row["migration_type"] != LIVE_MIGRATION or row["status"] not in IN_PROGRESS_LIVE:
        return OMIT
    return shown.links.of(f"servers/{row['instance_uuid']}/migrations", str(row["id"]))


def _host(name: str) -> Field:
    return Field(name, lambda row, shown: row[name] if shown.hosts else None, type=str | None)


HOSTS: Final = tuple(map(_host, ("dest_compute", "dest_host", "dest_node", "source_compute", "source_node")))
MIGRATION = View(
    Field("id", "id", type=int),
    Field("instance_uuid", "instance_uuid", type=str),
    Field("status", "status", type=str),
    Field("old_instance_type_id", lambda row, _: flavor_number(row["old_flavor"]), type=int),
    Field("new_instance_type_id", lambda row, _: flavor_number(row["new_flavor"]), type=int),
    Field("created_at", lambda row, _: iso_micros(row["created_at"]), type=str),
    Field("updated_at", lambda row, _: iso_micros(row["updated_at"]), type=str | None),
    *HOSTS,
    Field("migration_type", "migration_type", since(23), type=str),
    Field("links", _links, since(23), optional=True, type=LINKS),
    Field("uuid", "uuid", since(59), type=str),
    Field("user_id", "user_id", since(80), type=str),
    Field("project_id", "project_id", since(80), type=str),
    keyed=True,
)


class MigrationsQuery(Paged):
    """The page and the filters."""

    versions = {
        "changes-before": since(66),
        "user_id": since(80),
        "project_id": since(80),
    }
    once = {"limit": since(59), "marker": since(59), "changes-since": since(59), **versions}

    hidden: str | UnsetType = UNSET
    host: str | UnsetType = UNSET
    instance_uuid: str | UnsetType = UNSET
    source_compute: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    migration_type: str | UnsetType = UNSET
    changes_since: str | UnsetType = field(default=UNSET, name="changes-since")
    changes_before: str | UnsetType = field(default=UNSET, name="changes-before")
    user_id: str | UnsetType = UNSET
    project_id: str | UnsetType = UNSET


class OldMigrationsQuery(inputs.Query):
    """The filters until 2.58. As in Nova, they are more than the API's reference names."""

    hidden: str | UnsetType = UNSET
    host: str | UnsetType = UNSET
    instance_uuid: str | UnsetType = UNSET
    source_compute: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    migration_type: str | UnsetType = UNSET
    user_id: str | UnsetType = UNSET
    project_id: str | UnsetType = UNSET
    node: str | UnsetType = UNSET
    uuid: str | UnsetType = UNSET


class Migrations:
    """The handlers."""

    def __init__(self, database: Database, max_limit: int) -> None:
        self._database = database
        self._max_limit = max_limit

    async def index(self, request: Request) -> dict[str, Any]:
        """List migrations, the newest first."""
        query: MigrationsQuery | OldMigrationsQuery = request.query
        if query.project_id != request.context.project_id:
            request.authorize(rule=f"{RULE}:all_projects")
        if any(isinstance(getattr(query, name, UNSET), str) for name in ("host", "source_compute", "node")):
            request.authorize(rule=f"{RULE}:host")  # who may not see hosts could ask for each in turn
        limit, marker, first, last, node = None, None, None, None, None
        if isinstance(query, MigrationsQuery):
            limit, marker = query.page(self._max_limit)
            first = _moment(query.changes_since, "changes-since")
            last = _last_moment(query.changes_before, "changes-before")
        elif not isinstance(query.node, UnsetType):
            node = query.node
        if first is not None and last is not None and last < first:
            raise Invalid("The value of changes-since must be less than or equal to changes-before.")
        if not isinstance(query.hidden, UnsetType) and inputs.boolean(query.hidden, "hidden"):
            return {"migrations": []}  # none is hidden
        conditions = {name: value for name in FILTERS if isinstance(value := getattr(query, name, UNSET), str)}
        host = None if isinstance(query.host, UnsetType) else query.host

        async def read(**page: Any) -> tuple[list[MigrationRow], bool] | None:
            return await self._database.read(
                server_migrations.list_page,
                conditions,
                host=host,
                node=node,
                changes_since=first,
                changes_before=last,
                **page,
            )

        found = await read(marker=marker, limit=limit) if limit is not None else (await _read_all(read), False)
        if found is None:
            raise Invalid(f"Marker {marker} could not be found.")
        rows, more = found
        shape, links = MIGRATION.at(request.minor), Links(request)
        shown = Shown(request.allows(rule=f"{RULE}:host"), links)
        body: dict[str, Any] = {"migrations": [shape(row, shown) for row in rows]}
        if more and limit:
            body["migrations_links"] = links.next(request, "os-migrations", rows[-1]["uuid"])
        return body


async def _read_all(read: Callable[..., Awaitable[tuple[list[MigrationRow], bool] | None]]) -> list[MigrationRow]:
    """Read all migrations in parts, so that other requests are answered in between."""
    rows: list[MigrationRow] = []
    more = True
    while more:
        after = (rows[-1]["created_at"], rows[-1]["id"]) if rows else None
        part, more = await read(after=after, limit=PART) or ([], False)
        rows += part
    return rows


def _moment(value: str | UnsetType, name: str) -> int | None:
    return None if isinstance(value, UnsetType) else inputs.moment(value, name)


def _last_moment(value: str | UnsetType, name: str) -> int | None:
    return None if isinstance(value, UnsetType) else inputs.last_moment(value, name)


def routes(database: Database, max_limit: int) -> list[Route]:
    """Declare the route."""
    handlers = Migrations(database, max_limit)
    route = partial(Route, method="GET", path="/os-migrations", handler=handlers.index, policy=RULE)
    return [
        route(query=OldMigrationsQuery, versions=until(58), answer={"migrations": [MIGRATION]}),
        route(
            query=MigrationsQuery,
            strict_query=since(59),
            versions=since(59),
            answer={"migrations": [MIGRATION], "migrations_links?": LINKS},
        ),
    ]
