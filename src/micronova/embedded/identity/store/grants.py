"""Grants of roles, and the roles that a user has because of them.

A grant gives an actor (user or group) a role on a target (project, domain or the system). An inherited grant applies
to the projects below its target, not to the target itself.
"""

from collections.abc import Mapping

import sqlalchemy as sa
from msgspec import Struct

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.query import Query
from micronova.embedded.identity.store import groups as groups_store
from micronova.embedded.identity.store import projects as projects_store
from micronova.embedded.identity.store import roles as roles_store
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
from micronova.embedded.identity.store.rows import Page, Rows
from micronova.embedded.identity.store.tags import tags_of
from micronova.embedded.identity.tables import (
    application_credentials,
    assignments,
    memberships,
)
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject
from micronova.objects.errors import NotFound

SYSTEM = "system"

_ACTORS: Mapping[str, Rows[UserRow] | Rows[GroupRow]] = {"user": USERS, "group": GROUPS}
_TARGETS: Mapping[str, Rows[ProjectRow] | Rows[DomainRow]] = {"project": PROJECTS, "domain": DOMAINS}


class Grant(Struct, frozen=True):
    """A role of an actor on a target: granted, or what follows from a grant."""

    actor: str
    actor_id: str
    target: str
    target_id: str
    role_id: str
    inherited: bool = False


def actor_and_target(conn: sa.Connection, grant: Grant) -> tuple[UserRow | GroupRow, ProjectRow | DomainRow | None]:
    """Return the rows of a grant's actor and target (None for the system); raise NotFound."""
    target = None if grant.target == SYSTEM else _TARGETS[grant.target].get(conn, grant.target_id)
    return _ACTORS[grant.actor].get(conn, grant.actor_id), target


def add(conn: sa.Connection, grant: Grant) -> None:
    """Grant a role; a role that was granted stays granted. Raise NotFound."""
    ROLES.get(conn, grant.role_id)
    actor_and_target(conn, grant)
    insert_if_absent(conn, assignments, {name: getattr(grant, name) for name in grant.__struct_fields__})


def not_found(grant: Grant) -> NotFound:
    """Return the error for a grant that was not made."""
    return NotFound(
        f"Could not find role assignment with role: {grant.role_id}, {grant.actor}: {grant.actor_id}, "
        f"{grant.target}: {grant.target_id}."
    )


def exists(conn: sa.Connection, grant: Grant) -> bool:
    """Return whether this grant was made."""
    return conn.execute(sa.select(assignments.c.role_id).where(*_is(grant))).first() is not None


def remove(conn: sa.Connection, time: RevocationTime, grant: Grant) -> tuple[None, list[Subject]]:
    """Take a role away and revoke the actor's tokens for the target; raise NotFound."""
    ROLES.get(conn, grant.role_id)
    if conn.execute(assignments.delete().where(*_is(grant))).rowcount == 0:
        raise not_found(grant)
    if grant.actor == "user":
        holders = [grant.actor_id]
    else:
        holders = groups_store.members(conn, grant.actor_id)
    if grant.target == "project" and not grant.inherited:
        for part in chunks(holders):
            conn.execute(
                application_credentials.delete().where(
                    application_credentials.c.project_id == grant.target_id,
                    application_credentials.c.user_id.in_(part),
                )
            )
    subjects = [
        revocation_subjects.user(user_id) if grant.inherited else revocation_subjects.grant(user_id, grant.target_id)
        for user_id in holders
    ]
    return None, revoke(conn, time, subjects)


def granted_roles(conn: sa.Connection, grant: Grant) -> list[RoleRow]:
    """Return the roles that were granted directly to the actor on the target, whatever `grant.role_id` is."""
    actor_and_target(conn, grant)
    chosen = sa.select(assignments.c.role_id).where(*_is(grant, any_role=True))
    return roles_store.by_ids(conn, conn.execute(chosen).scalars())


def _is(grant: Grant, any_role: bool = False) -> list[sa.ColumnElement[bool]]:
    conditions = [
        assignments.c.actor == grant.actor,
        assignments.c.actor_id == grant.actor_id,
        assignments.c.target == grant.target,
        assignments.c.target_id == grant.target_id,
        assignments.c.inherited.is_(grant.inherited),
    ]
    return conditions if any_role else [*conditions, assignments.c.role_id == grant.role_id]


def actors(conn: sa.Connection, user_id: str) -> list[str]:
    """Return the ids of the actors whose roles a user has: itself and its groups."""
    in_groups = conn.execute(sa.select(memberships.c.group_id).where(memberships.c.user_id == user_id)).scalars()
    return [user_id, *in_groups]


def effective_roles(
    conn: sa.Connection, user_id: str, target_id: str, project: ProjectRow | None = None
) -> list[RoleRow]:
    """Return the roles that a user has on a domain, the system or a `project`, with the roles that they imply.

    Roles of a domain are left out; the roles that they imply are not.
    """
    above = [] if project is None else projects_store.targets_above(conn, project)
    # By the index, which begins with target and actor: a project may have thousands of users.
    held = sa.select(assignments.c.role_id, assignments.c.target_id, assignments.c.inherited).where(
        assignments.c.target_id.in_([target_id, *above]), assignments.c.actor_id.in_(actors(conn, user_id))
    )
    direct = {
        row.role_id
        for row in conn.execute(held)
        if (row.target_id in above if row.inherited else row.target_id == target_id)
    }
    if not direct:
        return []
    everything = roles_store.closure(roles_store.implications(conn), direct)
    return [row for row in roles_store.by_ids(conn, everything) if not row["domain_id"]]


def projects_of(conn: sa.Connection, user_id: str, query: Query) -> tuple[list[ProjectRow], dict[str, list[str]]]:
    """Return those projects on which a user has any role and that the filters select, with their tags."""
    listed, tags = projects_store.listing(conn, query, None, Page(), project_ids_of(conn, user_id))
    return listed.rows, tags


def project_ids_of(conn: sa.Connection, user_id: str) -> list[str]:
    """Return the ids of the projects on which a user has any role."""
    found: dict[str, None] = {}
    for grant in _grants_of(conn, user_id):
        if grant.inherited:
            found.update(dict.fromkeys(projects_store.below(conn, grant.target, grant.target_id)))
        elif grant.target == "project":
            found[grant.target_id] = None
    return list(found)


def domains_of(conn: sa.Connection, user_id: str) -> tuple[list[DomainRow], dict[str, list[str]]]:
    """Return the enabled domains on which a user has any role, with their tags."""
    found = _grants_of(conn, user_id)
    ids = {grant.target_id for grant in found if grant.target == "domain" and not grant.inherited}
    enabled = [row for row in DOMAINS.by_ids(conn, ids).values() if row["enabled"]]
    return sorted(enabled, key=lambda row: row["name"]), tags_of(conn, [row["id"] for row in enabled])


def on_system(conn: sa.Connection, user_id: str) -> bool:
    """Return whether a user has any role on the system."""
    return any(grant.target == SYSTEM for grant in _grants_of(conn, user_id))


def _grants_of(conn: sa.Connection, user_id: str) -> list[Grant]:
    return matching(conn, assignments.c.actor_id.in_(actors(conn, user_id)))


def matching(conn: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[Grant]:
    """Return the grants that satisfy the conditions, in the order of the primary key."""
    query = sa.select(*(assignments.c[name] for name in Grant.__struct_fields__)).where(*conditions)
    return [Grant(*row) for row in conn.execute(query.order_by(*assignments.primary_key.columns))]
