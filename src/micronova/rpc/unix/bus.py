"""The bus of a process that has none of its own: it uses the local bus of another process, through that one's gate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from random import Random

from micronova.objects.clock import Clock
from micronova.rpc.base import fail
from micronova.rpc.bus import DEFAULT_PREFETCH, BusStats
from micronova.rpc.contract import Interface, queue_name
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher, Outcome
from micronova.rpc.errors import BusUnavailable, ConnectionLost
from micronova.rpc.reconnecting import AttachedServer, ReconnectingBus
from micronova.rpc.server import Server
from micronova.rpc.unix import frames as f

log = logging.getLogger(__name__)

LONGEST_DELAY = 2.0
START_NOTICE = 60.0
"""Seconds after which the log says that a gate is there and does not answer; then twice as long each time."""
ANSWER_SECONDS = 20.0
"""Seconds until the gate answers that a server may take messages."""


class Connection:
    """One connection to the gate, and the requests that wait for its answers."""

    def __init__(self, stream: f.Stream, sender: str) -> None:
        self.stream = stream
        self.sender = sender
        self._numbers = count(1)
        self._requests: dict[int, asyncio.Future[f.Done]] = {}
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reading: asyncio.Task[None] | None = None
        """Handles what the gate sends."""

    @property
    def is_open(self) -> bool:
        """Whether the gate may still answer."""
        return not self.closed.done()

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
            self.abort(str(error))
            raise ConnectionLost(str(error)) from error

    def answered(self, done: f.Done) -> None:
        """Give an answer to the request that it is for."""
        waiting = self._requests.get(done.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(done)

    def abort(self, reason: str) -> None:
        """Disconnect, and fail what waits for the gate."""
        self.stream.close()
        if not self.closed.done():
            self.closed.set_result(reason)
        for waiting in self._requests.values():
            fail(waiting, ConnectionLost(reason))

    async def close(self) -> None:
        """Disconnect, and wait until nothing is read any more."""
        self.abort("closed")
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait([self.reading])


class UnixDelivery:
    """A message from the gate. What becomes of it is of interest only to the connection that it came by."""

    __slots__ = ("_connection", "_number", "body", "received_at", "sender")

    def __init__(self, connection: Connection, frame: f.Deliver, received_at: float) -> None:
        self._connection = connection
        self._number = frame.delivery
        self.body = frame.body
        self.sender = frame.sender
        self.received_at = received_at

    @property
    def is_lost(self) -> bool:
        """Whether its connection is lost: the gate gives the message to the next one."""
        return not self._connection.is_open

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


class UnixServer(AttachedServer[Connection]):
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
        """Have the gate send messages by a connection."""
        if self._connection is connection or self._stopping:
            return
        self._forget_backlog()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await connection.request(lambda n: f.Serve(n, self.number, self._queues, self._prefetch))
        except TimeoutError:
            reason = f"the gate did not answer in {ANSWER_SECONDS:.0f} seconds"
            connection.abort(reason)
            raise ConnectionLost(reason) from None
        self._connection = connection

    async def _detach(self) -> None:
        self._return_backlog()
        if self._connection is not None:
            try:
                await self._connection.request(lambda n: f.Cancel(n, self.number))
            except (ConnectionLost, BusUnavailable):
                pass  # nothing comes by it any more

    async def _close(self) -> None:
        """Do nothing: the server holds nothing."""


class UnixBus(ReconnectingBus[Connection]):
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
        super().__init__(
            peer=f"the bus at {path}",
            longest_delay=LONGEST_DELAY,
            send_wait=send_wait,
            clock=clock,
            random=random,
            pins=pins,
            name=name,
            grace=grace,
        )
        self._path = path
        self.on_stop = on_stop
        self._is_ready = False
        self._numbers = count(1)
        self._by_number: dict[int, UnixServer] = {}

    def announce_ready(self) -> None:
        """Tell the other process, also one that is started again, that this one has started all that it runs."""
        self._is_ready = True
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
        self._by_number[server.number] = server  # before: messages may come with the answer
        try:
            await self._attach(server)
        except BaseException:
            del self._by_number[server.number]
            raise
        return server

    async def delete_queue(self, interface: Interface, host: str) -> None:
        """Delete the queue of a host; the gate allows it only for those that this process may serve."""
        name = queue_name(interface.topic, interface.namespace, host)

        async def delete(connection: Connection) -> None:
            await connection.request(lambda n: f.DeleteQueue(n, name))

        await self._until_sent(delete, self._give_up_at())

    async def queue_lengths(self, queues: Sequence[str]) -> dict[str, int]:
        """Raise BusUnavailable: a host is not told how many messages wait for others."""
        raise BusUnavailable("the gate does not tell how many messages wait")

    async def probe(self) -> BusStats:
        """Ask the gate for the dead letters, then return the statistics."""
        self._probe_error = ""

        async def ask(connection: Connection) -> None:
            self._dead_letters = (await connection.request(f.Probe)).number

        try:
            await self._until_sent(ask, self._give_up_at())
        except BusUnavailable as error:
            self._probe_error = str(error)
        return self.stats()

    async def _send(self, queue: str, body: bytes, message_id: str, expires: float | None) -> None:
        async def send(connection: Connection) -> None:
            await connection.request(lambda n: f.Send(n, queue, body))

        await self._until_sent(send, self._give_up_at())

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
                raise BusUnavailable(f"{self._peer} does not accept messages in time") from None
            return

    async def _open(self) -> Connection:
        stream = None
        try:
            stream = f.Stream(*await asyncio.open_unix_connection(self._path), f.decode_from_gate)
            hello = await self._receive_greeting(stream)
            if not isinstance(hello, f.Hello):
                raise f.Broken("it does not begin with a greeting")
        except BaseException as error:
            if stream is not None:
                stream.close()
            if isinstance(error, EOFError):
                raise ConnectionLost("it closed the connection at once") from error
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                raise ConnectionLost(
                    "the cloud that this process belongs to does not run: start `micronova up`"
                ) from error
            if isinstance(error, OSError | f.Broken):
                raise ConnectionLost(str(error)) from error
            raise
        connection = Connection(stream, hello.sender)
        if self._is_ready:
            stream.send(f.Ready())
        connection.reading = asyncio.get_running_loop().create_task(self._read(connection), name="rpc-unix-read")
        return connection

    async def _receive_greeting(self, stream: f.Stream) -> f.Frame:
        """Return the first frame, however long it takes: the other process may be migrating its database.

        If that process ends, so does the connection.
        """
        greeting = asyncio.ensure_future(stream.receive())
        notice = START_NOTICE
        try:
            while not (await asyncio.wait({greeting}, timeout=notice))[0]:
                log.warning(
                    "%s does not answer yet, which is waited for: its process is starting, or hangs", self._peer
                )
                notice *= 2
            return greeting.result()
        finally:
            greeting.cancel()

    async def _read(self, connection: Connection) -> None:
        reason = "it was closed"
        try:
            while True:
                self._handle(connection, await connection.stream.receive())
        except (OSError, EOFError):
            pass
        except f.Broken as error:
            reason = str(error)
        finally:
            connection.abort(reason)

    def _handle(self, connection: Connection, frame: f.Frame) -> None:
        match frame:
            case f.Deliver():
                server = self._by_number.get(frame.consumer)
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
