"""Roles, and which of them imply others."""

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.identity.attributes import RoleAttributes, RoleChanges, given, merged_options
from micronova.neighbours.identity.store import rows
from micronova.neighbours.identity.store.domains import refuse_immutable
from micronova.neighbours.identity.store.revocations import Moment, void
from micronova.neighbours.identity.store.rows import Listed, Page, Row
from micronova.neighbours.identity.tables import assignments, domains, implied_roles, memberships, roles
from micronova.objects.errors import Forbidden, Invalid, NotFound

ROOT = "admin"  # the role that no other may imply


def get(conn: sa.Connection, role_id: str) -> Row:
    """Return a role."""
    return rows.get(conn, roles, "role", role_id)


def by_name(conn: sa.Connection, name: str) -> Row | None:
    """Return the role of this name that holds everywhere."""
    return conn.execute(roles.select().where(roles.c.name == name, roles.c.domain_id == "")).mappings().first()


def listing(conn: sa.Connection, query: Mapping[str, list[str]], page: Page) -> Listed:
    """Return the roles that hold everywhere, or with domain_id= those of a domain."""
    conditions = rows.filters(roles, query, ("name",))
    conditions.append(roles.c.domain_id == query.get("domain_id", [""])[-1])
    return rows.listed(conn, roles, conditions, page)


def by_ids(conn: sa.Connection, ids: Iterable[str]) -> list[Row]:
    """Return roles in a stable order."""
    found: list[Row] = []
    for part in rows.parts(ids):
        found += conn.execute(roles.select().where(roles.c.id.in_(part))).mappings()
    return sorted(found, key=lambda row: (row["created_at"], row["id"]))


def create(conn: sa.Connection, role_id: str, wanted: RoleAttributes, extra: Mapping[str, Any], now: int) -> Row:
    """Make a role."""
    if wanted.domain_id and rows.find(conn, domains, wanted.domain_id) is None:
        raise Invalid(f"Invalid input for field/attribute role.domain_id: there is no domain {wanted.domain_id}.")
    row = {
        "id": role_id,
        "name": wanted.name,
        "domain_id": wanted.domain_id or "",
        "description": wanted.description,
        "options": merged_options({}, wanted.options),
        "extra": dict(extra),
        "created_at": now,
    }
    with rows.unique(f"There is a role named {wanted.name} already."):
        conn.execute(roles.insert().values(row))
    return row


def change(
    conn: sa.Connection, role_id: str, wanted: RoleChanges, extra: Mapping[str, Any], moment: Moment
) -> tuple[Row, list[str]]:
    """Change a role; tokens name roles, so a new name voids those of its holders."""
    row = get(conn, role_id)
    refuse_immutable("role", row, wanted.options)
    if (given(wanted, "domain_id").get("domain_id", row["domain_id"]) or "") != row["domain_id"]:
        raise Invalid("Invalid input for field/attribute role.domain_id: a role stays in its domain.")
    values = given(wanted, "name", "description")
    values["options"] = merged_options(row["options"], wanted.options)
    values["extra"] = {**row["extra"], **extra}
    changed = rows.update(conn, roles, row, values, f"There is a role named {wanted.name} already.")
    subjects = _holders(conn, role_id) if changed["name"] != row["name"] else []
    return changed, void(conn, moment, subjects)


def delete(conn: sa.Connection, role_id: str, moment: Moment) -> list[str]:
    """Delete a role with its assignments."""
    row = get(conn, role_id)
    refuse_immutable("role", row)
    subjects = _holders(conn, role_id)
    conn.execute(assignments.delete().where(assignments.c.role_id == role_id))
    conn.execute(
        implied_roles.delete().where((implied_roles.c.prior_id == role_id) | (implied_roles.c.implied_id == role_id))
    )
    conn.execute(roles.delete().where(roles.c.id == role_id))
    return void(conn, moment, subjects)


def implications(conn: sa.Connection) -> dict[str, list[str]]:
    """Return, for each role that implies any, the roles that it implies directly."""
    found: dict[str, list[str]] = {}
    for row in conn.execute(implied_roles.select().order_by(implied_roles.c.prior_id, implied_roles.c.implied_id)):
        found.setdefault(row.prior_id, []).append(row.implied_id)
    return found


def closure(implied: Mapping[str, list[str]], ids: Iterable[str]) -> set[str]:
    """Return the roles with all that they imply."""
    found: set[str] = set()
    ahead = list(ids)
    while ahead:
        role_id = ahead.pop()
        if role_id not in found:
            found.add(role_id)
            ahead += implied.get(role_id, [])
    return found


def imply(conn: sa.Connection, prior_id: str, implied_id: str) -> tuple[Row, Row]:
    """Let one role imply another."""
    prior, implied = get(conn, prior_id), get(conn, implied_id)
    if implied["name"] == ROOT and not implied["domain_id"]:
        raise Forbidden(f"No role may imply {ROOT}.")
    if implied["domain_id"] and implied["domain_id"] != prior["domain_id"]:
        raise Forbidden("A role of a domain can be implied only by roles of the same domain.")
    if prior_id in closure(implications(conn), [implied_id]):
        raise Forbidden("A role cannot imply itself, not even by way of others.")
    rows.insert_if_absent(conn, implied_roles, {"prior_id": prior_id, "implied_id": implied_id})
    return prior, implied


def implication(conn: sa.Connection, prior_id: str, implied_id: str) -> tuple[Row, Row]:
    """Return a role and one that it implies; NotFound unless it does so directly."""
    prior, implied = get(conn, prior_id), get(conn, implied_id)
    if implied_id not in implications(conn).get(prior_id, ()):
        raise NotFound(f"{prior_id} does not imply {implied_id}.")
    return prior, implied


def unimply(conn: sa.Connection, prior_id: str, implied_id: str, moment: Moment) -> list[str]:
    """Let a role no longer imply another."""
    implication(conn, prior_id, implied_id)
    subjects = _holders(conn, prior_id)
    conn.execute(
        implied_roles.delete().where(implied_roles.c.prior_id == prior_id, implied_roles.c.implied_id == implied_id)
    )
    return void(conn, moment, subjects)


def _holders(conn: sa.Connection, role_id: str) -> list[str]:
    """Return the users who have a role, directly, in a group or because another role implies it."""
    implied = implications(conn)
    priors = [prior for prior in {*implied, role_id} if role_id in closure(implied, [prior])]
    holders: set[str] = set()
    for part in rows.parts(priors):
        held = assignments.c.role_id.in_(part)
        holders |= set(
            conn.execute(sa.select(assignments.c.actor_id).where(held, assignments.c.actor == "user")).scalars()
        )
        groups = sa.select(assignments.c.actor_id).where(held, assignments.c.actor == "group")
        holders |= set(
            conn.execute(sa.select(memberships.c.user_id).where(memberships.c.group_id.in_(groups))).scalars()
        )
    return [f"user:{user_id}" for user_id in holders]
