"""What servers were used in a span of time, those that are gone included."""

from typing import Any

import sqlalchemy as sa

from micronova.db.tables import deleted_instances, instances
from micronova.objects.errors import NotFound

_COLUMNS = ("uuid", "project_id", "display_name", "vm_state", "flavor", "created_at", "launched_at")


def used(
    conn: sa.Connection,
    begin: int,
    end: int,
    *,
    project_id: str | None = None,
    marker: str | None = None,
    limit: int | None = None,
) -> list[Any]:
    """List servers that ran at some moment of the span, oldest first; `ended_at` says when one was deleted.

    A page begins after the server `marker`.
    """
    parts = []
    for table, ended in ((instances, sa.null()), (deleted_instances, deleted_instances.c.deleted_at)):
        columns = [table.c[name] for name in _COLUMNS]
        query = sa.select(*columns, sa.cast(ended, sa.BigInteger).label("ended_at")).where(
            table.c.launched_at.is_not(None), table.c.launched_at < end
        )
        if table is deleted_instances:
            query = query.where(deleted_instances.c.deleted_at > begin)
        if project_id is not None:
            query = query.where(table.c.project_id == project_id)
        parts.append(query)
    both = sa.union_all(*parts).subquery()
    query = sa.select(both).order_by(both.c.created_at, both.c.uuid)
    if marker is not None:
        known = conn.execute(sa.select(both.c.created_at).where(both.c.uuid == marker)).scalar()
        if known is None:
            raise NotFound(f"marker [{marker[:64]}] not found")
        later = sa.and_(both.c.created_at == known, both.c.uuid > marker)
        query = query.where(sa.or_(both.c.created_at > known, later))
    return [*conn.execute(query.limit(limit))]
