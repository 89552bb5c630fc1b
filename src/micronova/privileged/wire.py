"""Messages between the helper and its clients: a length, then MessagePack; a socket is passed with its reply."""

import struct

import msgspec

from micronova.privileged import verbs as v

LIMIT = 16 << 20  # bytes of one message
HEADER = struct.Struct("!I")

_encoder = msgspec.msgpack.Encoder()
_verbs: msgspec.msgpack.Decoder[v.AnyVerb] = msgspec.msgpack.Decoder(v.AnyVerb)
_replies = msgspec.msgpack.Decoder(v.Reply)


def frame(message: v.Verb | v.Reply) -> bytes:
    """Encode a message with its length."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def verb(body: bytes) -> v.AnyVerb:
    """Decode a verb; raise msgspec.MsgspecError if it is not a known verb."""
    return _verbs.decode(body)


def reply(body: bytes) -> v.Reply:
    """Decode a reply."""
    return _replies.decode(body)
