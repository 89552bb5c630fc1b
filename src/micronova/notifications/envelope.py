"""The message format of oslo.messaging's `messagingv2` driver.

A notification is a JSON object; the envelope carries it as a string. The context of the request is in keys that begin
with `_context_`; the user's token is not among them. oslo.messaging drops a message whose `_unique_id` it has just
seen, so a message that is sent again after a lost connection is processed once.
"""

from random import Random
from typing import Any, NamedTuple

import msgspec

from micronova.notifications import times
from micronova.objects.context import Context
from micronova.objects.ids import new_uuid

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Message(NamedTuple):
    """A message for the broker; the routing key is also the name of the consumers' queue."""

    routing_key: str
    body: bytes


def messages(
    topics: tuple[str, ...],
    event: str,
    payload: dict[str, Any],
    *,
    publisher: str,
    context: Context,
    now: int,
    random: Random,
    failed: bool = False,
) -> list[Message]:
    """Return the messages of one event: one for each topic."""
    priority = "ERROR" if failed else "INFO"
    return [
        Message(f"{topic}.{priority.lower()}", _enclose(event, payload, publisher, priority, context, now, random))
        for topic in topics
    ]


def _enclose(
    event: str, payload: dict[str, Any], publisher: str, priority: str, context: Context, now: int, random: Random
) -> bytes:
    stamp = times.stamp(now)
    message = {
        "message_id": new_uuid(random),
        "publisher_id": publisher,
        "event_type": event,
        "priority": priority,
        "payload": payload,
        "timestamp": stamp,
        "_unique_id": f"{random.getrandbits(128):032x}",
        "_context_request_id": context.request_id or None,
        "_context_user_id": context.user_id or None,
        "_context_project_id": context.project_id or None,
        "_context_user": context.user_id or None,
        "_context_tenant": context.project_id or None,
        "_context_roles": context.roles,
        "_context_is_admin": context.is_admin,
        "_context_read_deleted": "no",
        "_context_timestamp": stamp,
    }
    return _encode({"oslo.version": "2.0", "oslo.message": _encode(message).decode()})
