"""Tokens that let their bearers into consoles: kept as digests, for a while, and never longer than the server.

The transaction that deletes a server deletes its tokens (`instances.move_to_deleted`). One that has left its host
leaves them behind: they are good only where they were made.
"""

from typing import Any

import sqlalchemy as sa

from micronova.db.tables import console_tokens, instances

_DELETING = "deleting"
_DIRECT = "-direct"  # follows the protocol of tokens for a proxy of the operator's own


def insert(conn: sa.Connection, row: dict[str, Any]) -> None:
    """Insert a token; delete expired ones of the same server."""
    conn.execute(
        console_tokens.delete().where(
            console_tokens.c.instance_uuid == row["instance_uuid"], console_tokens.c.expires_at <= row["created_at"]
        )
    )
    conn.execute(console_tokens.insert(), row)


def find(conn: sa.Connection, digest: str, now: int) -> Any:
    """Return a valid token with its server's name and `is_direct`; None if the server has left the token's host."""
    query = (
        sa.select(console_tokens, instances.c.display_name, instances.c.uuid, instances.c.project_id)
        .join(instances, instances.c.uuid == console_tokens.c.instance_uuid)
        .where(
            console_tokens.c.token_digest == digest,
            console_tokens.c.expires_at > now,
            instances.c.host == console_tokens.c.host,
            sa.func.coalesce(instances.c.task_state, "") != _DELETING,
        )
    )
    row = conn.execute(query).mappings().first()
    if row is None:
        return None
    return {**row, "protocol": row["protocol"].removesuffix(_DIRECT), "is_direct": row["protocol"].endswith(_DIRECT)}


def is_on(conn: sa.Connection, uuid: str, host: str) -> bool:
    """Return whether a server is on a host."""
    query = sa.select(instances.c.uuid).where(instances.c.uuid == uuid, instances.c.host == host)
    return conn.execute(query).first() is not None


def purge(conn: sa.Connection, now: int) -> int:
    """Delete expired tokens; return how many."""
    return conn.execute(console_tokens.delete().where(console_tokens.c.expires_at <= now)).rowcount
