"""The tag API."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.network.collection import Collection, Resource, set_tags
from micronova.embedded.network.request_bodies import Body, Tags
from micronova.embedded.network.routing import checked_route
from micronova.embedded.network.tables import tags
from micronova.http.request import Request, Response
from micronova.http.service import Handler, Route
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.wrong_values import wrong_value

W = TypeVar("W")  # one tag or several


class TagsBody(Body, kw_only=True):
    """Several tags."""

    tags: Tags


class TagRoutes:
    """The tag API of one kind of resource."""

    def __init__(self, collection: Collection[Any], path: str | None = None) -> None:
        """`path` is that of the collection, if the tags are not below the usual one."""
        self.of = collection
        self._path = path or collection.path

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = f"{self._path}/{{id}}/tags", f"{self._path}/{{id}}/tags/{{tag}}"

        def route(method: str, path: str, handler: Handler, verb: str, status: int, body: Any = None) -> Route:
            return checked_route(method, path, handler, f"{verb}_{self.of.singular}:tags", status, body)

        return [
            route("GET", all_, self.index, "get", 200),
            route("PUT", all_, self.replace, "update", 200, TagsBody),
            route("POST", all_, self.add_all, "create", 200, TagsBody),
            route("DELETE", all_, self.clear, "delete", 204),
            route("GET", one, self.show, "get", 204),
            route("PUT", one, self.add, "update", 201),
            route("DELETE", one, self.remove, "delete", 204),
        ]

    async def _find(self, request: Request, id: str) -> Resource:
        return await self.of.find(request, id, request.rule)

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List the tags of a resource."""
        resource = await self._find(request, id)
        return {"tags": resource.values["tags"]}

    async def show(self, request: Request, id: str, tag: str) -> Response:
        """Check that a resource has a tag."""
        resource = await self._find(request, id)
        if tag not in resource.values["tags"]:
            raise _missing(tag)
        return Response(status=204)

    async def replace(self, request: Request, id: str) -> dict[str, Any]:
        """Replace the tags of a resource."""
        resource = await self._find(request, id)
        wanted = request.body.tags
        await self._database_write(set_tags, resource.id, wanted)
        return {"tags": sorted(set(wanted))}

    async def add_all(self, request: Request, id: str) -> dict[str, Any]:
        """Add several tags to a resource."""
        resource = await self._find(request, id)
        wanted = request.body.tags
        await self._database_write(_add, resource.id, wanted)
        return {"tags": sorted({*resource.values["tags"], *wanted})}

    async def add(self, request: Request, id: str, tag: str) -> None:
        """Add a tag to a resource."""
        resource = await self._find(request, id)
        try:
            msgspec.convert({"tags": [tag]}, TagsBody)
        except msgspec.ValidationError as error:
            raise Invalid(f"Invalid input for tag: {wrong_value(error, TagsBody).problem}.") from None
        await self._database_write(_add, resource.id, [tag])

    async def remove(self, request: Request, id: str, tag: str) -> None:
        """Remove a tag from a resource."""
        resource = await self._find(request, id)
        if tag not in resource.values["tags"]:
            raise _missing(tag)
        await self._database_write(_remove, resource.id, tag)

    async def clear(self, request: Request, id: str) -> None:
        """Remove all tags from a resource."""
        resource = await self._find(request, id)
        await self._database_write(set_tags, resource.id, [])

    async def _database_write(self, fn: Callable[[sa.Connection, str, W], None], id: str, words: W) -> None:
        await self.of.core.database.write(_touch, self.of.attributes.table, self.of.core.now(), fn, id, words)


def _touch(
    conn: sa.Connection, table: sa.Table, now: int, fn: Callable[[sa.Connection, str, W], None], id: str, words: W
) -> None:
    # Nothing is written for a deleted resource: its tags would stay for ever.
    if revisions.touch(conn, table.c.revision, table.c.id == id, now=now):
        fn(conn, id, words)


def _add(conn: sa.Connection, id: str, words: list[str]) -> None:
    for word in words:
        insert_if_absent(conn, tags, {"resource_id": id, "tag": word})


def _remove(conn: sa.Connection, id: str, tag: str) -> None:
    conn.execute(tags.delete().where(tags.c.resource_id == id, tags.c.tag == tag))


def _missing(tag: str) -> NotFound:
    return NotFound(f"Tag {tag[:64]} could not be found.", type="TagNotFound")
