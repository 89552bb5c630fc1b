"""Users, and the groups that they are members of."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.identity.attributes import UserAttributes, UserChanges, given, merged_options
from micronova.neighbours.identity.store import rows
from micronova.neighbours.identity.store.revocations import Moment, void
from micronova.neighbours.identity.store.rows import Listed, Page, Row
from micronova.neighbours.identity.tables import (
    application_credentials,
    assignments,
    domains,
    memberships,
    users,
)
from micronova.objects.errors import Invalid, NotFound

FILTERS = ("name", "domain_id", "enabled")


def get(conn: sa.Connection, user_id: str) -> Row:
    """Return a user."""
    return rows.get(conn, users, "user", user_id)


def find(conn: sa.Connection, user_id: str) -> Row | None:
    """Return a user, if there is one with this id."""
    return rows.find(conn, users, user_id)


def by_name(conn: sa.Connection, domain_id: str, name: str) -> Row | None:
    """Return the user of this name in a domain."""
    return conn.execute(users.select().where(users.c.domain_id == domain_id, users.c.name == name)).mappings().first()


def listing(
    conn: sa.Connection,
    query: Mapping[str, list[str]],
    domain_id: str | None,
    page: Page,
    group_id: str | None = None,
) -> Listed:
    """Return users: those of a domain, or members of a group, where that is given."""
    conditions = rows.filters(users, query, FILTERS)
    if domain_id is not None:
        conditions.append(users.c.domain_id == domain_id)
    if group_id is not None:
        members = sa.select(memberships.c.user_id).where(memberships.c.group_id == group_id)
        conditions.append(users.c.id.in_(members))
    return rows.listed(conn, users, conditions, page)


def create(
    conn: sa.Connection,
    user_id: str,
    wanted: UserAttributes,
    password_hash: str | None,
    extra: Mapping[str, Any],
    now: int,
) -> Row:
    """Make a user; `wanted.domain_id` is set."""
    assert wanted.domain_id is not None
    if rows.find(conn, domains, wanted.domain_id) is None:
        raise NotFound(f"Could not find domain: {wanted.domain_id}.")
    row = {
        "id": user_id,
        "domain_id": wanted.domain_id,
        "name": wanted.name,
        "enabled": wanted.enabled,
        "default_project_id": wanted.default_project_id,
        "password_hash": password_hash,
        "options": merged_options({}, wanted.options),
        "extra": dict(extra),
        "created_at": now,
    }
    with rows.unique(f"There is a user named {wanted.name} in the domain already."):
        conn.execute(users.insert().values(row))
    return row


def change(
    conn: sa.Connection,
    user_id: str,
    wanted: UserChanges,
    password_hash: str | None,
    extra: Mapping[str, Any],
    moment: Moment,
) -> tuple[Row, list[str]]:
    """Change a user; a new password or being disabled voids the user's tokens."""
    row = get(conn, user_id)
    if given(wanted, "domain_id").get("domain_id", row["domain_id"]) != row["domain_id"]:
        raise Invalid("Invalid input for field/attribute user.domain_id: a user stays in its domain.")
    values = given(wanted, "name", "enabled", "default_project_id")
    values["options"] = merged_options(row["options"], wanted.options)
    values["extra"] = {**row["extra"], **extra}
    new_password = "password" in given(wanted, "password")
    if new_password:
        values["password_hash"] = password_hash
    changed = rows.update(conn, users, row, values, f"There is a user named {wanted.name} in the domain already.")
    disabled = row["enabled"] and not changed["enabled"]
    return changed, void(conn, moment, [f"user:{user_id}"] if new_password or disabled else [])


def set_password(conn: sa.Connection, user_id: str, old_hash: str, new_hash: str, moment: Moment) -> list[str] | None:
    """Set the user's own new password; None when the old one is no longer what was checked."""
    done = conn.execute(
        users.update().where(users.c.id == user_id, users.c.password_hash == old_hash).values(password_hash=new_hash)
    )
    return void(conn, moment, [f"user:{user_id}"]) if done.rowcount else None


def delete(conn: sa.Connection, user_id: str, moment: Moment) -> list[str]:
    """Delete a user with its assignments, memberships and application credentials."""
    get(conn, user_id)
    conn.execute(assignments.delete().where(assignments.c.actor_id == user_id))
    conn.execute(memberships.delete().where(memberships.c.user_id == user_id))
    conn.execute(application_credentials.delete().where(application_credentials.c.user_id == user_id))
    conn.execute(users.delete().where(users.c.id == user_id))
    return void(conn, moment, [f"user:{user_id}"])
