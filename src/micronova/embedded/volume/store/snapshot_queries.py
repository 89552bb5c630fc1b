"""The queries about snapshots."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.volume.model import AVAILABLE, BACKING_UP, ResourceColumns, Snapshot
from micronova.embedded.volume.store.paging import Listed, Page, fetch
from micronova.embedded.volume.store.resource_queries import Metadata, Rows
from micronova.embedded.volume.tables import operations, snapshot_metadata, snapshots

SORTABLE: Mapping[str, sa.Column[Any]] = {
    name: snapshots.c[name] for name in ("id", "status", "name", "created_at", "updated_at", "volume_id", "size")
} | {"display_name": snapshots.c.name, "volume_size": snapshots.c.size}
ROWS, _METADATA = Rows(snapshots), Metadata(snapshot_metadata.c.snapshot_id)
update, ids, set_metadata = ROWS.update, ROWS.ids, _METADATA.set


def get(conn: sa.Connection, snapshot_id: str) -> Snapshot | None:
    """Return a snapshot, or None."""
    found = _complete(conn, conn.execute(snapshots.select().where(snapshots.c.id == snapshot_id)).all())
    return found[0] if found else None


def list_snapshots(
    conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]], with_count: bool
) -> Listed[Snapshot]:
    """Return a page of snapshots."""
    rows, more = fetch(conn, snapshots.select().where(*conditions), page, *conditions)
    return Listed(_complete(conn, rows), more, ROWS.count(conn, conditions) if with_count else None)


def of_volume(conn: sa.Connection, volume_id: str) -> list[Snapshot]:
    """Return the snapshots of a volume, the newest first."""
    chosen = snapshots.select().where(snapshots.c.volume_id == volume_id)
    return _complete(conn, conn.execute(chosen.order_by(snapshots.c.created_at.desc(), snapshots.c.id.desc())).all())


def _complete(conn: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Snapshot]:
    """Return snapshots with their metadata and the progress of their operations."""
    metadata = _METADATA.of(conn, [row.id for row in rows])
    progress: dict[str, int] = {}
    for part in chunks(row.id for row in rows):
        work = sa.select(operations.c.resource_id, operations.c.progress).where(operations.c.resource_id.in_(part))
        progress |= {row.resource_id: row.progress for row in conn.execute(work)}
    return [
        Snapshot(**row._mapping, metadata=metadata.get(row.id, {}), progress=progress.get(row.id, 0)) for row in rows
    ]


def insert(conn: sa.Connection, snapshot: Snapshot) -> None:
    """Write a new snapshot."""
    ROWS.insert(conn, snapshot)
    set_metadata(conn, snapshot.id, snapshot.metadata)


def touch_of_volume(conn: sa.Connection, volume_id: str, values: ResourceColumns, now: int) -> None:
    """Change all snapshots of a volume, whatever others have changed."""
    revisions.touch(conn, snapshots.c.revision, snapshots.c.volume_id == volume_id, now=now, **values)


def delete(conn: sa.Connection, snapshot_id: str) -> Snapshot | None:
    """Delete the row of a snapshot, and return what it was; None if it is gone."""
    snapshot = get(conn, snapshot_id)
    ROWS.delete(conn, snapshot_id)
    return snapshot


def has_metadata(key: str, value: str) -> sa.ColumnElement[bool]:
    """Return the condition that a snapshot has this in its metadata."""
    return _METADATA.has(snapshots.c.id, key, value)


def end_operation(conn: sa.Connection, snapshot_id: str, now: int) -> None:
    """Make a snapshot available again after a backup of it, unless a later request has set its status."""
    ours = sa.and_(snapshots.c.id == snapshot_id, snapshots.c.status == BACKING_UP)
    revisions.touch(conn, snapshots.c.revision, ours, now=now, status=AVAILABLE)
