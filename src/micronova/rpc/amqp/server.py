"""A server fed by RabbitMQ: acknowledges after the handler has finished, resumes on every new connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pamqp import commands

from micronova.rpc.amqp.channel import Channel, ConnectionLost, Received
from micronova.rpc.amqp.session import PREFIX, REPLY_PREFIX, Session
from micronova.rpc.contract import address
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher, Verdict
from micronova.rpc.server import Server


class AmqpDelivery:
    """A message in the hands of a server."""

    __slots__ = ("_received", "body", "sender")

    def __init__(self, received: Received) -> None:
        self._received = received
        self.body = received.body
        self.sender = received.properties.user_id

    async def settle(self, verdict: Verdict) -> None:
        """Answer, then acknowledge or reject; on a lost connection the broker delivers the message again."""
        received = self._received
        channel = received.channel
        if not channel.is_open:
            return
        reply_to = received.properties.reply_to
        # Only to reply queues: nobody may use a server's broker user to write into a work queue.
        if verdict.reply is not None and reply_to.startswith(REPLY_PREFIX):
            channel.publish("", reply_to, verdict.reply)
        if verdict.dead:
            channel.reject(received.tag, requeue=False)
        else:
            channel.ack(received.tag)

    def give_back(self) -> None:
        """Return the message to its queue."""
        if self._received.channel.is_open:
            self._received.channel.reject(self._received.tag, requeue=True)


class AmqpServer(Server):
    """Consumes the queues of a topic, of its host, and of its own for fan-outs, on a channel of its own."""

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
    ) -> None:
        super().__init__(dispatcher, deadlines, prefetch, grace)
        topic, namespace = dispatcher.interface.topic, dispatcher.interface.namespace
        self._place = address(topic, namespace)
        self._work_queues = [f"{PREFIX}{self._place}"] if shared else []
        if host:
            self._work_queues.append(f"{PREFIX}{address(topic, namespace, host)}")
        self._name_fanout_queue = name_fanout_queue
        self._session: Session | None = None
        self._channel: Channel | None = None
        self._consumers: list[str] = []
        self._backlog: deque[AmqpDelivery] = deque()
        self._attaching = asyncio.Lock()

    async def attach(self, session: Session) -> None:
        """Consume over this session's connection; raises ConnectionLost or ChannelClosed."""
        async with self._attaching:
            if self._session is session or self._stopping:
                return
            self._backlog.clear()  # what came over a lost connection comes again
            for queue in self._work_queues:
                await session.ensure_work_queue(queue)
            exchange = await session.ensure_fanout(self._place)
            channel = await session.connection.channel()
            own = self._name_fanout_queue()  # a new one: the broker may not know yet that the old one's owner is gone
            await channel.request(commands.Basic.Qos(prefetch_count=self._prefetch))
            await channel.request(commands.Queue.Declare(queue=own, exclusive=True, auto_delete=True))
            await channel.request(commands.Queue.Bind(queue=own, exchange=exchange))
            self._consumers = [await channel.consume(queue, self._on_message) for queue in (own, *self._work_queues)]
            # Too rare to mend in place (a queue was deleted, the broker refused): begin anew with everything.
            channel.on_consumer_lost = lambda: session.connection.abort("a consumer was lost")
            self._session, self._channel = session, channel

    def _on_message(self, received: Received) -> None:
        delivery = AmqpDelivery(received)
        if self._stopping:
            delivery.give_back()
        elif self.has_room:
            self.take(delivery)
        else:
            # The broker's limit is per queue, ours is for all of them.
            self._backlog.append(delivery)

    def _next(self) -> None:
        if self._backlog and self.has_room:
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
                    pass  # then nothing flows either

    async def _close(self) -> None:
        if self._channel is not None and self._channel.is_open:
            try:
                await self._channel.close()
            except ConnectionLost:
                pass
