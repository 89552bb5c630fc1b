"""GET /v3/role_assignments"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.query import Query, last
from micronova.embedded.identity.api.common import V3, checked_route, collection, link
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import role_assignments
from micronova.embedded.identity.store.grants import SYSTEM, Grant
from micronova.embedded.identity.store.role_assignments import Assigned, Filter, Named, Names
from micronova.embedded.identity.store.rows import flag
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid

INHERITED = "scope.OS-INHERIT:inherited_to"


class RoleAssignmentsAPI:
    """Role assignments."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the route."""
        return [
            checked_route("GET", f"{V3}/role_assignments", self.index, "list_role_assignments"),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List role assignments."""
        query = request.raw_query
        wanted = _filter(query, request.context.domain_id)
        suffix = "_for_tree" if wanted.subtree else ""
        request.authorize(rule=f"identity:list_role_assignments{suffix}")
        found, names = await self._core.database.read(_list, wanted, flag(query, "include_names"))
        return collection(request, "role_assignments", [_view(request, each, names) for each in found])


def _filter(query: Query, within_domain: str | None) -> Filter:
    wanted = Filter(
        user_id=last(query, "user.id"),
        group_id=last(query, "group.id"),
        role_id=last(query, "role.id"),
        project_id=last(query, "scope.project.id"),
        domain_id=last(query, "scope.domain.id"),
        system="scope.system" in query,
        inherited=last(query, INHERITED) == "projects" if INHERITED in query else None,
        effective=flag(query, "effective"),
        subtree=flag(query, "include_subtree"),
        within_domain=within_domain,
    )
    if wanted.user_id is not None and wanted.group_id is not None:
        raise Invalid("Filter by user.id or by group.id, not by both.")
    if sum((wanted.project_id is not None, wanted.domain_id is not None, wanted.system)) > 1:
        raise Invalid("Filter by one of scope.project.id, scope.domain.id and scope.system.")
    if wanted.effective and wanted.group_id is not None:
        raise Invalid("With effective, roles of a group are listed for its members: leave group.id out.")
    if wanted.subtree and wanted.project_id is None:
        raise Invalid("include_subtree needs scope.project.id.")
    return wanted


def _list(conn: sa.Connection, wanted: Filter, include_names: bool) -> tuple[list[Assigned], Names | None]:
    found = role_assignments.listing(conn, wanted)
    return found, role_assignments.names(conn, found) if include_names else None


def _view(request: Request, each: Assigned, names: Names | None) -> dict[str, Any]:
    grant = each.grant
    links = {"assignment": _grant_link(request, each.source)}
    if each.group_id is not None:
        links["membership"] = link(request, "groups", each.group_id, "users", grant.actor_id)
    if each.prior_role_id is not None:
        links["prior_role"] = link(request, "roles", each.prior_role_id)
    scope: dict[str, Any]
    if grant.target == SYSTEM:
        scope = {"system": {"all": True}}
    else:
        kind = (names.projects if grant.target == "project" else names.domains) if names else None
        scope = {grant.target: _reference(grant.target_id, kind, names)}
    if grant.inherited:
        scope["OS-INHERIT:inherited_to"] = "projects"
    actors = (names.users if grant.actor == "user" else names.groups) if names else None
    return {
        "links": links,
        "scope": scope,
        grant.actor: _reference(grant.actor_id, actors, names),
        "role": _reference(grant.role_id, names.roles if names else None, names),
    }


def _grant_link(request: Request, grant: Grant) -> str:
    target = ["system"] if grant.target == SYSTEM else [f"{grant.target}s", grant.target_id]
    parts = [*target, f"{grant.actor}s", grant.actor_id, "roles", grant.role_id]
    return link(request, *(["OS-INHERIT", *parts, "inherited_to_projects"] if grant.inherited else parts))


def _reference(key: str, kind: Mapping[str, Named] | None, names: Names | None) -> dict[str, Any]:
    """Return an object with the id and, if names are wanted, the name and the domain."""
    if kind is None or names is None or key not in kind:
        return {"id": key}
    row = kind[key]
    shown: dict[str, Any] = {"id": key, "name": row["name"]}
    if "domain_id" not in row or not row["domain_id"]:
        return shown
    domain = names.domains.get(row["domain_id"])
    return {**shown, "domain": {"id": row["domain_id"], "name": domain["name"] if domain else None}}
