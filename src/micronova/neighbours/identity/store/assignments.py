"""Who has which role where: grants, and what they amount to for one user.

A grant gives an actor (user or group) a role on a target (project, domain or the system). An inherited grant counts
for the projects below its target, not for the target itself.
"""

from collections.abc import Iterable

import sqlalchemy as sa
from msgspec import Struct

from micronova.neighbours.identity.store import projects as projects_store
from micronova.neighbours.identity.store import roles as roles_store
from micronova.neighbours.identity.store import rows
from micronova.neighbours.identity.store.revocations import Moment, void
from micronova.neighbours.identity.store.rows import Row
from micronova.neighbours.identity.tables import (
    application_credentials,
    assignments,
    domains,
    groups,
    memberships,
    projects,
    users,
)
from micronova.objects.errors import NotFound

SYSTEM = "system"

_ACTORS = {"user": users, "group": groups}
_TARGETS = {"project": projects, "domain": domains}


class Grant(Struct, frozen=True):
    """One assignment, or one that follows from it."""

    actor: str
    actor_id: str
    target: str
    target_id: str
    role_id: str
    inherited: bool = False


def actor_and_target(conn: sa.Connection, grant: Grant) -> tuple[Row, Row | None]:
    """Return the rows that a grant speaks of (no target: the system); NotFound when one does not exist."""
    target = None if grant.target == SYSTEM else rows.get(conn, _TARGETS[grant.target], grant.target, grant.target_id)
    return rows.get(conn, _ACTORS[grant.actor], grant.actor, grant.actor_id), target


def add(conn: sa.Connection, grant: Grant) -> None:
    """Give a role; doing it twice is doing it once."""
    roles_store.get(conn, grant.role_id)
    actor_and_target(conn, grant)
    rows.insert_if_absent(conn, assignments, {name: getattr(grant, name) for name in grant.__struct_fields__})


def exists(conn: sa.Connection, grant: Grant) -> bool:
    """Say whether this very grant was made."""
    return conn.execute(sa.select(assignments.c.role_id).where(*_is(grant))).first() is not None


def remove(conn: sa.Connection, grant: Grant, moment: Moment) -> list[str]:
    """Take a role away again; what it voids are the actor's tokens for the target."""
    roles_store.get(conn, grant.role_id)
    if conn.execute(assignments.delete().where(*_is(grant))).rowcount == 0:
        raise NotFound(
            f"Could not find role assignment with role: {grant.role_id}, {grant.actor}: {grant.actor_id}, "
            f"{grant.target}: {grant.target_id}."
        )
    if grant.actor == "user":
        holders = [grant.actor_id]
    else:
        chosen = sa.select(memberships.c.user_id).where(memberships.c.group_id == grant.actor_id)
        holders = list(conn.execute(chosen).scalars())
    if grant.target == "project" and not grant.inherited:
        for part in rows.parts(holders):
            conn.execute(
                application_credentials.delete().where(
                    application_credentials.c.project_id == grant.target_id,
                    application_credentials.c.user_id.in_(part),
                )
            )
    where = "" if grant.inherited else f":{grant.target_id}"
    kind = "user" if grant.inherited else "grant"
    return void(conn, moment, [f"{kind}:{user_id}{where}" for user_id in holders])


def granted_roles(conn: sa.Connection, grant: Grant) -> list[Row]:
    """Return the roles that were granted directly to this actor on this target; the grant's role is not looked at."""
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
    """Return the ids under which a user may have roles: its own and those of its groups."""
    in_groups = conn.execute(sa.select(memberships.c.group_id).where(memberships.c.user_id == user_id)).scalars()
    return [user_id, *in_groups]


def effective_roles(conn: sa.Connection, user_id: str, target_id: str, project: Row | None = None) -> list[Row]:
    """Return the roles that a user has on a domain, the system or a `project`, with all that they imply.

    Roles that belong to a domain do not count by themselves, only for what they imply.
    """
    chosen = [sa.and_(assignments.c.target_id == target_id, assignments.c.inherited.is_(False))]
    if project is not None:
        above = [project["domain_id"], *(row["id"] for row in projects_store.ancestors(conn, project))]
        chosen.append(sa.and_(assignments.c.target_id.in_(above), assignments.c.inherited.is_(True)))
    in_groups = sa.select(memberships.c.group_id).where(memberships.c.user_id == user_id)
    holder = (assignments.c.actor_id == user_id) | assignments.c.actor_id.in_(in_groups)
    direct = set(conn.execute(sa.select(assignments.c.role_id).where(holder, sa.or_(*chosen))).scalars())
    if not direct:
        return []
    everything = roles_store.closure(roles_store.implications(conn), direct)
    return [row for row in roles_store.by_ids(conn, everything) if not row["domain_id"]]


def projects_of(conn: sa.Connection, user_id: str) -> list[str]:
    """Return the ids of the projects on which a user has any role."""
    found: dict[str, None] = {}
    for row in _of(conn, user_id):
        if row["target"] == "project" and not row["inherited"]:
            found[row["target_id"]] = None
        elif row["target"] == "project":
            found.update((below["id"], None) for below in projects_store.descendants(conn, row["target_id"]))
        elif row["target"] == "domain" and row["inherited"]:
            inside = conn.execute(sa.select(projects.c.id).where(projects.c.domain_id == row["target_id"]))
            found.update((project_id, None) for project_id in inside.scalars())
    return list(found)


def domains_of(conn: sa.Connection, user_id: str) -> list[Row]:
    """Return the domains on which a user has any role."""
    ids = {row["target_id"] for row in _of(conn, user_id) if row["target"] == "domain" and not row["inherited"]}
    if not ids:
        return []
    return list(conn.execute(domains.select().where(domains.c.id.in_(ids)).order_by(domains.c.name)).mappings())


def on_system(conn: sa.Connection, user_id: str) -> bool:
    """Say whether a user has any role on the system."""
    return any(row["target"] == SYSTEM for row in _of(conn, user_id))


def _of(conn: sa.Connection, user_id: str) -> Iterable[Row]:
    return conn.execute(assignments.select().where(assignments.c.actor_id.in_(actors(conn, user_id)))).mappings().all()
