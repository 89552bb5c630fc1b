"""Tags: words that users stick on things."""

from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.neighbours.network.collection import Collection, Thing, set_tags
from micronova.neighbours.network.core import insert_unless_there
from micronova.neighbours.network.tables import tags
from micronova.neighbours.network.wire import Body, Tags, refuse_nul
from micronova.objects.errors import Invalid, NotFound


class TagsBody(Body, kw_only=True):
    """Several tags."""

    tags: Tags


class TagRoutes:
    """The tags of one kind of thing."""

    def __init__(self, collection: Collection) -> None:
        self.of = collection

    def routes(self) -> list[Route]:
        """Declare the operations."""
        all_, one = f"{self.of.path}/{{id}}/tags", f"{self.of.path}/{{id}}/tags/{{tag}}"

        def route(method: str, path: str, handler: Any, verb: str, status: int, body: Any = None) -> Route:
            rule = f"{verb}_{self.of.singular}:tags"
            return Route(
                method=method, path=path, handler=handler, policy=rule, status=status, body=body, checks_policy=True
            )

        return [
            route("GET", all_, self.index, "get", 200),
            route("PUT", all_, self.replace, "update", 200, TagsBody),
            route("POST", all_, self.add_all, "create", 200, TagsBody),
            route("DELETE", all_, self.clear, "delete", 204),
            route("GET", one, self.show, "get", 204),
            route("PUT", one, self.add, "update", 201),
            route("DELETE", one, self.remove, "delete", 204),
        ]

    async def _find(self, request: Request, id: str) -> Thing:
        return await self.of.find(request, id, request.route.policy)

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """GET: all tags."""
        thing = await self._find(request, id)
        return {"tags": thing.values["tags"]}

    async def show(self, request: Request, id: str, tag: str) -> Response:
        """GET of one: is it there?"""
        thing = await self._find(request, id)
        if tag not in thing.values["tags"]:
            raise _missing(tag)
        return Response(status=204)

    async def replace(self, request: Request, id: str) -> dict[str, Any]:
        """PUT: these and no others."""
        thing = await self._find(request, id)
        wanted = _words(request.body.tags)
        await self._database_write(set_tags, thing.id, wanted)
        return {"tags": sorted(set(wanted))}

    async def add_all(self, request: Request, id: str) -> dict[str, Any]:
        """POST: these besides the others."""
        thing = await self._find(request, id)
        wanted = _words(request.body.tags)
        await self._database_write(_add, thing.id, wanted)
        return {"tags": sorted({*thing.values["tags"], *wanted})}

    async def add(self, request: Request, id: str, tag: str) -> None:
        """PUT of one: stick it on."""
        thing = await self._find(request, id)
        try:
            msgspec.convert({"tags": [tag]}, TagsBody)
        except msgspec.ValidationError as error:
            raise Invalid(f"Invalid input for tag: {error}.") from None
        await self._database_write(_add, thing.id, _words([tag]))

    async def remove(self, request: Request, id: str, tag: str) -> None:
        """DELETE of one."""
        thing = await self._find(request, id)
        if tag not in thing.values["tags"]:
            raise _missing(tag)
        await self._database_write(_remove, thing.id, tag)

    async def clear(self, request: Request, id: str) -> None:
        """DELETE: none any more."""
        thing = await self._find(request, id)
        await self._database_write(set_tags, thing.id, [])

    async def _database_write(self, fn: Any, *args: Any) -> None:
        await self.of.core.database.write(_touch, self.of.attributes.table, self.of.core.now(), fn, *args)


def _touch(conn: sa.Connection, table: sa.Table, now: int, fn: Any, id: str, *args: Any) -> None:
    done = conn.execute(
        table.update().where(table.c.id == id).values(revision=table.c.revision + 1, updated_at=now)
    )
    if done.rowcount:  # tags of a thing that was just deleted would stay for ever
        fn(conn, id, *args)


def _add(conn: sa.Connection, id: str, words: list[str]) -> None:
    for word in words:
        insert_unless_there(conn, tags, {"resource_id": id, "tag": word})


def _remove(conn: sa.Connection, id: str, tag: str) -> None:
    conn.execute(tags.delete().where(tags.c.resource_id == id, tags.c.tag == tag))


def _words(words: list[str]) -> list[str]:
    refuse_nul(words, "tags")
    return list(dict.fromkeys(words))


def _missing(tag: str) -> NotFound:
    return NotFound(f"Tag {tag[:64]} could not be found.", type="TagNotFound")
