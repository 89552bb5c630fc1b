"""Quota classes: named sets of limits; projects without limits of their own have those of the class `default`."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.api.compute.quota_resources import FILES, NETWORK, Amounts, view
from micronova.api.inputs import STRICT, Body, NoQuery
from micronova.api.view import Field
from micronova.db import quotas
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects.errors import Invalid

NETWORK_UNTIL = 49
LIMITS = view(NETWORK_UNTIL, Field("id", lambda limits, name: name, type=str), groups=since(50))
UPDATED = view(NETWORK_UNTIL, groups=since(50))


class Limits(Amounts):
    """A class's limits."""

    versions = {**dict.fromkeys(NETWORK, until(NETWORK_UNTIL)), **dict.fromkeys(FILES, until(56))}


class Update(Body):
    """The body of an update."""

    quota_class_set: Limits


class QuotaClassSets:
    """The handlers."""

    def __init__(self, database: Database, defaults: Mapping[str, int]) -> None:
        self._database = database
        self._defaults = defaults

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a class; limits that were not set are the defaults."""
        limits = await self._database.read(quotas.class_limits, id, self._defaults)
        return {"quota_class_set": LIMITS.at(request.minor)(limits, id)}

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Set limits of a class."""
        if len(id) > 255:
            raise Invalid("Invalid input for quota_class_name: it may have 255 characters.")
        limits = await self._database.write(self._set, id, request.body.quota_class_set.given())
        return {"quota_class_set": UPDATED.at(request.minor)(limits)}

    def _set(self, conn: sa.Connection, name: str, asked: Mapping[str, int]) -> dict[str, int]:
        quotas.set_class_limits(conn, name, asked)
        return quotas.class_limits(conn, name, self._defaults)


def routes(database: Database, quota_defaults: Mapping[str, int]) -> list[Route]:
    """Declare the routes of quota classes."""
    handlers = QuotaClassSets(database, quota_defaults)
    path, rule = "/os-quota-class-sets/{id}", "os_compute_api:os-quota-class-sets"
    return [
        Route(
            method="GET", path=path, handler=handlers.show, policy=f"{rule}:show",
            query=NoQuery, strict_query=STRICT, answer={"quota_class_set": LIMITS},
        ),
        Route(method="PUT", path=path, handler=handlers.update, policy=f"{rule}:update", body=Update,
              answer={"quota_class_set": UPDATED}),
    ]  # fmt: skip
