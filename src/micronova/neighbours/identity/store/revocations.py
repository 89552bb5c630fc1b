"""Revocations in the database: written in the transaction that causes them, read at start."""

from collections.abc import Iterable

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects import postgresql, sqlite

from micronova.neighbours.identity.tables import revocations


class Moment(Struct, frozen=True):
    """When something happens, and when the last token issued before it will have run out (microseconds)."""

    at: int
    forget_at: int


class Revocation(Struct, frozen=True):
    """A subject whose tokens up to a moment are void."""

    subject: str
    at: int
    expires_at: int


def void(conn: sa.Connection, moment: Moment, subjects: Iterable[str]) -> list[str]:
    """Void all tokens of the subjects that were issued until now; returns the subjects, for the set in memory."""
    found = sorted(set(subjects))
    for subject in found:
        _put(conn, subject, moment.at, moment.forget_at)
    return found


def void_token(conn: sa.Connection, audit_id: str, moment: Moment, expires_at: int) -> None:
    """Void one token and those made from it."""
    _put(conn, f"audit:{audit_id}", moment.at, expires_at)


def since(conn: sa.Connection, at: int, now: int) -> list[Revocation]:
    """Return what was revoked at or after a moment and still matters."""
    rows = conn.execute(
        revocations.select().where(revocations.c.at >= at, revocations.c.expires_at > now).order_by(revocations.c.at)
    )
    return [Revocation(row.subject, row.at, row.expires_at) for row in rows]


def forget(conn: sa.Connection, now: int) -> None:
    """Delete what concerns only tokens that have run out by themselves."""
    conn.execute(revocations.delete().where(revocations.c.expires_at <= now))


def _put(conn: sa.Connection, subject: str, at: int, expires_at: int) -> None:
    insert = (postgresql if conn.dialect.name == "postgresql" else sqlite).insert(revocations)
    conn.execute(
        insert.values(subject=subject, at=at, expires_at=expires_at).on_conflict_do_update(
            index_elements=["subject"], set_={"at": at, "expires_at": expires_at}
        )
    )
