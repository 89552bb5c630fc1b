"""Roles, and the roles that they imply."""

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.query import Query
from micronova.embedded.identity.attributes import RoleAttributes, RoleChanges, given, merged_options
from micronova.embedded.identity.store.immutable import refuse_immutable, refuse_other_domain
from micronova.embedded.identity.store.kinds import DOMAINS, ROLES, RoleRow
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import assignments, implied_roles, memberships, roles
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject
from micronova.objects.errors import Forbidden, Invalid, NotFound

ADMIN = "admin"  # no role may imply this one


def by_name(conn: sa.Connection, name: str) -> RoleRow | None:
    """Return the role with this name that belongs to no domain, or None."""
    return ROLES.first(conn, roles.c.name == name, roles.c.domain_id == "")


def listing(conn: sa.Connection, query: Query, page: Page) -> Listed[RoleRow]:
    """Return a page of the roles of no domain, or of the domain that the query names."""
    conditions = ROLES.filters(query, ("name",))
    conditions.append(roles.c.domain_id == query.get("domain_id", [""])[-1])
    return ROLES.page(conn, conditions, page)


def by_ids(conn: sa.Connection, ids: Iterable[str]) -> list[RoleRow]:
    """Return the roles with these ids, oldest first."""
    return sorted(ROLES.by_ids(conn, ids).values(), key=lambda row: (row["created_at"], row["id"]))


def create(conn: sa.Connection, role_id: str, wanted: RoleAttributes, extra: Mapping[str, Any], now: int) -> RoleRow:
    """Create a role."""
    if wanted.domain_id and DOMAINS.find(conn, wanted.domain_id) is None:
        raise Invalid(f"Invalid input for field/attribute role.domain_id: there is no domain {wanted.domain_id}.")
    row: RoleRow = {
        "id": role_id,
        "name": wanted.name,
        "domain_id": wanted.domain_id or "",
        "description": wanted.description,
        "options": merged_options({}, wanted.options),
        "extra": dict(extra),
        "created_at": now,
    }
    return ROLES.insert(conn, row, ROLES.name_taken(row))


def change(
    conn: sa.Connection, time: RevocationTime, role_id: str, wanted: RoleChanges, extra: Mapping[str, Any]
) -> tuple[RoleRow, list[Subject]]:
    """Change a role; tokens contain role names, so a new name revokes the tokens of the users who have the role."""
    row = ROLES.get(conn, role_id)
    refuse_immutable("role", row, wanted.options)
    refuse_other_domain("role", row, wanted.domain_id)
    values = given(wanted, "name", "description")
    values["options"] = merged_options(row["options"], wanted.options)
    values["extra"] = {**row["extra"], **extra}
    changed = ROLES.update(conn, row, values, ROLES.name_taken({**row, **values}))
    subjects = _holders(conn, role_id) if changed["name"] != row["name"] else []
    return changed, revoke(conn, time, subjects)


def delete(conn: sa.Connection, time: RevocationTime, role_id: str) -> tuple[None, list[Subject]]:
    """Delete a role with its assignments."""
    row = ROLES.get(conn, role_id)
    refuse_immutable("role", row)
    subjects = _holders(conn, role_id)
    conn.execute(assignments.delete().where(assignments.c.role_id == role_id))
    conn.execute(
        implied_roles.delete().where((implied_roles.c.prior_id == role_id) | (implied_roles.c.implied_id == role_id))
    )
    conn.execute(roles.delete().where(roles.c.id == role_id))
    return None, revoke(conn, time, subjects)


def implications(conn: sa.Connection) -> dict[str, list[str]]:
    """Return, for each role that implies any, the roles that it implies directly."""
    found: dict[str, list[str]] = {}
    for row in conn.execute(implied_roles.select().order_by(implied_roles.c.prior_id, implied_roles.c.implied_id)):
        found.setdefault(row.prior_id, []).append(row.implied_id)
    return found


def closure(implied: Mapping[str, list[str]], ids: Iterable[str]) -> set[str]:
    """Return the ids of the roles and of all roles that they imply."""
    found: set[str] = set()
    ahead = list(ids)
    while ahead:
        role_id = ahead.pop()
        if role_id not in found:
            found.add(role_id)
            ahead += implied.get(role_id, [])
    return found


def imply(conn: sa.Connection, prior_id: str, implied_id: str) -> tuple[RoleRow, RoleRow]:
    """Make a role imply another; raise Forbidden if it may not."""
    prior, implied = ROLES.get(conn, prior_id), ROLES.get(conn, implied_id)
    if implied["name"] == ADMIN and not implied["domain_id"]:
        raise Forbidden(f"No role may imply {ADMIN}.")
    if implied["domain_id"] and not prior["domain_id"]:
        raise Forbidden("A role of a domain can be implied only by roles of domains.")
    if prior_id in closure(implications(conn), [implied_id]):
        raise Forbidden("A role cannot imply itself, not even by way of others.")
    insert_if_absent(conn, implied_roles, {"prior_id": prior_id, "implied_id": implied_id})
    return prior, implied


def implication(conn: sa.Connection, prior_id: str, implied_id: str) -> tuple[RoleRow, RoleRow]:
    """Return a role and another that it implies directly; raise NotFound if it does not."""
    prior, implied = ROLES.get(conn, prior_id), ROLES.get(conn, implied_id)
    if implied_id not in implications(conn).get(prior_id, ()):
        raise NotFound(f"{prior_id} does not imply {implied_id}.")
    return prior, implied


def _holders(conn: sa.Connection, role_id: str) -> list[Subject]:
    """Return the users, as subjects, who have a role directly, through a group or through another role."""
    implied = implications(conn)
    priors = [prior for prior in {*implied, role_id} if role_id in closure(implied, [prior])]
    holders: set[str] = set()
    for part in chunks(priors):
        held = assignments.c.role_id.in_(part)
        holders |= set(
            conn.execute(sa.select(assignments.c.actor_id).where(held, assignments.c.actor == "user")).scalars()
        )
        groups = sa.select(assignments.c.actor_id).where(held, assignments.c.actor == "group")
        holders |= set(
            conn.execute(sa.select(memberships.c.user_id).where(memberships.c.group_id.in_(groups))).scalars()
        )
    return [revocation_subjects.user(user_id) for user_id in holders]
