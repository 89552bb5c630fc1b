"""Flavor access: the projects that may use a flavor that is not public."""

from collections.abc import Awaitable, Callable
from typing import Any

import sqlalchemy as sa

from micronova.api.compute.flavors import announce_update
from micronova.api.inputs import STRICT, Body, NoQuery, Text
from micronova.db import flavors
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.notifications.notifier import Announcer
from micronova.objects.errors import Conflict, Invalid, NotFound

ProjectExists = Callable[[str], Awaitable[bool]]


class Tenant(Body):
    """A project."""

    tenant: Text


class AddAccess(Body):
    """The action that lets a project use a flavor."""

    addTenantAccess: Tenant  # noqa: N815 - as on the wire


class RemoveAccess(Body):
    """The action that removes a project's access."""

    removeTenantAccess: Tenant  # noqa: N815


_ANSWER = {"flavor_access": [{"flavor_id": str, "tenant_id": str}]}


def _shown(flavorid: str, projects: list[str]) -> dict[str, Any]:
    return {"flavor_access": [{"flavor_id": flavorid, "tenant_id": project} for project in projects]}


class FlavorAccess:
    """The handlers."""

    def __init__(self, database: Database, project_exists: ProjectExists, notifier: Announcer) -> None:
        self._database = database
        self._project_exists = project_exists
        self._notifier = notifier

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List the projects that may use a flavor."""
        return _shown(id, await self._database.read(_access, id))

    async def add(self, request: Request, id: str) -> dict[str, Any]:
        """Let a project use a flavor."""
        project = request.body.addTenantAccess.tenant
        if not await self._project_exists(project):
            raise Invalid(f"Project ID {project} is not a valid project.")
        refuse_public = request.minor >= 7
        projects = await self._database.write(_grant, id, project, refuse_public)
        await announce_update(self._notifier, self._database, request, id)
        return _shown(id, projects)

    async def remove(self, request: Request, id: str) -> dict[str, Any]:
        """Remove a project's access."""
        project = request.body.removeTenantAccess.tenant
        projects = await self._database.write(_revoke, id, project)
        await announce_update(self._notifier, self._database, request, id)
        return _shown(id, projects)


def _access(conn: sa.Connection, flavorid: str) -> list[str]:
    if flavors.row(conn, flavorid).is_public:
        raise NotFound("Access list not available for public flavors.")
    return flavors.access(conn, flavorid)


def _grant(conn: sa.Connection, flavorid: str, project: str, refuse_public: bool) -> list[str]:
    if flavors.row(conn, flavorid).is_public and refuse_public:
        raise Conflict("Can not add access to a public flavor.")
    return flavors.grant(conn, flavorid, project)


def _revoke(conn: sa.Connection, flavorid: str, project: str) -> list[str]:
    flavors.row(conn, flavorid)
    return flavors.revoke(conn, flavorid, project)


def routes(database: Database, project_exists: ProjectExists, notifier: Announcer) -> list[Route]:
    """Declare the routes of flavor access."""
    handlers = FlavorAccess(database, project_exists, notifier)
    rule = "os_compute_api:os-flavor-access"
    return [
        Route(
            method="GET", path="/flavors/{id}/os-flavor-access", handler=handlers.index, policy=rule,
            query=NoQuery, strict_query=STRICT, answer=_ANSWER,
        ),
        Route(
            method="POST", path="/flavors/{id}/action", action="addTenantAccess", handler=handlers.add,
            policy=f"{rule}:add_tenant_access", body=AddAccess, answer=_ANSWER,
        ),
        Route(
            method="POST", path="/flavors/{id}/action", action="removeTenantAccess", handler=handlers.remove,
            policy=f"{rule}:remove_tenant_access", body=RemoveAccess, answer=_ANSWER,
        ),
    ]  # fmt: skip
