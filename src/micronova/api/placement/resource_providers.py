"""Resource providers: compute nodes, and what other services add."""

from random import Random
from types import EllipsisType
from typing import Any

import sqlalchemy as sa

from micronova.api.placement import query, schemas
from micronova.api.placement.service import Answers, path_of
from micronova.api.placement.uuids import normal_uuid
from micronova.db import placement_names, provider_trees, providers
from micronova.db.engine import Database
from micronova.db.providers import ProviderRow
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid
from micronova.objects.ids import new_uuid
from micronova.placement.model import RequestGroup

_LINKS = (("inventories", 0), ("usages", 0), ("aggregates", 1), ("traits", 6), ("allocations", 11))
ONE = {
    "uuid": str,
    "name": str,
    "generation": int,
    "links": [{"rel": str, "href": str}],
    "parent_provider_uuid?": str | None,
    "root_provider_uuid?": str,
}


def shown(request: Request, row: ProviderRow) -> dict[str, Any]:
    """Return a provider as its microversion shows it."""
    url = path_of(request, f"/resource_providers/{row.uuid}")
    links = [{"rel": "self", "href": url}]
    links += [{"rel": name, "href": f"{url}/{name}"} for name, since in _LINKS if request.minor >= since]
    found: dict[str, Any] = {"uuid": row.uuid, "name": row.name, "generation": row.generation, "links": links}
    if request.minor >= 14:
        found |= {"parent_provider_uuid": row.parent_uuid, "root_provider_uuid": row.root_uuid}
    return found


class ResourceProviders:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, random: Random, answers: Answers) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._answers = answers

    async def index(self, request: Request) -> Response:
        """List providers, by their name, tree, aggregates, traits and what they have room for."""
        asked, given = request.query, request.raw_query
        required, forbidden = query.traits(given.get("required", ()), request.minor)
        wanted, unwanted = query.aggregates(given.get("member_of", ()), request.minor)
        group = RequestGroup(
            resources=query.resources(asked["resources"]) if "resources" in asked else {},
            required=required,
            forbidden=forbidden,
            member_of=wanted,
            not_member_of=unwanted,
            in_tree=asked.get("in_tree"),
        )
        rows = await self._database.read(_search, asked.get("name"), asked.get("uuid"), group)
        newest = max((row.updated_at for row in rows), default=None)
        return self._answers.make(request, {"resource_providers": [shown(request, row) for row in rows]}, newest)

    async def create(self, request: Request) -> Response:
        """Create a provider."""
        body = request.body
        uuid = normal_uuid(body["uuid"]) if "uuid" in body else new_uuid(self._random)
        parent, now = _parent(body.get("parent_provider_uuid")), micros(self._clock.now())
        row = await self._database.write(providers.create, uuid, body["name"], parent, now)
        where = f"/resource_providers/{uuid}"
        if request.minor < 20:
            return Response(status=201, headers={"location": f"{request.base_url}{where}"})
        return self._answers.make(request, shown(request, row), row.updated_at, location=where)

    async def show(self, request: Request, uuid: str) -> Response:
        """Show a provider."""
        row = await self._database.read(providers.get, uuid)
        return self._answers.make(request, shown(request, row), row.updated_at)

    async def update(self, request: Request, uuid: str) -> Response:
        """Rename a provider, or give it another parent."""
        parent = _parent(request.body.get("parent_provider_uuid", ...))
        now, may_move = micros(self._clock.now()), request.minor >= 37
        row = await self._database.write(
            providers.update, uuid, request.body["name"], parent, may_move=may_move, now=now
        )
        return self._answers.make(request, shown(request, row), row.updated_at)

    async def delete(self, request: Request, uuid: str) -> None:
        """Delete a provider that has neither children nor allocations."""
        await self._database.write(providers.delete, uuid, micros(self._clock.now()))


def _parent(given: str | EllipsisType | None) -> Any:
    return normal_uuid(given) if isinstance(given, str) else given


def _search(conn: sa.Connection, name: str | None, uuid: str | None, group: RequestGroup) -> list[ProviderRow]:
    named = {*group.forbidden, *frozenset[str]().union(*group.required)}
    if unknown := placement_names.unknown_traits(conn, named):
        raise Invalid(f'Invalid trait(s) in "required" parameter: No such trait(s): {", ".join(unknown)}.')
    if unknown := placement_names.unknown_classes(conn, group.resources):
        raise query.no_such_class(unknown)
    return provider_trees.search(conn, name=name, uuid=uuid, group=group)


def routes(database: Database, clock: Clock, random: Random, answers: Answers) -> list[Route]:
    """Declare the routes of resource providers."""
    handlers = ResourceProviders(database, clock, random, answers)
    root, rule = "/resource_providers", "placement:resource_providers"
    one = f"{root}/{{uuid}}"
    return [
        Route(
            method="GET",
            path=root,
            handler=handlers.index,
            policy=f"{rule}:list",
            query=schemas.provider_query,
            answer={"resource_providers": [ONE]},
        ),
        Route(
            method="POST",
            path=root,
            handler=handlers.create,
            policy=f"{rule}:create",
            body=schemas.new_provider,
            answer=ONE,
        ),
        Route(method="GET", path=one, handler=handlers.show, policy=f"{rule}:show", answer=ONE),
        Route(
            method="PUT",
            path=one,
            handler=handlers.update,
            policy=f"{rule}:update",
            body=schemas.changed_provider,
            answer=ONE,
        ),
        Route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete", status=204),
    ]
