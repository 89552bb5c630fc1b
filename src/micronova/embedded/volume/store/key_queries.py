"""Sealing the keys of volumes, snapshots and backups anew, when the key of secrets is changed."""

from typing import Final

import sqlalchemy as sa

from micronova.embedded.volume.backend.keys import KeyBox, SealedKey
from micronova.embedded.volume.tables import backups, snapshots, volumes
from micronova.objects.errors import MicronovaError
from micronova.objects.resealed import Resealed

TOGETHER: Final = 100
"""Keys that are encrypted anew in one transaction."""

TABLES: Final = (volumes, snapshots, backups)


def reseal(conn: sa.Connection, box: KeyBox, after: str) -> Resealed:
    """Encrypt the next keys after a place, which is the number of a table and an id, with the present key of the box.

    A resource gets another revision: a request that has read it before, and would write the key as it was, to a
    snapshot for example, reads it again.
    """
    first, _, after_id = (after or "0:").partition(":")
    for number, table in enumerate(TABLES[int(first) :], int(first)):
        columns = table.c
        wanted = sa.select(columns.id, columns.encryption_key_id, columns.sealed_key)
        wanted = wanted.where(columns.sealed_key.is_not(None), columns.id > after_id).order_by(columns.id)
        rows = conn.execute(wanted.limit(TOGETHER).with_for_update()).all()
        changed, lost = 0, []
        for row in rows:
            try:
                fresh = box.reseal(SealedKey(id=row.encryption_key_id, sealed=row.sealed_key))
            except (MicronovaError, ValueError):  # of another key, or damaged
                lost.append(f"key of {table.name.removesuffix('s')} {row.id}")
                continue
            if fresh is not None:
                # `revisions.touch` would say that the resource was changed: its user sees `updated_at`.
                values = {"sealed_key": fresh.sealed, "revision": columns.revision + 1}
                conn.execute(table.update().where(columns.id == row.id).values(values))
                changed += 1
        if rows:
            return Resealed(f"{number}:{rows[-1].id}", len(rows), changed, lost)
        after_id = ""
    return Resealed("", 0, 0, [])
