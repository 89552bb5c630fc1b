"""On which hosts servers are, as the scheduler needs it: for hints that name servers, and for their images."""

from collections.abc import Collection, Mapping, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.listed import one_of
from micronova.db.tables import instances
from micronova.objects.image import ImageMeta

_SERVERS = sa.select(instances.c.uuid, instances.c.host).where(
    instances.c.project_id == bindparam("project_id"), one_of(instances.c.uuid, "uuids"), instances.c.host.is_not(None)
)
_BY_IMAGE = (
    sa.select(instances.c.host, instances.c.image_ref, sa.func.count())
    .where(instances.c.host.is_not(None), instances.c.image_ref.is_not(None))
    .group_by(instances.c.host, instances.c.image_ref)
)
_WITH_IMAGE = (
    sa.select(sa.func.min(instances.c.uuid))
    .where(one_of(instances.c.image_ref, "images"), instances.c.host.is_not(None))
    .group_by(instances.c.image_ref)
)
_IMAGES = sa.select(instances.c.image_ref, instances.c.image).where(instances.c.uuid.in_(_WITH_IMAGE))


def hosts_of_servers(
    conn: sa.Connection, project_id: str, named: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the hosts of servers of a project, for each list of them."""
    uuids = sorted({uuid for each in named.values() for uuid in each})
    hosts = {row.uuid: row.host for row in conn.execute(_SERVERS, {"project_id": project_id, "uuids": uuids})}
    return {name: tuple(sorted({hosts[uuid] for uuid in each if uuid in hosts})) for name, each in named.items()}


def servers_by_image(conn: sa.Connection) -> list[tuple[str, str, int]]:
    """Return how many servers with an image each host has: host, image, number."""
    return [(host, image, count) for host, image, count in conn.execute(_BY_IMAGE)]


def images_of_servers(conn: sa.Connection, ids: Collection[str]) -> dict[str, ImageMeta]:
    """Return images as they were when one of their servers was created; all servers are read once."""
    rows = conn.execute(_IMAGES, {"images": sorted(ids)})
    return {row.image_ref: msgspec.convert(row.image, ImageMeta) for row in rows if row.image is not None}
