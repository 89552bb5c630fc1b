"""Audits: when each was made, by whom, and how much it found. The newest are kept."""

from collections.abc import Mapping
from typing import Final, Protocol, cast

import sqlalchemy as sa

from micronova.db.tables import audits

KEPT: Final = 50

_a = audits.c


class AuditRow(Protocol):
    """A row of `audits`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    id: str
    began_at: int
    ended_at: int
    auditor: str
    findings: Mapping[str, int]


def record(
    conn: sa.Connection, id: str, began_at: int, ended_at: int, auditor: str, findings: Mapping[str, int]
) -> None:
    """Record an audit, and forget the oldest."""
    conn.execute(
        audits.insert().values(id=id, began_at=began_at, ended_at=ended_at, auditor=auditor, findings=dict(findings))
    )
    older = sa.select(_a.id).order_by(_a.ended_at.desc(), _a.id).offset(KEPT).limit(KEPT)
    conn.execute(audits.delete().where(_a.id.in_([*conn.execute(older).scalars()])))


def last(conn: sa.Connection) -> AuditRow | None:
    """Return the newest audit, None if none was ever made."""
    return cast("AuditRow | None", conn.execute(sa.select(audits).order_by(_a.ended_at.desc()).limit(1)).first())
