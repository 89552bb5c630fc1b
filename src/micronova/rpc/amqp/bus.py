"""The bus through RabbitMQ: one connection per process, which comes back by itself for ever.

While there is no connection, casts, fan-outs and new calls wait for it for a limited time, then BusUnavailable; the
sender treats that as a lost hint. A cast whose confirmation was lost with the connection is sent again, so that it
may arrive twice. Calls in flight when the connection is lost fail with BusUnavailable at once: their answers can no
longer arrive, and only the caller knows whether asking again is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from random import Random

from micronova.objects.clock import Clock
from micronova.rpc.amqp.channel import ChannelClosed, ConnectionLost, Received, Refused, Unroutable
from micronova.rpc.amqp.server import AmqpServer
from micronova.rpc.amqp.session import DEAD_QUEUE, PREFIX, Session
from micronova.rpc.amqp.url import parse
from micronova.rpc.base import BaseBus, fail
from micronova.rpc.bus import DEFAULT_PREFETCH
from micronova.rpc.contract import Interface
from micronova.rpc.dispatch import Dispatcher
from micronova.rpc.errors import BusUnavailable
from micronova.rpc.server import Server

log = logging.getLogger(__name__)

FIRST_DELAY = 0.1
LONGEST_DELAY = 10.0


class AmqpBus(BaseBus):
    """This process's end of a bus that runs through a broker."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        random: Random,
        pins: Mapping[str, str] | None = None,
        name: str = "",
        grace: float = 10.0,
        send_wait: float = 5.0,
    ) -> None:
        self._url = parse(url)
        super().__init__(clock=clock, random=random, pins=pins, name=name or self._url.user, grace=grace)
        self._send_wait = send_wait
        self._session: Session | None = None
        self._waiters: set[asyncio.Future[Session]] = set()
        self._servers: list[AmqpServer] = []
        self._keeper: asyncio.Task[None] | None = None
        self._next_host = random.randrange(len(self._url.hosts))
        self._dead_seen = 0

    async def start(self) -> None:
        """Connect; raises BusUnavailable if the broker cannot be reached or refuses us."""
        try:
            session = await self._connect()
        except (ConnectionLost, ChannelClosed) as error:
            raise BusUnavailable(f"cannot use the broker at {self._url}: {error}") from error
        self._keeper = asyncio.get_running_loop().create_task(self._keep(session), name="rpc-amqp")

    async def stop(self) -> None:
        """Stop the servers, fail calls in flight, disconnect."""
        await asyncio.gather(*(server.stop() for server in self._servers))
        self._servers.clear()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        session, self._session = self._session, None
        if session is not None:
            await session.connection.close()
        self._fail_all("the bus was stopped")
        for waiter in self._waiters:
            fail(waiter, BusUnavailable("the bus was stopped"))
        self._deadlines.close()

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
        server = AmqpServer(
            Dispatcher(interface, handler, self._clock, self._deadlines, self._counters),
            self._deadlines,
            prefetch,
            self._grace,
            host=host,
            shared=shared,
            name_fanout_queue=lambda: f"{PREFIX}fanout.{self._url.user}.{self._token()}",
        )
        give_up = self._clock.monotonic() + self._send_wait
        while True:
            session = await self._wait_for_session(give_up)
            try:
                await server.attach(session)
            except ConnectionLost:
                continue
            except ChannelClosed as error:
                raise BusUnavailable(f"the broker does not let us serve {interface!r}: {error}") from error
            self._servers.append(server)  # from now on every new connection brings it back
            return server

    async def count_dead_letters(self) -> int:
        """Ask the broker how many messages lie in the dead-letter queue."""
        session = await self._wait_for_session(self._clock.monotonic() + self._send_wait)
        try:
            self._dead_seen = await session.depth(DEAD_QUEUE)
        except (ConnectionLost, ChannelClosed) as error:
            raise BusUnavailable(f"the dead letters cannot be counted: {error}") from error
        return self._dead_seen

    async def _send(self, queue: str, body: bytes, message_id: str) -> None:
        name = PREFIX + queue
        give_up = self._clock.monotonic() + self._send_wait
        while True:
            session = await self._wait_for_session(give_up)
            try:
                await self._publish(session, "", name, body, message_id, give_up)
            except Unroutable:
                try:
                    await session.ensure_work_queue(name)
                except ChannelClosed as error:
                    raise BusUnavailable(f"there is no queue {name}, nor may we make it: {error}") from error
                except ConnectionLost:
                    continue
            except ConnectionLost:
                continue
            else:
                return

    async def _send_to_all(self, place: str, body: bytes, message_id: str) -> None:
        give_up = self._clock.monotonic() + self._send_wait
        while True:
            session = await self._wait_for_session(give_up)
            try:
                exchange = await session.ensure_fanout(place)
                await self._publish(session, exchange, "", body, message_id, give_up)
            except ChannelClosed as error:
                raise BusUnavailable(f"fan-out to {place} is not possible: {error}") from error
            except ConnectionLost:
                continue
            else:
                return

    async def _send_call(self, queue: str, body: bytes, call_id: str, left: float) -> None:
        give_up = self._clock.monotonic() + min(self._send_wait, left)
        while True:
            session = await self._wait_for_session(give_up)
            try:
                # No need to wait for a confirmation: the answer will be one.
                session.calls.publish(
                    "", PREFIX + queue, body, message_id=call_id, reply_to=session.reply_to, mandatory=True
                )
            except ConnectionLost:
                continue
            else:
                return

    async def _publish(
        self, session: Session, exchange: str, key: str, body: bytes, message_id: str, give_up: float
    ) -> None:
        work = not exchange
        confirmation = session.casts.publish(
            exchange, key, body, message_id=message_id, mandatory=work, persistent=work
        )
        assert confirmation is not None
        timer = self._deadlines.after(
            give_up - self._clock.monotonic(),
            lambda: fail(confirmation, Refused("not confirmed in time")),
        )
        try:
            await confirmation
        except Refused as error:
            raise BusUnavailable(f"the broker did not take a message to {exchange or key}: {error}") from error
        finally:
            timer.cancel()

    async def _wait_for_session(self, give_up: float) -> Session:
        session = self._session
        if session is not None and not session.connection.closed.done():
            return session
        if self._keeper is None:
            raise BusUnavailable("the bus is not started")
        waiter: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        unavailable = BusUnavailable(f"there is no connection to the broker at {self._url}")
        timer = self._deadlines.after(give_up - self._clock.monotonic(), lambda: fail(waiter, unavailable))
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    async def _keep(self, session: Session) -> None:
        """Have a session, for ever."""
        while True:
            reason = await asyncio.shield(session.connection.closed)
            log.warning("the broker at %s is lost: %s", self._url, reason)
            self._session = None
            self._fail_all(f"the connection to the broker was lost: {reason}")
            session = await self._reconnect()
            log.warning("the broker at %s is back", self._url)

    async def _reconnect(self) -> Session:
        delay = FIRST_DELAY
        while True:
            # Jitter: a broker that comes back must not meet all its hosts in the same moment.
            await self._clock.sleep(delay * self._random.uniform(0.5, 1.0))
            try:
                return await self._connect()
            except (ConnectionLost, ChannelClosed) as error:
                log.warning("the broker at %s is still lost: %s", self._url, error)
            delay = min(delay * 2, LONGEST_DELAY)

    async def _connect(self) -> Session:
        host = self._url.hosts[self._next_host % len(self._url.hosts)]
        self._next_host += 1
        session = await Session.open(
            self._url,
            host,
            name=self.name,
            clock=self._clock,
            token=self._token(),
            on_reply=self._on_reply,
            on_unroutable=self._on_unroutable,
        )
        try:
            for server in list(self._servers):
                await server.attach(session)
        except BaseException:
            session.connection.abort()
            raise
        self._session = session
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(session)
        return session

    def _on_reply(self, received: Received) -> None:
        self._receive_reply(received.body)

    def _on_unroutable(self, call_id: str) -> None:
        self._fail(call_id, BusUnavailable("nobody serves the queue that the call was sent to"))

    def _token(self) -> str:
        """A name that nobody else has or guesses."""
        return f"{self._random.getrandbits(128):032x}"

    def _dead_letters(self) -> int:
        return self._dead_seen

    def _connected(self) -> bool:
        return self._session is not None
