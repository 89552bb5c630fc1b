"""Allocations: what consumers hold of resource providers."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.api.placement import schemas
from micronova.api.placement.service import Answers
from micronova.api.placement.uuids import is_uuid, normal_uuid, with_normal_uuids
from micronova.db import provider_allocations, providers
from micronova.db.engine import Database
from micronova.db.provider_allocations import UNKNOWN_TYPE, AllocationRequest
from micronova.db.provider_inventories import UnknownClass
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid

_ANSWER = {
    "allocations": {},
    "project_id?": str,
    "user_id?": str,
    "consumer_generation?": int | None,
    "consumer_type?": str,
}
_OF_PROVIDER = {"allocations": {}, "resource_provider_generation": int}


def allocation_request(request: Request, consumer: str, body: Mapping[str, Any]) -> AllocationRequest:
    """Return the allocations that the body has for a consumer."""
    given = body["allocations"]
    if isinstance(given, list):
        allocations = {normal_uuid(each["resource_provider"]["uuid"]): dict(each["resources"]) for each in given}
    else:
        allocations = {provider: dict(each["resources"]) for provider, each in with_normal_uuids(given).items()}
    return AllocationRequest(
        consumer=consumer,
        allocations=allocations,
        project_id=body.get("project_id"),
        user_id=body.get("user_id"),
        type=body.get("consumer_type"),
        generation=body.get("consumer_generation"),
        checks_generation=request.minor >= 28,
    )


def _stored(consumer_uuid: str) -> str:
    """Return the uuid of a consumer as it is stored; what is no uuid is that of no consumer."""
    return normal_uuid(consumer_uuid) if is_uuid(consumer_uuid) else consumer_uuid


class Allocations:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, answers: Answers) -> None:
        self._database = database
        self._clock = clock
        self._answers = answers

    async def show(self, request: Request, consumer_uuid: str) -> Response:
        """Show the allocations of a consumer."""
        consumer_uuid = _stored(consumer_uuid)

        def read(conn: sa.Connection) -> tuple[dict[str, Any], int | None]:
            found = provider_allocations.allocations_of_consumers(conn, [consumer_uuid])
            allocations = found.get(consumer_uuid, {})
            rows = providers.get_many(conn, allocations)
            shown = {
                provider: {"resources": resources, "generation": rows[provider].generation if provider in rows else 0}
                for provider, resources in allocations.items()
            }
            body: dict[str, Any] = {"allocations": shown}
            consumer = provider_allocations.consumers_of(conn, found).get(consumer_uuid)
            if allocations and consumer is not None and request.minor >= 12:
                body |= {"project_id": consumer.project_id, "user_id": consumer.user_id}
                if request.minor >= 28:
                    body["consumer_generation"] = consumer.generation
                if request.minor >= 38:
                    body["consumer_type"] = consumer.type or UNKNOWN_TYPE
            return body, consumer.updated_at or None if consumer is not None else None

        body, changed_at = await self._database.read(read)
        return self._answers.make(request, body, changed_at)

    async def of_provider(self, request: Request, uuid: str) -> Response:
        """Show the allocations of a provider."""

        def read(conn: sa.Connection) -> dict[str, Any]:
            provider = providers.get(conn, uuid)
            allocations = provider_allocations.allocations_of_provider(conn, uuid)
            shown: dict[str, dict[str, Any]] = {consumer: {"resources": each} for consumer, each in allocations.items()}
            if request.minor >= 28 and allocations:
                of_consumers = provider_allocations.allocations_of_consumers(conn, allocations)
                known = provider_allocations.consumers_of(conn, of_consumers)
                for consumer, each in shown.items():
                    if consumer in known:
                        each["consumer_generation"] = known[consumer].generation
            return {"allocations": shown, "resource_provider_generation": provider.generation}

        return self._answers.make(request, await self._database.read(read))

    async def replace(self, request: Request, consumer_uuid: str) -> None:
        """Replace the allocations of a consumer."""
        if not is_uuid(consumer_uuid):
            raise Invalid(f"Malformed consumer_uuid: {consumer_uuid[:64]}")
        consumer = normal_uuid(consumer_uuid)
        try:
            await self._write([allocation_request(request, consumer, request.body)])
        except UnknownClass as error:
            raise Invalid(f"Unable to allocate inventory for consumer {consumer}: {error.message}") from None

    async def replace_many(self, request: Request) -> None:
        """Replace the allocations of consumers, of all or of none."""
        try:
            bodies = with_normal_uuids(request.body)
            await self._write([allocation_request(request, consumer, body) for consumer, body in bodies.items()])
        except UnknownClass as error:
            raise Invalid(f"Unable to allocate inventory: {error.message}") from None

    async def _write(self, changes: list[AllocationRequest]) -> None:
        await self._database.write(provider_allocations.replace, changes, micros(self._clock.now()))

    async def delete(self, request: Request, consumer_uuid: str) -> None:
        """Remove the allocations of a consumer."""
        await self._database.write(provider_allocations.release, _stored(consumer_uuid), micros(self._clock.now()))


def routes(database: Database, clock: Clock, answers: Answers) -> list[Route]:
    """Declare the routes of allocations."""
    handlers = Allocations(database, clock, answers)
    one, rule = "/allocations/{consumer_uuid}", "placement:allocations"
    return [
        Route(
            method="GET",
            path="/resource_providers/{uuid}/allocations",
            handler=handlers.of_provider,
            policy="placement:resource_providers:allocations:list",
            answer=_OF_PROVIDER,
        ),
        Route(
            method="POST",
            path="/allocations",
            handler=handlers.replace_many,
            policy=f"{rule}:manage",
            versions=since(13),
            body=schemas.many_allocations,
            status=204,
        ),
        Route(method="GET", path=one, handler=handlers.show, policy=f"{rule}:list", answer=_ANSWER),
        Route(
            method="PUT",
            path=one,
            handler=handlers.replace,
            policy=f"{rule}:update",
            body=schemas.allocations,
            status=204,
        ),
        Route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete", status=204),
    ]
