"""The queries about messages, which users read of operations that failed."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from micronova.embedded.volume.model import Message
from micronova.embedded.volume.store.paging import Listed, Page, list_rows
from micronova.embedded.volume.store.resource_queries import read_one
from micronova.embedded.volume.tables import messages

SORTABLE: Mapping[str, sa.Column[Any]] = {
    name: messages.c[name]
    for name in ("id", "event_id", "message_level", "request_id", "resource_type", "resource_uuid", "created_at")
}
MOST_MESSAGES: Final = 1000  # messages of one project; the oldest are forgotten first


def get(conn: sa.Connection, message_id: str, now: int) -> Message | None:
    """Return a message that has not expired, or None."""
    return read_one(conn, messages.select().where(messages.c.id == message_id, messages.c.expires_at > now), Message)


def list_messages(conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]]) -> Listed[Message]:
    """Return a page of messages."""
    return list_rows(conn, messages.select(), Message, page, conditions)


def add(conn: sa.Connection, message: Message) -> None:
    """Record a message, and forget those that have expired or are too many."""
    conn.execute(messages.delete().where(messages.c.expires_at <= message.created_at))
    newest_first = (messages.c.created_at.desc(), messages.c.id.desc())
    too_many = sa.select(messages.c.id).where(messages.c.project_id == message.project_id).order_by(*newest_first)
    conn.execute(messages.delete().where(messages.c.id.in_(too_many.limit(MOST_MESSAGES).offset(MOST_MESSAGES - 1))))
    conn.execute(messages.insert(), msgspec.structs.asdict(message))


def delete(conn: sa.Connection, message_id: str) -> None:
    """Delete a message."""
    conn.execute(messages.delete().where(messages.c.id == message_id))
