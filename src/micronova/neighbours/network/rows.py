"""How the rows of things are made, changed and deleted, while others do the same."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.network.core import Changed, Core
from micronova.neighbours.network.tables import tags


def new_row(core: Core, project: str, given: Mapping[str, Any], revision: int = 0) -> dict[str, Any]:
    """Return what the row of (nearly) everything begins with."""
    now = core.now()
    return {
        "id": core.new_id(),
        "project_id": project,
        "description": given.get("description") or "",
        "created_at": now,
        "updated_at": now,
        "revision": revision,
    }


def bump(conn: sa.Connection, table: sa.Table, id: str, revision: int, now: int, values: Mapping[str, Any]) -> None:
    """Write changes to a row that is still at the revision that was read."""
    done = conn.execute(
        table.update()
        .where(table.c.id == id, table.c.revision == revision)
        .values(**values, revision=revision + 1, updated_at=now)
    )
    if done.rowcount != 1:
        raise Changed


def locked(conn: sa.Connection, table: sa.Table, id: str) -> Any:
    """Lock a row and return it as it is now."""
    row = conn.execute(sa.select(table).where(table.c.id == id).with_for_update()).first()
    if row is None:
        raise Changed
    return row


def erase(conn: sa.Connection, table: sa.Table, id: str) -> None:
    """Delete a row and its tags."""
    conn.execute(table.delete().where(table.c.id == id))
    conn.execute(tags.delete().where(tags.c.resource_id == id))
