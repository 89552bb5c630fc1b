"""Key pairs: the public keys of users. Private keys are not stored."""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import sqlalchemy as sa

from micronova.db import quotas
from micronova.db.tables import key_pairs
from micronova.db.upsert import insert_if_absent
from micronova.objects.errors import Conflict, Invalid, NotFound

_k = key_pairs.c


class KeyPairRow(Protocol):
    """A row of `key_pairs`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    user_id: str
    name: str
    id: int
    type: str
    fingerprint: str
    public_key: str
    created_at: int


def insert(
    conn: sa.Connection,
    user_id: str,
    name: str,
    kind: str,
    fingerprint: str,
    public_key: str,
    now: int,
    limits: Mapping[str, int],
) -> KeyPairRow:
    """Add a key pair and charge its user; raise Conflict if the name is taken, or QuotaExceeded."""
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
    while True:  # the number is unique: of two concurrent requests with the same number, one tries the next
        number = conn.execute(sa.select(sa.func.coalesce(sa.func.max(_k.id), 0))).scalar_one() + 1
        if insert_if_absent(conn, key_pairs, {**row, "id": number}):
            break
        if _find(conn, user_id, name) is not None:
            raise _taken(name)
    return get(conn, user_id, name)


def _taken(name: str) -> Conflict:
    return Conflict(f"Key pair '{name}' already exists.")


def _find(conn: sa.Connection, user_id: str, name: str) -> KeyPairRow | None:
    found = conn.execute(sa.select(key_pairs).where(_k.user_id == user_id, _k.name == name)).first()
    return cast(KeyPairRow | None, found)


def get(conn: sa.Connection, user_id: str, name: str) -> KeyPairRow:
    """Return a key pair; raise NotFound."""
    found = _find(conn, user_id, name)
    if found is None:
        raise NotFound(f"Keypair {name} not found for user {user_id}")
    return found


def list_(
    conn: sa.Connection, user_id: str, *, marker: str | None = None, limit: int | None = None
) -> Sequence[KeyPairRow]:
    """Return a user's key pairs by name, after the marker; raise Invalid when that is unknown."""
    query = sa.select(key_pairs).where(_k.user_id == user_id).order_by(_k.name)
    if marker is not None:
        if _find(conn, user_id, marker) is None:
            raise Invalid(f"Marker {marker} could not be found.")
        query = query.where(_k.name > marker)
    return cast(Sequence[KeyPairRow], conn.execute(query if limit is None else query.limit(limit)).all())


def delete(conn: sa.Connection, user_id: str, name: str) -> None:
    """Delete a key pair and release its quota; raise NotFound."""
    if conn.execute(sa.delete(key_pairs).where(_k.user_id == user_id, _k.name == name)).rowcount != 1:
        raise NotFound(f"Keypair {name} not found for user {user_id}")
    quotas.release(conn, "", {"key_pairs": 1}, user_id)
