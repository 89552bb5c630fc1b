"""The connections of volumes to hosts: those of attachments, and those that os-initialize_connection has made."""

from typing import Final

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.volume.backend.exports import Export
from micronova.embedded.volume.tables import attachments, volume_connections, volumes
from micronova.objects.errors import TooLarge

MOST_CONNECTIONS: Final = 128  # of one volume, besides those of attachments


def connected(conn: sa.Connection, host: str, volume_id: str | None = None) -> list[Export]:
    """Return the exports of the volumes of a host that have a connection: of all, or of one."""
    of_attachments = sa.select(attachments.c.volume_id).where(attachments.c.connection_info.is_not(None))
    others = sa.select(volume_connections.c.volume_id)
    if volume_id is not None:
        of_attachments = of_attachments.where(attachments.c.volume_id == volume_id)
        others = others.where(volume_connections.c.volume_id == volume_id)
    found = sa.select(volumes.c.id, volumes.c.readonly).where(
        volumes.c.host == host, volumes.c.id.in_(of_attachments.union_all(others))
    )
    return [Export(volume_id=row.id, readonly=bool(row.readonly)) for row in conn.execute(found)]


def add(conn: sa.Connection, volume_id: str, host: str) -> None:
    """Record that a host is connected without an attachment; raise IntegrityError if the volume is gone."""
    others = sa.and_(volume_connections.c.volume_id == volume_id, volume_connections.c.host != host)
    if conn.execute(sa.select(sa.func.count()).where(others)).scalar_one() >= MOST_CONNECTIONS:
        raise TooLarge(f"Volume {volume_id} has {MOST_CONNECTIONS} connections: end those of hosts that do not use it.")
    insert_if_absent(conn, volume_connections, {"volume_id": volume_id, "host": host})


def end(conn: sa.Connection, volume_id: str, host: str | None = None) -> None:
    """Forget the connection of a host, or all of a volume, except for those of attachments."""
    ended = volume_connections.delete().where(volume_connections.c.volume_id == volume_id)
    conn.execute(ended if host is None else ended.where(volume_connections.c.host == host))
