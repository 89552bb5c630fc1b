"""Inventories: how much a resource provider has of each resource class."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import sqlalchemy as sa

from micronova.api.placement import schemas
from micronova.api.placement.service import Answers
from micronova.db import provider_inventories, providers
from micronova.db.engine import Database
from micronova.db.provider_inventories import FIELDS, Inventory, InventoryRow, UnknownClass
from micronova.db.providers import ProviderRow
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, Invalid, MethodNotAllowed, NotFound
from micronova.placement.model import MOST_UNITS

DEFAULTS = {"reserved": 0, "min_unit": 1, "max_unit": MOST_UNITS, "step_size": 1, "allocation_ratio": 1.0}
_FIELDS = {name: float if name == "allocation_ratio" else int for name in FIELDS}
_ONE = {**_FIELDS, "resource_provider_generation": int}
_ALL = {"inventories": {}, "resource_provider_generation": int}


def complete(request: Request, uuid: str, name: str, given: Mapping[str, Any], verb: str = "update") -> Inventory:
    """Return an inventory with its defaults; raise Invalid if it reserves too much."""
    found = {**DEFAULTS, **{field: value for field, value in given.items() if field in FIELDS}}
    values = cast(Inventory, found)  # the schema of the request has checked them
    over = values["reserved"] - values["total"]
    if over > 0 or (over == 0 and request.minor < 26):
        bound = "greater than total" if request.minor >= 26 else "greater than or equal to total"
        raise Invalid(
            f"Unable to {verb} inventory for resource provider {uuid}: Invalid inventory for '{name}' on resource "
            f"provider '{uuid}'. The reserved value is {bound}."
        )
    return values


def _shown(row: InventoryRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in FIELDS}


def _check_generation(conn: sa.Connection, uuid: str, generation: int) -> None:
    """Raise Conflict if a provider has another generation than its client has read; NotFound if there is none."""
    if providers.get(conn, uuid).generation != generation:
        raise Conflict("resource provider generation conflict", placement_code=providers.CONCURRENT_UPDATE)


def _read(conn: sa.Connection, uuid: str) -> tuple[ProviderRow, list[InventoryRow]]:
    return providers.get(conn, uuid), provider_inventories.list_(conn, uuid)


class Inventories:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, answers: Answers) -> None:
        self._database = database
        self._clock = clock
        self._answers = answers

    def _all(self, request: Request, found: tuple[ProviderRow, list[InventoryRow]]) -> Response:
        provider, rows = found
        body = {
            "resource_provider_generation": provider.generation,
            "inventories": {row.resource_class: _shown(row) for row in rows},
        }
        return self._answers.make(request, body, max((row.changed_at for row in rows), default=None))

    async def index(self, request: Request, uuid: str) -> Response:
        """List the inventories of a provider."""
        return self._all(request, await self._database.read(_read, uuid))

    async def show(self, request: Request, uuid: str, resource_class: str) -> Response:
        """Show an inventory."""

        def read(conn: sa.Connection) -> tuple[ProviderRow, InventoryRow]:
            provider = providers.get(conn, uuid)
            row = provider_inventories.find(conn, uuid, resource_class)
            if row is None:
                raise NotFound(f"No inventory of class {resource_class} for {uuid}")
            return provider, row

        return self._one(request, await self._database.read(read))

    def _one(self, request: Request, found: tuple[ProviderRow, InventoryRow], **more: Any) -> Response:
        provider, row = found
        body = {"resource_provider_generation": provider.generation, **_shown(row)}
        return self._answers.make(request, body, row.changed_at, **more)

    async def create(self, request: Request, uuid: str) -> Response:
        """Give a provider an inventory that it does not have."""
        body, now = request.body, micros(self._clock.now())
        name, generation = body["resource_class"], body.get("resource_provider_generation")

        def write(conn: sa.Connection) -> tuple[ProviderRow, InventoryRow]:
            providers.get(conn, uuid)
            values = complete(request, uuid, name, body, "create")
            try:
                provider_inventories.add(conn, uuid, name, values, generation, now)
            except UnknownClass as error:
                raise Invalid(f"Unable to create inventory for resource provider {uuid}: {error.message}") from None
            row = provider_inventories.find(conn, uuid, name)
            assert row is not None
            return providers.get(conn, uuid), row

        found = await self._database.write(write)
        where = f"/resource_providers/{uuid}/inventories/{name}"
        return self._one(request, found, location=where, status=201)

    async def update(self, request: Request, uuid: str, resource_class: str) -> Response:
        """Change an inventory."""
        body, now = request.body, micros(self._clock.now())
        generation = body["resource_provider_generation"]

        def write(conn: sa.Connection) -> tuple[ProviderRow, InventoryRow]:
            _check_generation(conn, uuid, generation)
            values = complete(request, uuid, resource_class, body)
            provider_inventories.change(conn, uuid, resource_class, values, generation, now)
            row = provider_inventories.find(conn, uuid, resource_class)
            assert row is not None
            return providers.get(conn, uuid), row

        return self._one(request, await self._database.write(write))

    async def replace(self, request: Request, uuid: str) -> Response:
        """Give a provider exactly these inventories."""
        body, now = request.body, micros(self._clock.now())
        generation = body["resource_provider_generation"]

        def write(conn: sa.Connection) -> tuple[ProviderRow, list[InventoryRow]]:
            _check_generation(conn, uuid, generation)
            wanted = {name: complete(request, uuid, name, given) for name, given in body["inventories"].items()}
            try:
                provider_inventories.replace_all(conn, uuid, wanted, generation, now)
            except UnknownClass as error:
                raise Invalid(
                    f"Unknown resource class in inventory for resource provider {uuid}: {error.message}"
                ) from None
            except Conflict as error:
                raise Conflict(f"update conflict: {error.message}", **error.details) from None
            return _read(conn, uuid)

        return self._all(request, await self._database.write(write))

    async def delete(self, request: Request, uuid: str, resource_class: str) -> None:
        """Remove an inventory of which nothing is used."""
        await self._remove(uuid, resource_class)

    async def delete_all(self, request: Request, uuid: str) -> None:
        """Remove all inventories of a provider, if nothing of them is used."""
        await self._remove(uuid, None)

    async def delete_all_early(self, request: Request, uuid: str) -> None:
        """Refuse to remove all at once, before 1.5."""
        raise MethodNotAllowed("The method DELETE is not allowed for this resource before microversion 1.5.")

    async def _remove(self, uuid: str, name: str | None) -> None:
        try:
            await self._database.write(provider_inventories.remove, uuid, name, micros(self._clock.now()))
        except Conflict as error:
            what = f"inventory of class {name}" if name else "inventory"
            raise Conflict(
                f"Unable to delete {what} of resource provider {uuid}: {error.message}", **error.details
            ) from None


def routes(database: Database, clock: Clock, answers: Answers) -> list[Route]:
    """Declare the routes of inventories."""
    handlers = Inventories(database, clock, answers)
    rule = "placement:resource_providers:inventories"
    all_ = partial(Route, path="/resource_providers/{uuid}/inventories")
    one = partial(Route, path="/resource_providers/{uuid}/inventories/{resource_class}")
    return [
        all_(method="GET", handler=handlers.index, policy=f"{rule}:list", answer=_ALL),
        all_(
            method="POST",
            handler=handlers.create,
            policy=f"{rule}:create",
            body=schemas.new_inventory,
            status=201,
            answer=_ONE,
        ),
        all_(
            method="PUT", handler=handlers.replace, policy=f"{rule}:update", body=schemas.all_inventories, answer=_ALL
        ),
        all_(method="DELETE", handler=handlers.delete_all, policy=f"{rule}:delete", status=204, versions=since(5)),
        all_(method="DELETE", handler=handlers.delete_all_early, policy=f"{rule}:delete", versions=until(4)),
        one(method="GET", handler=handlers.show, policy=f"{rule}:show", answer=_ONE),
        one(
            method="PUT", handler=handlers.update, policy=f"{rule}:update", body=schemas.changed_inventory, answer=_ONE
        ),
        one(method="DELETE", handler=handlers.delete, policy=f"{rule}:delete", status=204),
    ]
