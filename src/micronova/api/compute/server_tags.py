"""The tags of servers: words that users set, and filter lists by."""

from functools import partial
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from micronova.api import inputs
from micronova.api.compute.server_inputs import Tag
from micronova.api.compute.server_lookup import authorized_server, check_changeable, lock_changeable
from micronova.api.links import Links
from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound

MOST_TAGS = 50  # of one server


class TagsBody(msgspec.Struct, forbid_unknown_fields=True):
    """All tags."""

    tags: Annotated[list[Tag], Meta(max_length=MOST_TAGS)]


class ServerTags:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's tags."""
        return {"tags": (await authorized_server(self._database, request, id))["tags"]}

    async def show(self, request: Request, id: str, tag: str) -> None:
        """Answer 204 if a server has a tag."""
        if tag not in (await authorized_server(self._database, request, id))["tags"]:
            raise NotFound(f"Server {id} has no tag '{tag[:64]}'")

    async def update_all(self, request: Request, id: str) -> dict[str, Any]:
        """Replace all tags."""
        await authorized_server(self._database, request, id)
        wanted = sorted(set(request.body.tags))
        await self._database.write(self._replace, id, wanted, "update tags")
        return {"tags": wanted}

    async def update(self, request: Request, id: str, tag: str) -> Response:
        """Add one tag: 201 when it is new, 204 when the server has it."""
        row = await authorized_server(self._database, request, id)
        check_changeable(row, "update tag")
        try:
            msgspec.convert(tag, Tag)
        except msgspec.ValidationError:
            raise Invalid("Invalid tag: 1 to 60 characters without comma and slash.") from None
        if tag in row["tags"]:
            return Response(status=204)
        await self._database.write(self._add, id, tag)
        location = f"{Links(request).base}/servers/{id}/tags/{tag}"
        return Response(status=201, headers={"location": location})

    async def delete(self, request: Request, id: str, tag: str) -> None:
        """Remove one tag."""
        row = await authorized_server(self._database, request, id)
        check_changeable(row, "delete tag")
        if tag not in row["tags"]:
            raise NotFound(f"Server {id} has no tag '{tag[:64]}'")
        await self._database.write(self._remove, id, tag)

    async def delete_all(self, request: Request, id: str) -> None:
        """Remove all tags."""
        await authorized_server(self._database, request, id)
        await self._database.write(self._replace, id, [], "delete tags")

    def _replace(self, conn: sa.Connection, id: str, tags: list[str], verb: str) -> None:
        lock_changeable(conn, id, verb)
        self._set(conn, id, tags)

    def _add(self, conn: sa.Connection, id: str, tag: str) -> None:
        row = lock_changeable(conn, id, "update tag")
        self._set(conn, id, sorted({*row["tags"], tag}))

    def _remove(self, conn: sa.Connection, id: str, tag: str) -> None:
        row = lock_changeable(conn, id, "delete tag")
        self._set(conn, id, [each for each in row["tags"] if each != tag])

    def _set(self, conn: sa.Connection, id: str, tags: list[str]) -> None:
        if len(tags) > MOST_TAGS:
            raise Invalid(f"The number of tags exceeded the per-server limit {MOST_TAGS}.")
        instances.update(conn, id, micros(self._clock.now()), {"tags": tags})


def routes(database: Database, clock: Clock) -> list[Route]:
    """Declare the routes of tags."""
    handlers = ServerTags(database, clock)
    path, rule = "/servers/{id}/tags", "os_compute_api:os-server-tags"
    one = f"{path}/{{tag}}"
    tags = {"tags": list[str]}
    route = partial(Route, checks_policy=True, query=inputs.NoQuery, versions=since(26))
    return [
        route(method="GET", path=path, handler=handlers.index, policy=f"{rule}:index", answer=tags),
        route(
            method="PUT",
            path=path,
            handler=handlers.update_all,
            policy=f"{rule}:update_all",
            body=TagsBody,
            answer=tags,
        ),
        route(method="DELETE", path=path, handler=handlers.delete_all, policy=f"{rule}:delete_all", status=204),
        route(method="GET", path=one, handler=handlers.show, policy=f"{rule}:show", status=204),
        route(
            method="PUT",
            path=one,
            handler=handlers.update,
            policy=f"{rule}:update",
            status=201,
            also={204: None},
            has_location=True,
        ),
        route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete", status=204),
    ]
