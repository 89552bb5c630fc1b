"""The password that a guest made for its administrator, encrypted by the guest with the user's public key."""

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.tables import server_passwords
from micronova.db.upsert import PerDialect

_p = server_passwords.c
_INSERT = PerDialect(lambda insert: insert(server_passwords).on_conflict_do_nothing())
_DELETE = server_passwords.delete().where(_p.instance_uuid == bindparam("uuid"))


def get(conn: sa.Connection, uuid: str) -> str:
    """Return the password of an instance, "" when it has none."""
    found = conn.execute(sa.select(_p.password).where(_p.instance_uuid == uuid)).scalar_one_or_none()
    return found or ""


def put_once(conn: sa.Connection, uuid: str, password: str, now: int) -> bool:
    """Keep the password; False when there is one already."""
    values = {"instance_uuid": uuid, "password": password, "created_at": now}
    return conn.execute(_INSERT.on(conn), values).rowcount == 1


def clear(conn: sa.Connection, uuid: str) -> None:
    """Forget the password."""
    conn.execute(_DELETE, {"uuid": uuid})
