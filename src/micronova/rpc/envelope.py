"""The wire format: a MessagePack envelope around a typed payload, the same on every transport."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from micronova.objects.context import Context
from micronova.rpc.errors import ErrorBody, MessageTooLarge

CAST: Final = "cast"
CALL: Final = "call"
REPLY: Final = "reply"
LARGEST: Final = 15 << 20
"""Bytes of one message. RabbitMQ takes 16 MiB unless it is set otherwise, and so does a gate (unix/frames.py)."""


class Request(msgspec.Struct, omit_defaults=True):
    """A message as it is received; the payload is decoded when the method is known."""

    id: str
    kind: str
    method: str
    namespace: str = ""
    version: str = "1.0"
    context: Context = Context()
    payload: msgspec.Raw = msgspec.Raw()
    left: float = 0.0
    """Seconds for which the caller waits, or a cast may wait, from sending on; 0: no limit. Machines' clocks differ."""


class OutgoingRequest(msgspec.Struct, omit_defaults=True):
    """A message as it is sent; payload and envelope are encoded in one pass."""

    id: str
    kind: str
    method: str
    namespace: str
    version: str
    context: Context
    payload: Any
    left: float = 0.0


class Reply(msgspec.Struct, omit_defaults=True):
    """The answer to a call as it is received."""

    id: str
    error: ErrorBody | None = None
    payload: msgspec.Raw = msgspec.Raw()


class OutgoingReply(msgspec.Struct):
    """The answer to a call as it is sent."""

    id: str
    error: ErrorBody | None
    payload: Any


_encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def encode(message: OutgoingRequest | OutgoingReply) -> bytes:
    """Return a message as bytes; raise MessageTooLarge, because a transport could only drop it."""
    body = _encode(message)
    if len(body) > LARGEST:
        what = message.method if isinstance(message, OutgoingRequest) else "the reply"
        raise MessageTooLarge(f"{what} has {len(body)} bytes: a message may have {LARGEST}")
    return body
