"""The message that oslo.messaging's listeners read: what its `messagingv2` driver would send.

A notification is a JSON object; the envelope around it carries it as a string. The context of the request rides in
keys that begin with `_context_`; the user's token is not among them. A listener drops a message whose `_unique_id`
it has just seen, so that one which is sent again after a lost connection is heard once.
"""

from random import Random
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from micronova.notifications import times
from micronova.rpc.contract import Context

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Message(NamedTuple):
    """What goes to the broker: the routing key is also the name of the listeners' queue."""

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
    """Make the messages that tell of one event: one for each topic."""
    priority = "ERROR" if failed else "INFO"
    return [
        Message(f"{topic}.{priority.lower()}", _sealed(event, payload, publisher, priority, context, now, random))
        for topic in topics
    ]


def _sealed(
    event: str, payload: dict[str, Any], publisher: str, priority: str, context: Context, now: int, random: Random
) -> bytes:
    stamp = times.stamp(now)
    message = {
        "message_id": str(UUID(int=random.getrandbits(128), version=4)),
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
        "_context_is_admin": "admin" in context.roles,
        "_context_read_deleted": "no",
        "_context_timestamp": stamp,
    }
    return _encode({"oslo.version": "2.0", "oslo.message": _encode(message).decode()})
