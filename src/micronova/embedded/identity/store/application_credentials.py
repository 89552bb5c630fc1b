"""Application credentials: with their secret a program acts for a user in one project, with some of its roles."""

from collections.abc import Sequence

import sqlalchemy as sa

from micronova.embedded.common.query import Query
from micronova.embedded.identity.store import access_rules
from micronova.embedded.identity.store.access_rules import WantedRule
from micronova.embedded.identity.store.kinds import (
    APPLICATION_CREDENTIALS,
    USERS,
    AccessRuleRow,
    ApplicationCredentialRow,
)
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import application_credential_rules, application_credentials
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject

MAX_OF_USER = 1000

# Begins the stored hash of an application credential that has access rules. Identity services of 0.2 and older do not
# know these rules. To them the hash matches no secret, and so they issue no token that could do more than the rules
# allow.
WITH_RULES = "access-rules:"


def get(conn: sa.Connection, user_id: str, application_credential_id: str) -> ApplicationCredentialRow:
    """Return a user's application credential; raise NotFound."""
    row = APPLICATION_CREDENTIALS.find(conn, application_credential_id)
    if row is None or row["user_id"] != user_id:
        raise APPLICATION_CREDENTIALS.not_found(application_credential_id)
    return row


def by_name(conn: sa.Connection, user_id: str, name: str) -> ApplicationCredentialRow | None:
    """Return a user's application credential with this name, or None."""
    table = application_credentials
    return APPLICATION_CREDENTIALS.first(conn, table.c.user_id == user_id, table.c.name == name)


def listing(conn: sa.Connection, user_id: str, query: Query, page: Page) -> Listed[ApplicationCredentialRow]:
    """Return a page of a user's application credentials."""
    conditions = APPLICATION_CREDENTIALS.filters(query, ("name",))
    conditions.append(application_credentials.c.user_id == user_id)
    return APPLICATION_CREDENTIALS.page(conn, conditions, page)


def secret_hash(row: ApplicationCredentialRow) -> str:
    """Return the hash of an application credential's secret."""
    return row["secret_hash"].removeprefix(WITH_RULES)


def rules(conn: sa.Connection, row: ApplicationCredentialRow) -> list[AccessRuleRow] | None:
    """Return the only requests that an application credential is good for; None: it is good for all."""
    if not row["secret_hash"].startswith(WITH_RULES):
        return None
    return access_rules.of_application_credential(conn, row["id"])


def create(
    conn: sa.Connection,
    application_credential_id: str,
    *,
    user_id: str,
    project_id: str,
    name: str,
    description: str | None,
    secret_hash: str,
    role_ids: Sequence[str],
    unrestricted: bool,
    expires_at: int | None,
    wanted_rules: Sequence[WantedRule],
    now: int,
) -> ApplicationCredentialRow:
    """Create an application credential; raise Forbidden if its user has too many.

    Without rules it is good for all requests.
    """
    USERS.lock(conn, user_id)  # for check_room
    APPLICATION_CREDENTIALS.check_room(conn, application_credentials.c.user_id == user_id, MAX_OF_USER)
    chosen = access_rules.chosen(conn, user_id, wanted_rules, now) if wanted_rules else []
    row: ApplicationCredentialRow = {
        "id": application_credential_id,
        "user_id": user_id,
        "project_id": project_id,
        "name": name,
        "description": description,
        "secret_hash": WITH_RULES + secret_hash if chosen else secret_hash,
        "role_ids": list(role_ids),
        "unrestricted": unrestricted,
        "expires_at": expires_at,
        "created_at": now,
    }
    APPLICATION_CREDENTIALS.insert(conn, row, f"There is an application credential named {name} already.")
    if chosen:
        links = [{"credential_id": application_credential_id, "rule_id": rule["id"]} for rule in chosen]
        conn.execute(application_credential_rules.insert(), links)
    return row


def delete(
    conn: sa.Connection, time: RevocationTime, user_id: str, application_credential_id: str
) -> tuple[None, list[Subject]]:
    """Delete an application credential and revoke the tokens that were issued for it."""
    get(conn, user_id, application_credential_id)
    conn.execute(application_credentials.delete().where(application_credentials.c.id == application_credential_id))
    return None, revoke(conn, time, [revocation_subjects.application_credential(application_credential_id)])
