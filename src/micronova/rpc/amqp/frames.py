"""The AMQP 0-9-1 frames that every message needs, packed and unpacked here for speed; pamqp does all others.

A message takes at least nine frames (publish, header, body, the same three on delivery, confirm, acknowledgement …).
Marshalling each of them with a general library costs several times as much as the rest of the bus.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8
END: Final = 0xCE
END_BYTE: Final = b"\xce"
HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
OVERHEAD: Final = 8
"""Bytes of a frame besides its payload."""

BASIC_RETURN: Final = (60 << 16) | 50
BASIC_DELIVER: Final = (60 << 16) | 60
BASIC_ACK: Final = (60 << 16) | 80
BASIC_NACK: Final = (60 << 16) | 120

frame_start = struct.Struct(">BHI")
_publish = struct.Struct(">BHIIH")
_header = struct.Struct(">BHIHHQH")
_settle = struct.Struct(">BHIIQBB")
_u32 = struct.Struct(">I")
_u64 = struct.Struct(">Q")
_content = struct.Struct(">HHQH")

# Property flags, in the order in which the properties follow.
_CONTENT_TYPE, _ENCODING, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 14, 1 << 13, 1 << 12
_PRIORITY, _CORRELATION_ID, _REPLY_TO, _EXPIRATION = 1 << 11, 1 << 10, 1 << 9, 1 << 8
_MESSAGE_ID, _TIMESTAMP, _TYPE, _USER_ID = 1 << 7, 1 << 6, 1 << 5, 1 << 4

_UTF8 = b"\x05utf-8"

method_index = _u32.unpack_from
u64 = _u64.unpack_from


class Properties(NamedTuple):
    """The properties of a received message that we use."""

    size: int
    reply_to: str
    message_id: str
    user_id: str


def shortstr(text: str) -> bytes:
    """Encode a string of at most 255 bytes with its length before it."""
    data = text.encode()
    if len(data) > 255:
        raise ValueError(f"too long for AMQP (255 bytes): {text}")
    return bytes((len(data),)) + data


def publish_frame(channel: int, exchange: str, routing_key: str, *, mandatory: bool) -> bytes:
    """Return a Basic.Publish frame; it is the same for all messages with one routing key, so callers cache it."""
    names = shortstr(exchange) + shortstr(routing_key)
    size = 4 + 2 + len(names) + 1
    start = _publish.pack(METHOD, channel, size, (60 << 16) | 40, 0)
    return start + names + bytes((1 if mandatory else 0,)) + END_BYTE


def header_frame(
    channel: int,
    size: int,
    *,
    persistent: bool,
    reply_to: bytes,
    message_id: bytes,
    user_id: bytes,
    content_type: bytes = b"",
    expiration: bytes = b"",
) -> bytes:
    """Return a content header; strings are encoded by shortstr, or empty. Content with a type is text in UTF-8."""
    flags = _DELIVERY_MODE | _USER_ID
    middle = b"\x02" if persistent else b"\x01"
    if content_type:
        flags |= _CONTENT_TYPE | _ENCODING
        middle = content_type + _UTF8 + middle
    if reply_to:
        flags |= _REPLY_TO
    if expiration:
        flags |= _EXPIRATION
    if message_id:
        flags |= _MESSAGE_ID
    properties = middle + reply_to + expiration + message_id + user_id
    return _header.pack(HEADER, channel, 14 + len(properties), 60, 0, size, flags) + properties + END_BYTE


def body_frames(channel: int, body: bytes, frame_max: int) -> bytes:
    """Return the body, split into frames that are not larger than the broker's limit."""
    size = len(body)
    limit = frame_max - OVERHEAD
    if size <= limit:
        return frame_start.pack(BODY, channel, size) + body + END_BYTE if size else b""
    parts: list[bytes] = []
    for begin in range(0, size, limit):
        part = body[begin : begin + limit]
        parts += (frame_start.pack(BODY, channel, len(part)), part, END_BYTE)
    return b"".join(parts)


def ack_frame(channel: int, tag: int) -> bytes:
    """Return the frame that acknowledges a message."""
    return _settle.pack(METHOD, channel, 13, BASIC_ACK, tag, 0, END)


def reject_frame(channel: int, tag: int, *, requeue: bool) -> bytes:
    """Return the frame that sends a message back to its queue, or to the dead-letter queue."""
    return _settle.pack(METHOD, channel, 13, (60 << 16) | 90, tag, 1 if requeue else 0, END)


def read_deliver(data: bytes, position: int) -> tuple[str, int]:
    """Return consumer tag and delivery tag of a Basic.Deliver whose arguments begin at the position."""
    end = position + 1 + data[position]
    (tag,) = _u64.unpack_from(data, end)
    return data[position + 1 : end].decode(), tag


def read_properties(data: bytes, position: int) -> Properties:
    """Read a content header whose payload begins at the position."""
    _, _, size, flags = _content.unpack_from(data, position)
    position += 14
    reply_to = message_id = user_id = ""
    if flags & _CONTENT_TYPE:
        position += 1 + data[position]
    if flags & _ENCODING:
        position += 1 + data[position]
    if flags & _HEADERS:
        (length,) = _u32.unpack_from(data, position)
        position += 4 + length
    if flags & _DELIVERY_MODE:
        position += 1
    if flags & _PRIORITY:
        position += 1
    if flags & _CORRELATION_ID:
        position += 1 + data[position]
    if flags & _REPLY_TO:
        end = position + 1 + data[position]
        reply_to = data[position + 1 : end].decode()
        position = end
    if flags & _EXPIRATION:
        position += 1 + data[position]
    if flags & _MESSAGE_ID:
        end = position + 1 + data[position]
        message_id = data[position + 1 : end].decode()
        position = end
    if flags & _TIMESTAMP:
        position += 8
    if flags & _TYPE:
        position += 1 + data[position]
    if flags & _USER_ID:
        end = position + 1 + data[position]
        user_id = data[position + 1 : end].decode()
    return Properties(size, reply_to, message_id, user_id)
