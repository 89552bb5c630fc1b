"""Credentials: secrets that users keep here for other programs, those of EC2 among them."""

import sqlalchemy as sa

from micronova.embedded.common.query import Query
from micronova.embedded.identity.store.kinds import CREDENTIALS, PROJECTS, USERS, CredentialRow
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import credentials

MAX_OF_USER = 100
FILTERS = ("user_id", "type")


def listing(conn: sa.Connection, query: Query, user_id: str | None, page: Page) -> Listed[CredentialRow]:
    """Return a page of the credentials of all users, or of one."""
    conditions = CREDENTIALS.filters(query, FILTERS)
    if user_id is not None:
        conditions.append(credentials.c.user_id == user_id)
    return CREDENTIALS.page(conn, conditions, page)


def create(conn: sa.Connection, row: CredentialRow) -> CredentialRow:
    """Create a credential; raise NotFound if its user or project does not exist, Forbidden if the user has too many."""
    USERS.lock(conn, row["user_id"])  # for check_room
    USERS.get(conn, row["user_id"])
    if row["project_id"] is not None:
        PROJECTS.get(conn, row["project_id"])
    CREDENTIALS.check_room(conn, credentials.c.user_id == row["user_id"], MAX_OF_USER)
    return CREDENTIALS.insert(conn, row, "There is a credential with this access key already.")


def change(conn: sa.Connection, credential_id: str, blob: bytes) -> CredentialRow:
    """Replace the blob of a credential."""
    return CREDENTIALS.update(conn, CREDENTIALS.get(conn, credential_id), {"blob": blob})


def delete(conn: sa.Connection, credential_id: str) -> None:
    """Delete a credential; raise NotFound."""
    done = conn.execute(credentials.delete().where(credentials.c.id == credential_id))
    if not done.rowcount:
        raise CREDENTIALS.not_found(credential_id)
