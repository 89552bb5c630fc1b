"""Groups of users, which hold roles for their members."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.identity.attributes import GroupAttributes, GroupChanges, given
from micronova.neighbours.identity.store import rows, users
from micronova.neighbours.identity.store.revocations import Moment, void
from micronova.neighbours.identity.store.rows import Listed, Page, Row
from micronova.neighbours.identity.tables import assignments, domains, groups, memberships
from micronova.objects.errors import Invalid, NotFound

FILTERS = ("name", "domain_id")


def get(conn: sa.Connection, group_id: str) -> Row:
    """Return a group."""
    return rows.get(conn, groups, "group", group_id)


def listing(
    conn: sa.Connection,
    query: Mapping[str, list[str]],
    domain_id: str | None,
    page: Page,
    user_id: str | None = None,
) -> Listed:
    """Return groups: those of a domain, or with this member, where that is given."""
    conditions = rows.filters(groups, query, FILTERS)
    if domain_id is not None:
        conditions.append(groups.c.domain_id == domain_id)
    if user_id is not None:
        of_user = sa.select(memberships.c.group_id).where(memberships.c.user_id == user_id)
        conditions.append(groups.c.id.in_(of_user))
    return rows.listed(conn, groups, conditions, page)


def create(conn: sa.Connection, group_id: str, wanted: GroupAttributes, extra: Mapping[str, Any], now: int) -> Row:
    """Make a group; `wanted.domain_id` is set."""
    assert wanted.domain_id is not None
    if rows.find(conn, domains, wanted.domain_id) is None:
        raise NotFound(f"Could not find domain: {wanted.domain_id}.")
    row = {
        "id": group_id,
        "domain_id": wanted.domain_id,
        "name": wanted.name,
        "description": wanted.description,
        "extra": dict(extra),
        "created_at": now,
    }
    with rows.unique(f"There is a group named {wanted.name} in the domain already."):
        conn.execute(groups.insert().values(row))
    return row


def change(conn: sa.Connection, group_id: str, wanted: GroupChanges, extra: Mapping[str, Any]) -> Row:
    """Change a group."""
    row = get(conn, group_id)
    if given(wanted, "domain_id").get("domain_id", row["domain_id"]) != row["domain_id"]:
        raise Invalid("Invalid input for field/attribute group.domain_id: a group stays in its domain.")
    values = given(wanted, "name", "description")
    values["extra"] = {**row["extra"], **extra}
    return rows.update(conn, groups, row, values, f"There is a group named {wanted.name} in the domain already.")


def delete(conn: sa.Connection, group_id: str, moment: Moment) -> list[str]:
    """Delete a group; its members lose the roles that they had through it."""
    get(conn, group_id)
    held = conn.execute(sa.select(assignments.c.role_id).where(assignments.c.actor_id == group_id).limit(1)).first()
    subjects = [f"user:{user_id}" for user_id in members(conn, group_id)] if held else []
    conn.execute(assignments.delete().where(assignments.c.actor_id == group_id))
    conn.execute(memberships.delete().where(memberships.c.group_id == group_id))
    conn.execute(groups.delete().where(groups.c.id == group_id))
    return void(conn, moment, subjects)


def members(conn: sa.Connection, group_id: str) -> list[str]:
    """Return the ids of a group's members."""
    return list(conn.execute(sa.select(memberships.c.user_id).where(memberships.c.group_id == group_id)).scalars())


def is_member(conn: sa.Connection, group_id: str, user_id: str) -> bool:
    """Say whether a user is in a group; both exist."""
    get(conn, group_id)
    users.get(conn, user_id)
    chosen = memberships.select().where(memberships.c.group_id == group_id, memberships.c.user_id == user_id)
    return conn.execute(chosen).first() is not None


def add_member(conn: sa.Connection, group_id: str, user_id: str) -> None:
    """Put a user into a group; doing it twice is doing it once."""
    get(conn, group_id)
    users.get(conn, user_id)
    rows.insert_if_absent(conn, memberships, {"group_id": group_id, "user_id": user_id})


def remove_member(conn: sa.Connection, group_id: str, user_id: str, moment: Moment) -> list[str]:
    """Take a user out of a group."""
    if not is_member(conn, group_id, user_id):
        raise NotFound(f"User {user_id} is not in group {group_id}.")
    conn.execute(memberships.delete().where(memberships.c.group_id == group_id, memberships.c.user_id == user_id))
    return void(conn, moment, [f"user:{user_id}"])
