"""Periodic jobs of the whole cloud: each is done by the conductor that claims it."""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import sqlalchemy as sa

from micronova.db.tables import periodic_jobs
from micronova.db.upsert import insert_if_absent

_j = periodic_jobs.c
_CLAIM = (
    periodic_jobs.update()
    .where(
        _j.name == sa.bindparam("b_name"), sa.or_(_j.next_at <= sa.bindparam("now"), _j.next_at > sa.bindparam("far"))
    )
    .values(owner=sa.bindparam("b_owner"), next_at=sa.bindparam("next"), began_at=sa.bindparam("now"), ended_at=None)
)
_KEEP = (
    periodic_jobs.update()
    .where(_j.name == sa.bindparam("b_name"), _j.owner == sa.bindparam("b_owner"))
    .values(next_at=sa.bindparam("next"), began_at=sa.bindparam("now"), ended_at=sa.bindparam("now"), error="")
)
_OWN = periodic_jobs.update().where(_j.name == sa.bindparam("b_name"), _j.owner == sa.bindparam("b_owner"))
_HOLD = _OWN.where(_j.next_at < sa.bindparam("until")).values(next_at=sa.bindparam("until"))
_NOTE_END = _OWN.values(ended_at=sa.bindparam("now"), error=sa.bindparam("b_error"))


class PeriodicJobRow(Protocol):
    """A row of `periodic_jobs`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    name: str
    owner: str
    next_at: int
    began_at: int | None  # of the last run; none if it never ran
    ended_at: int | None  # none while it runs, or if its conductor died
    error: str | None  # of the last run that ended; empty if it succeeded
    place: str | None  # where the next run continues, if the job goes through something in parts


def declare(conn: sa.Connection, names: Iterable[str]) -> None:
    """Record that there are such jobs, unless that is known; they are due whenever a conductor claims them."""
    for name in names:
        insert_if_absent(conn, periodic_jobs, {"name": name, "owner": "", "next_at": 0})


def claim(conn: sa.Connection, name: str, owner: str, now: int, interval: int) -> bool:
    """Claim a job that is due; return False if it is not. It is due again after the interval (microseconds)."""
    # A time that is further away than an interval was written by a clock that was wrong.
    values = {"b_name": name, "b_owner": owner, "now": now, "far": now + interval, "next": now + interval}
    if conn.execute(_CLAIM, values).rowcount == 1:
        return True
    row = {"name": name, "owner": owner, "next_at": now + interval, "began_at": now}
    return insert_if_absent(conn, periodic_jobs, row)


def keep_or_claim(conn: sa.Connection, name: str, owner: str, now: int, lease: int) -> bool:
    """Keep a job that this owner has, or claim one whose owner has been silent for the lease; return whether it has it.

    Its runs are short, so that only their beginning is recorded.
    """
    values = {"b_name": name, "b_owner": owner, "now": now, "next": now + lease}
    return conn.execute(_KEEP, values).rowcount == 1 or claim(conn, name, owner, now, lease)


def hold(conn: sa.Connection, name: str, owner: str, until: int) -> None:
    """Let nobody claim a job before this time, because it still runs, unless another conductor has it."""
    conn.execute(_HOLD, {"b_name": name, "b_owner": owner, "until": until})


def place(conn: sa.Connection, name: str) -> str:
    """Return where a job continues that goes through something in parts; empty: at the beginning."""
    return conn.execute(sa.select(_j.place).where(_j.name == name)).scalar() or ""


def keep_place(conn: sa.Connection, name: str, place: str) -> None:
    """Record where the next run of a claimed job continues, on whatever conductor."""
    conn.execute(periodic_jobs.update().where(_j.name == name).values(place=place))


def note_begin(conn: sa.Connection, name: str, owner: str, now: int) -> None:
    """Record that something begins that nobody claims, because an administrator has asked for it."""
    declare(conn, [name])
    values = {"owner": owner, "began_at": now, "ended_at": None}
    conn.execute(periodic_jobs.update().where(_j.name == name).values(values))


def note_end(conn: sa.Connection, name: str, owner: str, now: int, error: str) -> None:
    """Record the end of a run and its error, if any, unless another conductor has claimed the job meanwhile."""
    conn.execute(_NOTE_END, {"b_name": name, "b_owner": owner, "now": now, "b_error": error})


def forget(conn: sa.Connection, name: str) -> None:
    """Delete the record of a job that no conductor of this release does."""
    conn.execute(periodic_jobs.delete().where(_j.name == name))


def list_(conn: sa.Connection) -> Sequence[PeriodicJobRow]:
    """Return all jobs that conductors have declared or claimed."""
    return cast(Sequence[PeriodicJobRow], conn.execute(sa.select(periodic_jobs).order_by(_j.name)).all())
