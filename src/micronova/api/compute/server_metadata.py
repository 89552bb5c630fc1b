"""The metadata of servers: names with values that users set."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from micronova.api import inputs
from micronova.api.compute.server_lookup import authorized_server, lock_changeable
from micronova.db import instances, quotas
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound, QuotaExceeded
from micronova.servers.actions import check_lock

Items = dict[inputs.Key, Annotated[str, Meta(max_length=255)]]


class MetadataBody(msgspec.Struct, forbid_unknown_fields=True):
    """Several items."""

    metadata: Items


class MetaBody(msgspec.Struct, forbid_unknown_fields=True):
    """One item."""

    meta: Annotated[Items, Meta(min_length=1, max_length=1)]


class ServerMetadata:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, quota_defaults: Mapping[str, int]) -> None:
        self._database = database
        self._clock = clock
        self._quota_defaults = quota_defaults

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's metadata."""
        return {"metadata": (await authorized_server(self._database, request, id))["metadata"]}

    async def show(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Show one item."""
        items = (await authorized_server(self._database, request, id))["metadata"]
        if key not in items:
            raise NotFound(f"Metadata item {key[:64]} was not found")
        return {"meta": {key: items[key]}}

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Add or change items."""
        check_lock(request.context, await authorized_server(self._database, request, id))
        items = await self._database.write(self._set_items, id, request.body.metadata, replace=False)
        return {"metadata": items}

    async def update_all(self, request: Request, id: str) -> dict[str, Any]:
        """Replace all items."""
        check_lock(request.context, await authorized_server(self._database, request, id))
        items = await self._database.write(self._set_items, id, request.body.metadata, replace=True)
        return {"metadata": items}

    async def update(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Set one item."""
        check_lock(request.context, await authorized_server(self._database, request, id))
        item = request.body.meta
        if key not in item:
            raise Invalid("Request body and URI mismatch: the item's key must be the one in the URL.")
        await self._database.write(self._set_items, id, item, replace=False)
        return {"meta": item}

    async def delete(self, request: Request, id: str, key: str) -> None:
        """Remove one item."""
        row = await authorized_server(self._database, request, id)
        check_lock(request.context, row)
        if key not in row["metadata"]:
            raise NotFound(f"Metadata item {key[:64]} was not found")
        await self._database.write(self._remove_item, id, key)

    def _set_items(self, conn: sa.Connection, id: str, items: dict[str, str], *, replace: bool) -> dict[str, str]:
        row = lock_changeable(conn, id, "update metadata")
        wanted = dict(items) if replace else {**row["metadata"], **items}
        limits = quotas.limits_for(conn, row["project_id"], self._quota_defaults)
        if quotas.exceeds(limits, "metadata_items", len(wanted)):
            raise QuotaExceeded(f"Maximum number of metadata items exceeds {limits['metadata_items']}")
        instances.update(conn, id, micros(self._clock.now()), {"metadata": wanted})
        return wanted

    def _remove_item(self, conn: sa.Connection, id: str, key: str) -> None:
        row = lock_changeable(conn, id, "delete metadata")
        items = {name: value for name, value in row["metadata"].items() if name != key}
        instances.update(conn, id, micros(self._clock.now()), {"metadata": items})


def routes(database: Database, clock: Clock, quota_defaults: Mapping[str, int]) -> list[Route]:
    """Declare the routes of metadata."""
    handlers = ServerMetadata(database, clock, quota_defaults)
    path, rule = "/servers/{id}/metadata", "os_compute_api:server-metadata"
    one = f"{path}/{{key}}"
    items, item = {"metadata": dict[str, str]}, {"meta": dict[str, str]}
    route = partial(Route, checks_policy=True, query=inputs.NoQuery, strict_query=inputs.STRICT)
    return [
        route(method="GET", path=path, handler=handlers.index, policy=f"{rule}:index", answer=items),
        route(
            method="POST", path=path, handler=handlers.create, policy=f"{rule}:create", body=MetadataBody, answer=items
        ),
        route(
            method="PUT",
            path=path,
            handler=handlers.update_all,
            policy=f"{rule}:update_all",
            body=MetadataBody,
            answer=items,
        ),
        route(method="GET", path=one, handler=handlers.show, policy=f"{rule}:show", answer=item),
        route(method="PUT", path=one, handler=handlers.update, policy=f"{rule}:update", body=MetaBody, answer=item),
        route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete", status=204),
    ]
