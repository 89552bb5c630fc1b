"""A server that consumes from RabbitMQ: acknowledges when the handler has finished, resumes after a reconnect."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from pamqp import commands

from micronova.rpc.amqp.channel import Channel, ChannelClosed, Received
from micronova.rpc.amqp.session import PREFIX, REPLY_PREFIX, Session
from micronova.rpc.contract import queue_name
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher, Outcome
from micronova.rpc.errors import BusUnavailable, ConnectionLost
from micronova.rpc.reconnecting import AttachedServer
from micronova.rpc.server import Delivery

log = logging.getLogger(__name__)

MOST_HELD = 500
"""Messages of one host's user that a server holds at once. It drops more of them without an answer: a host that floods
a queue must not delay those whose messages are behind. The callers repeat what was dropped."""
WARN_INTERVAL = 60.0
"""Seconds between two warnings of a flood."""

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

    @property
    def is_lost(self) -> bool:
        """Whether its channel is closed: the broker delivers it again."""
        return not self._received.channel.is_open

    async def settle(self, outcome: Outcome) -> None:
        """Acknowledge or reject, then reply; on a lost connection the broker delivers the message again."""
        received = self._received
        channel = received.channel
        if self.is_lost:
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
        if not self.is_lost and not self._settled:
            self._received.channel.reject(self._received.tag, requeue=True)


class AmqpServer(AttachedServer[Session]):
    """Consumes the queue of a topic and the one of its host."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        deadlines: Deadlines,
        prefetch: int,
        grace: float,
        *,
        host: str | None,
        shared: bool,
        control_users: frozenset[str],
        send_reply: SendReply,
    ) -> None:
        """The messages of other than the control users are limited, if there are control users."""
        super().__init__(dispatcher, deadlines, prefetch, grace)
        topic, namespace = dispatcher.interface.topic, dispatcher.interface.namespace
        self._queues = [PREFIX + queue_name(topic, namespace)] if shared else []
        if host:
            self._queues.append(PREFIX + queue_name(topic, namespace, host))
        self._send_reply = send_reply
        self._session: Session | None = None
        self._channel: Channel | None = None
        self._consumers: list[str] = []
        self._attaching = asyncio.Lock()
        self._control_users = control_users
        self._held: Counter[str] = Counter()  # messages of hosts, by their users
        self._warned_at = float("-inf")

    async def attach(self, session: Session) -> None:
        """Consume on this session's connection."""
        async with self._attaching:
            if self._session is session or self._stopping:
                return
            self._forget_backlog()
            try:
                await self._consume(session)
            except ChannelClosed as error:
                queues = " and ".join(self._queues)
                raise BusUnavailable(
                    f"the broker does not let this process receive messages from {queues}: {error}. "
                    "`micronova check` prints the command that gives the broker user its rights"
                ) from error

    async def _consume(self, session: Session) -> None:
        for queue in self._queues:
            await session.ensure_work_queue(queue)
        channel = await session.consuming.channel()
        await channel.request(commands.Basic.Qos(prefetch_count=self._prefetch))
        self._consumers = [await channel.consume(queue, self._on_message) for queue in self._queues]
        channel.on_lost = session.abort
        self._session, self._channel = session, channel

    def _on_message(self, received: Received) -> None:
        delivery = AmqpDelivery(received, self._send_reply, self._dispatcher.clock.monotonic())
        if self._control_users and delivery.sender not in self._control_users and not self._stopping:
            if self._held[delivery.sender] >= MOST_HELD:
                self._drop(received)
                return
            self._held[delivery.sender] += 1
        self.receive(delivery)

    def _drop(self, received: Received) -> None:
        received.channel.ack(received.tag)
        now = self._dispatcher.clock.monotonic()
        if now - self._warned_at >= WARN_INTERVAL:
            self._warned_at = now
            log.warning(
                "the host %s sends more than %d messages at once to %s; more of them are dropped. If it does not end, "
                "look at what that host does, or remove it: micronova host remove",
                received.properties.user_id,
                MOST_HELD,
                " and ".join(self._queues),
            )

    def _let_go(self, delivery: Delivery) -> None:
        if delivery.sender in self._held:
            self._held[delivery.sender] -= 1
            if not self._held[delivery.sender]:
                del self._held[delivery.sender]

    async def _work(self, delivery: Delivery) -> None:
        try:
            await super()._work(delivery)
        finally:
            self._let_go(delivery)

    async def _detach(self) -> None:
        async with self._attaching:
            self._return_backlog()
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
