"""An AMQP channel: requests in order, consumers, publishing with confirms and within limits."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pamqp.frame
from pamqp import commands
from pamqp.base import Frame

from micronova.rpc.amqp import frames
from micronova.rpc.errors import ConnectionLost

if TYPE_CHECKING:
    from micronova.rpc.amqp.connection import Connection

ANSWER_SECONDS = 20.0
UNCONFIRMED_LIMIT = 10_000
"""How many publishers of one channel may wait for the broker's confirmation before others have to wait."""
UNCONFIRMED_OF_ONE_QUEUE = 250
"""How many messages to one queue may be without confirmation, even if their publishers no longer wait for it.

A queue whose leader is lost confirms nothing; the messages to other queues do not wait for it.
"""
RESUMED_AT_ONCE = 100


class ChannelClosed(Exception):
    """The broker refused something and closed the channel."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Unroutable(Exception):
    """The message was routed to no queue."""


class Refused(Exception):
    """The broker rejected the message, or did not confirm it in time."""


class Received:
    """A message that the broker delivered."""

    __slots__ = ("body", "channel", "properties", "tag")

    def __init__(self, channel: Channel, tag: int, properties: frames.Properties, body: bytes) -> None:
        self.channel = channel
        self.tag = tag
        self.properties = properties
        self.body = body


OnMessage = Callable[[Received], None]
NO_PROPERTIES = frames.Properties(0, "", "", "")


class Channel:
    """One channel of a connection; make it with Connection.channel()."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.number = number
        self.is_open = True
        self.on_return: Callable[[str], None] | None = None
        self.on_lost: Callable[[str], None] | None = None
        """Called with the reason when the broker closes the channel or cancels one of its consumers."""
        self._connection = connection
        self._requests: deque[asyncio.Future[Frame]] = deque()
        self._consumers: dict[str, OnMessage] = {}
        self._consumer_numbers = count(1)
        self._publish_tag = 0
        self._confirming = False
        self._unconfirmed: dict[int, tuple[str, str, asyncio.Future[None]]] = {}  # message, queue, confirmation
        self._unconfirmed_by_queue: Counter[str] = Counter()
        self._awaited = 0  # confirmations that a publisher waits for
        self._waiting_for_queue: dict[str, deque[asyncio.Future[None]]] = {}
        self._returned: set[str] = set()
        self._waiting_to_publish: deque[asyncio.Future[None]] = deque()
        self._publish_frames: dict[tuple[str, str, bool], bytes] = {}
        # The message that is being received.
        self._consumer_tag: str | None = None
        self._delivery_tag = 0
        self._properties = NO_PROPERTIES
        self._parts: list[bytes] = []
        self._missing = 0

    async def request(self, frame: Frame) -> Any:
        """Send a method and return the broker's answer to it."""
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._send(pamqp.frame.marshal(frame, self.number))
        self._requests.append(answer)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            reason = f"the broker did not answer {frame.name} in {ANSWER_SECONDS:.0f} seconds"
            self._connection.abort(reason)
            raise ConnectionLost(reason) from None

    async def confirm(self) -> None:
        """Make the broker confirm each message that is published on this channel."""
        await self.request(commands.Confirm.Select())
        self._confirming = True

    async def consume(self, queue: str, on_message: OnMessage, *, no_ack: bool = False) -> str:
        """Receive a queue's messages; return the consumer's tag."""
        tag = str(next(self._consumer_numbers))
        self._consumers[tag] = on_message
        await self.request(commands.Basic.Consume(queue=queue, consumer_tag=tag, no_ack=no_ack))
        return tag

    async def cancel(self, consumer_tag: str) -> None:
        """Stop receiving a queue's messages."""
        await self.request(commands.Basic.Cancel(consumer_tag=consumer_tag))
        self._consumers.pop(consumer_tag, None)

    @property
    def can_publish(self) -> bool:
        """Whether a message may be published now; if not, await wait_to_publish() first."""
        return self._within_limits and not self._waiting_to_publish

    async def wait_to_publish(self) -> None:
        """Return when it is the caller's turn to publish; raise ConnectionLost if that does not happen."""
        while True:
            if not self.is_open:
                raise ConnectionLost("the channel is closed")
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting_to_publish.append(turn)
            await turn
            if self._within_limits:
                return

    def has_room(self, queue: str) -> bool:
        """Return whether one more message to a queue may be published; if not, await wait_for_room() first."""
        return self._unconfirmed_by_queue[queue] < UNCONFIRMED_OF_ONE_QUEUE

    async def wait_for_room(self, queue: str) -> None:
        """Return when the broker has confirmed a message to a queue; raise ConnectionLost if that does not happen."""
        if not self.is_open:
            raise ConnectionLost("the channel is closed")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_for_queue.setdefault(queue, deque()).append(turn)
        await turn

    def resume_publishing(self) -> None:
        """Let those that wait publish, in order, as many as the limits allow."""
        waiting = self._waiting_to_publish
        free = min(UNCONFIRMED_LIMIT - self._awaited, RESUMED_AT_ONCE)
        while waiting and free > 0 and self._connection.accepts_messages:
            turn = waiting.popleft()
            if not turn.done():  # else its caller no longer waits
                turn.set_result(None)
                free -= 1
        if waiting and self._within_limits:
            # After those that were just resumed have published: they may have filled the write buffer.
            asyncio.get_running_loop().call_soon(self.resume_publishing)

    @property
    def _within_limits(self) -> bool:
        return self._connection.accepts_messages and self._awaited < UNCONFIRMED_LIMIT

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes,
        *,
        message_id: str = "",
        reply_to: bytes = b"",
        mandatory: bool = False,
        persistent: bool = False,
        content_type: bytes = b"",
        expires: float | None = None,
    ) -> asyncio.Future[None] | None:
        """Publish a message; on a channel with confirms return the future of its confirmation.

        The broker drops a message that has waited in its queue for `expires` seconds; None: never.

        This does not wait and is not refused when the limits are reached: see can_publish.
        """
        destination = (exchange, routing_key, mandatory)
        start = self._publish_frames.get(destination)
        if start is None:
            start = frames.publish_frame(self.number, exchange, routing_key, mandatory=mandatory)
            if len(self._publish_frames) < 1_000:  # reply queues come and go
                self._publish_frames[destination] = start
        connection = self._connection
        header = frames.header_frame(
            self.number,
            len(body),
            persistent=persistent,
            reply_to=reply_to,
            message_id=frames.shortstr(message_id) if message_id else b"",
            user_id=connection.user_id,
            content_type=content_type,
            expiration=b"" if expires is None else frames.shortstr(str(max(1, int(expires * 1000)))),
        )
        self._send(start + header + frames.body_frames(self.number, body, connection.frame_max))
        if not self._confirming:
            return None
        self._publish_tag += 1
        confirmation: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        confirmation.add_done_callback(self._no_longer_awaited)
        self._awaited += 1
        self._unconfirmed[self._publish_tag] = (message_id, routing_key, confirmation)
        self._unconfirmed_by_queue[routing_key] += 1
        return confirmation

    def ack(self, tag: int) -> None:
        """Acknowledge a message: the broker deletes it."""
        self._send(frames.ack_frame(self.number, tag))

    def reject(self, tag: int, *, requeue: bool) -> None:
        """Return a message to its queue, or send it to the dead-letter queue."""
        self._send(frames.reject_frame(self.number, tag, requeue=requeue))

    async def close(self) -> None:
        """Close the channel; messages not acknowledged go back to their queues."""
        if self.is_open:
            await self.request(commands.Channel.Close(reply_code=200, reply_text="", class_id=0, method_id=0))
            self.lost(ConnectionLost("the channel was closed"))
            self._connection.forget(self.number)

    def lost(self, error: Exception) -> None:
        """Fail all requests and publishes that wait on this channel."""
        self.is_open = False
        waiting: list[asyncio.Future[Any]] = [*self._requests, *self._waiting_to_publish]
        waiting += [turn for turns in self._waiting_for_queue.values() for turn in turns]
        waiting += [confirmation for _, _, confirmation in self._unconfirmed.values()]
        self._requests.clear()
        self._waiting_to_publish.clear()
        self._waiting_for_queue.clear()
        self._unconfirmed.clear()
        self._unconfirmed_by_queue.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: asyncio logs it otherwise if its caller has given up

    def on_method(self, data: bytes, start: int, end: int) -> None:
        """Handle a method frame whose payload is data[start:end]."""
        (index,) = frames.method_index(data, start)
        if index == frames.BASIC_DELIVER:
            self._consumer_tag, self._delivery_tag = frames.read_deliver(data, start + 4)
        elif index == frames.BASIC_ACK or index == frames.BASIC_NACK:
            (tag,) = frames.u64(data, start + 4)
            self._confirmed(tag, multiple=bool(data[start + 12] & 1), ok=index == frames.BASIC_ACK)
        elif index == frames.BASIC_RETURN:
            self._consumer_tag = None
        else:
            whole = data[start - 7 : end + 1]
            self._on_other(cast(Frame, pamqp.frame.unmarshal(whole)[2]))

    def on_header(self, data: bytes, start: int) -> None:
        """Handle the content header whose payload begins at start."""
        self._properties = frames.read_properties(data, start)
        self._missing = self._properties.size
        self._parts = []
        if not self._missing:
            self._on_content(b"")

    def on_body(self, part: bytes) -> None:
        """Handle a part of a message's body."""
        self._missing -= len(part)
        if self._missing:
            self._parts.append(part)
        elif self._parts:
            self._on_content(b"".join((*self._parts, part)))
        else:
            self._on_content(part)

    def _on_content(self, body: bytes) -> None:
        if self._consumer_tag is None:
            self._on_returned(self._properties.message_id)
            return
        consumer = self._consumers.get(self._consumer_tag)
        if consumer is not None:
            consumer(Received(self, self._delivery_tag, self._properties, body))
        # else the consumer was cancelled meanwhile: the message returns to its queue when the channel closes

    def _on_returned(self, message_id: str) -> None:
        if self._confirming:
            self._returned.add(message_id)  # its confirmation follows
        elif self.on_return is not None:
            self.on_return(message_id)

    def _no_longer_awaited(self, confirmation: asyncio.Future[None]) -> None:
        self._awaited -= 1
        if self._waiting_to_publish:
            self.resume_publishing()

    def _confirmed(self, tag: int, *, multiple: bool, ok: bool) -> None:
        unconfirmed = self._unconfirmed
        if not multiple:
            found = unconfirmed.pop(tag, None)
            if found is not None:
                self._resolve(*found, ok=ok)
            return
        while unconfirmed:
            first = next(iter(unconfirmed))
            if first > tag:
                return
            self._resolve(*unconfirmed.pop(first), ok=ok)

    def _resolve(self, message_id: str, queue: str, confirmation: asyncio.Future[None], *, ok: bool) -> None:
        self._make_room(queue)
        returned = message_id in self._returned
        self._returned.discard(message_id)
        if confirmation.done():
            return
        if returned:
            confirmation.set_exception(Unroutable())
        elif ok:
            confirmation.set_result(None)
        else:
            confirmation.set_exception(Refused("the broker rejected it"))

    def _make_room(self, queue: str) -> None:
        self._unconfirmed_by_queue[queue] -= 1
        if not self._unconfirmed_by_queue[queue]:
            del self._unconfirmed_by_queue[queue]
        turns = self._waiting_for_queue.get(queue, ())
        while turns:
            turn = turns.popleft()
            if not turn.done():  # else its caller no longer waits
                turn.set_result(None)
                break
        if not turns:
            self._waiting_for_queue.pop(queue, None)

    def _on_other(self, frame: Frame) -> None:
        if isinstance(frame, commands.Channel.Close):
            self._send(pamqp.frame.marshal(commands.Channel.CloseOk(), self.number))
            self._connection.forget(self.number)
            self.lost(ChannelClosed(frame.reply_code or 0, frame.reply_text))
            if self.on_lost is not None:
                self.on_lost(f"the broker closed a channel: {frame.reply_text}")
        elif isinstance(frame, commands.Basic.Cancel):
            self._consumers.pop(frame.consumer_tag or "", None)
            if self.on_lost is not None:
                self.on_lost("the broker cancelled a consumer, because its queue was deleted or lost its leader")
        elif self._requests:
            answer = self._requests.popleft()
            if not answer.done():
                answer.set_result(frame)

    def _send(self, data: bytes) -> None:
        if not self.is_open:
            raise ConnectionLost("the channel is closed")
        self._connection.write(data)
