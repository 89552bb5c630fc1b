"""The queries about tasks: the record of what the service has done for a request besides answering it."""

import msgspec
import sqlalchemy as sa

from micronova.db import keyset
from micronova.db.keyset import SortKey
from micronova.embedded.image.listing import Page
from micronova.embedded.image.model import Task
from micronova.embedded.image.tables import tasks

KEPT = 48 * 3600 * 1_000_000  # microseconds for which a task is shown after its end


def add(conn: sa.Connection, task: Task) -> None:
    """Record a task, and forget those that have expired."""
    conn.execute(tasks.delete().where(tasks.c.expires_at <= task.created_at))
    conn.execute(tasks.insert(), msgspec.structs.asdict(task))


def get(conn: sa.Connection, task_id: str, now: int) -> Task | None:
    """Return a task, or None."""
    found = sa.select(tasks).where(tasks.c.id == task_id, tasks.c.expires_at > now)
    row = conn.execute(found).one_or_none()
    return Task(**row._mapping) if row is not None else None


def of_image(conn: sa.Connection, image_id: str, now: int) -> list[Task]:
    """Return the tasks of an image, the oldest first."""
    found = sa.select(tasks).where(tasks.c.image_id == image_id, tasks.c.expires_at > now)
    return [Task(**row._mapping) for row in conn.execute(found.order_by(tasks.c.created_at, tasks.c.id))]


def list_tasks(
    conn: sa.Connection, type: str | None, status: str | None, page: Page, now: int
) -> tuple[list[Task], bool] | None:
    """Return a page of tasks, of one type and status if these are given, and whether more follow.

    Return None if there is no task with the id of the page's marker.
    """
    statement = sa.select(tasks).where(tasks.c.expires_at > now)
    if type is not None:
        statement = statement.where(tasks.c.type == type)
    if status is not None:
        statement = statement.where(tasks.c.status == status)
    names = dict.fromkeys((page.sort_key, "id"))
    after = None
    if page.marker is not None:
        mark = get(conn, page.marker, now)
        if mark is None:
            return None
        after = [getattr(mark, name) for name in names]
    keys = [SortKey(tasks.c[name], page.descending) for name in names]
    rows, more = keyset.fetch(conn, statement, keys, after, page.limit)
    return [Task(**row._mapping) for row in rows], more
