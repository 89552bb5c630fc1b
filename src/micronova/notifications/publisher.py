"""Publishes notifications without delaying the code that sends them.

Notifications wait in a bounded queue for a task that publishes them in batches. While the broker is lost or accepts no
messages, the oldest ones are dropped and counted. The queue is longer while the broker accepts messages: one
transaction may change thousands of servers, and puts all that is to be told of them at once.

The exchange and the queues belong to the listeners (oslo.messaging declares them). Nothing is declared here, so our
declaration cannot conflict with theirs, and no queue fills up that has no reader. If the exchange does not exist there
are no listeners; then notifications are counted as unheard and discarded without being encoded.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from pamqp import commands

from micronova.notifications.envelope import Message
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock
from micronova.rpc.amqp import frames
from micronova.rpc.amqp.channel import Channel, ChannelClosed, Refused, Unroutable
from micronova.rpc.amqp.connection import Connection
from micronova.rpc.amqp.url import parse
from micronova.rpc.errors import ConnectionLost

log = logging.getLogger(__name__)

Notification = Callable[[], Sequence[Message]]
"""Encodes a notification when it is called: one message for each format and topic."""

QUEUE_LIMIT = 2_000
BURST_LIMIT = 20_000
"""Notifications that wait while the broker accepts messages."""
STALL_SECONDS = 5.0
"""How long the broker may accept nothing, although something waits, before the shorter limit holds."""
ROOM_CHECK_SECONDS = 0.1
BATCH = 100
EXCHANGE_CHECK_SECONDS = 1.0
"""How long to wait before looking again for an exchange that did not exist."""
LISTENER_RETURN_SECONDS = 10.0
"""How long after a reconnect listeners may need to declare their exchange and queues again."""
WARNING_SECONDS = 30.0
FIRST_DELAY = 0.2
LONGEST_DELAY = 10.0
STOP_SECONDS = 2.0
NOT_FOUND = 404
JSON = frames.shortstr("application/json")


class Publisher:
    """One process's connection for notifications; it is opened when there is a first one to send."""

    def __init__(self, url: str, exchange: str, *, clock: Clock, random: Random, name: str = "") -> None:
        self._url = parse(url.replace("rabbit://", "amqp://", 1) if url.startswith("rabbit://") else url)
        self._exchange = exchange
        self._clock = clock
        self._random = random
        self._name = name
        self._waiting: deque[Notification] = deque()
        self._not_empty = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._channel: Channel | None = None  # open only while the exchange exists
        self._next_host = random.randrange(len(self._url.hosts))
        self._checked_at: float | None = None  # when it was last checked that the exchange exists
        self._no_listeners = False
        self._had_listeners = False
        self._reconnected_at: float | None = None  # set only if there were listeners before
        self._warned_at: float | None = None
        self._lost = False
        self._accepted_at = clock.monotonic()  # the last batch; or when the queue began to fill
        self._put = self._ended = 0  # notifications that were queued, and those that left the queue for good
        self.sent = 0
        self.dropped = 0
        self.unheard = 0

    async def start(self) -> None:
        """Start the task; the broker need not be reachable."""
        self._task = keep_running(self._run, name="notifications", clock=self._clock)

    async def stop(self) -> None:
        """Publish what waits, for at most two seconds, then disconnect."""
        if self._task is None:
            return
        if not self._no_listeners:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._idle.wait()
        await end_tasks(self._task)
        self._task = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def put(self, notification: Notification) -> None:
        """Queue a notification and return at once. Call it in the event loop's thread."""
        if self._idle.is_set():
            self._accepted_at = self._clock.monotonic()
        limit = BURST_LIMIT if self.takes_bursts else QUEUE_LIMIT
        while len(self._waiting) >= limit:
            self._waiting.popleft()
            self._ended += 1
            self._overflow()
        self._waiting.append(notification)
        self._put += 1
        self._idle.clear()
        self._not_empty.set()

    @property
    def takes_bursts(self) -> bool:
        """Whether the broker accepts messages, as far as it was tried."""
        return not self._lost and self._clock.monotonic() - self._accepted_at < STALL_SECONDS

    async def wait_for_room(self) -> None:
        """Wait until less than half of the queue is in use."""
        while len(self._waiting) >= QUEUE_LIMIT // 2:
            await self._clock.sleep(ROOM_CHECK_SECONDS)

    async def wait_until_sent(self) -> None:
        """Wait until the broker has all that was put before, as far as there are consumers."""
        put = self._put
        while self._ended < put:
            await self._clock.sleep(ROOM_CHECK_SECONDS)

    def _overflow(self) -> None:
        if self._no_listeners:
            self.unheard += 1
            return
        self.dropped += 1
        now = self._clock.monotonic()
        if self._warned_at is None or now - self._warned_at > WARNING_SECONDS:
            self._warned_at = now
            log.warning(
                "the broker at %s is lost or accepts notifications too slowly: the oldest are dropped, %d so far",
                self._url,
                self.dropped,
            )

    async def _run(self) -> None:
        while True:
            await self._not_empty.wait()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                try:
                    await self._deliver(batch)
                except Exception:
                    self.dropped += len(batch)
                    log.exception("%d notifications were dropped because of a bug", len(batch))
                self._ended += len(batch)
                self._lost = False
                self._accepted_at = self._clock.monotonic()
            self._not_empty.clear()
            self._idle.set()

    async def _deliver(self, batch: list[Notification]) -> None:
        """Publish a batch, and repeat until the broker has it or there are no listeners."""
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
                        self._reconnected_at = None  # some listeners are back: wait only once for the others
                elif not self._listeners_may_return():
                    self.unheard += len(batch)
                    return
                await self._clock.sleep(EXCHANGE_CHECK_SECONDS)
                continue
            except ChannelClosed as error:
                self._channel = None
                if error.code == NOT_FOUND:
                    continue  # the listeners have deleted the exchange
                self._lost = True
                log.warning("notifications: the broker closed the channel, trying again: %s", error)
            except ConnectionLost as error:
                if delay == FIRST_DELAY:
                    log.warning("notifications: the connection to the broker at %s is lost: %s", self._url, error)
                self._connection = self._channel = None
                self._lost = True
            # Jitter: the clients of a restarted broker must not all connect at the same moment.
            await self._clock.sleep(delay * self._random.uniform(0.5, 1.0))
            delay = min(delay * 2, LONGEST_DELAY)

    async def _publish(self, channel: Channel, messages: list[Message]) -> None:
        """Publish messages, wait for their confirmations, and remove those that the broker has from the list.

        Shortly after a reconnect, those that were routed to no queue stay: their listener may declare it again.
        """
        if not channel.can_publish:
            await channel.wait_to_publish()
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
        done, unroutable = 0, []
        try:
            for confirmation in confirmations:
                assert confirmation is not None
                try:
                    await confirmation
                    self.sent += 1
                except Refused:
                    self.dropped += 1
                except Unroutable:
                    unroutable.append(messages[done])
                done += 1
        finally:
            messages[:done] = unroutable

    def _listeners_may_return(self) -> bool:
        """Return whether we have just reconnected to a broker whose listeners may not have reconnected yet."""
        return (
            self._reconnected_at is not None
            and self._clock.monotonic() - self._reconnected_at < LISTENER_RETURN_SECONDS
        )

    async def _find_channel(self) -> Channel | None:
        """Return a channel if the exchange exists, else None; look after the batch was taken from the queue."""
        if self._channel is not None and self._channel.is_open:
            return self._channel
        if self._connection is None or self._connection.closed.done():
            self._connection = None
            host = self._url.hosts[self._next_host % len(self._url.hosts)]
            self._next_host += 1
            self._connection = await Connection.open(
                self._url, host, name=f"{self._name} notifications", clock=self._clock
            )
            if self._had_listeners:
                self._reconnected_at = self._clock.monotonic()
                log.warning("notifications: the connection to the broker is back; %d were dropped so far", self.dropped)
        if self._checked_at is not None:
            pause = self._checked_at + EXCHANGE_CHECK_SECONDS - self._clock.monotonic()
            if pause > 0:
                await self._clock.sleep(pause)
        channel = await self._connection.channel()
        self._checked_at = self._clock.monotonic()
        older = len(self._waiting)
        try:
            await channel.request(commands.Exchange.Declare(exchange=self._exchange, passive=True))
        except ChannelClosed as error:
            if error.code != NOT_FOUND:
                raise
            if not self._listeners_may_return():
                self._no_listeners = True
                self._discard(older)
            return None
        await channel.confirm()
        self._no_listeners = False
        self._had_listeners = True
        self._channel = channel
        return channel

    def _discard(self, number: int) -> None:
        for _ in range(min(number, len(self._waiting))):
            self._waiting.popleft()
            self._ended += 1
            self.unheard += 1


def _encode(notification: Notification) -> Sequence[Message]:
    try:
        return notification()
    except Exception:
        log.exception("a notification cannot be encoded and is dropped")
        return ()
