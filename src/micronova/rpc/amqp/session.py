"""What the bus has at the broker while one connection lives: its channels, its reply queue, its declarations.

Everything point-to-point goes through the default exchange, by the name of the queue: there is nothing to bind, so
that a host's broker user needs no right to bind its queue to another's messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
REPLY_PREFIX = "micronova.reply."
HOST_TOPIC = "compute"
DELIVERY_LIMIT = 5
DEAD_LETTERS_KEPT = 100_000
NOT_FOUND = 404
ACCESS_REFUSED = 403

WORK_QUEUE_ARGUMENTS: dict[str, Any] = {
    "x-queue-type": "quorum",
    # A message that has taken this many processes down with it is put aside instead of going round for ever.
    "x-delivery-limit": DELIVERY_LIMIT,
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": DEAD_QUEUE,
}
DEAD_QUEUE_ARGUMENTS: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": DEAD_LETTERS_KEPT}


class Session:
    """One connection's worth of bus; when the connection is lost a new session takes its place."""

    def __init__(self, connection: Connection, casts: Channel, calls: Channel, reply_queue: str) -> None:
        self.connection = connection
        self.casts = casts
        self.calls = calls
        self.reply_to = frames.shortstr(reply_queue)
        self._control: Channel | None = None
        self._control_lock = asyncio.Lock()
        self._fanouts: set[str] = set()

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
    ) -> Session:
        """Connect and prepare for sending; raises ConnectionLost or ChannelClosed."""
        connection = await Connection.open(url, host, name=name, clock=clock)
        try:
            casts = await connection.channel()
            await casts.confirm()
            calls = await connection.channel()
            calls.on_return = on_unroutable
            reply_queue = f"{REPLY_PREFIX}{url.user}.{token}"
            await calls.request(commands.Queue.Declare(queue=reply_queue, exclusive=True, auto_delete=True))
            await calls.consume(reply_queue, on_reply, no_ack=True)
            session = cls(connection, casts, calls, reply_queue)
            await session._unless_refused(session._ensure_queue(DEAD_QUEUE, DEAD_QUEUE_ARGUMENTS))
            await session._unless_refused(session.ensure_fanout(HOST_TOPIC))
        except BaseException:
            connection.abort()
            raise
        return session

    async def ensure_work_queue(self, queue: str) -> None:
        """Make a work queue if it is missing."""
        await self._ensure_queue(queue, WORK_QUEUE_ARGUMENTS)

    async def ensure_fanout(self, place: str) -> str:
        """Make the fan-out exchange of a place if it is missing; gives its name."""
        name = f"{PREFIX}{place}.fanout"
        if name not in self._fanouts:
            await self._ensure(
                commands.Exchange.Declare(exchange=name, passive=True),
                commands.Exchange.Declare(exchange=name, exchange_type="fanout", durable=True),
            )
            self._fanouts.add(name)
        return name

    async def depth(self, queue: str) -> int:
        """Count the messages that lie in a queue."""
        answer = await self._request(commands.Queue.Declare(queue=queue, passive=True))
        return int(answer.message_count or 0)

    async def _unless_refused(self, making: Awaitable[Any]) -> None:
        """What hosts find but may not make is made by whoever else connects."""
        try:
            await making
        except ChannelClosed as closed:
            if closed.code != ACCESS_REFUSED:
                raise

    async def _ensure_queue(self, queue: str, arguments: dict[str, Any]) -> None:
        await self._ensure(
            commands.Queue.Declare(queue=queue, passive=True),
            commands.Queue.Declare(queue=queue, durable=True, arguments=arguments),
        )

    async def _ensure(self, look: Frame, make: Frame) -> None:
        """Look first: a host's broker user may not make what others own, nor need it to."""
        try:
            await self._request(look)
        except ChannelClosed as closed:
            if closed.code != NOT_FOUND:
                raise
            await self._request(make)

    async def _request(self, frame: Frame) -> Any:
        # One at a time: a refusal closes the channel and must not fail anybody else's request.
        async with self._control_lock:
            if self._control is None or not self._control.is_open:
                self._control = await self.connection.channel()
            return await self._control.request(frame)
