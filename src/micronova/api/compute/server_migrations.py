"""/servers/{id}/migrations: the live migrations of a server that are in progress, their abort and forced end."""

from typing import Any

from micronova.api.compute.migrations import HOSTS, Shown
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT, Body, NoQuery, numeric_id
from micronova.api.view import Field, View
from micronova.db import server_migrations
from micronova.db.engine import Database
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import NotFound
from micronova.objects.migration import MigrationRow
from micronova.objects.migration_states import IN_PROGRESS_LIVE, LIVE_MIGRATION
from micronova.servers.live_migrations import LiveMigrations

RULE = "os_compute_api:servers:migrations"
_PROGRESS = ("disk_processed", "disk_remaining", "disk_total", "memory_processed", "memory_remaining", "memory_total")

MIGRATION = View(
    Field("id", "id", type=int),
    Field("server_uuid", "instance_uuid", type=str),
    Field("status", "status", type=str),
    Field("created_at", lambda row, _: iso_micros(row["created_at"]), type=str),
    Field("updated_at", lambda row, _: iso_micros(row["updated_at"]), type=str | None),
    *HOSTS,
    *(Field(f"{name}_bytes", lambda _row, _shown: None, type=int | None) for name in _PROGRESS),
    Field("uuid", "uuid", since(59), type=str),
    Field("user_id", "user_id", since(80), type=str),
    Field("project_id", "project_id", since(80), type=str),
    keyed=True,
)


class ForceCompleteBody(Body):
    """Force the end of a live migration."""

    force_complete: None


class ServerMigrations:
    """The handlers."""

    def __init__(self, database: Database, live: LiveMigrations) -> None:
        self._database = database
        self._live = live

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List the live migrations of a server that are in progress."""
        server = await authorized_server(self._database, request, id)
        rows = await self._database.read(server_migrations.of_instance, server["uuid"])
        target = {"project_id": server["project_id"], "user_id": server["user_id"]}
        shown, shape = Shown(request.allows(target, f"{RULE}:index:host")), MIGRATION.at(request.minor)
        return {"migrations": [shape(row, shown) for row in rows if _in_progress(row)]}

    async def show(self, request: Request, id: str, migration_id: str) -> dict[str, Any]:
        """Show a live migration that is in progress."""
        server = await authorized_server(self._database, request, id)
        rows = await self._database.read(server_migrations.of_instance, server["uuid"])
        found = next((row for row in rows if row["id"] == numeric_id(migration_id)), None)
        if found is None:
            raise NotFound(f"In-progress live migration {migration_id[:64]} is not found for server {id}.")
        if found["migration_type"] != LIVE_MIGRATION:
            raise NotFound(f"Migration {migration_id} for server {id} is not live-migration.")
        if not _in_progress(found):
            raise NotFound(f"Live migration {migration_id} for server {id} is not in progress.")
        return {"migration": MIGRATION.at(request.minor)(found, Shown(hosts=True))}

    async def delete(self, request: Request, id: str, migration_id: str) -> None:
        """Abort a live migration; since 2.65 also one that waits or is being prepared."""
        server = await authorized_server(self._database, request, id)
        await self._live.abort(request.context, server, numeric_id(migration_id), early=request.minor >= 65)

    async def force_complete(self, request: Request, id: str, migration_id: str) -> None:
        """Let a live migration end soon."""
        server = await authorized_server(self._database, request, id)
        await self._live.force_complete(request.context, server, numeric_id(migration_id))


def _in_progress(row: MigrationRow) -> bool:
    return row["migration_type"] == LIVE_MIGRATION and row["status"] in IN_PROGRESS_LIVE


def routes(database: Database, live: LiveMigrations) -> list[Route]:
    """Declare the routes."""
    handlers = ServerMigrations(database, live)
    root = "/servers/{id}/migrations"
    return [
        Route(
            method="GET", path=root, handler=handlers.index, policy=f"{RULE}:index", query=NoQuery,
            strict_query=STRICT, checks_policy=True, versions=since(23), answer={"migrations": [MIGRATION]},
        ),
        Route(
            method="GET", path=f"{root}/{{migration_id}}", handler=handlers.show, policy=f"{RULE}:show",
            query=NoQuery, strict_query=STRICT, checks_policy=True, versions=since(23), answer={"migration": MIGRATION},
        ),
        Route(
            method="DELETE", path=f"{root}/{{migration_id}}", handler=handlers.delete, policy=f"{RULE}:delete",
            status=202, checks_policy=True, versions=since(24),
        ),
        Route(
            method="POST", path=f"{root}/{{migration_id}}/action", action="force_complete",
            handler=handlers.force_complete, policy=f"{RULE}:force_complete", body=ForceCompleteBody, status=202,
            checks_policy=True, versions=since(22), errors=(500,),
        ),
    ]  # fmt: skip
