"""The gate: where processes of another user on this machine use the local bus of this one, by a Unix socket.

A client is treated as a host with a broker user of its own: the kernel says which user connects, and that user's
messages have one sender, whatever the client writes into them. It may write to every queue that there is, because it
sends reports, and servers check the sender (rpc/guard.py). It may make queues and take messages only where `may_serve`
allows it. What it can make this process hold is limited: connections, and messages that are not handled yet.

When a client disconnects, the messages that it had in hand return to their queues.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from functools import partial
from itertools import count

from micronova.rpc.dispatch import Outcome
from micronova.rpc.errors import BusUnavailable
from micronova.rpc.local import Exchange, LocalBus, LocalDelivery, Queue, take_in_turn
from micronova.rpc.unix import frames as f

log = logging.getLogger(__name__)

MOST_CLIENTS = 8
MOST_CONSUMERS = 64
MOST_QUEUES = 8
"""Queues of one consumer."""
MOST_PREFETCH = 1024
MOST_MESSAGES = 500
MOST_BYTES = 32 << 20
"""Messages of all clients that wait or are handled at once, and their bytes. More of them are refused: clients that
flood the bus must not use up the memory of this process. Callers repeat what was refused."""
WARN_INTERVAL = 60.0
"""Seconds between two warnings of a flood."""
_CREDENTIALS = struct.Struct("3i")  # of a process: its id, user and group


class BusGate:
    """Serves a local bus to the processes of one user."""

    def __init__(
        self, bus: LocalBus, listening: socket.socket, *, sender: str, uid: int, may_serve: Callable[[str], bool]
    ) -> None:
        """`may_serve` gets the name of a work queue."""
        self.bus = bus
        self._listening = listening
        self.sender = sender
        self._uid = uid
        self.may_serve = may_serve
        self._server: asyncio.Server | None = None
        self._clients: dict[_Client, asyncio.Task[None]] = {}
        self.ready = asyncio.Event()
        """Set when a client has said that its process has started."""
        self._messages = 0  # of the clients, that wait or are handled
        self._bytes = 0
        self._warned_at = float("-inf")

    async def start(self) -> None:
        """Accept clients."""
        self._server = await asyncio.start_unix_server(self._accept, sock=self._listening)

    async def stop_clients(self, timeout: float) -> bool:
        """Tell the clients' processes to stop, and wait until they have disconnected; return whether they have."""
        for client in self._clients:
            client.send(f.Stop())
        running = list(self._clients.values())
        return not running or not (await asyncio.wait(running, timeout=timeout))[1]

    async def stop(self) -> None:
        """Accept no more clients, and disconnect those that there are."""
        if self._server is not None:
            self._server.close()
        for task in self._clients.values():
            task.cancel()
        await asyncio.gather(*self._clients.values(), return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = f.Stream(reader, writer, f.decode_from_client)
        raw = stream.info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != self._uid:
            log.warning("a process of user %d was refused at the bus, which is for user %d only", uid, self._uid)
            stream.close()
            return
        if len(self._clients) >= MOST_CLIENTS:
            log.warning("a process of %s was refused at the bus: %d are connected", self.sender, MOST_CLIENTS)
            stream.close()
            return
        client = _Client(self, stream)
        task = asyncio.current_task()
        assert task is not None
        self._clients[client] = task
        try:
            await client.run()
        finally:
            del self._clients[client]

    def put(self, queue: Queue, body: bytes, answer: Callable[[bytes, str], None] | None = None) -> None:
        """Put a client's message into a queue; raise BusUnavailable if too many of them are not handled yet."""
        size = len(body)
        if self._messages >= MOST_MESSAGES or self._bytes + size > MOST_BYTES:
            self._warn()
            raise BusUnavailable(
                f"{self._messages} messages of {self.sender} with {self._bytes} bytes are not handled yet: "
                "repeat it later"
            )
        self._messages += 1
        self._bytes += size
        try:
            queue.put(self.bus.delivery(queue, body, self.sender, answer, partial(self._ended, size)))
        except BusUnavailable:
            self._ended(size)
            raise

    def _ended(self, size: int) -> None:
        self._messages -= 1
        self._bytes -= size

    def _warn(self) -> None:
        now = self.bus.monotonic()
        if now - self._warned_at >= WARN_INTERVAL:
            self._warned_at = now
            log.warning(
                "%s floods the bus: %d of its messages with %d bytes are not handled yet; more of them are refused. "
                "If the conductor is not slow, look at what the agents do",
                self.sender,
                self._messages,
                self._bytes,
            )


class _Client:
    """One connection."""

    def __init__(self, gate: BusGate, stream: f.Stream) -> None:
        self._gate = gate
        self._stream = stream
        self._consumers: dict[int, _Consumer] = {}
        self._numbers = count(1)
        self.held: dict[int, tuple[_Consumer, LocalDelivery]] = {}  # what the client has in hand

    async def run(self) -> None:
        """Answer the client until it disconnects."""
        self.send(f.Hello(self._gate.sender))
        try:
            while True:
                self._handle(await self._stream.receive())
                await self._stream.drain()  # who does not read is not read from either
        except (OSError, EOFError, BusUnavailable):
            pass  # the client has disconnected, or the bus is stopped
        except f.Broken as error:
            log.error("%s was disconnected from the bus: %s", self._gate.sender, error)
        except asyncio.CancelledError:
            pass  # the gate is stopped
        finally:
            for consumer in self._consumers.values():
                consumer.leave()
            self._consumers.clear()
            self._stream.close()
            held, self.held = self.held, {}
            for _, delivery in reversed(held.values()):
                delivery.give_back()

    def send(self, frame: f.Frame) -> None:
        """Send a frame to the client."""
        self._stream.send(frame)

    def deliver(self, consumer: _Consumer, delivery: LocalDelivery) -> None:
        """Give a message to the client."""
        number = next(self._numbers)
        waited = self._gate.bus.monotonic() - delivery.received_at
        try:
            self.send(f.Deliver(consumer.number, number, delivery.sender, delivery.body, waited))
        except BusUnavailable as error:  # it would be refused again and again
            log.error("a message from %s to %s is a dead letter: %s", delivery.sender, self._gate.sender, error)
            delivery.settle_now(Outcome(dead_letter=error.message))
            return
        self.held[number] = consumer, delivery
        consumer.held += 1

    def _handle(self, frame: f.Frame) -> None:
        match frame:
            case f.Send():
                self._answer(frame.request, lambda: self._put(frame.queue, frame.body))
            case f.DeleteQueue():
                self._answer(frame.request, lambda: self._delete(frame.queue))
            case f.Call():
                self._call(frame)
            case f.Settle():
                outcome = Outcome(frame.reply, frame.dead_letter)
                self._finish(frame.delivery, lambda delivery: delivery.settle_now(outcome))
            case f.GiveBack():
                self._finish(frame.delivery, LocalDelivery.give_back)
            case f.Serve():
                self._answer(frame.request, lambda: self._serve(frame))
            case f.Cancel():
                consumer = self._consumers.pop(frame.consumer, None)
                if consumer is not None:
                    consumer.leave()
                self.send(f.Done(frame.request))
            case f.Probe():
                self.send(f.Done(frame.request, number=self._gate.bus.exchange.dead_letter_count))
            case f.Ready():
                self._gate.ready.set()

    def _answer(self, request: int, work: Callable[[], None]) -> None:
        try:
            work()
        except BusUnavailable as error:
            self.send(f.Done(request, error.message))
        else:
            self.send(f.Done(request))

    def _put(self, name: str, body: bytes) -> None:
        exchange = self._gate.bus.exchange
        if name not in exchange.queues and not self._gate.may_serve(name):
            raise BusUnavailable(f"there is no queue {name}, and {self._gate.sender} may not make it")
        self._gate.put(exchange.queue(name), body)

    def _delete(self, name: str) -> None:
        if not self._gate.may_serve(name):
            raise BusUnavailable(f"{self._gate.sender} may not delete the queue {name}")
        self._gate.bus.exchange.delete(name)

    def _call(self, frame: f.Call) -> None:
        queue = self._gate.bus.exchange.queues.get(frame.queue)
        try:
            if queue is None:
                raise BusUnavailable(f"no server has declared the queue {frame.queue}")
            self._gate.put(queue, frame.body, self._reply)
        except BusUnavailable as error:
            self.send(f.CallFailed(frame.call, error.message))

    def _reply(self, body: bytes, _sender: str) -> None:
        try:
            self.send(f.Reply(body))
        except BusUnavailable as error:
            log.warning("a reply to %s was dropped, its caller will time out: %s", self._gate.sender, error)

    def _finish(self, number: int, end: Callable[[LocalDelivery], None]) -> None:
        found = self.held.pop(number, None)
        if found is not None:
            consumer, delivery = found
            consumer.held -= 1
            end(delivery)
            consumer.take_waiting()

    def _serve(self, frame: f.Serve) -> None:
        refused = [name for name in frame.queues if not self._gate.may_serve(name)]
        if refused:
            raise BusUnavailable(f"{self._gate.sender} may not take messages from {refused[0]}")
        if (
            len(self._consumers) >= MOST_CONSUMERS
            or len(frame.queues) > MOST_QUEUES
            or not 0 < frame.prefetch <= MOST_PREFETCH
        ):
            raise BusUnavailable(f"{self._gate.sender} may not serve so much")
        if frame.consumer in self._consumers:
            raise BusUnavailable(f"{self._gate.sender} has a consumer of this number")
        self._consumers[frame.consumer] = _Consumer(self, frame, self._gate.bus.exchange)


class _Consumer:
    """Takes messages for one server of the client: the counterpart of a LocalServer."""

    def __init__(self, client: _Client, frame: f.Serve, exchange: Exchange) -> None:
        self.number = frame.consumer
        self._client = client
        self._prefetch = frame.prefetch
        self.held = 0
        self._gone = False
        self._queues = [exchange.queue(name) for name in frame.queues]
        for queue in self._queues:
            queue.join(self)
        self.take_waiting()

    @property
    def can_take(self) -> bool:
        """Whether the client may have one more message."""
        return self.held < self._prefetch and not self._gone

    def take(self, delivery: LocalDelivery) -> None:
        """Give a message to the client."""
        self._client.deliver(self, delivery)

    def take_waiting(self) -> None:
        """Take messages from the queues in turn, as many as the client may have."""
        take_in_turn(self, self._queues)

    def leave(self) -> None:
        """Take no more messages."""
        self._gone = True
        for queue in self._queues:
            queue.leave(self)
