"""A server that consumes from RabbitMQ: acknowledges when the handler has finished, resumes after a reconnect."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from pamqp import commands

from micronova.rpc.amqp.channel import Channel, ConnectionLost, Received
from micronova.rpc.amqp.session import PREFIX, REPLY_PREFIX, Session
from micronova.rpc.contract import queue_name
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher, Outcome
from micronova.rpc.server import Server

SendReply = Callable[[str, bytes], Awaitable[None]]
"""Sends a reply to a queue, or drops and logs it if it cannot be sent."""


class AmqpDelivery:
    """A message that a server has received and not acknowledged yet."""

    __slots__ = ("_received", "_send_reply", "_settled", "body", "received_at", "sender")

    def __init__(self, received: Received, send_reply: SendReply, received_at: float) -> None:
        self._received = received
        self._send_reply = send_reply
        self._settled = False
        self.body = received.body
        self.sender = received.properties.user_id
        self.received_at = received_at

    async def settle(self, outcome: Outcome) -> None:
        """Acknowledge or reject, then reply; on a lost connection the broker delivers the message again."""
        received = self._received
        channel = received.channel
        if not channel.is_open:
            return
        # Acknowledge first: the broker may not accept the reply for now, but it always reads acknowledgements.
        self._settled = True
        if outcome.dead_letter:
            channel.reject(received.tag, requeue=False)
        else:
            channel.ack(received.tag)
        reply_to = received.properties.reply_to
        # Only to reply queues: a caller must not make a server write into a work queue with the server's rights.
        if outcome.reply is not None and reply_to.startswith(REPLY_PREFIX):
            await self._send_reply(reply_to, outcome.reply)

    def give_back(self) -> None:
        """Return the message to its queue, unless it was acknowledged."""
        if self._received.channel.is_open and not self._settled:
            self._received.channel.reject(self._received.tag, requeue=True)


class AmqpServer(Server):
    """Consumes the queue of a topic, the one of its host, and one of its own for fan-outs."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        deadlines: Deadlines,
        prefetch: int,
        grace: float,
        *,
        host: str | None,
        shared: bool,
        name_fanout_queue: Callable[[], str],
        send_reply: SendReply,
    ) -> None:
        super().__init__(dispatcher, deadlines, prefetch, grace)
        topic, namespace = dispatcher.interface.topic, dispatcher.interface.namespace
        self._topic_queue = queue_name(topic, namespace)
        self._work_queues = [f"{PREFIX}{self._topic_queue}"] if shared else []
        if host:
            self._work_queues.append(f"{PREFIX}{queue_name(topic, namespace, host)}")
        self._name_fanout_queue = name_fanout_queue
        self._send_reply = send_reply
        self._session: Session | None = None
        self._channel: Channel | None = None
        self._consumers: list[str] = []
        self._backlog: deque[AmqpDelivery] = deque()
        self._attaching = asyncio.Lock()

    async def attach(self, session: Session) -> None:
        """Consume on this session's connection; raise ConnectionLost or ChannelClosed."""
        async with self._attaching:
            if self._session is session or self._stopping:
                return
            self._backlog.clear()  # the broker delivers again what the lost connection brought
            for queue in self._work_queues:
                await session.ensure_work_queue(queue)
            exchange = await session.ensure_fanout(self._topic_queue)
            channel = await session.consuming.channel()
            own = self._name_fanout_queue()  # a new name: the broker may still hold the old, exclusive queue
            await channel.request(commands.Basic.Qos(prefetch_count=self._prefetch))
            await channel.request(commands.Queue.Declare(queue=own, exclusive=True, auto_delete=True))
            await channel.request(commands.Queue.Bind(queue=own, exchange=exchange))
            self._consumers = [await channel.consume(queue, self._on_message) for queue in (own, *self._work_queues)]
            channel.on_lost = session.abort
            self._session, self._channel = session, channel

    def _on_message(self, received: Received) -> None:
        delivery = AmqpDelivery(received, self._send_reply, self._dispatcher.clock.monotonic())
        if self._stopping:
            delivery.give_back()
        elif self.can_take:
            self.take(delivery)
        else:
            # The broker's prefetch limit is per consumer; ours covers all queues of this server.
            self._backlog.append(delivery)

    def _next(self) -> None:
        if self._backlog and self.can_take:
            self.take(self._backlog.popleft())

    async def _detach(self) -> None:
        async with self._attaching:
            while self._backlog:
                self._backlog.pop().give_back()
            if self._channel is not None and self._channel.is_open:
                try:
                    for consumer in self._consumers:
                        await self._channel.cancel(consumer)
                except ConnectionLost:
                    pass  # no messages arrive either

    async def _close(self) -> None:
        if self._channel is not None and self._channel.is_open:
            try:
                await self._channel.close()
            except ConnectionLost:
                pass
