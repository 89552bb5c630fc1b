"""/v3/roles and what they imply."""

from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.identity import attributes
from micronova.neighbours.identity.api import views
from micronova.neighbours.identity.api.common import V3, collection, page, self_link
from micronova.neighbours.identity.attributes import RoleAttributes, RoleChanges
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import roles
from micronova.neighbours.identity.store.rows import Row


class RoleBody(Struct):
    """A body that holds a role."""

    role: dict[str, Any]


class RolesAPI:
    """Roles."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Declare the operations."""
        path, one = f"{V3}/roles", f"{V3}/roles/{{role_id}}"
        implied = f"{one}/implies/{{implied_id}}"

        def route(method: str, path: str, handler: Any, rule: str, **more: Any) -> Route:
            return Route(method=method, path=path, handler=handler, policy=f"identity:{rule}", **more)

        return [
            route("GET", path, self.index, "list_roles", checks_policy=True),
            route("POST", path, self.create, "create_role", status=201, body=RoleBody, checks_policy=True),
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
        """List the roles that hold everywhere, or those of a domain."""
        of_domain = "domain_id" in request.raw_query
        request.authorize(rule="identity:list_domain_roles" if of_domain else "identity:list_roles")
        listed = await self._core.read(roles.listing, request.raw_query, page(request))
        return collection(request, "roles", [views.role(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, role_id: str) -> dict[str, Any]:
        """Show a role."""
        return {"role": views.role(request, await self._core.read(roles.get, role_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Make a role."""
        wanted, extra = attributes.read(request.body.role, RoleAttributes, "role")
        request.authorize(rule="identity:create_domain_role" if wanted.domain_id else "identity:create_role")
        row = await self._core.write(roles.create, self._core.new_id(), wanted, extra, self._core.now)
        return {"role": views.role(request, row)}

    async def update(self, request: Request, role_id: str) -> dict[str, Any]:
        """Change a role."""
        wanted, extra = attributes.changes(request.body.role, RoleChanges, "role")
        moment = self._core.moment()
        row, voided = await self._core.write(roles.change, role_id, wanted, extra, moment)
        self._core.apply(voided, moment)
        return {"role": views.role(request, row)}

    async def delete(self, request: Request, role_id: str) -> None:
        """Delete a role."""
        moment = self._core.moment()
        self._core.apply(await self._core.write(roles.delete, role_id, moment), moment)

    async def list_implied(self, request: Request, role_id: str) -> dict[str, Any]:
        """List what a role implies directly."""
        prior, implied = await self._core.read(_implied, role_id)
        inference = {
            "prior_role": views.short_role(request, prior),
            "implies": [views.short_role(request, row) for row in implied],
        }
        return {"role_inference": inference, "links": {"self": self_link(request)}}

    async def show_implied(self, request: Request, role_id: str, implied_id: str) -> dict[str, Any]:
        """Show one implication."""
        return self._inference(request, *await self._core.read(roles.implication, role_id, implied_id))

    async def check_implied(self, request: Request, role_id: str, implied_id: str) -> None:
        """Tell whether a role implies another."""
        await self._core.read(roles.implication, role_id, implied_id)

    async def imply(self, request: Request, role_id: str, implied_id: str) -> dict[str, Any]:
        """Let a role imply another."""
        return self._inference(request, *await self._core.write(roles.imply, role_id, implied_id))

    async def unimply(self, request: Request, role_id: str, implied_id: str) -> None:
        """Let a role no longer imply another."""
        moment = self._core.moment()
        self._core.apply(await self._core.write(roles.unimply, role_id, implied_id, moment), moment)

    def _inference(self, request: Request, prior: Row, implied: Row) -> dict[str, Any]:
        inference = {
            "prior_role": views.short_role(request, prior),
            "implies": views.short_role(request, implied),
        }
        return {"role_inference": inference, "links": {"self": self_link(request)}}

    async def inferences(self, request: Request) -> dict[str, Any]:
        """List all implications."""
        found = await self._core.read(_inferences)
        inferences = [
            {
                "prior_role": views.short_role(request, prior),
                "implies": [views.short_role(request, row) for row in implied],
            }
            for prior, implied in found
        ]
        return {"role_inferences": inferences, "links": {"self": self_link(request)}}


def _implied(conn: sa.Connection, role_id: str) -> tuple[Row, list[Row]]:
    prior = roles.get(conn, role_id)
    return prior, roles.by_ids(conn, roles.implications(conn).get(role_id, []))


def _inferences(conn: sa.Connection) -> list[tuple[Row, list[Row]]]:
    implications = roles.implications(conn)
    return [(prior, roles.by_ids(conn, implications[prior["id"]])) for prior in roles.by_ids(conn, implications)]
