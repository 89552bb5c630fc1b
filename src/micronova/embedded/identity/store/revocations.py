"""Revocations in the database: written in the transaction that causes them.

They are read when the service starts and, on PostgreSQL, every few seconds: another process may have made some.
"""

from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.db.upsert import PerDialect
from micronova.embedded.identity.tables import revocations
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject


class RevocationTime(Struct, frozen=True):
    """When tokens are revoked, and when the last token issued before that expires (microseconds)."""

    at: int
    expires_at: int


class Revocation(Struct, frozen=True):
    """A subject whose tokens are revoked if they were issued at or before `at`."""

    subject: Subject
    at: int
    expires_at: int


def revoke(conn: sa.Connection, time: RevocationTime, subjects: Iterable[Subject]) -> list[Subject]:
    """Revoke all tokens of the subjects that were issued until now; return the subjects, for the set in memory."""
    found = sorted(set(subjects))
    if found:
        rows = [{"subject": subject, "at": time.at, "expires_at": time.expires_at} for subject in found]
        conn.execute(_PUT.on(conn), rows)
    return found


def revoke_token(conn: sa.Connection, time: RevocationTime, audit_id: str, expires_at: int) -> None:
    """Revoke one token and those made from it."""
    subject = revocation_subjects.audit(audit_id)
    conn.execute(_PUT.on(conn), {"subject": subject, "at": time.at, "expires_at": expires_at})


def since(conn: sa.Connection, at: int, now: int) -> list[Revocation]:
    """Return the revocations made at or after `at` that still concern unexpired tokens."""
    rows = conn.execute(
        revocations.select().where(revocations.c.at >= at, revocations.c.expires_at > now).order_by(revocations.c.at)
    )
    return [Revocation(row.subject, row.at, row.expires_at) for row in rows]


def forget(conn: sa.Connection, now: int) -> None:
    """Delete the revocations that concern only expired tokens."""
    conn.execute(revocations.delete().where(revocations.c.expires_at <= now))


def _upsert(insert: Callable[[sa.Table], Any]) -> sa.Executable:
    statement = insert(revocations)
    kept: sa.Executable = statement.on_conflict_do_update(
        index_elements=["subject"], set_={"at": statement.excluded.at, "expires_at": statement.excluded.expires_at}
    )
    return kept


_PUT = PerDialect(_upsert)
