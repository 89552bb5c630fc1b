"""Periodic jobs of the whole cloud: each is done by the conductor that claims it."""

import sqlalchemy as sa

from micronova.db.tables import periodic_jobs
from micronova.db.upsert import insert_if_absent

_j = periodic_jobs.c
_CLAIM = (
    periodic_jobs.update()
    .where(
        _j.name == sa.bindparam("b_name"), sa.or_(_j.next_at <= sa.bindparam("now"), _j.next_at > sa.bindparam("far"))
    )
    .values(owner=sa.bindparam("b_owner"), next_at=sa.bindparam("next"))
)


def claim(conn: sa.Connection, name: str, owner: str, now: int, interval: int) -> bool:
    """Claim a job that is due; return False if it is not. It is due again after the interval (microseconds)."""
    # A time that is further away than an interval was written by a clock that was wrong.
    values = {"b_name": name, "b_owner": owner, "now": now, "far": now + interval, "next": now + interval}
    if conn.execute(_CLAIM, values).rowcount == 1:
        return True
    return insert_if_absent(conn, periodic_jobs, {"name": name, "owner": owner, "next_at": now + interval})
