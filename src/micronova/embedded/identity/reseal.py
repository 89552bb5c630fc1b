"""Seals the credentials of users anew, when the key of secrets is changed."""

import sqlalchemy as sa

from micronova.embedded.identity.blobs import BlobBox
from micronova.embedded.identity.tables import credentials

TOGETHER = 100
"""Credentials that are sealed anew in one transaction."""


def reseal(conn: sa.Connection, box: BlobBox, after: str) -> tuple[str, int, int]:
    """Seal the next credentials after an id with the key of the box.

    Return the last id, "" if there are no more, how many were read and how many were changed.
    """
    stored = sa.select(credentials.c.id, credentials.c.blob).where(credentials.c.id > after)
    rows = conn.execute(stored.order_by(credentials.c.id).limit(TOGETHER).with_for_update()).all()
    changed = 0
    for row in rows:
        fresh = box.reseal(row.blob, row.id)
        if fresh is not None:
            conn.execute(credentials.update().where(credentials.c.id == row.id).values(blob=fresh))
            changed += 1
    return rows[-1].id if rows else "", len(rows), changed
