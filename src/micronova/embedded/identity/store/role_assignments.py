"""The list of role assignments: as they were granted, or (`effective`) what they mean for each user and target.

An implication is removed here, because what it means for each user and target says whose tokens that voids.
"""

from collections.abc import Iterable, Mapping

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.common.chunks import chunks
from micronova.embedded.identity.store import grants
from micronova.embedded.identity.store import projects as projects_store
from micronova.embedded.identity.store import roles as roles_store
from micronova.embedded.identity.store.grants import SYSTEM, Grant
from micronova.embedded.identity.store.kinds import (
    DOMAINS,
    GROUPS,
    PROJECTS,
    ROLES,
    USERS,
    DomainRow,
    GroupRow,
    ProjectRow,
    RoleRow,
    UserRow,
)
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.tables import assignments, implied_roles, memberships, roles
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject

Named = UserRow | GroupRow | ProjectRow | DomainRow | RoleRow  # rows that have a name


class Filter(Struct, frozen=True, kw_only=True):
    """The role assignments that are wanted."""

    user_id: str | None = None
    group_id: str | None = None
    role_id: str | None = None
    project_id: str | None = None
    domain_id: str | None = None
    system: bool = False
    inherited: bool | None = None
    effective: bool = False
    subtree: bool = False  # of the project
    within_domain: str | None = None  # only the domain and its projects: for its own managers


class Assigned(Struct, frozen=True):
    """A role assignment, with the grant that it follows from."""

    grant: Grant
    source: Grant
    group_id: str | None = None  # through membership in this group
    prior_role_id: str | None = None  # because this role implies it


class Names(Struct):
    """The rows of all users, groups, projects, domains and roles of a list, by id."""

    users: dict[str, UserRow]
    groups: dict[str, GroupRow]
    projects: dict[str, ProjectRow]
    domains: dict[str, DomainRow]
    roles: dict[str, RoleRow]


def listing(conn: sa.Connection, wanted: Filter) -> list[Assigned]:
    """Return the role assignments that match."""
    targets = _targets(conn, wanted)
    found = [Assigned(grant, grant) for grant in _granted(conn, wanted, targets)]
    if wanted.effective:
        found = _effective(conn, found, targets, roles_store.implications(conn))
    return [each for each in found if _matches(each, wanted, targets)]


def names(conn: sa.Connection, found: Iterable[Assigned]) -> Names:
    """Return the rows that include_names shows."""
    found = list(found)
    result = Names(
        users=USERS.by_ids(conn, (each.grant.actor_id for each in found if each.grant.actor == "user")),
        groups=GROUPS.by_ids(conn, (each.grant.actor_id for each in found if each.grant.actor == "group")),
        projects=PROJECTS.by_ids(conn, (each.grant.target_id for each in found if each.grant.target == "project")),
        domains={},
        roles=ROLES.by_ids(conn, (each.grant.role_id for each in found)),
    )
    concerned = [
        row["domain_id"]
        for kind in (result.users, result.groups, result.projects, result.roles)
        for row in kind.values()
    ]
    concerned += [each.grant.target_id for each in found if each.grant.target == "domain"]
    result.domains = DOMAINS.by_ids(conn, concerned)
    return result


def unimply(conn: sa.Connection, time: RevocationTime, prior_id: str, implied_id: str) -> tuple[None, list[Subject]]:
    """Remove an implication; revoke the tokens of the users who lose a role by it, for the targets where they do.

    A token says which roles it has, so that one with a role that is lost is void. Who has the role otherwise, too,
    keeps the token.
    """
    roles_store.implication(conn, prior_id, implied_id)
    before = roles_store.implications(conn)
    conn.execute(
        implied_roles.delete().where(implied_roles.c.prior_id == prior_id, implied_roles.c.implied_id == implied_id)
    )
    after = roles_store.implications(conn)
    closure = roles_store.closure
    lost = {role for each in before for role in closure(before, [each]) - closure(after, [each])}
    giving = sorted(each for each in {*before, *lost} if not lost.isdisjoint(closure(before, [each])))
    granted = [
        Assigned(grant, grant)
        for part in chunks(giving)
        for grant in grants.matching(conn, assignments.c.role_id.in_(part))
    ]

    def held(implied: Mapping[str, list[str]]) -> set[tuple[str, str, str]]:
        found = (each.grant for each in _effective(conn, granted, None, implied))
        return {(grant.actor_id, grant.target_id, grant.role_id) for grant in found if grant.role_id in lost}

    gone = {(user_id, target_id) for user_id, target_id, _ in held(before) - held(after)}
    return None, revoke(conn, time, (revocation_subjects.grant(user_id, target) for user_id, target in gone))


def _granted(conn: sa.Connection, wanted: Filter, targets: set[str] | None) -> list[Grant]:
    """Return the grants from which matching assignments can follow."""
    conditions: list[sa.ColumnElement[bool]] = []
    if wanted.user_id is not None:
        actors = grants.actors(conn, wanted.user_id) if wanted.effective else [wanted.user_id]
        conditions.append(assignments.c.actor_id.in_(actors))
    if wanted.group_id is not None:
        conditions.append(assignments.c.actor_id == wanted.group_id)
    if not wanted.effective and wanted.role_id is not None:
        conditions.append(assignments.c.role_id == wanted.role_id)
    target = assignments.c.target_id
    if wanted.within_domain is not None:
        inside = projects_store.ids_in_domain(wanted.within_domain)
        conditions.append(sa.or_(target == wanted.within_domain, target.in_(inside)))
    if targets is None:
        return grants.matching(conn, *conditions)
    sources = targets
    if wanted.effective and (project := PROJECTS.find(conn, wanted.project_id)) is not None:
        sources = targets.union(projects_store.targets_above(conn, project))
    return [each for part in chunks(sorted(sources)) for each in grants.matching(conn, *conditions, target.in_(part))]


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


def _effective(
    conn: sa.Connection, found: list[Assigned], targets: set[str] | None, implied: Mapping[str, list[str]]
) -> list[Assigned]:
    """Replace groups by their members and inherited grants by grants on the projects; add the implied roles.

    Roles of domains are left out, because no token has them; what they imply is there.
    """
    members: dict[str, list[str]] = {}
    for part in chunks(each.source.actor_id for each in found if each.source.actor == "group"):
        for row in conn.execute(memberships.select().where(memberships.c.group_id.in_(part))):
            members.setdefault(row.group_id, []).append(row.user_id)
    below: dict[str, list[str]] = {}
    of_domains = set(conn.execute(sa.select(roles.c.id).where(roles.c.domain_id != "")).scalars())
    result: list[Assigned] = []
    for each in found:
        source = each.source
        if source.actor == "group":
            holders: list[tuple[str, str | None]] = [
                (user, source.actor_id) for user in members.get(source.actor_id, ())
            ]
        else:
            holders = [(source.actor_id, None)]
        held_on = [(source.target, source.target_id)]
        if source.inherited:
            if source.target_id not in below:
                below[source.target_id] = projects_store.below(conn, source.target, source.target_id)
            inherit = [each for each in below[source.target_id] if targets is None or each in targets]
            held_on = [("project", project_id) for project_id in inherit]
        for user_id, group_id in holders:
            for target, target_id in held_on:
                for role_id, prior in _with_implied(implied, source.role_id):
                    if role_id in of_domains:
                        continue
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
