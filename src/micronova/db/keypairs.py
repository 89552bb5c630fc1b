"""Key pairs: a user's public keys. Private ones are never kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.db import quotas
from micronova.db.tables import key_pairs
from micronova.db.upsert import PerDialect
from micronova.objects.errors import Conflict, Invalid, NotFound

_k = key_pairs.c
Row = sa.Row[Any]
_INSERT = PerDialect(lambda insert: insert(key_pairs).on_conflict_do_nothing())


def insert(
    conn: sa.Connection,
    user_id: str,
    name: str,
    kind: str,
    fingerprint: str,
    public_key: str,
    now: int,
    limits: Mapping[str, int],
) -> Row:
    """Add a key pair and charge its user; raise Conflict when the name is taken, QuotaExceeded."""
    if _find(conn, user_id, name) is not None:
        raise _taken(name)
    quotas.charge(conn, "", {"key_pairs": 1}, limits, user_id)
    row = {
        "user_id": user_id,
        "name": name,
        "type": kind,
        "fingerprint": fingerprint,
        "public_key": public_key,
        "created_at": now,
    }
    while True:  # the number is unique: who takes the same one at the same moment tries the next
        number = conn.execute(sa.select(sa.func.coalesce(sa.func.max(_k.id), 0))).scalar_one() + 1
        if conn.execute(_INSERT.on(conn), {**row, "id": number}).rowcount == 1:
            break
        if _find(conn, user_id, name) is not None:
            raise _taken(name)
    return get(conn, user_id, name)


def _taken(name: str) -> Conflict:
    return Conflict(f"Key pair '{name}' already exists.")


def _find(conn: sa.Connection, user_id: str, name: str) -> Row | None:
    return conn.execute(sa.select(key_pairs).where(_k.user_id == user_id, _k.name == name)).first()


def get(conn: sa.Connection, user_id: str, name: str) -> Row:
    """Return a key pair; raise NotFound."""
    found = _find(conn, user_id, name)
    if found is None:
        raise NotFound(f"Keypair {name} not found for user {user_id}")
    return found


def list_(conn: sa.Connection, user_id: str, *, marker: str | None = None, limit: int | None = None) -> Sequence[Row]:
    """Return a user's key pairs by name, after the marker; raise Invalid when that is unknown."""
    query = sa.select(key_pairs).where(_k.user_id == user_id).order_by(_k.name)
    if marker is not None:
        if _find(conn, user_id, marker) is None:
            raise Invalid(f"Marker {marker} could not be found.")
        query = query.where(_k.name > marker)
    return conn.execute(query if limit is None else query.limit(limit)).all()


def delete(conn: sa.Connection, user_id: str, name: str) -> None:
    """Remove a key pair and give its charge back; raise NotFound."""
    if conn.execute(sa.delete(key_pairs).where(_k.user_id == user_id, _k.name == name)).rowcount != 1:
        raise NotFound(f"Keypair {name} not found for user {user_id}")
    quotas.release(conn, "", {"key_pairs": 1}, user_id)
