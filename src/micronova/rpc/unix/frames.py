"""What travels between a gate and its clients: MessagePack structures, each after its length."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from micronova.rpc.errors import BusUnavailable

LARGEST = 16 << 20
"""Bytes of one frame. The orders of a large request and their images' metadata are far smaller."""
UNREAD_LIMIT = 4 << 20
"""Bytes that may wait to be read by the other side; a side that wants to send more waits."""
_LENGTH = struct.Struct("!I")


class Frame(msgspec.Struct, array_like=True, tag=True):
    """One of the structures below."""


class Hello(Frame):
    """From the gate, first: the client is accepted, and its messages have this sender."""

    sender: str


class Serve(Frame):
    """Take messages from these queues, `prefetch` at once; answered by Done."""

    request: int
    consumer: int
    queues: list[str]
    prefetch: int


class Cancel(Frame):
    """Take no more messages; answered by Done, after which none arrives. Those in hand are still settled."""

    request: int
    consumer: int


class Send(Frame):
    """Put a message into a work queue; answered by Done."""

    request: int
    queue: str
    body: bytes


class DeleteQueue(Frame):
    """Delete a work queue with its messages; answered by Done."""

    request: int
    queue: str


class Call(Frame):
    """Put a call into a work queue; answered by Reply, or by CallFailed if the queue does not take it."""

    call: str
    queue: str
    body: bytes


class Settle(Frame):
    """A message was handled."""

    delivery: int
    reply: bytes | None
    dead_letter: str


class GiveBack(Frame):
    """A message was not handled, and another server shall have it."""

    delivery: int


class Probe(Frame):
    """Answered by Done with the number of dead letters."""

    request: int


class Ready(Frame):
    """The client's process has started all that it runs."""


class Done(Frame):
    """The answer to a request: an error if there is one."""

    request: int
    error: str = ""
    number: int = 0


class Deliver(Frame):
    """A message for a consumer."""

    consumer: int
    delivery: int
    sender: str
    body: bytes
    waited: float
    """Seconds for which the message waited in its queue."""


class Reply(Frame):
    """The reply to a call."""

    body: bytes


class CallFailed(Frame):
    """A call that no queue has taken."""

    call: str
    error: str


class Stop(Frame):
    """From the gate: the client's process shall stop what it runs, then disconnect."""


_encode = msgspec.msgpack.Encoder().encode
decode_from_client = msgspec.msgpack.Decoder(
    Serve | Cancel | Send | DeleteQueue | Call | Settle | GiveBack | Probe | Ready
).decode
decode_from_gate = msgspec.msgpack.Decoder(Hello | Done | Deliver | Reply | CallFailed | Stop).decode


class Broken(Exception):
    """The other side does not keep to the protocol."""


class Stream:
    """One connection, as frames."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decode: Callable[[bytes], Frame]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = decode
        writer.transport.set_write_buffer_limits(high=UNREAD_LIMIT)

    async def receive(self) -> Frame:
        """Return the next frame; raise Broken if it is too large or unknown, EOFError or OSError at the end."""
        [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > LARGEST:
            raise Broken(f"a frame of {length} bytes is larger than {LARGEST}")
        try:
            return self._decode(await self._reader.readexactly(length))
        except msgspec.DecodeError as error:
            raise Broken(f"a frame cannot be decoded: {error}") from error

    def send(self, frame: Frame) -> None:
        """Send a frame; raise BusUnavailable if it is too large. A connection that is closed drops it."""
        body = _encode(frame)
        if len(body) > LARGEST:
            raise BusUnavailable(f"a message of {len(body)} bytes is larger than {LARGEST}")
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def drain(self) -> None:
        """Wait until the other side has read so much that more may be sent."""
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection; what was sent before still arrives."""
        self._writer.close()

    def info(self, name: str) -> Any:
        """Return what asyncio knows of the connection."""
        return self._writer.get_extra_info(name)
