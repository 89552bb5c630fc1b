"""/v3/{projects,domains,system}/…/{users,groups}/{id}/roles: grant and revoke roles, also inherited ones."""

from typing import Any

import sqlalchemy as sa

from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, collection
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import grants
from micronova.embedded.identity.store.grants import SYSTEM, Grant
from micronova.embedded.identity.store.kinds import ROLES
from micronova.http.request import Request
from micronova.http.service import Handler, Route
from micronova.objects.errors import NotFound

MANAGED_ROLES = ("manager", "member", "reader")  # that the manager of a domain may grant and revoke


class GrantsAPI:
    """Grants: the same four routes for every kind of actor and target."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        found: list[Route] = []
        for actor in ("user", "group"):
            for target, prefix in (
                ("project", f"{V3}/projects/{{project_id}}"),
                ("domain", f"{V3}/domains/{{domain_id}}"),
                (SYSTEM, f"{V3}/system"),
            ):
                path = f"{prefix}/{actor}s/{{{actor}_id}}/roles"
                found += self._routes(path, f"{path}/{{role_id}}", actor, target, inherited=False)
                if target != SYSTEM:
                    path = path.replace(V3, f"{V3}/OS-INHERIT", 1)
                    end = "inherited_to_projects"
                    found += self._routes(f"{path}/{end}", f"{path}/{{role_id}}/{end}", actor, target, inherited=True)
        return found

    def _routes(self, many: str, one: str, actor: str, target: str, inherited: bool) -> list[Route]:
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

    async def _authorize(self, request: Request, grant: Grant, *, changing: bool = False) -> None:
        """Authorise against the domain that actor and target are both in; if they are in two, against none.

        To grant or revoke a role that no domain manager may grant is authorised against no domain either.
        """
        domain_id, missing = await self._core.database.read(_domain, grant, changing)
        request.authorize({"domain_id": domain_id})
        if missing is not None:
            raise missing

    async def index(self, request: Request, grant: Grant) -> dict[str, Any]:
        """List the roles that were granted to an actor on a target."""
        await self._authorize(request, grant)
        rows = await self._core.database.read(grants.granted_roles, grant)
        return collection(request, "roles", [views.role(request, row) for row in rows])

    async def check(self, request: Request, grant: Grant) -> None:
        """Answer 204 if a role was granted, 404 if not."""
        await self._authorize(request, grant)
        if not await self._core.database.read(grants.exists, grant):
            raise grants.not_found(grant)

    async def create(self, request: Request, grant: Grant) -> None:
        """Grant a role."""
        await self._authorize(request, grant, changing=True)
        await self._core.write(grants.add, grant)

    async def delete(self, request: Request, grant: Grant) -> None:
        """Revoke a role."""
        await self._authorize(request, grant, changing=True)
        await self._core.write_revoking(grants.remove, grant)


def _domain(conn: sa.Connection, grant: Grant, changing: bool) -> tuple[str | None, NotFound | None]:
    """Return the domain of a grant, if it has one, and the error if its actor, target or role does not exist."""
    try:
        actor, target = grants.actor_and_target(conn, grant)
        role = ROLES.get(conn, grant.role_id) if grant.role_id else None
    except NotFound as missing:
        return None, missing
    if target is None or (changing and (role is None or role["name"] not in MANAGED_ROLES)):
        return None, None
    home = target["domain_id"] if "domain_id" in target else target["id"]
    return (home if home == actor["domain_id"] else None), None
