"""The password of a guest's administrator, encrypted with the user's public key.

The guest has made it, and encrypted it itself, or the user has changed it.
"""

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.tables import server_passwords
from micronova.db.upsert import PerDialect, insert_if_absent

_p = server_passwords.c
_REPLACE = PerDialect(
    lambda insert: (new := insert(server_passwords)).on_conflict_do_update(
        index_elements=[_p.instance_uuid],
        set_={"password": new.excluded.password, "created_at": new.excluded.created_at},
    )
)
_DELETE = server_passwords.delete().where(_p.instance_uuid == bindparam("uuid"))


def get(conn: sa.Connection, uuid: str) -> str:
    """Return the password of an instance, "" when it has none."""
    found = conn.execute(sa.select(_p.password).where(_p.instance_uuid == uuid)).scalar_one_or_none()
    return found or ""


def put_once(conn: sa.Connection, uuid: str, password: str, now: int) -> bool:
    """Store the password; return False if there is one already."""
    values = {"instance_uuid": uuid, "password": password, "created_at": now}
    return insert_if_absent(conn, server_passwords, values)


def replace(conn: sa.Connection, uuid: str, password: str, now: int) -> None:
    """Store the password in the place of the one before."""
    conn.execute(_REPLACE.on(conn), {"instance_uuid": uuid, "password": password, "created_at": now})


def clear(conn: sa.Connection, uuid: str) -> None:
    """Delete the password."""
    conn.execute(_DELETE, {"uuid": uuid})
