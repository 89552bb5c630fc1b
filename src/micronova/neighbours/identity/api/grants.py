"""Giving and taking roles: /v3/{projects,domains,system}/…/{users,groups}/{id}/roles, and inherited ones."""

from collections.abc import Awaitable, Callable
from typing import Any

import sqlalchemy as sa

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.identity.api import views
from micronova.neighbours.identity.api.common import V3, collection
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import assignments, roles
from micronova.neighbours.identity.store.assignments import SYSTEM, Grant
from micronova.objects.errors import NotFound

MANAGED = ("manager", "member", "reader")  # what the manager of a domain may give and take

Handler = Callable[..., Awaitable[Any]]


class GrantsAPI:
    """Grants: the same five operations for every kind of actor and target."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Declare the operations."""
        found: list[Route] = []
        for actor in ("user", "group"):
            for target, place in (
                ("project", f"{V3}/projects/{{project_id}}"),
                ("domain", f"{V3}/domains/{{domain_id}}"),
                (SYSTEM, f"{V3}/system"),
            ):
                path = f"{place}/{actor}s/{{{actor}_id}}/roles"
                found += self._family(path, f"{path}/{{role_id}}", actor, target, inherited=False)
                if target != SYSTEM:
                    path = path.replace(V3, f"{V3}/OS-INHERIT", 1)
                    end = "inherited_to_projects"
                    found += self._family(f"{path}/{end}", f"{path}/{{role_id}}/{end}", actor, target, inherited=True)
        return found

    def _family(self, many: str, one: str, actor: str, target: str, inherited: bool) -> list[Route]:
        def rule(verb: str) -> str:
            if target == SYSTEM:
                return f"identity:{verb}_system_grant{'s' if verb == 'list' else ''}_for_{actor}"
            return f"identity:{verb}_grant{'s' if verb == 'list' else ''}"

        def route(method: str, path: str, handler: Handler, verb: str, status: int) -> Route:
            async def handle(request: Request, **ids: str) -> Any:
                target_id = SYSTEM if target == SYSTEM else ids[f"{target}_id"]
                grant = Grant(actor, ids[f"{actor}_id"], target, target_id, ids.get("role_id", ""), inherited)
                return await handler(request, grant)

            return Route(method=method, path=path, handler=handle, policy=rule(verb), checks_policy=True, status=status)

        return [
            route("GET", many, self.index, "list", 200),
            route("GET", one, self.check, "check", 204),
            route("PUT", one, self.create, "create", 204),
            route("DELETE", one, self.delete, "revoke", 204),
        ]

    async def _authorize(self, request: Request, grant: Grant, *, giving: bool = False) -> None:
        """Authorise against the domain that actor and target are both in.

        Two domains are none; so is, for who gives or takes, a role that is not a domain manager's to give.
        """
        domain_id, missing = await self._core.read(_domain, grant, giving)
        request.authorize({"domain_id": domain_id})
        if missing is not None:
            raise missing

    async def index(self, request: Request, grant: Grant) -> dict[str, Any]:
        """List the roles that an actor was granted on a target."""
        await self._authorize(request, grant)
        rows = await self._core.read(assignments.granted_roles, grant)
        return collection(request, "roles", [views.role(request, row) for row in rows])

    async def check(self, request: Request, grant: Grant) -> None:
        """Tell whether a role was granted."""
        await self._authorize(request, grant)
        if not await self._core.read(assignments.exists, grant):
            raise NotFound(
                f"Could not find role assignment with role: {grant.role_id}, {grant.actor}: {grant.actor_id}, "
                f"{grant.target}: {grant.target_id}."
            )

    async def create(self, request: Request, grant: Grant) -> None:
        """Grant a role."""
        await self._authorize(request, grant, giving=True)
        await self._core.write(assignments.add, grant)

    async def delete(self, request: Request, grant: Grant) -> None:
        """Take a role away."""
        await self._authorize(request, grant, giving=True)
        moment = self._core.moment()
        self._core.apply(await self._core.write(assignments.remove, grant, moment), moment)


def _domain(conn: sa.Connection, grant: Grant, giving: bool) -> tuple[str | None, NotFound | None]:
    """Return the domain that a grant is in, if it is in one, and what it speaks of that does not exist."""
    try:
        actor, target = assignments.actor_and_target(conn, grant)
        role = roles.get(conn, grant.role_id) if grant.role_id else None
    except NotFound as missing:
        return None, missing
    if target is None or (giving and (role is None or role["name"] not in MANAGED)):
        return None, None
    home = target["domain_id"] if grant.target == "project" else target["id"]
    return (home if home == actor["domain_id"] else None), None
