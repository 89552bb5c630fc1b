"""The metadata of volumes and snapshots as resources of their own."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.embedded.volume.api.request_bodies import MOST_ITEMS, Body, Items
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.model import Snapshot, Volume
from micronova.embedded.volume.store import snapshot_queries, volume_queries
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound, PreconditionFailed, TooLarge

Load = Callable[[Request, str], Awaitable[Volume | Snapshot]]
Change = Callable[[Mapping[str, str]], dict[str, str]]


class MetadataBody(Body):
    """The body of a create or a replacement."""

    metadata: Items


class ItemBody(Body):
    """The body of a change of one item."""

    meta: Items


class MetadataHandlers:
    """The handlers of the metadata of one kind of resource."""

    def __init__(self, core: Core, noun: str, rules: Mapping[str, str], load: Load, write: Callable[..., None]) -> None:
        """`rules` are the policy rules by method; `load` returns the resource, `write` replaces its metadata."""
        self._core = core
        self._noun = noun
        self._rules = rules
        self._load = load
        self._write = write

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_ = f"/{self._noun}s/{{{self._noun}_id}}/metadata"
        one = f"{all_}/{{key}}"
        route, rules = partial(Route, checks_policy=True), self._rules
        return [
            route(method="GET", path=all_, handler=self.index, policy=rules["GET"]),
            route(method="POST", path=all_, handler=self.create, policy=rules["POST"], body=MetadataBody),
            route(method="PUT", path=all_, handler=self.replace, policy=rules["PUT"], body=MetadataBody),
            route(method="GET", path=one, handler=self.show, policy=rules["GET"]),
            route(method="PUT", path=one, handler=self.update, policy=rules["PUT"], body=ItemBody),
            route(method="DELETE", path=one, handler=self.delete, policy=rules["DELETE"]),
        ]

    async def index(self, request: Request, **ids: str) -> Response:
        """Show all items."""
        found = await self._load(request, self._id(ids))
        headers = {"etag": f'"{_etag(found.metadata)}"'} if self._has_etags(request) else {}
        return Response(body={"metadata": found.metadata}, headers=headers)

    async def show(self, request: Request, key: str, **ids: str) -> dict[str, Any]:
        """Show one item."""
        found = await self._load(request, self._id(ids))
        if key not in found.metadata:
            raise self._missing(key, found.id)
        return {"meta": {key: found.metadata[key]}}

    async def create(self, request: Request, **ids: str) -> dict[str, Any]:
        """Add items, and replace those of the same names."""
        given: dict[str, str] = request.body.metadata
        return {"metadata": await self._change(request, self._id(ids), lambda old: {**old, **given})}

    async def replace(self, request: Request, **ids: str) -> dict[str, Any]:
        """Replace all items."""
        given: dict[str, str] = request.body.metadata
        return {"metadata": await self._change(request, self._id(ids), lambda old: given)}

    async def update(self, request: Request, key: str, **ids: str) -> dict[str, Any]:
        """Set one item."""
        given: dict[str, str] = request.body.meta
        if list(given) != [key]:
            raise Invalid(f"The body must have one item, with the name in the path: '{key[:64]}'.")
        await self._change(request, self._id(ids), lambda old: {**old, **given})
        return {"meta": given}

    async def delete(self, request: Request, key: str, **ids: str) -> None:
        """Remove one item."""
        id = self._id(ids)

        def without(old: Mapping[str, str]) -> dict[str, str]:
            if key not in old:
                raise self._missing(key, id)
            return {name: value for name, value in old.items() if name != key}

        await self._change(request, id, without)

    async def _change(self, request: Request, id: str, change: Change) -> dict[str, str]:
        async def try_once() -> dict[str, str]:
            found = await self._load(request, id)
            wanted = request.header("if-match") if request.route.method == "PUT" and self._has_etags(request) else None
            if wanted is not None and not {"*", _etag(found.metadata)} & set(_etags_in(wanted)):
                raise PreconditionFailed(f"The metadata of {self._noun} {id} has changed: read it again.")
            items = change(found.metadata)
            if len(items) > MOST_ITEMS:
                raise TooLarge(f"Metadata may have at most {MOST_ITEMS} items.")
            await self._core.database.write(self._write, found, items, self._core.now())
            return items

        return await retry_or_conflict(f"{self._noun} {id}", try_once)

    def _has_etags(self, request: Request) -> bool:
        return self._noun == "volume" and request.minor >= 15

    def _id(self, ids: Mapping[str, str]) -> str:
        return ids[f"{self._noun}_id"]

    def _missing(self, key: str, id: str) -> NotFound:
        return NotFound(f"The {self._noun} {id} has no metadata with key {key[:64]}.")


def _etag(items: Mapping[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(items.items()))).hexdigest()[:32]


def _etags_in(header: str) -> list[str]:
    return [part.strip().removeprefix("W/").strip('"') for part in header.split(",")]


def handlers(core: Core) -> list[MetadataHandlers]:
    """Return the handlers for all resources that have metadata."""
    of_volumes = {
        "GET": "volume:get_volume_metadata",
        "POST": "volume:create_volume_metadata",
        "PUT": "volume:update_volume_metadata",
        "DELETE": "volume:delete_volume_metadata",
    }
    of_snapshots = {
        "GET": "volume:get_snapshot_metadata",
        "POST": "volume:update_snapshot_metadata",
        "PUT": "volume:update_snapshot_metadata",
        "DELETE": "volume:delete_snapshot_metadata",
    }
    return [
        MetadataHandlers(core, "volume", of_volumes, core.load_volume, _write_of_volume),
        MetadataHandlers(core, "snapshot", of_snapshots, core.load_snapshot, _write_of_snapshot),
    ]


def _write_of_volume(conn: sa.Connection, volume: Volume, items: Mapping[str, str], now: int) -> None:
    volume_queries.update(conn, volume, {}, now)
    volume_queries.set_metadata(conn, volume.id, items)


def _write_of_snapshot(conn: sa.Connection, snapshot: Snapshot, items: Mapping[str, str], now: int) -> None:
    snapshot_queries.update(conn, snapshot, {}, now)
    snapshot_queries.set_metadata(conn, snapshot.id, items)
