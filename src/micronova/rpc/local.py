"""The bus within one process: queues in memory carry the same bytes as a broker, so nothing is shared by reference."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Protocol
from weakref import WeakKeyDictionary

from micronova.objects.clock import Clock
from micronova.rpc.base import BaseBus
from micronova.rpc.bus import DEFAULT_PREFETCH, BrokerState, BusStats
from micronova.rpc.contract import Interface, queue_name
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher, Outcome
from micronova.rpc.errors import BusUnavailable
from micronova.rpc.server import Server

QUEUE_LIMIT = 10_000
YIELD_AT = 100


class Taker(Protocol):
    """Who takes messages from queues: a server of this process, or the gate for one of another process."""

    @property
    def can_take(self) -> bool:
        """Whether it may have one more message now."""
        ...

    def take(self, delivery: LocalDelivery, /) -> None:
        """Take a message."""
        ...

    def take_waiting(self) -> None:
        """Take messages that wait in its queues."""
        ...


class Queue:
    """Messages in order, given in turn to the servers that may take one more."""

    __slots__ = ("_servers", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: deque[LocalDelivery] = deque()
        self._servers: deque[Taker] = deque()

    def put(self, delivery: LocalDelivery) -> None:
        """Give a message to the next free server, or keep it."""
        if not self.waiting:
            servers = self._servers
            for _ in range(len(servers)):
                server = servers[0]
                servers.rotate(-1)
                if server.can_take:
                    server.take(delivery)
                    return
        elif len(self.waiting) >= QUEUE_LIMIT:
            raise BusUnavailable(f"the queue {self.name} is full: {QUEUE_LIMIT} messages wait in it")
        self.waiting.append(delivery)

    def put_back(self, delivery: LocalDelivery) -> None:
        """Return a message that was not handled to the head of the queue."""
        self.waiting.appendleft(delivery)
        for server in self._servers:
            server.take_waiting()

    def join(self, server: Taker) -> None:
        """Add a server."""
        self._servers.append(server)

    @property
    def is_served(self) -> bool:
        """Whether a server consumes it."""
        return bool(self._servers)

    def leave(self, server: Taker) -> None:
        """Remove a server."""
        if server in self._servers:
            self._servers.remove(server)


class Exchange:
    """All queues of one local bus name: the counterpart of a broker."""

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.dead_letter_count = 0
        """Messages that no handler could process. They are logged and not kept: nothing reads them."""

    def queue(self, name: str) -> Queue:
        """Return a queue; create it if it does not exist."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(name)
        return queue

    def delete(self, name: str) -> None:
        """Delete a queue with its messages; one that a server consumes only loses its messages."""
        queue = self.queues.get(name)
        if queue is not None:
            while queue.waiting:
                queue.waiting.popleft().drop()
            if not queue.is_served:
                del self.queues[name]


class LocalDelivery:
    """A message with the queue it came from and the callbacks for its reply and its end."""

    __slots__ = ("_answer", "_ended", "_exchange", "_queue", "body", "received_at", "sender")

    def __init__(
        self,
        exchange: Exchange,
        queue: Queue,
        body: bytes,
        sender: str,
        received_at: float,
        answer: Callable[[bytes, str], None] | None,
        ended: Callable[[], None] | None,
    ) -> None:
        """`answer` takes the reply; `ended` is called when the bus holds the message no longer."""
        self._exchange = exchange
        self._queue = queue
        self.body = body
        self.sender = sender
        self.received_at = received_at
        self._answer = answer
        self._ended = ended

    async def settle(self, outcome: Outcome) -> None:
        """Give the reply to the caller, or count the message as a dead letter."""
        self.settle_now(outcome)

    def settle_now(self, outcome: Outcome) -> None:
        """Give the reply to the caller, or count the message as a dead letter, without waiting."""
        if outcome.reply is not None and self._answer is not None:
            self._answer(outcome.reply, "")  # within one process all may answer
        if outcome.dead_letter:
            self._exchange.dead_letter_count += 1
        self.drop()

    def drop(self) -> None:
        """Tell the sender's end that the bus holds the message no longer."""
        if self._ended is not None:
            self._ended()

    def give_back(self) -> None:
        """Return the message to its queue."""
        self._queue.put_back(self)


def take_in_turn(taker: Taker, queues: Sequence[Queue]) -> None:
    """Take waiting messages from the queues in turn, as many as the taker may have."""
    while taker.can_take:
        took = False
        for queue in queues:
            if queue.waiting and taker.can_take:
                taker.take(queue.waiting.popleft())
                took = True
        if not took:
            return


class LocalServer(Server):
    """A server that takes messages from queues in memory."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        deadlines: Deadlines,
        prefetch: int,
        grace: float,
        queues: list[Queue],
    ) -> None:
        super().__init__(dispatcher, deadlines, prefetch, grace)
        self._queues = queues
        for queue in self._queues:
            queue.join(self)
        self.take_waiting()

    def take_waiting(self) -> None:
        """Take messages from the queues in turn, as many as may be handled at once."""
        take_in_turn(self, self._queues)

    _next = take_waiting

    async def _detach(self) -> None:
        for queue in self._queues:
            queue.leave(self)

    async def _close(self) -> None:
        """Do nothing: the server holds nothing."""


# One for each event loop and name: buses of the same name in one loop share it; tests in other loops do not.
_exchanges: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Exchange]] = WeakKeyDictionary()


class LocalBus(BaseBus):
    """A bus that reaches only this process."""

    def __init__(
        self,
        exchange_name: str,
        *,
        clock: Clock,
        random: Random,
        pins: Mapping[str, str] | None = None,
        name: str = "",
        grace: float = 10.0,
    ) -> None:
        super().__init__(clock=clock, random=random, pins=pins, name=name, grace=grace)
        self._exchange_name = exchange_name
        self._exchange: Exchange | None = None
        self._started_at = 0.0
        self._servers: list[LocalServer] = []

    async def start(self) -> None:
        """Join the exchange of this name."""
        named = _exchanges.setdefault(asyncio.get_running_loop(), {})
        self._exchange = named.setdefault(self._exchange_name, Exchange())
        self._started_at = self._clock.now()

    async def stop(self) -> None:
        """Stop the servers and fail pending calls."""
        await asyncio.gather(*(server.stop() for server in self._servers))
        self._servers.clear()
        self._fail_all("the bus was stopped")
        self._deadlines.close()
        self._exchange = None

    async def serve(
        self,
        interface: Interface,
        handler: object,
        *,
        host: str | None = None,
        prefetch: int = DEFAULT_PREFETCH,
        shared: bool = True,
    ) -> Server:
        """Handle an interface's messages."""
        exchange = self.exchange
        queues = [exchange.queue(queue_name(interface.topic, interface.namespace))] if shared else []
        if host:
            queues.append(exchange.queue(queue_name(interface.topic, interface.namespace, host)))
        server = LocalServer(
            Dispatcher(interface, handler, self._clock, self._deadlines, self._counters),
            self._deadlines,
            prefetch,
            self._grace,
            queues,
        )
        self._servers.append(server)
        return server

    async def delete_queue(self, interface: Interface, host: str) -> None:
        """Delete the queue of a host."""
        self.exchange.delete(queue_name(interface.topic, interface.namespace, host))

    async def queue_lengths(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many messages wait in each of these queues that exists."""
        found = ((name, self.exchange.queues.get(name)) for name in queues)
        return {name: len(queue.waiting) for name, queue in found if queue is not None}

    async def probe(self) -> BusStats:
        """Return the statistics: there is no broker to ask."""
        return self.stats()

    async def _send(self, queue: str, body: bytes, message_id: str, expires: float | None) -> None:
        work = self.exchange.queue(queue)
        work.put(self.delivery(work, body, self.name))
        if len(work.waiting) >= YIELD_AT:
            await asyncio.sleep(0)  # lets the servers run while a task sends in a loop

    async def _send_call(self, queue: str, body: bytes, call_id: str, left: float) -> None:
        work = self.exchange.queues.get(queue)
        if work is None:
            raise BusUnavailable(f"no server has declared the queue {queue}")
        work.put(self.delivery(work, body, self.name, self._receive_reply))

    def delivery(
        self,
        queue: Queue,
        body: bytes,
        sender: str,
        answer: Callable[[bytes, str], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> LocalDelivery:
        """Return a message that is put into a queue now."""
        return LocalDelivery(self.exchange, queue, body, sender, self._clock.monotonic(), answer, ended)

    def monotonic(self) -> float:
        """Return the time by which deliveries were received."""
        return self._clock.monotonic()

    @property
    def exchange(self) -> Exchange:
        """The queues of this bus; raise BusUnavailable if it is not started."""
        if self._exchange is None:
            raise BusUnavailable("the bus is not started")
        return self._exchange

    def _broker_state(self) -> BrokerState:
        if self._exchange is None:
            return BrokerState()
        return BrokerState(connected_since=self._started_at, dead_letters=self._exchange.dead_letter_count)
