"""What hangs below a server: metadata, tags, addresses."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from micronova.api import inputs
from micronova.api.compute import access
from micronova.api.compute.server_values import Tag
from micronova.api.compute.server_views import addresses
from micronova.compute import states
from micronova.compute.acceptance import check_lock
from micronova.db import instances, quotas
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, InstanceNotFound, Invalid, NotFound, QuotaExceeded

Items = dict[inputs.Key, Annotated[str, Meta(max_length=255)]]
MOST_TAGS = 50


class MetadataBody(msgspec.Struct, forbid_unknown_fields=True):
    """Several items."""

    metadata: Items


class MetaBody(msgspec.Struct, forbid_unknown_fields=True):
    """One item."""

    meta: Annotated[Items, Meta(min_length=1, max_length=1)]


class TagsBody(msgspec.Struct, forbid_unknown_fields=True):
    """All tags."""

    tags: Annotated[list[Tag], Meta(max_length=MOST_TAGS)]


class ServerParts:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, quota_defaults: Mapping[str, int]) -> None:
        self._database = database
        self._clock = clock
        self._quota_defaults = quota_defaults

    # --- metadata --------------------------------------------------------------------------------------------

    async def metadata(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's metadata."""
        return {"metadata": (await access.server(self._database, request, id))["metadata"]}

    async def metadata_item(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Show one item."""
        items = (await access.server(self._database, request, id))["metadata"]
        if key not in items:
            raise NotFound(f"Metadata item {key[:64]} was not found")
        return {"meta": {key: items[key]}}

    async def add_metadata(self, request: Request, id: str) -> dict[str, Any]:
        """Add or change items."""
        check_lock(request.context, await access.server(self._database, request, id))
        return {"metadata": await self._change(request, id, request.body.metadata, replace=False)}

    async def replace_metadata(self, request: Request, id: str) -> dict[str, Any]:
        """Replace all items."""
        check_lock(request.context, await access.server(self._database, request, id))
        return {"metadata": await self._change(request, id, request.body.metadata, replace=True)}

    async def set_metadata_item(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Set one item."""
        check_lock(request.context, await access.server(self._database, request, id))
        item = request.body.meta
        if key not in item:
            raise Invalid("Request body and URI mismatch: the item's key must be the one in the URL.")
        await self._change(request, id, item, replace=False)
        return {"meta": item}

    async def delete_metadata_item(self, request: Request, id: str, key: str) -> None:
        """Remove one item."""
        row = await access.server(self._database, request, id)
        check_lock(request.context, row)
        if key not in row["metadata"]:
            raise NotFound(f"Metadata item {key[:64]} was not found")
        await self._database.write(self._remove_item, id, key)

    async def _change(self, request: Request, id: str, items: dict[str, str], *, replace: bool) -> dict[str, str]:
        project = request.context.project_id
        return await self._database.write(self._set_items, id, project, items, replace)

    def _set_items(
        self, conn: sa.Connection, id: str, project: str, items: dict[str, str], replace: bool
    ) -> dict[str, str]:
        row = self._changeable(conn, id, "update metadata of")
        wanted = dict(items) if replace else {**row["metadata"], **items}
        limit = quotas.limits_for(conn, row["project_id"], self._quota_defaults)["metadata_items"]
        if 0 <= limit < len(wanted):
            raise QuotaExceeded(f"Maximum number of metadata items exceeds {limit}")
        instances.update(conn, id, micros(self._clock.now()), {"metadata": wanted})
        return wanted

    def _remove_item(self, conn: sa.Connection, id: str, key: str) -> None:
        row = self._changeable(conn, id, "delete metadata of")
        items = {name: value for name, value in row["metadata"].items() if name != key}
        instances.update(conn, id, micros(self._clock.now()), {"metadata": items})

    def _changeable(self, conn: sa.Connection, id: str, verb: str) -> Any:
        row = instances.lock(conn, id)
        if row is None:
            raise InstanceNotFound(f"Instance {id} could not be found.")
        if row["task_state"] == states.DELETING or row["vm_state"] not in _CHANGEABLE:
            shown = row["task_state"] or row["vm_state"]
            raise Conflict(f"Cannot '{verb}' instance {id} while it is in {shown}")
        return row

    # --- tags ------------------------------------------------------------------------------------------------

    async def tags(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's tags."""
        return {"tags": (await access.server(self._database, request, id))["tags"]}

    async def has_tag(self, request: Request, id: str, tag: str) -> None:
        """Say whether a server has a tag."""
        if tag not in (await access.server(self._database, request, id))["tags"]:
            raise NotFound(f"Server {id} has no tag '{tag[:64]}'")

    async def replace_tags(self, request: Request, id: str) -> dict[str, Any]:
        """Replace all tags."""
        await access.server(self._database, request, id)
        wanted = sorted(set(request.body.tags))
        await self._database.write(self._set_tags, id, wanted, None)
        return {"tags": wanted}

    async def add_tag(self, request: Request, id: str, tag: str) -> Response:
        """Add one tag: 201 when it is new, 204 when the server has it."""
        row = await access.server(self._database, request, id)
        try:
            msgspec.convert(tag, Tag)
        except msgspec.ValidationError:
            raise Invalid("Invalid tag: 1 to 60 characters without comma and slash.") from None
        if tag in row["tags"]:
            return Response(status=204)
        await self._database.write(self._set_tags, id, None, tag)
        location = f"{request.base_url}/servers/{id}/tags/{tag}"
        return Response(status=201, headers={"location": location})

    async def delete_tag(self, request: Request, id: str, tag: str) -> None:
        """Remove one tag."""
        row = await access.server(self._database, request, id)
        if tag not in row["tags"]:
            raise NotFound(f"Server {id} has no tag '{tag[:64]}'")
        await self._database.write(self._remove_tag, id, tag)

    async def delete_tags(self, request: Request, id: str) -> None:
        """Remove all tags."""
        await access.server(self._database, request, id)
        await self._database.write(self._set_tags, id, [], None)

    def _set_tags(self, conn: sa.Connection, id: str, tags: list[str] | None, added: str | None) -> None:
        row = self._changeable(conn, id, "update tags of")
        wanted = tags if tags is not None else sorted({*row["tags"], added or ""})
        if len(wanted) > MOST_TAGS:
            raise Invalid(f"The number of tags exceeded the per-server limit {MOST_TAGS}.")
        instances.update(conn, id, micros(self._clock.now()), {"tags": wanted})

    def _remove_tag(self, conn: sa.Connection, id: str, tag: str) -> None:
        row = self._changeable(conn, id, "delete tags of")
        instances.update(conn, id, micros(self._clock.now()), {"tags": [t for t in row["tags"] if t != tag]})

    # --- addresses -------------------------------------------------------------------------------------------

    async def ips(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's addresses."""
        return {"addresses": _plain(addresses(await access.server(self._database, request, id)))}

    async def ips_of_network(self, request: Request, id: str, label: str) -> dict[str, Any]:
        """List a server's addresses in one network."""
        found = _plain(addresses(await access.server(self._database, request, id)))
        if label not in found:
            raise NotFound(f"Instance is not a member of network {label[:64]}")
        return {label: found[label]}


_CHANGEABLE = frozenset(
    {
        states.ACTIVE,
        states.PAUSED,
        states.SUSPENDED,
        states.STOPPED,
        states.ERROR,
        states.BUILDING,
        states.RESCUED,
        states.RESIZED,
        states.SHELVED,
        states.SHELVED_OFFLOADED,
    }
)


def _plain(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Addresses as this old resource shows them: version and address alone."""
    return {label: [{"version": a["version"], "addr": a["addr"]} for a in listed] for label, listed in found.items()}


def routes(database: Database, clock: Clock, quota_defaults: Mapping[str, int]) -> list[Route]:
    """Return the routes."""
    h = ServerParts(database, clock, quota_defaults)
    meta, tags, ips = "os_compute_api:server-metadata:", "os_compute_api:os-server-tags:", "os_compute_api:ips:"
    table: list[tuple[str, str, Any, str, int, Any, Any]] = [
        ("GET", "metadata", h.metadata, f"{meta}index", 200, None, None),
        ("POST", "metadata", h.add_metadata, f"{meta}create", 200, MetadataBody, None),
        ("PUT", "metadata", h.replace_metadata, f"{meta}update_all", 200, MetadataBody, None),
        ("GET", "metadata/{key}", h.metadata_item, f"{meta}show", 200, None, None),
        ("PUT", "metadata/{key}", h.set_metadata_item, f"{meta}update", 200, MetaBody, None),
        ("DELETE", "metadata/{key}", h.delete_metadata_item, f"{meta}delete", 204, None, None),
        ("GET", "tags", h.tags, f"{tags}index", 200, None, since(26)),
        ("PUT", "tags", h.replace_tags, f"{tags}update_all", 200, TagsBody, since(26)),
        ("DELETE", "tags", h.delete_tags, f"{tags}delete_all", 204, None, since(26)),
        ("GET", "tags/{tag}", h.has_tag, f"{tags}show", 204, None, since(26)),
        ("PUT", "tags/{tag}", h.add_tag, f"{tags}update", 201, None, since(26)),
        ("DELETE", "tags/{tag}", h.delete_tag, f"{tags}delete", 204, None, since(26)),
        ("GET", "ips", h.ips, f"{ips}index", 200, None, None),
        ("GET", "ips/{label}", h.ips_of_network, f"{ips}show", 200, None, None),
    ]
    return [
        Route(
            method=method,
            path=f"/servers/{{id}}/{path}",
            handler=handler,
            policy=policy,
            status=status,
            body=body,
            checks_policy=True,
            query=inputs.NoQuery,
            strict_query=inputs.STRICT,
            **({"versions": versions} if versions else {}),
        )
        for method, path, handler, policy, status, body, versions in table
    ]
