"""The queries about volumes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from micronova.db.prepared import Prepared
from micronova.embedded.common.chunks import chunks
from micronova.embedded.volume.model import Attachment, Volume
from micronova.embedded.volume.store.paging import Listed, Page, fetch
from micronova.embedded.volume.store.resource_queries import Metadata, Rows
from micronova.embedded.volume.tables import attachments, volume_metadata, volume_types, volumes

SORTABLE: Mapping[str, sa.Column[Any]] = {
    name: volumes.c[name]
    for name in ("id", "status", "size", "availability_zone", "name", "bootable", "created_at", "updated_at")
} | {"display_name": volumes.c.name}
_WITH_TYPE = sa.select(volumes, volume_types.c.name.label("type_name")).join(
    volume_types, volume_types.c.id == volumes.c.volume_type_id
)
_ID: sa.BindParameter[Any] = sa.bindparam("id")
_GET = Prepared(_WITH_TYPE.where(volumes.c.id == _ID))
_GET_METADATA = Prepared(
    volume_metadata.select().where(volume_metadata.c.volume_id == _ID).order_by(volume_metadata.c.key)
)
_GET_ATTACHMENTS = Prepared(
    attachments.select().where(attachments.c.volume_id == _ID).order_by(attachments.c.created_at, attachments.c.id)
)
ROWS, _METADATA = Rows(volumes), Metadata(volume_metadata.c.volume_id)
update, touch, set_status, ids, set_metadata = ROWS.update, ROWS.touch, ROWS.set_status, ROWS.ids, _METADATA.set


def get(conn: sa.Connection, volume_id: str) -> Volume | None:
    """Return a volume, or None."""
    row = _GET.first(conn, {"id": volume_id})
    if row is None:
        return None
    metadata = {each["key"]: each["value"] for each in _GET_METADATA.all(conn, {"id": volume_id})}
    attached = tuple(Attachment(**each) for each in _GET_ATTACHMENTS.all(conn, {"id": volume_id}))
    return Volume(**row, metadata=metadata, attachments=attached)


def list_volumes(
    conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]], with_count: bool
) -> Listed[Volume]:
    """Return a page of volumes."""
    rows, more = fetch(conn, _WITH_TYPE.where(*conditions), page, *conditions)
    return Listed(_complete(conn, rows), more, ROWS.count(conn, conditions) if with_count else None)


def _complete(conn: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Volume]:
    """Return volumes with their metadata and attachments."""
    metadata = _METADATA.of(conn, [row.id for row in rows])
    attached: dict[str, list[Attachment]] = {}
    for part in chunks(row.id for row in rows):
        found = attachments.select().where(attachments.c.volume_id.in_(part))
        for item in conn.execute(found.order_by(attachments.c.created_at, attachments.c.id)):
            attached.setdefault(item.volume_id, []).append(Attachment(**item._mapping))
    return [
        Volume(**row._mapping, metadata=metadata.get(row.id, {}), attachments=tuple(attached.get(row.id, ())))
        for row in rows
    ]


class Summary(NamedTuple):
    """How many volumes there are, and what they have together."""

    number: int
    size: int  # GiB
    metadata: dict[str, list[str]]  # the values of each key


def summary(conn: sa.Connection, conditions: Sequence[sa.ColumnElement[bool]]) -> Summary:
    """Return the summary of the volumes that meet the conditions."""
    sums = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(volumes.c.size), 0)).where(*conditions)
    number, size = conn.execute(sums).one()
    distinct = (
        sa.select(volume_metadata.c.key, volume_metadata.c.value)
        .distinct()
        .join(volumes, volumes.c.id == volume_metadata.c.volume_id)
        .where(*conditions)
        .order_by(volume_metadata.c.key, volume_metadata.c.value)
    )
    values: dict[str, list[str]] = {}
    for row in conn.execute(distinct):
        values.setdefault(row.key, []).append(row.value)
    return Summary(number, int(size), values)


def insert(conn: sa.Connection, volume: Volume) -> None:
    """Write a new volume."""
    ROWS.insert(conn, volume)
    set_metadata(conn, volume.id, volume.metadata)


def delete(conn: sa.Connection, volume_id: str) -> Volume | None:
    """Delete the row of a volume, and return what it was; None if it is gone."""
    volume = get(conn, volume_id)
    ROWS.delete(conn, volume_id)
    return volume


def has_metadata(key: str, value: str) -> sa.ColumnElement[bool]:
    """Return the condition that a volume has this in its metadata."""
    return _METADATA.has(volumes.c.id, key, value)
