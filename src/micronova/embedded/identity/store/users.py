"""Users."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.query import Query
from micronova.embedded.identity.attributes import UserAttributes, UserChanges, given, merged_options
from micronova.embedded.identity.store.immutable import refuse_other_domain
from micronova.embedded.identity.store.kinds import DOMAINS, USERS, UserRow
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.store.rows import QUERY, Listed, Page
from micronova.embedded.identity.store.trusts import delete_where as delete_trusts
from micronova.embedded.identity.tables import (
    application_credentials,
    assignments,
    credentials,
    memberships,
    trusts,
    users,
)
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject

FILTERS = ("name", "domain_id", "enabled")
FEDERATED = ("idp_id", "protocol_id", "unique_id")
_OPERATORS = ("lt", "lte", "gt", "gte", "eq", "neq")


def by_name(conn: sa.Connection, domain_id: str, name: str) -> UserRow | None:
    """Return the user with this name in a domain, or None."""
    return USERS.first(conn, users.c.domain_id == domain_id, users.c.name == name)


def listing(
    conn: sa.Connection,
    query: Query,
    domain_id: str | None,
    page: Page,
    group_id: str | None = None,
) -> Listed[UserRow]:
    """Return a page of users: all, those of a domain, or the members of a group."""
    conditions = USERS.filters(query, FILTERS)
    if "password_expires_at" in query:
        _check_expiry(query["password_expires_at"][-1])
    if any(name in query for name in ("password_expires_at", *FEDERATED)):
        # No password expires, and no user is of another identity provider.
        conditions.append(sa.false())
    if domain_id is not None:
        conditions.append(users.c.domain_id == domain_id)
    if group_id is not None:
        members = sa.select(memberships.c.user_id).where(memberships.c.group_id == group_id)
        conditions.append(users.c.id.in_(members))
    return USERS.page(conn, conditions, page)


def _check_expiry(text: str) -> None:
    """Raise Invalid unless the text is a time, with or without an operator."""
    operator, colon, time = text.partition(":")
    if colon and operator in _OPERATORS:
        text = time
    QUERY.time("password_expires_at", text)


def create(
    conn: sa.Connection,
    user_id: str,
    wanted: UserAttributes,
    password_hash: str | None,
    extra: Mapping[str, Any],
    now: int,
) -> UserRow:
    """Create a user in the domain `wanted.domain_id`, which must be set."""
    assert wanted.domain_id is not None
    DOMAINS.get(conn, wanted.domain_id)
    row: UserRow = {
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
    return USERS.insert(conn, row, USERS.name_taken(row))


def change(
    conn: sa.Connection,
    time: RevocationTime,
    user_id: str,
    wanted: UserChanges,
    password_hash: str | None,
    extra: Mapping[str, Any],
) -> tuple[UserRow, list[Subject]]:
    """Change a user; a new password, or disabling the user, revokes the user's tokens."""
    row = USERS.get(conn, user_id)
    refuse_other_domain("user", row, wanted.domain_id)
    values = given(wanted, "name", "enabled", "default_project_id")
    values["options"] = merged_options(row["options"], wanted.options)
    values["extra"] = {**row["extra"], **extra}
    new_password = "password" in given(wanted, "password")
    if new_password:
        values["password_hash"] = password_hash
    changed = USERS.update(conn, row, values, USERS.name_taken({**row, **values}))
    disabled = row["enabled"] and not changed["enabled"]
    return changed, revoke(conn, time, [revocation_subjects.user(user_id)] if new_password or disabled else [])


def set_password(
    conn: sa.Connection, time: RevocationTime, user_id: str, old_hash: str | None, new_hash: str
) -> tuple[bool, list[Subject]]:
    """Replace a password and revoke the user's tokens; return False if the hash is no longer `old_hash`."""
    done = conn.execute(
        users.update().where(users.c.id == user_id, users.c.password_hash == old_hash).values(password_hash=new_hash)
    )
    changed = done.rowcount > 0
    return changed, revoke(conn, time, [revocation_subjects.user(user_id)] if changed else [])


def delete(conn: sa.Connection, time: RevocationTime, user_id: str) -> tuple[None, list[Subject]]:
    """Delete a user with its assignments, memberships, application credentials, credentials and trusts."""
    USERS.get(conn, user_id)
    conn.execute(assignments.delete().where(assignments.c.actor_id == user_id))
    conn.execute(memberships.delete().where(memberships.c.user_id == user_id))
    conn.execute(application_credentials.delete().where(application_credentials.c.user_id == user_id))
    conn.execute(credentials.delete().where(credentials.c.user_id == user_id))
    delete_trusts(conn, sa.or_(trusts.c.trustor_user_id == user_id, trusts.c.trustee_user_id == user_id))
    conn.execute(users.delete().where(users.c.id == user_id))
    return None, revoke(conn, time, [revocation_subjects.user(user_id)])
