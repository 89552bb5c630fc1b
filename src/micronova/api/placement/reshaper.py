"""The reshaper: inventories and allocations move together from providers to others."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.api.placement import schemas
from micronova.api.placement.allocations import allocation_request
from micronova.api.placement.inventories import complete
from micronova.api.placement.uuids import with_normal_uuids
from micronova.db import provider_allocations, provider_inventories, providers
from micronova.db.engine import Database
from micronova.db.provider_inventories import UnknownClass
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, Invalid


class Reshaper:
    """The handler."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def reshape(self, request: Request) -> None:
        """Replace inventories and allocations in one transaction."""
        await self._database.write(self._reshape, request)

    def _reshape(self, conn: sa.Connection, request: Request) -> None:
        asked, now = with_normal_uuids(request.body["inventories"]), micros(self._clock.now())
        inventories = {
            uuid: {name: complete(request, uuid, name, values) for name, values in given["inventories"].items()}
            for uuid, given in asked.items()
        }
        changes = [
            allocation_request(request, consumer, body)
            for consumer, body in with_normal_uuids(request.body["allocations"]).items()
        ]
        provider_allocations.lock_reshape(conn, inventories, changes, now)
        _check_generations(conn, asked)
        try:
            # First everything that is new, so that the allocations fit; then what is no longer there.
            for uuid, new in sorted(inventories.items()):
                provider_inventories.add_missing(conn, uuid, new, now)
            provider_allocations.replace(conn, changes, now)
            for uuid, new in sorted(inventories.items()):
                provider_inventories.replace_all(conn, uuid, new, None, now, is_reshape=True)
        except UnknownClass as error:
            raise Invalid(f"Unable to reshape: {error.message}") from None


def _check_generations(conn: sa.Connection, asked: Mapping[str, Any]) -> None:
    """Raise Conflict if the generation of a provider is not the given one; Invalid if there is no such provider."""
    known = providers.get_many(conn, asked)
    for uuid, given in sorted(asked.items()):
        if uuid not in known:
            raise Invalid(
                f"Resource provider {uuid} in inventories not found: No resource provider with uuid {uuid} found.",
                placement_code="placement.resource_provider.not_found",
            )
        generation = given["resource_provider_generation"]
        if known[uuid].generation != generation:
            raise Conflict(
                f"resource provider generation conflict for provider {uuid}: actual: {known[uuid].generation}, "
                f"given: {generation}",
                placement_code=providers.CONCURRENT_UPDATE,
            )


def routes(database: Database, clock: Clock) -> list[Route]:
    """Declare the route of the reshaper."""
    return [
        Route(
            method="POST",
            path="/reshaper",
            handler=Reshaper(database, clock).reshape,
            policy="placement:reshaper:reshape",
            versions=since(30),
            body=schemas.reshaped,
            status=204,
        )
    ]
