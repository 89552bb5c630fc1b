"""Trusts: a user, the trustor, lets another, the trustee, act in a project with some of the trustor's roles."""

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.query import Query
from micronova.embedded.identity.store.kinds import TRUSTS, USERS, TrustRow
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import trusts
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject

MAX_OF_USER = 1000
MAX_REDELEGATIONS = 3  # how often a trust can be redelegated
FILTERS = ("trustor_user_id", "trustee_user_id")


def get(conn: sa.Connection, trust_id: str, now: int) -> TrustRow:
    """Return a trust that has not expired; raise NotFound."""
    row = TRUSTS.find(conn, trust_id)
    if row is None or (row["expires_at"] is not None and row["expires_at"] <= now):
        raise TRUSTS.not_found(trust_id)
    return row


def origins(conn: sa.Connection, row: TrustRow, now: int) -> list[TrustRow]:
    """Return the trusts that a trust was redelegated from, nearest first; raise NotFound if one is gone or expired."""
    found: list[TrustRow] = []
    while row["redelegated_trust_id"] is not None:
        row = get(conn, row["redelegated_trust_id"], now)
        found.append(row)
    return found


def listing(conn: sa.Connection, query: Query, page: Page, now: int) -> Listed[TrustRow]:
    """Return a page of the trusts that have not expired."""
    current = sa.or_(trusts.c.expires_at.is_(None), trusts.c.expires_at > now)
    return TRUSTS.page(conn, [*TRUSTS.filters(query, FILTERS), current], page)


def create(conn: sa.Connection, row: TrustRow, now: int) -> TrustRow:
    """Create a trust, and forget those of the trustor that have expired; raise Forbidden if it has too many."""
    trustor = row["trustor_user_id"]
    USERS.lock(conn, trustor)  # for check_room
    conn.execute(trusts.delete().where(trusts.c.trustor_user_id == trustor, trusts.c.expires_at <= now))
    TRUSTS.check_room(conn, trusts.c.trustor_user_id == trustor, MAX_OF_USER, verb="give")
    return TRUSTS.insert(conn, row)


def use(conn: sa.Connection, trust_id: str) -> bool:
    """Count a use of a trust; return False if no use is left."""
    one = trusts.update().where(trusts.c.id == trust_id, trusts.c.remaining_uses > 0)
    return bool(conn.execute(one.values(remaining_uses=trusts.c.remaining_uses - 1)).rowcount)


def delete(conn: sa.Connection, time: RevocationTime, trust_id: str) -> tuple[None, list[Subject]]:
    """Delete a trust and those redelegated from it, and revoke the tokens that were issued for them; raise NotFound."""
    deleted = delete_where(conn, trusts.c.id == trust_id)
    if not deleted:
        raise TRUSTS.not_found(trust_id)
    return None, revoke(conn, time, [revocation_subjects.trust(each) for each in deleted])


def delete_where(conn: sa.Connection, condition: sa.ColumnElement[bool]) -> list[str]:
    """Delete the trusts that satisfy a condition and all that were redelegated from them; return their ids."""
    deleted = list(conn.execute(sa.select(trusts.c.id).where(condition)).scalars())
    parents = deleted
    while parents:
        children: list[str] = []
        for part in chunks(parents):
            query = sa.select(trusts.c.id).where(trusts.c.redelegated_trust_id.in_(part))
            children += conn.execute(query).scalars()
        parents = children
        deleted += children
    for part in chunks(deleted):
        conn.execute(trusts.delete().where(trusts.c.id.in_(part)))
    return deleted
