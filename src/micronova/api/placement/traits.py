"""Traits: what resource providers are and can do, by OpenStack's names and by names that the cloud adds."""

from functools import partial
from typing import Any

import sqlalchemy as sa

from micronova.api.placement import schemas
from micronova.api.placement.service import Answers
from micronova.db import placement_names, providers
from micronova.db.engine import Database
from micronova.db.providers import ProviderRow
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.placement.standard import CUSTOM_NAME

_LIST = {"traits": [str]}
_OF_PROVIDER = {"traits": [str], "resource_provider_generation": int}
_STALE = "Resource provider's generation already changed. Please update the generation and try again."
_Found = tuple[ProviderRow, set[str]]


def _name_filter(text: str) -> tuple[set[str] | None, str | None]:
    """Return the names, or the prefix, that `in:A,B` or `startswith:A` asks for; raise Invalid."""
    operator, separator, value = text.partition(":")
    if separator and operator == "in":
        return set(value.split(",")), None
    if separator and operator == "startswith":
        return None, value
    raise Invalid(
        "Badly formatted name parameter. Expected name query string parameter in form: "
        f'?name=[in|startswith]:[name1,name2|prefix]. Got: "{text[:300]}"'
    )


def _read(conn: sa.Connection, uuid: str) -> _Found:
    return providers.get(conn, uuid), providers.traits_of(conn, [uuid]).get(uuid, set())


class Traits:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, answers: Answers) -> None:
        self._database = database
        self._clock = clock
        self._answers = answers

    async def index(self, request: Request) -> Response:
        """List traits: all, those with certain names, or those that providers have."""
        names, prefix = _name_filter(request.query["name"]) if "name" in request.query else (None, None)
        associated = request.query.get("associated")
        if associated is not None and associated.lower() not in ("true", "false"):
            raise Invalid('The query parameter "associated" only accepts "true" or "false"')
        wanted = None if associated is None else associated.lower() == "true"
        found = await self._database.read(placement_names.list_traits, names=names, prefix=prefix, associated=wanted)
        newest = max((at for at in found.values() if at is not None), default=None)
        return self._answers.make(request, {"traits": list(found)}, newest)

    async def show(self, request: Request, name: str) -> Response:
        """Answer whether there is such a trait."""
        known, created_at = await self._database.read(placement_names.find_trait, name)
        if not known:
            raise NotFound(f"No such trait(s): {name}.")
        return self._answers.make(request, None, created_at)

    async def create(self, request: Request, name: str) -> Response:
        """Add a custom trait; if there is one already, answer 204."""
        if not CUSTOM_NAME.fullmatch(name) or len(name) > 255:
            raise Invalid(
                "The trait is invalid. A valid trait must be no longer than 255 characters, start with the prefix "
                '"CUSTOM_" and use following characters: "A"-"Z", "0"-"9" and "_"'
            )
        now = micros(self._clock.now())
        new = await self._database.write(placement_names.create_trait, name, now)
        return self._answers.make(request, None, now, status=201 if new else 204, location=f"/traits/{name}")

    async def delete(self, request: Request, name: str) -> None:
        """Remove a custom trait that no provider has."""
        await self._database.write(placement_names.delete_trait, name)

    def _shown(self, request: Request, found: _Found) -> Response:
        provider, traits = found
        body = {"traits": sorted(traits), "resource_provider_generation": provider.generation}
        return self._answers.make(request, body)

    async def of_provider(self, request: Request, uuid: str) -> Response:
        """List the traits of a provider."""
        return self._shown(request, await self._database.read(_read, uuid))

    async def update(self, request: Request, uuid: str) -> Response:
        """Give a provider exactly these traits."""
        wanted, generation = set(request.body["traits"]), request.body["resource_provider_generation"]
        return self._shown(request, await self._database.write(self._set, uuid, wanted, generation))

    async def clear(self, request: Request, uuid: str) -> None:
        """Take all traits from a provider."""
        await self._database.write(self._set, uuid, set(), None)

    def _set(self, conn: sa.Connection, uuid: str, wanted: set[str], generation: int | None) -> _Found:
        now = micros(self._clock.now())
        provider = providers.get(conn, uuid)
        if generation is not None and provider.generation != generation:
            raise Conflict(_STALE, placement_code=providers.CONCURRENT_UPDATE)
        providers.touch(conn, uuid, now)
        providers.advance(conn, uuid, generation, now, _STALE)
        if unknown := placement_names.unknown_traits(conn, wanted, keep=True):
            raise Invalid(f"No such trait(s): {', '.join(unknown)}.")
        providers.set_traits(conn, uuid, wanted)
        return _read(conn, uuid)


def routes(database: Database, clock: Clock, answers: Answers) -> list[Route]:
    """Declare the routes of traits."""
    handlers = Traits(database, clock, answers)
    rule, own_rule = "placement:traits", "placement:resource_providers:traits"
    one: Any = partial(Route, path="/traits/{name}", versions=since(6))
    of_provider: Any = partial(Route, path="/resource_providers/{uuid}/traits", versions=since(6))
    return [
        Route(
            method="GET",
            path="/traits",
            handler=handlers.index,
            policy=f"{rule}:list",
            versions=since(6),
            query=schemas.trait_query,
            answer=_LIST,
        ),
        one(method="GET", handler=handlers.show, policy=f"{rule}:show", status=204),
        one(method="PUT", handler=handlers.create, policy=f"{rule}:update", status=201, also={204: None}),
        one(method="DELETE", handler=handlers.delete, policy=f"{rule}:delete", status=204),
        of_provider(method="GET", handler=handlers.of_provider, policy=f"{own_rule}:list", answer=_OF_PROVIDER),
        of_provider(
            method="PUT",
            handler=handlers.update,
            policy=f"{own_rule}:update",
            body=schemas.provider_traits,
            answer=_OF_PROVIDER,
        ),
        of_provider(method="DELETE", handler=handlers.clear, policy=f"{own_rule}:delete", status=204),
    ]
