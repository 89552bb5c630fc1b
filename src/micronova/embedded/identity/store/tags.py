"""The tags of domains and projects."""

from collections.abc import Iterable

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.identity.attributes import unique_tags
from micronova.embedded.identity.tables import tags


def tags_of(conn: sa.Connection, owners: Iterable[str]) -> dict[str, list[str]]:
    """Return the tags of projects or domains by id."""
    found: dict[str, list[str]] = {owner: [] for owner in owners}
    for part in chunks(found):
        for row in conn.execute(tags.select().where(tags.c.owner_id.in_(part)).order_by(tags.c.tag)):
            found[row.owner_id].append(row.tag)
    return found


def set_tags(conn: sa.Connection, owner_id: str, wanted: Iterable[str]) -> None:
    """Replace all tags of a project or domain."""
    found = unique_tags(wanted)
    conn.execute(tags.delete().where(tags.c.owner_id == owner_id))
    if found:
        conn.execute(tags.insert(), [{"owner_id": owner_id, "tag": tag} for tag in found])
