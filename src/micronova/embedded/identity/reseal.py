"""Seals the credentials of users anew, when the key of secrets is changed."""

import sqlalchemy as sa

from micronova.embedded.identity.blobs import BlobBox
from micronova.embedded.identity.tables import credentials
from micronova.objects.errors import MicronovaError
from micronova.objects.resealed import Resealed

TOGETHER = 100
"""Credentials that are sealed anew in one transaction."""


def reseal(conn: sa.Connection, box: BlobBox, after: str) -> Resealed:
    """Seal the next credentials after an id with the key of the box."""
    stored = sa.select(credentials.c.id, credentials.c.blob).where(credentials.c.id > after)
    rows = conn.execute(stored.order_by(credentials.c.id).limit(TOGETHER).with_for_update()).all()
    changed, lost = 0, []
    for row in rows:
        try:
            fresh = box.reseal(row.blob, row.id)
        except (MicronovaError, ValueError):  # of another key, or damaged
            lost.append(f"credential {row.id}")
            continue
        if fresh is not None:
            conn.execute(credentials.update().where(credentials.c.id == row.id).values(blob=fresh))
            changed += 1
    return Resealed(rows[-1].id if rows else "", len(rows), changed, lost)
