"""The queries about attachments."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

import msgspec
import sqlalchemy as sa

from micronova.db.prepared import Prepared
from micronova.embedded.volume import states
from micronova.embedded.volume.model import (
    ATTACHED,
    ATTACHING,
    AVAILABLE,
    IN_USE,
    RESERVED,
    Attachment,
    ResourceColumns,
    Volume,
)
from micronova.embedded.volume.store import connection_queries, volume_queries
from micronova.embedded.volume.store.paging import Listed, Page, list_rows
from micronova.embedded.volume.tables import attachments, volumes
from micronova.objects.errors import TooLarge

SORTABLE: Mapping[str, sa.Column[Any]] = {
    name: attachments.c[name] for name in ("id", "volume_id", "attach_status", "created_at", "updated_at")
} | {"status": attachments.c.attach_status}
_STATUS_OF_VOLUME = {ATTACHED: IN_USE, ATTACHING: ATTACHING, RESERVED: RESERVED}
"""The status of a volume with an attachment in a status; the first that one of its attachments has counts."""
MOST_ATTACHMENTS: Final = 128  # attachments of one volume

_GET = Prepared(attachments.select().where(attachments.c.id == sa.bindparam("id")))
_ADD = Prepared(attachments.insert())
_CHANGE = Prepared(
    attachments.update()
    .where(attachments.c.id == sa.bindparam("key"))
    .values({column: sa.bindparam(column.name) for column in attachments.c if column.name != "id"})
)


def get(conn: sa.Connection, attachment_id: str) -> Attachment | None:
    """Return an attachment, or None."""
    row = _GET.first(conn, {"id": attachment_id})
    return None if row is None else Attachment(**row)


def list_attachments(
    conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]]
) -> Listed[Attachment]:
    """Return a page of attachments."""
    return list_rows(conn, attachments.select(), Attachment, page, conditions)


def servers(conn: sa.Connection, volume_ids: Sequence[str]) -> set[tuple[str, str | None]]:
    """Return the ids of volumes, each with that of a server that it is attached to."""
    chosen = sa.select(attachments.c.volume_id, attachments.c.instance_uuid)
    rows = conn.execute(chosen.where(attachments.c.volume_id.in_(volume_ids)))
    return {(row.volume_id, row.instance_uuid) for row in rows}


def add(conn: sa.Connection, volume: Volume, attachment: Attachment, now: int) -> None:
    """Add an attachment to a volume; raise Changed if another request has changed the volume meanwhile."""
    if len(volume.attachments) >= MOST_ATTACHMENTS:
        raise TooLarge(
            f"Volume {volume.id} has {MOST_ATTACHMENTS} attachments, which is the most that a volume may have."
        )
    following = [*volume.attachments, attachment]
    volume_queries.update(conn, volume, {"status": _status_of(volume, following)}, now)
    _ADD.run(conn, msgspec.structs.asdict(attachment))


def change(conn: sa.Connection, volume: Volume, attachment: Attachment, now: int) -> None:
    """Write an attachment back; raise Changed if another request has changed the volume meanwhile."""
    following = [attachment if each.id == attachment.id else each for each in volume.attachments]
    volume_queries.update(conn, volume, {"status": _status_of(volume, following)}, now)
    _CHANGE.run(conn, {**msgspec.structs.asdict(attachment), "key": attachment.id, "updated_at": now})


def remove(conn: sa.Connection, volume: Volume, ids: Sequence[str], now: int, status: str | None = None) -> None:
    """Remove attachments of a volume, which gets the status that follows from the others unless one is given."""
    others = [each for each in volume.attachments if each.id not in ids]
    volume_queries.update(conn, volume, {"status": status or _status_of(volume, others)}, now)
    conn.execute(attachments.delete().where(attachments.c.id.in_(ids)))


def remove_by_action(
    conn: sa.Connection, volume: Volume, ids: Sequence[str], now: int, status: str | None = None
) -> None:
    """Remove attachments as `remove` does; with the last one the connections without an attachment end, too."""
    remove(conn, volume, ids, now, status)
    if len(ids) == len(volume.attachments):
        connection_queries.end(conn, volume.id)


def end_operation_on_volume(conn: sa.Connection, volume_id: str, now: int, **values: Unpack[ResourceColumns]) -> None:
    """Record the end of an operation on a volume, which gets these values.

    Its status follows from its attachments, which may have changed since the operation began. A status other than those
    of work stays, because a later request has set it.
    """
    conn.execute(sa.select(volumes.c.id).where(volumes.c.id == volume_id).with_for_update())
    volume = volume_queries.get(conn, volume_id)
    if volume is not None:
        if volume.status in states.WORKING:
            values["status"] = status_with(volume.attachments)
        volume_queries.touch(conn, volume_id, values, now)


def _status_of(volume: Volume, following: Sequence[Attachment]) -> str:
    return volume.status if volume.status in states.WORKING else status_with(following)


def status_with(found: Sequence[Attachment]) -> str:
    """Return the status of a volume with these attachments."""
    statuses = {each.attach_status for each in found}
    return next((of_volume for status, of_volume in _STATUS_OF_VOLUME.items() if status in statuses), AVAILABLE)
