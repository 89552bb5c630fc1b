"""/v3/roles and the roles that they imply."""

from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.identity import attributes
from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, checked_route, collection, page, route, self_link
from micronova.embedded.identity.attributes import RoleAttributes, RoleChanges
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import role_assignments, roles
from micronova.embedded.identity.store.kinds import ROLES, RoleRow
from micronova.http.request import Request
from micronova.http.service import Route


class RoleBody(Struct):
    """A body that holds a role."""

    role: dict[str, Any]


class RolesAPI:
    """Roles."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/roles", f"{V3}/roles/{{role_id}}"
        implied = f"{one}/implies/{{implied_id}}"
        return [
            checked_route("GET", path, self.index, "list_roles"),
            checked_route("POST", path, self.create, "create_role", status=201, body=RoleBody),
            route("GET", one, self.show, "get_role"),
            route("PATCH", one, self.update, "update_role", body=RoleBody),
            route("DELETE", one, self.delete, "delete_role", status=204),
            route("GET", f"{one}/implies", self.list_implied, "list_implied_roles"),
            route("GET", implied, self.show_implied, "get_implied_role"),
            route("HEAD", implied, self.check_implied, "check_implied_role", status=204),
            route("PUT", implied, self.imply, "create_implied_role", status=201),
            route("DELETE", implied, self.unimply, "delete_implied_role", status=204),
            route("GET", f"{V3}/role_inferences", self.inferences, "list_role_inference_rules"),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List the roles of no domain, or those of one domain."""
        of_domain = "domain_id" in request.raw_query
        request.authorize(rule="identity:list_domain_roles" if of_domain else "identity:list_roles")
        listed = await self._core.database.read(roles.listing, request.raw_query, page(request))
        return collection(request, "roles", [views.role(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, role_id: str) -> dict[str, Any]:
        """Show a role."""
        return {"role": views.role(request, await self._core.database.read(ROLES.get, role_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a role."""
        wanted, extra = attributes.read(request.body.role, RoleAttributes, "role")
        request.authorize(rule="identity:create_domain_role" if wanted.domain_id else "identity:create_role")
        row = await self._core.write(roles.create, self._core.new_id(), wanted, extra, self._core.now())
        return {"role": views.role(request, row)}

    async def update(self, request: Request, role_id: str) -> dict[str, Any]:
        """Change a role."""
        wanted, extra = attributes.changes(request.body.role, RoleChanges, "role")
        row = await self._core.write_revoking(roles.change, role_id, wanted, extra)
        return {"role": views.role(request, row)}

    async def delete(self, request: Request, role_id: str) -> None:
        """Delete a role."""
        await self._core.write_revoking(roles.delete, role_id)

    async def list_implied(self, request: Request, role_id: str) -> dict[str, Any]:
        """List the roles that a role implies directly."""
        prior, implied = await self._core.database.read(_implied, role_id)
        inference = {
            "prior_role": views.short_role(request, prior),
            "implies": [views.short_role(request, row) for row in implied],
        }
        return {"role_inference": inference, "links": {"self": self_link(request)}}

    async def show_implied(self, request: Request, role_id: str, implied_id: str) -> dict[str, Any]:
        """Show one implication."""
        return self._inference(request, *await self._core.database.read(roles.implication, role_id, implied_id))

    async def check_implied(self, request: Request, role_id: str, implied_id: str) -> None:
        """Answer 204 if a role implies another directly, 404 if not."""
        await self._core.database.read(roles.implication, role_id, implied_id)

    async def imply(self, request: Request, role_id: str, implied_id: str) -> dict[str, Any]:
        """Make a role imply another."""
        return self._inference(request, *await self._core.write(roles.imply, role_id, implied_id))

    async def unimply(self, request: Request, role_id: str, implied_id: str) -> None:
        """Remove an implication."""
        await self._core.write_revoking(role_assignments.unimply, role_id, implied_id)

    def _inference(self, request: Request, prior: RoleRow, implied: RoleRow) -> dict[str, Any]:
        inference = {
            "prior_role": views.short_role(request, prior),
            "implies": views.short_role(request, implied),
        }
        return {"role_inference": inference, "links": {"self": self_link(request)}}

    async def inferences(self, request: Request) -> dict[str, Any]:
        """List all implications."""
        found = await self._core.database.read(_inferences)
        inferences = [
            {
                "prior_role": views.short_role(request, prior),
                "implies": [views.short_role(request, row) for row in implied],
            }
            for prior, implied in found
        ]
        return {"role_inferences": inferences, "links": {"self": self_link(request)}}


def _implied(conn: sa.Connection, role_id: str) -> tuple[RoleRow, list[RoleRow]]:
    prior = ROLES.get(conn, role_id)
    return prior, roles.by_ids(conn, roles.implications(conn).get(role_id, []))


def _inferences(conn: sa.Connection) -> list[tuple[RoleRow, list[RoleRow]]]:
    implications = roles.implications(conn)
    return [(prior, roles.by_ids(conn, implications[prior["id"]])) for prior in roles.by_ids(conn, implications)]
