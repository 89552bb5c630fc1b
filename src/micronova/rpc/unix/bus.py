"""The bus of a process that has none of its own: it uses the local bus of another process, through that one's gate.

It stays connected for as long as it runs: a process that is started again finds the gate, and a gate that is started
again is found. While there is no connection, casts and new calls wait for it for at most `send_wait` seconds, then they
raise BusUnavailable. Calls that wait for an answer when the connection is lost raise it at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from micronova.objects.clock import Clock
from micronova.rpc.base import BaseBus, fail
from micronova.rpc.bus import DEFAULT_PREFETCH, BrokerState, BusStats
from micronova.rpc.contract import Interface, queue_name
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher, Outcome
from micronova.rpc.errors import BusUnavailable
from micronova.rpc.server import Server
from micronova.rpc.unix import frames as f

log = logging.getLogger(__name__)

FIRST_DELAY = 0.05
LONGEST_DELAY = 2.0
START_WAIT = 120.0
"""Seconds until a gate that is there answers for the first time: its process may have begun to start just now."""


class ConnectionLost(Exception):
    """The connection ended before the gate answered."""


class Connection:
    """One connection to the gate, and the requests that wait for its answers."""

    def __init__(self, stream: f.Stream, sender: str) -> None:
        self.stream = stream
        self.sender = sender
        self._numbers = count(1)
        self._requests: dict[int, asyncio.Future[f.Done]] = {}
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def request(self, make: Callable[[int], f.Frame]) -> f.Done:
        """Send a request and return its answer; raise ConnectionLost if none can come, BusUnavailable if it failed."""
        number = next(self._numbers)
        answer: asyncio.Future[f.Done] = asyncio.get_running_loop().create_future()
        self._requests[number] = answer
        try:
            if self.closed.done():
                raise ConnectionLost(self.closed.result())
            self.stream.send(make(number))
            await self.drain()
            done = await answer
        finally:
            del self._requests[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # marks it as retrieved
        if done.error:
            raise BusUnavailable(done.error)
        return done

    async def drain(self) -> None:
        """Wait until the gate has read so much that more may be sent."""
        try:
            await self.stream.drain()
        except OSError as error:
            self.lose(str(error))
            raise ConnectionLost(str(error)) from error

    def answered(self, done: f.Done) -> None:
        """Give an answer to the request that it is for."""
        waiting = self._requests.get(done.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(done)

    def lose(self, reason: str) -> None:
        """Fail what waits for the gate."""
        self.stream.close()
        if not self.closed.done():
            self.closed.set_result(reason)
        for waiting in self._requests.values():
            fail(waiting, ConnectionLost(reason))


class UnixDelivery:
    """A message from the gate. What becomes of it is of interest only to the connection that it came by."""

    __slots__ = ("_connection", "_number", "body", "received_at", "sender")

    def __init__(self, connection: Connection, frame: f.Deliver, received_at: float) -> None:
        self._connection = connection
        self._number = frame.delivery
        self.body = frame.body
        self.sender = frame.sender
        self.received_at = received_at

    async def settle(self, outcome: Outcome) -> None:
        """Send the reply, or say that the message is a dead letter."""
        try:
            self._connection.stream.send(f.Settle(self._number, outcome.reply, outcome.dead_letter))
        except BusUnavailable as error:
            log.warning("a reply was dropped, its caller will time out: %s", error)
            self._connection.stream.send(f.Settle(self._number, None, ""))
        try:
            await self._connection.drain()
        except ConnectionLost:
            pass  # the gate gives the message to the next connection

    def give_back(self) -> None:
        """Return the message to its queue."""
        self._connection.stream.send(f.GiveBack(self._number))


class UnixServer(Server):
    """A server whose messages come from the gate."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        deadlines: Deadlines,
        prefetch: int,
        grace: float,
        *,
        number: int,
        queues: list[str],
    ) -> None:
        super().__init__(dispatcher, deadlines, prefetch, grace)
        self.number = number
        self._queues = queues
        self._connection: Connection | None = None

    async def attach(self, connection: Connection) -> None:
        """Have the gate send messages by a connection, unless it does so already."""
        if self._connection is not connection:
            await connection.request(lambda n: f.Serve(n, self.number, self._queues, self._prefetch))
            self._connection = connection

    def receive(self, delivery: UnixDelivery) -> None:
        """Handle a message, or give it back if the server stops."""
        if self.can_take:
            self.take(delivery)
        else:
            delivery.give_back()

    def _next(self) -> None:
        """Do nothing: the gate sends the next message when this one is settled."""

    async def _detach(self) -> None:
        if self._connection is not None:
            try:
                await self._connection.request(lambda n: f.Cancel(n, self.number))
            except (ConnectionLost, BusUnavailable):
                pass  # nothing comes by it any more

    async def _close(self) -> None:
        """Do nothing: the server holds nothing."""


class UnixBus(BaseBus):
    """This process's end of a bus that another process of the machine has."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock,
        random: Random,
        pins: Mapping[str, str] | None = None,
        name: str = "",
        grace: float = 10.0,
        send_wait: float = 5.0,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """`on_stop` is called when the other process wants this one to stop."""
        super().__init__(clock=clock, random=random, pins=pins, name=name, grace=grace)
        self._path = path
        self._send_wait = send_wait
        self.on_stop = on_stop
        self._connection: Connection | None = None
        self._connected_at = 0.0
        self._waiters: set[asyncio.Future[Connection]] = set()
        self._servers: dict[int, UnixServer] = {}
        self._numbers = count(1)
        self._staying: asyncio.Task[None] | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._dead_letters = 0
        self._probe_error = ""

    async def start(self) -> None:
        """Connect; raise BusUnavailable if the gate does not answer in time."""
        try:
            async with asyncio.timeout(START_WAIT):
                connection = await self._connect()
        except (OSError, EOFError, ConnectionLost, f.Broken, TimeoutError) as error:
            raise BusUnavailable(f"cannot use the bus at {self._path}: {error or 'it does not answer'}") from error
        self._staying = asyncio.get_running_loop().create_task(self._stay_connected(connection), name="rpc-unix")

    async def stop(self) -> None:
        """Stop the servers, fail pending calls, disconnect."""
        await asyncio.gather(*(server.stop() for server in self._servers.values()))
        self._servers.clear()
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.wait([self._staying])
            self._staying = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.lose("the bus was stopped")
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        self._fail_all("the bus was stopped")
        for waiter in self._waiters:
            fail(waiter, BusUnavailable("the bus was stopped"))
        self._deadlines.close()

    def announce_ready(self) -> None:
        """Tell the other process that this one has started all that it runs."""
        if self._connection is not None:
            self._connection.stream.send(f.Ready())

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
        queues = [queue_name(interface.topic, interface.namespace)] if shared else []
        if host:
            queues.append(queue_name(interface.topic, interface.namespace, host))
        server = UnixServer(
            Dispatcher(interface, handler, self._clock, self._deadlines, self._counters),
            self._deadlines,
            prefetch,
            self._grace,
            number=next(self._numbers),
            queues=queues,
        )
        self._servers[server.number] = server  # before: messages may come with the answer
        try:
            await self._until_sent(server.attach, self._clock.monotonic() + self._send_wait)
        except BaseException:
            del self._servers[server.number]
            raise
        return server

    async def delete_queue(self, interface: Interface, host: str) -> None:
        """Delete the queue of a host; the gate allows it only for those that this process may serve."""
        name = queue_name(interface.topic, interface.namespace, host)

        async def delete(connection: Connection) -> None:
            await connection.request(lambda n: f.DeleteQueue(n, name))

        await self._until_sent(delete, self._clock.monotonic() + self._send_wait)

    async def probe(self) -> BusStats:
        """Ask the gate for the dead letters, then return the statistics."""
        self._probe_error = ""

        async def ask(connection: Connection) -> None:
            self._dead_letters = (await connection.request(f.Probe)).number

        try:
            await self._until_sent(ask, self._clock.monotonic() + self._send_wait)
        except BusUnavailable as error:
            self._probe_error = str(error)
        return self.stats()

    async def _send(self, queue: str, body: bytes, message_id: str) -> None:
        async def send(connection: Connection) -> None:
            await connection.request(lambda n: f.Send(n, queue, body))

        await self._until_sent(send, self._clock.monotonic() + self._send_wait)

    async def _send_call(self, queue: str, body: bytes, call_id: str, left: float) -> None:
        async def send(connection: Connection) -> None:
            connection.stream.send(f.Call(call_id, queue, body))
            await connection.drain()

        await self._until_sent(send, self._clock.monotonic() + min(self._send_wait, left))

    async def _until_sent(self, send: Callable[[Connection], Awaitable[None]], give_up: float) -> None:
        """Call a coroutine function with a connection, again with the next one if the connection is lost."""
        while True:
            connection = await self._wait_for_connection(give_up)
            try:
                async with asyncio.timeout(give_up - self._clock.monotonic()):
                    await send(connection)
            except ConnectionLost:
                continue
            except TimeoutError:
                raise BusUnavailable(f"the bus at {self._path} does not accept messages in time") from None
            return

    async def _wait_for_connection(self, give_up: float) -> Connection:
        connection = self._connection
        if connection is not None and not connection.closed.done():
            return connection
        if self._staying is None:
            raise BusUnavailable("the bus is not started")
        waiter: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        unavailable = BusUnavailable(f"there is no connection to the bus at {self._path}")
        timer = self._deadlines.after(give_up - self._clock.monotonic(), lambda: fail(waiter, unavailable))
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    async def _stay_connected(self, connection: Connection) -> None:
        while True:
            reason = await asyncio.shield(connection.closed)
            log.warning("the connection to the bus at %s is lost: %s", self._path, reason)
            self._connection = None
            self._fail_all(f"the connection to the bus was lost: {reason}")
            connection = await self._reconnect()
            log.warning("the connection to the bus at %s is back", self._path)

    async def _reconnect(self) -> Connection:
        delay = FIRST_DELAY
        while True:
            await self._clock.sleep(delay)
            try:
                return await self._connect()
            except (OSError, EOFError, ConnectionLost, BusUnavailable, f.Broken) as error:
                log.debug("the bus at %s still cannot be used: %s", self._path, error)
            delay = min(delay * 2, LONGEST_DELAY)

    async def _connect(self) -> Connection:
        stream = f.Stream(*await asyncio.open_unix_connection(self._path))
        try:
            hello = f.decode_from_gate(await stream.receive())
            if not isinstance(hello, f.Hello):
                raise f.Broken("it does not begin with a greeting")
            connection = Connection(stream, hello.sender)
            reading = asyncio.get_running_loop().create_task(self._read(connection), name="rpc-unix-read")
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
            for server in list(self._servers.values()):
                await server.attach(connection)
        except BaseException:
            stream.close()
            raise
        self._connection, self._connected_at = connection, self._clock.now()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(connection)
        return connection

    async def _read(self, connection: Connection) -> None:
        reason = "it was closed"
        try:
            while True:
                self._handle(connection, f.decode_from_gate(await connection.stream.receive()))
        except (OSError, EOFError):
            pass
        except (f.Broken, msgspec.DecodeError) as error:
            reason = str(error)
        finally:
            connection.lose(reason)

    def _handle(self, connection: Connection, frame: f.Frame) -> None:
        match frame:
            case f.Deliver():
                server = self._servers.get(frame.consumer)
                # The time in the queue counts, as it does for servers in the process with the bus.
                delivery = UnixDelivery(connection, frame, self._clock.monotonic() - frame.waited)
                if server is None:
                    delivery.give_back()
                else:
                    server.receive(delivery)
            case f.Reply():
                self._receive_reply(frame.body, "")  # the gate says who answers
            case f.Done():
                connection.answered(frame)
            case f.CallFailed():
                self._fail(frame.call, BusUnavailable(frame.error))
            case f.Stop():
                if self.on_stop is not None:
                    self.on_stop()

    def _broker_state(self) -> BrokerState:
        connection = self._connection
        since = self._connected_at if connection is not None and not connection.closed.done() else None
        return BrokerState(connected_since=since, dead_letters=self._dead_letters, probe_error=self._probe_error)
