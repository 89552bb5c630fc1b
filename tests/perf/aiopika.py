"""The bus over aio-pika: only what the benchmark sends. Envelopes, deadlines and handlers are those of our bus."""

import random

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from micronova.objects.clock import SystemClock
from micronova.rpc.amqp.session import PREFIX, WORK_QUEUE_ARGUMENTS
from micronova.rpc.base import BaseBus
from micronova.rpc.bus import BrokerState
from micronova.rpc.contract import Interface, queue_name
from micronova.rpc.dispatch import Dispatcher


class AioPikaBus(BaseBus):
    """Calls and casts as our AMQP transport sends them: quorum queues, confirmed casts, acknowledgement at the end."""

    def __init__(self, url: str, prefetch: int) -> None:
        super().__init__(clock=SystemClock(), random=random.Random(), pins=None, name="aio-pika", grace=1.0)
        self._url = url
        self._prefetch = prefetch

    async def start(self) -> None:
        """Open a connection with a confirming channel for casts and another one for calls and their replies."""
        self._connection = await aio_pika.connect_robust(self._url)
        self._casts = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        self._direct = await self._connection.channel(publisher_confirms=False)
        self._replies = await self._direct.declare_queue(exclusive=True, auto_delete=True)
        await self._replies.consume(self._on_reply, no_ack=True)

    async def stop(self) -> None:
        """Disconnect."""
        await self._connection.close()
        self._deadlines.close()

    async def serve(self, interface: Interface, handler: object) -> None:
        """Handle an interface's messages from its shared queue."""
        dispatcher = Dispatcher(interface, handler, self._clock, self._deadlines, self._counters)
        channel = await self._connection.channel(publisher_confirms=False)
        await channel.set_qos(prefetch_count=self._prefetch)
        queue = await channel.declare_queue(
            PREFIX + queue_name(interface.topic, interface.namespace), durable=True, arguments=WORK_QUEUE_ARGUMENTS
        )

        async def handle(message: AbstractIncomingMessage) -> None:
            outcome = await dispatcher.run(message.body, message.user_id or "", self._clock.monotonic())
            if outcome.reply is not None and message.reply_to:
                await channel.default_exchange.publish(aio_pika.Message(outcome.reply), message.reply_to)
            await message.ack()

        await queue.consume(handle)

    async def _send(self, queue: str, body: bytes, message_id: str, expires: float | None) -> None:
        message = aio_pika.Message(body, message_id=message_id, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._casts.default_exchange.publish(message, PREFIX + queue, mandatory=True)

    async def _send_call(self, queue: str, body: bytes, call_id: str, left: float) -> None:
        message = aio_pika.Message(body, message_id=call_id, reply_to=self._replies.name)
        await self._direct.default_exchange.publish(message, PREFIX + queue, mandatory=True)

    async def _on_reply(self, message: AbstractIncomingMessage) -> None:
        self._receive_reply(message.body, message.user_id or "")

    def _broker_state(self) -> BrokerState:
        return BrokerState()
