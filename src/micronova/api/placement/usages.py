"""Usages: how much is used of a provider, and how much a project uses."""

from collections import Counter
from typing import Any

import sqlalchemy as sa

from micronova.api.placement import schemas
from micronova.api.placement.service import Answers
from micronova.db import provider_allocations, providers
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since


class Usages:
    """The handlers."""

    def __init__(self, database: Database, answers: Answers) -> None:
        self._database = database
        self._answers = answers

    async def of_provider(self, request: Request, uuid: str) -> Response:
        """Show what is used of a provider."""

        def read(conn: sa.Connection) -> tuple[int, dict[str, int]]:
            return providers.get(conn, uuid).generation, provider_allocations.usages_of_provider(conn, uuid)

        generation, used = await self._database.read(read)
        return self._answers.make(request, {"resource_provider_generation": generation, "usages": used})

    async def index(self, request: Request) -> Response:
        """Show what a project uses; from 1.38 on, by the type of its consumers."""
        asked = request.query
        request.authorize({"project_id": asked["project_id"]})
        found = await self._database.read(provider_allocations.usages, asked["project_id"], asked.get("user_id"))
        total: Counter[str] = Counter()
        for each in found.values():
            total.update(each.amounts)
        if request.minor < 38:
            return self._answers.make(request, {"usages": dict(total)})
        kind = asked.get("consumer_type")
        body: dict[str, Any] = {}
        if kind == "all":
            many = sum(each.consumers for each in found.values())
            body = {"all": {"consumer_count": many, **total}} if found else {}
        else:
            body = {
                name: {"consumer_count": each.consumers, **each.amounts}
                for name, each in found.items()
                if kind is None or name == kind
            }
        return self._answers.make(request, {"usages": body})


def routes(database: Database, answers: Answers) -> list[Route]:
    """Declare the routes of usages."""
    handlers = Usages(database, answers)
    return [
        Route(
            method="GET",
            path="/resource_providers/{uuid}/usages",
            handler=handlers.of_provider,
            policy="placement:resource_providers:usages",
            answer={"resource_provider_generation": int, "usages": {}},
        ),
        Route(
            method="GET",
            path="/usages",
            handler=handlers.index,
            policy="placement:usages",
            checks_policy=True,
            versions=since(9),
            query=schemas.usage_query,
            answer={"usages": {}},
        ),
    ]
