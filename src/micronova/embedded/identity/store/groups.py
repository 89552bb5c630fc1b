"""Groups of users. A role of a group is a role of each member."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.query import Query
from micronova.embedded.identity.attributes import GroupAttributes, GroupChanges, given
from micronova.embedded.identity.store.immutable import refuse_other_domain
from micronova.embedded.identity.store.kinds import DOMAINS, GROUPS, USERS, GroupRow
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import assignments, groups, memberships
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject
from micronova.objects.errors import NotFound

FILTERS = ("name", "domain_id")


def listing(
    conn: sa.Connection,
    query: Query,
    domain_id: str | None,
    page: Page,
    user_id: str | None = None,
) -> Listed[GroupRow]:
    """Return a page of groups: all, those of a domain, or those with this member."""
    conditions = GROUPS.filters(query, FILTERS)
    if domain_id is not None:
        conditions.append(groups.c.domain_id == domain_id)
    if user_id is not None:
        of_user = sa.select(memberships.c.group_id).where(memberships.c.user_id == user_id)
        conditions.append(groups.c.id.in_(of_user))
    return GROUPS.page(conn, conditions, page)


def create(conn: sa.Connection, group_id: str, wanted: GroupAttributes, extra: Mapping[str, Any], now: int) -> GroupRow:
    """Create a group in the domain `wanted.domain_id`, which must be set."""
    assert wanted.domain_id is not None
    DOMAINS.get(conn, wanted.domain_id)
    row: GroupRow = {
        "id": group_id,
        "domain_id": wanted.domain_id,
        "name": wanted.name,
        "description": wanted.description,
        "extra": dict(extra),
        "created_at": now,
    }
    return GROUPS.insert(conn, row, GROUPS.name_taken(row))


def change(conn: sa.Connection, group_id: str, wanted: GroupChanges, extra: Mapping[str, Any]) -> GroupRow:
    """Change a group."""
    row = GROUPS.get(conn, group_id)
    refuse_other_domain("group", row, wanted.domain_id)
    values = given(wanted, "name", "description")
    values["extra"] = {**row["extra"], **extra}
    return GROUPS.update(conn, row, values, GROUPS.name_taken({**row, **values}))


def delete(conn: sa.Connection, time: RevocationTime, group_id: str) -> tuple[None, list[Subject]]:
    """Delete a group; if it had roles, revoke the tokens of its members."""
    GROUPS.get(conn, group_id)
    held = conn.execute(sa.select(assignments.c.role_id).where(assignments.c.actor_id == group_id).limit(1)).first()
    subjects = [revocation_subjects.user(user_id) for user_id in members(conn, group_id)] if held else []
    conn.execute(assignments.delete().where(assignments.c.actor_id == group_id))
    conn.execute(memberships.delete().where(memberships.c.group_id == group_id))
    conn.execute(groups.delete().where(groups.c.id == group_id))
    return None, revoke(conn, time, subjects)


def members(conn: sa.Connection, group_id: str) -> list[str]:
    """Return the ids of a group's members."""
    return list(conn.execute(sa.select(memberships.c.user_id).where(memberships.c.group_id == group_id)).scalars())


def is_member(conn: sa.Connection, group_id: str, user_id: str) -> bool:
    """Return whether a user is in a group; raise NotFound if one of them does not exist."""
    GROUPS.get(conn, group_id)
    USERS.get(conn, user_id)
    chosen = memberships.select().where(memberships.c.group_id == group_id, memberships.c.user_id == user_id)
    return conn.execute(chosen).first() is not None


def not_member(group_id: str, user_id: str) -> NotFound:
    """Return the error for a user that is not in a group."""
    return NotFound(f"User {user_id} is not in group {group_id}.")


def add_member(conn: sa.Connection, group_id: str, user_id: str) -> None:
    """Add a user to a group; a member stays one."""
    GROUPS.get(conn, group_id)
    USERS.get(conn, user_id)
    insert_if_absent(conn, memberships, {"group_id": group_id, "user_id": user_id})


def remove_member(conn: sa.Connection, time: RevocationTime, group_id: str, user_id: str) -> tuple[None, list[Subject]]:
    """Remove a user from a group and revoke the user's tokens."""
    if not is_member(conn, group_id, user_id):
        raise not_member(group_id, user_id)
    conn.execute(memberships.delete().where(memberships.c.group_id == group_id, memberships.c.user_id == user_id))
    return None, revoke(conn, time, [revocation_subjects.user(user_id)])
