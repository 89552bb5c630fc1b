"""GET /v3/role_assignments"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.identity.api.common import V3, collection, filter_domain, link
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import role_assignments
from micronova.neighbours.identity.store.assignments import SYSTEM, Grant
from micronova.neighbours.identity.store.role_assignments import Assigned, Filter, Names
from micronova.neighbours.identity.store.rows import Row, flag
from micronova.objects.errors import Invalid


class RoleAssignmentsAPI:
    """Who has which role where."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Declare the operation."""
        return [
            Route(
                method="GET",
                path=f"{V3}/role_assignments",
                handler=self.index,
                policy="identity:list_role_assignments",
                checks_policy=True,
            )
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List role assignments."""
        query = request.raw_query
        wanted = _filter(query, filter_domain(request))
        suffix = "_for_tree" if wanted.subtree else ""
        request.authorize(rule=f"identity:list_role_assignments{suffix}")
        found, names = await self._core.read(_list, wanted, flag(query, "include_names"))
        return collection(request, "role_assignments", [_view(request, each, names) for each in found])


def _filter(query: Mapping[str, list[str]], within_domain: str | None) -> Filter:
    def value(name: str) -> str | None:
        return query[name][-1] if name in query else None

    wanted = Filter(
        user_id=value("user.id"),
        group_id=value("group.id"),
        role_id=value("role.id"),
        project_id=value("scope.project.id"),
        domain_id=value("scope.domain.id"),
        system="scope.system" in query,
        inherited=True if "scope.OS-INHERIT:inherited_to" in query else None,
        effective=flag(query, "effective"),
        subtree=flag(query, "include_subtree"),
        within_domain=within_domain,
    )
    if wanted.user_id is not None and wanted.group_id is not None:
        raise Invalid("Filter by user.id or by group.id, not by both.")
    if sum((wanted.project_id is not None, wanted.domain_id is not None, wanted.system)) > 1:
        raise Invalid("Filter by one of scope.project.id, scope.domain.id and scope.system.")
    if wanted.effective and wanted.group_id is not None:
        raise Invalid(
            "What groups hold is shown as held by their members when effective is asked for: leave group.id out."
        )
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
        scope = {grant.target: _thing(grant.target_id, kind, names)}
    if grant.inherited:
        scope["OS-INHERIT:inherited_to"] = "projects"
    actors = (names.users if grant.actor == "user" else names.groups) if names else None
    return {
        "links": links,
        "scope": scope,
        grant.actor: _thing(grant.actor_id, actors, names),
        "role": _thing(grant.role_id, names.roles if names else None, names),
    }


def _grant_link(request: Request, grant: Grant) -> str:
    place = ["system"] if grant.target == SYSTEM else [f"{grant.target}s", grant.target_id]
    parts = [*place, f"{grant.actor}s", grant.actor_id, "roles", grant.role_id]
    return link(request, *(["OS-INHERIT", *parts, "inherited_to_projects"] if grant.inherited else parts))


def _thing(key: str, kind: Mapping[str, Row] | None, names: Names | None) -> dict[str, Any]:
    """Return an id, and where names are asked for also the name and the domain."""
    if kind is None or names is None or key not in kind:
        return {"id": key}
    row = kind[key]
    shown: dict[str, Any] = {"id": key, "name": row["name"]}
    if row.get("domain_id"):
        domain = names.domains.get(row["domain_id"])
        shown["domain"] = {"id": row["domain_id"], "name": domain["name"] if domain else None}
    return shown
