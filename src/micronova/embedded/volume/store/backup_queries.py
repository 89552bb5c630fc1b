"""The queries about backups."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common import revisions
from micronova.embedded.volume.model import AVAILABLE, RESTORING, Backup
from micronova.embedded.volume.store.paging import Listed, Page, list_rows
from micronova.embedded.volume.store.resource_queries import Rows, read_one
from micronova.embedded.volume.tables import backups

SORTABLE: Mapping[str, sa.Column[Any]] = {
    name: backups.c[name] for name in ("id", "name", "status", "size", "volume_id", "created_at", "updated_at")
}
ROWS = Rows(backups)
insert, update, touch, ids = ROWS.insert, ROWS.update, ROWS.touch, ROWS.ids


def get(conn: sa.Connection, backup_id: str) -> Backup | None:
    """Return a backup, or None."""
    return read_one(conn, backups.select().where(backups.c.id == backup_id), Backup)


def list_backups(
    conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]], with_count: bool
) -> Listed[Backup]:
    """Return a page of backups."""
    found = list_rows(conn, backups.select(), Backup, page, conditions)
    return found._replace(total=ROWS.count(conn, conditions)) if with_count else found


def end_operation(conn: sa.Connection, backup_id: str, now: int) -> None:
    """Make a backup available again after it was restored, unless a later request has set its status."""
    ours = sa.and_(backups.c.id == backup_id, backups.c.status == RESTORING)
    revisions.touch(conn, backups.c.revision, ours, now=now, status=AVAILABLE)


def delete(conn: sa.Connection, backup_id: str) -> Backup | None:
    """Delete the row of a backup, and return what it was; None if it is gone."""
    backup = get(conn, backup_id)
    ROWS.delete(conn, backup_id)
    return backup
