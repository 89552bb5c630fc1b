"""Tokens that let their bearers into consoles: kept as digests, for a while, and never longer than the server.

The transaction that deletes a server deletes its tokens (`instances.move_to_deleted`). One that has left its host
leaves them behind: they are good only where they were made.
"""

from typing import TypedDict

import sqlalchemy as sa

from micronova.db.tables import console_tokens, instances
from micronova.objects.console import ConsoleProtocol

_DELETING = "deleting"
_DIRECT = "-direct"  # follows the protocol of tokens for a proxy of the operator's own


class ConsoleTokenRow(TypedDict):
    """A row of `console_tokens`. Times are microseconds since 1970 (UTC)."""

    token_digest: str
    instance_uuid: str
    host: str
    protocol: str
    created_at: int
    expires_at: int


class ValidToken(TypedDict):
    """A token that is valid, with the name of its server."""

    instance_uuid: str
    display_name: str
    host: str
    protocol: ConsoleProtocol
    is_direct: bool  # for a proxy of the operator's own
    expires_at: int


def insert(conn: sa.Connection, row: ConsoleTokenRow) -> None:
    """Insert a token; delete expired ones of the same server."""
    conn.execute(
        console_tokens.delete().where(
            console_tokens.c.instance_uuid == row["instance_uuid"], console_tokens.c.expires_at <= row["created_at"]
        )
    )
    conn.execute(console_tokens.insert(), row)


def find(conn: sa.Connection, digest: str, now: int) -> ValidToken | None:
    """Return the valid token with this digest; None if there is none, or its server has left the token's host."""
    query = (
        sa.select(console_tokens, instances.c.display_name)
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
    return ValidToken(
        instance_uuid=row["instance_uuid"],
        display_name=row["display_name"],
        host=row["host"],
        protocol=row["protocol"].removesuffix(_DIRECT),
        is_direct=row["protocol"].endswith(_DIRECT),
        expires_at=row["expires_at"],
    )


def is_on(conn: sa.Connection, uuid: str, host: str) -> bool:
    """Return whether a server is on a host."""
    query = sa.select(instances.c.uuid).where(instances.c.uuid == uuid, instances.c.host == host)
    return conn.execute(query).first() is not None


def purge(conn: sa.Connection, now: int) -> int:
    """Delete expired tokens; return how many."""
    return conn.execute(console_tokens.delete().where(console_tokens.c.expires_at <= now)).rowcount
