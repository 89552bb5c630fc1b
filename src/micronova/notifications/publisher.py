"""Brings notifications to the broker without ever holding up whoever sends them.

They wait in a bounded queue for a task that publishes them in batches. While the broker is away the oldest are
dropped and counted. The exchange and the queues belong to the listeners: nothing is declared here, so that
nothing can clash with how they want it (durable or not, which type of queue), and a broker that nobody listens at
does not fill up with messages that nobody will ever fetch. No exchange means that nobody listens: then
notifications are forgotten, and not even encoded.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from pamqp import commands

from micronova.notifications.envelope import Message
from micronova.objects.clock import Clock
from micronova.rpc.amqp import frames
from micronova.rpc.amqp.channel import Channel, ChannelClosed, ConnectionLost, Refused, Unroutable
from micronova.rpc.amqp.connection import Connection
from micronova.rpc.amqp.url import parse

log = logging.getLogger(__name__)

Notification = Callable[[], Sequence[Message]]
"""A notification that is encoded when it is sent: one message for each format and topic."""

QUEUE_LIMIT = 2_000
BATCH = 100
LOOK_AGAIN = 1.0
RETURN = 10.0
WARN_AGAIN = 30.0
FIRST_DELAY = 0.2
LONGEST_DELAY = 10.0
LAST_WORDS = 2.0
NOT_FOUND = 404
JSON = frames.shortstr("application/json")


class Publisher:
    """One process's connection for notifications; it is made when there is the first one to send."""

    def __init__(self, url: str, exchange: str, *, clock: Clock, random: Random, name: str = "") -> None:
        self._url = parse(url.replace("rabbit://", "amqp://", 1) if url.startswith("rabbit://") else url)
        self._exchange = exchange
        self._clock = clock
        self._random = random
        self._name = name
        self._waiting: deque[Notification] = deque()
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._channel: Channel | None = None  # while there is one to an exchange that exists
        self._next_host = random.randrange(len(self._url.hosts))
        self._looked_at: float | None = None
        self._unheard_before = False
        self._heard_before = False
        self._back_at: float | None = None  # when a broker came back at which somebody listened before
        self._warned_at: float | None = None
        self.sent = 0
        self.dropped = 0
        self.unheard = 0

    async def start(self) -> None:
        """Begin; the broker need not be there."""
        self._task = asyncio.create_task(self._run(), name="notifications")

    async def stop(self) -> None:
        """Send what waits if that is quickly done, then disconnect."""
        if self._task is None:
            return
        if not self._unheard_before:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await self._idle.wait()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def put(self, notification: Notification) -> None:
        """Take a notification over. Returns at once; must be called in the event loop's thread."""
        if len(self._waiting) >= QUEUE_LIMIT:
            self._waiting.popleft()
            self._overflow()
        self._waiting.append(notification)
        self._idle.clear()
        self._some.set()

    def _overflow(self) -> None:
        if self._unheard_before:
            self.unheard += 1
            return
        self.dropped += 1
        now = self._clock.monotonic()
        if self._warned_at is None or now - self._warned_at > WARN_AGAIN:
            self._warned_at = now
            log.warning(
                "the broker at %s takes no notifications, or too slowly: the oldest are dropped, %d so far",
                self._url,
                self.dropped,
            )

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                try:
                    await self._deliver(batch)
                except Exception:
                    self.dropped += len(batch)
                    log.exception("%d notifications are lost", len(batch))
            self._some.clear()
            self._idle.set()

    async def _deliver(self, batch: list[Notification]) -> None:
        """Publish a batch, again and again if need be, unless nobody listens."""
        messages: list[Message] | None = None
        delay = FIRST_DELAY
        while True:
            try:
                channel = await self._find_channel()
                if channel is not None:
                    if messages is None:
                        messages = [message for notification in batch for message in _encode(notification)]
                    number = len(messages)
                    await self._publish(channel, messages)
                    if not messages:
                        return
                    if len(messages) < number:
                        self._back_at = None  # the others that are missing will not be waited for, but this once
                elif not self._listeners_may_return():
                    self.unheard += len(batch)
                    return
                await self._clock.sleep(LOOK_AGAIN)
                continue
            except ChannelClosed as error:
                self._channel = None
                if error.code == NOT_FOUND:
                    continue  # the exchange went with its listeners
                log.warning("notifications: %s", error)
            except ConnectionLost as error:
                if delay == FIRST_DELAY:
                    log.warning("notifications: the broker at %s is lost: %s", self._url, error)
                self._connection = self._channel = None
            # Jitter: a broker that comes back must not meet everybody in the same moment.
            await self._clock.sleep(delay * self._random.uniform(0.5, 1.0))
            delay = min(delay * 2, LONGEST_DELAY)

    async def _publish(self, channel: Channel, messages: list[Message]) -> None:
        """Publish messages and wait until the broker has them; those that it has are taken off the list.

        Just after the broker came back, those that no queue took are left on it: their listener may be on its way.
        """
        mandatory = self._listeners_may_return()
        confirmations = [
            channel.publish(
                self._exchange,
                key,
                body,
                message_id=str(number) if mandatory else "",
                mandatory=mandatory,
                persistent=True,
                content_type=JSON,
            )
            for number, (key, body) in enumerate(messages)
        ]
        done, unheard = 0, []
        try:
            for confirmation in confirmations:
                assert confirmation is not None
                try:
                    await confirmation
                    self.sent += 1
                except Refused:
                    self.dropped += 1
                except Unroutable:
                    unheard.append(messages[done])
                done += 1
        finally:
            messages[:done] = unheard

    def _listeners_may_return(self) -> bool:
        """Say whether the broker is just back: then its listeners need a moment to come back as well."""
        return self._back_at is not None and self._clock.monotonic() - self._back_at < RETURN

    async def _find_channel(self) -> Channel | None:
        """Return a channel to the exchange; None if there is no exchange, having looked after the batch was taken."""
        if self._channel is not None and self._channel.is_open:
            return self._channel
        if self._connection is None or self._connection.closed.done():
            self._connection = None
            host = self._url.hosts[self._next_host % len(self._url.hosts)]
            self._next_host += 1
            self._connection = await Connection.open(
                self._url, host, name=f"{self._name} notifications", clock=self._clock
            )
            if self._heard_before:
                self._back_at = self._clock.monotonic()
                log.warning("notifications: the broker is back; %d were dropped so far", self.dropped)
        if self._looked_at is not None:
            pause = self._looked_at + LOOK_AGAIN - self._clock.monotonic()
            if pause > 0:
                await self._clock.sleep(pause)
        channel = await self._connection.channel()
        self._looked_at = self._clock.monotonic()
        older = len(self._waiting)
        try:
            await channel.request(commands.Exchange.Declare(exchange=self._exchange, passive=True))
        except ChannelClosed as error:
            if error.code != NOT_FOUND:
                raise
            if not self._listeners_may_return():
                self._unheard_before = True
                self._forget(older)
            return None
        await channel.confirm()
        self._unheard_before = False
        self._heard_before = True
        self._channel = channel
        return channel

    def _forget(self, number: int) -> None:
        for _ in range(min(number, len(self._waiting))):
            self._waiting.popleft()
            self.unheard += 1


def _encode(notification: Notification) -> Sequence[Message]:
    try:
        return notification()
    except Exception:
        log.exception("a notification cannot be encoded")
        return ()
