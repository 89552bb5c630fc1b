"""Application credentials: a secret with which a program acts for a user in one project, with some of its roles."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from micronova.neighbours.identity.store import rows
from micronova.neighbours.identity.store.revocations import Moment, void
from micronova.neighbours.identity.store.rows import Listed, Page, Row
from micronova.neighbours.identity.tables import application_credentials
from micronova.objects.errors import NotFound


def get(conn: sa.Connection, user_id: str, credential_id: str) -> Row:
    """Return a user's credential."""
    row = find(conn, credential_id)
    if row is None or row["user_id"] != user_id:
        raise NotFound(f"Could not find application credential: {credential_id[:64]}.")
    return row


def find(conn: sa.Connection, credential_id: str) -> Row | None:
    """Return a credential, if there is one with this id."""
    return rows.find(conn, application_credentials, credential_id)


def by_name(conn: sa.Connection, user_id: str, name: str) -> Row | None:
    """Return the credential of this name."""
    table = application_credentials
    return conn.execute(table.select().where(table.c.user_id == user_id, table.c.name == name)).mappings().first()


def listing(conn: sa.Connection, user_id: str, query: Mapping[str, list[str]], page: Page) -> Listed:
    """Return a user's credentials."""
    conditions = rows.filters(application_credentials, query, ("name",))
    conditions.append(application_credentials.c.user_id == user_id)
    return rows.listed(conn, application_credentials, conditions, page)


def create(
    conn: sa.Connection,
    credential_id: str,
    *,
    user_id: str,
    project_id: str,
    name: str,
    description: str | None,
    secret_hash: str,
    role_ids: Sequence[str],
    unrestricted: bool,
    expires_at: int | None,
    now: int,
) -> Row:
    """Make a credential."""
    row = {
        "id": credential_id,
        "user_id": user_id,
        "project_id": project_id,
        "name": name,
        "description": description,
        "secret_hash": secret_hash,
        "role_ids": list(role_ids),
        "unrestricted": unrestricted,
        "expires_at": expires_at,
        "created_at": now,
    }
    with rows.unique(f"There is an application credential named {name} already."):
        conn.execute(application_credentials.insert().values(row))
    return row


def delete(conn: sa.Connection, user_id: str, credential_id: str, moment: Moment) -> list[str]:
    """Delete a credential, and with it the tokens that were got with it."""
    get(conn, user_id, credential_id)
    conn.execute(application_credentials.delete().where(application_credentials.c.id == credential_id))
    return void(conn, moment, [f"credential:{credential_id}"])
