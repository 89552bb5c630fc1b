"""The list of role assignments, as they were made or, `effective`, as they amount to."""

from collections.abc import Iterable, Mapping

import sqlalchemy as sa
from msgspec import Struct

from micronova.neighbours.identity.store import projects as projects_store
from micronova.neighbours.identity.store import roles as roles_store
from micronova.neighbours.identity.store import rows
from micronova.neighbours.identity.store.assignments import SYSTEM, Grant
from micronova.neighbours.identity.store.rows import Row
from micronova.neighbours.identity.tables import (
    assignments,
    domains,
    groups,
    memberships,
    projects,
    roles,
    users,
)


class Filter(Struct, frozen=True, kw_only=True):
    """Which assignments are asked for."""

    user_id: str | None = None
    group_id: str | None = None
    role_id: str | None = None
    project_id: str | None = None
    domain_id: str | None = None
    system: bool = False
    inherited: bool | None = None
    effective: bool = False
    subtree: bool = False  # of the project
    within_domain: str | None = None  # only what concerns this domain: for its own managers


class Assigned(Struct, frozen=True):
    """An assignment, with the grant that it comes from."""

    grant: Grant
    source: Grant
    group_id: str | None = None  # through membership in this group
    prior_role_id: str | None = None  # because this role implies it


class Names(Struct):
    """The names and domains of whatever a list speaks of."""

    users: dict[str, Row]
    groups: dict[str, Row]
    projects: dict[str, Row]
    domains: dict[str, Row]
    roles: dict[str, Row]


def listing(conn: sa.Connection, wanted: Filter) -> list[Assigned]:
    """Return the assignments that match."""
    made = [
        Grant(row["actor"], row["actor_id"], row["target"], row["target_id"], row["role_id"], row["inherited"])
        for row in _made(conn, wanted)
    ]
    found = [Assigned(grant, grant) for grant in made]
    if wanted.effective:
        found = _effective(conn, found)
    targets = _targets(conn, wanted)
    found = [each for each in found if _matches(each, wanted, targets)]
    if wanted.within_domain is not None:
        inside = _inside(conn, wanted.within_domain)
        found = [each for each in found if each.grant.target_id in inside]
    return found


def names(conn: sa.Connection, found: Iterable[Assigned]) -> Names:
    """Look up what include_names shows."""
    found = list(found)
    result = Names(
        users=_rows(conn, users, (each.grant.actor_id for each in found if each.grant.actor == "user")),
        groups=_rows(conn, groups, (each.grant.actor_id for each in found if each.grant.actor == "group")),
        projects=_rows(conn, projects, (each.grant.target_id for each in found if each.grant.target == "project")),
        domains={},
        roles=_rows(conn, roles, (each.grant.role_id for each in found)),
    )
    concerned = [row["domain_id"] for kind in (result.users, result.groups, result.projects, result.roles)
                 for row in kind.values()]  # fmt: skip
    concerned += [each.grant.target_id for each in found if each.grant.target == "domain"]
    result.domains = _rows(conn, domains, concerned)
    return result


def _made(conn: sa.Connection, wanted: Filter) -> list[Row]:
    """Return the grants that can matter: narrowed as far as that is right without expanding them."""
    conditions: list[sa.ColumnElement[bool]] = []
    if wanted.user_id is not None:
        actors = [wanted.user_id]
        if wanted.effective:
            chosen = sa.select(memberships.c.group_id).where(memberships.c.user_id == wanted.user_id)
            actors += conn.execute(chosen).scalars()
        conditions.append(assignments.c.actor_id.in_(actors))
    if wanted.group_id is not None:
        conditions.append(assignments.c.actor_id == wanted.group_id)
    if not wanted.effective and wanted.role_id is not None:
        conditions.append(assignments.c.role_id == wanted.role_id)
    query = assignments.select().where(*conditions).order_by(*assignments.primary_key.columns)
    return list(conn.execute(query).mappings())


def _targets(conn: sa.Connection, wanted: Filter) -> set[str] | None:
    if wanted.project_id is not None:
        below = projects_store.descendants(conn, wanted.project_id) if wanted.subtree else []
        return {wanted.project_id, *(row["id"] for row in below)}
    if wanted.domain_id is not None:
        return {wanted.domain_id}
    return {SYSTEM} if wanted.system else None


def _matches(each: Assigned, wanted: Filter, targets: set[str] | None) -> bool:
    grant = each.grant
    return (
        (wanted.user_id is None or (grant.actor == "user" and grant.actor_id == wanted.user_id))
        and (wanted.group_id is None or (grant.actor == "group" and grant.actor_id == wanted.group_id))
        and (wanted.role_id is None or grant.role_id == wanted.role_id)
        and (targets is None or grant.target_id in targets)
        and (wanted.inherited is None or each.source.inherited == wanted.inherited)
    )


def _effective(conn: sa.Connection, found: list[Assigned]) -> list[Assigned]:
    """Replace groups by their members, inherited grants by the projects they reach; add what roles imply."""
    members: dict[str, list[str]] = {}
    for row in conn.execute(memberships.select()):
        members.setdefault(row.group_id, []).append(row.user_id)
    below: dict[str, list[str]] = {}
    implied = roles_store.implications(conn)
    result: list[Assigned] = []
    for each in found:
        source = each.source
        if source.actor == "group":
            holders: list[tuple[str, str | None]] = [
                (user, source.actor_id) for user in members.get(source.actor_id, ())
            ]
        else:
            holders = [(source.actor_id, None)]
        places = [(source.target, source.target_id)]
        if source.inherited:
            if source.target_id not in below:
                below[source.target_id] = _below(conn, source)
            places = [("project", project_id) for project_id in below[source.target_id]]
        for user_id, group_id in holders:
            for target, target_id in places:
                for role_id, prior in _with_implied(implied, source.role_id):
                    grant = Grant("user", user_id, target, target_id, role_id, source.inherited)
                    result.append(Assigned(grant, source, group_id, prior))
    return result


def _with_implied(implied: Mapping[str, list[str]], role_id: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = [(role_id, None)]
    seen = {role_id}
    for prior, _ in found:  # grows while we walk it
        for each in implied.get(prior, ()):
            if each not in seen:
                seen.add(each)
                found.append((each, prior))
    return found


def _below(conn: sa.Connection, source: Grant) -> list[str]:
    if source.target == "project":
        return [row["id"] for row in projects_store.descendants(conn, source.target_id)]
    chosen = sa.select(projects.c.id).where(projects.c.domain_id == source.target_id)
    return list(conn.execute(chosen).scalars())


def _inside(conn: sa.Connection, domain_id: str) -> set[str]:
    chosen = sa.select(projects.c.id).where(projects.c.domain_id == domain_id)
    return {domain_id, *conn.execute(chosen).scalars()}


def _rows(conn: sa.Connection, table: sa.Table, ids: Iterable[str]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for part in rows.parts(ids):
        found.update((row["id"], row) for row in conn.execute(table.select().where(table.c.id.in_(part))).mappings())
    return found
