"""Logs of tasks that are done once in a period for each host.

The row of the first host tells whether a task is done, and since when nobody has worked on it: all rows of a period are
made and finished together, and there are as many as hosts.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import sqlalchemy as sa

from micronova.db.tables import services, task_logs
from micronova.db.upsert import PerDialect, insert_if_absent
from micronova.objects.service_names import COMPUTE

_t = task_logs.c
RUNNING, DONE = "RUNNING", "DONE"
BATCH = 500  # rows of one statement


class TaskLogRow(Protocol):
    """A row of `task_logs`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    task_name: str
    period_beginning: int
    period_ending: int
    host: str
    state: str
    task_items: int
    errors: int
    message: str
    updated_at: int


_INSERT = PerDialect(lambda insert: insert(task_logs).on_conflict_do_nothing())


def _of_period(name: str, begin: int, end: int) -> sa.ColumnElement[bool]:
    return sa.and_(_t.task_name == name, _t.period_beginning == begin, _t.period_ending == end)


def of_period(conn: sa.Connection, name: str, begin: int, end: int) -> Sequence[TaskLogRow]:
    """Return the logs of a period, by host."""
    query = sa.select(task_logs).where(_of_period(name, begin, end)).order_by(_t.host)
    return cast(Sequence[TaskLogRow], conn.execute(query).all())


def _leads(name: str, period: tuple[int, int]) -> sa.ColumnElement[bool]:
    """Return the condition on the row of the first host."""
    first = sa.select(sa.func.min(_t.host)).where(_of_period(name, *period)).scalar_subquery()
    return sa.and_(_of_period(name, *period), _t.host == first)


def begin(conn: sa.Connection, name: str, period: tuple[int, int], message: str, now: int, silence: int) -> bool:
    """Begin a task for all compute hosts; return False if it is done, or if another process works on it.

    That process renews it (`renew`); after `silence` microseconds without that another one begins anew.
    """
    if conn.execute(sa.select(_t.host).where(_leads(name, period))).first() is not None:
        silent = sa.and_(_leads(name, period), _t.state == RUNNING, _t.updated_at <= now - silence)
        return conn.execute(sa.update(task_logs).where(silent).values(updated_at=now)).rowcount > 0
    hosts = conn.execute(sa.select(services.c.host).where(services.c.binary == COMPUTE).order_by(services.c.host))
    new = [
        {
            "task_name": name,
            "period_beginning": period[0],
            "period_ending": period[1],
            "host": host,
            "state": RUNNING,
            "task_items": 0,
            "errors": 0,
            "message": message,
            "updated_at": now,
        }
        for host in hosts.scalars()
    ]
    if not new or not insert_if_absent(conn, task_logs, new[0]):
        return False  # another process has just begun
    for at in range(1, len(new), BATCH):
        conn.execute(_INSERT.on(conn), new[at : at + BATCH])
    return True


def done_until(conn: sa.Connection, name: str) -> int | None:
    """Return until when a task is done, whose periods are done in their order.

    That is the beginning of the first one if none is, and None if none was begun.
    """
    of_task = sa.select(sa.func.max(_t.period_ending)).where(_t.task_name == name, _t.state == DONE)
    if (done := conn.execute(of_task).scalar()) is not None:
        return int(done)
    begun: int | None = conn.execute(sa.select(sa.func.min(_t.period_beginning)).where(_t.task_name == name)).scalar()
    return begun


def renew(conn: sa.Connection, name: str, period: tuple[int, int], now: int) -> None:
    """Record that somebody works on a task."""
    unfinished = sa.and_(_leads(name, period), _t.state == RUNNING)
    conn.execute(sa.update(task_logs).where(unfinished).values(updated_at=now))


def finish(
    conn: sa.Connection, name: str, period: tuple[int, int], items: Mapping[str, int], message: str, now: int
) -> None:
    """End a task; `items` are the numbers of what was done, by host, and 0 for all others."""
    of_all = sa.update(task_logs).where(_of_period(name, *period), _t.state == RUNNING)
    conn.execute(of_all.values(state=DONE, message=message, updated_at=now))
    one = sa.update(task_logs).where(_of_period(name, *period), _t.host == sa.bindparam("b_host"))
    values = [{"b_host": host, "items": count} for host, count in sorted(items.items())]
    if values:
        conn.execute(one.values(task_items=sa.bindparam("items")), values)


def purge(conn: sa.Connection, before: int) -> int:
    """Delete the logs of the oldest period that ended before this time; return how many."""
    oldest = sa.select(sa.func.min(_t.period_ending)).where(_t.period_ending < before).scalar_subquery()
    return conn.execute(sa.delete(task_logs).where(_t.period_ending == oldest)).rowcount


def count(conn: sa.Connection, before: int) -> int:
    """Return how many logs there are of periods that ended before this time."""
    return int(conn.execute(sa.select(sa.func.count()).where(_t.period_ending < before)).scalar_one())
