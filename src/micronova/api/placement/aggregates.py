"""The aggregates of a resource provider: uuids that several providers have in common.

A compute node is in the aggregates of its host. What is changed here does not change host aggregates.
"""

from typing import Any

import sqlalchemy as sa

from micronova.api.placement import schemas
from micronova.api.placement.service import Answers
from micronova.db import providers
from micronova.db.engine import Database
from micronova.db.providers import ProviderRow
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros

_ANSWER = {"aggregates": [str], "resource_provider_generation?": int}
_Found = tuple[ProviderRow, list[str]]


def _read(conn: sa.Connection, uuid: str) -> _Found:
    return providers.get(conn, uuid), sorted(providers.aggregates_of(conn, [uuid]).get(uuid, ()))


class Aggregates:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, answers: Answers) -> None:
        self._database = database
        self._clock = clock
        self._answers = answers

    def _shown(self, request: Request, found: _Found) -> Response:
        provider, members = found
        body: dict[str, Any] = {"aggregates": members}
        if request.minor >= 19:
            body["resource_provider_generation"] = provider.generation
        return self._answers.make(request, body)

    async def show(self, request: Request, uuid: str) -> Response:
        """List the aggregates of a provider."""
        return self._shown(request, await self._database.read(_read, uuid))

    async def update(self, request: Request, uuid: str) -> Response:
        """Put a provider into exactly these aggregates."""
        counted, now = request.minor >= 19, micros(self._clock.now())
        wanted = request.body["aggregates"] if counted else request.body
        generation = request.body["resource_provider_generation"] if counted else None

        def write(conn: sa.Connection) -> _Found:
            providers.get(conn, uuid)
            providers.touch(conn, uuid, now)
            if counted:
                providers.advance(conn, uuid, generation, now, f"Update conflict: {providers.GENERATION_CONFLICT}")
            providers.set_aggregates(conn, uuid, wanted)
            return _read(conn, uuid)

        provider, _ = await self._database.write(write)
        return self._shown(request, (provider, wanted))


def routes(database: Database, clock: Clock, answers: Answers) -> list[Route]:
    """Declare the routes of aggregates."""
    handlers = Aggregates(database, clock, answers)
    path, rule = "/resource_providers/{uuid}/aggregates", "placement:resource_providers:aggregates"
    return [
        Route(method="GET", path=path, handler=handlers.show, policy=f"{rule}:list", versions=since(1), answer=_ANSWER),
        Route(
            method="PUT",
            path=path,
            handler=handlers.update,
            policy=f"{rule}:update",
            versions=since(1),
            body=schemas.aggregates,
            answer=_ANSWER,
        ),
    ]
