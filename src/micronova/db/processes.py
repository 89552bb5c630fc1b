"""Processes of the region, but for hosts: which run, which release they have, and since when."""

from collections.abc import Sequence
from typing import Final, Protocol, TypedDict, cast

import sqlalchemy as sa

from micronova.db.tables import processes
from micronova.db.upsert import insert_if_absent

FORGOTTEN_AFTER: Final = 86_400_000_000  # us: a process that was killed is listed for a day

_p = processes.c
_SEEN = processes.update().where(_p.id == sa.bindparam("b_id")).values(seen_at=sa.bindparam("now"))
_FORGET = processes.delete().where(_p.seen_at < sa.bindparam("before"))


class ProcessRow(Protocol):
    """A row of `processes`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    id: str
    host: str
    pid: int
    roles: str
    release: str
    secret_key_id: str | None
    started_at: int
    seen_at: int


class ProcessRecord(TypedDict):
    """What a process says of itself."""

    id: str
    host: str
    pid: int
    roles: str
    release: str
    secret_key_id: str | None
    started_at: int


def seen(conn: sa.Connection, record: ProcessRecord, now: int) -> None:
    """Record that a process runs; forget those that have been silent for a day, when it begins."""
    if conn.execute(_SEEN, {"b_id": record["id"], "now": now}).rowcount == 1:
        return
    conn.execute(_FORGET, {"before": now - FORGOTTEN_AFTER})
    insert_if_absent(conn, processes, {**record, "seen_at": now})


def twins(conn: sa.Connection, record: ProcessRecord) -> Sequence[ProcessRow]:
    """Return other processes with the same host and roles that have shown signs of life since this one began."""
    same = sa.and_(_p.host == record["host"], _p.roles == record["roles"], _p.id != record["id"])
    found = conn.execute(sa.select(processes).where(same, _p.seen_at > record["started_at"]))
    return cast(Sequence[ProcessRow], found.all())


def stopped(conn: sa.Connection, id: str) -> None:
    """Forget a process that stops."""
    conn.execute(processes.delete().where(_p.id == id))


def list_(conn: sa.Connection) -> Sequence[ProcessRow]:
    """Return all processes that have not stopped cleanly, in the order of hosts."""
    found = conn.execute(sa.select(processes).order_by(_p.host, _p.started_at))
    return cast(Sequence[ProcessRow], found.all())
