"""What the bus has at the broker between connecting and losing the connection: two connections, channels, queues.

One connection publishes, the other one consumes and declares. A broker that is short of memory or disk space stops
reading from connections that publish. Acknowledgements must not stop with them: they are what frees its memory.

Messages to one queue go through the default exchange, by the queue's name. Nothing has to be bound, so a host's
broker user needs no right to bind its queue to the messages of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from pamqp import commands
from pamqp.base import Frame

from micronova.objects.clock import Clock
from micronova.rpc.amqp import frames
from micronova.rpc.amqp.channel import Channel, ChannelClosed, Received
from micronova.rpc.amqp.connection import Connection
from micronova.rpc.amqp.url import BrokerUrl

PREFIX = "micronova."
DEAD_QUEUE = "micronova.dead"
DEAD_EXCHANGE = "micronova.dead"
REPLY_PREFIX = "micronova.reply."
DELIVERY_LIMIT = 5
DEAD_LETTERS_KEPT = 100_000
KEPT_AFTER = ("rejected", "delivery_limit")
"""Why a message becomes a dead letter. One that has expired does not: nobody waits for the answer to that call."""
NOT_FOUND = 404
ACCESS_REFUSED = 403
CHANNELS_ALONE = 16
"""How many casts of those that a closed channel failed are sent again at once, each on a channel of its own."""

WORK_QUEUE_ARGUMENTS: dict[str, Any] = {
    "x-queue-type": "quorum",
    # A message that was delivered this often and never acknowledged, because each consumer died, is a dead letter.
    "x-delivery-limit": DELIVERY_LIMIT,
    "x-dead-letter-exchange": DEAD_EXCHANGE,
}
DEAD_QUEUE_ARGUMENTS: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": DEAD_LETTERS_KEPT}


class Session:
    """The two connections of a bus with what belongs to them; if one is lost the other is aborted."""

    def __init__(self, publishing: Connection, consuming: Connection) -> None:
        self.publishing = publishing
        self.consuming = consuming
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with the reason once one of the connections is closed or lost."""
        self.confirmed: Channel
        """Publishes casts: the broker confirms each. Get it with `confirmed_channel`."""
        self.unconfirmed: Channel
        """Publishes calls and replies: the answer to a call is its confirmation."""
        self.reply_to = b""
        self._control: Channel | None = None
        self._control_lock = asyncio.Lock()
        self._confirmed_lock = asyncio.Lock()
        self._alone = asyncio.Semaphore(CHANNELS_ALONE)
        for connection in (publishing, consuming):
            connection.closed.add_done_callback(self._on_closed)

    @classmethod
    async def open(
        cls,
        url: BrokerUrl,
        host: tuple[str, int],
        *,
        name: str,
        clock: Clock,
        token: str,
        on_reply: Callable[[Received], None],
        on_unroutable: Callable[[str], None],
        is_host: bool,
    ) -> Session:
        """Connect and prepare for sending; raise ConnectionLost or ChannelClosed if that fails.

        The user of a host is known to have no right to declare what all share.
        """
        publishing = await Connection.open(url, host, name=f"{name} (publish)", clock=clock)
        try:
            consuming = await Connection.open(url, host, name=f"{name} (consume)", clock=clock)
        except BaseException:
            publishing.abort()
            raise
        session = cls(publishing, consuming)
        try:
            session.confirmed = await session._new_confirmed_channel()
            session.unconfirmed = await publishing.channel()
            session.unconfirmed.on_return = on_unroutable
            # Rare (a right was withdrawn, a queue deleted), so not repaired in place: reconnect and declare all again.
            session.unconfirmed.on_lost = session.abort
            await session._consume_replies(f"{REPLY_PREFIX}{url.user}.{token}", on_reply)
            if not is_host:
                await session._unless_refused(session._ensure_dead_letters())
        except BaseException:
            session.abort()
            raise
        return session

    @property
    def is_open(self) -> bool:
        """Whether both connections are open."""
        return not self.publishing.closed.done() and not self.consuming.closed.done()

    async def confirmed_channel(self) -> Channel:
        """Return the channel for casts, a new one if the broker closed the last one because it refused a message."""
        if not self.confirmed.is_open:
            async with self._confirmed_lock:
                if not self.confirmed.is_open:
                    self.confirmed = await self._new_confirmed_channel()
        return self.confirmed

    @asynccontextmanager
    async def channel_alone(self) -> AsyncIterator[Channel]:
        """Give a channel for one cast, which fails no other one if the broker refuses it."""
        async with self._alone:
            channel = await self._new_confirmed_channel()
            try:
                yield channel
            finally:
                if channel.is_open and self.publishing.accepts_messages:
                    await channel.close()

    async def _new_confirmed_channel(self) -> Channel:
        channel = await self.publishing.channel()
        await channel.confirm()
        return channel

    def abort(self, reason: str = "the connection was aborted") -> None:
        """Disconnect at once."""
        self.publishing.abort(reason)
        self.consuming.abort(reason)

    async def close(self) -> None:
        """Close both connections."""
        for connection in (self.publishing, self.consuming):
            connection.closed.remove_done_callback(self._on_closed)
        await self.publishing.close()
        await self.consuming.close()
        if not self.closed.done():
            self.closed.set_result("closed")

    async def ensure_work_queue(self, queue: str) -> None:
        """Declare a work queue if it does not exist."""
        await self._ensure_queue(queue, WORK_QUEUE_ARGUMENTS)

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue with its messages, if it exists."""
        await self._request(commands.Queue.Delete(queue=queue))

    async def depth(self, queue: str) -> int:
        """Return the number of messages in a queue."""
        answer = await self._request(commands.Queue.Declare(queue=queue, passive=True))
        return int(answer.message_count or 0)

    def _on_closed(self, closed: asyncio.Future[str]) -> None:
        if not self.closed.done():
            self.closed.set_result(closed.result())
            self.abort(closed.result())

    async def _consume_replies(self, queue: str, on_reply: Callable[[Received], None]) -> None:
        channel = await self.consuming.channel()
        await channel.request(commands.Queue.Declare(queue=queue, exclusive=True, auto_delete=True))
        await channel.consume(queue, on_reply, no_ack=True)
        channel.on_lost = self.abort
        self.reply_to = frames.shortstr(queue)

    async def _unless_refused(self, declaration: Awaitable[Any]) -> None:
        """Await a declaration that a host's broker user may not make; services make it when they connect."""
        try:
            await declaration
        except ChannelClosed as closed:
            if closed.code != ACCESS_REFUSED:
                raise

    async def _ensure_queue(self, queue: str, arguments: dict[str, Any]) -> None:
        await self._ensure(
            commands.Queue.Declare(queue=queue, passive=True),
            commands.Queue.Declare(queue=queue, durable=True, arguments=arguments),
        )

    async def _ensure_dead_letters(self) -> None:
        """Declare the queue of dead letters, and the exchange that routes messages there by why they died."""
        await self._ensure_queue(DEAD_QUEUE, DEAD_QUEUE_ARGUMENTS)
        await self._ensure(
            commands.Exchange.Declare(exchange=DEAD_EXCHANGE, passive=True),
            commands.Exchange.Declare(exchange=DEAD_EXCHANGE, exchange_type="headers", durable=True),
        )
        for reason in KEPT_AFTER:
            of_reason: dict[str, Any] = {"x-match": "all-with-x", "x-first-death-reason": reason}
            await self._request(commands.Queue.Bind(queue=DEAD_QUEUE, exchange=DEAD_EXCHANGE, arguments=of_reason))

    async def _ensure(self, look_up: Frame, declare: Frame) -> None:
        """Look it up first: a host's broker user may use, but not declare, what belongs to others."""
        try:
            await self._request(look_up)
        except ChannelClosed as closed:
            if closed.code != NOT_FOUND:
                raise
            await self._request(declare)

    async def _request(self, frame: Frame) -> Any:
        # One at a time: a refusal closes the channel, which would fail the other requests on it.
        async with self._control_lock:
            if self._control is None or not self._control.is_open:
                self._control = await self.consuming.channel()
            return await self._control.request(frame)
